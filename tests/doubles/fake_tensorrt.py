"""A stand-in for the TensorRT module. It accepts exactly the documented calls that the project makes.

A plan is the graph itself, and executing it runs ONNX Runtime on the bound addresses. Memory, shapes, profiles,
aliases and stream capture follow the rules in NvInfer.h and NvInferRuntime.h of TensorRT 11.1 and in the docstrings of
tensorrt_rtx 1.7.1: a call that TensorRT would refuse returns False and logs why, and one for which it promises nothing,
not even an error, raises `Undefined`. This shows that the engine uses the API as documented. It cannot show TensorRT's
own computations.
"""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import onnx
import onnx.inliner

from tests.doubles.cuda_double import ALIGNMENT, Cuda, Room
from tests.doubles.rounding import in_float32
from tests.doubles.sessions import session
from tests.doubles.trt_bodies import executable

__version__ = "11.4.0"
MAGIC = b"FAKEPLAN"
NUMPY: dict[int, Any] = {
    onnx.TensorProto.FLOAT: np.float32, onnx.TensorProto.INT64: np.int64, onnx.TensorProto.FLOAT16: np.float16,
    onnx.TensorProto.BFLOAT16: ml_dtypes.bfloat16, onnx.TensorProto.BOOL: np.bool_,
}  # fmt: skip


class Severity:
    def __init__(self, name: str) -> None:
        self.name = name


class ILogger:
    INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = map(
        Severity, ("INTERNAL_ERROR", "ERROR", "WARNING", "INFO", "VERBOSE")
    )

    def __init__(self) -> None:
        pass


class Logger(ILogger):
    def __init__(self, severity: Severity) -> None:
        pass

    def log(self, severity: Severity, message: str) -> None:
        pass


class Undefined(AssertionError):
    """A call for which TensorRT promises nothing."""


def refused(logger: Any, what: str) -> bool:
    """What a call returns that TensorRT refuses."""
    logger.log(ILogger.ERROR, what)
    return False


class IStreamWriter:
    def __init__(self) -> None:
        pass


class IProgressMonitor:
    def __init__(self) -> None:
        pass


class NetworkDefinitionCreationFlag:
    STRONGLY_TYPED = 1


class BuilderFlag:
    TF32 = "TF32"


class TensorIOMode:
    INPUT, OUTPUT = "INPUT", "OUTPUT"


class DataType:
    FLOAT, HALF, BF16, INT64, BOOL = np.float32, np.float16, ml_dtypes.bfloat16, np.int64, np.bool_


class LayerType:
    ATTENTION_INPUT = "ATTENTION_INPUT"


class ExecutionContextAllocationStrategy:
    USER_MANAGED = "USER_MANAGED"


class Tensor:
    def __init__(self, value: onnx.ValueInfoProto) -> None:
        self.name = value.name
        self.dims = [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]
        self.shape = tuple(d if isinstance(d, int) else -1 for d in self.dims)

    def get_dimension_name(self, axis: int) -> str:
        return str(self.dims[axis])


class Query:
    """A tensor inside of the graph."""

    def __init__(self, model: onnx.ModelProto, name: str, dtype: Any) -> None:
        self._model, self._name, self.dtype = model, name, NUMPY[dtype]

    @property
    def name(self) -> str:
        return self._name

    @name.setter
    def name(self, name: str) -> None:
        for node in self._model.graph.node:
            for values in (node.input, node.output):
                values[:] = [name if value == self._name else value for value in values]
        self._name = name


class Layer:
    """An attention's first layer."""

    type = LayerType.ATTENTION_INPUT

    def __init__(self, query: Query) -> None:
        self._query = query

    def get_input(self, index: int) -> Query:
        assert index == 0
        return self._query


class Network:
    def __init__(self) -> None:
        self.model = onnx.ModelProto()
        self.layers: list[Layer] = []

    @property
    def num_inputs(self) -> int:
        return len(self.model.graph.input)

    def get_input(self, index: int) -> Tensor:
        return Tensor(self.model.graph.input[index])

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def get_layer(self, index: int) -> Layer:
        return self.layers[index]

    @property
    def num_outputs(self) -> int:
        return len(self.model.graph.output)

    def mark_output(self, query: Query) -> None:
        dtype = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(query.dtype))
        self.model.graph.output.append(onnx.helper.make_tensor_value_info(query.name, dtype, None))


