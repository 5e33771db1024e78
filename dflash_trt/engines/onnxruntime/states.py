"""The memory of recurrent layers in the embedded engine. Rows of attention lie in `HostRows`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from dflash_trt.engines.onnxruntime.caches import HostRows
from dflash_trt.engines.state_caches import PENDING, POSITION, StateCaches
from dflash_trt.errors import DFlashError

Array = np.ndarray[Any, Any]


class HybridCaches(StateCaches[HostRows]):
    """Rows and states of every slot, in arrays [slots, ...]."""

    def __init__(self, rows: HostRows, shapes: Mapping[str, tuple[tuple[int, ...], Any]]) -> None:
        """`shapes`: shape and dtype of each state of a sequence, by name."""
        super().__init__(rows)
        self.state_bytes = sum(
            int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in shapes.values()
        )
        try:
            self.states = {
                name: np.zeros((rows.slots, *shape), dtype) for name, (shape, dtype) in shapes.items()
            }
        except (MemoryError, ValueError) as error:
            raise DFlashError(
                f"no memory for the states of {rows.slots} sequences ({self.state_bytes} bytes each): "
                "lower max_batch_size"
            ) from error
        self._pending = [memory for name, memory in self.states.items() if name.startswith(PENDING)]
        self.most_pending = self._pending[0].shape[1] if self._pending else 0

    @property
    def arrays(self) -> dict[str, Array]:
        """All memory by name."""
        return self.rows.arrays | self.states

    def views(self, first: int, slots: int) -> Iterator[tuple[str, Array]]:
        """The states of consecutive slots, for a pass."""
        for name, memory in self.states.items():
            yield name, memory[first : first + slots]

    def position(self, slot: int) -> int:
        """The length that a slot's states belong to, which is one of them."""
        return int(self.states[POSITION][slot])

    def _take(self, slot: int) -> dict[str, Array]:
        return {name: memory[slot].copy() for name, memory in self.states.items()}

    def _put(self, slot: int, states: Mapping[str, Any]) -> None:
        for name, state in states.items():
            self.states[name][slot] = state

    def _copy(self, source: int, target: int) -> None:
        for memory in self.states.values():
            memory[target] = memory[source]

    def _clear(self, slot: int, pending: int | None) -> None:
        if pending is None:
            self._put(slot, dict.fromkeys(self.states, 0))
        for memory in self._pending:
            memory[slot, pending:] = 0

    def close(self) -> None:
        """Free all memory."""
        self.rows.close()
        self.states, self._pending = {}, []
