"""Run a plan on torch tensors and a stream of one GPU. After opening, an engine allocates only kept rows.

Written against the documented API of `tensorrt` and `tensorrt_rtx`. docs/tensorrt.md lists the parts that were
executed.
"""

from __future__ import annotations

import mmap
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dflash_trt.bundle.cache_kinds import CacheKind
from dflash_trt.engines.tensorrt.caches import DeviceRows
from dflash_trt.engines.tensorrt.profiles import ALIGNMENT, DECODE, PREFILL, QUERY
from dflash_trt.engines.tensorrt.runtime_config import KernelCache, captures_by_itself, contexts
from dflash_trt.engines.tensorrt.states import POSITION, DeviceHybridCaches
from dflash_trt.errors import BundleError

Array = np.ndarray[Any, Any]
Tensor = torch.Tensor
# The dynamic dimensions of the inputs, as the manifest's profiles name them. Those not listed, bases, have B.
_DIMENSIONS = {
    "tokens": "BS",
    "start": "B",
    "rows": "BR",
    "depths": "BS",
    "visible": "BSS",
    "features": "BS",
    "n_features": "B",
    "block": "BK",
}
# TensorRT's messages that an error repeats.
_MESSAGES = 5


class TensorRTEngine:
    """One plan over a pool of cache slots `[slots, heads, capacity, size]`, one per cache.

    A pass over n sequences uses the slots `first_slot .. first_slot + n - 1` as a view. Cache inputs and outputs are
    bound to the same memory. A state's output has memory of its own (states.py). There is one context per profile.
    Inputs and outputs are buffers of their largest size, and a pass uses the beginning. Contexts are bound to them
    once; cache bindings change with the slot. Passes of the
    DECODE profile from slot 0 on are captured as CUDA graphs, one per set of shapes. TensorRT-RTX captures them itself
    (runtime_config.py).

    A call that TensorRT refuses raises RuntimeError with its last messages: it would compute with the former shapes or
    addresses otherwise.

    kernels: where TensorRT-RTX keeps the kernels that it compiles.
    kinds: of the caches. Without them, every layer keeps all rows.
    """

    def __init__(
        self,
        trt: Any,
        plan: Path,
        *,
        slots: int,
        stream: Any,
        device: torch.device,
        kernels: KernelCache | None = None,
        graphs: bool = True,
        kinds: Sequence[CacheKind] = (),
    ) -> None:
        self.plan, self.stream, self.device, self.graphs = plan, stream, device, graphs
        self._kernels, self._captures = kernels, not captures_by_itself(trt)
        self._messages: deque[str] = deque(maxlen=_MESSAGES)
        self._logger = _logger(trt, self._messages)
        self._runtime = trt.Runtime(self._logger)
        with plan.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            self._engine = self._runtime.deserialize_cuda_engine(data)
        if self._engine is None:
            raise BundleError(
                f"{plan}: {trt.__name__} {trt.__version__} cannot load this plan; build the bundle again with it, "
                f"for this GPU{self._said()}"
            )
        names = [self._engine.get_tensor_name(i) for i in range(self._engine.num_io_tensors)]
        self.dtypes = {name: _torch_dtype(trt, self._engine.get_tensor_dtype(name)) for name in names}
        inputs = [n for n in names if self._engine.get_tensor_mode(n) == trt.TensorIOMode.INPUT]
        states = [name for name in inputs if name.partition(".")[0].endswith("_state")]
        self.inputs = [name for name in inputs if "_cache." not in name and name not in states]
        held = {_output(name) for name in states}
        outputs = [n for n in names if n not in inputs and "_cache_out." not in n and n not in held]
        self.outputs = [name for name in outputs if not name.startswith(QUERY)]
        self._unread = [name for name in outputs if name.startswith(QUERY)]
        self._contexts = contexts(trt, self._engine, kernels)
        for profile, context in enumerate(self._contexts):
            if context is None:
                raise BundleError(f"{plan}: TensorRT could not create a context{self._said()}")
            done = context.set_optimization_profile_async(profile, stream.cuda_stream)
            self._check(done, f"refused profile {profile}")
        self._caches = {name: self._cache(name, slots) for name in inputs if "_cache." in name}
        self.rows = DeviceRows(self._caches, stream, slots, kinds)
        self.caches: DeviceRows | DeviceHybridCaches = self.rows
        self._state_shapes = {name: self._slot_shape(name, slots) for name in states}
        if states:
            shapes = {name: (shape, self.dtypes[name]) for name, shape in self._state_shapes.items()}
            self.caches = DeviceHybridCaches(self.rows, shapes, slots, stream, device)
        self._buffers: dict[tuple[int, str], Tensor] = {}
        self._shapes: dict[tuple[int, str], tuple[int, ...]] = {}
        self._views: dict[tuple[Any, ...], dict[str, Tensor]] = {}
        self._captured: dict[tuple[Any, ...], Any] = {}  # None if TensorRT-RTX has the graph
        self._slot: dict[int, int] = {}
        self._memory: Tensor | None = None
        self._shared: dict[str, Tensor] = {}
        for profile in (PREFILL, DECODE):
            self._allocate(profile)
        for name, memory in self._shared.items():
            for context in self._contexts:
                self._set_address(context, name, memory)

    @property
    def memory_size(self) -> int:
        """Bytes of scratch memory that a pass needs."""
        return int(self._engine.device_memory_size_v2)

    def lend(self, memory: Tensor) -> None:
        """Provide scratch memory, uint8 [memory_size or more]. Engines that take turns on one stream may share it."""
        self._memory = memory
        for context in self._contexts:
            context.set_device_memory(memory.data_ptr(), memory.numel())

    def bind(self, profile: int, name: str, buffer: Tensor) -> None:
        """Use other memory, which must be large enough, for an input."""
        self._buffers[profile, name] = buffer.view(-1)
        self._set_address(self._contexts[profile], name, buffer)

    def buffer(self, profile: int, name: str, *shape: int) -> Tensor:
        """The memory of an input or an output as a tensor of this shape."""
        size = 1
        for length in shape:
            size *= length
        return self._buffers[profile, name][:size].view(shape)

    def whole_buffer(self, profile: int, name: str) -> Tensor:
        """The memory of an input or an output at its largest size."""
        return self._buffers[profile, name]

    def problems(self, ranges: Sequence[Mapping[str, Any]]) -> list[str]:
        """The differences between the plan's profiles and these of the manifest."""
        found = []
        for profile, expected in enumerate(ranges):
            for name in self.inputs:
                shapes = self._engine.get_tensor_profile_shape(name, profile)
                for axis, length in enumerate(_DIMENSIONS.get(name, "B")):
                    lengths = [int(shape[axis]) for shape in shapes]
                    if lengths != list(expected.get(length, lengths)):
                        found.append(
                            f"{self.plan.name}: {name} has {length} = {lengths} in profile {profile}, but the manifest "
                            f"has {expected[length]} in {expected['name']}"
                        )
        return found

    def run(
        self, profile: int, feeds: Mapping[str, Array | Tensor], *, first_slot: int = 0
    ) -> Mapping[str, Tensor]:
        """Enqueue one pass over slots from `first_slot` on. Does not wait for it.

        Feeds on the host are uploaded. Feeds on the device are copied unless they are already in their buffer.
        Outputs are views of buffers that the next pass of this profile overwrites.
        """
        context = self._contexts[profile]
        if set(feeds) != set(self.inputs):
            raise ValueError(f"{self.plan}: needs {sorted(self.inputs)}, not {sorted(feeds)}")
        for name, array in feeds.items():
            self._set_shape(context, profile, name, tuple(array.shape))
        self._bind_caches(profile, first_slot, len(feeds["start"]))
        key = (profile, *[(name, tuple(array.shape)) for name, array in feeds.items()])
        outputs = self._views.get(key)
        if outputs is None:
            self._infer(context)
            shapes = {name: tuple(context.get_tensor_shape(name)) for name in self.outputs}
            outputs = self._views[key] = {n: self.buffer(profile, n, *shape) for n, shape in shapes.items()}
        with torch.cuda.stream(self.stream):
            if isinstance(self.caches, DeviceHybridCaches):
                self.caches.prepare(first_slot, len(feeds["start"]))
            for name, array in feeds.items():
                buffer = self.buffer(profile, name, *array.shape)
                given = torch.from_numpy(array) if isinstance(array, np.ndarray) else array
                if given.data_ptr() != buffer.data_ptr():
                    buffer.copy_(given, non_blocking=True)  # pageable memory is read before this returns
            if self.graphs and profile == DECODE and first_slot == 0:
                self._replay(key, context)
            else:
                self._enqueue(context)
        return outputs

    def close(self) -> None:
        """Free contexts, graphs, buffers and caches. Keep the kernels."""
        self.stream.synchronize()
        if self._kernels is not None and self._contexts:
            self._kernels.save()
        self._captured.clear()
        self._contexts.clear()
        self._views.clear()
        self._buffers.clear()
        self._caches.clear()
        self._shared.clear()
        self.caches = self.rows = DeviceRows({}, self.stream, 0)
        self._engine = self._runtime = self._memory = None

    def _enqueue(self, context: Any) -> None:
        self._check(context.execute_async_v3(self.stream.cuda_stream), "could not enqueue a pass")

    def _set_address(self, context: Any, name: str, memory: Tensor) -> None:
        address = memory.data_ptr()
        self._check(context.set_tensor_address(name, address), f"refused the address {address:#x} for {name}")

    def _check(self, done: bool, otherwise: str) -> None:
        if not done:
            raise RuntimeError(f"{self.plan}: TensorRT {otherwise}{self._said()}")

    def _said(self) -> str:
        """TensorRT's last errors, for the end of an error."""
        return f". Its last messages: {' | '.join(self._messages)}" if self._messages else ""

    def _replay(self, key: tuple[Any, ...], context: Any) -> None:
        """Replay the graph of these shapes. Without one, run the pass, then capture it for the next time.

        TensorRT prepares new shapes in a pass that is not captured. Another pass in between would undo this.
        """
        if (graph := self._captured.get(key)) is not None:
            graph.replay()
            return
        self._enqueue(context)
        if self.graphs and key not in self._captured and self._capturable(context):
            self._captured[key] = self._capture(context) if self._captures else None

    def _capturable(self, context: Any) -> bool:
        """Whether this pass can be captured. TensorRT-RTX says so; TensorRT cannot be asked."""
        ask = getattr(context, "is_stream_capturable", None)
        if ask is None or ask(self.stream.cuda_stream):
            return True
        self._without_graphs(f"TensorRT says that its passes cannot be captured{self._said()}")
        return False

    def _capture(self, context: Any) -> Any:
        """The pass just enqueued as a CUDA graph. If it cannot be captured, passes run without graphs from now on."""
        graph = torch.cuda.CUDAGraph()
        try:
            # Work of other threads may go on. `torch.cuda.graph` would wait for the device and empty its cache.
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                self._enqueue(context)
            finally:
                graph.capture_end()
        except RuntimeError as error:
            self._without_graphs(f"a capture failed: {error}")
            return None
        return graph

    def _without_graphs(self, reason: str) -> None:
        self.graphs = False
        warnings.warn(f"{self.plan}: runs without CUDA graphs, because {reason}", stacklevel=2)

    def _cache(self, name: str, slots: int) -> Tensor:
        out = _output(name)
        if (alias := self._engine.get_aliased_input_tensor(out)) != name:
            raise BundleError(
                f"{self.plan}: {out} updates {alias!r} in place, expected {name}; build the bundle again"
            )
        shape = self._slot_shape(name, slots)
        return torch.zeros((slots, *shape), dtype=self.dtypes[name], device=self.device)

    def _slot_shape(self, name: str, slots: int) -> tuple[int, ...]:
        """The shape of a cache or a state for one slot. The next slot must begin at an aligned address."""
        shape = tuple(self._engine.get_tensor_shape(name))[1:]
        size = torch.Size(shape).numel() * self.dtypes[name].itemsize
        if slots > 1 and size % ALIGNMENT and name != POSITION:
            raise BundleError(
                f"{self.plan}: {name} {list(shape)} has {size} bytes for each slot, but TensorRT wants every slot at a "
                f"multiple of {ALIGNMENT} bytes; build the bundle again, or open it with max_batch_size 1"
            )
        return shape

    def _bind_caches(self, profile: int, first_slot: int, batch: int) -> None:
        context = self._contexts[profile]
        for name, cache in self._caches.items():
            self._set_shape(context, profile, name, (batch, *cache.shape[1:]))
        for name, shape in self._state_shapes.items():
            self._set_shape(context, profile, name, (batch, *shape))
        if self._slot.get(profile) == first_slot:
            return
        self._slot.pop(profile, None)  # until all are bound
        for name, cache in self._caches.items():
            for bound in (name, _output(name)):
                self._set_address(context, bound, cache[first_slot])
        if isinstance(self.caches, DeviceHybridCaches):
            for name, (now, new) in self.caches.bound(first_slot).items():
                self._set_address(context, name, now)
                self._set_address(context, _output(name), new)
        self._slot[profile] = first_slot

    def _set_shape(self, context: Any, profile: int, name: str, shape: tuple[int, ...]) -> None:
        if self._shapes.get((profile, name)) == shape:
            return
        if not context.set_input_shape(name, shape):
            raise ValueError(
                f"{self.plan}: {name} {list(shape)} is outside of profile {profile}{self._said()}"
            )
        self._shapes[profile, name] = shape

    def _allocate(self, profile: int) -> None:
        """Allocate buffers for the profile's largest shapes. TensorRT infers the shapes of outputs."""
        context = self._contexts[profile]
        for name in [*self.inputs, *self._caches, *self._state_shapes]:
            largest = tuple(self._engine.get_tensor_profile_shape(name, profile)[2])
            self._set_shape(context, profile, name, largest)
            if name in self.inputs:
                self._new_buffer(profile, name, largest)
        self._infer(context)
        for name in self.outputs:
            self._new_buffer(profile, name, tuple(context.get_tensor_shape(name)))
        for name in self._unread:  # profiles take turns and share it
            size = torch.Size(context.get_tensor_shape(name)).numel()
            if name not in self._shared or self._shared[name].numel() < size:
                self._shared[name] = torch.empty(size, dtype=self.dtypes[name], device=self.device)

    def _infer(self, context: Any) -> None:
        try:
            missing = context.infer_shapes()
        except RuntimeError as error:
            raise RuntimeError(f"{self.plan}: TensorRT refused the shapes: {error}{self._said()}") from error
        if missing:
            raise BundleError(f"{self.plan}: no shapes for {', '.join(missing)}; build the bundle again")

    def _new_buffer(self, profile: int, name: str, shape: tuple[int, ...]) -> None:
        buffer = torch.zeros(torch.Size(shape).numel(), dtype=self.dtypes[name], device=self.device)
        self.bind(profile, name, buffer)


def _output(name: str) -> str:
    """The output that updates a cache or a state: k_cache.0 -> k_cache_out.0."""
    kind, dot, layer = name.partition(".")
    return f"{kind}_out{dot}{layer}"


def _logger(trt: Any, messages: deque[str]) -> Any:
    """A logger that keeps the last errors, each shortened to a line."""

    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                messages.append(" ".join(message.split())[:300])

    return Logger()


def _torch_dtype(trt: Any, dtype: Any) -> torch.dtype:
    names = {
        trt.DataType.FLOAT: torch.float32,
        trt.DataType.HALF: torch.float16,
        trt.DataType.BF16: torch.bfloat16,
        trt.DataType.INT64: torch.int64,
        trt.DataType.BOOL: torch.bool,
    }
    return names[dtype]
