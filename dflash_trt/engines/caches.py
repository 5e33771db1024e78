"""Caches of rows, for attention: one row per token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from dflash_trt.decoding.caches import Kept


class RowCaches:
    """Arrays [slots, heads, capacity, size]. Row j of a slot belongs to position j.

    A slot can be cut to any length without work, because later rows are overwritten.
    """

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        self.arrays = arrays
        self.row_bytes: int = sum(a.shape[1] * a.shape[3] * a.itemsize for a in arrays.values())

    def lengths(self, slot: int, length: int) -> Sequence[int]:
        return range(1, length + 1)

    def kept_bytes(self, length: int) -> int:
        return length * self.row_bytes

    def copy(self, source: int, target: int, length: int) -> None:
        with self._in_order():
            for rows in self.arrays.values():
                rows[target, :, :length] = rows[source, :, :length]

    def keep(self, slot: int, start: int, stop: int) -> Kept:
        with self._in_order():
            copies = [self._copied(rows[slot, :, start:stop]) for rows in self.arrays.values()]
        return Kept(start, stop, range(start + 1, stop + 1), copies)

    def restore(self, slot: int, kept: Sequence[Kept], length: int) -> None:
        with self._in_order():
            for each in kept:
                stop = min(each.stop, length)
                for rows, copy in zip(self.arrays.values(), each.data, strict=True):
                    rows[slot, :, each.start : stop] = copy[:, : stop - each.start]

    def compact(self, slot: int, start: int, nodes: Sequence[int]) -> None:
        with self._in_order():
            for rows in self.arrays.values():
                written = rows[slot, :, start:]
                written[:, : len(nodes)] = written[:, list(nodes)]  # the right side is a copy

    def clear(self, slot: int, first: int = 0, last: int | None = None) -> None:
        with self._in_order():
            for rows in self.arrays.values():
                self._zero(rows[slot, :, first:last])

    def _in_order(self) -> AbstractContextManager[Any]:
        """The work inside is ordered behind the passes that were enqueued before."""
        return nullcontext()

    def _copied(self, rows: Any) -> Any:
        return rows.copy()

    def _zero(self, rows: Any) -> None:
        np.copyto(rows, 0, where=rows != 0)  # memory that was never written stays untouched
