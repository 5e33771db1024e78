"""A stand-in for `torch.cuda` whose streams defer their work, as those of a GPU may.

A tensor on the device has host memory here. Work on it is queued on the current stream, and runs when something waits
for that stream. Streams are unordered among each other, except through events. New memory holds NaN or absurd numbers.
So a read that does not wait sees garbage, in every run.

Copies keep their rules: pageable memory is read when the copy is queued, pinned memory when it runs. A copy to the host
in pageable memory waits for its stream.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch._dynamo  # which factory functions import, and which reads the real torch.cuda
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

Work = Callable[[], None]
aten = torch.ops.aten
GPU = torch.device("cuda")
ALIGNMENT = 256  # of memory on the device
new = torch.empty  # tests may take this from the project


class Room(NamedTuple):
    """Memory from an address on: `size` bytes, until `freed`."""

    size: int
    freed: Callable[[], bool]


class _Memory:
    """The storages of one kind of memory."""

    def __init__(self) -> None:
        # A reference to each storage, and its first and last address. While a reference to it is held, a storage's
        # address is not reused.
        self._held: dict[int, tuple[StorageWeakRef, int, int]] = {}
        self._most = 4096

    def add(self, tensor: torch.Tensor) -> None:
        storage, begin = tensor.untyped_storage(), tensor.data_ptr()
        end = begin + tensor.numel() * tensor.element_size()
        self._held[storage._cdata] = StorageWeakRef(storage), begin, end
        if len(self._held) > self._most:
            self._held = {key: entry for key, entry in self._held.items() if not entry[0].expired()}
            self._most = max(4096, 2 * len(self._held))

    def __contains__(self, tensor: object) -> bool:
        return isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata in self._held

    def room(self, address: int) -> Room | None:
        """The memory from an address on; None if it is no memory of this kind."""
        for reference, begin, end in self._held.values():
            if begin <= address < end and not reference.expired():
                return Room(end - address, reference.expired)
        return None

    def storage(self, address: int) -> tuple[torch.UntypedStorage, int]:
        """The storage that holds an address, and the bytes before it."""
        for reference, begin, end in self._held.values():
            found = None
            if begin <= address < end:
                found = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if found is not None:
                return found, address - found.data_ptr()
        raise AssertionError(f"{address:#x} is no memory of this kind, or was freed")


class Stream:
    """A queue of work. Its first item waits until someone waits for the stream."""

    def __init__(self) -> None:
        self.queue: deque[Work] = deque()
        self.cuda_stream = len(Cuda.streams) + 1
        Cuda.streams[self.cuda_stream] = self

    def synchronize(self) -> None:
        Cuda.counts["waits"] += 1
        self.drain()

    def drain(self, until: Event | None = None) -> None:
        assert Cuda.capturing is None, "a stream cannot be waited for while work is captured"
        running, Cuda.running = Cuda.running, True
        try:
            while self.queue and not (until is not None and until.done):
                self.queue.popleft()()
        finally:
            Cuda.running = running


class Event:
    """A point in a stream's queue."""

    def __init__(self, enable_timing: bool = False) -> None:
        self._stream: Stream | None = None
        self.done = False

    def record(self, stream: Stream | None = None) -> None:
        self._stream, self.done = stream or Cuda.current, False

        def reached() -> None:
            self.done = True

        Cuda.enqueue(reached, self._stream)

    def synchronize(self) -> None:
        Cuda.counts["waits"] += 1
        self.synchronize_on_device()

    def synchronize_on_device(self) -> None:
        if self._stream is not None:
            self._stream.drain(until=self)

    def elapsed_time(self, end: Event) -> float:
        assert self.done, "the event of the beginning has not been reached; wait for it first"
        assert end.done, "the event of the end has not been reached; wait for it first"
        return 1.0


