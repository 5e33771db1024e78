"""The caches of an engine by slot, on the host and on a GPU: rows for attention, and recurrent states beside them.

Layers of one kind (dflash_trt/bundle/cache_kinds.py) share a pool of rows, in which row j of a slot is position
base + j. Each slot has one record for each kind (`SlotRows`). A pass moves a slot's rows down before it runs, if the
base of its first position is another than that of the pass before.

A slot's states have one fixed size and belong to `position`. The rows from there on are pending: docs/graphs.md says
how a pass replays them. So such a slot can be cut to `position`, and to each length after it up to its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from dflash_trt.bundle.cache_kinds import CacheKind
from dflash_trt.decoding.caches import Snapshot


@dataclass(slots=True)
class SlotRows:
    """What the caches of one kind hold of a slot's sequence.

    base: the position of the first row.
    first: from this position on, all rows of the sequence are here, up to its length. A restored copy may lack some.
    last: from this position on, no row belongs to a token of the sequence.
    finite: beyond so many rows, all numbers are finite and mean nothing. Every row may be read and masked, and NaN x 0
    is NaN. A pool on a GPU does not count them: it clears to its end.
    """

    base: int = 0
    first: int = 0
    last: int = 0
    finite: int = 0


class FixedRows:
    """Slots of one size, for a `RowPool`, whose methods these are."""

    copy: Callable[[int, int, int], None]

    @property
    def most_rows(self) -> int | None:
        """Every slot can have the most."""
        return None

    def reserve(self, slot: int, rows: int) -> bool:
        """There is memory for them."""
        return True

    def release(self, slot: int, rows: int = 0) -> None:
        """They keep it."""

    def move(self, source: int, target: int, count: int) -> None:
        """As a copy."""
        self.copy(source, target, count)


class RowPool(Protocol):
    """Rows of every slot in the caches of one kind. In an array of rows, they are the last axis but one."""

    @property
    def records(self) -> Sequence[SlotRows]:
        """The record of each slot. The pool writes only `finite`, and reads nothing else."""

    @property
    def arrays(self) -> Mapping[str, Any]:
        """All memory by name."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in all caches."""

    @property
    def most_rows(self) -> int | None:
        """The rows of all slots together; None: every slot can have the most."""

    def reserve(self, slot: int, rows: int) -> bool:
        """Let a slot have so many rows. Returns whether there is memory for them."""

    def release(self, slot: int, rows: int = 0) -> None:
        """A slot needs only its first rows."""

    def move(self, source: int, target: int, count: int) -> None:
        """The first rows of a slot become those of another one, and are needed there alone."""

    def copy(self, source: int, target: int, count: int) -> None:
        """The first rows of a slot become those of another one."""

    def take(self, slot: int, first: int, stop: int) -> Sequence[Any]:
        """Copies of rows first .. stop-1, one array for each cache. Raises MemoryError if there is no memory."""

    def write(self, rows: Sequence[Any], slot: int, first: int) -> None:
        """Arrays of rows, one for each cache, become those of a slot from `first` on."""

    def drop(self, slot: int, count: int, left: int) -> None:
        """The `left` rows after the first `count` rows of a slot become the first ones. The others stay as they are."""

    def compact(self, slot: int, start: int, nodes: Sequence[int]) -> None:
        """Row start + nodes[i] becomes row start + i."""

    def clear(self, slot: int, first: int) -> None:
        """Rows of a slot from `first` on become 0."""


POSITION, PENDING = "position_state", "pending_"


class States(Protocol):
    """The states of every slot, and its pending rows.

    state_bytes: of one slot. most_pending: the most rows after a slot's position.
    """

    state_bytes: int
    most_pending: int

    @property
    def arrays(self) -> Mapping[str, Any]:
        """All memory by name."""

    def position(self, slot: int) -> int:
        """The length that a slot's states belong to."""

    def take(self, slot: int) -> Any:
        """A copy of a slot's states. Raises MemoryError if there is no memory."""

    def put(self, slot: int, states: Any) -> None:
        """Give a slot the states that `take` returned."""

    def copy(self, source: int, target: int) -> None:
        """Give a slot the states of another one."""

    def clear(self, slot: int, pending: int | None) -> None:
        """Set a slot's pending rows to 0 from this one on; with None, all of its states."""


