"""The memory of the embedded engine's caches: where the rows and states of each slot lie, and how passes see them."""

from __future__ import annotations

import contextlib
import mmap
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dflash_trt.bundle.cache_kinds import CacheKind
from dflash_trt.engines.caches import PENDING, POSITION, FixedRows, SlotCaches, SlotRows, by_kind, whole
from dflash_trt.errors import DFlashError

Array = np.ndarray[Any, Any]

# A pass sees a multiple of this many rows of a slot, so that its shapes change seldom, and a row's result does not
# depend on how many masked rows follow: ONNX Runtime's softmax adds up 64 numbers at a time, and its products divide
# the numbers of a head into blocks otherwise below 128 rows.
STEP = 128
_MOST_SLOTS = 1 << 20  # their records alone take more memory than any caches of so many have


class CachePool(FixedRows):
    """Rows of every slot in caches of one kind. A pass sees the slots it works on as one array [slots, rows, width].

    `RowPool` in engines/caches.py documents the other methods.

    Slot i begins at row i * capacity, and has the memory of the rows that were written. A pass over one slot sees as
    many rows of it as it needs, where they lie. A pass over several needs them at equal distances without gaps: its
    slots are *packed*, `stride` rows apart, from where the first one begins. They stay so until a pass over several
    needs more rows, or far fewer.

    What a slot leaves when it moves becomes zeros, so that beyond the rows that `SlotRows.finite` counts all is finite.
    """

    def __init__(self, caches: Mapping[str, tuple[int, Any]], slots: int, capacity: int) -> None:
        """`caches`: width and dtype of a row, by name."""
        if slots > _MOST_SLOTS:
            raise DFlashError(f"no memory for a cache of {slots} sequences: lower max_batch_size")
        self.slots, self.capacity = slots, -(-capacity // STEP) * STEP
        self.records: list[SlotRows] = []
        self.allocate(caches)

    def allocate(self, caches: Mapping[str, tuple[int, Any]]) -> None:
        """Begin with these caches, full of zeros, in place of those before."""
        self._maps: dict[str, mmap.mmap | None] = {}
        self.arrays: dict[str, Array] = {}
        for name, (width, dtype) in caches.items():
            self._maps[name], flat = _zeros(self.slots, self.capacity, width, dtype)
            self.arrays[name] = flat.reshape(self.slots * self.capacity, width)
        self.row_bytes: int = sum(width * np.dtype(dtype).itemsize for width, dtype in caches.values())
        self.records[:] = [SlotRows() for _ in range(self.slots)]
        self._packed, self._stride = range(0), self.capacity

    def place(self, first: int, ends: Sequence[int]) -> tuple[int, int]:
        """Let the slots from `first` on hold `ends[i]` rows each: where the first begins, and the rows of each."""
        if len(ends) == 1 and first < self.slots and first not in self._packed:
            end = min(ends[0], self.capacity)
            self.records[first].finite = max(self.records[first].finite, end)
            return first * self.capacity, -(-end // STEP) * STEP
        slots = range(first, first + len(ends))
        if slots.stop > self.slots:
            raise ValueError(f"slots {slots.start}..{slots.stop - 1} of {self.slots}")
        ends = [min(end, self.capacity) for end in ends]
        rows = -(-max(ends) // STEP) * STEP
        if len(slots) == 1:
            if first in self._packed and rows > self._stride:  # it leaves, and those after it
                self._arrange(range(self._packed.start, first), self._stride)
        else:
            if (
                first != self._packed.start
                or slots.stop > self._packed.stop
                or not rows <= self._stride <= max(rows + STEP, rows * 5 // 4)
            ):
                self._arrange(slots, rows)
            rows = self._stride
        for slot, end in zip(slots, ends, strict=True):
            self.records[slot].finite = max(self.records[slot].finite, end)
        return self._begin(first), rows

    def read(self, slot: int, start: int, stop: int) -> list[Array]:
        """Rows start .. stop-1 of a slot in each cache, as they lie: views [rows, width]."""
        begin = self._begin(slot)
        return [memory[begin + start : begin + stop] for memory in self.arrays.values()]

    def write(self, rows: Sequence[Array], slot: int, start: int) -> None:
        stop = start + (len(rows[0]) if rows else 0)
        self.place(slot, [stop])
        for mine, new in zip(self.read(slot, start, stop), rows, strict=True):
            mine[...] = new

    def copy(self, source: int, target: int, count: int) -> None:
        self.write(self.read(source, 0, min(count, self.records[source].finite)), target, 0)

    def take(self, slot: int, first: int, stop: int) -> list[Array]:
        return [rows.copy() for rows in self.read(slot, first, stop)]

    def drop(self, slot: int, count: int, left: int) -> None:
        left = max(0, min(left, self.records[slot].finite - count))
        for rows in self.read(slot, 0, count + left) if left else ():
            rows[:left] = rows[count:]

    def compact(self, slot: int, start: int, nodes: Sequence[int]) -> None:
        for rows in self.read(slot, start, start + nodes[-1] + 1):
            rows[: len(nodes)] = rows[list(nodes)]  # the right side is a copy

    def clear(self, slot: int, first: int) -> None:
        held = self.records[slot]
        for rows in self.read(slot, first, max(first, held.finite)):
            np.copyto(rows, 0, where=rows != 0)  # memory that was never written stays untouched
        held.finite = min(first, held.finite)

    def close(self) -> None:
        self.arrays, self._maps = {}, {}

    def _begin(self, slot: int) -> int:
        if slot in self._packed:
            return self._packed.start * self.capacity + (slot - self._packed.start) * self._stride
        return slot * self.capacity

    def _arrange(self, packed: range, stride: int) -> None:
        """Pack these slots and no others. Rows are moved away from those that come there, so nothing is lost."""
        before = [self._begin(slot) for slot in range(self.slots)]
        self._packed, self._stride = packed, stride
        after = [self._begin(slot) for slot in range(self.slots)]
        up = [slot for slot in range(self.slots) if after[slot] > before[slot]]
        down = [slot for slot in range(self.slots) if after[slot] <= before[slot]]
        for slot in [*reversed(up), *down]:
            held = self.records[slot]
            kept = min(held.finite, stride if slot in packed else self.capacity)
            self._shift(before[slot], after[slot], held.finite, kept)
            held.finite = kept

    def _shift(self, source: int, target: int, rows: int, kept: int) -> None:
        """Move the first `kept` of the rows at `source`; where the others were, and these, become zeros."""
        if source == target and rows == kept:
            return
        for name, memory in self.arrays.items():
            if source != target:
                memory[target : target + kept] = memory[source : source + kept]
            if source < target:
                self._zero(name, source, min(source + rows, target))
                self._zero(name, max(source, target + kept), source + rows)
            else:
                self._zero(name, max(source, target + kept), source + rows)

    def _zero(self, name: str, first: int, last: int) -> None:
        """Rows first .. last-1 become zeros; whole pages of them are given back, where the system can."""
        if last <= first:
            return
        memory, backing = self.arrays[name], self._maps[name]
        width = memory.shape[1] * memory.itemsize
        start, stop = (-(-first * width // mmap.PAGESIZE) * mmap.PAGESIZE, last * width)
        stop -= stop % mmap.PAGESIZE
        if (
            backing is None or stop <= start or sys.platform != "linux"
        ):  # elsewhere pages may keep their numbers
            memory[first:last] = 0
            return
        flat = memory.reshape(-1).view(np.uint8)
        flat[first * width : start] = 0
        flat[stop : last * width] = 0
        backing.madvise(mmap.MADV_DONTNEED, start, stop - start)


def _zeros(slots: int, capacity: int, width: int, dtype: Any) -> tuple[mmap.mmap | None, Array]:
    """Zeros [slots * capacity * width], of which only what is written takes memory, in small pages, and their map.

    Huge pages, which NumPy asks for, would make more of the capacity resident than the rows that are written.
    """
    count = slots * capacity * width
    size = count * np.dtype(dtype).itemsize
    try:
        if not hasattr(mmap, "MAP_PRIVATE"):  # Windows
            return None, np.zeros(count, dtype)
        memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, MemoryError, OverflowError, ValueError) as error:
        raise DFlashError(
            f"no memory for a cache of {slots} sequences, {capacity} tokens each ({size} bytes): lower "
            "max_batch_size, or build with a smaller --max-seq-len"
        ) from error
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with contextlib.suppress(OSError):  # the kernel may lack huge pages
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return memory, np.frombuffer(memory, dtype, count)


class HostStates:
    """States of every slot, in arrays [slots, ...]. `States` in engines/caches.py documents the methods."""

    def __init__(self, slots: int, shapes: Mapping[str, tuple[tuple[int, ...], Any]]) -> None:
        """`shapes`: shape and dtype of each state of a sequence, by name."""
        self.state_bytes = sum(
            int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in shapes.values()
        )
        try:
            self.arrays = {name: np.zeros((slots, *shape), dtype) for name, (shape, dtype) in shapes.items()}
        except (MemoryError, ValueError) as error:
            raise DFlashError(
                f"no memory for the states of {slots} sequences ({self.state_bytes} bytes each): "
                "lower max_batch_size"
            ) from error
        self._pending = [memory for name, memory in self.arrays.items() if name.startswith(PENDING)]
        self.most_pending = self._pending[0].shape[1] if self._pending else 0

    def views(self, first: int, slots: int) -> Iterator[tuple[str, Array]]:
        """The states of consecutive slots, for a pass."""
        for name, memory in self.arrays.items():
            yield name, memory[first : first + slots]

    def position(self, slot: int) -> int:
        return int(self.arrays[POSITION][slot])

    def take(self, slot: int) -> dict[str, Array]:
        return {name: memory[slot].copy() for name, memory in self.arrays.items()}

    def put(self, slot: int, states: Mapping[str, Any]) -> None:
        for name, state in states.items():
            self.arrays[name][slot] = state

    def copy(self, source: int, target: int) -> None:
        for memory in self.arrays.values():
            memory[target] = memory[source]

    def clear(self, slot: int, pending: int | None) -> None:
        if pending is None:
            self.put(slot, dict.fromkeys(self.arrays, 0))
        for memory in self._pending:
            memory[slot, pending:] = 0

    def close(self) -> None:
        """Free all memory."""
        self.arrays, self._pending = {}, []


class HostCaches(SlotCaches[CachePool, HostStates]):
    """The caches of every slot, and where a pass finds them."""

    def __init__(self, kinds: Sequence[CacheKind], slots: int, capacity: int) -> None:
        """`capacity`: the address space of a slot in rows. Only rows that are written take memory.

        Without `kinds`, every layer keeps all rows.
        """
        pools = [(kind, CachePool({}, slots, capacity)) for kind in kinds or (whole(capacity),)]
        super().__init__(pools, slots)

    def allocate(self, caches: Mapping[str, tuple[int, Any]]) -> None:
        """Begin with these caches, full of zeros: width and dtype of a row, by name, which ends with the layer."""
        parts = by_kind([rows.kind for rows in self.kinds], caches)
        for rows, names in zip(self.kinds, parts, strict=True):
            rows.pool.allocate({name: caches[name] for name in names})

    def prepare(self, first: int, starts: Sequence[int], count: int) -> tuple[tuple[int, int], ...]:
        """Let a pass write `count` rows into each slot from `first` on, at positions from its start on.

        Returns the place of each kind, see `CachePool.place`.
        """
        if first + len(starts) > self.slots:
            raise ValueError(f"slots {first}..{first + len(starts) - 1} of {self.slots}")
        self.advance(first, starts, [count] * len(starts))
        places = []
        for kind in self.kinds:
            ends = [start - kind.records[slot].base + count for slot, start in enumerate(starts, first)]
            places.append(kind.pool.place(first, ends) if kind.pool.arrays else (0, 0))
        return tuple(places)

    def views(self, places: Sequence[tuple[int, int]], slots: int) -> Iterator[tuple[str, Array]]:
        """Views of each cache for a pass, [slots, rows, width], at the places that `prepare` gave."""
        for kind, (begin, rows) in zip(self.kinds, places, strict=True):
            for name, memory in kind.pool.arrays.items():
                yield name, memory[begin : begin + slots * rows].reshape(slots, rows, -1)

    def close(self) -> None:
        """Free all memory."""
        for kind in self.kinds:
            kind.pool.close()
        if self.states is not None:
            self.states.close()
