"""The DFlash drafter in torch for training: the network of models/drafters/dflash.py, over many blocks at once.

Parameters have the names of z-lab's checkpoints (arXiv 2602.06036, section 4.1; layers are Qwen3's).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dflash_trt.checkpoint.rope import inverse_frequencies
from dflash_trt.checkpoint.schema import DrafterConfig, LayerAttention

# A bool tensor [B, 1, Q, S + Q], or a BlockMask of torch.nn.attention.flex_attention.
Mask = Any


def visible(
    kind: LayerAttention, anchors: Tensor, lengths: Tensor, context: int, size: int
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """FlexAttention's mask_mod(batch, head, query, key): the rule itself, on tensors of indices.

    A block is anchored at position a of its sequence. Its rows see the features of positions before a, and the rows of
    the block itself. Windows and causal layers restrict them as in decoding. The feature of the anchor does not exist
    yet when the block is drafted (arXiv 2602.06036, section 4.2).

    anchors [B, A]: position of each block's first row; -1 for a missing block.
    lengths [B, A]: rows of each block. Queries are the A * size block rows. Keys are `context` features, then the
    block rows. A missing block sees itself, so that no row of the softmax is empty.
    """

    def rule(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        block, row = query // size, query % size
        anchor, length = anchors[batch, block], lengths[batch, block]
        position = anchor + row
        of_context = key < context
        other = torch.where(of_context, 0, key - context)
        key_row = other % size
        key_position = torch.where(of_context, key, anchor + key_row)
        inside = torch.where(of_context, key < anchor, (other // size == block) & (key_row < length))
        # A row after a shortened block has no effect. Like a missing block, it sees itself.
        itself = ~of_context & (other == query)
        if kind.window is not None:
            inside = inside & (key_position > position - kind.window)
            if not kind.causal:
                inside = inside & (key_position < position + kind.window)
        if kind.causal:
            inside = inside & (key_position <= position)
        return (inside & (anchor >= 0)) | itself

    return rule


def dense_mask(kind: LayerAttention, anchors: Tensor, lengths: Tensor, context: int, size: int) -> Tensor:
    """bool [B, 1, A * size, context + A * size]."""
    device = anchors.device
    batch, blocks = anchors.shape
    rule = visible(kind, anchors, lengths, context, size)
    query = torch.arange(blocks * size, device=device)[None, :, None]
    key = torch.arange(context + blocks * size, device=device)[None, None]
    return rule(torch.arange(batch, device=device)[:, None, None], query, query, key)[:, None]


def flex_mask(kind: LayerAttention, anchors: Tensor, lengths: Tensor, context: int, size: int) -> Mask:
    """The dense mask as a BlockMask, which skips empty tiles."""
    from torch.nn.attention.flex_attention import create_block_mask

    batch, blocks = anchors.shape
    rows = blocks * size
    rule = visible(kind, anchors, lengths, context, size)
    return create_block_mask(rule, batch, None, rows, context + rows, device=str(anchors.device))


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """Attention of q [B, heads, Q, d] to k and v [B, kv heads, S + Q, d]."""
    if isinstance(mask, Tensor):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return _compiled()(q, k, v, block_mask=mask, enable_gqa=True)


@cache
def _compiled() -> Callable[..., Tensor]:
    """FlexAttention, compiled: otherwise it computes whole score matrices."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


