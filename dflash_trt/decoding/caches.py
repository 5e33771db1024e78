"""The caches of a runner by slot, and kept copies of them.

A slot's length is the number of tokens that its caches have read. Attention keeps one row per token, so its rows can
be cut to any shorter length, but layers with a window drop the rows behind it (dflash_trt/bundle/cache_kinds.py), and
can be cut only as far as the window before the cut is still there. A recurrent layer keeps a state that belongs to one
length and cannot be cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A copy of a slot's cache content for positions start .. stop-1. It is freed when nothing refers to it.

    lengths: the lengths from start + 1 to stop, ascending, to which a slot can be restored with this copy after the
    copies of the earlier positions.
    data: the content. Only the caches read it.
    size: bytes of the copy.
    """

    start: int
    stop: int
    lengths: Sequence[int]
    data: Any
    size: int


class Caches(Protocol):
    """The caches of one runner. A length argument must be one of the slot's `cut_lengths`.

    kept_slots: slots after those that passes work on, for rows of ended requests. They share the memory of the others.
        Windows and states are not part of them: there they can be cut to the lengths that `mark` gave.
    """

    kept_slots: int

    def cut_lengths(self, slot: int, length: int) -> Sequence[int]:
        """The lengths to which a slot of this length can be cut, including its own, without 0; ascending."""

    def kept_bytes(self, length: int) -> int:
        """The most bytes of a copy of this many positions."""

    @property
    def tokens(self) -> int | None:
        """The positions of all slots together for which there is memory; None: each slot may have the most."""

    def reserve(self, slot: int, length: int) -> bool:
        """Let a slot hold so many positions, and what passes write after them. Returns whether there is memory."""

    def release(self, slot: int, length: int = 0) -> None:
        """Forget a slot's content from this length on."""

    def move(self, source: int, target: int, length: int) -> None:
        """As `copy`, and forget the first one's content."""

    def copy(self, source: int, target: int, length: int) -> None:
        """Give a slot the first `length` positions of another one."""

    def mark(self, slot: int, length: int, shortest: int) -> None:
        """Copy what lengths from `shortest` to `length`, the slot's own, need of windows and states. A few such copies
        go with the slot. Raises MemoryError if there is no memory.
        """

    def adopt(self, source: int, target: int) -> None:
        """Give a slot the copies of another one, whose tokens are the beginning of its own."""

    @property
    def marked_bytes(self) -> int:
        """Memory of all such copies."""

    def keep(self, slot: int, start: int, stop: int, shortest: int) -> Snapshot:
        """Copy positions start .. stop-1 out of a slot, to restore lengths from `shortest` on.

        Layers with a window leave out the rows that no such length needs. Raises MemoryError if there is no memory.
        """

    def lacks(self, slot: int, kept: Snapshot, shortest: int) -> bool:
        """Whether a slot has all content of a copy, and more of its positions that lengths from `shortest` on need."""

    def restore(self, slot: int, kept: Sequence[Snapshot], length: int) -> None:
        """Give a slot the first `length` positions of adjacent copies from position 0 on."""

    def compact(self, slot: int, start: int, nodes: Sequence[int]) -> None:
        """Move the node that a pass wrote at start + nodes[i] to position start + i. `nodes` are ascending."""

    def clear(self, slot: int, first: int = 0) -> None:
        """Set the content of the positions of a slot from `first` on to 0."""
