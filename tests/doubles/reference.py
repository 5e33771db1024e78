"""The oracle: a DFlash drafter and the decoding loop in plain torch, float32, batch 1, without any cache.

It reads the same checkpoints as the product, by the names of their tensors, and recomputes every row in every round. So
it cannot have the faults of a cache, a batch or a padded row. Semantics: the DFlash paper (arXiv 2602.06036, section 4
and appendix A.3) and the published drafters' own code. reference_kinds.py has the drafters of other kinds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, rotate_half

torch.set_num_threads(1)  # the models are tiny: more threads would only wait for each other

Choose = Callable[[Tensor, int, list[int]], int]
"""`choose(logits [V], position, tokens)`: the token for `position`, given `tokens` = everything before it."""


def greedy(logits: Tensor, position: int, tokens: list[int]) -> int:
    return int(logits.argmax())


@dataclass
class Drafts:
    tokens: list[int]
    logprobs: Tensor  # [K - 1], of `tokens`
    scores: list[Tensor]  # of each place: log-probabilities of all candidates, by the target's ids
    hidden: Tensor  # the last rows, after the drafter's last norm


class Reference:
    """A checkpoint's fields and tensors."""

    def __init__(self, directory: Path) -> None:
        self.config: dict[str, Any] = json.loads((directory / "config.json").read_text())
        stored = load_file(directory / "model.safetensors")
        self.w = {name: t.float() if t.is_floating_point() else t for name, t in stored.items()}
        self.configure()
        self.eps: float = self.config["rms_norm_eps"]
        config = self.config
        self.size: int = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        self.ids = torch.arange(self.config.get("draft_vocab_size") or self.config["vocab_size"])
        if "d2t" in self.w:
            self.ids = self.ids + self.w["d2t"]

    def configure(self) -> None:
        """Bring the fields of another format into place."""

    def of_target(self, scores: Tensor) -> Tensor:
        """Scores of the head's tokens as scores of the target's."""
        found = torch.full((*scores.shape[:-1], self.config["vocab_size"]), -torch.inf)
        found[..., self.ids] = scores
        return found

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.w[f"{name}.weight"]

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.w[f"{name}.weight"], self.w.get(f"{name}.bias"))

    def mlp(self, x: Tensor, name: str) -> Tensor:
        gated = F.silu(self.linear(x, f"{name}.gate_proj")) * self.linear(x, f"{name}.up_proj")
        return self.linear(gated, f"{name}.down_proj")

    def heads(self, x: Tensor) -> Tensor:
        """[rows, n * size] -> [n, rows, size]."""
        return x.unflatten(-1, (-1, self.size)).transpose(0, 1)

    @cached_property
    def rotary(self) -> Qwen3RotaryEmbedding:
        config = self.config
        usual = {"rope_type": "default", "rope_theta": config.get("rope_theta", 10_000.0)}  # as LlamaConfig
        rope = usual | (config.get("rope_scaling") or {}) | (config.get("rope_parameters") or {})
        length = config["max_position_embeddings"]
        return Qwen3RotaryEmbedding(
            Qwen3Config(head_dim=self.size, max_position_embeddings=length, rope_parameters=rope)
        )

    def rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        """[n, rows, size] by half-split pairs."""
        cos, sin = self.rotary(x, positions[None])
        return x * cos + rotate_half(x) * sin

    def attention(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        """[n, rows, size] over [n_kv, keys, size]: [rows, n * size]."""
        k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
        scores = (q @ k.transpose(-1, -2) * self.size**-0.5).masked_fill(~visible, -torch.inf)
        return (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)


class Drafter(Reference):
    """A drafter with DFlash's layers: rows [anchor, mask, ...] after the fused states of all earlier tokens."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        own = self.config.get("dflash_config", self.config)
        self.own, self.taps, self.mask_token_id = own, own["target_layer_ids"], own["mask_token_id"]
        self.block_size: int = own.get("block_size") or self.config["block_size"]
        self.layers: int = self.config["num_hidden_layers"]

    def fused(self, features: Tensor, layer: int) -> Tensor:
        return self.norm(self.linear(features, "fc"), "hidden_norm")

    def keys(self, layer: int, context: Tensor, block: Tensor) -> tuple[Tensor, Tensor]:
        """Keys, not yet normed, and values of context and block rows: [rows, n * size]."""
        rows, name = torch.cat([context, block]), f"layers.{layer}.self_attn"
        return self.linear(rows, f"{name}.k_proj"), self.linear(rows, f"{name}.v_proj")

    def visible(self, layer: int, query: Tensor, key: Tensor) -> Tensor:
        """[K, L]: whether position `query` sees position `key`. Without a word on it, just sliding layers are causal.

        A window includes the row itself.
        """
        distance = query[:, None] - key
        slides = (self.config.get("layer_types") or {layer: ""})[layer] == "sliding_attention"
        said = [self.config.get("is_causal"), self.own.get("causal"), self.own.get("causal_head")]
        visible = torch.ones_like(distance, dtype=torch.bool)
        if next((causal for causal in said if causal is not None), slides):
            visible &= distance >= 0
        if slides:
            visible &= distance.abs() < self.config["sliding_window"]
        return visible

    def attend(self, layer: int, context: Tensor, block: Tensor) -> Tensor:
        name = f"layers.{layer}.self_attn"
        k, v = map(self.heads, self.keys(layer, context, block))
        q = self.norm(self.heads(self.linear(block, f"{name}.q_proj")), f"{name}.q_norm")
        k = self.norm(k, f"{name}.k_norm")
        positions = torch.arange(len(context) + len(block))
        asking = positions[len(context) :]
        visible = self.visible(layer, asking, positions)
        y = self.attention(self.rotated(q, asking), self.rotated(k, positions), v, visible)
        return self.linear(y, f"{name}.o_proj")

    def sublayer(self, layer: int, name: str, x: Tensor, run: Any) -> Tensor:
        """The residual stream after attention or the MLP."""
        norm = "input_layernorm" if name == "attention" else "post_attention_layernorm"
        return x + run(self.norm(x, f"layers.{layer}.{norm}"))

    def hidden(self, features: Tensor, block: Tensor) -> Tensor:
        for i in range(self.layers):
            context = self.fused(features, i)
            block = self.sublayer(i, "attention", block, lambda u, i=i, c=context: self.attend(i, c, u))
            block = self.sublayer(i, "mlp", block, lambda u, i=i: self.mlp(u, f"layers.{i}.mlp"))
        return self.norm(block, "norm")

    def embed(self, target: Qwen3ForCausalLM, tokens: Tensor) -> Tensor:
        own = self.w.get("embed_tokens.weight")
        return target.model.embed_tokens(tokens) if own is None else own[tokens]

    def logits(self, target: Qwen3ForCausalLM, rows: Tensor) -> Tensor:
        logits = self.linear(rows, "lm_head") if "lm_head.weight" in self.w else target.lm_head(rows)
        logits = logits * self.own.get("output_multiplier", 1)
        cap = self.own.get("final_logit_softcapping") or self.config.get("final_logit_softcapping")
        return (logits / cap).tanh() * cap if cap else logits

    def rows(self, hidden: Tensor) -> Tensor:
        """The rows that predict the K - 1 places."""
        return hidden if self.own.get("sample_from_anchor") else hidden[1:]

    def draft(self, target: Qwen3ForCausalLM, tokens: list[int], anchor: int, length: int) -> Drafts:
        """Draft after `tokens` and the anchor."""
        return self.propose(target, target_outputs(target, tokens, self.taps)[1], anchor, length)

    @torch.no_grad()
    def propose(
        self, target: Qwen3ForCausalLM, features: Tensor, anchor: int, length: int | None = None
    ) -> Drafts:
        """Draft after `anchor` from `features` [C, taps * D] of all earlier tokens. K = `length` or the block size."""
        length = length or self.block_size
        count = length if self.rows(torch.zeros(2)).shape[0] == 1 else length - 1
        block = torch.tensor([anchor] + [self.mask_token_id] * (count - 1))
        hidden = self.hidden(features, self.embed(target, block))
        scores = self.chain(target, self.rows(hidden), anchor)
        logprobs = torch.tensor([float(s.max()) for s in scores])
        return Drafts([int(s.argmax()) for s in scores], logprobs, scores, hidden)

    def chain(self, target: Qwen3ForCausalLM, rows: Tensor, anchor: int) -> list[Tensor]:
        return list(self.of_target(self.logits(target, rows).log_softmax(-1)))


@dataclass
class Decoded:
    tokens: list[int] = field(default_factory=list)  # without the prompt
    drafts: list[list[int]] = field(default_factory=list)  # the drafted tokens of each round
    accepted: list[int] = field(default_factory=list)  # the number of accepted drafts, before a stop cut them


def load_target(directory: Path) -> Qwen3ForCausalLM:
    """The target in float32, with attention written out (no fused kernel)."""
    return Qwen3ForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@torch.no_grad()
def target_outputs(
    target: Qwen3ForCausalLM, tokens: Sequence[int], taps: Sequence[int] = ()
) -> tuple[Tensor, Tensor]:
    """Logits [T, V] and features [T, taps * D]: the residual streams after the tapped layers, side by side."""
    output = target(torch.tensor([list(tokens)]), output_hidden_states=True, use_cache=False)
    hidden = [output.hidden_states[tap + 1][0] for tap in taps]
    return output.logits[0], torch.cat(hidden, -1) if hidden else torch.empty(len(tokens), 0)


def decode(
    target: Qwen3ForCausalLM,
    prompt: Sequence[int],
    max_tokens: int,
    choose: Choose = greedy,
    stop_ids: Collection[int] = (),
) -> Decoded:
    """One token per pass. A stop id ends the text and is kept as its last token."""
    result, tokens = Decoded(), list(prompt)
    while len(result.tokens) < max_tokens and not ends(result.tokens, stop_ids):
        logits, _ = target_outputs(target, tokens)
        tokens.append(choose(logits[-1], len(tokens), tokens))
        result.tokens.append(tokens[-1])
    return result


def decode_drafting(
    target: Qwen3ForCausalLM,
    drafter: Drafter,
    prompt: Sequence[int],
    max_tokens: int,
    choose: Choose = greedy,
    stop_ids: Collection[int] = (),
    block_length: int | None = None,
) -> Decoded:
    """Draft, verify and accept in blocks of `block_length`, including the anchor, or shorter at the end."""
    result, tokens = Decoded(), list(prompt)
    logits, features = target_outputs(target, tokens, drafter.taps)
    tokens.append(choose(logits[-1], len(tokens), tokens))
    result.tokens.append(tokens[-1])
    while len(result.tokens) < max_tokens and not ends(result.tokens, stop_ids):
        rows = len(tokens) - 1  # everything before the anchor, which is tokens[-1]
        length = min(block_length or drafter.block_size, max_tokens - len(result.tokens))
        draft = drafter.propose(target, features[:rows], tokens[-1], length).tokens if length > 1 else []
        logits, features = target_outputs(target, tokens + draft, drafter.taps)
        new = accept(logits[rows:], draft, tokens, choose)
        if draft:
            result.drafts.append(draft)
            result.accepted.append(len(new) - 1)
        tokens += new
        for token in new:
            if not ends(result.tokens, stop_ids):
                result.tokens.append(token)
    return result


def accept(logits: Tensor, draft: list[int], tokens: list[int], choose: Choose) -> list[int]:
    """The tokens that one-by-one decoding would choose, as far as the draft predicted them, and one more.

    `logits` [1 + len(draft), V] belong to the anchor and the drafted tokens. The last returned token is the target's
    own: the first that differs from the draft, or the one after a completely accepted draft.
    """
    new: list[int] = []
    for row, drafted in zip(logits, [*draft, None], strict=True):
        new.append(choose(row, len(tokens) + len(new), tokens + new))
        if new[-1] != drafted:
            break
    return new


def ends(tokens: list[int], stop_ids: Collection[int]) -> bool:
    return bool(tokens) and tokens[-1] in stop_ids
