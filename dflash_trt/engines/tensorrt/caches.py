"""Caches of rows on a GPU, for attention: one row per token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dflash_trt.decoding.caches import Snapshot
from dflash_trt.engines.tensorrt.round_steps import kernels_run

Tensor = torch.Tensor


class RowCaches:
    """Tensors [slots, heads, capacity, size]. Row j of a slot belongs to position j.

    A slot can be cut to any length without work, because later rows are overwritten. The stream orders copies on the
    device, so they need no wait.
    """

    def __init__(self, arrays: Mapping[str, Tensor], stream: Any) -> None:
        self.arrays, self._stream = arrays, stream
        self.kernels = any(kernels_run(rows.device) for rows in arrays.values())
        self._kernel: Any = None
        self.row_bytes = sum(rows.shape[1] * rows.shape[3] * rows.element_size() for rows in arrays.values())

    def lengths(self, slot: int, length: int) -> Sequence[int]:
        return range(1, length + 1)

    def kept_bytes(self, length: int) -> int:
        return length * self.row_bytes

    def copy(self, source: int, target: int, length: int) -> None:
        with torch.cuda.stream(self._stream):
            for rows in self.arrays.values():
                rows[target, :, :length].copy_(rows[source, :, :length])

    def keep(self, slot: int, start: int, stop: int) -> Snapshot:
        try:
            with torch.cuda.stream(self._stream):
                copies = [rows[slot, :, start:stop].clone() for rows in self.arrays.values()]
        except torch.OutOfMemoryError as error:
            raise MemoryError(str(error)) from error
        return Snapshot(start, stop, range(start + 1, stop + 1), copies, self.kept_bytes(stop - start))

    def restore(self, slot: int, kept: Sequence[Snapshot], length: int) -> None:
        with torch.cuda.stream(self._stream):
            for each in kept:
                stop = min(each.stop, length)
                for rows, copy in zip(self.arrays.values(), each.data, strict=True):
                    rows[slot, :, each.start : stop].copy_(copy[:, : stop - each.start])

    def compact(self, slot: int, start: int, nodes: Sequence[int]) -> None:
        """One kernel for all layers if Triton is installed to compile it, else copies for each."""
        with torch.cuda.stream(self._stream):
            if self._kernel is None and self.kernels:
                from dflash_plugins.launch import Compaction

                self._kernel = Compaction(list(self.arrays.values()))
            if self._kernel is not None:
                self._kernel(slot, start, nodes)
                return
            for rows in self.arrays.values():
                written = rows[slot, :, start:]
                written[:, : len(nodes)] = written[:, list(nodes)]  # the right side is a copy

    def clear(self, slot: int, first: int = 0, last: int | None = None) -> None:
        with torch.cuda.stream(self._stream):
            for rows in self.arrays.values():
                rows[slot, :, first:last].zero_()