class OnnxParser:
    def __init__(self, network: Network, logger: Any) -> None:
        self.network, self.num_errors = network, 0

    def supports_operator(self, name: str) -> bool:
        return name.startswith("TRT_")

    def parse_from_file(self, path: str) -> bool:
        self.network.model = onnx.load(path, load_external_data=False)
        for tensor in self.network.model.graph.initializer:  # onnx refuses files that are hard links
            if tensor.data_location == onnx.TensorProto.EXTERNAL:
                place = {entry.key: entry.value for entry in tensor.external_data}
                with (Path(path).parent / place["location"]).open("rb") as file:
                    file.seek(int(place["offset"]))
                    tensor.raw_data = file.read(int(place["length"]))
                tensor.data_location = onnx.TensorProto.DEFAULT
                del tensor.external_data[:]
        model = self.network.model = onnx.inliner.inline_local_functions(self.network.model)
        dtype = {value.name: value.type.tensor_type.elem_type for value in model.graph.input}
        for node in model.graph.node:
            if node.op_type in ("TRT_Attention", "Attention"):
                cache = next(name for name in dtype if "_cache." in name)
                self.network.layers.append(Layer(Query(model, node.input[0], dtype[cache])))
        return True


class Profile:
    def __init__(self) -> None:
        self.shapes: dict[str, list[tuple[int, ...]]] = {}

    def set_shape(self, name: str, *shapes: tuple[int, ...]) -> None:
        low, usual, high = shapes
        if not all(0 <= a <= b <= c for a, b, c in zip(low, usual, high, strict=True)):
            raise ValueError(f"{name}: 0 <= min <= opt <= max does not hold")
        self.shapes[name] = list(shapes)

    def __bool__(self) -> bool:
        return bool(self.shapes)


class TimingCache:
    """Times differ in each measurement."""

    measurements = 0

    def __init__(self, times: bytes) -> None:
        self.times = times

    def fill(self) -> None:
        if not self.times:
            TimingCache.measurements += 1
            self.times = b"FAKETIMES" + str(TimingCache.measurements).encode()

    def serialize(self) -> bytes:
        return self.times


class Config:
    def __init__(self) -> None:
        self.profiles: list[Profile] = []
        self.progress_monitor: Any = None
        self.timing_cache: TimingCache | None = None

    def create_timing_cache(self, times: bytes) -> TimingCache:
        return TimingCache(bytes(times))

    def set_timing_cache(self, cache: TimingCache, ignore_mismatch: bool) -> bool:
        if cache.times and not cache.times.startswith(b"FAKETIMES") and not ignore_mismatch:
            return False
        self.timing_cache = cache
        return True

    def add_optimization_profile(self, profile: Profile) -> int:
        if not profile:
            return -1
        self.profiles.append(profile)
        return len(self.profiles) - 1


class Builder:
    def __init__(self, logger: Any) -> None:
        self.logger = logger

    def create_network(self, flags: int) -> Network:
        return Network()

    def create_builder_config(self) -> Config:
        return Config()

    def create_optimization_profile(self) -> Profile:
        return Profile()

    def build_serialized_network_to_stream(self, network: Network, config: Config, writer: Any) -> bool:
        if config.timing_cache is not None:
            config.timing_cache.fill()
        monitor = config.progress_monitor
        monitor.phase_start("Building", "", 3)
        for profile in config.profiles:
            for value in network.model.graph.input:
                fixed = Tensor(value).shape
                shapes = profile.shapes.get(value.name)
                if shapes is None and -1 in fixed:
                    return refused(self.logger, f"no shapes of {value.name}")
                for shape in shapes or ():
                    if len(shape) != len(fixed) or any(
                        n not in (-1, m) for n, m in zip(fixed, shape, strict=True)
                    ):
                        what = f"{value.name} {list(fixed)} has {list(shape)} in a profile"
                        return refused(self.logger, what)
        header = json.dumps([profile.shapes for profile in config.profiles]).encode()
        plan = MAGIC + len(header).to_bytes(8, "little") + header
        plan += executable(network.model).SerializeToString()
        for at in range(0, len(plan), 1 << 16):
            piece = plan[at : at + (1 << 16)]
            if writer.write(piece) != len(piece):
                return refused(self.logger, ILogger.ERROR, "the writer took less than it was given")
        if not monitor.step_complete("Building", 0):
            return False
        monitor.phase_finish("Building")
        return True


class Runtime:
    def __init__(self, logger: Any) -> None:
        self._logger = logger

    def deserialize_cuda_engine(self, data: Any) -> Engine | None:
        plan = bytes(data)
        if not plan.startswith(MAGIC):
            self._logger.log(
                ILogger.ERROR, "IRuntime::deserializeCudaEngine: Error Code 1:\n  Magic tag does not match"
            )
            return None
        size = int.from_bytes(plan[8:16], "little")
        return Engine(json.loads(plan[16 : 16 + size]), plan[16 + size :], self._logger)


