"""torch as an engine: the graphs as they are, on an NVIDIA GPU or on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from dflash_trt import hardware
from dflash_trt.engines.base import (
    PREFILL_CHUNK,
    Availability,
    BuildSettings,
    Engine,
    EngineOptions,
    RunSettings,
    Weights,
    describe_caches,
)
from dflash_trt.engines.packages import installation
from dflash_trt.options import option

if TYPE_CHECKING:
    from dflash_trt.bundle.manifest import Bundle
    from dflash_trt.bundle.workspace import Progress, Workspace
    from dflash_trt.checkpoint.pair import CheckpointPair
    from dflash_trt.decoding.scheduler import Scheduler
    from dflash_trt.engines.graph_job import GraphJob
    from dflash_trt.formats.precision import Precision
    from dflash_trt.graph.dialect import Dialect
    from dflash_trt.models.inventory import Inventory

_BF16 = 80  # the lowest compute capability with instructions for it


@dataclass(frozen=True)
class TorchOptions(EngineOptions):
    """Options of a build for torch.

    cache: "fp8" keeps keys and values in E4M3, each head of a row with a scale of its own; a row's bits depend on it
        alone. None: in the compute dtype.
    """

    title = "torch"

    cache: Literal["fp8"] | None = option(
        "keys and values in FP8, half the memory of a token (default: in the compute dtype)", default=None
    )


def check(precision: Precision | None, weights: Weights, options: TorchOptions | None) -> None:
    """Everything is possible: weights may be copied, linked or left out, in any dtype."""


def build(pair: CheckpointPair, settings: BuildSettings, place: Workspace, progress: Progress) -> GraphJob:
    """Graphs in BF16 where a GPU computes in it, in FP16 on an older GPU, and else in FP32, unless the precision says
    otherwise.
    """
    from dflash_trt.bundle.manifest import cache_rows
    from dflash_trt.engines.graph_job import GraphJob
    from dflash_trt.graph.builder import COMPUTE
    from dflash_trt.graph.torch import Torch

    capabilities = hardware.compute_capabilities()
    default = "fp32" if not capabilities else "bf16" if capabilities[0] >= _BF16 else "fp16"
    cache = settings.options.cache if settings.options else None
    chain = pair.draft_config is not None and not pair.draft_config.masks  # whose graph reads its own caches
    dtypes = {role: COMPUTE[settings.precision.compute(role, default)] for role in pair.sides}
    dialects: dict[str, Dialect] = {"target": Torch(dtypes["target"], cache)}
    if pair.drafter is not None:
        dialects["drafter"] = Torch(dtypes["drafter"], None if chain else cache, rounds_head=False)
    # Beside a pass that filled a slot, other passes write a block there while it is idle.
    chunk = min(PREFILL_CHUNK, cache_rows(settings.max_seq_len, settings.block_size))
    chunk += settings.block_size
    job = GraphJob.of(pair, settings, dialects, progress, chunk=chunk, link=settings.weights == "link")
    job.manifest["precision"] |= {"cache": cache} if cache else {}
    return job


def open(bundle: Bundle, settings: RunSettings) -> Scheduler:
    from dflash_trt.decoding.scheduler import Scheduler
    from dflash_trt.engines.torch.opening import open_pair

    pair = open_pair(
        bundle,
        slots=settings.max_batch_size,
        prefill_chunk=settings.prefill_chunk,
        threads=settings.threads,
        progress=settings.progress,
        cache_tokens=settings.cache_tokens,
    )
    return Scheduler(pair, settings.prefix_cache_bytes, settings.prompt_delay)


def describe(bundle: Bundle) -> dict[str, Any]:
    """The dtypes beside the rows of its caches."""
    return describe_caches(bundle) | {"precision": bundle.manifest["precision"]}


def available(capabilities: Sequence[int]) -> Availability:
    if ENGINE.lacking():
        return Availability(build=True, run=False, note=f"to run: {installation(ENGINE)}")
    if not capabilities:
        return Availability(build=True, run=True, note="on the CPU, for trying: no GPU is here")
    if problem := hardware.torch_problem():
        return Availability(build=True, run=False, note=problem)
    torch = hardware.torch_here()
    assert torch is not None
    note = f"on {', '.join(torch.gpus)}, by torch {torch.version} for CUDA {torch.cuda}"
    return Availability(build=True, run=True, note=note)


def memory_settings(inventory: Inventory, options: TorchOptions | None) -> dict[str, Any]:
    return {"cache": options and options.cache}


ENGINE = Engine(
    name="torch",
    check=check,
    build=build,
    open=open,
    describe=describe,
    available=available,
    modules=("torch", "triton"),
    needed=("torch",),
    capabilities=None,
    fp8_head=_BF16,
    weight_layout="int4_by_row",
    options=TorchOptions,
    memory_settings=memory_settings,
)
