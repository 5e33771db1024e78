"""The memory of recurrent layers in the embedded engine: one state of fixed size for each slot.

A slot's states belong to `position`. The rows from there on are pending: docs/hybrid.md says how a pass replays them.
So a slot can be cut to `position`, and to each length after it up to its own. Rows of attention lie in `HostRows`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash_trt.decoding.caches import Snapshot
from dflash_trt.engines.onnxruntime_caches import HostRows
from dflash_trt.errors import DFlashError

Array = np.ndarray[Any, Any]

POSITION, PENDING = "position_state", "pending_"


@dataclass(frozen=True, slots=True)
class _Copy:
    """Rows of each cache, and the states that belong to the end of the rows, by name; or none."""

    rows: Snapshot
    states: Mapping[str, Array] | None


class HybridCaches:
    """Rows and states of every slot. `Caches` in decoding/caches.py documents the methods."""

    def __init__(self, rows: HostRows, shapes: Mapping[str, tuple[tuple[int, ...], Any]]) -> None:
        """`shapes`: shape and dtype of each state of a sequence, by name."""
        self.rows = rows
        size = sum(int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in shapes.values())
        try:
            self.states = {
                name: np.zeros((rows.slots, *shape), dtype) for name, (shape, dtype) in shapes.items()
            }
        except (MemoryError, ValueError) as error:
            raise DFlashError(
                f"no memory for the states of {rows.slots} sequences ({size} bytes each): lower max_batch_size"
            ) from error
        self.state_bytes: int = size

    @property
    def arrays(self) -> dict[str, Array]:
        """All memory by name."""
        return self.rows.arrays | self.states

    def views(self, first: int, slots: int) -> Iterator[tuple[str, Array]]:
        """The states of consecutive slots, for a pass."""
        for name, memory in self.states.items():
            yield name, memory[first : first + slots]

    def position(self, slot: int) -> int:
        return int(self.states[POSITION][slot])

    def lengths(self, slot: int, length: int) -> Sequence[int]:
        return range(max(self.rows.shortest(length), self.position(slot)), length + 1)

    def kept_bytes(self, length: int) -> int:
        return self.rows.kept_bytes(length) + self.state_bytes

    def copy(self, source: int, target: int, length: int) -> None:
        self.rows.copy(source, target, length)
        for memory in self.states.values():
            memory[target] = memory[source]

    def keep(self, slot: int, start: int, stop: int, shortest: int) -> Snapshot:
        position = self.position(slot)
        rows, reach = self.rows.keep(slot, start, stop, shortest), position + self.most_pending
        if not position <= stop <= reach:
            return Snapshot(start, stop, (), _Copy(rows, None), rows.size)
        states = {name: memory[slot].copy() for name, memory in self.states.items()}
        lengths = range(max(rows.lengths[0], position), stop + 1) if rows.lengths else ()
        return Snapshot(start, stop, lengths, _Copy(rows, states), rows.size + self.state_bytes)

    def lacks(self, kept: Snapshot, shortest: int) -> bool:
        """States are with the last copy of a prefix only."""
        if kept.start < shortest <= kept.stop and kept.stop not in kept.lengths:
            return True
        return self.rows.lacks(kept.data.rows, shortest)

    def restore(self, slot: int, kept: Sequence[Snapshot], length: int) -> None:
        self.rows.restore(slot, [each.data.rows for each in kept], length)
        for name, state in kept[-1].data.states.items():
            self.states[name][slot] = state

    def compact(self, slot: int, start: int, nodes: Sequence[int]) -> None:
        self.rows.compact(slot, start, nodes)
        for rows in self._pending(slot):
            rows[: len(nodes)] = rows[list(nodes)]  # the right side is a copy

    def clear(self, slot: int, first: int = 0, last: int | None = None) -> None:
        self.rows.clear(slot, first, last)
        if first == 0:
            for memory in self.states.values():
                memory[slot] = 0
            return
        begin = max(first - self.position(slot), 0)
        for rows in self._pending(slot):
            rows[begin:] = 0

    def close(self) -> None:
        self.rows.close()
        self.states = {}

    @property
    def most_pending(self) -> int:
        """The most rows after a slot's position."""
        return next((len(rows) for rows in self._pending(0)), 0)

    def _pending(self, slot: int) -> Iterator[Array]:
        return (memory[slot] for name, memory in self.states.items() if name.startswith(PENDING))
