"""How TensorRT-RTX runs a plan: its CUDA graphs, its kernels for a shape, and the file that keeps those kernels.

Full TensorRT has none of this. Its plans hold their kernels, and the engine captures CUDA graphs itself.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Any

from dflash_trt.engines.device.sizes import DECODE
from dflash_trt.errors import BundleError
from dflash_trt.files.disk import whole_file
from dflash_trt.files.reading import read_file
from dflash_trt.hardware import gpus
from dflash_trt.logs import warn_once

_log = logging.getLogger(__name__)
# A larger file is not read. The kernels of one plan are some megabytes of source.
_MOST_BYTES = 1 << 30


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
        own = self.file.with_name(f"{self.file.name}.{os.getpid()}")
        try:
            self.file.parent.mkdir(exist_ok=True)
            with whole_file(own) as file:
                file.write(kernels)
            own.replace(self.file)
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
    drivers = {each["driver_version"] for each in gpus() if "driver_version" in each}
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
