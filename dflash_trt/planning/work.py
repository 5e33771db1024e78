"""The work of one pass through a target or a drafter on one of several GPUs: bytes, operations, collectives."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_trt.checkpoint.schema import DecoderConfig
from dflash_trt.errors import BuildError
from dflash_trt.formats.precision import Precision
from dflash_trt.models.inventory import NUMBER_BYTES, Inventory
from dflash_trt.planning.gpus import Gpu


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The work of one GPU in a pass, without the number of rows.

    dense_bytes: weights that every pass reads, with the LM head and without embedding and experts.
    dense_operations: multiply-adds per row, times two.
    dense_rate, expert_rate: peak operations per second in the precision of the weights.
    expert_bytes, expert_operations: one expert of every layer.
    experts, experts_per_token: 0 without a mixture of experts.
    kv_bytes: per row of context, in layers that read all of it.
    window_bytes: per row of context, in layers that read the last `window` rows.
    hidden_bytes: one row of the residual stream, which a collective moves.
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
    hidden_bytes: int
    gpus: int

    def cache_bytes(self, context: int) -> float:
        """Bytes of the caches that a request of this length reads in a pass."""
        return self.kv_bytes * context + self.window_bytes * min(context, self.window)


def work_of(
    inventory: Inventory,
    side: str,
    gpu: Gpu,
    *,
    gpus: int = 1,
    precision: Precision | None = None,
    draft_vocabulary: bool = True,
) -> Work:
    """The work of "target" or "drafter", its matrices and heads divided among `gpus` GPUs.

    draft_vocabulary: whether the engine drafts from the drafter's own vocabulary, if it has one.

    Raises BuildError for a GPU without a known peak rate.
    """
    check_rates(gpu)
    precision = precision or Precision()
    config = inventory.config(side)
    compute = precision.compute(side, "bf16")
    scheme = precision.scheme(side)
    sizes = inventory.weights(side, compute, scheme, gpus)
    counts = inventory.parameters(side)
    head = "head" if "head" in sizes else "embedding"
    if side == "drafter" and "head" not in sizes:  # the drafter uses the target's head
        target = inventory.weights("target", compute, None, gpus)
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
    element = NUMBER_BYTES[compute]
    full, windowed, window = _cache_rows(config, element, gpus)
    experts = sizes.get("experts", {})
    return Work(
        layers=config.num_hidden_layers,
        dense_bytes=sum(sum(sizes[role].values()) for role in read),
        dense_operations=2 * sum(counts.get(role, 0) for role in matrices) / gpus,
        dense_rate=_rate(gpu, scheme or compute),
        expert_bytes=sum(experts.values()) / number if sparse else 0.0,
        expert_operations=2 * counts.get("experts", 0) / number / gpus if sparse else 0.0,
        expert_rate=_rate(gpu, max(experts, key=lambda name: experts[name])) if experts else 1.0,
        experts=number,
        experts_per_token=moe.experts_per_token if moe is not None else 0,
        kv_bytes=full,
        window_bytes=windowed,
        window=window,
        hidden_bytes=round(config.hidden_size * element),
        gpus=gpus,
    )


def check_rates(gpu: Gpu) -> None:
    """Raise BuildError for a GPU without a known peak rate."""
    if "bf16" not in gpu.dense_flops:
        raise BuildError(
            f"{gpu.name} has no peak rate for BF16, but times need one: --gpus lists GPUs that have it"
        )


def _cache_rows(config: DecoderConfig, element: float, gpus: int) -> tuple[float, float, int]:
    """Bytes per row of context of all full layers, of all windowed layers, and the window."""
    heads = max(1, config.num_key_value_heads // gpus)
    row = 2 * heads * config.head_dim * element
    windows = [layer.window for layer in config.attention_layers if layer.window is not None]
    full = len(config.attention_layers) - len(windows)
    return full * row, len(windows) * row, max(windows, default=0)


def _rate(gpu: Gpu, precision: str) -> float:
    """Peak operations per second for weights in `precision`.

    MXFP4 weights are multiplied with FP8 activations on Blackwell, and with BF16 before. INT4 weights are widened.
    """
    rates = gpu.dense_flops
    wanted = {"fp8": "fp8", "nvfp4": "fp4", "mxfp4": "fp8" if gpu.sm >= 100 else "bf16"}.get(
        precision, "bf16"
    )
    return rates.get(wanted, rates["bf16"])
