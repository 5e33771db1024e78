"""The weights of a pair as an engine's build has them on one GPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeGuard

from dflash_trt.checkpoint.quantization import read_quantization
from dflash_trt.engines import registry
from dflash_trt.engines.base import PREFILL_CHUNK
from dflash_trt.formats import FORMATS, INT4, MXFP4
from dflash_trt.formats.base import BLOCK
from dflash_trt.formats.precision import COMPUTE_DTYPES, Precision
from dflash_trt.graph.onnxruntime import RESIDENT_EXPERT_BYTES
from dflash_trt.graph.tensorrt_experts import at_a_time
from dflash_trt.models.inventory import NUMBER_BYTES, Inventory, weight_bytes
from dflash_trt.planning.gpus import Gpu
from dflash_trt.planning.traits import TRAITS, MemoryTraits


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