# Of a slot; a long prompt has one for each of its passes.
_MOST_MARKS = 4
P = TypeVar("P", bound=RowPool)
S = TypeVar("S", bound=States)


@dataclass(frozen=True, slots=True)
class _KeptRows:
    """Rows of one kind for positions from `first` to the snapshot's end, one array for each cache."""

    first: int
    rows: Sequence[Any]


@dataclass(frozen=True, slots=True)
class _Kept:
    """The content of a snapshot: rows of each kind, and the states that belong to their end; or None."""

    rows: Sequence[_KeptRows]
    states: Any


def whole(capacity: int) -> CacheKind:
    """The kind of all layers of a graph whose layers keep all rows."""
    return CacheKind(window=None, stride=1, rows=capacity, row_bytes=0, layers=())


@dataclass(frozen=True, slots=True)
class _RowsOfKind(Generic[P]):
    """One kind of caches, and their rows."""

    kind: CacheKind
    pool: P
    records: Sequence[SlotRows]


def by_kind(kinds: Sequence[CacheKind], names: Iterable[str]) -> list[list[str]]:
    """The caches of each kind, of those with these names, which end with the layer. Others belong to the first."""
    of_layer = {layer: i for i, kind in enumerate(kinds) for layer in kind.layers}
    caches: list[list[str]] = [[] for _ in kinds]
    for name in names:
        caches[of_layer.get(int(name.rpartition(".")[2]), 0)].append(name)
    return caches


