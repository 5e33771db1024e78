"""Run a plan on torch tensors and a stream of one GPU. After opening, an engine allocates only kept rows.

Written against the documented API of `tensorrt` and `tensorrt_rtx`. docs/tensorrt.md lists the parts that were
executed.
"""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch

from dflash_trt.bundle.cache_kinds import CacheKind
from dflash_trt.engines.caches import POSITION
from dflash_trt.engines.device.caches import DeviceCaches, DeviceStates
from dflash_trt.engines.device.runner import DeviceRunner, Outputs, Shapes, updated
from dflash_trt.engines.device.sizes import ALIGNMENT, DECODE, PREFILL
from dflash_trt.engines.tensorrt.builder import QUERY
from dflash_trt.engines.tensorrt.contexts import (
    KernelCache,
    Messages,
    PassContext,
    captures_by_itself,
    new_context,
)
from dflash_trt.errors import BundleError

Tensor = torch.Tensor


class TensorRTRunner(DeviceRunner):
    """One plan over a pool of cache slots `[slots, heads, capacity, size]`, one per cache. `DeviceRunner` documents the
    methods.

    A pass over n sequences uses the slots `first_slot .. first_slot + n - 1` as a view; of the DECODE profile, from
    slot 0 on. Cache inputs and outputs are bound to the same memory. A state's output has memory of its own
    (device/caches.py). Inputs and outputs are buffers of their largest size, and a pass uses the beginning. Contexts
    are bound to them once; the caches of prefill change with the slot.

    Passes of the DECODE profile are CUDA graphs, one per set of shapes. With full TensorRT, the graphs are captured
    here. TensorRT-RTX captures by itself. A context whose shapes change spoils its graph, so each set of shapes has a
    context of its own. All contexts share the scratch memory.

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
        kinds: Sequence[CacheKind] = (),
    ) -> None:
        self.graphs = True
        self._trt, self._kernels, self._messages = trt, kernels, Messages()
        self._logger = self._messages.logger(trt)
        self._runtime = trt.Runtime(self._logger)
        with plan.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            self._engine = self._runtime.deserialize_cuda_engine(data)
        if self._engine is None:
            raise BundleError(
                f"{plan}: {trt.__name__} {trt.__version__} cannot load this plan; build the bundle again with it, "
                f"for this GPU{self._messages}"
            )
        super().__init__(plan, *self._read_names(), stream=stream, device=device)
        self._caches = {name: self._cache(name, slots) for name in self._cache_names}
        self._state_shapes = {name: self._slot_shape(name, slots) for name in self._state_names}
        shapes = {name: (shape, self.dtypes[name]) for name, shape in self._state_shapes.items()}
        states = DeviceStates(shapes, slots, stream, device) if shapes else None
        self.caches = DeviceCaches(self._caches, stream, slots, kinds, states)
        self._views: dict[Shapes, Outputs] = {}
        self._of_shapes: dict[Shapes, PassContext] = {}  # contexts for DECODE
        self._memory: Tensor | None = None
        self._shared: dict[str, Tensor] = {}
        self._contexts = [self._context(profile) for profile in (PREFILL, DECODE)]
        for context in self._contexts:
            self._allocate(context)
        for name, memory in self._shared.items():
            for context in self._contexts:
                context.set_address(name, memory)

    def _read_names(self) -> tuple[dict[str, torch.dtype], list[str], list[str]]:
        """Sort the plan's inputs and outputs: those of a pass, caches, states, and outputs that nothing reads. Returns
        all with their types, and those of a pass.
        """
        trt, engine = self._trt, self._engine
        names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
        dtypes = {name: _torch_dtype(trt, engine.get_tensor_dtype(name)) for name in names}
        inputs = [n for n in names if engine.get_tensor_mode(n) == trt.TensorIOMode.INPUT]
        self._cache_names = [name for name in inputs if "_cache." in name]
        self._state_names = [name for name in inputs if name.partition(".")[0].endswith("_state")]
        held = {*self._cache_names, *self._state_names}
        outputs = [n for n in names if n not in inputs and n not in set(map(updated, held))]
        self._unread = [name for name in outputs if name.startswith(QUERY)]
        of_pass = [name for name in inputs if name not in held]
        return dtypes, of_pass, [name for name in outputs if not name.startswith(QUERY)]

    @property
    def memory_size(self) -> int:
        """Bytes of scratch memory that a pass needs."""
        return int(self._engine.device_memory_size_v2)

    def lend(self, memory: Tensor) -> None:
        """Provide scratch memory, uint8 [memory_size or more]. Engines that take turns on one stream may share it."""
        self._memory = memory
        for context in self._contexts:
            context.set_scratch(memory)

    def bind(self, profile: int, name: str, buffer: Tensor) -> None:
        super().bind(profile, name, buffer)
        self._contexts[profile].set_address(name, buffer)

    def _first(self, shapes: Shapes, first_slot: int) -> Outputs:
        """TensorRT prepares new shapes in a pass that is not captured. Another pass in between would undo this."""
        profile, *sizes = shapes
        context, shape_of = self._context_for(shapes), dict(zip(self.inputs, sizes, strict=True))
        for name, size in shape_of.items():
            context.set_shape(name, tuple(size))
        self._bind_caches(context, first_slot, shape_of["start"][0])
        if (outputs := self._views.get(shapes)) is None:
            context.infer()
            outputs = self._views[shapes] = {
                n: self.buffer(profile, n, *context.shape(n)) for n in self.outputs
            }
        context.enqueue()
        if self.graphs and profile == DECODE:
            if not context.capturable:
                self._without_graphs(f"TensorRT says that its passes cannot be captured{self._messages}")
            elif captures_by_itself(self._trt):
                self._captured[shapes, first_slot] = context.enqueue, outputs
            elif (graph := self._capture(context)) is not None:
                self._captured[shapes, first_slot] = graph.replay, outputs
        return outputs

    def close(self) -> None:
        """Free contexts, graphs, buffers and caches. Keep the kernels."""
        self.stream.synchronize()
        if self._kernels is not None and self._contexts:
            self._kernels.save()
        for held in (self._captured, self._of_shapes, self._views, self._buffers, self._caches, self._shared):
            held.clear()
        self._contexts.clear()
        self.caches = DeviceCaches({}, self.stream, 0)
        self._engine = self._runtime = self._memory = None

    def _context(self, profile: int) -> PassContext:
        context = new_context(self._trt, self._engine, profile, self._kernels)
        return PassContext(context, profile, self.path, self.stream, self._messages)

    def _context_for(self, shapes: Shapes) -> PassContext:
        """The context of a profile; that of these shapes where passes are captured."""
        profile = shapes[0]
        if profile == PREFILL or not (self.graphs or captures_by_itself(self._trt)):
            return self._contexts[profile]
        if (context := self._of_shapes.get(shapes)) is None:
            context = self._of_shapes[shapes] = self._context(profile)
            for (of, name), memory in self._buffers.items():
                if of == profile:
                    context.set_address(name, memory)
            for name, memory in self._shared.items():
                context.set_address(name, memory)
            if self._memory is not None:
                context.set_scratch(self._memory)
        return context

    def _capture(self, context: PassContext) -> Any:
        """The pass just enqueued as a CUDA graph. If it cannot be captured, passes run without graphs from now on."""
        graph = torch.cuda.CUDAGraph()
        try:
            # Work of other threads may go on. `torch.cuda.graph` would wait for the device and empty its cache.
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                context.enqueue()
            finally:
                graph.capture_end()
        except RuntimeError as error:
            self._without_graphs(f"a capture failed: {error}")
            return None
        return graph

    def _without_graphs(self, reason: str) -> None:
        self.graphs = False
        warnings.warn(f"{self.path}: runs without CUDA graphs, because {reason}", stacklevel=2)

    def _cache(self, name: str, slots: int) -> Tensor:
        out = updated(name)
        if (alias := self._engine.get_aliased_input_tensor(out)) != name:
            raise BundleError(
                f"{self.path}: {out} updates {alias!r} in place, expected {name}; build the bundle again"
            )
        shape = self._slot_shape(name, slots)
        return torch.zeros((slots, *shape), dtype=self.dtypes[name], device=self.device)

    def _slot_shape(self, name: str, slots: int) -> tuple[int, ...]:
        """The shape of a cache or a state for one slot. The next slot must begin at an aligned address, and so must the
        next layer's states, which follow in the same memory.
        """
        shape = tuple(self._engine.get_tensor_shape(name))[1:]
        size, state = prod(shape) * self.dtypes[name].itemsize, name in self._state_names
        if (slots > 1 or state) and size % ALIGNMENT and name != POSITION:
            advice = "build the bundle again, or open it with max_batch_size 1"
            raise BundleError(
                f"{self.path}: {name} {list(shape)} has {size} bytes for each slot, but TensorRT wants every slot at a "
                f"multiple of {ALIGNMENT} bytes; {'build for ONNX Runtime' if state else advice}"
            )
        return shape

    def _bind_caches(self, context: PassContext, first_slot: int, batch: int) -> None:
        for name, cache in self._caches.items():
            context.set_shape(name, (batch, *cache.shape[1:]))
        for name, shape in self._state_shapes.items():
            context.set_shape(name, (batch, *shape))
        if context.slot == first_slot:
            return
        context.slot = None  # until all are bound
        for name, cache in self._caches.items():
            for bound in (name, updated(name)):
                context.set_address(bound, cache[first_slot])
        if self.caches.states is not None:
            for name, (now, new) in self.caches.states.bound(first_slot).items():
                context.set_address(name, now)
                context.set_address(updated(name), new)
        context.slot = first_slot

    def _allocate(self, context: PassContext) -> None:
        """Allocate buffers for the profile's largest shapes. TensorRT infers the shapes of outputs."""
        profile = context.profile
        for name in [*self.inputs, *self._caches, *self._state_shapes]:
            largest = tuple(self._engine.get_tensor_profile_shape(name, profile)[2])
            context.set_shape(name, largest)
            if name in self.inputs:
                self._new_buffer(profile, name, largest)
        context.infer()
        for name in self.outputs:
            self._new_buffer(profile, name, context.shape(name))
        for name in self._unread:  # profiles take turns and share it
            size = prod(context.shape(name))
            if name not in self._shared or self._shared[name].numel() < size:
                self._shared[name] = torch.empty(size, dtype=self.dtypes[name], device=self.device)

    def _new_buffer(self, profile: int, name: str, shape: tuple[int, ...]) -> None:
        self.bind(profile, name, torch.zeros(prod(shape), dtype=self.dtypes[name], device=self.device))


def _torch_dtype(trt: Any, dtype: Any) -> torch.dtype:
    names = {
        trt.DataType.FLOAT: torch.float32,
        trt.DataType.HALF: torch.float16,
        trt.DataType.BF16: torch.bfloat16,
        trt.DataType.INT64: torch.int64,
        trt.DataType.BOOL: torch.bool,
    }
    return names[dtype]
