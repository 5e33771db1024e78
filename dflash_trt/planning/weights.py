"""The weights of a pair as an engine's build has them on one GPU, and how each engine lays a pair out in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeGuard

from dflash_plugins.kernel_specs import ROUND_TARGET, TARGETS

from dflash_trt.checkpoint.quantization import read_quantization
from dflash_trt.engines import registry
from dflash_trt.engines.base import PREFILL_CHUNK
from dflash_trt.engines.device.sizes import ROW_UNIT
from dflash_trt.engines.onnxruntime import PROMPT_PASS
from dflash_trt.engines.tensorrt.options import FLAVOURS
from dflash_trt.formats import FORMATS, INT4, MXFP4
from dflash_trt.formats.base import BLOCK
from dflash_trt.formats.precision import COMPUTE_DTYPES, Precision
from dflash_trt.graph.onnxruntime import RESIDENT_EXPERT_BYTES, OnnxRuntime
from dflash_trt.graph.tensorrt import TensorRT, at_a_time
from dflash_trt.graph.torch import Torch
from dflash_trt.models.inventory import NUMBER_BYTES, Inventory, weight_bytes
from dflash_trt.planning.estimate import GIB
from dflash_trt.planning.gpus import Gpu


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The setting to plan for.

    cache: precision of the caches; by default the compute dtype.
    drafter_attention: for TensorRT-LLM. VANILLA and FA4 keep the drafter's context in a dense arena, TRTLLM keeps it
        in pages of the KV pool.
    """

    engine: str
    gpu: Gpu
    max_seq_len: int
    max_batch_size: int
    block_size: int
    tensor_parallel: int = 1
    precision: Precision = field(default_factory=Precision)
    cache: str | None = None
    drafter_attention: str = "VANILLA"

    def compute(self, side: str) -> str:
        return self.precision.compute(side, self.traits.compute)

    @property
    def traits(self) -> MemoryTraits:
        """How the engine uses memory. Raises BuildError where there is no such engine."""
        return TRAITS[registry.find(self.engine).name]

    @property
    def in_blocks(self) -> bool:
        """Whether weights are in the blocks that ONNX Runtime multiplies."""
        return registry.find(self.engine).multiplies_integers

    @property
    def largest_group(self) -> int | None:
        """Weights that share a scale, at most; None: as the format has it."""
        return BLOCK if self.in_blocks else None

    @property
    def arena(self) -> bool:
        """Whether the drafter's context has its own dense buffer."""
        return self.traits.pool is not None and self.drafter_attention != "TRTLLM"


def weights_of(inventory: Inventory, s: Settings, side: str) -> dict[str, dict[str, int]]:
    """Bytes of the weights of "target" or "drafter" on one GPU, by role and format, as a build has them.

    The drafter's have the target's embedding and head where an engine holds them again for it.
    """
    scheme = s.precision.scheme(side)
    roles = inventory.weights(side, s.compute(side), scheme, s.tensor_parallel, s.largest_group)
    if s.traits.widens:
        roles |= {role: _widened(inventory, s, side, role, sizes) for role, sizes in roles.items()}
    if s.in_blocks:
        for role, size in _widened_once(inventory, side, roles).items():
            held = {name: n for name, n in roles[role].items() if name not in FORMATS}
            roles[role] = held | {"fp32": held.get("fp32", 0) + size}
    if side == "drafter":
        return roles | _borrowed(inventory, s)
    if s.in_blocks or s.traits.widens:
        roles |= _tables(inventory, s, roles)
    if s.in_blocks and _integer(scheme):
        roles |= {role: _on_this_processor(sizes) for role, sizes in roles.items() if role != "experts"}
    return roles


def _widened(
    inventory: Inventory, s: Settings, side: str, role: str, sizes: dict[str, int]
) -> dict[str, int]:
    """The sizes of a role whose formats are widened, in the compute dtype."""
    few = set(sizes) & set(FORMATS)
    lowest = s.traits.packed_kernels
    if lowest is not None and s.gpu.sm >= lowest and s.compute(side) != "fp32":
        return sizes
    if role == "experts":
        few.discard(MXFP4.name)  # without a kernel, those are widened as they are used
    if not few:
        return sizes
    numbers = inventory.parameters(side)[role] // s.tensor_parallel
    return {s.compute(side): numbers * NUMBER_BYTES[s.compute(side)]}


