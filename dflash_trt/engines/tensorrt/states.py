"""The memory of recurrent layers on a GPU: one state of fixed size for each slot.

As in the embedded engine, a slot's states belong to `position`, and the rows from there on are pending. A pass writes
new states beside the old ones, because TensorRT must not write what it still reads. They are copied over them after
the pass, on its stream. The host counts the positions too, so that it need not wait to know them.

TensorRT wants aligned addresses. The states of published models fill whole units, which the engine checks, but a
position does not, so positions are copied to a place of their own before a pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dflash_trt.decoding.caches import Snapshot
from dflash_trt.engines.tensorrt.caches import DeviceRows

Array = np.ndarray[Any, Any]
Tensor = torch.Tensor

POSITION, PENDING = "position_state", "pending_"


@dataclass(frozen=True, slots=True)
class _DeviceCopy:
    """Rows of each cache, and the states that belong to the end of the rows, one for each pool; or none."""

    rows: Snapshot
    states: Sequence[Tensor] | None
    position: int


@dataclass(frozen=True, slots=True)
class _Pool:
    """States of one kind, of all layers and slots: [layers, slots, ...]. A pass reads `now` and writes `new`."""

    names: Sequence[str]
    now: Tensor
    new: Tensor
    pending: bool


class DeviceHybridCaches:
    """Rows and states of every slot. `Caches` in decoding/caches.py documents the methods."""

    def __init__(
        self,
        rows: DeviceRows,
        states: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
        slots: int,
        stream: Any,
        device: torch.device,
    ) -> None:
        """`states`: shape and dtype of each state of a sequence, by the name of the plan's input."""
        self.rows, self._stream = rows, stream
        self._on_device, self._read, self._written = (
            torch.zeros(slots, dtype=torch.int64, device=device) for _ in range(3)
        )
        kinds: dict[tuple[str, tuple[int, ...], torch.dtype], list[str]] = {}
        for name, (shape, dtype) in states.items():
            if name == POSITION:
                continue
            kinds.setdefault((name.partition(".")[0], shape, dtype), []).append(name)

        def memory(count: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return torch.zeros((count, slots, *shape), dtype=dtype, device=device)

        self._pools = []
        for (kind, shape, dtype), names in kinds.items():
            now, new = (memory(len(names), shape, dtype) for _ in range(2))
            self._pools.append(_Pool(names, now, new, kind.startswith(PENDING)))
        self._positions: Array = np.zeros(slots, np.int64)
        self.state_bytes = self._on_device.element_size() + sum(
            pool.now[:, 0].numel() * pool.now.element_size() for pool in self._pools
        )
        self.most_pending = next((int(pool.now.shape[2]) for pool in self._pools if pool.pending), 0)

    @property
    def arrays(self) -> dict[str, Tensor]:
        """All memory by name."""
        return dict(self.rows.arrays) | {
            name: pool.now[i] for pool in self._pools for i, name in enumerate(pool.names)
        }

    def bound(self, first_slot: int) -> dict[str, tuple[Tensor, Tensor]]:
        """The memory that a pass from this slot on reads, and the memory that it writes, by name."""
        return {POSITION: (self._read, self._written)} | {
            name: (pool.now[i, first_slot], pool.new[i, first_slot])
            for pool in self._pools
            for i, name in enumerate(pool.names)
        }

    def prepare(self, first_slot: int, batch: int) -> None:
        """Put the positions of these slots where the next pass reads them. Called on the pass's stream."""
        self._read[:batch].copy_(self._on_device[first_slot : first_slot + batch])

    def passed(self, first_slot: int, start: Array, certain: int) -> None:
        """Take over the states that the pass just enqueued writes. `start` [B]; `certain`: as for the graph."""
        stop = first_slot + len(start)
        with torch.cuda.stream(self._stream):
            for pool in self._pools:
                pool.now[:, first_slot:stop].copy_(pool.new[:, first_slot:stop])
            self._on_device[first_slot:stop].copy_(self._written[: len(start)])
        before = self._positions[first_slot:stop]
        replayed = np.clip(start - before, 0, self.most_pending)
        self._positions[first_slot:stop] = np.where(start > 0, before + replayed, 0) + certain

    def position(self, slot: int) -> int:
        return int(self._positions[slot])

    def lengths(self, slot: int, length: int) -> Sequence[int]:
        return range(max(self.rows.shortest(length), self.position(slot)), length + 1)

    def kept_bytes(self, length: int) -> int:
        return self.rows.kept_bytes(length) + self.state_bytes

    def copy(self, source: int, target: int, length: int) -> None:
        self.rows.copy(source, target, length)
        with torch.cuda.stream(self._stream):
            for pool in self._pools:
                pool.now[:, target].copy_(pool.now[:, source])
            self._on_device[target : target + 1].copy_(self._on_device[source : source + 1])
        self._positions[target] = self._positions[source]

    def keep(self, slot: int, start: int, stop: int, shortest: int) -> Snapshot:
        position, rows = self.position(slot), self.rows.keep(slot, start, stop, shortest)
        if not position <= stop <= position + self.most_pending:
            return Snapshot(start, stop, (), _DeviceCopy(rows, None, position), rows.size)
        try:
            with torch.cuda.stream(self._stream):
                states = [pool.now[:, slot].clone() for pool in self._pools]
        except torch.OutOfMemoryError as error:
            raise MemoryError(str(error)) from error
        lengths = range(max(rows.lengths[0], position), stop + 1) if rows.lengths else ()
        return Snapshot(
            start, stop, lengths, _DeviceCopy(rows, states, position), rows.size + self.state_bytes
        )

    def lacks(self, kept: Snapshot, shortest: int) -> bool:
        """States are with the last copy of a prefix only."""
        if kept.start < shortest <= kept.stop and kept.stop not in kept.lengths:
            return True
        return self.rows.lacks(kept.data.rows, shortest)

    def restore(self, slot: int, kept: Sequence[Snapshot], length: int) -> None:
        self.rows.restore(slot, [each.data.rows for each in kept], length)
        last: _DeviceCopy = kept[-1].data
        assert last.states is not None
        with torch.cuda.stream(self._stream):
            for pool, states in zip(self._pools, last.states, strict=True):
                pool.now[:, slot].copy_(states)
            self._on_device[slot].fill_(last.position)
        self._positions[slot] = last.position

    def compact(self, slot: int, start: int, nodes: Sequence[int]) -> None:
        self.rows.compact(slot, start, nodes)
        with torch.cuda.stream(self._stream):
            for pool in self._pools:
                if pool.pending:
                    rows = pool.now[:, slot]
                    rows[:, : len(nodes)] = rows[:, list(nodes)]  # the right side is a copy

    def clear(self, slot: int, first: int = 0, last: int | None = None) -> None:
        self.rows.clear(slot, first, last)
        begin = max(first - self.position(slot), 0)
        with torch.cuda.stream(self._stream):
            for pool in self._pools:
                if first == 0:
                    pool.now[:, slot].zero_()
                elif pool.pending:
                    pool.now[:, slot, begin:].zero_()
            if first == 0:
                self._on_device[slot].zero_()
        if first == 0:
            self._positions[slot] = 0
