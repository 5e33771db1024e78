"""The kinds of caches in a pair: layers that see equally far back keep the same rows of a sequence.

Row j of a sequence's cache holds position base + j. In layers that see everything, the base is 0. In layers with a
window it follows the sequence's committed length, so that rows behind the window are dropped, and it depends on
nothing else: neither drafts that were refused nor the way in which tokens were split into passes change it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheKind:
    """The caches of all layers with one window.

    window: positions that a row sees, itself included. None: all.
    stride: bases are multiples of it, so rows move down by whole strides. 1 without a window.
    rows: cache rows of a sequence.
    row_bytes: bytes of one row in all these layers, keys and values.
    layers: indices of the layers.
    """

    window: int | None
    stride: int
    rows: int
    row_bytes: int
    layers: tuple[int, ...]

    @property
    def input(self) -> str:
        """The graph's input that takes the bases, int64 [B]."""
        return base_input(self.window)

    def first(self, length: int) -> int:
        """The first position that the row after `length` tokens sees."""
        return 0 if self.window is None else max(0, length - self.window + 1)

    def base(self, length: int) -> int:
        """The position of the first row of a sequence with `length` committed tokens."""
        return self.first(length) // self.stride * self.stride

    def shortest(self, first: int) -> int:
        """The least length, 1 or more, that sees no position before `first`."""
        return 1 if first == 0 or self.window is None else first + self.window - 1


def base_input(window: int | None) -> str:
    """The name of a graph's input for the bases of layers with a window."""
    return f"base.{window}"


def read_kind(fields: Mapping[str, Any]) -> CacheKind:
    return CacheKind(**{**fields, "layers": tuple(fields["layers"])})


def rows_by_window(
    windows: Iterable[int | None], stride: int, capacity: int, most_written: int
) -> dict[int | None, int]:
    """The cache rows of a sequence by the window of a layer (None: no window).

    capacity: those of layers that see everything. most_written: rows that a pass writes, at most.
    """
    return {
        window: capacity if window is None else min(capacity, window - 1 + stride - 1 + most_written)
        for window in windows
    }


def most_written(role: str, chunk: int, block_size: int) -> int:
    """The most rows of a sequence that a pass of "target" or "drafter" writes, with one for a sink.

    chunk: the most tokens of a prompt in one pass. A drafter writes its block after features.
    """
    return max(chunk, block_size) + (block_size if role == "drafter" else 0) + 1
