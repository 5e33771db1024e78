"""A stand-in for the TensorRT-RTX module: fake_tensorrt.py, with the runtime configuration of TensorRT-RTX.

A pass of new shapes compiles kernels first, unless the runtime cache has them. A context with whole-graph capture
captures the second pass of a shape and replays the later ones, until its shapes or addresses change.
`test_the_double_has_the_names_of_tensorrt_rtx` compares the names with the installed package.
"""

from __future__ import annotations

import json
from typing import Any

from tests.doubles import fake_tensorrt as full
from tests.doubles.cuda_double import Cuda

__version__ = "1.7.1.116"
MAGIC = b"RTXCACHE"


def __getattr__(name: str) -> Any:
    """What both modules have."""
    return getattr(full, name)


class BuilderFlag:
    REQUIRE_USER_ALLOCATION = "REQUIRE_USER_ALLOCATION"


class ComputeCapability:
    SM89, SM120 = "SM89", "SM120"


class CudaGraphStrategy:
    DISABLED, WHOLE_GRAPH_CAPTURE = "DISABLED", "WHOLE_GRAPH_CAPTURE"


class DynamicShapesKernelSpecializationStrategy:
    LAZY, EAGER, NONE = "LAZY", "EAGER", "NONE"


class Config(full.Config):
    num_compute_capabilities = 0

    def set_flag(self, flag: str) -> None:
        assert flag == BuilderFlag.REQUIRE_USER_ALLOCATION

    def set_compute_capability(self, capability: str, index: int) -> bool:
        return 0 <= index < self.num_compute_capabilities


class Builder(full.Builder):
    def create_builder_config(self) -> Config:
        return Config()


class IRuntimeCache:
    """The names of compiled kernels."""

    def __init__(self) -> None:
        self.kernels: set[str] = set()

    def serialize(self) -> bytes:
        return MAGIC + json.dumps(sorted(self.kernels)).encode()

    def deserialize(self, blob: Any) -> bool:
        if not bytes(blob).startswith(MAGIC):
            return False
        try:
            self.kernels = set(json.loads(bytes(blob)[len(MAGIC) :]))
        except ValueError:
            return False
        return True


class IRuntimeConfig:
    def __init__(self) -> None:
        self.cuda_graph_strategy = CudaGraphStrategy.DISABLED
        self.dynamic_shapes_kernel_specialization_strategy = DynamicShapesKernelSpecializationStrategy.LAZY
        self._cache: IRuntimeCache | None = None
        self._allocation = "STATIC"

    def create_runtime_cache(self) -> IRuntimeCache:
        return IRuntimeCache()

    def set_runtime_cache(self, cache: IRuntimeCache) -> bool:
        self._cache = cache
        return True

    def get_runtime_cache(self) -> IRuntimeCache | None:
        return self._cache

    def set_execution_context_allocation_strategy(self, strategy: str) -> None:
        self._allocation = strategy

    def get_execution_context_allocation_strategy(self) -> str:
        return self._allocation


class Runtime(full.Runtime):
    def deserialize_cuda_engine(self, data: Any) -> ICudaEngine | None:
        engine = super().deserialize_cuda_engine(data)
        return None if engine is None else ICudaEngine.of(engine)


class ICudaEngine(full.Engine):
    @classmethod
    def of(cls, engine: full.Engine) -> ICudaEngine:
        engine.__class__ = cls
        assert isinstance(engine, cls)
        return engine

    def create_runtime_config(self) -> IRuntimeConfig:
        return IRuntimeConfig()

    def create_execution_context(self, runtime_config: Any) -> IExecutionContext:
        strategy = runtime_config.get_execution_context_allocation_strategy()
        assert strategy == full.ExecutionContextAllocationStrategy.USER_MANAGED
        return IExecutionContext(self, runtime_config)


class IExecutionContext(full.Context):
    capturable = True

    def __init__(self, engine: ICudaEngine, config: IRuntimeConfig) -> None:
        super().__init__(engine)
        self._config = config
        self._bound, self._runs = "", 0  # shapes and addresses of the last passes, and their number

    def is_stream_capturable(self, stream: int) -> bool:
        assert stream in Cuda.streams
        return self.capturable

    def execute_async_v3(self, stream: int) -> bool:
        assert Cuda.capturing is None, "the runtime captures by itself"
        shapes = json.dumps([[name, self.get_tensor_shape(name)] for name in self._engine._names])
        cache = self._config.get_runtime_cache()
        lazy = DynamicShapesKernelSpecializationStrategy.LAZY
        assert self._config.dynamic_shapes_kernel_specialization_strategy != lazy, "kernels may change later"
        if cache is not None and shapes not in cache.kernels:
            cache.kernels.add(shapes)
            Cuda.counts["compilations"] += 1
        captures = self._config.cuda_graph_strategy == CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
        bound = shapes + json.dumps(sorted(self._addresses.items()))
        if captures and self.capturable:
            # The first run compiles the kernels of a shape. A context has one graph.
            self._bound, self._runs = bound, self._runs + 1 if bound == self._bound else 1
            if self._runs == 2:
                Cuda.counts["captures"] += 1
            elif self._runs > 2:
                Cuda.counts["graph launches"] += 1
        Cuda.counts["decoding passes"] += self._profile
        return super().execute_async_v3(stream)