class Engine:
    device_memory_size_v2 = 4096

    def __init__(self, profiles: list[dict[str, Any]], model: bytes, logger: Any) -> None:
        self._logger = logger
        self.document = onnx.load_from_string(model)
        graph = self.document.graph
        self._profiles = profiles
        self._inputs = {i.name: Tensor(i) for i in graph.input}
        self._outputs = {o.name: Tensor(o) for o in graph.output}
        self._types = {v.name: NUMPY[v.type.tensor_type.elem_type] for v in (*graph.input, *graph.output)}
        self._names = [*self._inputs, *self._outputs]
        self.num_io_tensors = len(self._names)
        self._session = session(in_float32(self.document))
        self._unread = self._shapes_of_queries()

    def _shapes_of_queries(self) -> dict[str, tuple[int, int]]:
        """Heads and their size of the outputs whose shapes the graph does not name."""
        names = [name for name in self._outputs if name.startswith("query.")]
        feeds = {n: np.zeros(self._profiles[-1][n][0], self._types[n]) for n in self._inputs}
        found = self._session.run(names, _as_given(feeds)) if names else []
        return {name: (array.shape[1], array.shape[3]) for name, array in zip(names, found, strict=True)}

    def get_tensor_name(self, index: int) -> str:
        return self._names[index]

    def get_tensor_mode(self, name: str) -> str:
        return TensorIOMode.INPUT if name in self._inputs else TensorIOMode.OUTPUT

    def get_tensor_dtype(self, name: str) -> Any:
        return self._types[name]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return (self._inputs | self._outputs)[name].shape

    def get_tensor_profile_shape(self, name: str, profile: int) -> list[tuple[int, ...]]:
        return [tuple(shape) for shape in self._profiles[profile][name]]

    def get_aliased_input_tensor(self, name: str) -> str:
        return name.replace("_cache_out.", "_cache.") if "_cache_out." in name else ""

    def create_execution_context(self, strategy: str) -> Context:
        assert strategy == ExecutionContextAllocationStrategy.USER_MANAGED
        return Context(self)