def _widened_once(inventory: Inventory, side: str, roles: dict[str, dict[str, int]]) -> dict[str, int]:
    """Bytes in float32 by role that ONNX Runtime makes as it loads, of what it does not multiply as integers."""
    widened = {}
    for role, sizes in roles.items():
        if any(FORMATS[form].integer_bits is None or role == "experts" for form in FORMATS if form in sizes):
            floats = sum(sizes[name] // NUMBER_BYTES[name] for name in COMPUTE_DTYPES if name in sizes)
            widened[role] = 4 * (inventory.parameters(side)[role] - floats)
    experts = widened.pop("experts", 0)
    return widened | ({"experts": experts} if 0 < experts <= RESIDENT_EXPERT_BYTES else {})


def _tables(inventory: Inventory, s: Settings, roles: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    """Embedding and head of a target where tokens are looked up in the file, which is mapped into memory once.

    A tied head is a matrix of its own; on torch only in another dtype. ONNX Runtime's has the format of the layers.
    """
    tables = {"embedding": dict(inventory.stored("target")["embedding"])}
    if s.in_blocks and (_integer(s.precision.scheme("target")) or "head" not in roles):
        tables["head"] = _target_head(inventory, s)
    elif "head" not in roles and s.compute("target").replace("fp", "f") not in tables["embedding"]:
        tables["head"] = roles["embedding"]
    return tables


def _borrowed(inventory: Inventory, s: Settings) -> dict[str, dict[str, int]]:
    """What the drafter holds of its target's embedding and head, as a copy of its own."""
    whole, unchanged = inventory.target.vocab_size, registry.find(s.engine).unchanged
    rows = inventory.draft_rows and (whole if unchanged else inventory.draft_rows)
    held: dict[str, dict[str, int]] = {}
    if not s.traits.shares_tables and not s.in_blocks:
        held = inventory.weights("borrowed", s.compute("drafter"), None, s.tensor_parallel)
    if s.precision.head is not None:
        return held | {"head": _head(inventory, s.precision.head, s.largest_group, rows or whole)}
    if 0 < rows < whole:
        return held | {"head": _head(inventory, s.compute("drafter"), None, rows)}
    if s.in_blocks and rows:  # the sessions of both models hold the head that they multiply
        held["head"] = _on_this_processor(_target_head(inventory, s))
    return held


def _target_head(inventory: Inventory, s: Settings) -> dict[str, int]:
    """The target's head as ONNX Runtime multiplies it."""
    scheme, vocab = s.precision.scheme("target"), inventory.target.vocab_size
    if s.precision.target is None:
        kept = read_quantization(inventory.target.path.parent).algorithm("lm_head")
        if kept is not None and _integer(kept.scheme):
            return _head(inventory, kept.scheme, BLOCK, vocab)  # in the blocks of its file
    stored = scheme if _integer(scheme) else s.compute("target")
    return _head(inventory, stored, BLOCK, vocab)


def _on_this_processor(sizes: dict[str, int]) -> dict[str, int]:
    """The sizes of a target's layers in blocks. A build gives INT4's numbers eight bits where it must."""
    if INT4.name not in sizes:
        return sizes
    from dflash_trt.engines.onnxruntime.products import fewest_rows

    if fewest_rows(4) is not None:
        return sizes
    # A block of 32 numbers has one scale in float32.
    return sizes | {INT4.name: sizes[INT4.name] * (32 + 4) // (16 + 4)}


def _integer(scheme: str | None) -> TypeGuard[str]:
    return scheme is not None and FORMATS[scheme].integer_bits is not None


def _head(inventory: Inventory, precision: str, largest_group: int | None, rows: int) -> dict[str, int]:
    columns = inventory.target.hidden_size
    form, group = FORMATS.get(precision), 0
    if form is not None:
        group = form.algorithm(inputs=[columns]).group_size
        group = group if largest_group is None else min(group, largest_group)
    return {precision: weight_bytes(precision, rows * columns, rows, group)}


def experts_scratch(inventory: Inventory, s: Settings, *, packed: bool) -> int:
    """Memory of one product over experts: the rows of a prompt chunk, and widened copies of packed weights."""
    moe = inventory.target.moe
    if moe is None or (moe.quantization == MXFP4.name and s.gpu.sm in s.traits.expert_kernels):
        return 0
    hidden, element = inventory.target.hidden_size, NUMBER_BYTES[s.compute("target")]
    size = round(2 * moe.intermediate_size * hidden * element)
    count = at_a_time(moe.num_experts, size) if packed else moe.num_experts
    rows = PREFILL_CHUNK * count * (moe.intermediate_size + hidden) * element
    return round(rows) + count * size * packed


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
