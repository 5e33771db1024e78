"""From a bundle to a pair that is ready: both graphs on a GPU of this process, or on the CPU."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from dflash_plugins import compiler
from dflash_plugins.kernel_specs import Use
from dflash_plugins.launch import Run

from dflash_trt import hardware
from dflash_trt.bundle.manifest import Bundle
from dflash_trt.decoding.pair import Pair
from dflash_trt.engines.base import PREFILL_CHUNK
from dflash_trt.engines.device.kernels import kernels_here
from dflash_trt.engines.device.memory import memory_errors
from dflash_trt.engines.device.opening import DEVICE, chunk_of, pair_of, warm_up
from dflash_trt.engines.device.stream import HostStream, on
from dflash_trt.engines.torch import kernels as of_layers
from dflash_trt.engines.torch.runner import TorchRunner
from dflash_trt.errors import BuildError, EngineError
from dflash_trt.logs import warn_once

if TYPE_CHECKING:
    from dflash_trt.bundle.workspace import Progress

_log = logging.getLogger(__name__)
# An opening does not take longer for sizes of passes that few requests bring. They are captured when they come.
_WARM_UP_SECONDS = 60.0


@memory_errors()
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
    with on(stream):
        runners = {
            role: TorchRunner(
                bundle.listed(f"{role}.onnx"),
                slots=slots,
                prefill_chunk=max(chunk, block_size),  # exact mode pads prompts to widths of a block, too
                block_size=block_size,
                stream=stream,
                device=device,
                kinds=bundle.cache_kinds(role),
                tokens=cache_tokens,
                shared=shared,
                alone=role == "target",  # drafts may be wrong
            )
            for role in bundle.roles
        }
        kernels = _kernels if on_gpu else lambda wanted: None
        pair = pair_of(bundle, runners, slots=slots, prefill_chunk=chunk, kernels=kernels)
    hardware.give_back_memory()  # what was read on the way to weights
    if on_gpu:
        warm_up(pair, block_size, progress, runs=2, seconds=_WARM_UP_SECONDS)
        pair.equal_rows, pair.products = of_layers.complete(device), runners["target"].tiles
    return pair


def _kernels(wanted: Sequence[Use]) -> Run | None:
    """The kernels between passes, compiled here. None if they cannot be; a warning then says so once."""
    try:
        return kernels_here(compiler.compile_round(wanted))
    except (BuildError, EngineError) as error:
        warn_once(
            _log, f"{error}; torch's operators take the place of kernels between passes, and the host samples"
        )
        return None
