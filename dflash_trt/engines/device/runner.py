"""What arrays and rounds know of a device runner, and its passes that were captured."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dflash_trt.engines.device.caches import DeviceCaches

Array = np.ndarray[Any, Any]
Tensor = torch.Tensor
# A profile, and the shapes of the inputs of a pass, in their order.
Shapes = tuple[Any, ...]
Outputs = Mapping[str, Tensor]


class DeviceRunner(ABC):
    """Runs the passes of one graph on tensors, on a stream. Inputs and outputs are in buffers of their largest size, of
    the profile PREFILL or DECODE (sizes.py).

    path: of the graph or plan. inputs, outputs: names of those of a pass, without caches and states. dtypes: of all, by
    name. most_together: the most sequences of the profile PREFILL; as long as a row of each is the same as of one.
    """

    caches: DeviceCaches
    most_together = 1

    def __init__(
        self,
        path: Path,
        dtypes: Mapping[str, torch.dtype],
        inputs: Iterable[str],
        outputs: Iterable[str],
        *,
        stream: Any,
        device: torch.device,
    ) -> None:
        self.path, self.dtypes, self.stream, self.device = path, dtypes, stream, device
        self.inputs, self.outputs = list(inputs), list(outputs)
        self._names = set(self.inputs)
        self._buffers: dict[tuple[int, str], Tensor] = {}
        # What repeats a pass, and the outputs that it writes, by shapes and first slot.
        self._captured: dict[tuple[Shapes, int], tuple[Callable[[], object], Outputs]] = {}

    def bind(self, profile: int, name: str, buffer: Tensor) -> None:
        """Use other memory, which must be large enough, for an input or an output. Before the first pass."""
        self._buffers[profile, name] = buffer.view(-1)

    def whole_buffer(self, profile: int, name: str) -> Tensor:
        """The memory of an input or an output at its largest size."""
        return self._buffers[profile, name]

    def buffer(self, profile: int, name: str, *shape: int) -> Tensor:
        """The memory of an input or an output as a tensor of this shape. Raises ValueError if it is too large."""
        memory, size = self.whole_buffer(profile, name), prod(shape)
        if size > memory.numel():
            raise ValueError(f"{self.path}: {name} {list(shape)} is outside of profile {profile}")
        return memory[:size].view(shape)

    def run(self, profile: int, feeds: Mapping[str, Array | Tensor], *, first_slot: int = 0) -> Outputs:
        """Enqueue one pass over slots from `first_slot` on. Called on the stream. Does not wait for the pass.

        Feeds on the host are uploaded. Feeds on the device are copied unless they are already in their buffer.
        Outputs are views of buffers that the next pass of this profile overwrites.
        """
        if feeds.keys() != self._names:
            raise ValueError(f"{self.path}: needs {sorted(self.inputs)}, not {sorted(feeds)}")
        shapes = (profile, *[feeds[name].shape for name in self.inputs])
        if self.caches.states is not None:
            self.caches.states.prepare(first_slot, len(feeds["start"]))
        for name, fed in feeds.items():
            numbers = torch.from_numpy(fed) if isinstance(fed, np.ndarray) else fed
            if numbers.data_ptr() != self.whole_buffer(profile, name).data_ptr():
                # pageable memory is read before this returns
                self.buffer(profile, name, *fed.shape).copy_(numbers, non_blocking=True)
        for kind in self.caches.kinds:
            kind.pool.point(profile, first_slot, len(feeds["start"]))
        if (captured := self._captured.get((shapes, self._place(first_slot)))) is None:
            return self._first(shapes, first_slot)
        again, outputs = captured
        again()
        return outputs

    def _place(self, first_slot: int) -> int:
        """The slot for which a pass is captured."""
        return first_slot

    @abstractmethod
    def _first(self, shapes: Shapes, first_slot: int) -> Outputs:
        """A pass that is not captured yet. Its inputs are in their buffers."""

    @abstractmethod
    def close(self) -> None:
        """Free the caches and the runner."""


def updated(name: str) -> str:
    """The output that updates a cache or a state: k_cache.0 -> k_cache_out.0."""
    kind, dot, layer = name.partition(".")
    return f"{kind}_out{dot}{layer}"
