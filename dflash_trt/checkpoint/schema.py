"""The configuration of a checkpoint, in one form for all families."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dflash_trt.checkpoint.rope import RopeConfig

# The most rows of a pass that can be taken back from a state: those of a block. Published drafters have 7 to 16.
PENDING_ROWS = 16

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of keys and values: their number, and their size, which is the queries' too; and how both rotate, if
    they do.
    """

    kv_heads: int
    head_dim: int
    rope: RopeConfig | None

    @property
    def rotary_dim(self) -> int:
        """The leading numbers of a head that RoPE rotates."""
        return 0 if self.rope is None else round(self.head_dim * self.rope.partial)


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """The attention of one layer. `window` includes the row itself: row i sees rows j > i - window (None: all rows).

    heads: where they are not the model's. keys_as_values: there is no v_proj, and values are what k_proj gives, before
    its norm and rotation.
    """

    causal: bool
    window: int | None
    heads: Heads | None = None
    keys_as_values: bool = False


@dataclass(frozen=True, slots=True)
class LayerDeltaNet:
    """A layer of Gated DeltaNet (Yang et al. 2024, arXiv 2412.06464): a state of fixed size, no rows per token.

    Value head h reads key head h // (value_heads / key_heads).
    kernel: the taps of the causal convolution, including the row itself.
    fused: in_proj_qkvz and in_proj_ba hold the projections by key head. Otherwise there are four layers.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    fused: bool

    @property
    def channels(self) -> int:
        """Columns that pass the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """The mixture of experts, for the layers that have one. The other layers have a gated MLP.

    A token goes to the `experts_per_token` experts with the largest router logits. Its weights are the softmax over
    all router logits. With `normalize_weights` they are divided by their sum, which equals the softmax over the
    chosen logits. Of a gate g and an up projection u, an expert takes (clip(u, -limit, limit) + beta) * h *
    sigmoid(alpha * h), h = min(g, limit); or u * gelu(g) where that is the model's `activation`.

    intermediate_size: the size of one expert.
    sparse_layers[i]: whether layer i has experts.
    shared_intermediate_size: the size of an expert that every token passes, times the sigmoid of a gate; 0: none.
    stacked: a layer's experts may be two tensors, [E, 2I, D] and [E, D, I], instead of three for each expert.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    normalize_weights: bool
    sparse_layers: tuple[bool, ...]
    alpha: float = 1.0
    beta: float = 0.0
    limit: float | None = None
    quantization: Literal["mxfp4"] | None = None
    shared_intermediate_size: int = 0
    stacked: bool = False


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The fields that targets and drafters share.

    path: the config.json that was read.
    architecture: the name in it; for drafters of speculators, ours of the kind.
    attention_bias: q, k, v and o projections have a bias.
    mlp_bias: gate, up and down projections have a bias.
    qk_norm: RMSNorm over each head of q and k before RoPE. qk_norm_weights: these norms have weights.
    attention_sinks: each head has a learned logit that takes part in the softmax and has no value.
    attention_gate: the layer whose output, after a sigmoid, scales the output of the heads: "q_proj", which gives a
        gate beside each query, or the name of one of its own.
    zero_centred_norms: RMSNorm scales by 1 + weight. A norm that has a gate scales by its weight.
    value_norm: RMSNorm without weights over each head of v.
    post_norm_eps: of norms after attention and after the MLP, where it is another than rms_norm_eps.
    attention_scale: of the products of queries and keys; None: head_dim ** -0.5.
    activation: of the gate in an MLP or expert.
    embedding_scale: embedded rows are multiplied by it, rounded to the table's dtype.
    logit_multiplier: logits are multiplied by it, before their soft-cap.
    logit_softcap: logits x become softcap * tanh(x / softcap).
    """

    path: Path
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
    rope: RopeConfig
    layers: tuple[LayerAttention | LayerDeltaNet, ...]
    architecture: str = ""
    mlp_bias: bool = False
    qk_norm: bool = False
    qk_norm_weights: bool = True
    attention_sinks: bool = False
    attention_gate: str | None = None
    zero_centred_norms: bool = False
    value_norm: bool = False
    post_norm_eps: float | None = None
    attention_scale: float | None = None
    activation: Activation = "silu"
    embedding_scale: float = 1.0
    logit_multiplier: float = 1.0
    logit_softcap: float | None = None

    @property
    def heads(self) -> Heads:
        """The heads of keys and values where a layer has none of its own."""
        return Heads(self.num_key_value_heads, self.head_dim, self.rope)

    def heads_of(self, layer: LayerAttention) -> Heads:
        return layer.heads or self.heads

    @property
    def window_head_dim(self) -> int:
        """The smallest head of the layers with a window."""
        sizes = (self.heads_of(layer).head_dim for layer in self.attention_layers if layer.window is not None)
        return min(sizes, default=self.head_dim)

    @property
    def attention_layers(self) -> list[LayerAttention]:
        return [layer for layer in self.layers if isinstance(layer, LayerAttention)]

    @property
    def delta_layers(self) -> list[LayerDeltaNet]:
        return [layer for layer in self.layers if isinstance(layer, LayerDeltaNet)]


@dataclass(frozen=True, kw_only=True)
class TargetConfig(DecoderConfig):
    """A target. `eos_token_ids` come from generation_config.json if it names any, else from config.json.

    embedding_norm: the target's embedded rows pass an RMSNorm without weights. A drafter's do not.
    prefix: of the decoder's tensors.
    skipped: prefixes of tensors that do not belong to the decoder, such as a vision tower's.
    """

    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    moe: MoEConfig | None
    embedding_norm: bool = False
    prefix: str = "model"
    skipped: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class DrafterConfig(DecoderConfig):
    """A drafter. Tap i is the residual stream after target layer `target_layer_ids[i]` (0-based; -1: the embedding).

    block_size: tokens of a verification, including the anchor.
    mask_token_id: fills the block after the anchor. A drafter without `masks` does not read it.
    own_head: its head is never the target's.
    most_candidates: the most candidates that it has for a place; None if it has the whole vocabulary.
    row_scale: of block rows from the target's embedding; None: the target's own `embedding_scale`.
    settings: what only the module of its kind knows.
    """

    layers: tuple[LayerAttention, ...]
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None = None
    masks: bool = True
    own_head: bool = False
    most_candidates: int | None = None
    row_scale: float | None = None
    settings: Any = None