class SlotCaches(Generic[P, S]):
    """Rows of every slot in caches of every kind, and states. `Caches` in decoding/caches.py documents the methods.

    margin: rows that a pass may write after those of tokens.
    """

    margin = kept_slots = 0

    def __init__(self, pools: Sequence[tuple[CacheKind, P]], slots: int, states: S | None = None) -> None:
        self.slots, self.states = slots, states
        self.kinds = [_RowsOfKind(kind, pool, pool.records) for kind, pool in pools]
        # Of each slot, what `mark` copied, at ascending lengths. Of further slots, they alone have windows and states.
        self._marks: dict[int, list[Snapshot]] = {}
        self._marking = states is not None or any(group.kind.window is not None for group in self.kinds)

    @property
    def arrays(self) -> dict[str, Any]:
        """All memory by name."""
        rows = {name: array for group in self.kinds for name, array in group.pool.arrays.items()}
        return rows if self.states is None else rows | dict(self.states.arrays)

    @property
    def tokens(self) -> int | None:
        return min(
            [group.pool.most_rows for group in self.kinds if group.pool.most_rows is not None], default=None
        )

    def advance(
        self, first: int, starts: Sequence[int], written: Sequence[int], *, begun: bool = False
    ) -> None:
        """Move the rows of the slots from `first` on to where a pass needs them that begins at these positions, and
        writes so many rows of tokens, or of drafts, into each. Raises MemoryError if they do not fit.

        begun: the pass was started before the rows move, so what it writes moves, too.
        """
        for group in self.kinds:
            for slot, start, count in zip(range(first, first + len(starts)), starts, written, strict=True):
                held, base = group.records[slot], group.kind.base(start)
                if not group.pool.reserve(slot, start - base + count + self.margin):
                    raise MemoryError(f"no cache rows are left for {start + count} tokens")
                if base > held.base:
                    group.pool.drop(slot, base - held.base, start - base + (count if begun else 0))
                held.base, held.last = base, start + count
                held.first = min(max(held.first, base), start)

    def reserve(self, slot: int, length: int) -> bool:
        rows = [(group.pool, length - group.kind.base(length)) for group in self.kinds]
        return all(pool.reserve(slot, count + self.margin) for pool, count in rows)

    def _of(self, slot: int) -> Sequence[_RowsOfKind[P]]:
        """The kinds that have rows of this slot."""
        return [group for group in self.kinds if slot < len(group.records)]

    def release(self, slot: int, length: int = 0) -> None:
        if not length:
            self._marks.pop(slot, None)
        for group in self._of(slot):
            held = group.records[slot]
            group.pool.release(slot, max(0, length - held.base))
            if not length:
                held.base = held.first = held.last = 0

    def move(self, source: int, target: int, length: int) -> None:
        self._marks.pop(target, None)
        if marks := self._marks.pop(source, None):
            self._marks[target] = marks
        for group in self._of(target):
            origin, held = group.records[source], group.records[target]
            group.pool.move(source, target, max(0, length - origin.base))
            held.base, held.first, held.last = origin.base, origin.first, length
            origin.base = origin.first = origin.last = 0
        if self.states is not None and target < self.slots:
            self.states.copy(source, target)

    def holds(self, slot: int, stop: int) -> bool:
        """Whether a pass that writes rows before this position can leave all rows of a slot where they are."""
        return self.states is None and all(
            group.kind.window is None or stop <= group.records[slot].base + group.kind.rows
            for group in self.kinds
        )

    def last(self, slot: int) -> int:
        """From this position on, no row belongs to a token of the slot's sequence."""
        return max([group.records[slot].last for group in self.kinds])

    def bases(self, starts: Sequence[int], idle: int = 0) -> dict[str, list[int]]:
        """The bases of a pass that begins at these positions, by the graph's input that takes them. So many further
        slots keep theirs.
        """
        slots = range(len(starts), len(starts) + idle)
        return {
            group.kind.input: [*map(group.kind.base, starts), *(group.records[slot].base for slot in slots)]
            for group in self.kinds
            if group.kind.window is not None
        }

    def cut_lengths(self, slot: int, length: int) -> Sequence[int]:
        if slot >= self.slots and self._marking:
            marked = {n for mark in self._marks.get(slot, ()) for n in mark.lengths}
            return sorted(n for n in marked if n <= length)
        first = [max(group.kind.base(length), group.records[slot].first) for group in self.kinds]
        shortest = [group.kind.shortest(at) for group, at in zip(self.kinds, first, strict=True)]
        if self.states is not None:
            shortest.append(self.states.position(slot))
        return range(max(shortest), length + 1)

    def kept_bytes(self, length: int) -> int:
        if self.kept_slots:  # of which windows and states are no part
            return length * sum([group.pool.row_bytes for group in self.kinds if group.kind.window is None])
        states = 0 if self.states is None else self.states.state_bytes
        return length * sum([group.pool.row_bytes for group in self.kinds]) + states

    def copy(self, source: int, target: int, length: int) -> None:
        self._marks.pop(target, None)
        marked = source >= self.slots and self._marking and length > 0
        marks = [next(mark for mark in self._marks[source] if length in mark.lengths)] if marked else []
        for i, group in enumerate(self.kinds):
            if source >= len(group.records):
                self._restore(i, target, marks, length)
                continue
            origin, held = group.records[source], group.records[target]
            group.pool.copy(source, target, max(0, length - origin.base))
            held.base, held.first, held.last = origin.base, origin.first, length
        if self.states is not None and source < self.slots:
            self.states.copy(source, target)
        elif self.states is not None and marks:
            self.states.put(target, marks[0].data.states)

    def mark(self, slot: int, length: int, shortest: int) -> None:
        if not (self._marking and length):
            return
        mark = self.keep(slot, 0, length, shortest, marking=True)
        if len(mark.lengths):  # beyond the most, the last one gives way
            shorter = [each for each in self._marks.get(slot, ()) if each.stop < length]
            self._marks[slot] = [*shorter[: _MOST_MARKS - 1], mark]

    @property
    def marked_bytes(self) -> int:
        return sum(mark.size for marks in self._marks.values() for mark in marks)

    def adopt(self, source: int, target: int) -> None:
        if marks := self._marks.get(source):
            others = self._marks.get(target, [])
            shorter = [mark for mark in marks if not others or mark.stop < others[0].stop]
            self._marks[target] = (shorter + others)[-_MOST_MARKS:]

    def keep(self, slot: int, start: int, stop: int, shortest: int, *, marking: bool = False) -> Snapshot:
        """The states are with the rows that end at their position, or at a pending row. marking: without the rows of
        layers that keep all.
        """
        copies, least, size = [], start + 1, 0
        for group in self.kinds:
            if marking and group.kind.window is None:
                copies.append(_KeptRows(stop, []))
                continue
            held, first = group.records[slot], self._first(group, slot, start, stop, shortest)
            needed = max(group.kind.first(shortest), held.first)
            assert first == stop or held.base <= held.first <= first < stop <= held.last, (start, stop, held)
            row = max(0, first - held.base)  # what lies before the base was dropped: then none are copied
            copies.append(_KeptRows(first, group.pool.take(slot, row, row + stop - first)))
            least = max(least, group.kind.shortest(needed))
            size += (stop - first) * group.pool.row_bytes
        if self.states is None:
            return Snapshot(start, stop, range(least, stop + 1), _Kept(copies, None), size)
        position = self.states.position(slot)
        if not position <= stop <= position + self.states.most_pending:
            return Snapshot(start, stop, (), _Kept(copies, None), size)
        lengths, states = range(max(least, position), stop + 1), self.states.take(slot)
        return Snapshot(start, stop, lengths, _Kept(copies, states), size + self.states.state_bytes)

    def read(self, slot: int, start: int, stop: int) -> dict[str, Any]:
        """Copies of the rows of positions start .. stop-1, by cache: those that the row after them sees."""
        rows: dict[str, Any] = {}
        for group in self.kinds:
            base, first = group.records[slot].base, max(start, group.kind.first(stop))
            rows |= zip(group.pool.arrays, group.pool.take(slot, first - base, stop - base), strict=True)
        return rows

    def lacks(self, slot: int, kept: Snapshot, shortest: int) -> bool:
        """States are with the last copy of a prefix only."""
        last = kept.start < shortest <= kept.stop
        more = self.states is not None and last and kept.stop not in kept.lengths
        for group, copy in zip(self.kinds, kept.data.rows, strict=True):
            first = self._first(group, slot, kept.start, kept.stop, shortest)
            if first > copy.first:  # copies of the positions after these may need them
                return False
            more = more or first < copy.first
        return more

    @staticmethod
    def _first(group: _RowsOfKind[P], slot: int, start: int, stop: int, shortest: int) -> int:
        """The first row that a copy of positions start .. stop-1 has: `keep` documents them."""
        return min(max(start, group.kind.first(shortest), group.records[slot].first), stop)

    def restore(self, slot: int, kept: Sequence[Snapshot], length: int) -> None:
        for i in range(len(self.kinds)):
            self._restore(i, slot, kept, length)
        if self.states is not None:
            self.states.put(slot, kept[-1].data.states)

    def _restore(self, kind: int, slot: int, kept: Sequence[Snapshot], length: int) -> None:
        """Give a slot the rows of one kind."""
        group = self.kinds[kind]
        held = group.records[slot]
        held.base = held.first = group.kind.base(length)
        held.last = length
        for snapshot in kept:
            copy: _KeptRows = snapshot.data.rows[kind]
            if copy.first > snapshot.start:
                held.first = max(held.base, copy.first)
            first, stop = max(copy.first, held.base), min(snapshot.stop, length)
            if first < stop:
                part = slice(first - copy.first, stop - copy.first)
                group.pool.write([rows[..., part, :] for rows in copy.rows], slot, first - held.base)

    def compact(self, slot: int, start: int, nodes: Sequence[int]) -> None:
        """Rows alone: targets with states verify chains, whose rows lie in order."""
        for group in self.kinds:
            group.pool.compact(slot, start - group.records[slot].base, nodes)

    def clear(self, slot: int, first: int = 0) -> None:
        if not first:
            self._marks.pop(slot, None)
        for group in self.kinds:
            held = group.records[slot]
            group.pool.clear(slot, max(0, first - held.base))
            if first == 0:
                held.base = held.first = held.last = 0
            else:
                held.last = min(held.last, first)
        if self.states is not None:
            self.states.clear(slot, max(first - self.states.position(slot), 0) if first else None)
