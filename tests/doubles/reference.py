"""The oracle: a DFlash drafter and the decoding loop in plain torch, float32, batch 1, without any cache.

It reads the same checkpoints as the product through Transformers' Qwen3 classes, and recomputes every row in every
round. So it cannot have the faults of a cache, a batch or a padded row. Semantics: the DFlash paper (arXiv
2602.06036, section 4 and appendix A.3) and the published drafters' own code.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3DecoderLayer,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
    repeat_kv,
)

torch.set_num_threads(1)  # the models are tiny: more threads would only wait for each other

Choose = Callable[[Tensor, int, list[int]], int]
"""`choose(logits [V], position, tokens)`: the token for `position`, given `tokens` = everything before it."""


def greedy(logits: Tensor, position: int, tokens: list[int]) -> int:
    return int(logits.argmax())


class Drafter(nn.Module):
    """A published drafter: tensors without prefix, no embedding, no head, weights widened to float32.

    The layers are Transformers', for their parameters and MLP. Attention is written out below, because context rows
    enter it as keys and values only.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__()
        config = Qwen3Config.from_pretrained(directory)
        written = json.loads((directory / "config.json").read_text())
        dflash = written["dflash_config"]
        self.block_size: int = dflash.get("block_size", written.get("block_size"))
        self.mask_token_id: int = dflash["mask_token_id"]
        self.taps: list[int] = dflash["target_layer_ids"]
        sliding = [kind == "sliding_attention" for kind in config.layer_types]
        self.windows = [config.sliding_window if slides else None for slides in sliding]
        causal = written.get("is_causal")
        causal = dflash.get("causal") if causal is None else causal
        self.softcap: float | None = written.get("final_logit_softcapping")
        self.causal = sliding if causal is None else [causal] * len(sliding)

        self.fc = nn.Linear(len(self.taps) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(Qwen3DecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = Qwen3RotaryEmbedding(config)
        weights = load_file(directory / "model.safetensors")
        self.load_state_dict({name: weight.float() for name, weight in weights.items()})
        self.eval()

    @torch.no_grad()
    def forward(self, features: Tensor, block: Tensor) -> Tensor:
        """Hidden states [K, D] of an embedded `block` [K, D] after the C rows of `features` [C, taps * D]."""
        context = self.hidden_norm(self.fc(features))
        for index in range(len(self.layers)):
            layer = self.layers[index]
            block = block + self.attend(index, context, layer.input_layernorm(block))
            block = block + layer.mlp(layer.post_attention_layernorm(block))
        return self.norm(block)

    def attend(self, index: int, context: Tensor, block: Tensor) -> Tensor:
        """Attention [K, D] of normalized block rows over context rows (not normalized again) and block rows."""
        attention = self.layers[index].self_attn
        heads = (-1, attention.head_dim)
        rows = torch.cat([context, block])
        q = attention.q_norm(attention.q_proj(block).unflatten(-1, heads)).transpose(0, 1)[None]
        k = attention.k_norm(attention.k_proj(rows).unflatten(-1, heads)).transpose(0, 1)[None]
        v = attention.v_proj(rows).unflatten(-1, heads).transpose(0, 1)[None]
        positions = torch.arange(len(rows))
        cos, sin = self.rotary(rows, positions[None])
        k, _ = apply_rotary_pos_emb(k, k, cos, sin)
        q, _ = apply_rotary_pos_emb(q, q, cos[:, len(context) :], sin[:, len(context) :])
        k, v = (repeat_kv(x, attention.num_key_value_groups) for x in (k, v))
        scores = q @ k.transpose(-1, -2) * attention.scaling
        scores = scores.masked_fill(~self.visible(index, positions[len(context) :], positions), -torch.inf)
        return attention.o_proj((scores.softmax(-1) @ v)[0].transpose(0, 1).flatten(1))

    def visible(self, index: int, query: Tensor, key: Tensor) -> Tensor:
        """[K, L]: whether position `query` sees position `key` in a layer. A window includes the row itself."""
        distance = query[:, None] - key
        visible = torch.ones_like(distance, dtype=torch.bool)
        if self.causal[index]:
            visible &= distance >= 0
        if self.windows[index] is not None:
            visible &= distance.abs() < self.windows[index]
        return visible

    @torch.no_grad()
    def propose(
        self, target: Qwen3ForCausalLM, features: Tensor, anchor: int, length: int | None = None
    ) -> Proposal:
        """Draft after `anchor` from `features` [C, taps * D] of all earlier tokens. K = `length` or the block size."""
        block = torch.tensor([anchor] + [self.mask_token_id] * ((length or self.block_size) - 1))
        hidden = self(features, target.model.embed_tokens(block))
        logits = target.lm_head(hidden[1:])
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        best = logits.log_softmax(-1).max(-1)
        return Proposal(hidden, best.indices.tolist(), best.values)


@dataclass
class Proposal:
    hidden: Tensor  # [K, D], after the drafter's last norm
    tokens: list[int]  # K - 1
    logprobs: Tensor  # [K - 1], of `tokens` under the draft distribution


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