class GraphPool:
    """Memory of graphs. It takes no more once the last of them has ended."""

    def __init__(self) -> None:
        self.graphs, self.ended = 0, False

    def leave(self) -> None:
        self.graphs -= 1
        self.ended = self.ended or not self.graphs


@dataclass
class Made:
    """What is known of a graph that was captured, also after its end."""

    replays: int = 0


class CudaGraph:
    def __init__(self) -> None:
        self.runs: list[Work] = []
        self.made = Made()

    def capture_begin(self, pool: GraphPool | None = None, *, capture_error_mode: str = "global") -> None:
        """Without a pool, a graph has one of its own."""
        if pool is not None:
            if pool.ended:
                raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED")
            pool.graphs += 1
            weakref.finalize(self, pool.leave)
        assert Cuda.capturing is None, "another capture has not ended"
        assert Cuda.current is not Cuda.default, "the default stream cannot be captured"
        assert capture_error_mode == "thread_local", "other threads may allocate meanwhile"
        Cuda.capturing = self.runs

    def capture_end(self) -> None:
        Cuda.capturing = None
        Cuda.graphs = [*Cuda.graphs, self.made]

    def replay(self) -> None:
        assert self.runs
        self.made.replays += 1
        Cuda.counts["graph launches"] += 1
        runs = list(self.runs)

        def run() -> None:
            for work in runs:
                work()

        Cuda.enqueue(run)


class _Functions(TorchFunctionMode):
    """Python's interface alone shows which device and which kind of host memory is asked for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if Cuda.running:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name == "__get__" and args and args[0] in Cuda.device_memory:
            owner = getattr(getattr(func, "__self__", None), "__name__", "")
            if owner in ("device", "is_cuda"):
                return GPU if owner == "device" else True
        if name == "is_pinned":
            return args[0] in Cuda.pinned_memory
        if name == "cpu" or (name == "to" and "cpu" in (str(kwargs.get("device")), *map(str, args[1:2]))):
            return _to_host(args[0], non_blocking=bool(kwargs.get("non_blocking")))
        if name in ("numpy", "__array__"):
            assert args[0] not in Cuda.device_memory, "NumPy cannot read memory of the device"
        if name == "tolist" and args[0] in Cuda.device_memory:
            return _to_host(args[0]).tolist()
        if name == "to" and "cuda" in (str(kwargs.get("device")), *map(str, args[1:2])):
            return _to_device(args[0], non_blocking=bool(kwargs.get("non_blocking")))
        pinned = kwargs.pop("pin_memory", False)
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            tensor = _made_on_device(func, args, kwargs)
        else:
            tensor = func(*args, **kwargs)
        if pinned:
            Cuda.pinned_memory.add(tensor)
        return tensor


class _Operators(TorchDispatchMode):
    """Queues the operators that read or write memory of the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if Cuda.running:
            return func(*args, **kwargs)
        tensors = list[torch.Tensor]()
        _mapped(tensors.append, (args, *kwargs.values()))
        returns = func._schema.returns
        if not any(tensor in Cuda.device_memory for tensor in tensors):
            Cuda.counts["allocations"] += any(r.alias_info is None for r in returns)
            return func(*args, **kwargs)
        if returns and all(r.alias_info is not None and not r.alias_info.is_write for r in returns):
            return func(*args, **kwargs)  # a view
        if func in (aten.mm.default, aten.addmm.default, aten.bmm.default):
            assert Cuda.handle or Cuda.capturing is None, "cuBLAS cannot make a handle in a capture"
            Cuda.handle = True
        if func in (aten._local_scalar_dense.default, aten.is_nonzero.default, aten.equal.default):
            Cuda.counts["copies to the host"] += 1
            Cuda.current.synchronize()
            return func(*args, **kwargs)
        if func is aten.copy_.default:
            return _copy(
                args[0], args[1], non_blocking=bool(args[2] if len(args) > 2 else kwargs.get("non_blocking"))
            )
        for tensor in tensors:
            if tensor not in Cuda.device_memory and tensor.dim():  # such as the numbers of an index
                Cuda.counts["copies to the device"] += 1
        args = _mapped(_staged, args)
        kwargs = {name: _mapped(_staged, value) for name, value in kwargs.items()}
        if any(r.alias_info is not None for r in returns):
            Cuda.launch(lambda: func(*args, **kwargs))
            outs = tuple(kwargs[value.name] for value in func._schema.arguments if value.is_out)
            return outs if len(outs) > 1 else kwargs.get("out", args[0])
        outputs = _mapped(_garbage, _shapes(func, args, kwargs))
        if func.__name__.split(".")[0] in ("new_empty", "empty_like", "new_empty_strided"):
            return outputs

        def run() -> None:
            found = func(*args, **kwargs)
            pairs = (
                [(outputs, found)] if isinstance(found, torch.Tensor) else zip(outputs, found, strict=True)
            )
            for out, result in pairs:
                out.copy_(result)

        Cuda.launch(run)
        return outputs


