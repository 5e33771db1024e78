"""The target of the pair `tiny` in plain torch, with the tensor names of its published form.

It is Qwen3 (Transformers' Qwen3ForCausalLM with tied embeddings), and compiles to a few fused loops on a CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class Shape:
    """Common sizes of target and drafter, and the sizes of each.

    `rope_scaling` is that of config.json, if any. It determines `inverse_frequencies` and `rotary_factor`.
    """

    vocab_size: int = 2048
    hidden_size: int = 192
    intermediate_size: int = 512
    num_attention_heads: int = 6
    num_key_value_heads: int = 2
    head_dim: int = 32
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 1024
    target_layers: int = 10
    drafter_layers: int = 2
    block_size: int = 8
    taps: int = 4
    attention_bias: bool = False
    rope_scaling: Mapping[str, float | str] | None = None
    inverse_frequencies: tuple[float, ...] = ()
    rotary_factor: float = 1.0

    @property
    def target_layer_ids(self) -> list[int]:
        """The tapped layers: evenly from the second to the third-to-last, as in z-lab's code."""
        start, end = 1, self.target_layers - 3
        return [round(start + i * (end - start) / (self.taps - 1)) for i in range(self.taps)]


class Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * self.weight).to(x.dtype)


def rotary(positions: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    """cos and sin, [..., 1, S, head_dim], of positions [..., S]."""
    exponents = torch.arange(0, shape.head_dim, 2, device=positions.device) / shape.head_dim
    frequencies = shape.rope_theta**-exponents
    if shape.inverse_frequencies:
        frequencies = torch.tensor(shape.inverse_frequencies, device=positions.device)
    angles = positions.float()[..., None] * frequencies
    angles = torch.cat((angles, angles), -1).unsqueeze(-3)
    return angles.cos() * shape.rotary_factor, angles.sin() * shape.rotary_factor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return (x * cos + torch.cat((-second, first), -1) * sin).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        size, width = shape.hidden_size, shape.head_dim
        self.q_proj = nn.Linear(size, shape.num_attention_heads * width, bias=shape.attention_bias)
        self.k_proj = nn.Linear(size, shape.num_key_value_heads * width, bias=shape.attention_bias)
        self.v_proj = nn.Linear(size, shape.num_key_value_heads * width, bias=shape.attention_bias)
        self.o_proj = nn.Linear(shape.num_attention_heads * width, size, bias=shape.attention_bias)
        self.q_norm = Norm(width, shape.rms_norm_eps)
        self.k_norm = Norm(width, shape.rms_norm_eps)

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.shape.head_dim)).transpose(-3, -2)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """[B, kv heads, S, head_dim] each. Keys are normalized and rotated."""
        return rotate(self.k_norm(self.heads(self.k_proj(x))), cos, sin), self.heads(self.v_proj(x))

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, mask: Tensor
    ) -> Tensor:
        """Rows of x attend to the keys and values where mask, [B, 1, rows, keys], is True."""
        q = rotate(self.q_norm(self.heads(self.q_proj(x))), cos, sin)
        groups = self.shape.num_attention_heads // self.shape.num_key_value_heads
        k, v = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.o_proj(out.transpose(-3, -2).flatten(-2))

    def weights(self, scores: Tensor, positions: Tensor) -> Tensor:
        """Scores [B, kv heads, groups * S, n] of rows at positions [S] -> weights. Hidden keys are at -inf."""
        return scores.softmax(-1)


class Mlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = Mlp(shape)


class Target(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.target_layers))
        self.norm = Norm(shape.hidden_size, shape.rms_norm_eps)
        initialize(self, shape.target_layers)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of normalized rows. The embedding is tied."""
        return F.linear(hidden, self.embed_tokens.weight)

    def forward(self, tokens: Tensor, documents: Tensor, positions: Tensor) -> Tensor:
        """Normalized hidden rows [B, S, D] of packed documents. A token sees only its own document. All are [B, S]."""
        x = self.embed_tokens(tokens)
        cos, sin = rotary(positions, self.shape)
        order = torch.arange(tokens.shape[1], device=tokens.device)
        mask = ((documents[:, :, None] == documents[:, None]) & (order[:, None] >= order))[:, None]
        for layer in self.layers:
            normed = layer.input_layernorm(x)
            keys, values = layer.self_attn.keys_values(normed, cos, sin)
            x = x + layer.self_attn(normed, cos, sin, keys, values, mask)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.norm(x)


def initialize(module: nn.Module, depth: int) -> None:
    for name, parameter in module.named_parameters():
        if parameter.ndim == 2 and "bias" not in name:
            scale = (2 * depth) ** -0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
            nn.init.normal_(parameter, std=0.02 * scale)
