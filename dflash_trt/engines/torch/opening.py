"""From a bundle to a pair that is ready: both graphs on a GPU of this process, or on the CPU."""

from __future__ import annotations

import gc
import logging
from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from dflash_plugins import compiler
from dflash_plugins.kernel_specs import Use, sampling_bytes
from dflash_plugins.launch import Run

from dflash_trt import hardware
from dflash_trt.bundle.manifest import Bundle
from dflash_trt.decoding.drafter import USUAL_CONTEXT
from dflash_trt.decoding.pair import Pair
from dflash_trt.engines.base import PREFILL_CHUNK
from dflash_trt.engines.device.kernels import kernels_here
from dflash_trt.engines.device.memory import memory_errors
from dflash_trt.engines.device.opening import DEVICE, chunk_of, pair_of, warm_up
from dflash_trt.engines.device.stream import HostStream, on
from dflash_trt.engines.torch import kernels as of_layers
from dflash_trt.engines.torch.program import Graph
from dflash_trt.engines.torch.runner import TorchRunner
from dflash_trt.errors import BuildError, EngineError
from dflash_trt.logs import warn_once

if TYPE_CHECKING:
    from dflash_trt.bundle.workspace import Progress

_log = logging.getLogger(__name__)
# An opening does not take longer for sizes of passes that few requests bring. They are captured when they come.
_WARM_UP_SECONDS = 60.0
# For activations, captured passes and libraries.
_ALLOWANCE = 1 << 30


def open_pair(
    bundle: Bundle,
    *,
    slots: int,
    prefill_chunk: int,
    threads: int | None,
    progress: Progress,
    cache_tokens: int | None = None,
) -> Pair:
    """The bundle's graphs with `slots` cache slots. On a GPU, kernels are compiled and passes of all sizes captured,
    those that are needed most first, and others only within a time. What is left is captured when it comes.

    cache_tokens: of all slots; None: on a GPU what fits of the most that one slot more can have, and fewer while passes
    find no memory.

    Raises MemoryError if the GPU has too little.
    """
    hardware.number_gpus_by_bus()
    on_gpu = torch.cuda.is_available() and not hardware.torch_lacks(torch)
    block_size = bundle.manifest["block_size"]
    if not on_gpu and (problem := hardware.torch_problem()):
        warn_once(_log, f"{bundle.path}: runs on the CPU, because {problem}")
    if on_gpu and bundle.manifest["precision"]["target"] == "float":
        warn_once(
            _log,
            f"{bundle.path}: is in float32, as a build is where no GPU is; with --precision target=bf16,drafter=bf16 "
            "it takes half the memory",
        )
    device = torch.device(DEVICE if on_gpu else "cpu")
    stream: Any = torch.cuda.Stream() if on_gpu else HostStream()
    if threads is not None:
        torch.set_num_threads(threads)
    chunk = chunk_of(bundle, prefill_chunk, min(PREFILL_CHUNK, bundle.capacity - block_size - 1))
    # Only this stream fills memory. torch's default stream is not ordered with it.
    shared: WeakValueDictionary[Any, torch.Tensor] = WeakValueDictionary()
    with memory_errors(), on(stream):
        graphs = {
            # Drafts may be wrong, so only the target's rows must not depend on others.
            role: Graph(bundle.listed(f"{role}.onnx"), device, shared, alone=role == "target")
            for role in bundle.roles
        }
        tokens = least = cache_tokens
        if on_gpu and cache_tokens is None:
            tokens, least = _tokens_that_fit(bundle, graphs, slots)

    @memory_errors()
    def opened() -> Pair:
        with on(stream):
            runners = {
                role: TorchRunner(
                    graph,
                    slots=slots,
                    prefill_chunk=max(chunk, block_size),  # exact mode pads prompts to widths of a block, too
                    block_size=block_size,
                    stream=stream,
                    kinds=bundle.cache_kinds(role),
                    tokens=tokens,
                )
                for role, graph in graphs.items()
            }
            kernels = _kernels if on_gpu else lambda wanted: None
            pair = pair_of(bundle, runners, slots=slots, prefill_chunk=chunk, kernels=kernels)
        hardware.give_back_memory()  # what was read on the way to weights
        if on_gpu:
            warm_up(pair, block_size, progress, runs=2, seconds=_WARM_UP_SECONDS)
            pair.equal_rows, pair.products = of_layers.complete(device), graphs["target"].tiles
        return pair

    while True:
        try:
            return opened()
        except MemoryError as error:
            if tokens is None or least is None or tokens <= least:
                raise
            fewer = max(tokens * 3 // 4, least)
            _log.warning("%s: caches get memory for %d tokens, not %d: %s", bundle.path, fewer, tokens, error)
            tokens = fewer
        gc.collect()  # the runners that failed


def _tokens_that_fit(
    bundle: Bundle, graphs: Mapping[str, Graph], slots: int
) -> tuple[int, int] | tuple[None, None]:
    """The tokens for whose cache rows a GPU that has the weights has memory, beside windows, states, a round's logits
    twice, the kernels that sample, and an allowance; at most the most of one slot more, so that what a request left
    stays while another one goes on from it. And the fewest that all slots need for usual requests. None: slots cannot
    share memory.
    """
    if any(graph.opens([name for name in graph.inputs if "_cache." in name]) for graph in graphs.values()):
        return None, None
    vocab, block_size = bundle.manifest["vocab_size"], bundle.manifest["block_size"]
    kinds = [kind for role in bundle.roles for kind in bundle.cache_kinds(role)]
    of_slot = sum(kind.rows * kind.row_bytes for kind in kinds if kind.window is not None)
    of_slot += 2 * sum(
        prod(n for n in signature.shape[1:] if isinstance(n, int)) * signature.dtype.itemsize
        for graph in graphs.values()
        for name, signature in graph.inputs.items()
        if name.partition(".")[0].endswith("_state")
    )
    passes = 8 * slots * block_size * vocab + sampling_bytes(slots, block_size, vocab, bundle.capacity)
    torch.cuda.empty_cache()  # what was allocated on the way to weights
    free = torch.cuda.mem_get_info()[0] - slots * of_slot - passes - _ALLOWANCE
    of_token = sum(kind.row_bytes for kind in kinds if kind.window is None)
    least = max(bundle.capacity, slots * min(bundle.capacity, USUAL_CONTEXT + 2 * block_size))
    return max(least, int(min(free // max(of_token, 1), (slots + 1) * bundle.capacity))), least


def _kernels(wanted: Sequence[Use]) -> Run | None:
    """The kernels between passes, compiled here. None if they cannot be; a warning then says so once."""
    try:
        return kernels_here(compiler.compile_round(wanted))
    except (BuildError, EngineError) as error:
        warn_once(
            _log, f"{error}; torch's operators take the place of kernels between passes, and the host samples"
        )
        return None
