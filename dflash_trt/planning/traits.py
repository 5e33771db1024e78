"""How each engine lays a pair out in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from dflash_plugins.kernel_specs import ROUND_TARGET, TARGETS

from dflash_trt.engines.base import PREFILL_CHUNK
from dflash_trt.engines.device.sizes import ROW_UNIT
from dflash_trt.engines.onnxruntime import PROMPT_PASS
from dflash_trt.engines.tensorrt.options import FLAVOURS
from dflash_trt.graph.onnxruntime import OnnxRuntime
from dflash_trt.graph.tensorrt import TensorRT
from dflash_trt.graph.torch import Torch
from dflash_trt.planning.estimate import GIB


@dataclass(frozen=True, kw_only=True)
class PagedPool:
    """A pool of cache pages of `page` tokens that takes the share `fraction` of free memory, at most.

    `activation_bytes`: the least that is set aside for activations. `arena_safety`: the share of free memory that a
    dense buffer beside the pool may take.
    """

    page: int
    fraction: float
    activation_bytes: int
    arena_safety: float


@dataclass(frozen=True, kw_only=True)
class MemoryTraits:
    """How an engine lays a pair out in a GPU's memory.

    `compute`: the dtype of weights and caches for which no precision is given. `runtime_bytes`: context, libraries and
    workspace on a GPU, as an allowance; 0 if it runs on CPUs only. `host_bytes`: the same on a CPU.
    `prompt_rows`: the most rows of a pass over a prompt. `scratch_bytes`: what both plans need beside the
    estimate from shapes; an engine that has it computes every expert for every row. `expert_kernels`: compute
    capabilities with kernels of this project for experts in MXFP4, which need no such memory.
    `row_unit`: the cache rows of a sequence are a multiple of it. `idle_blocks`: blocks that layers with a window keep
    beside a pass, as other passes write there while the slot is idle.
    `keeps_queries`: whether the queries of all layers of a pass have memory at once. `states`: how often a sequence's
    recurrent states are held.
    `waiting_tokens`: the tokens of a sequence whose features may wait for the drafter, if it keeps all rows.
    `host_share`: what a CPU makes of weights in integers as it loads them, as a share of their bytes.
    `score_copies`: how often attention without and with sinks holds the scores of a pass in float32, with a column for
    each cache row.
    `widens`: whether weights in few bits have the compute dtype on the GPU, except where kernels multiply them.
    `packed_kernels`: the lowest compute capability with kernels for layers in any format, where the compute dtype is
    not FP32.
    `shares_tables`: whether the drafter reads the target's own embedding and head, instead of copies.
    `window_stride`: how many rows layers with a window drop at once, by the size of a head; None: they keep all rows.
    `attention_kernels`: compute capabilities for which attention has kernels of this project, and needs neither masks
    nor these queries.
    `pool`: the pages of an engine that can spread a pair over GPUs; None for dense caches on one GPU.
    """

    compute: str = "bf16"
    runtime_bytes: int = GIB
    host_bytes: int = 0
    prompt_rows: int = PREFILL_CHUNK
    scratch_bytes: int = 0
    expert_kernels: frozenset[int] = frozenset()
    keeps_queries: bool = False
    waiting_tokens: int = 0
    host_share: float = 0.0
    score_copies: tuple[int, int] = (0, 0)
    widens: bool = False
    packed_kernels: int | None = None
    shares_tables: bool = False
    states: int = 1
    row_unit: int = 1
    idle_blocks: int = 0
    attention_kernels: frozenset[int] = frozenset()
    window_stride: Callable[[int], int] | None = None
    pool: PagedPool | None = None


_PLANS = MemoryTraits(
    # TensorRT-RTX's plans ask for up to so much scratch memory beside the estimate from shapes (docs/planning.md).
    # Taken for TensorRT too. The plugins widen no experts, and compute none that nobody chose.
    scratch_bytes=GIB // 16,
    expert_kernels=FLAVOURS["tensorrt-rtx"].plugin_capabilities,
    keeps_queries=True,
    row_unit=ROW_UNIT,
    idle_blocks=1,
    states=2,  # a pass writes new ones beside those that it reads
    window_stride=TensorRT.window_stride,
)
TRAITS: Mapping[str, MemoryTraits] = {
    "onnxruntime": MemoryTraits(  # measured (docs/planning.md)
        compute="fp32",
        runtime_bytes=0,
        host_bytes=24 << 20,
        host_share=0.6,
        score_copies=(2, 2),
        prompt_rows=PROMPT_PASS,
        waiting_tokens=2 * PREFILL_CHUNK,
        window_stride=OnnxRuntime.window_stride,
    ),
    "torch": MemoryTraits(
        host_bytes=70 << 20,
        expert_kernels=frozenset(TARGETS),
        idle_blocks=1,
        score_copies=(0, 2),
        widens=True,
        packed_kernels=ROUND_TARGET,
        shares_tables=True,
        states=2,
        attention_kernels=frozenset(TARGETS),
        window_stride=Torch.window_stride,
    ),
    "tensorrt-rtx": _PLANS,
    "tensorrt": replace(
        _PLANS,
        expert_kernels=frozenset(TARGETS),
        attention_kernels=frozenset(TARGETS),
    ),
    "tensorrt-llm": MemoryTraits(
        runtime_bytes=4 * GIB,  # _DFLASH_BUDGET_RUNTIME_OVERHEAD_BYTES
        shares_tables=True,
        # TensorRT-LLM 1.4: _DFLASH_BUDGET_ACTIVATION_RESERVE_BYTES and _SAFETY_FACTOR; the fraction is its default.
        pool=PagedPool(page=32, fraction=0.9, activation_bytes=6 * GIB, arena_safety=0.70),
    ),
}
