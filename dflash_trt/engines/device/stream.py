"""The stream of a GPU, and a CPU in its place."""

from __future__ import annotations

import contextlib
from time import perf_counter
from typing import Any

import torch


class HostStream:
    """The stream of a CPU: work has ended when a call returns."""

    cuda_stream = 0

    def synchronize(self) -> None:
        """Nothing is left to wait for."""


def on(stream: Any) -> contextlib.AbstractContextManager[Any]:
    """Let torch's work go to a stream."""
    return contextlib.nullcontext() if isinstance(stream, HostStream) else torch.cuda.stream(stream)


def now(stream: Any) -> Any:
    """A point in a stream's work."""
    if isinstance(stream, HostStream):
        return perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event


def seconds(begin: Any, end: Any) -> float:
    """The time between two points of `now`, once the second has been reached."""
    return end - begin if isinstance(begin, float) else float(begin.elapsed_time(end)) / 1e3
