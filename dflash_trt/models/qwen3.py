"""Qwen3 (dense): pre-norm blocks, grouped-query attention with a norm per head on q and k, SwiGLU."""

from __future__ import annotations

import onnx_ir as ir

from .decoder import CachedAttention, Module, gated_mlp


def layer(m: Module, attention: CachedAttention, i: int, x: ir.Value) -> ir.Value:
    """The residual stream through decoder layer i, x [B*S, D]."""
    g, c = m.g, attention.config
    with g.scope("attention"):
        h = m.rms_norm(x, "input_layernorm", c.hidden_size, c.rms_norm_eps)
        h = attention.layer(m.at("self_attn"), i, h, h, qk_norm=True)
        x = g.op("Add", x, h, name="residual")
    with g.scope("mlp"):
        h = m.rms_norm(x, "post_attention_layernorm", c.hidden_size, c.rms_norm_eps)
        h = gated_mlp(m.at("mlp"), h, c.hidden_size, c.intermediate_size)
        return g.op("Add", x, h, name="residual")
