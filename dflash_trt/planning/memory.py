"""The memory of a pair on one GPU, and the longest context and the largest batch that fit beside it.

Everything but activations and the runtime's own memory follows exactly from the configurations. For these two, an
engine has allowances of its own (`MemoryTraits`). Activations may also be estimated from shapes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, TypeGuard

from dflash_trt.bundle.cache_kinds import most_written, rows_by_window
from dflash_trt.checkpoint.schema import DrafterConfig, MoEConfig
from dflash_trt.engines import registry
from dflash_trt.engines.base import GIB, PREFILL_CHUNK, MemoryTraits
from dflash_trt.errors import BuildError, UsageError
from dflash_trt.formats import FORMATS, INT4, SCHEMES
from dflash_trt.formats.base import BLOCK
from dflash_trt.formats.int8 import INT8
from dflash_trt.formats.precision import Precision
from dflash_trt.graph.dialect import SINK_PADDING
from dflash_trt.graph.tensorrt_experts import at_a_time
from dflash_trt.models.delta_net import state_bytes
from dflash_trt.models.inventory import NUMBER_BYTES, Inventory, weight_bytes
from dflash_trt.planning.gpus import Gpu

# Formats that TensorRT's operators multiply as they are. Experts in the others are widened first (docs/tensorrt.md).
MULTIPLIED = frozenset({"fp8", "nvfp4", "int4"})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The setting to plan for.

    cache: precision of the caches; by default the compute dtype.
    drafter_attention: for TensorRT-LLM. VANILLA and FA4 keep the drafter's context in a dense arena, TRTLLM keeps it
        in pages of the KV pool.
    draft_pool: whether the KV pool has pages for the drafter in addition to an arena.
    max_num_tokens: tokens of one pass; by default the engine's.
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
    draft_pool: bool = False
    max_num_tokens: int | None = None

    def compute(self, side: str) -> str:
        """The compute dtype of "target" or "drafter"."""
        return self.precision.compute(side, self.traits.compute)

    @property
    def traits(self) -> MemoryTraits:
        """How the engine uses memory. Raises BuildError where there is no such engine."""
        return registry.find(self.engine).memory

    @property
    def arena(self) -> bool:
        """Whether the drafter's context has its own dense buffer."""
        return self.traits.pool is not None and self.drafter_attention != "TRTLLM"


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one GPU. `kv_bytes` and `drafter_bytes` are for `max_batch_size` sequences of `max_seq_len` tokens.

    kv_bytes_per_token, drafter_bytes_per_token: of layers that keep a row for every token.
    kv_window_bytes, drafter_window_bytes: a sequence's rows in layers with a window, once it is longer than these keep.
    state_bytes_per_sequence: of layers with Gated DeltaNet, with the rows that wait to be replayed, as often as the
        engine holds them. `kv_bytes` holds them.
    kv_fraction: for TensorRT-LLM, the share of free memory for its KV pool.
    kv_pool_bytes: for TensorRT-LLM, the size of that pool.
    longest_context: at batch 1; 0 if nothing fits.
    largest_batch: at `max_seq_len`; 0 if nothing fits.
    pass_seconds: a lower bound of a verification pass at batch 1: moving all its data once at the GPU's bandwidth.
    scratch_bytes: of `activation_bytes`, what passes write and read again, where an engine lends it to its plans.
    experts_moved: bytes of experts that such a pass moves. An engine without kernels for experts computes all of them,
        and may write them widened and read them again.
    experts_chosen: bytes of the experts that its rows choose, at most.
    """

    engine: str
    gpu: str
    tensor_parallel: int
    max_seq_len: int
    max_batch_size: int
    memory_bytes: int
    weights: dict[str, dict[str, dict[str, int]]]
    weight_bytes: int
    runtime_bytes: int
    activation_bytes: int
    kv_bytes_per_token: int
    kv_window_bytes: int
    drafter_bytes_per_token: int
    drafter_window_bytes: int
    state_bytes_per_sequence: int
    kv_bytes: int
    drafter_bytes: int
    total_bytes: int
    left_bytes: int
    kv_fraction: float | None
    kv_pool_bytes: int | None
    longest_context: int
    largest_batch: int
    pass_seconds: float
    scratch_bytes: int
    experts_moved: int
    experts_chosen: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def fits(self) -> bool:
        return self.largest_batch >= self.max_batch_size

    def arithmetic(self) -> str:
        """The sum, in GiB, as one line."""
        parts = {
            "weights": self.weight_bytes,
            "runtime": self.runtime_bytes,
            "activations": self.activation_bytes,
            f"{'states and ' * (self.state_bytes_per_sequence > 0)}KV cache of {self.max_batch_size} x "
            f"{self.max_seq_len} tokens": self.kv_bytes,
            "drafter context": self.drafter_bytes,
        }
        line = " + ".join(f"{name} {gib(value)}" for name, value in parts.items())
        return f"{line} = {gib(self.total_bytes)} of {gib(self.memory_bytes)} GiB"

    def refuse(self) -> BuildError:
        """The error that says why the pair does not fit, and how it would fit."""
        if self.longest_context == 0:
            advice = "not one sequence fits: use more GPUs (--tp) or GPUs with more memory"
        elif self.largest_batch == 0:
            advice = f"lower --max-seq-len: at most {self.longest_context} tokens fit, at batch 1"
        else:
            advice = f"lower --max-batch-size to {self.largest_batch}, or lower --max-seq-len"
        where = f"{self.tensor_parallel} x {self.gpu}" if self.tensor_parallel > 1 else self.gpu
        return BuildError(f"does not fit on {where}, per GPU: {self.arithmetic()}; {advice}")


def arena_bytes(
    drafter: DrafterConfig,
    *,
    max_batch_size: int,
    max_seq_len: int,
    draft_len: int,
    tensor_parallel: int = 1,
    page: int = 1,
    dtype_bytes: int = 2,
) -> int:
    """TensorRT-LLM's context buffer of a DFlash drafter, per GPU; one slot more than sequences, for padding.

    K and V of every layer, dense in the context: 2 * slots * layers * (context + block) * kv heads * head size.
    `page`: tokens of a page, where the TRTLLM attention backend gets no managed pool and falls back to pages.
    """
    rows = min(max_seq_len, drafter.max_position_embeddings) + draft_len + 1
    rows = -(-rows // page) * page
    heads = max(1, drafter.num_key_value_heads // tensor_parallel)
    per_row = 2 * drafter.num_hidden_layers * heads * drafter.head_dim * dtype_bytes
    return (max_batch_size + 1) * rows * per_row


def estimate_memory(inventory: Inventory, settings: Settings) -> MemoryEstimate:
    """Compute the memory of the pair on one of `tensor_parallel` GPUs.

    Raises BuildError if the engine is unknown, or is to run on several GPUs and cannot.
    """
    s = settings
    if s.tensor_parallel > 1 and not s.traits.several_gpus:
        several = [engine.name for engine in registry.engines() if engine.memory.several_gpus]
        raise UsageError(
            f"--tp is {s.tensor_parallel}, but {s.engine} runs on one GPU; use {' or '.join(several)}"
        )
    weights = {side: _weights(inventory, s, side) for side in ("target", "drafter")}
    held = sum(n for side in weights.values() for role in side.values() for n in role.values())
    packed = bool(set(weights["target"].get("experts", {})) & set(SCHEMES))
    layout = _Layout(inventory, s, held, packed_experts=packed)
    total = layout.total(s.max_batch_size, s.max_seq_len)
    limit = min(inventory.target.max_position_embeddings, inventory.drafter.max_position_embeddings)
    fraction, pool = layout.pool(s.max_batch_size, s.max_seq_len)
    moved, chosen = _experts_moved(inventory, s, weights["target"].get("experts", {}))
    return MemoryEstimate(
        engine=s.engine,
        gpu=s.gpu.name,
        tensor_parallel=s.tensor_parallel,
        max_seq_len=s.max_seq_len,
        max_batch_size=s.max_batch_size,
        memory_bytes=s.gpu.memory_bytes,
        weights=weights,
        weight_bytes=held,
        runtime_bytes=layout.runtime,
        activation_bytes=layout.activations(s.max_batch_size, s.max_seq_len),
        kv_bytes_per_token=layout.per_token("target"),
        kv_window_bytes=layout.window_bytes("target", s.max_seq_len),
        drafter_bytes_per_token=layout.per_token("drafter"),
        drafter_window_bytes=layout.window_bytes("drafter", s.max_seq_len),
        state_bytes_per_sequence=layout.state,
        kv_bytes=layout.kv(s.max_batch_size, s.max_seq_len),
        drafter_bytes=layout.drafter(s.max_batch_size, s.max_seq_len),
        total_bytes=total,
        left_bytes=s.gpu.memory_bytes - total,
        kv_fraction=fraction,
        kv_pool_bytes=pool,
        longest_context=_largest(lambda n: layout.fits(1, n), limit),
        largest_batch=_largest(lambda n: layout.fits(n, s.max_seq_len), 4096),
        pass_seconds=(_bytes_read(inventory, s, weights) + moved) / s.gpu.bandwidth,
        scratch_bytes=layout.scratch(s.max_batch_size, s.max_seq_len),
        experts_moved=round(moved),
        experts_chosen=round(chosen),
    )


def gib(count: float) -> str:
    return f"{count / GIB:.2f}"


class _Layout:
    """Sizes on one GPU, as functions of batch and context."""

    def __init__(
        self, inventory: Inventory, settings: Settings, weight_bytes: int, *, packed_experts: bool
    ) -> None:
        self.inventory, self.s, self.weight_bytes = inventory, settings, weight_bytes
        self.traits = settings.traits
        self.pages = self.traits.pool
        cache = settings.cache or settings.compute("target")
        elements = {"target": NUMBER_BYTES[cache], "drafter": NUMBER_BYTES[settings.compute("drafter")]}
        self.row_bytes = {side: self._row_bytes(side, element) for side, element in elements.items()}
        self.state = state_bytes(inventory.target, NUMBER_BYTES[settings.compute("target")])
        self.state = self.traits.states * self.state // settings.tensor_parallel
        self.runtime = self.traits.runtime_bytes
        self.fixed_scratch = self.traits.scratch_bytes
        self.own_attention = settings.gpu.sm in self.traits.attention_kernels
        moe = inventory.target.moe
        self.experts = 0 if moe is None else self._experts(moe, packed=packed_experts)

    def _row_bytes(self, side: str, element: float) -> dict[int | None, int]:
        """Bytes of a row in all layers with one window. Where the engine keeps all rows, layers have none."""
        c = self.inventory.config(side)
        apart = self._stride(side) is not None
        numbers = Counter[int | None]()
        for layer in c.attention_layers:
            heads = c.heads_of(layer)
            on_one = max(1, heads.kv_heads // self.s.tensor_parallel)
            numbers[layer.window if apart else None] += 2 * on_one * heads.head_dim
        return {window: round(count * element) for window, count in numbers.items()}

    def _stride(self, side: str) -> int | None:
        return registry.find(self.s.engine).window_stride(self.inventory.config(side).window_head_dim)

    def per_token(self, side: str) -> int:
        """Bytes of a token in the layers that keep all rows."""
        return self.row_bytes[side].get(None, 0)

    def window_bytes(self, side: str, length: int) -> int:
        """Bytes of a sequence in the layers that keep the rows of a window."""
        rows = self._rows(side, length)
        return sum(rows[window] * size for window, size in self.row_bytes[side].items() if window is not None)

    def _rows(self, side: str, length: int) -> dict[int | None, int]:
        """Cache rows of a sequence by the window of a layer."""
        stride, capacity = self._stride(side), self.rows(length)
        if stride is None:
            return {None: capacity}
        written = most_written(side, min(length, PREFILL_CHUNK), self.s.block_size)
        return rows_by_window(self.row_bytes[side], stride, capacity, written)

    def sequence_bytes(self, side: str, length: int) -> int:
        """Bytes of a sequence's rows in all layers of a model."""
        rows = self._rows(side, length)
        return sum(rows[window] * size for window, size in self.row_bytes[side].items())

    def _queries(self, side: str) -> float:
        """Bytes of a row's queries in all layers of a model."""
        c = self.inventory.config(side)
        sizes = (
            c.heads_of(layer).head_dim + SINK_PADDING * c.attention_sinks for layer in c.attention_layers
        )
        return sum(sizes) * c.num_attention_heads * NUMBER_BYTES[self.s.compute(side)]

    def _experts(self, moe: MoEConfig, *, packed: bool) -> int:
        """Memory of one product over experts: the rows of a prompt chunk, and widened copies of packed weights."""
        if self.traits.has_expert_kernels(moe.quantization, self.s.gpu.sm):
            return 0
        hidden, element = self.inventory.target.hidden_size, NUMBER_BYTES[self.s.compute("target")]
        size = round(2 * moe.intermediate_size * hidden * element)
        count = at_a_time(moe.num_experts, size) if packed else moe.num_experts
        rows = PREFILL_CHUNK * count * (moe.intermediate_size + hidden) * element
        return round(rows) + count * size * packed

    def rows(self, length: int) -> int:
        """Cache rows of one sequence: in a dense cache, passes write blocks past the last token."""
        block = self.s.block_size
        if self.pages is None:
            return length + 2 * block + 1
        return -(-(length + block) // self.pages.page) * self.pages.page

    def kv(self, batch: int, length: int) -> int:
        of_one = self.sequence_bytes("target", length) + self.state
        if self.s.draft_pool and self.s.arena:
            of_one += self.sequence_bytes("drafter", length)
        return batch * of_one

    def drafter(self, batch: int, length: int) -> int:
        if not self.s.arena:
            return batch * self.sequence_bytes("drafter", length)
        return arena_bytes(
            self.inventory.drafter,
            max_batch_size=batch,
            max_seq_len=length,
            draft_len=self.s.block_size - 1,
            tensor_parallel=self.s.tensor_parallel,
        )

    def activations(self, batch: int, length: int) -> int:
        """Taps, logits, the widest rows of two passes, and queries of all layers where they are kept."""
        s, c = self.s, self.inventory.target
        verified = batch * s.block_size
        rows = self._pass_rows(batch, length)
        taps = rows * len(self.inventory.drafter.target_layer_ids) * c.hidden_size
        estimate = round(taps * NUMBER_BYTES[s.compute("target")] + verified * c.vocab_size * 4)
        if self.traits.keeps_queries and not self.own_attention:
            estimate += sum(round(rows * self._queries(side)) for side in ("target", "drafter"))
        estimate += self.scratch(batch, length) if self.fixed_scratch else self._working(rows)
        return estimate if self.pages is None else max(estimate, self.pages.activation_bytes)

    def scratch(self, batch: int, length: int) -> int:
        """Memory that both plans of an engine take in turns. 0 for engines that lend none.

        Measured (docs/planning.md): the drafter keeps its logits twice, and 8 bytes for each slot that a row of a
        verification may see. The target keeps the widest rows of a prompt chunk, 4 bytes for each slot, and what a
        product over experts needs. The project's own attention has no masks, but parts of results.
        """
        if not self.fixed_scratch:
            return 0
        verified = batch * self.s.block_size
        seen = {
            side: 0 if self.own_attention else max(self._rows(side, length).values())
            for side in ("target", "drafter")
        }
        drafter = verified * (2 * 4 * self.inventory.target.vocab_size + 8 * seen["drafter"])
        chunk = max(verified, min(length, PREFILL_CHUNK))
        target = self._working(chunk) + 4 * chunk * seen["target"] + self.experts
        largest = max(drafter, target) + self.fixed_scratch
        return largest + self._attention_parts(batch, chunk) if self.own_attention else largest

    def _attention_parts(self, batch: int, chunk: int) -> int:
        """Memory of the partial results of one attention layer, of the model that needs more."""
        from dflash_plugins.kernel_specs import attention_bytes

        sizes = []
        for c in (self.inventory.target, self.inventory.drafter):
            for n, size in {(h.kv_heads, h.head_dim) for h in map(c.heads_of, c.attention_layers)}:
                for sequences, rows in ((1, chunk), (batch, self.s.block_size)):
                    sizes.append(attention_bytes(sequences, n, rows * c.num_attention_heads // n, size))
        return max(sizes)

    def _pass_rows(self, batch: int, length: int) -> int:
        prompt = min(length, PREFILL_CHUNK) if self.pages is None else length
        return self.s.max_num_tokens or max(batch * self.s.block_size, prompt)

    def _working(self, rows: int) -> int:
        """The residual stream and the widest rows of two passes."""
        c = self.inventory.target
        heads = max(c.heads_of(layer).head_dim for layer in c.attention_layers)
        widest = max(c.intermediate_size // self.s.tensor_parallel, c.num_attention_heads * heads)
        return round(rows * (4 * c.hidden_size + 2 * widest) * NUMBER_BYTES[self.s.compute("target")])

    def total(self, batch: int, length: int) -> int:
        fixed = self.weight_bytes + self.runtime + self.activations(batch, length)
        return fixed + self.kv(batch, length) + self.drafter(batch, length)

    def pool(self, batch: int, length: int) -> tuple[float | None, int | None]:
        """TensorRT-LLM's `free_gpu_memory_fraction`, and the size of the resulting KV pool.

        A dense arena is outside the pool, and releases allocate the two in different order. The fraction leaves room
        for the arena in both orders, with the safety factor of TensorRT-LLM's own check.
        """
        if self.pages is None:
            return None, None
        free = self.s.gpu.memory_bytes - self.weight_bytes - self.runtime
        arena = self.drafter(batch, length) if self.s.arena else 0
        fraction = self.pages.fraction
        if arena:
            fraction = min(fraction, 1 - arena / (self.pages.arena_safety * free)) if free > 0 else 0.0
        fraction = max(0.0, int(fraction * 100) / 100)
        return fraction, max(0, int((free - self.activations(batch, length) - arena) * fraction))

    def fits(self, batch: int, length: int) -> bool:
        if self.total(batch, length) > self.s.gpu.memory_bytes:
            return False
        _, pool = self.pool(batch, length)
        if pool is None:
            return True
        paged = 0 if self.s.arena else self.drafter(batch, length)
        return self.kv(batch, length) + paged <= pool


def _weights(inventory: Inventory, s: Settings, side: str) -> dict[str, dict[str, int]]:
    scheme = s.precision.scheme(side)
    in_blocks = registry.find(s.engine).weight_layout == "blocks"
    largest = _largest_group(scheme) if in_blocks else None
    roles = inventory.weights(side, s.compute(side), scheme, s.tensor_parallel, largest)
    if largest == 0 and "experts" in roles:  # these stay in groups
        in_groups = inventory.weights(side, s.compute(side), scheme, s.tensor_parallel, BLOCK)
        roles["experts"] = in_groups["experts"]
    if in_blocks and side == "target" and _integer(scheme):
        # The head has the target's format too. The table of a tied embedding stays beside it, as it is on disk.
        roles["head"] = _head(inventory, scheme, largest, inventory.target.vocab_size)
        roles["embedding"] = dict(inventory.stored("target")["embedding"])
        roles |= {role: _on_this_processor(sizes) for role, sizes in roles.items() if role != "experts"}
    whole = inventory.target.vocab_size
    rows = inventory.draft_rows if registry.find(s.engine).draft_vocabulary else whole
    if side == "drafter" and s.precision.head is not None:  # its own copy of the target's head
        largest = _largest_group(s.precision.head) if in_blocks else None
        roles["head"] = _head(inventory, s.precision.head, largest, rows)
    elif side == "drafter" and rows < whole:
        roles["head"] = _head(inventory, s.compute("drafter"), largest, rows)
    elif in_blocks and side == "drafter":  # the sessions of both models hold the head that they multiply
        target = s.precision.scheme("target")
        stored = target if _integer(target) else s.compute("target")
        head = _head(inventory, stored, _largest_group(stored), whole)
        roles["head"] = _on_this_processor(head)
    return roles


def _largest_group(precision: str | None) -> int:
    """Weights that share a scale in a build for ONNX Runtime on this machine, at most; 0: those of an output."""
    if precision != INT8.name:
        return BLOCK
    from dflash_trt.engines.onnxruntime_products import channels_pay

    return 0 if channels_pay() else BLOCK


def _on_this_processor(sizes: dict[str, int]) -> dict[str, int]:
    """The sizes of a target's layers in blocks. A build gives INT4's numbers eight bits where it must."""
    if INT4.name not in sizes:
        return sizes
    from dflash_trt.engines.onnxruntime_products import fewest_rows

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
        group = form.algorithm(calibrated=False, inputs=[columns]).group_size
        group = group if largest_group is None else min(group, largest_group)
    return {precision: weight_bytes(precision, rows * columns, rows, group)}


def _bytes_read(inventory: Inventory, s: Settings, weights: dict[str, dict[str, dict[str, int]]]) -> float:
    """Bytes of the target, except experts, that one GPU reads to verify one block: of the embedding, few rows."""
    total = 0.0
    for role, by_precision in weights["target"].items():
        if role == "experts" or (role == "embedding" and not inventory.target.tie_word_embeddings):
            continue
        total += sum(by_precision.values())
    return total


def _experts_moved(inventory: Inventory, s: Settings, stored: dict[str, int]) -> tuple[float, float]:
    """Bytes of experts that a verification of one block moves, and those of the experts that it chooses, at most."""
    moe, size = inventory.target.moe, sum(stored.values())
    if moe is None:
        return 0.0, 0.0
    chosen = min(1.0, s.block_size * moe.experts_per_token / moe.num_experts) * size
    if not s.traits.scratch_bytes or s.traits.has_expert_kernels(moe.quantization, s.gpu.sm):
        return chosen, chosen
    moved = 0.0
    for precision, count in stored.items():
        moved += count
        if precision in SCHEMES and precision not in MULTIPLIED:  # widened: written once, read once
            share = count / size
            weights = sum(moe.sparse_layers) * moe.num_experts * 3 * moe.intermediate_size
            numbers = weights * inventory.target.hidden_size / s.tensor_parallel
            moved += 2 * share * numbers * NUMBER_BYTES[s.compute("target")]
    return moved, chosen


def _largest(fits: Callable[[int], bool], limit: int) -> int:
    """The largest number up to `limit` for which `fits` holds; 0 if none. If it holds, it holds for smaller numbers."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
