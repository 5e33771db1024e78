"""What decodes requests: the scheduler of this package, or the driver of an engine with a scheduler of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

from dflash_trt.decoding.length.policy import Lengths
from dflash_trt.decoding.metrics import Metrics
from dflash_trt.decoding.pair import Pair
from dflash_trt.decoding.params import RequestOptions, SamplingParams
from dflash_trt.decoding.request import Emission, Request


class DecodingLoop(Protocol):
    """Requests enter by `submit`, and `step` returns their results. One thread calls all methods.

    cut_short: whether a step was interrupted and left slots and requests inconsistent; `clear` repairs them.
    """

    metrics: Metrics
    cut_short: bool

    @property
    def pair(self) -> Pair:
        """The pair whose passes it runs. Raises DFlashError if the engine runs its passes by itself."""

    @property
    def most_tree_nodes(self) -> int:
        """The most nodes of a tree that a pass verifies; 0 if it takes chains only."""

    @property
    def idle(self) -> bool:
        """Whether no request waits or runs."""

    def check(self, options: RequestOptions, params: SamplingParams) -> None:
        """Raise RequestError naming the field for what the engine does not support."""

    def submit(self, request: Request) -> None:
        """Queue a request."""

    def cancel(self, request: Request) -> None:
        """End a submitted request in the next step. No effect on an ended request."""

    def step(self, lengths: Lengths) -> list[Emission]:
        """The results of one step for the running requests. Raises EngineError if a pass fails."""

    def parts(self, lengths: Lengths) -> Iterator[list[Emission]]:
        """One `step`, with its results as they come."""

    def forget(self) -> None:
        """Drop the cache rows that were kept of ended requests."""

    def clear(self) -> None:
        """Drop every request."""

    def logits(self, ids: list[int]) -> np.ndarray[Any, Any]:
        """The target's logits after these tokens, float32 [V]. Only when idle."""

    def close(self) -> None:
        """Free the engines. No other method may be called afterwards."""
