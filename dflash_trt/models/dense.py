"""Dense decoders, Llama 3 and Qwen3: pre-norm blocks, grouped-query attention, SwiGLU.

They differ only in what the configuration says: Qwen3 norms each head of q and k, Llama may have biases.
"""

from __future__ import annotations

import onnx_ir as ir

from dflash_trt.checkpoint.config import TargetConfig

from .decoder import CachedAttention, Module, attention_block, gated_mlp


def layer(m: Module, attention: CachedAttention, c: TargetConfig, i: int, x: ir.Value) -> ir.Value:
    """The residual stream through decoder layer i, x [B*S, D]."""
    g = m.g
    x = attention_block(m, attention, i, x)
    with g.scope("mlp"):
        h = m.rms_norm(x, "post_attention_layernorm", c.hidden_size, c.rms_norm_eps)
        h = gated_mlp(m.at("mlp"), h, c.hidden_size, c.intermediate_size, bias=c.mlp_bias)
        return g.op("Add", x, h, name="residual")
