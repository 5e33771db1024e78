"""What arrays and rounds know of a device engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch

from dflash_trt.engines.device.caches import DeviceCaches

Array = np.ndarray[Any, Any]
Tensor = torch.Tensor


class DeviceEngine(Protocol):
    """Runs the passes of one graph on tensors, on a stream. Inputs and outputs are in buffers of their largest size, of
    the profile PREFILL or DECODE (sizes.py).

    dtypes: of the inputs and outputs, by name.
    """

    device: torch.device
    stream: Any
    dtypes: Mapping[str, torch.dtype]
    caches: DeviceCaches

    def bind(self, profile: int, name: str, buffer: Tensor) -> None:
        """Use other memory, which must be large enough, for an input or an output. Before the first pass."""

    def buffer(self, profile: int, name: str, *shape: int) -> Tensor:
        """The memory of an input or an output as a tensor of this shape."""

    def whole_buffer(self, profile: int, name: str) -> Tensor:
        """The memory of an input or an output at its largest size."""

    def run(
        self, profile: int, feeds: Mapping[str, Array | Tensor], *, first_slot: int = 0
    ) -> Mapping[str, Tensor]:
        """Enqueue one pass over slots from `first_slot` on. Called on the stream. Does not wait for the pass.

        Feeds on the host are uploaded. Feeds on the device are copied unless they are already in their buffer.
        Outputs are views of buffers that the next pass of this profile overwrites.
        """

    def close(self) -> None:
        """Free the caches and the engine."""
