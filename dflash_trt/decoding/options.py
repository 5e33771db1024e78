"""The options of a request beside its sampling parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from inspect import signature
from numbers import Integral, Real
from typing import Any, ParamSpec, TypedDict, TypeVar

from dflash_trt.decoding.params import MOST_PRIORITY, SamplingParams, integer
from dflash_trt.errors import RequestError, UsageError, quoted

P = ParamSpec("P")
R = TypeVar("R")

_LONG = 1e9  # seconds: practically no timeout


class DraftingOptions(TypedDict, total=False):
    """Keyword arguments of `LLM`'s methods. `RequestOptions` describes them."""

    speculate: bool
    block_length: int | None
    tree_nodes: int | None


class ServingOptions(DraftingOptions, total=False):
    """Keyword arguments of `AsyncLLM`'s methods. `RequestOptions` describes them."""

    timeout: float | None
    priority: int
    cache_salt: str
    count_prompt: bool


@dataclass(frozen=True)
class RequestOptions:
    """How a request is decoded and served. No option changes the tokens. Raises RequestError naming the option.

    speculate: whether the request takes drafts.
    block_length: tokens verified per round, 1 to the block size. None: each round drafts and verifies the number that
        is expected to be fastest, or none (`AdaptiveLength`).
    tree_nodes: for bundles built with `--tree-width`: the tokens of the tree that each round verifies, including the
        newest token. 0 verifies chains. None: a round verifies a tree where that is expected to be faster.
    timeout: seconds after which the request ends with finish_reason "timeout".
    priority: -100 to 100. Each step counts like a second in the queue, and the lowest starts first.
    cache_salt: the request reuses the cache rows of requests with the same one only.
    count_prompt: whether the metrics count the prompt's tokens. Further samples of a prompt leave them out.

    For `LLM`, block_length and tree_nodes are those of every round of a call. `AsyncLLM` has its own for all rounds.
    There a request's block_length is the most that rounds verify for it, and its tree_nodes the most nodes of trees in
    its rounds, also for the other requests of the batch.
    """

    speculate: bool = True
    block_length: int | None = None
    tree_nodes: int | None = None
    timeout: float | None = None
    priority: int = 0
    cache_salt: str = ""
    count_prompt: bool = True

    def __post_init__(self) -> None:
        timeout = self.timeout
        if timeout is not None:
            if not isinstance(timeout, Real) or isinstance(timeout, bool) or not timeout >= 0:
                raise RequestError(f"timeout is {quoted(timeout)}, expected seconds, 0 or more")
            object.__setattr__(self, "timeout", float(min(timeout, _LONG)))
        priority = integer("priority", self.priority, -MOST_PRIORITY, MOST_PRIORITY)
        object.__setattr__(self, "priority", priority)
        if not isinstance(self.cache_salt, str):
            raise RequestError(f"cache_salt is {quoted(self.cache_salt)}, expected a text")
        for name in ("block_length", "tree_nodes"):  # `check` knows their limits
            value = getattr(self, name)
            if isinstance(value, Integral) and not isinstance(value, bool):
                object.__setattr__(self, name, int(value))

    def check(self, block_size: int, most_tree_nodes: int) -> None:
        """Raise RequestError if a bundle of this block size does not support them.

        most_tree_nodes: the most nodes of a tree that a pass verifies; 0 if it takes chains only.
        """
        length, nodes = self.block_length, self.tree_nodes
        if length is not None and not (type(length) is int and 1 <= length <= block_size):
            raise UsageError(
                f"block_length is {quoted(length)}, expected 1..{block_size} (this bundle's block size); "
                "leave it out for the default"
            )
        if nodes is None or (type(nodes) is int and nodes == 0):
            return
        if not most_tree_nodes:
            raise UsageError(
                f"tree_nodes is {quoted(nodes)}, but this bundle drafts chains: build it with --tree-width 2 or more, "
                "or open it without exact, if that refuses its trees on this machine"
            )
        if type(nodes) is not int or not 2 <= nodes <= most_tree_nodes:
            raise UsageError(
                f"tree_nodes is {quoted(nodes)}, expected 2..{most_tree_nodes}, or 0 for chains; leave it out for the "
                "default"
            )


_SAMPLING = {field.name for field in fields(SamplingParams)}


def takes(options: type[Any]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A method whose further keyword arguments are `options`, a TypedDict.

    It raises TypeError for other names. The error for a field of SamplingParams shows where that belongs.
    """

    def decorate(method: Callable[P, R]) -> Callable[P, R]:
        known = {*signature(method).parameters, *options.__optional_keys__}

        @wraps(method)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            if given := [f"{name}={quoted(value)}" for name, value in kwargs.items() if name in _SAMPLING]:
                raise TypeError(
                    f"{method.__qualname__}() takes no {given[0].partition('=')[0]} of its own: "
                    f"it belongs in sampling_params=SamplingParams({', '.join(given)})"
                )
            if unknown := [name for name in kwargs if name not in known]:
                raise TypeError(f"{method.__qualname__}() got an unexpected keyword argument {unknown[0]!r}")
            return method(*args, **kwargs)

        return checked

    return decorate
