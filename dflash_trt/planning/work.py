"""The work of one pass through a target or a drafter on one GPU: bytes and operations."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_trt.checkpoint.schema import DecoderConfig
from dflash_trt.models.inventory import NUMBER_BYTES, Inventory
from dflash_trt.planning.gpus import Gpu

_COMPUTE = "bf16"


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The work of a pass, without the number of rows.

    dense_bytes: weights that every pass reads, with the LM head and without embedding and experts.
    dense_operations: multiply-adds per row, times two.
    dense_rate, expert_rate: peak operations per second in the precision of the weights.
    expert_bytes, expert_operations: one expert of every layer.
    experts, experts_per_token: 0 without a mixture of experts.
    kv_bytes: per row of context, in layers that read all of it.
    window_bytes: per row of context, in layers that read the last `window` rows.
    """

    layers: int
    dense_bytes: float
    dense_operations: float
    dense_rate: float
    expert_bytes: float
    expert_operations: float
    expert_rate: float
    experts: int
    experts_per_token: int
    kv_bytes: float
    window_bytes: float
    window: int

    def cache_bytes(self, context: int) -> float:
        """Bytes of the caches that a request of this length reads in a pass."""
        return self.kv_bytes * context + self.window_bytes * min(context, self.window)


def work_of(inventory: Inventory, side: str, gpu: Gpu, *, draft_vocabulary: bool = True) -> Work:
    """The work of "target" or "drafter" in BF16, with experts as stored.

    draft_vocabulary: whether the engine drafts from the drafter's own vocabulary, if it has one. The GPU needs a known
    peak rate.
    """
    config = inventory.config(side)
    sizes = inventory.weights(side, _COMPUTE)
    counts = inventory.parameters(side)
    head = "head" if "head" in sizes else "embedding"
    if side == "drafter" and "head" not in sizes:  # the drafter uses the target's head
        target = inventory.weights("target", _COMPUTE)
        whole = inventory.target.vocab_size
        rows = inventory.draft_rows if draft_vocabulary else whole
        stored = target.get("head", target.get("embedding", {}))
        sizes["head"] = {name: size * rows // whole for name, size in stored.items()}
        counts["head"] = rows * inventory.target.hidden_size
        head = "head"
    read = [role for role in sizes if role not in ("experts", "embedding")]
    if head == "embedding":
        read.append("embedding")
    matrices = [role for role in read if role != "norm"]
    moe = getattr(config, "moe", None)
    sparse = sum(moe.sparse_layers) if moe is not None else 0
    number = moe.num_experts if moe is not None else 0
    full, windowed, window = _cache_rows(config)
    experts = sizes.get("experts", {})
    return Work(
        layers=config.num_hidden_layers,
        dense_bytes=sum(sum(sizes[role].values()) for role in read),
        dense_operations=2 * sum(counts.get(role, 0) for role in matrices),
        dense_rate=gpu.dense_flops[_COMPUTE],
        expert_bytes=sum(experts.values()) / number if sparse else 0.0,
        expert_operations=2 * counts.get("experts", 0) / number if sparse else 0.0,
        expert_rate=_expert_rate(gpu, experts),
        experts=number,
        experts_per_token=moe.experts_per_token if moe is not None else 0,
        kv_bytes=full,
        window_bytes=windowed,
        window=window,
    )


def _cache_rows(config: DecoderConfig) -> tuple[float, float, int]:
    """Bytes per row of context of all full layers, of all windowed layers, and the window."""
    full, windowed, window = 0, 0, 0
    for layer in config.attention_layers:
        heads = config.heads_of(layer)
        row = 2 * heads.kv_heads * heads.head_dim * NUMBER_BYTES[_COMPUTE]
        if layer.window is None:
            full += row
        else:
            windowed, window = windowed + row, max(window, layer.window)
    return full, windowed, window


def _expert_rate(gpu: Gpu, experts: dict[str, int]) -> float:
    """Peak operations per second. MXFP4 weights are multiplied with FP8 activations on Blackwell, and with BF16
    before.
    """
    return gpu.dense_flops["fp8" if "mxfp4" in experts and gpu.sm >= 100 else _COMPUTE]