class Context:
    # The stream of the last pass with a piece of scratch memory, by its address.
    _users: ClassVar[dict[int, int]] = {}

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._profile: int | None = None
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._rooms: dict[str, Room] = {}
        self._memory, self._profile_stream = 0, 0
        self._prepared: dict[str, tuple[int, ...]] = {}  # of the last pass that was not captured

    def set_optimization_profile_async(self, index: int, stream: int) -> bool:
        if not 0 <= index < len(self._engine._profiles):
            return self._refused(f"there is no profile {index}")
        self._profile, self._profile_stream = index, stream
        return True

    def set_device_memory(self, memory: int, size: int) -> None:
        if memory % ALIGNMENT:
            raise Undefined(f"scratch memory at {memory:#x}, which is not aligned")
        if size < self._engine.device_memory_size_v2:
            raise Undefined(f"{size} bytes of scratch memory are less than the plan needs")
        self._memory = memory

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        if self._profile is None:
            raise Undefined(f"the shape of {name} before a profile")
        if name not in self._engine._inputs:
            return self._refused(f"{name} is no input")
        low, _, high = self._engine.get_tensor_profile_shape(name, self._profile)
        if len(shape) != len(low) or not all(a <= n <= b for a, n, b in zip(low, shape, high, strict=True)):
            return self._refused(f"{name} {list(shape)} is outside of the profile")
        self._shapes[name] = tuple(shape)
        return True

    def infer_shapes(self) -> list[str]:
        """As the Python package does, -1 is an exception."""
        unknown = [name for name in self._engine._inputs if name not in self._shapes]
        if not unknown and (wrong := self._contradiction()):
            self._refused(wrong)
            raise RuntimeError(wrong)
        return unknown

    def _sizes(self) -> dict[str, set[int]]:
        """The lengths that the inputs give to each named dimension."""
        sizes: dict[str, set[int]] = {}
        for known, tensor in self._engine._inputs.items():
            for d, n in zip(tensor.dims, self._shapes[known], strict=True):
                assert isinstance(d, str) or d == n
                sizes.setdefault(str(d), set()).add(n)
        return sizes

    def _contradiction(self) -> str | None:
        found = [f"{d} is {sorted(n)}" for d, n in self._sizes().items() if len(n) > 1]
        return ", ".join(found) or None

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        if name in self._shapes:
            return self._shapes[name]
        if any(known not in self._shapes for known in self._engine._inputs):
            return self._engine.get_tensor_shape(name)
        assert not self._contradiction()
        sizes = {d: next(iter(n)) for d, n in self._sizes().items()}
        if name in self._engine._unread:
            heads, size = self._engine._unread[name]
            return sizes["B"], heads, sizes.get("K", sizes["S"]), size
        sizes["K-1"] = sizes.get("K", 1) - 1
        return tuple(d if isinstance(d, int) else sizes[d] for d in self._engine._outputs[name].dims)

    def set_tensor_address(self, name: str, address: int) -> bool:
        if name not in self._engine._names:
            return self._refused(f"{name} is no input or output")
        if address % ALIGNMENT:
            return self._refused(f"{name} at {address:#x}: data must be aligned")
        room = Cuda.device_memory.room(address)
        if room is None:
            return self._refused(f"{name} at {address:#x}, which is no memory of the device")
        self._addresses[name], self._rooms[name] = address, room
        return True

    def execute_async_v3(self, stream: int) -> bool:
        assert self._memory, "a context of this strategy has no memory of its own"
        if stream == Cuda.default.cuda_stream:
            raise Undefined("a pass on the default stream")
        if self._profile_stream != stream:
            raise Undefined(f"a pass on stream {stream}, and the profile was set on another")
        last = Context._users.setdefault(self._memory, stream)
        if last != stream and Cuda.streams[last].queue:
            raise Undefined(f"streams {last} and {stream} use the same memory")
        Context._users[self._memory] = stream
        if unknown := self.infer_shapes():
            return self._refused(f"no shapes of {', '.join(unknown)}")
        if unbound := [name for name in self._engine._names if name not in self._addresses]:
            return self._refused(f"no addresses of {', '.join(unbound)}")
        shapes = {name: self.get_tensor_shape(name) for name in self._engine._names}
        run = _Run(self._engine, shapes, dict(self._addresses), dict(self._rooms))
        if Cuda.capturing is None:
            self._prepared = shapes
            Cuda.counts["passes"] += 1
        elif self._prepared != shapes:
            return self._refused("a capture of shapes that no pass has prepared")
        else:
            run.captured = self
        Cuda.enqueue(run, Cuda.streams[stream])  # shapes and addresses are fixed from here on
        return True

    def _refused(self, what: str) -> bool:
        return refused(self._engine._logger, what)


class _Run:
    def __init__(
        self,
        engine: Engine,
        shapes: dict[str, tuple[int, ...]],
        addresses: dict[str, int],
        rooms: dict[str, Room],
    ) -> None:
        self.engine, self.shapes, self.addresses, self.rooms = engine, shapes, addresses, rooms
        self.captured: Context | None = None  # by which context
        for name in shapes:
            if self._bytes(name) > rooms[name].size:
                raise Undefined(f"{name} {list(shapes[name])} has {rooms[name].size} bytes")
        for name in engine._inputs:
            out = name.replace("_cache.", "_cache_out.")
            if out != name and addresses[out] != addresses[name]:
                raise Undefined(f"{out} is not bound to the memory of {name}")
            if name.partition(".")[0].endswith("_state"):
                kind, dot, layer = name.partition(".")
                assert addresses[f"{kind}_out{dot}{layer}"] != addresses[name], f"{name} is read and written"

    def _bytes(self, name: str) -> int:
        return int(np.prod(self.shapes[name])) * int(np.dtype(self.engine._types[name]).itemsize)

    def memory(self, name: str) -> np.ndarray:
        if self.rooms[name].freed():
            raise Undefined(f"the memory of {name} was released")
        room = (ctypes.c_char * self._bytes(name)).from_address(self.addresses[name])
        return np.frombuffer(room, self.engine._types[name]).reshape(self.shapes[name])

    def __call__(self) -> None:
        if self.captured is not None and self.captured._prepared != self.shapes:
            raise Undefined("a graph's context ran other shapes since the capture")
        feeds = {name: self.memory(name).copy() for name in self.engine._inputs}
        results = self.engine._session.run(list(self.engine._outputs), _as_given(feeds))
        for name, result in zip(self.engine._outputs, results, strict=True):
            self.memory(name)[...] = result


def _as_given(feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What the session takes: float32 for BF16."""
    return {n: a.astype(np.float32) if a.dtype == ml_dtypes.bfloat16 else a for n, a in feeds.items()}
