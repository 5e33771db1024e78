"""Caches of rows, for attention: which row of a slot belongs to which position, for engines on the host and on a GPU.

Layers of one kind (dflash_trt/bundle/cache_kinds.py) share a pool, in which row j of a slot is position base + j. A
pass moves a slot's rows down before it runs, if the base of its first position is another than that of the pass before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from dflash_trt.bundle.cache_kinds import CacheKind
from dflash_trt.decoding.caches import Snapshot


class RowPool(Protocol):
    """Rows of every slot in the caches of one kind. In an array of rows, they are the last axis but one."""

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
        """Drop the first `count` rows of a slot. The `left` rows after them become the first ones."""

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


@dataclass(slots=True)
class _RowsOfKind(Generic[P]):
    """One kind of caches: their rows, and the position of each slot's first row.

    held: from this position on, a slot has all rows of its tokens that follow its base. A restored copy may lack some.
    """

    kind: CacheKind
    pool: P
    bases: defaultdict[int, int]
    held: defaultdict[int, int]


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
        self.kinds = [_RowsOfKind(kind, pool, defaultdict(int), defaultdict(int)) for kind, pool in pools]
        # By slot: from this position on, no row belongs to a token of its sequence.
        self.ends: defaultdict[int, int] = defaultdict(int)

    @property
    def arrays(self) -> dict[str, Any]:
        """All memory by name."""
        return {name: array for each in self.kinds for name, array in each.pool.arrays.items()}

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in all caches."""
        return sum(each.pool.row_bytes for each in self.kinds)

    def advance(self, first: int, starts: Sequence[int]) -> None:
        """Move the rows of the slots from `first` on to where a pass needs them that begins at these positions."""
        for each in self.kinds:
            if each.kind.window is None:
                continue
            for slot, start in enumerate(starts, first):
                base, before = each.kind.base(start), each.bases[slot]
                if base > before:
                    each.pool.drop(slot, base - before, start - base)
                each.bases[slot] = base
                each.held[slot] = min(each.held[slot], start)

    def bases(self, starts: Sequence[int], idle: int = 0) -> dict[str, list[int]]:
        """The bases of a pass that begins at these positions, by the graph's input that takes them. So many further
        slots keep theirs.
        """
        slots = range(len(starts), len(starts) + idle)
        return {
            each.kind.input: [*map(each.kind.base, starts), *(each.bases[slot] for slot in slots)]
            for each in self.kinds
            if each.kind.window is not None
        }

    def shortest(self, slot: int, length: int) -> int:
        """The least length to which a slot of this length can be cut."""
        return max([each.kind.shortest(max(each.kind.base(length), each.held[slot])) for each in self.kinds])

    def cut_lengths(self, slot: int, length: int) -> Sequence[int]:
        return range(self.shortest(slot, length), length + 1)

    def kept_bytes(self, length: int) -> int:
        return length * self.row_bytes

    def copy(self, source: int, target: int, length: int) -> None:
        for each in self.kinds:
            base = each.bases[target] = each.bases[source]
            each.held[target] = each.held[source]
            each.pool.copy(source, target, max(0, length - base))
        self.ends[target] = length

    def keep(self, slot: int, start: int, stop: int, shortest: int) -> Snapshot:
        copies, least, size = [], start + 1, 0
        for each in self.kinds:
            base = each.bases[slot]
            held = max(each.kind.first(shortest), base, each.held[slot])
            first = min(max(start, held), stop)
            row = max(0, first - base)  # what lies before the base was dropped: then none are copied
            copies.append(_KeptRows(first, each.pool.take(slot, row, row + stop - first)))
            least = max(least, each.kind.shortest(held))
            size += (stop - first) * each.pool.row_bytes
        return Snapshot(start, stop, range(least, stop + 1), copies, size)

    def read(self, slot: int, start: int, stop: int) -> dict[str, Any]:
        """Copies of the rows of positions start .. stop-1, by cache: those that the row after them sees."""
        rows: dict[str, Any] = {}
        for each in self.kinds:
            base, first = each.bases[slot], max(start, each.kind.first(stop))
            rows |= zip(each.pool.arrays, each.pool.take(slot, first - base, stop - base), strict=True)
        return rows

    def lacks(self, kept: Snapshot, shortest: int) -> bool:
        return any(
            copy.first > min(max(kept.start, each.kind.first(shortest)), kept.stop)
            for each, copy in zip(self.kinds, kept.data, strict=True)
        )

    def restore(self, slot: int, kept: Sequence[Snapshot], length: int) -> None:
        self.ends[slot] = length
        for i, each in enumerate(self.kinds):
            base = each.bases[slot] = each.kind.base(length)
            each.held[slot] = 0
            for snapshot in kept:
                copy: _KeptRows = snapshot.data[i]
                if copy.first > snapshot.start:
                    each.held[slot] = copy.first
                first, stop = max(copy.first, base), min(snapshot.stop, length)
                if first < stop:
                    part = slice(first - copy.first, stop - copy.first)
                    each.pool.write([rows[..., part, :] for rows in copy.rows], slot, first - base)

    def compact(self, slot: int, start: int, nodes: Sequence[int]) -> None:
        for each in self.kinds:
            each.pool.compact(slot, start - each.bases[slot], nodes)

    def clear(self, slot: int, first: int = 0, last: int | None = None) -> None:
        for each in self.kinds:
            base = each.bases[slot]
            each.pool.clear(slot, max(0, first - base), None if last is None else max(0, last - base))
            if first == 0:
                each.bases[slot] = each.held[slot] = self.ends[slot] = 0
