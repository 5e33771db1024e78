"""Caches of rows on a GPU, for attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from dflash_plugins.launch import Compaction, Run

from dflash_trt.bundle.cache_kinds import CacheKind
from dflash_trt.engines.caches import RowCaches, SlotRows, by_kind, whole
from dflash_trt.engines.device.stream import on

Tensor = torch.Tensor


class DevicePool:
    """Tensors [slots, heads, rows, size] of one kind of caches. `RowPool` in engines/caches.py documents the methods.

    The stream orders copies on the device, so they need no wait.
    """

    def __init__(self, arrays: Mapping[str, Tensor], stream: Any, slots: int) -> None:
        self.arrays, self._stream = arrays, stream
        self.records = [SlotRows() for _ in range(slots)]
        self.compaction: Compaction | None = None  # one kernel for all layers
        self.row_bytes = sum(rows.shape[1] * rows.shape[3] * rows.element_size() for rows in arrays.values())

    def copy(self, source: int, target: int, count: int) -> None:
        with on(self._stream):
            for rows in self.arrays.values():
                rows[target, :, :count].copy_(rows[source, :, :count])

    def take(self, slot: int, first: int, stop: int) -> list[Tensor]:
        try:
            with on(self._stream):
                return [rows[slot, :, first:stop].clone() for rows in self.arrays.values()]
        except torch.OutOfMemoryError as error:
            raise MemoryError(str(error)) from error

    def write(self, rows: Sequence[Tensor], slot: int, first: int) -> None:
        with on(self._stream):
            for mine, given in zip(self.arrays.values(), rows, strict=True):
                mine[slot, :, first : first + given.shape[1]].copy_(given)

    def drop(self, slot: int, count: int, left: int) -> None:
        with on(self._stream):
            for rows in self.arrays.values():
                kept = rows[slot, :, count : count + left]
                rows[slot, :, :left].copy_(kept if left <= count else kept.clone())

    def compact(self, slot: int, start: int, nodes: Sequence[int]) -> None:
        """One kernel if `compact_by` gave one, else copies for each layer."""
        with on(self._stream):
            if self.compaction is not None:
                self.compaction(slot, start, nodes)
                return
            for rows in self.arrays.values():
                written = rows[slot, :, start:]
                written[:, : len(nodes)] = written[:, list(nodes)]  # the right side is a copy

    def compact_by(self, run: Run, most: int) -> None:
        """Let a kernel move up to `most` rows."""
        if self.arrays:
            with on(self._stream):
                self.compaction = Compaction(list(self.arrays.values()), most, run)

    def clear(self, slot: int, first: int, last: int | None) -> None:
        with on(self._stream):
            for rows in self.arrays.values():
                rows[slot, :, first:last].zero_()


class DeviceRows(RowCaches[DevicePool]):
    """The rows of every slot on a GPU. Without `kinds`, every layer keeps all rows."""

    def __init__(
        self, arrays: Mapping[str, Tensor], stream: Any, slots: int, kinds: Sequence[CacheKind] = ()
    ) -> None:
        kinds = kinds or (whole(0),)
        parts = by_kind(kinds, arrays)
        pools = [
            (kind, DevicePool({name: arrays[name] for name in names}, stream, slots))
            for kind, names in zip(kinds, parts, strict=True)
        ]
        super().__init__(pools, slots)
