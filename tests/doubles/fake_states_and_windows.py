"""Fake targets with other caches than rows of all positions: a recurrent state, and a layer that sees a window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dflash_trt.bundle.cache_kinds import CacheKind, rows_by_window
from dflash_trt.decoding.caches import Snapshot
from dflash_trt.engines.caches import FixedRows, SlotCaches, SlotRows
from tests.doubles.fake_engines import POISON, ROW_BYTES, FakeTarget

Array = np.ndarray[Any, Any]


class StateTarget(FakeTarget):
    """A target with recurrent layers. Each slot has the sum at one length, and the rows of its last pass.

    The rows are replayed up to the start of the next pass. So a slot can be cut to lengths from that of the sum on. A
    copy has only the sum at its end, and only if the slot could be cut there.
    """

    def __init__(self, slots: int, capacity: int) -> None:
        super().__init__(slots, capacity)
        self.state: list[tuple[int, int]] = [(0, 0)] * slots
        self.last: list[list[int]] = [[] for _ in range(slots)]

    def at(self, slot: int, length: int) -> tuple[int, int]:
        known, total = self.state[slot]
        assert known <= length <= known + len(self.last[slot]), "a state cannot be cut to this length"
        return length, total + sum(self.last[slot][: length - known])

    def put(self, slot: int, state: tuple[int, int], last: Sequence[int] = ()) -> None:
        self.state[slot], self.last[slot] = state, list(last)

    def total(self, slot: int, length: int) -> int:
        self.put(slot, self.at(slot, length) if length else (0, 0))
        return self.state[slot][1]

    def write(self, slot: int, start: int, rows: Sequence[int]) -> None:
        self.last[slot] = list(rows)

    def cut_lengths(self, slot: int, length: int) -> Sequence[int]:
        return range(max(1, self.state[slot][0]), length + 1)

    def kept_bytes(self, length: int) -> int:
        return 4 * ROW_BYTES

    def copy(self, source: int, target: int, length: int) -> None:
        self.put(target, self.at(source, length))

    def lacks(self, slot: int, kept: Snapshot, shortest: int) -> bool:
        return kept.start < shortest <= kept.stop and not kept.lengths

    def keep(self, slot: int, start: int, stop: int, shortest: int) -> Snapshot:
        known = self.state[slot][0]
        if known <= stop <= known + len(self.last[slot]):
            return Snapshot(start, stop, (stop,), self.at(slot, stop), 4 * ROW_BYTES)
        return Snapshot(start, stop, (), None, 0)

    def restore(self, slot: int, kept: Sequence[Snapshot], length: int) -> None:
        assert (length,) == kept[-1].lengths
        self.put(slot, kept[-1].data)

    def compact(self, slot: int, start: int, nodes: Sequence[int]) -> None:
        assert self.state[slot][0] == start
        self.last[slot] = [self.last[slot][node] for node in nodes]

    def clear(self, slot: int, first: int = 0) -> None:
        if first == 0:
            self.put(slot, (0, 0))
        else:
            del self.last[slot][first - self.state[slot][0] :]

    def holds(self, slot: int, history: Sequence[int]) -> bool:
        known = self.state[slot][0]
        return self.at(slot, len(history))[1] == sum(history) and self.at(slot, known)[1] == sum(
            history[:known]
        )

    def kept_right(self, kept: Snapshot, history: Sequence[int]) -> bool:
        return kept.data == ((kept.stop, sum(history[: kept.stop])) if kept.lengths else None)


class _RowPool(FixedRows):
    """One row of numbers for each slot, beyond which nothing may be written. `RowPool` documents the methods."""

    row_bytes = ROW_BYTES

    def __init__(self, slots: int, rows: int) -> None:
        self.arrays = {"window_cache.0": np.full((slots, rows, 1), POISON)}
        self.rows = self.arrays["window_cache.0"]
        self.records = [SlotRows() for _ in range(slots)]

    def copy(self, source: int, target: int, count: int) -> None:
        kept = self.rows[source, :count].copy()
        self.rows[target] = POISON
        self.rows[target, :count] = kept

    def take(self, slot: int, first: int, stop: int) -> list[Array]:
        assert 0 <= first <= stop
        return [self.rows[slot, first:stop].copy()]

    def write(self, rows: Sequence[Array], slot: int, first: int) -> None:
        self.rows[slot, first:] = POISON
        self.rows[slot, first : first + len(rows[0])] = rows[0]

    def drop(self, slot: int, count: int, left: int) -> None:
        kept = self.rows[slot, count : count + left].copy()
        self.rows[slot] = POISON
        self.rows[slot, :left] = kept

    def compact(self, slot: int, start: int, nodes: Sequence[int]) -> None:
        moved = self.rows[slot, [start + node for node in nodes]].copy()
        self.write([moved], slot, start)

    def clear(self, slot: int, first: int) -> None:
        self.rows[slot, first:] = POISON


class WindowTarget(FakeTarget):
    """A target with a second cache, of a layer that sees 5 rows. Every pass looks at all that its first row sees.

    A pass writes as many rows as a chunk or a block has, and no more rows are there than it needs.
    """

    window, stride, most = 5, 4, 12
    moves_rows = True

    def __init__(self, slots: int, capacity: int) -> None:
        super().__init__(slots, capacity)
        rows = rows_by_window([self.window], self.stride, capacity, self.most)[self.window]
        self.kind = CacheKind(
            window=self.window, stride=self.stride, rows=rows, row_bytes=ROW_BYTES, layers=(0,)
        )
        self.share(None, 0)

    def share(self, memory: int | None, kept_slots: int) -> None:
        super().share(memory, kept_slots)
        slots = len(self.cache) - kept_slots
        pool = _RowPool(slots, self.kind.rows)
        self.rows: SlotCaches[Any, Any] = SlotCaches([(self.kind, pool)], slots)
        self.rows.kept_slots = kept_slots

    def mark(self, slot: int, length: int, shortest: int) -> None:
        self.rows.mark(slot, length, shortest)

    def adopt(self, source: int, target: int) -> None:
        self.rows.adopt(source, target)

    @property
    def marked_bytes(self) -> int:  # type: ignore[override]
        return self.rows.marked_bytes

    def move(self, source: int, target: int, length: int) -> None:
        super().copy(source, target, length)
        self.rows.move(source, target, length)
        self.reserved[target] = self.reserved[source]
        self.release(source)

    def release(self, slot: int, length: int = 0) -> None:
        super().release(slot, length)
        self.rows.release(slot, length)

    def total(self, slot: int, length: int) -> int:
        if self.moves_rows:
            self.rows.advance(slot, [length], [self.most])
        self.check_window(slot, length)
        return super().total(slot, length)

    def check_window(self, slot: int, length: int) -> None:
        if slot >= self.rows.slots:
            return
        (kind,) = self.rows.kinds
        first, base = kind.kind.first(length), kind.records[slot].base
        assert base <= first
        seen = kind.pool.rows[slot, first - base : length - base, 0]
        assert seen.tolist() == self.cache[slot, first:length].tolist(), (
            "a window's rows are not those of their places"
        )

    def write(self, slot: int, start: int, rows: Sequence[int]) -> None:
        super().write(slot, start, rows)
        (kind,) = self.rows.kinds
        kind.pool.write([np.array(rows)[:, None]], slot, start - kind.records[slot].base)

    def cut_lengths(self, slot: int, length: int) -> Sequence[int]:
        return self.rows.cut_lengths(slot, length)

    def kept_bytes(self, length: int) -> int:
        return super().kept_bytes(length) + self.rows.kept_bytes(length)

    def copy(self, source: int, target: int, length: int) -> None:
        assert length in self.cut_lengths(source, length)
        super().copy(source, target, length)
        self.rows.copy(source, target, length)

    def keep(self, slot: int, start: int, stop: int, shortest: int) -> Snapshot:
        whole, rows = super().keep(slot, start, stop, shortest), self.rows.keep(slot, start, stop, shortest)
        return Snapshot(start, stop, rows.lengths, (whole, rows), whole.size + rows.size)

    def lacks(self, slot: int, kept: Snapshot, shortest: int) -> bool:
        return self.rows.lacks(slot, kept.data[1], shortest)

    def restore(self, slot: int, kept: Sequence[Snapshot], length: int) -> None:
        assert length in kept[-1].lengths
        super().restore(slot, [part.data[0] for part in kept], length)
        self.rows.restore(slot, [part.data[1] for part in kept], length)
        self.check_window(slot, length)

    def compact(self, slot: int, start: int, nodes: Sequence[int]) -> None:
        super().compact(slot, start, nodes)
        self.rows.compact(slot, start, nodes)

    def clear(self, slot: int, first: int = 0) -> None:
        super().clear(slot, first)
        if slot < self.rows.slots:
            self.rows.clear(slot, first)

    def holds(self, slot: int, history: Sequence[int]) -> bool:
        self.check_window(slot, len(history))
        return super().holds(slot, history)

    def kept_right(self, kept: Snapshot, history: Sequence[int]) -> bool:
        (copy,) = kept.data[1].data.rows
        same = copy.rows[0][:, 0].tolist() == list(history[copy.first : kept.stop])
        return same and super().kept_right(kept.data[0], history)


class LongStrideTarget(WindowTarget):
    """No row is dropped within these contexts. Copies still leave out those that no later row sees."""

    stride = 1000
