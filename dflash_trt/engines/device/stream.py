"""The stream of a GPU, and a CPU in its place; what the host reads of it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from itertools import cycle
from math import prod
from time import perf_counter
from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, Any]


class HostStream:
    """The stream of a CPU: work has ended when a call returns."""

    cuda_stream = 0

    def synchronize(self) -> None:
        """Nothing is left to wait for."""


_HERE = contextlib.nullcontext()
_entered = threading.local()  # the stream that this thread's work goes to


def on(stream: Any) -> contextlib.AbstractContextManager[Any]:
    """Let torch's work go to a stream. Within it, a further call costs nothing."""
    if isinstance(stream, HostStream) or getattr(_entered, "stream", None) is stream:
        return _HERE
    return _enter(stream)


@contextlib.contextmanager
def _enter(stream: Any) -> Iterator[None]:
    before, _entered.stream = getattr(_entered, "stream", None), stream
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        _entered.stream = before


class Clock:
    """Points in a stream's work. The last `points` of them may be asked about."""

    def __init__(self, stream: Any, points: int) -> None:
        self._stream, events = stream, list[Any]()
        if not isinstance(stream, HostStream):
            events = [torch.cuda.Event(enable_timing=True) for _ in range(points)]
        self._events = cycle(events)

    def now(self) -> Any:
        """A point after the work so far."""
        if isinstance(self._stream, HostStream):
            return perf_counter()
        event = next(self._events)
        event.record(self._stream)
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        """The time between two points, once the second has been reached."""
        return end - begin if isinstance(begin, float) else float(begin.elapsed_time(end)) / 1e3


class Landing:
    """Memory of the host that a copy of what a round gave goes to, and the end of that copy.

    memory: pinned. parts: the numbers in it by name.
    """

    def __init__(self, memory: torch.Tensor, parts: Mapping[str, Array], stream: Any) -> None:
        self._memory, self._parts, self._stream = memory, parts, stream
        self._end = None if isinstance(stream, HostStream) else torch.cuda.Event()
        self._views: dict[Any, Array] = {}
        self._here = False

    def fill(self, numbers: torch.Tensor) -> None:
        """Copy these numbers, or the first of them, after the work so far. Does not wait."""
        self._memory[: len(numbers)].copy_(numbers, non_blocking=True)
        self._here = self._end is None
        if self._end is not None:
            self._end.record(self._stream)

    def wait(self) -> None:
        """Until the copy has ended."""
        if not self._here and self._end is not None:
            self._end.synchronize()
            self._here = True

    def read(self, name: str, *shape: int) -> Array:
        """A part, after `wait`. The copy after the next one overwrites it."""
        if (view := self._views.get((name, shape))) is None:
            view = self._views[name, shape] = self._parts[name][: prod(shape)].reshape(shape)
        return view


class DeviceArray:
    """A tensor on the GPU. Its numbers are copied to the host when they are read. Leading columns stay on the GPU.

    copied: gives a copy on the host, after the pass that computes them.
    tensor: None if no pass reads it.
    """

    def __init__(self, copied: Callable[[], Array], tensor: torch.Tensor | None = None) -> None:
        self._copied, self.tensor = copied, tensor
        self._host: Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """As of the array."""
        return tuple(self.host().shape if self.tensor is None else self.tensor.shape)

    def host(self) -> Array:
        """The numbers, after the pass that computes them."""
        if self._host is None:
            self._host = self._copied()
        return self._host

    def read(self, host: Array) -> None:
        """Set the numbers from a copy that already exists on the host."""
        self._host = host

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.array(self.host(), dtype=dtype, copy=copy)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, tuple) and all(isinstance(part, slice) for part in key):
            return DeviceArray(lambda: self.host()[key], None if self.tensor is None else self.tensor[key])
        return self.host()[key]