class Norm(nn.RMSNorm):
    """RMSNorm in float32, given in the dtype of x."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float()).to(x.dtype)


class Rotary(nn.Module):
    frequencies: Tensor

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        values, self.factor = inverse_frequencies(
            config.rope, config.head_dim, config.max_position_embeddings
        )
        self.register_buffer("frequencies", torch.from_numpy(values.copy()), persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, float32 [B, 1, S, head_dim], of positions [B, S]."""
        angles = positions.float()[:, None, :, None] * self.frequencies.float()
        angles = torch.cat((angles, angles), -1)
        return angles.cos() * self.factor, angles.sin() * self.factor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE of x [B, heads, S, head_dim], by half-split pairs."""
    first, second = x.chunk(2, -1)
    return (x * cos + torch.cat((-second, first), -1) * sin).to(x.dtype)


class DrafterAttention(nn.Module):
    """Qwen3's attention, whose context rows are keys and values only."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        size, width, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.width = width
        self.q_proj = nn.Linear(size, config.num_attention_heads * width, bias=bias)
        self.k_proj = nn.Linear(size, config.num_key_value_heads * width, bias=bias)
        self.v_proj = nn.Linear(size, config.num_key_value_heads * width, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * width, size, bias=bias)
        self.q_norm = Norm(width, config.rms_norm_eps)
        self.k_norm = Norm(width, config.rms_norm_eps)

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.width)).transpose(1, 2)

    def forward(
        self,
        x: Tensor,
        both: Tensor,
        rotary: tuple[Tensor, Tensor],
        both_rotary: tuple[Tensor, Tensor],
        mask: Mask,
    ) -> Tensor:
        """Block rows x [B, Q, D] attend to context and block rows, `both` [B, S + Q, D]."""
        q = rotate(self.q_norm(self.heads(self.q_proj(x))), *rotary)
        k = rotate(self.k_norm(self.heads(self.k_proj(both))), *both_rotary)
        return self.o_proj(attend(q, k, self.heads(self.v_proj(both)), mask).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = DrafterAttention(config)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.mlp = Mlp(config)

    def forward(
        self,
        x: Tensor,
        context: Tensor,
        rotary: tuple[Tensor, Tensor],
        both_rotary: tuple[Tensor, Tensor],
        mask: Mask,
    ) -> Tensor:
        """Block rows x [B, Q, D] after the layer. context [B, S, D]: normed features."""

        def attention(u: Tensor) -> Tensor:
            return self.self_attn(u, torch.cat((context, u), 1), rotary, both_rotary, mask)

        x = x + self.sublayer("attention", self.input_layernorm(x), attention)
        return x + self.sublayer("mlp", self.post_attention_layernorm(x), self.mlp)

    def sublayer(self, name: str, u: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
        """The output of a sublayer for its normed input u."""
        return run(u)


class DrafterModel(nn.Module):
    """The drafter with a checkpoint's `weights`, or freshly initialized (normal, 0.02; less before a residual sum)."""

    layer_type: type[Layer] = Layer
    selects = False  # whether `forward` takes a selection and gives its loss

    def __init__(self, config: DrafterConfig, weights: Mapping[str, Tensor] | None = None) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(self.layer_type(config) for _ in range(config.num_hidden_layers))
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.rotary = Rotary(config)
        if weights is not None:
            self.load_state_dict({name: weight.float() for name, weight in weights.items()})
        else:
            self._initialize()

    def published(self, weights: Mapping[str, Tensor], embedding: Tensor) -> Mapping[str, Tensor]:
        """The tensors of a checkpoint, from those of a state and the target's embedding."""
        return weights

    def _initialize(self) -> None:
        shrink = float(2 * self.config.num_hidden_layers) ** -0.5
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                added = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.02 * (shrink if added else 1.0))

    def forward(
        self,
        features: Tensor,
        context_positions: Tensor,
        block: Tensor,
        positions: Tensor,
        masks: Mapping[LayerAttention, Mask],
    ) -> Tensor:
        """Normalized rows [B, Q, D] of embedded block rows.

        features: [B, S, taps * D] of context rows at context_positions [B, S].
        block: [B, Q, D], embedded anchors and mask tokens of all blocks at positions [B, Q].
        masks: one mask for each kind of attention.
        """
        context = self.hidden_norm(self.fc(features))
        rotary = self.rotary(positions)
        both = self.rotary(torch.cat((context_positions, positions), 1))
        x = block
        for layer, kind in zip(self.layers, self.config.layers, strict=True):
            x = layer(x, context, rotary, both, masks[kind])
        return self.norm(x)
