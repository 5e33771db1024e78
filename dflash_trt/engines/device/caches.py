"""Caches on a GPU: rows for attention, and the states of recurrent layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from dflash_plugins.launch import Compaction, Run

from dflash_trt.bundle.cache_kinds import CacheKind
from dflash_trt.engines.caches import PENDING, POSITION, FixedRows, SlotCaches, SlotRows, by_kind, whole
from dflash_trt.engines.device.memory import memory_errors
from dflash_trt.engines.device.sizes import DECODE, PREFILL
from dflash_trt.engines.device.stream import on

Array = np.ndarray[Any, Any]
Tensor = torch.Tensor
UNIT = 64  # regions have a multiple of so many rows
_PADDED = 128  # rows by which a pass over a prompt is longer than it, at most (`prefill_lengths`)


class DevicePool(FixedRows):
    """Tensors [slots, heads, rows, size] of one kind of caches. `RowPool` in engines/caches.py documents the methods.

    The stream orders copies on the device, so they need no wait.
    """

    regions: Mapping[int, Tensor] = {}
    most = 0

    def __init__(self, arrays: Mapping[str, Tensor], stream: Any, slots: int) -> None:
        self.arrays, self._stream = arrays, stream
        self.records = [SlotRows() for _ in range(slots)]
        self.compaction: Compaction | None = None  # one kernel for all layers
        self.row_bytes = sum(
            rows.shape[-3] * rows.shape[-1] * rows.element_size() for rows in arrays.values()
        )

    def rows(self, slot: int) -> list[Tensor]:
        """Those of a slot in each cache: views [heads, rows, size]."""
        return [rows[slot] for rows in self.arrays.values()]

    def copy(self, source: int, target: int, count: int) -> None:
        with on(self._stream):
            for mine, origin in zip(self.rows(target), self.rows(source), strict=True):
                mine[:, :count].copy_(origin[:, :count])

    def take(self, slot: int, first: int, stop: int) -> list[Tensor]:
        with memory_errors(), on(self._stream):
            return [rows[:, first:stop].clone() for rows in self.rows(slot)]

    def write(self, rows: Sequence[Tensor], slot: int, first: int) -> None:
        with on(self._stream):
            for mine, copy in zip(self.rows(slot), rows, strict=True):
                mine[:, first : first + copy.shape[1]].copy_(copy)

    def drop(self, slot: int, count: int, left: int) -> None:
        with on(self._stream):
            for rows in self.rows(slot):
                # Fewer are there of a sequence that was not read here.
                _shift(rows, range(count, min(count + left, rows.shape[1])), 0)

    def room(self, slot: int) -> int:
        """The rows of a slot."""
        return max([rows.shape[2] for rows in self.arrays.values()], default=0)

    def point(self, profile: int, slot: int, count: int) -> None:
        """Let the next pass of this profile work on so many slots from this one on."""

    def compact(self, slot: int, start: int, nodes: Sequence[int]) -> None:
        """One kernel if `compact_by` gave one, else copies for each layer."""
        with on(self._stream):
            if self.compaction is not None:
                self.compaction(*self._place(slot, start), nodes)
                return
            for rows in self.rows(slot):
                for row, node in enumerate(nodes):  # ascending, so that none is overwritten before it is read
                    if node > row:
                        rows[:, start + row].copy_(rows[:, start + node])

    def compact_by(self, run: Run, most: int) -> None:
        """Let a kernel move up to `most` rows."""
        if self.arrays:
            with on(self._stream):
                self.compaction = Compaction(self._by_slot(), most, run)

    def _by_slot(self) -> list[Tensor]:
        return list(self.arrays.values())

    def _place(self, slot: int, row: int) -> tuple[int, int]:
        """Where a row of a slot lies in these."""
        return slot, row

    def clear(self, slot: int, first: int) -> None:
        with on(self._stream):
            for rows in self.rows(slot):
                rows[:, first:].zero_()


class Regions(DevicePool):
    """Tensors [heads, rows, size] with the rows of all slots: each slot has those of a region, of at most `most` rows.

    Where each slot can have the most and no more are kept, its region stays where it is. Else a region has what was
    asked for, and a quarter more if it can. One that is full is made longer, or moves; if the free rows are apart, all
    regions move together. The first rows belong to no slot: passes write there for slots without a region.

    kept: slots after those of passes, with regions of ended requests.
    regions: int64 [2, slots], where the regions begin and end: of all slots for a pass of the profile DECODE, and for
        one of PREFILL those of the slots that `point` was told.
    """

    def __init__(
        self, arrays: Mapping[str, Tensor], stream: Any, slots: int, most: int, spare: int, kept: int = 0
    ) -> None:
        super().__init__(arrays, stream, slots + kept)
        self.most, self._spare, self._slots = most, spare, slots
        some = next(iter(arrays.values()), torch.empty(0, slots * most, 0))
        self._total = some.shape[1]
        self._fixed = not kept and self._total >= slots * most
        regions = [range(i * most, (i + 1) * most) for i in range(slots)]
        self._held = regions if self._fixed else [range(0)] * (slots + kept)
        places = torch.zeros(2, slots, dtype=torch.int64, device=some.device)
        self.regions = {DECODE: places, PREFILL: places.clone()}
        self._told: list[range | None] = [None] * slots  # what the device knows of `_held`

    def rows(self, slot: int) -> list[Tensor]:
        held = self._held[slot]
        return [rows[:, held.start : held.stop] for rows in self.arrays.values()]

    @property
    def most_rows(self) -> int | None:
        return None if self._fixed else self._total - self._spare

    def room(self, slot: int) -> int:
        return len(self._held[slot]) or self._spare

    def point(self, profile: int, slot: int, count: int) -> None:
        places, held = self.regions[DECODE], self._held[: self._slots]
        if held != self._told:
            changed = [i for i, told in enumerate(self._told) if told != held[i]]
            for i in changed:
                region = held[i] or range(self._spare)
                places[0, i].fill_(region.start)  # a number in a launch needs no memory of the host
                places[1, i].fill_(region.stop)
            self._told[:] = held
        if profile == PREFILL:
            self.regions[PREFILL][:, :count].copy_(places[:, slot : slot + count])

    def reserve(self, slot: int, rows: int) -> bool:
        held, rows = self._held[slot], min(-(-rows // UNIT) * UNIT, self.most)
        if rows <= len(held):
            return True
        longer = min(-(-rows * 5 // 4 // UNIT) * UNIT, self.most)
        if found := self._found(slot, longer) or self._found(slot, rows):
            with on(self._stream):
                for array in self.arrays.values():
                    _shift(array, held, found.start)
            self._held[slot] = found
            return True
        return self._together(slot, rows)

    def release(self, slot: int, rows: int = 0) -> None:
        if not self._fixed:
            self._held[slot] = self._held[slot][: -(-rows // UNIT) * UNIT] or range(0)

    def move(self, source: int, target: int, count: int) -> None:
        """They change places."""
        self._held[source], self._held[target] = self._held[target], self._held[source]

    def _found(self, slot: int, rows: int) -> range:
        """So many free rows: after those of the slot and with these, or elsewhere. Empty if there are none."""
        held, taken = self._held[slot], sorted((region.start, region.stop) for region in self._held if region)
        ends = [self._spare, *(stop for _, stop in taken)]
        gaps = list(zip(ends, [*(start for start, _ in taken), self._total], strict=True))
        for begin, end in gaps:
            if held and begin == held.stop and end - held.start >= rows:
                return range(held.start, held.start + rows)
        return next((range(begin, begin + rows) for begin, end in gaps if end - begin >= rows), range(0))

    def _together(self, slot: int, rows: int) -> bool:
        """Let a slot have so many rows between all other regions, which move to the beginning and to the end. Returns
        whether there are so many.
        """
        held, end = list(self._held), self._spare
        order = sorted((i for i, region in enumerate(held) if region), key=lambda i: held[i].start)
        if end + sum(map(len, held)) - len(held[slot]) + rows > self._total:
            return False
        if not held[slot]:
            order.append(slot)
        at, begin = order.index(slot), self._total
        for i in order[:at]:
            self._held[i] = range(end, end := end + len(held[i]))
        for i in reversed(order[at + 1 :]):
            self._held[i] = range(begin := begin - len(held[i]), begin + len(held[i]))
        self._held[slot] = range(end, end + rows)
        with on(self._stream):
            for array in self.arrays.values():
                for i in [*order[:at], *reversed(order[at:])]:  # none over rows that have yet to move
                    _shift(array, held[i], self._held[i].start)
        return True

    def _by_slot(self) -> list[Tensor]:
        return [rows[None] for rows in self.arrays.values()]

    def _place(self, slot: int, row: int) -> tuple[int, int]:
        return 0, self._held[slot].start + row


def _shift(rows: Tensor, held: range, begin: int) -> None:
    """Move the rows of a region to another place, which may overlap with its own. Without memory for a copy of them,
    in parts that do not overlap.
    """
    step, count = abs(begin - held.start), len(held)
    if not (held and step):
        return
    if step < count:
        try:
            with memory_errors():
                copy = rows[:, held.start : held.stop].clone()
        except MemoryError:
            pass
        else:
            rows[:, begin : begin + count].copy_(copy)
            return
    parts = range(0, count, step)
    for at in parts if begin < held.start else reversed(parts):
        part = rows[:, held.start + at : min(held.start + at + step, held.stop)]
        rows[:, begin + at : begin + at + part.shape[1]].copy_(part)


@dataclass(frozen=True, slots=True)
class _Pool:
    """States of one kind, of all layers and slots: [layers, slots, ...]. A pass reads `now` and writes `new`."""

    names: Sequence[str]
    now: Tensor
    new: Tensor
    pending: bool


class DeviceStates:
    """States of every slot, in tensors [layers, slots, ...]. `States` in engines/caches.py documents the methods.

    A pass writes new states beside the old ones, because TensorRT must not write what it still reads. They are copied
    over them after the pass, on its stream. The host counts the positions too, so that it need not wait to know them.

    TensorRT wants aligned addresses. The states of published models fill whole units, which the engine checks, but a
    position does not, so positions are copied to a place of their own before a pass.
    """

    def __init__(
        self,
        states: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
        slots: int,
        stream: Any,
        device: torch.device,
    ) -> None:
        """`states`: shape and dtype of each state of a sequence, by the name of the plan's input."""
        self._stream = stream
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
        return {name: pool.now[i] for pool in self._pools for i, name in enumerate(pool.names)}

    def bound(self, first_slot: int) -> dict[str, tuple[Tensor, Tensor]]:
        """The memory from this slot on that a pass reads, and the memory that it writes, by name."""
        return {POSITION: (self._read, self._written)} | {
            name: (pool.now[i, first_slot:], pool.new[i, first_slot:])
            for pool in self._pools
            for i, name in enumerate(pool.names)
        }

    def prepare(self, first_slot: int, batch: int) -> None:
        """Put the positions of these slots where the next pass reads them. Called on the pass's stream."""
        self._read[:batch].copy_(self._on_device[first_slot : first_slot + batch])

    def passed(self, first_slot: int, start: Array, certain: int) -> None:
        """Take over the states that the pass just enqueued writes. `start` [B]; `certain`: as for the graph."""
        stop = first_slot + len(start)
        with on(self._stream):
            for pool in self._pools:
                pool.now[:, first_slot:stop].copy_(pool.new[:, first_slot:stop])
            self._on_device[first_slot:stop].copy_(self._written[: len(start)])
        before = self._positions[first_slot:stop]
        replayed = np.clip(start - before, 0, self.most_pending)
        self._positions[first_slot:stop] = np.where(start > 0, before + replayed, 0) + certain

    def position(self, slot: int) -> int:
        """As the host counts it."""
        return int(self._positions[slot])

    def take(self, slot: int) -> tuple[list[Tensor], int]:
        with memory_errors(), on(self._stream):
            return [pool.now[:, slot].clone() for pool in self._pools], self.position(slot)

    def put(self, slot: int, states: tuple[Sequence[Tensor], int]) -> None:
        tensors, position = states
        with on(self._stream):
            for pool, tensor in zip(self._pools, tensors, strict=True):
                pool.now[:, slot].copy_(tensor)
            self._on_device[slot].fill_(position)
        self._positions[slot] = position

    def copy(self, source: int, target: int) -> None:
        with on(self._stream):
            for pool in self._pools:
                pool.now[:, target].copy_(pool.now[:, source])
            self._on_device[target : target + 1].copy_(self._on_device[source : source + 1])
        self._positions[target] = self._positions[source]

    def clear(self, slot: int, pending: int | None) -> None:
        with on(self._stream):
            for pool in self._pools:
                if pending is None:
                    pool.now[:, slot].zero_()
                elif pool.pending:
                    pool.now[:, slot, pending:].zero_()
            if pending is None:
                self._on_device[slot].zero_()
        if pending is None:
            self._positions[slot] = 0


