"""Execution contexts of TensorRT, with checked calls, and what TensorRT-RTX adds to them: CUDA graphs of its own, and
kernels that it compiles for a shape and keeps in a file. Full TensorRT has none of this. Its plans hold their kernels,
and the engine captures CUDA graphs itself.
"""

from __future__ import annotations

import logging
import os
import re
from collections import deque
from pathlib import Path
from typing import Any

import torch

from dflash_trt.engines.device.sizes import DECODE
from dflash_trt.errors import BundleError
from dflash_trt.files.disk import whole_file
from dflash_trt.files.reading import read_file
from dflash_trt.hardware import gpus
from dflash_trt.logs import warn_once

_log = logging.getLogger(__name__)
# TensorRT's messages that an error repeats.
_MESSAGES = 5
# A larger file is not read. The kernels of one plan are some megabytes of source.
_MOST_BYTES = 1 << 30


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


def captures_by_itself(trt: Any) -> bool:
    """Whether the runtime captures CUDA graphs on its own, as TensorRT-RTX does."""
    return hasattr(trt, "CudaGraphStrategy")


class KernelCache:
    """The kernels that TensorRT-RTX compiled on this machine, in a file for the next process.

    Both plans of a pair share it. A file that cannot be read, written or used costs a warning and no more.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self._cache: Any = None
        self._stored = b""

    def attach(self, config: Any) -> None:
        """Let the contexts of a runtime configuration use the cache."""
        if self._cache is None:
            self._cache = config.create_runtime_cache()
            self._load()
        if not config.set_runtime_cache(self._cache):
            warn_once(
                _log, f"{self.file}: TensorRT-RTX refused the cache; it compiles its kernels in each process"
            )

    def save(self) -> None:
        """Write the file if kernels were added. Another process may write it at the same time."""
        if self._cache is None:
            return
        serialized = self._cache.serialize()
        if serialized is None or (kernels := bytes(serialized)) == self._stored:
            return
        partial_file = self.file.with_name(f"{self.file.name}.{os.getpid()}")
        try:
            self.file.parent.mkdir(exist_ok=True)
            with whole_file(partial_file) as file:
                file.write(kernels)
            partial_file.replace(self.file)
        except OSError as error:
            warn_once(
                _log,
                f"{self.file}: cannot be written ({error.strerror}); TensorRT-RTX compiles its kernels again in each "
                "process",
            )
            return
        self._stored = kernels
        _log.info("kept TensorRT-RTX's kernels, %.1f MB, in %s", len(kernels) / 1e6, self.file)

    def _load(self) -> None:
        if not os.path.lexists(self.file):
            return
        try:
            kernels = read_file(self.file, _MOST_BYTES, BundleError)
        except BundleError as error:
            warn_once(_log, f"{error}; TensorRT-RTX compiles its kernels again")
            return
        if self._cache.deserialize(kernels):
            self._stored = kernels
        else:
            warn_once(
                _log,
                f"{self.file}: TensorRT-RTX does not take these kernels: they are damaged, or of another version or "
                "GPU; it compiles them again",
            )


def kernel_cache(trt: Any, bundle: Path, gpu: str) -> KernelCache | None:
    """The cache beside a bundle, for a GPU, its driver and the version. None if plans hold their kernels."""
    if not captures_by_itself(trt):
        return None
    drivers = {card["driver_version"] for card in gpus() if "driver_version" in card}
    parts = (gpu, *sorted(drivers), trt.__version__)
    name = "-".join(re.sub(r"[^A-Za-z0-9.]+", "_", part) for part in parts)
    return KernelCache(bundle.with_name(f"{bundle.name}.kernels") / f"{name}.cache")


def new_context(trt: Any, engine: Any, profile: int, kernels: KernelCache | None) -> Any:
    """A context for passes of PREFILL or DECODE, or None if TensorRT has none. Scratch memory is lent to it.

    TensorRT-RTX compiles the kernels of a shape before its first pass (EAGER). So a shape is always computed by the
    same kernels, and the tokens do not depend on when a compilation ended. Passes of DECODE use the same memory each
    time, and are captured as CUDA graphs.
    """
    strategy = trt.ExecutionContextAllocationStrategy.USER_MANAGED
    if not captures_by_itself(trt):
        return engine.create_execution_context(strategy)
    config = engine.create_runtime_config()
    config.set_execution_context_allocation_strategy(strategy)
    config.dynamic_shapes_kernel_specialization_strategy = trt.DynamicShapesKernelSpecializationStrategy.EAGER
    graphs = trt.CudaGraphStrategy
    config.cuda_graph_strategy = graphs.WHOLE_GRAPH_CAPTURE if profile == DECODE else graphs.DISABLED
    if kernels is not None:
        kernels.attach(config)
    return engine.create_execution_context(config)
