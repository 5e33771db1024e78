"""Caches of rows beside recurrent states, for engines on the host and on a GPU: one state of fixed size for each slot.

A slot's states belong to `position`. The rows from there on are pending: docs/hybrid.md says how a pass replays them.
So a slot can be cut to `position`, and to each length after it up to its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from dflash_trt.decoding.caches import Snapshot
from dflash_trt.engines.row_caches import RowCaches

POSITION, PENDING = "position_state", "pending_"
R = TypeVar("R", bound=RowCaches[Any])


@dataclass(frozen=True, slots=True)
class _RowsAndStates:
    """The content of a snapshot: rows, and the states that belong to their end; or None."""

    rows: Snapshot
    states: Any


class StateCaches(ABC, Generic[R]):
    """Rows and states of every slot. `Caches` in decoding/caches.py documents the methods.

    state_bytes: of the states of one slot. most_pending: the most rows after a slot's position.
    """

    state_bytes: int
    most_pending: int

    def __init__(self, rows: R) -> None:
        self.rows = rows

    @abstractmethod
    def position(self, slot: int) -> int:
        """The length that a slot's states belong to."""

    @abstractmethod
    def _take(self, slot: int) -> Any:
        """A copy of a slot's states. Raises MemoryError if there is no memory."""

    @abstractmethod
    def _put(self, slot: int, states: Any) -> None:
        """Give a slot the states that `_take` returned."""

    @abstractmethod
    def _copy(self, source: int, target: int) -> None:
        """Give a slot the states of another one."""

    @abstractmethod
    def _clear(self, slot: int, pending: int | None) -> None:
        """Set a slot's pending rows to 0 from this one on; with None, all of its states."""

    def cut_lengths(self, slot: int, length: int) -> Sequence[int]:
        """From the states' position on, if the rows can be cut so far."""
        return range(max(self.rows.shortest(slot, length), self.position(slot)), length + 1)

    def kept_bytes(self, length: int) -> int:
        """Of the rows, and of one slot's states."""
        return self.rows.kept_bytes(length) + self.state_bytes

    def copy(self, source: int, target: int, length: int) -> None:
        """Rows and states."""
        self.rows.copy(source, target, length)
        self._copy(source, target)

    def keep(self, slot: int, start: int, stop: int, shortest: int) -> Snapshot:
        """The states are with the rows that end at their position, or at a pending row."""
        position, rows = self.position(slot), self.rows.keep(slot, start, stop, shortest)
        if not position <= stop <= position + self.most_pending:
            return Snapshot(start, stop, (), _RowsAndStates(rows, None), rows.size)
        content = _RowsAndStates(rows, self._take(slot))
        lengths = range(max(rows.lengths[0], position), stop + 1) if rows.lengths else ()
        return Snapshot(start, stop, lengths, content, rows.size + self.state_bytes)

    def lacks(self, kept: Snapshot, shortest: int) -> bool:
        """States are with the last copy of a prefix only."""
        if kept.start < shortest <= kept.stop and kept.stop not in kept.lengths:
            return True
        return self.rows.lacks(kept.data.rows, shortest)

    def restore(self, slot: int, kept: Sequence[Snapshot], length: int) -> None:
        """All rows, and the states of the last copy."""
        self.rows.restore(slot, [each.data.rows for each in kept], length)
        self._put(slot, kept[-1].data.states)

    def compact(self, slot: int, start: int, nodes: Sequence[int]) -> None:
        """Rows alone: targets with states verify chains, whose rows lie in order."""
        self.rows.compact(slot, start, nodes)

    def clear(self, slot: int, first: int = 0, last: int | None = None) -> None:
        """Rows, and the pending ones from `first` on, or all states."""
        self.rows.clear(slot, first, last)
        self._clear(slot, max(first - self.position(slot), 0) if first else None)
