"""Drafters that no package beside Transformers 5.24 has, in plain torch, float32, batch 1, uncached.

EAGLE-3, DSpark and DeepSpec's drafter for Gemma 4: z-lab's package and Transformers have none of them.
speculators 0.9.0 has EAGLE-3 and DSpark, in its own format and with Transformers up to 5.19; vLLM's wheel for CPUs runs
them in its engine only. Each function of a class is the rule of its kind's public code, with the published names.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, rotate_half

from tests.doubles.reference import Drafter, Drafts, Reference, target_outputs


class Plain(Reference):
    """Parts of layers, by the names of their tensors."""

    def norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.w[f"{name}.weight"], self.config["rms_norm_eps"])

    def mlp(self, x: Tensor, name: str) -> Tensor:
        gated = F.silu(self.linear(x, f"{name}.gate_proj")) * self.linear(x, f"{name}.up_proj")
        return self.linear(gated, f"{name}.down_proj")

    @cached_property
    def size(self) -> int:
        config = self.config
        return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]

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

    def attention(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None = None) -> Tensor:
        """[n, rows, size] over [n_kv, keys, size]: [rows, n * size]."""
        y = F.scaled_dot_product_attention(q[None], k[None], v[None], visible, enable_gqa=True)
        return y[0].transpose(0, 1).flatten(1)


class Eagle3(Plain):
    """An EAGLE-3 head. Position j has token j + 1 beside its states; see `EAGLE/eagle/model/cnets.py`."""

    def __init__(self, directory: Path, layers: int) -> None:
        super().__init__(directory)
        exported = self.config.get("eagle_config") or {}
        self.layer = "midlayer" if "midlayer.hidden_norm.weight" in self.w else "layers.0"
        ids = exported.get("eagle_aux_hidden_state_layer_ids")
        # SpecForge names the layers whose output is read, all others the layers that the states enter.
        entered = ids is None or self.layer == "layers.0"
        self.taps = [layer - entered for layer in ids or [2, layers // 2, layers - 3]]

    def row(self, rows: list[tuple[int, Tensor]], target: Qwen3ForCausalLM) -> Tensor:
        """The layer's last row, after these tokens with their states."""
        name = self.layer
        states = torch.stack([state for _, state in rows])
        tokens = target.model.embed_tokens(torch.tensor([token for token, _ in rows]))
        normed = self.norm(tokens, f"{name}.input_layernorm"), self.norm(states, f"{name}.hidden_norm")
        x = torch.cat(normed, -1)
        q, k, v = (self.heads(self.linear(x, f"{name}.self_attn.{part}_proj")) for part in "qkv")
        if f"{name}.self_attn.q_norm.weight" in self.w:
            q, k = self.norm(q, f"{name}.self_attn.q_norm"), self.norm(k, f"{name}.self_attn.k_norm")
        positions = torch.arange(len(rows))
        visible = positions[:, None] >= positions
        y = self.attention(self.rotated(q, positions), self.rotated(k, positions), v, visible)
        y = (normed[1] if self.config.get("norm_before_residual") else states) + self.linear(
            y, f"{name}.self_attn.o_proj"
        )
        return (y + self.mlp(self.norm(y, f"{name}.post_attention_layernorm"), f"{name}.mlp"))[-1]

    @torch.no_grad()
    def draft(self, target: Qwen3ForCausalLM, tokens: list[int], anchor: int, length: int) -> Drafts:
        features = target_outputs(target, tokens, self.taps)[1]
        if "input_norm.weight" in self.w:
            features = self.norm(features, "input_norm")
        if self.config.get("fc_norm"):
            parts = features.chunk(3, -1)
            features = torch.cat([self.norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)], -1)
        states = self.linear(features, "fc")
        rows = list(zip([*tokens[1:], anchor], states, strict=True))
        found = Drafts([], torch.empty(0), [], torch.empty(0))
        for _ in range(length - 1):
            state = self.row(rows, target)
            normed = self.norm(state, "norm")
            scores = self.of_target(self.linear(normed, "lm_head").log_softmax(-1))
            found.scores.append(scores)
            found.tokens.append(int(scores.argmax()))
            rows.append((found.tokens[-1], normed if self.config.get("norm_output") else state))
        found.logprobs = torch.stack([s.max() for s in found.scores])
        return found


