"""The EAGLE-3 head in torch for training: the network of models/drafters/eagle3.py, over many chains at once.

A chain begins at an anchor a: the token a with the states of position a - 1. Step i has the token a + i of the answer,
and predicts the next one. From the second step on it has the layer's own row of the step before it in place of states,
as in drafting (training-time test, arXiv 2503.01840, section 3). Names are those of Model Optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dflash_trt.checkpoint.schema import DrafterConfig, LayerAttention, TargetConfig
from dflash_trt.checkpoint.tensors import Checkpoint
from dflash_trt.models.drafters.eagle3 import Eagle3
from dflash_trt.training.initial import copy_matrix, read_matrix
from dflash_trt.training.masks import Mask
from dflash_trt.training.model import DrafterAttention, Mlp, Norm, Rotary, rotate

_STATES = 3


class _Eagle3Layer(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = DrafterAttention(config, inputs=2, norms=False)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.mlp = Mlp(config)

    def both(self, tokens: Tensor, states: Tensor) -> Tensor:
        return torch.cat((self.input_layernorm(tokens), self.hidden_norm(states)), -1)


class Eagle3Drafter(nn.Module):
    """The head with a checkpoint's `weights`, or new. `kept` [V_d]: the target's ids of its own tokens, ascending."""

    teacher_forced = True
    selects = False

    def __init__(
        self,
        config: DrafterConfig,
        weights: Mapping[str, Tensor] | None = None,
        kept: Tensor | None = None,
    ) -> None:
        super().__init__()
        own = config.own
        assert isinstance(own, Eagle3)
        self.config = config
        self.fc = nn.Linear(_STATES * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([_Eagle3Layer(config)])
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, own.vocabulary, bias=False)
        self.rotary = Rotary(config)
        ids = torch.arange(own.vocabulary) if kept is None else kept
        self.register_buffer("d2t", ids - torch.arange(own.vocabulary))
        self.register_buffer(
            "t2d", torch.zeros(config.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
        )
        if weights is not None:
            self.load_state_dict({n: w.float() if w.is_floating_point() else w for n, w in weights.items()})
        else:
            for parameter in self.parameters():
                if parameter.ndim == 2:
                    nn.init.normal_(parameter, std=0.02)

    def kept(self) -> Tensor:
        """The target's ids of the head's tokens, int64 [V_d]."""
        offsets: Tensor = self.get_buffer("d2t")
        return offsets + torch.arange(len(offsets), device=offsets.device)

    def task(self, head: Tensor, labels: Tensor, valid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As model.Drafter's: the head of its own, which learns too. Tokens that it lacks do not count."""
        numbers = torch.searchsorted(self.kept(), labels).clamp(max=self.lm_head.out_features - 1)
        return self.lm_head.weight.to(head.dtype), numbers, valid & self.get_buffer("t2d")[labels]

    def published(self, weights: Mapping[str, Tensor], embedding: Tensor) -> Mapping[str, Tensor]:
        """As model.Drafter's."""
        return weights

    def forward(
        self,
        features: Tensor,
        context_positions: Tensor,
        block: Tensor,
        positions: Tensor,
        masks: Mapping[LayerAttention, Mask],
    ) -> Tensor:
        """Normed rows [B, A * K, D], as model.Drafter: row k of a block predicts its token k. Row 0 is 0.

        features [B, S, 4 * D]: embedding and states. block [B, A * K, D]: the embedded tokens of the answer.
        positions [B, A * K]. `masks` are not read: a chain sees what is before its anchor, and itself.
        """
        size, hidden = self.config.block_size, self.config.hidden_size
        layer: Any = self.layers[0]
        attention = layer.self_attn
        embedded, states = features[..., :hidden], self.fc(features[..., hidden:])
        following = torch.cat((embedded[:, 1:], torch.zeros_like(embedded[:, :1])), 1)
        context = layer.both(following, states)
        keys = rotate(attention.heads(attention.k_proj(context)), *self.rotary(context_positions))
        values = attention.heads(attention.v_proj(context))
        anchors = positions[:, ::size]  # [B, A]
        seen = context_positions[:, None] < (anchors - 1)[..., None]  # [B, A, S]
        at = (anchors - 1).clamp(min=0)
        state = states.gather(1, at[..., None].expand(-1, -1, hidden))
        tokens = block.unflatten(1, (-1, size))
        rows, own_keys, own_values = [torch.zeros_like(state)], [], []
        for step in range(size - 1):
            x = layer.both(tokens[:, :, step], state)
            rotary = self.rotary(at + step)
            q = rotate(attention.heads(attention.q_proj(x)), *rotary)
            own_keys.append(rotate(attention.heads(attention.k_proj(x)), *rotary))
            own_values.append(attention.heads(attention.v_proj(x)))
            y = _attend(q, keys, values, seen, own_keys, own_values)
            state = attention.o_proj(y.transpose(1, 2).flatten(2)) + state
            state = state + layer.mlp(layer.post_attention_layernorm(state))
            rows.append(self.norm(state))
        return torch.stack(rows, 2).flatten(1, 2)


def _attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    seen: Tensor,
    own_keys: Sequence[Tensor],
    own_values: Sequence[Tensor],
) -> Tensor:
    """q [B, heads, A, d], one row of each chain, over the context that the chain sees and over its own rows."""
    batch, n = keys.shape[:2]
    grouped = q.unflatten(1, (n, -1))  # [B, n, group, A, d]
    context = torch.einsum("bngad,bnsd->bngas", grouped, keys)
    context = context.masked_fill(~seen[:, None, None], -torch.inf)
    own = torch.stack([(grouped * k[:, :, None]).sum(-1) for k in own_keys], -1)
    scores = torch.cat((context, own), -1).float() * q.shape[-1] ** -0.5
    shares = scores.softmax(-1).to(values.dtype)
    y = torch.einsum("bngas,bnsd->bngad", shares[..., : keys.shape[2]], values)
    for step, v in enumerate(own_values):
        y = y + shares[..., keys.shape[2] + step, None] * v[:, :, None]
    return y.reshape(batch, -1, *y.shape[3:])


def start_eagle3(drafter: Eagle3Drafter, target: Checkpoint, config: TargetConfig, head: Tensor) -> None:
    """Begin as the target's last layer over the newest states, with the target's head for the kept tokens."""
    last = f"model.layers.{config.num_hidden_layers - 1}"
    size = config.hidden_size
    with torch.no_grad():
        for side in "qkv":
            place = drafter.get_parameter(f"layers.0.self_attn.{side}_proj.weight")
            matrix = read_matrix(target, f"{last}.self_attn.{side}_proj.weight")
            if matrix is not None and matrix.shape == (place.shape[0], size):
                place[:, size:] = matrix
        names = ["self_attn.o_proj", *(f"mlp.{part}_proj" for part in ("gate", "up", "down"))]
        names += ["input_layernorm", "post_attention_layernorm"]
        sources = {f"layers.0.{name}": f"{last}.{name}" for name in names}
        sources |= {"layers.0.hidden_norm": f"{last}.input_layernorm", "norm": "model.norm"}
        for name, source in sources.items():
            copy_matrix(drafter, f"{name}.weight", target, f"{source}.weight")
        drafter.fc.weight *= 0.1
        drafter.fc.weight[:, -size:] += torch.eye(size)
        drafter.lm_head.weight.copy_(head[drafter.kept().to(head.device)].float())