class DeviceCaches(SlotCaches[DevicePool, DeviceStates]):
    """The caches of every slot on a GPU. Without `kinds`, every layer keeps all rows."""

    def __init__(
        self,
        arrays: Mapping[str, Tensor],
        stream: Any,
        slots: int,
        kinds: Sequence[CacheKind] = (),
        states: DeviceStates | None = None,
        *,
        most: Sequence[int] = (),
        spare: int = 0,
        kept: int = 0,
    ) -> None:
        """most: the most rows of a slot in each kind, whose arrays are those of `Regions`. spare: rows that a pass may
        write for a slot without a region. kept: further slots, see `Caches`.
        """
        kinds = kinds or (whole(0),)
        parts = [{name: arrays[name] for name in names} for names in by_kind(kinds, arrays)]
        pools: list[DevicePool] = [DevicePool(part, stream, slots) for part in parts]
        if most:
            pools = [
                Regions(part, stream, slots, n, spare, 0 if kind.window else kept)
                for kind, part, n in zip(kinds, parts, most, strict=True)
            ]
            self.margin, self.kept_slots = spare + _PADDED, kept
        super().__init__(list(zip(kinds, pools, strict=True)), slots, states)

    def room(self, slot: int) -> int:
        """The positions of a slot for which every layer that keeps all rows has one."""
        return min(
            [group.pool.room(slot) for group in self.kinds if group.kind.window is None], default=1 << 62
        )