def _mapped(change: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """An operator's arguments or results with their tensors changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    return type(value)([_mapped(change, item) for item in value]) if type(value) in (list, tuple) else value


def _shapes(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What an operator returns, without numbers."""
    key = repr(
        (func, _mapped(_layout, args), [(name, _mapped(_layout, value)) for name, value in kwargs.items()])
    )
    if key not in _KNOWN:
        on_meta = {name: _mapped(_meta, value) for name, value in kwargs.items()}
        _KNOWN[key] = func(*_mapped(_meta, args), **on_meta)
    return _KNOWN[key]


_KNOWN: dict[str, Any] = {}


def _layout(tensor: torch.Tensor) -> Any:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("meta")


def _staged(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of pageable memory as it is now."""
    return tensor if tensor in Cuda.device_memory or tensor in Cuda.pinned_memory else tensor.clone()


def _garbage(shape: torch.Tensor) -> torch.Tensor:
    """New memory of the device, as large as a tensor. Its former user left numbers in it."""
    Cuda.counts["allocations"] += 1
    running, Cuda.running = Cuda.running, True
    tensor = _aligned(shape)
    if tensor.dtype.is_floating_point:
        tensor.fill_(torch.nan)
    elif tensor.dtype is torch.bool:
        tensor.fill_(False)
    else:
        tensor.fill_(min(1 << 40, torch.iinfo(tensor.dtype).max))
    Cuda.running = running
    Cuda.device_memory.add(tensor)
    return tensor


def _aligned(shape: torch.Tensor) -> torch.Tensor:
    """Memory as torch's allocator has it on a GPU: aligned to 256 bytes, and here to no more."""
    last = sum((size - 1) * stride for size, stride in zip(shape.shape, shape.stride(), strict=True))
    count = (last + 1) * shape.element_size() if shape.numel() else 0
    memory = new(count + 2 * ALIGNMENT, dtype=torch.uint8)
    first = (ALIGNMENT - memory.data_ptr()) % (2 * ALIGNMENT)
    return memory[first : first + count].view(shape.dtype).as_strided(shape.shape, shape.stride())


def _made_on_device(func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
    """torch.zeros, torch.empty and others with device="cuda"."""
    kwargs.pop("device")
    running, Cuda.running = Cuda.running, True
    value = func(*args, **kwargs)
    Cuda.running = running
    tensor = _garbage(value)
    if func.__name__ not in ("empty", "empty_like", "empty_strided"):
        Cuda.launch(lambda: tensor.copy_(value))
    return tensor


def _to_host(tensor: torch.Tensor, *, non_blocking: bool = False) -> torch.Tensor:
    """A copy, which is in pinned memory if nothing waits for it, as torch has it."""
    if tensor not in Cuda.device_memory:
        return tensor
    host = new(tensor.shape, dtype=tensor.dtype)
    Cuda.counts["allocations"] += 1
    if non_blocking:
        Cuda.pinned_memory.add(host)
    return _copy(host, tensor, non_blocking=non_blocking)


def _to_device(tensor: torch.Tensor, *, non_blocking: bool) -> torch.Tensor:
    copy = _garbage(tensor.contiguous())
    return _copy(copy, tensor, non_blocking=non_blocking)


def _copy(target: torch.Tensor, source: torch.Tensor, *, non_blocking: bool) -> torch.Tensor:
    down, up = target not in Cuda.device_memory, source not in Cuda.device_memory
    if not down and not up:
        Cuda.launch(lambda: target.copy_(source))
        return target
    host = target if down else source
    pinned = host in Cuda.pinned_memory
    Cuda.counts[f"copies to the {'host' if down else 'device'}"] += 1
    if not pinned:
        Cuda.counts["copies of pageable memory"] += 1
    staged = source if down else _staged(source)
    Cuda.enqueue(lambda: target.copy_(staged))
    if not non_blocking or (down and not pinned):
        Cuda.current.drain()
        Cuda.counts["waits"] += 1
    return target


class Cuda:
    """The names of `torch.cuda` that the project uses. `deferred` makes tensors follow them."""

    Stream, Event, CUDAGraph = Stream, Event, CudaGraph
    streams: ClassVar[dict[int, Stream]] = {}
    current: Stream  # whose work is queued
    default: Stream
    device_memory, pinned_memory = _Memory(), _Memory()
    running = False  # while queued work runs
    capturing: list[Work] | None = None
    handle = False  # whether cuBLAS has made its handle for this thread
    graphs: ClassVar[list[Made]] = []
    counts: ClassVar[Counter[str]] = Counter()
    capability = (9, 0)
    mem_get_info, empty_cache = staticmethod(lambda: (80 << 30, 80 << 30)), staticmethod(lambda: None)

    @classmethod
    def enqueue(cls, work: Work, stream: Stream | None = None) -> None:
        stream = stream or cls.current
        if cls.capturing is not None and stream is cls.current:
            cls.capturing.append(work)
        else:
            stream.queue.append(work)

    @classmethod
    def launch(cls, work: Work) -> None:
        """Queue a kernel."""
        cls.counts["kernels"] += 1
        cls.enqueue(work)

    @staticmethod
    def graph_pool_handle() -> GraphPool:
        return GraphPool()

    @staticmethod
    def get_device_name(index: int = 0) -> str:
        return "A GPU (double)"

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def get_device_capability() -> tuple[int, int]:
        return Cuda.capability

    @staticmethod
    def get_arch_list() -> list[str]:
        return ["sm_{}{}".format(*Cuda.capability)]

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def current_stream() -> Stream:
        return Cuda.current

    @staticmethod
    def synchronize() -> None:
        Cuda.counts["waits"] += 1
        for stream in Cuda.streams.values():
            stream.drain()

    @staticmethod
    @contextlib.contextmanager
    def stream(stream: Stream) -> Iterator[None]:
        before, Cuda.current = Cuda.current, stream
        try:
            yield
        finally:
            Cuda.current = before


Cuda.current = Cuda.default = Stream()


@contextlib.contextmanager
def deferred() -> Iterator[type[Cuda]]:
    """Tensors with device "cuda" in this thread, and kernels of Triton's interpreter on them."""
    from triton.runtime.interpreter import GridExecutor

    call = GridExecutor.__call__

    def launched(self: Any, *args: Any, **kwargs: Any) -> None:
        if Cuda.running:
            call(self, *args, **kwargs)
        else:
            Cuda.launch(lambda: call(self, *args, **kwargs))

    Cuda.counts.clear()
    Cuda.graphs = []
    GridExecutor.__call__ = launched
    try:
        with _Functions(), _Operators():
            yield Cuda
    finally:
        GridExecutor.__call__ = call
