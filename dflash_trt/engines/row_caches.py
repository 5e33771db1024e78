"""Caches of rows, for attention: which row of a slot belongs to which position, for engines on the host and on a GPU.

Layers of one kind (dflash_trt/bundle/cache_kinds.py) share a pool, in which row j of a slot is position base + j. Each
slot has one record for each kind (`SlotRows`). A pass moves a slot's rows down before it runs, if the base of its first
position is another than that of the pass before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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

    def clear(self, slot: int, first: int, last: int | None) -> None:
        """Rows first .. last-1 of a slot become 0."""


P = TypeVar("P", bound=RowPool)


@dataclass(frozen=True, slots=True)
class _KeptRows:
    """Rows of one kind for positions from `first` to the snapshot's end, one array for each cache."""

    first: int
    rows: Sequence[Any]


def whole(capacity: int) -> CacheKind:
    """The kind of all layers of a graph whose layers keep all rows."""
    return CacheKind(window=None, stride=1, rows=capacity, row_bytes=0, layers=())


@dataclass(frozen=True, slots=True)
class _RowsOfKind(Generic[P]):
    """One kind of caches, and their rows."""

    kind: CacheKind
    pool: P

    @property
    def records(self) -> Sequence[SlotRows]:
        """The record of each slot."""
        return self.pool.records


def by_kind(kinds: Sequence[CacheKind], names: Iterable[str]) -> list[list[str]]:
    """The caches of each kind, of those with these names, which end with the layer. Others belong to the first."""
    of_layer = {layer: i for i, kind in enumerate(kinds) for layer in kind.layers}
    caches: list[list[str]] = [[] for _ in kinds]
    for name in names:
        caches[of_layer.get(int(name.rpartition(".")[2]), 0)].append(name)
    return caches


class RowCaches(Generic[P]):
    """Rows of every slot in caches of every kind. `Caches` in decoding/caches.py documents the methods."""

    def __init__(self, pools: Sequence[tuple[CacheKind, P]], slots: int) -> None:
        self.slots = slots
        self.kinds = [_RowsOfKind(kind, pool) for kind, pool in pools]

    @property
    def arrays(self) -> dict[str, Any]:
        """All memory by name."""
        return {name: array for each in self.kinds for name, array in each.pool.arrays.items()}

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in all caches."""
        return sum(each.pool.row_bytes for each in self.kinds)

    def advance(self, first: int, starts: Sequence[int], written: Sequence[int]) -> None:
        """Move the rows of the slots from `first` on to where a pass needs them that begins at these positions, and
        writes so many rows of tokens, or of drafts, into each.
        """
        for each in self.kinds:
            for slot, start, count in zip(range(first, first + len(starts)), starts, written, strict=True):
                held, base = each.records[slot], each.kind.base(start)
                if base > held.base:
                    each.pool.drop(slot, base - held.base, start - base)
                held.base, held.last = base, start + count
                held.first = min(max(held.first, base), start)

    def last(self, slot: int) -> int:
        """From this position on, no row belongs to a token of the slot's sequence."""
        return max([each.records[slot].last for each in self.kinds])

    def bases(self, starts: Sequence[int], idle: int = 0) -> dict[str, list[int]]:
        """The bases of a pass that begins at these positions, by the graph's input that takes them. So many further
        slots keep theirs.
        """
        slots = range(len(starts), len(starts) + idle)
        return {
            each.kind.input: [*map(each.kind.base, starts), *(each.records[slot].base for slot in slots)]
            for each in self.kinds
            if each.kind.window is not None
        }

    def shortest(self, slot: int, length: int) -> int:
        """The least length to which a slot of this length can be cut."""
        return max(
            [each.kind.shortest(max(each.kind.base(length), each.records[slot].first)) for each in self.kinds]
        )

    def cut_lengths(self, slot: int, length: int) -> Sequence[int]:
        return range(self.shortest(slot, length), length + 1)

    def kept_bytes(self, length: int) -> int:
        return length * self.row_bytes

    def copy(self, source: int, target: int, length: int) -> None:
        for each in self.kinds:
            given, held = each.records[source], each.records[target]
            each.pool.copy(source, target, max(0, length - given.base))
            held.base, held.first, held.last = given.base, given.first, length

    def keep(self, slot: int, start: int, stop: int, shortest: int) -> Snapshot:
        copies, least, size = [], start + 1, 0
        for each in self.kinds:
            held = each.records[slot]
            needed = max(each.kind.first(shortest), held.first)
            first = min(max(start, needed), stop)
            assert first == stop or held.base <= held.first <= first < stop <= held.last, (start, stop, held)
            row = max(0, first - held.base)  # what lies before the base was dropped: then none are copied
            copies.append(_KeptRows(first, each.pool.take(slot, row, row + stop - first)))
            least = max(least, each.kind.shortest(needed))
            size += (stop - first) * each.pool.row_bytes
        return Snapshot(start, stop, range(least, stop + 1), copies, size)

    def read(self, slot: int, start: int, stop: int) -> dict[str, Any]:
        """Copies of the rows of positions start .. stop-1, by cache: those that the row after them sees."""
        rows: dict[str, Any] = {}
        for each in self.kinds:
            base, first = each.records[slot].base, max(start, each.kind.first(stop))
            rows |= zip(each.pool.arrays, each.pool.take(slot, first - base, stop - base), strict=True)
        return rows

    def lacks(self, kept: Snapshot, shortest: int) -> bool:
        return any(
            copy.first > min(max(kept.start, each.kind.first(shortest)), kept.stop)
            for each, copy in zip(self.kinds, kept.data, strict=True)
        )

    def restore(self, slot: int, kept: Sequence[Snapshot], length: int) -> None:
        for i, each in enumerate(self.kinds):
            held = each.records[slot]
            held.base = held.first = each.kind.base(length)
            held.last = length
            for snapshot in kept:
                copy: _KeptRows = snapshot.data[i]
                if copy.first > snapshot.start:
                    held.first = max(held.base, copy.first)
                first, stop = max(copy.first, held.base), min(snapshot.stop, length)
                if first < stop:
                    part = slice(first - copy.first, stop - copy.first)
                    each.pool.write([rows[..., part, :] for rows in copy.rows], slot, first - held.base)

    def compact(self, slot: int, start: int, nodes: Sequence[int]) -> None:
        for each in self.kinds:
            each.pool.compact(slot, start - each.records[slot].base, nodes)

    def clear(self, slot: int, first: int = 0, last: int | None = None) -> None:
        for each in self.kinds:
            held = each.records[slot]
            each.pool.clear(
                slot, max(0, first - held.base), None if last is None else max(0, last - held.base)
            )
            if first == 0:
                held.base = held.first = held.last = 0
            elif last is None:
                held.last = min(held.last, first)
