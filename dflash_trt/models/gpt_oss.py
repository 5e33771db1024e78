"""gpt-oss: attention with sinks, windows on every other layer, experts in every layer, stored in MXFP4."""

from __future__ import annotations

import onnx_ir as ir

from dflash_trt.checkpoint.config import TargetConfig
from dflash_trt.checkpoint.schema import MoEConfig
from dflash_trt.formats.mxfp4 import BLOCK
from dflash_trt.graph.builder import FLOAT
from dflash_trt.graph.dialect import Dialect
from dflash_trt.graph.experts import Experts, Storage

from .decoder import CachedAttention, Module, attention_block
from .experts import experts


def layer(m: Module, attention: CachedAttention, c: TargetConfig, i: int, x: ir.Value) -> ir.Value:
    """The residual stream through decoder layer i, x [B*S, D]."""
    g, moe = m.g, c.moe
    assert moe is not None
    x = attention_block(m, attention, i, x)
    with g.scope("mlp"):
        mlp = m.at("mlp")
        h = m.rms_norm(x, "post_attention_layernorm", c.hidden_size, c.rms_norm_eps)
        logits = mlp.linear(
            g.to_float(h), "router", c.hidden_size, moe.num_experts, bias=moe.router_bias, dtype=FLOAT
        )
        h = experts(
            g,
            attention.dialect,
            c.hidden_size,
            moe,
            h,
            logits,
            _weights(mlp.at("experts"), c.hidden_size, moe, attention.dialect),
        )
        return g.op("Add", x, h, name="residual")


def _weights(m: Module, hidden: int, moe: MoEConfig, dialect: Dialect) -> Experts:
    n, inner = moe.num_experts, moe.intermediate_size
    biases = {
        "gate_up_bias": m.weight("gate_up_proj_bias", n, 2 * inner),
        "down_bias": m.weight("down_proj_bias", n, hidden),
    }
    if moe.quantization == "mxfp4":

        def packed(name: str, rows: int, columns: int) -> tuple[Storage, ir.Value, ir.Value | None]:
            groups = columns // BLOCK
            blocks = m.packed(f"{name}_blocks", n, rows, groups, BLOCK // 2)
            scales = m.packed(f"{name}_scales", n, rows, groups)
            with m.g.scope(name):
                return dialect.mxfp4_experts(m.g, blocks, scales)

        storage, gate_up, gate_up_scales = packed("gate_up_proj", 2 * inner, hidden)
        _, down, down_scales = packed("down_proj", hidden, inner)
        return Experts(
            storage=storage,
            gate_up=gate_up,
            gate_up_scales=gate_up_scales,
            down=down,
            down_scales=down_scales,
            **biases,
        )
    # Not quantized, the matrices lie the other way round.
    gate_up = m.g.op("Transpose", m.raw("gate_up_proj", n, hidden, 2 * inner), name="gate_up", perm=[0, 2, 1])
    down = m.g.op("Transpose", m.raw("down_proj", n, inner, hidden), name="down", perm=[0, 2, 1])
    gate_up.type = down.type = ir.TensorType(m.dtype_of("gate_up_proj"))
    return Experts(storage="float", gate_up=gate_up, down=down, **biases)
