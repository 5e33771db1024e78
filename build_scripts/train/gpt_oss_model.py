"""The target of the pair `tiny-gpt-oss` in plain torch: gpt-oss, with experts that train in their storage format.

Attention has biases and a sink per head, and a window in every other layer. The experts' matrices are rounded to
MXFP4 in every forward pass, straight-through in the backward pass. All experts are computed for every row, as two
products. With few and small experts this is faster than sorting the rows.

`warm_start` takes everything from a trained Qwen3 target of the same width. Its gated MLP is cut into k pieces. Then
k experts with one piece each compute the MLP.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from build_scripts.train.model import Attention, Shape, Target, initialize, rotate
from dflash_trt.checkpoint.rope import RopeConfig, inverse_frequencies

WINDOW = 64
EXPERTS, EXPERTS_PER_TOKEN, EXPERT_SIZE = 8, 4, 128
ALPHA, LIMIT = 1.702, 7.0
BLOCK = 32
# A base at which the scaled frequencies are close to those that the warm start has learned.
THETA = 1500.0
YARN: dict[str, float | str] = {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 4.0,
    "original_max_position_embeddings": 256,
    "rope_type": "yarn",
    "truncate": False,
}


def gpt_oss_shape(vocab_size: int) -> Shape:
    shape = Shape(
        vocab_size=vocab_size, attention_bias=True, rope_scaling=YARN, rope_theta=THETA, rms_norm_eps=1e-5
    )
    values = {name: value for name, value in YARN.items() if not isinstance(value, str)}
    frequencies, factor = inverse_frequencies(
        RopeConfig("yarn", THETA, values), shape.head_dim, shape.max_position_embeddings
    )
    return replace(shape, inverse_frequencies=tuple(frequencies.tolist()), rotary_factor=factor)


def blocks_of(weight: Tensor) -> Tensor:
    return weight.view(*weight.shape[:-1], -1, BLOCK)


def mxfp4_scale(weight: Tensor) -> Tensor:
    """Powers of two [..., G, 1] for blocks of 32 in the last dimension. They scale the largest number to 3.5 .. 7."""
    largest = blocks_of(weight).abs().amax(-1, keepdim=True)
    return torch.exp2((largest.clamp(min=2.0**-60) * (8 / 7)).log2().floor() - 2)


def mxfp4_round(weight: Tensor) -> Tensor:
    """The nearest MXFP4 number of every number."""
    scale = mxfp4_scale(weight)
    scaled = blocks_of(weight) / scale
    size = scaled.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    rounded: Tensor = ((size / step).round() * step).clamp(max=6).copysign(scaled) * scale
    return rounded.flatten(-2)


class SinkAttention(Attention):
    """Attention without norms of queries and keys. A sink per head takes part in the softmax; `window` includes the
    row itself.
    """

    def __init__(self, shape: Shape, window: int | None) -> None:
        super().__init__(shape)
        self.q_norm = self.k_norm = nn.Identity()  # type: ignore[assignment]
        self.sinks = nn.Parameter(torch.zeros(shape.num_attention_heads))
        self.window = window

    def weights(self, scores: Tensor, positions: Tensor) -> Tensor:
        batch, heads, rows, columns = scores.shape
        scores = scores.view(batch, len(self.sinks), -1, columns)
        if self.window is not None:
            hidden = torch.arange(columns, device=scores.device) <= positions[:, None] - self.window
            scores = scores.masked_fill(hidden, float("-inf"))
        sinks = self.sinks[:, None, None].expand(*scores.shape[:-1], 1)
        return torch.cat((scores, sinks), -1).softmax(-1)[..., :-1].reshape(batch, heads, rows, columns)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, mask: Tensor
    ) -> Tensor:
        """Rows of x attend among themselves. Compiled, this is faster than the fused operator."""
        q = rotate(self.heads(self.q_proj(x)), cos, sin) * self.shape.head_dim**-0.5
        groups = self.shape.num_attention_heads // self.shape.num_key_value_heads
        k, v = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
        if self.window is not None:
            at = torch.arange(x.shape[1], device=x.device)
            mask = mask & (at > at[:, None] - self.window)
        scores = torch.where(mask, (q @ k.mT).float(), -1e9)
        sinks = self.sinks.view(-1, 1, 1)
        top = torch.maximum(scores.amax(-1, keepdim=True), sinks).detach()
        scores = (scores - top).exp()
        weights = scores / (scores.sum(-1, keepdim=True) + (sinks - top).exp())
        mixed: Tensor = self.o_proj((weights.to(v.dtype) @ v).transpose(-3, -2).flatten(-2))
        return mixed


class Experts(nn.Module):
    """Rows 0 .. I-1 of gate_up are gates, the others ups. They are stored interleaved. Weights are [E, out, in]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        size = shape.hidden_size
        self.router = nn.Linear(size, EXPERTS)
        self.gate_up = nn.Parameter(torch.empty(EXPERTS, 2 * EXPERT_SIZE, size))
        self.gate_up_bias = nn.Parameter(torch.zeros(EXPERTS, 2 * EXPERT_SIZE))
        self.down = nn.Parameter(torch.empty(EXPERTS, size, EXPERT_SIZE))
        self.down_bias = nn.Parameter(torch.zeros(EXPERTS, size))
        for matrix in (self.gate_up, self.down):
            nn.init.normal_(matrix, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            best, chosen = self.router(x.float()).topk(EXPERTS_PER_TOKEN)
            weights = torch.zeros_like(x[..., :EXPERTS], dtype=torch.float32)
            weights = weights.scatter(-1, chosen, best.softmax(-1))
        gate_up: Tensor = self.gate_up
        down: Tensor = self.down
        if self.training:
            gate_up, down = straight_through(gate_up), straight_through(down)
        h = F.linear(x, gate_up.flatten(0, 1), self.gate_up_bias.flatten())
        gate, up = h.view(*h.shape[:-1], EXPERTS, 2, EXPERT_SIZE).unbind(-2)
        gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
        h = (up + 1) * gate * torch.sigmoid(ALPHA * gate) * weights[..., None]
        return F.linear(h.flatten(-2), down.transpose(0, 1).flatten(1)) + weights @ self.down_bias


def straight_through(weight: Tensor) -> Tensor:
    return weight + (mxfp4_round(weight) - weight).detach()


class GptOss(Target):
    """gpt-oss: a window in every other layer, and an untied head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        for index, layer in enumerate(self.layers):
            layer.self_attn = SinkAttention(shape, None if index % 2 else WINDOW)
            layer.mlp = Experts(shape)
        self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        initialize(self, shape.target_layers)

    def head(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(hidden)
        return logits


@torch.no_grad()
def warm_start(target: GptOss, source: Target, rows: list[Tensor], new_tokens: dict[int, int]) -> None:
    """Copy everything from `source`. `new_tokens` start as the tokens that they replace.

    The average effect of the norms of queries and keys over `rows`, inputs of `source`, goes into the projections,
    without YaRN's factor. Piece s of an MLP is in experts s and s + k. Their router logits are small and of opposite
    sign. So each row chooses one of the two for every s, with nearly equal weights.
    """
    vocab, pieces, embedding = source.shape.vocab_size, EXPERTS_PER_TOKEN, source.embed_tokens.weight
    for table in (target.embed_tokens, target.lm_head):
        table.weight[:vocab] = embedding
        table.weight[vocab:] = embedding.mean(0)
        for number, stand_in in new_tokens.items():
            table.weight[number] = embedding[stand_in]
    target.norm.weight.copy_(source.norm.weight)
    seen = _inputs(source, rows)
    new: Any
    old: Any
    for index, (new, old) in enumerate(zip(target.layers, source.layers, strict=True)):
        new.input_layernorm.weight.copy_(old.input_layernorm.weight)
        new.post_attention_layernorm.weight.copy_(old.post_attention_layernorm.weight)
        for name in ("v_proj", "o_proj"):
            getattr(new.self_attn, name).weight.copy_(getattr(old.self_attn, name).weight)
        for kind in "qk":
            norm = getattr(old.self_attn, f"{kind}_norm")
            square = (
                seen[f"layers.{index}.self_attn.{kind}_norm"].square().mean(-1) + norm.eps
            )  # [B, heads, S]
            size = (0.5 * square.log()).mean((0, 2)).exp()
            gain = norm.weight / size[:, None] / target.shape.rotary_factor  # [heads, head_dim]
            matrix = getattr(old.self_attn, f"{kind}_proj").weight * gain.flatten()[:, None]
            getattr(new.self_attn, f"{kind}_proj").weight.copy_(matrix)
        gate, up, down = (getattr(old.mlp, f"{name}_proj").weight for name in ("gate", "up", "down"))
        gate, up = (matrix.view(pieces, EXPERT_SIZE, -1) for matrix in (gate / ALPHA, up))
        down = down.view(-1, pieces, EXPERT_SIZE).transpose(0, 1) * ALPHA * pieces
        new.mlp.gate_up.copy_(torch.cat((gate, up), 1).repeat(2, 1, 1))
        new.mlp.down.copy_(down.repeat(2, 1, 1))
        new.mlp.gate_up_bias[:, EXPERT_SIZE:] = -1
        directions = torch.randn(pieces, target.shape.hidden_size)
        normed = seen[f"layers.{index}.mlp"].flatten(0, 1)
        directions *= 0.1 / (normed @ directions.T).std(0)[:, None]
        middle = (normed @ directions.T).median(0).values
        new.mlp.router.weight.copy_(torch.cat((directions, -directions)))
        new.mlp.router.bias.copy_(torch.cat((-middle, middle)))


def _inputs(source: Target, rows: list[Tensor]) -> dict[str, Tensor]:
    """The input of each module when `source` runs on `rows`."""
    seen: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            seen[name] = inputs[0]

        return hook

    hooks = [module.register_forward_pre_hook(keep(name)) for name, module in source.named_modules() if name]
    source(*rows)
    for hook in hooks:
        hook.remove()
    return seen
