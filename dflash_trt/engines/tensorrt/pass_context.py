"""An execution context of TensorRT, with checked calls, and what was set in it."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import torch

from dflash_trt.errors import BundleError

# TensorRT's messages that an error repeats.
_MESSAGES = 5


class Messages:
    """The last errors of a logger, each shortened to a line."""

    def __init__(self) -> None:
        self._last: deque[str] = deque(maxlen=_MESSAGES)

    def logger(self, trt: Any) -> Any:
        """A logger whose errors are kept here."""
        kept = self._last

        class Logger(trt.ILogger):  # type: ignore[misc]
            def __init__(self) -> None:
                trt.ILogger.__init__(self)

            def log(self, severity: Any, message: str) -> None:
                if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                    kept.append(" ".join(message.split())[:300])

        return Logger()

    def __str__(self) -> str:
        """For the end of an error; empty if there was none."""
        return f". Its last messages: {' | '.join(self._last)}" if self._last else ""


class PassContext:
    """A context of one profile of a plan. Shapes and addresses that are already set are not set again.

    A call that TensorRT refuses raises RuntimeError with its last messages: it would compute with the former shapes or
    addresses otherwise.
    """

    def __init__(self, context: Any, profile: int, plan: Path, stream: Any, messages: Messages) -> None:
        if context is None:
            raise BundleError(f"{plan}: TensorRT could not create a context{messages}")
        self.context, self.profile, self.shapes = context, profile, dict[str, tuple[int, ...]]()
        self.slot: int | None = None  # the first one of the bound caches
        self._plan, self._stream, self._messages = plan, stream, messages
        done = context.set_optimization_profile_async(profile, stream.cuda_stream)
        self._check(done, f"refused profile {profile}")

    def set_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """Raises ValueError for a shape outside of the profile."""
        if self.shapes.get(name) == shape:
            return
        if not self.context.set_input_shape(name, shape):
            raise ValueError(
                f"{self._plan}: {name} {list(shape)} is outside of profile {self.profile}{self._messages}"
            )
        self.shapes[name] = shape

    def set_address(self, name: str, memory: torch.Tensor) -> None:
        """Bind an input or an output to memory."""
        address = memory.data_ptr()
        done = self.context.set_tensor_address(name, address)
        self._check(done, f"refused the address {address:#x} for {name}")

    def set_scratch(self, memory: torch.Tensor) -> None:
        """Give the context scratch memory, uint8."""
        self.context.set_device_memory(memory.data_ptr(), memory.numel())

    def infer(self) -> None:
        """Let TensorRT infer the shapes of the outputs."""
        try:
            missing = self.context.infer_shapes()
        except RuntimeError as error:
            raise RuntimeError(
                f"{self._plan}: TensorRT refused the shapes: {error}{self._messages}"
            ) from error
        if missing:
            raise BundleError(f"{self._plan}: no shapes for {', '.join(missing)}; build the bundle again")

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of an input or an output, after `infer`."""
        return tuple(self.context.get_tensor_shape(name))

    def enqueue(self) -> None:
        """Enqueue a pass on the stream."""
        self._check(self.context.execute_async_v3(self._stream.cuda_stream), "could not enqueue a pass")

    @property
    def capturable(self) -> bool:
        """Whether its passes can be captured. TensorRT-RTX says so; TensorRT cannot be asked."""
        ask = getattr(self.context, "is_stream_capturable", None)
        return ask is None or bool(ask(self._stream.cuda_stream))

    def _check(self, done: bool, otherwise: str) -> None:
        if not done:
            raise RuntimeError(f"{self._plan}: TensorRT {otherwise}{self._messages}")
