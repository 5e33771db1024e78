"""The oracles of drafts and tokens, in float32, batch 1, without any cache: every row is computed anew in every round.

Transformers has the target. z-lab's own classes (its package `dflash`) have the layers, logits and selector of DFlash
and DFlash2; reference_kinds.py has the kinds that no package beside Transformers 5.24 has. The loop is ours because
tests choose tokens with the product's noise; tests/models/test_loops.py has the loops of Transformers and z-lab.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import dflash.model
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F
from transformers import Qwen3Config, Qwen3ForCausalLM

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

    def confident(self, sure: Tensor, candidates: int = 3) -> Drafts:
        """The same drafts, with the probabilities `sure` [K - 1]. The other candidates share the rest of each."""
        for i, scores in enumerate(self.scores):
            order = scores.topk(candidates).indices
            rest = scores[order[1:]].log_softmax(-1) + (1 - sure[i]).log()
            self.scores[i] = torch.full_like(scores, -torch.inf)
            self.scores[i][order] = torch.cat([sure[i : i + 1].log(), rest])
        self.logprobs = sure.log()
        return self


class Reference:
    """A checkpoint's fields and tensors."""

    def __init__(self, directory: Path) -> None:
        self.config: dict[str, Any] = json.loads((directory / "config.json").read_text())
        stored = load_file(directory / "model.safetensors")
        self.w = {name: t.float() if t.is_floating_point() else t for name, t in stored.items()}
        self.configure()
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

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.w[f"{name}.weight"], self.w.get(f"{name}.bias"))


class Drafter(Reference):
    """A drafter with DFlash's layers: rows [anchor, mask, ...] after the fused states of all earlier tokens."""

    model_class = dflash.model.DFlashDraftModel

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        fields = self.config.get("dflash_config", self.config)
        self.own, self.taps, self.mask_token_id = fields, fields["target_layer_ids"], fields["mask_token_id"]
        self.block_size: int = fields.get("block_size") or self.config["block_size"]
        self.load()

    def load(self) -> None:
        # z-lab's class reads `is_causal` only, Model Optimizer writes `causal` and JetSpec `causal_head`.
        fields = [self.config.get("is_causal"), self.own.get("causal"), self.own.get("causal_head")]
        causal = next((causal for causal in fields if causal is not None), None)
        fields = {"num_target_layers": 6, **self.config, "is_causal": causal}
        self.model = self.model_class(Qwen3Config(**fields)).eval()
        tensors = {n + ".weight" * n.endswith("_codebook"): tensor for n, tensor in self.w.items()}
        assert not self.model.load_state_dict(tensors, strict=False).missing_keys

    def hidden(self, features: Tensor, block: Tensor) -> Tensor:
        """Rows [K, D] after the last norm, from `features` [C, taps * D] and embedded rows `block` [K, D]."""
        positions = torch.arange(len(features) + len(block))
        return self.model(positions[None], noise_embedding=block[None], target_hidden=features[None])[0]

    def embed(self, target: Qwen3ForCausalLM, tokens: Tensor) -> Tensor:
        table, scale = self.w.get("embed_tokens.weight"), self.own.get("input_embedding_scale")
        if table is None and scale is None:
            return target.model.embed_tokens(tokens)
        return (target.model.embed_tokens.weight if table is None else table)[tokens] * (scale or 1.0)

    def logits(self, target: Qwen3ForCausalLM, rows: Tensor) -> Tensor:
        has_head = "lm_head.weight" in self.w
        return self.model.compute_logits(
            rows, (lambda x: self.linear(x, "lm_head")) if has_head else target.lm_head
        )

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


class DFlash2(Drafter):
    """Convolutions around each sublayer, and the selector."""

    model_class = dflash.model.DFlash2DraftModel

    def configure(self) -> None:
        self.config.get("dflash_config", self.config).setdefault("input_embedding_scale", 1.0)

    def chain(self, target: Qwen3ForCausalLM, rows: Tensor, anchor: int) -> list[Tensor]:
        select, logits = self.model.candidate_selector.select, self.logits(target, rows)
        # At temperature 1 it returns the probabilities of the candidates. The walk takes the best ones.
        with mock.patch.object(dflash.model, "_sample_probs", lambda probs: probs.argmax(-1)):
            _, candidates, probs = select(rows[None], logits[None], torch.tensor([anchor]), 1.0)
        return list(torch.full_like(logits, -torch.inf).scatter(-1, candidates[0], probs[0].log()))

    @torch.no_grad()
    def propose(
        self, target: Qwen3ForCausalLM, features: Tensor, anchor: int, length: int | None = None
    ) -> Drafts:
        drafts, name = super().propose(target, features, anchor, length), "candidate_selector.confidence_head"
        if f"{name}.weight" not in self.w:
            return drafts
        before = self.w["candidate_selector.predecessor_codebook"][[anchor, *drafts.tokens[:-1]]]
        return drafts.confident(self.linear(torch.cat([drafts.hidden[1:], before], -1), name)[:, 0].sigmoid())


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
