"""The memory of a pair on one GPU, and the longest context and the largest batch that fit beside it.

Everything but activations and the runtime's own memory follows exactly from the configurations. For these two, an
engine has allowances of its own (`TRAITS`), and activations are estimated from shapes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from dflash_trt.bundle.cache_kinds import most_written, rows_by_window
from dflash_trt.checkpoint.schema import DrafterConfig
from dflash_trt.engines import registry
from dflash_trt.engines.base import PREFILL_CHUNK
from dflash_trt.errors import UsageError
from dflash_trt.formats import FORMATS, SCHEMES
from dflash_trt.formats.numbers import CACHE_SCALE_BYTES
from dflash_trt.graph.dialect import SINK_PADDING
from dflash_trt.models.delta_net import state_bytes
from dflash_trt.models.inventory import NUMBER_BYTES, Inventory
from dflash_trt.planning.estimate import MemoryEstimate
from dflash_trt.planning.weights import Settings, experts_scratch, weights_of


def arena_bytes(
    drafter: DrafterConfig,
    *,
    max_batch_size: int,
    max_seq_len: int,
    draft_len: int,
    tensor_parallel: int = 1,
) -> int:
    """TensorRT-LLM's context buffer of a DFlash drafter, per GPU; one slot more than sequences, for padding.

    K and V of every layer, dense in the context: 2 * slots * layers * (context + block) * kv heads * head size.
    """
    rows = min(max_seq_len, drafter.max_position_embeddings) + draft_len + 1
    heads = max(1, drafter.num_key_value_heads // tensor_parallel)
    per_row = 2 * drafter.num_hidden_layers * heads * drafter.head_dim * 2  # bytes of BF16
    return (max_batch_size + 1) * rows * per_row


def estimate_memory(inventory: Inventory, settings: Settings) -> MemoryEstimate:
    """Compute the memory of the pair on one of `tensor_parallel` GPUs.

    Raises BuildError if the engine is unknown, or is to run on several GPUs and cannot.
    """
    s = settings
    if s.tensor_parallel > 1 and s.traits.pool is None:
        raise UsageError(
            f"--tp is {s.tensor_parallel}, but {s.engine} runs on one GPU; use {registry.SEVERAL}"
        )
    weights = {side: weights_of(inventory, s, side) for side in inventory.sides}
    held = sum(n for side in weights.values() for role in side.values() for n in role.values())
    experts = weights["target"].get("experts", {})
    sizes = [role for side in weights.values() for role in side.values()]
    packed = sum(n for role in sizes for name, n in role.items() if name in FORMATS)
    layout = _Layout(inventory, s, held, packed, packed_experts=not experts.keys().isdisjoint(SCHEMES))
    total = layout.total(s.max_batch_size, s.max_seq_len)
    limit = min(config.max_position_embeddings for config in inventory.configs)
    fraction, pool = layout.pool(s.max_batch_size, s.max_seq_len)
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
        scratch_bytes=layout.scratch(s.max_batch_size, s.max_seq_len),
    )


class _Layout:
    """Sizes on one GPU, as functions of batch and context."""

    def __init__(
        self,
        inventory: Inventory,
        settings: Settings,
        weight_bytes: int,
        packed: int,
        *,
        packed_experts: bool,
    ) -> None:
        self.inventory, self.s, self.weight_bytes = inventory, settings, weight_bytes
        self.traits = settings.traits
        self.chain = inventory.drafter is not None and not inventory.drafter.masks  # EAGLE-3, MTP
        self.pages = self.traits.pool
        self.runtime = self.traits.runtime_bytes
        if settings.gpu.sm == 0 or not self.runtime:
            self.runtime = self.traits.host_bytes + round(self.traits.host_share * packed)
        caches = {side: settings.compute(side) for side in inventory.sides}
        for side in [side for side in caches if side == "target" or not (self.chain or self.pages)]:
            caches[side] = settings.cache or caches[side]
        self.row_bytes = {side: self._row_bytes(side, cache) for side, cache in caches.items()}
        state = state_bytes(inventory.target, NUMBER_BYTES[settings.compute("target")])
        self.state = self.traits.states * state // settings.tensor_parallel
        self.own_attention = settings.gpu.sm in self.traits.attention_kernels
        self.experts = experts_scratch(inventory, settings, packed=packed_experts)

    def _row_bytes(self, side: str, cache: str) -> dict[int | None, int]:
        """Bytes of a row in all layers with one window. Where the engine keeps all rows, layers have none."""
        scale = CACHE_SCALE_BYTES if cache == "fp8" and self.pages is None else 0  # FP8 numbers have one byte
        c = self.inventory.config(side)
        apart = self._stride(side) is not None
        numbers = Counter[int | None]()
        for layer in c.attention_layers:
            heads = c.heads_of(layer)
            on_one = max(1, heads.kv_heads // self.s.tensor_parallel)
            numbers[layer.window if apart else None] += 2 * on_one * (heads.head_dim + scale)
        if side == "drafter" and self.chain:
            numbers[None] += c.hidden_size  # the fused states of every row
        return {window: round(count * NUMBER_BYTES[cache]) for window, count in numbers.items()}

    def _stride(self, side: str) -> int | None:
        stride = self.traits.window_stride
        return stride and stride(self.inventory.config(side).window_head_dim)

    def per_token(self, side: str) -> int:
        """Bytes of a token in the layers that keep all rows; 0 of a side that there is not."""
        return self.row_bytes.get(side, {}).get(None, 0)

    def window_bytes(self, side: str, length: int) -> int:
        """Bytes of a sequence in the layers that keep the rows of a window."""
        return self.sequence_bytes(side, length) - self.rows(length) * self.per_token(side)

    def _rows(self, side: str, length: int) -> dict[int | None, int]:
        """Cache rows of a sequence by the window of a layer."""
        stride, capacity = self._stride(side), self.rows(length)
        if stride is None:
            return {None: capacity}
        chunk = self.traits.prompt_rows if side == "target" else PREFILL_CHUNK
        written = most_written(side, min(length, chunk), self.s.block_size)
        written += self.traits.idle_blocks * self.s.block_size
        rows = rows_by_window(self.row_bytes[side], stride, capacity, written)
        return {window: self._whole_units(count) for window, count in rows.items()}

    def sequence_bytes(self, side: str, length: int) -> int:
        """Bytes of a sequence's rows in all layers of a model; 0 of a side that there is not."""
        if side not in self.row_bytes:
            return 0
        rows = self._rows(side, length)
        return sum(rows[window] * size for window, size in self.row_bytes[side].items())

    def rows(self, length: int) -> int:
        """Cache rows of one sequence: in a dense cache, passes write blocks past the last token."""
        block = self.s.block_size
        if self.pages is None:
            return self._whole_units(length + 2 * block + 1)
        return -(-(length + block) // self.pages.page) * self.pages.page

    def _whole_units(self, rows: int) -> int:
        return -(-rows // self.traits.row_unit) * self.traits.row_unit

    def kv(self, batch: int, length: int) -> int:
        return batch * (self.sequence_bytes("target", length) + self.state)

    def drafter(self, batch: int, length: int) -> int:
        drafter = self.inventory.drafter
        if drafter is None or not self.s.arena:
            return batch * self.sequence_bytes("drafter", length)
        return arena_bytes(
            drafter,
            max_batch_size=batch,
            max_seq_len=length,
            draft_len=self.s.block_size - 1,
            tensor_parallel=self.s.tensor_parallel,
        )

    def activations(self, batch: int, length: int) -> int:
        """Taps, also those that wait for the drafter, logits, what passes hold at once, and queries of all layers where
        they are kept.
        """
        s, c, drafter = self.s, self.inventory.target, self.inventory.drafter
        verified = batch * s.block_size
        prompt = min(length, self.traits.prompt_rows) if self.pages is None else length
        rows = max(verified, prompt)
        waiting = 0
        if self.row_bytes.get("drafter", {}).keys() == {None}:
            waiting = batch * min(length, self.traits.waiting_tokens)
        estimate = verified * c.vocab_size * 4
        if self.traits.idle_blocks and s.gpu.sm:
            from dflash_plugins.kernel_specs import sampling_bytes

            estimate += sampling_bytes(batch, s.block_size, c.vocab_size, self.rows(length))
        if drafter is not None:
            row_bytes = len(drafter.target_layer_ids) * c.hidden_size * NUMBER_BYTES[s.compute("target")]
            estimate += round((rows + waiting) * row_bytes)
        if self.traits.keeps_queries and not self.own_attention:
            estimate += sum(round(rows * self._query_bytes(side)) for side in self.inventory.sides)
        if not self.own_attention:
            heads = max(
                c.num_attention_heads * self.traits.score_copies[c.attention_sinks]
                for c in self.inventory.configs
            )
            estimate += 4 * heads * rows * self.rows(length)
        estimate += self.scratch(batch, length) if self.traits.scratch_bytes else self._working(rows, 4)
        return estimate if self.pages is None else max(estimate, self.pages.activation_bytes)

    def _query_bytes(self, side: str) -> float:
        """Bytes of a row's queries in all layers of a model."""
        c = self.inventory.config(side)
        sinks = SINK_PADDING * c.attention_sinks
        width = sum(c.heads_of(layer).head_dim + sinks for layer in c.attention_layers)
        return width * c.num_attention_heads * NUMBER_BYTES[self.s.compute(side)]

    def scratch(self, batch: int, length: int) -> int:
        """Memory that both plans of an engine take in turns. 0 for engines that lend none.

        Measured (docs/planning.md): the drafter keeps its logits twice, and 8 bytes for each slot that a row of a
        verification may see. The target keeps the widest rows of a prompt chunk, 4 bytes for each slot, and what a
        product over experts needs. The project's own attention has no masks, but parts of results.
        """
        if not self.traits.scratch_bytes:
            return 0
        verified = batch * self.s.block_size
        seen = {
            side: 0 if self.own_attention else max(self._rows(side, length).values())
            for side in self.inventory.sides
        }
        drafter = 0
        if "drafter" in seen:
            drafter = verified * (2 * 4 * self.inventory.target.vocab_size + 8 * seen["drafter"])
        chunk = max(verified, min(length, PREFILL_CHUNK))
        target = self._working(chunk) + 4 * chunk * seen["target"] + self.experts
        parts = self._attention_parts(batch, chunk, length) if self.own_attention else 0
        return max(drafter, target) + self.traits.scratch_bytes + parts

    def _attention_parts(self, batch: int, chunk: int, length: int) -> int:
        """Memory of the partial results of one attention layer, of the model that needs more."""
        from dflash_plugins.kernel_specs import attention_bytes

        return max(
            attention_bytes(
                *(sequences, heads.kv_heads, rows * c.num_attention_heads // heads.kv_heads),
                *(heads.head_dim, kept[layer.window if layer.window in kept else None]),
                windowed=layer.window is not None,
            )
            for side in self.row_bytes
            for c, kept in ((self.inventory.config(side), self._rows(side, length)),)
            for layer in c.attention_layers
            for heads in (c.heads_of(layer),)
            for sequences, rows in ((1, chunk), (batch, self.s.block_size))
        )

    def _working(self, rows: int, widths: int = 2) -> int:
        """The residual stream and so many of the widest rows. torch has gate and up, one activated, and the product."""
        c = self.inventory.target
        heads = max(c.heads_of(layer).head_dim for layer in c.attention_layers)
        widest = max(c.intermediate_size // self.s.tensor_parallel, c.num_attention_heads * heads)
        return round(rows * (4 * c.hidden_size + widths * widest) * NUMBER_BYTES[self.s.compute("target")])

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


def _largest(fits: Callable[[int], bool], limit: int) -> int:
    """The largest number up to `limit` for which `fits` holds; 0 if none. If it holds, it holds for smaller numbers."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