class DSpark(Drafter):
    """Rows predict the next token. The Markov head corrects the best `candidates` of a place."""

    candidates = 64

    @property
    def anchor_is_known(self) -> bool:
        """Whether the anchor's row predicts nothing, as a row of a mask predicts its own place."""
        return self.own.get("sample_from_anchor") is False or bool(self.config.get("dspark_bonus_anchor"))

    def rows(self, hidden: Tensor) -> Tensor:
        return hidden[1:] if self.anchor_is_known else hidden

    def tensor(self, name: str) -> Tensor:
        return self.w.get(name, self.w.get(f"logit_head.{name}"))

    def layer(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.tensor(f"{name}.weight"), self.tensor(f"{name}.bias"))

    @torch.no_grad()
    def propose(
        self, target: Qwen3ForCausalLM, features: Tensor, anchor: int, length: int | None = None
    ) -> Drafts:
        fields, known = self.own, self.anchor_is_known
        count = (length or self.block_size + (not known)) - (not known)
        block = torch.tensor([anchor] + [self.mask_token_id] * (count - 1))
        rows = self.rows(self.hidden(features, self.embed(target, block)))
        scores, tokens, sure = list[Tensor](), list[int](), list[Tensor]()
        state = torch.zeros(fields.get("markov_rank") or 0)
        for row in rows:
            logits, w = self.logits(target, row), torch.empty(0)
            if fields["markov_rank"]:
                w = left = self.tensor("markov_head.markov_w1.weight")[tokens[-1] if tokens else anchor]
                if fields["markov_head_type"] == "gated":
                    left = self.layer(torch.cat([row, w]), "markov_head.gate_proj").sigmoid() * w
                elif fields["markov_head_type"] == "rnn":
                    thirds = self.layer(torch.cat([state, w, row]), "markov_head.joint_proj").chunk(3)
                    gate = thirds[0].sigmoid()
                    state, left = gate * state + (1 - gate) * thirds[1].tanh(), thirds[2].tanh()
                best = logits.topk(self.candidates).indices
                corrected = logits + self.tensor("markov_head.markov_w2.weight") @ left
                logits = torch.full_like(logits, -torch.inf)
                logits[best] = corrected[best]
            scores.append(self.of_target(logits.log_softmax(-1)))
            tokens.append(int(scores[-1].argmax()))
            if fields["enable_confidence_head"]:
                read = torch.cat([row, w]) if fields["confidence_head_with_markov"] else row
                sure.append(self.layer(read, "confidence_head.proj").sigmoid())
        found = Drafts(tokens, torch.stack([s.max() for s in scores]), scores, rows)
        return found.confident(torch.cat(sure)) if sure else found


class SpecForge(DSpark):
    """As SpecForge trains it: no row of a block is causal, and the fields of the heads are beside DFlash's."""

    def configure(self) -> None:
        self.config["is_causal"] = False


class GemmaDSpark(Plain, DSpark):
    """DeepSpec's drafter for Gemma 4: keys are values, norms on both sides, one factor for a layer's result."""

    def configure(self) -> None:
        self.config["head_dim"] = self.config["global_head_dim"]

    def load(self) -> None:
        """Nothing of it is z-lab's."""

    def logits(self, target: Qwen3ForCausalLM, rows: Tensor) -> Tensor:
        cap = self.config["final_logit_softcapping"]
        return (self.linear(rows, "lm_head") / cap).tanh() * cap

    def unit(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], eps=self.config["rms_norm_eps"])

    def rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        """A quarter of the pairs (i, i + size / 2) rotates."""
        pairs, half = self.size // 8, self.size // 2
        angles = positions[:, None].float() * 1e6 ** (-2 * torch.arange(pairs) / self.size)
        y = x.clone()
        a, b = x[..., :pairs], x[..., half : half + pairs]
        y[..., :pairs] = a * angles.cos() - b * angles.sin()
        y[..., half : half + pairs] = b * angles.cos() + a * angles.sin()
        return y

    def attend(self, layer: int, context: Tensor, block: Tensor) -> Tensor:
        name, rows = f"layers.{layer}.self_attn", torch.cat([context, block])
        k = self.heads(self.linear(rows, f"{name}.k_proj"))
        v = k if self.config["attention_k_eq_v"] else self.heads(self.linear(rows, f"{name}.v_proj"))
        q = self.norm(self.heads(self.linear(block, f"{name}.q_proj")), f"{name}.q_norm")
        positions = torch.arange(len(rows))
        q = self.rotated(q, positions[len(context) :]) * self.size**0.5  # products are not scaled
        k = self.rotated(self.norm(k, f"{name}.k_norm"), positions)
        y = self.attention(q, k, self.unit(v))
        return self.linear(y, f"{name}.o_proj")

    def hidden(self, features: Tensor, block: Tensor) -> Tensor:
        context = self.norm(self.linear(features, "fc"), "hidden_norm")
        for i in range(self.config["num_hidden_layers"]):
            name = f"layers.{i}"
            y = self.attend(i, context, self.norm(block, f"{name}.input_layernorm"))
            block = block + self.norm(y, f"{name}.post_attention_layernorm")
            y = self.norm(block, f"{name}.pre_feedforward_layernorm")
            gate = F.gelu(self.linear(y, f"{name}.mlp.gate_proj"), approximate="tanh")
            y = self.linear(gate * self.linear(y, f"{name}.mlp.up_proj"), f"{name}.mlp.down_proj")
            block = (block + self.norm(y, f"{name}.post_feedforward_layernorm")) * self.w[
                f"{name}.layer_scalar"
            ]
        return self.norm(block, "norm")

    def embed(self, target: Qwen3ForCausalLM, tokens: Tensor) -> Tensor:
        return self.w["embed_tokens.weight"][tokens] * self.config["hidden_size"] ** 0.5
