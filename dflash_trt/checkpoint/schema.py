"""The configuration of a checkpoint, in one form for all families."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dflash_trt.checkpoint.rope import RopeConfig


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """The attention of one layer. `window` includes the row itself: row i sees rows j > i - window (None: all rows)."""

    causal: bool
    window: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """The mixture of experts, for the layers that have one. The other layers have a gated MLP.

    A token goes to the `experts_per_token` experts with the largest router logits. Its weights are the softmax over
    all router logits. With `normalize_weights` they are divided by their sum, which equals the softmax over the
    chosen logits. Activations, of a gate g and an up projection u:
        "silu": u * g * sigmoid(g)
        "gpt_oss": (clip(u, -limit, limit) + 1) * h * sigmoid(alpha * h), h = min(g, limit)

    intermediate_size: the size of one expert.
    sparse_layers[i]: whether layer i has experts.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    normalize_weights: bool
    sparse_layers: tuple[bool, ...]
    activation: Literal["silu", "gpt_oss"]
    alpha: float
    limit: float | None
    router_bias: bool
    expert_bias: bool
    quantization: Literal["mxfp4"] | None


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The fields that targets and drafters share.

    path: the config.json that was read.
    attention_bias: q, k, v and o projections have a bias.
    mlp_bias: gate, up and down projections have a bias.
    qk_norm: RMSNorm over each head of q and k before RoPE.
    attention_sinks: each head has a learned logit that takes part in the softmax and has no value.
    """

    path: Path
    model_type: str
    architecture: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    attention_bias: bool
    mlp_bias: bool
    qk_norm: bool
    attention_sinks: bool
    rope: RopeConfig
    layers: tuple[LayerAttention, ...]


@dataclass(frozen=True, kw_only=True)
class TargetConfig(DecoderConfig):
    """A target. `eos_token_ids` come from generation_config.json if it names any, else from config.json."""

    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    moe: MoEConfig | None


@dataclass(frozen=True, kw_only=True)
class DrafterConfig(DecoderConfig):
    """A drafter. Tap i is the residual stream after target layer `target_layer_ids[i]` (0-based; -1: the embedding).

    block_size: tokens of a verification, including the anchor.
    mask_token_id: fills the block behind the anchor. A drafter without `masks` does not read it.
    most_candidates: the most candidates that it has for a place; None if it has the whole vocabulary.
    own: settings that only the module of its kind knows.
    """

    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None
    masks: bool = True
    most_candidates: int | None = None
    own: Any = None
