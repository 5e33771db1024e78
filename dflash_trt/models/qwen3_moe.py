"""Qwen3-MoE: Qwen3 with experts, stored one by one, in place of the MLP of most layers."""

from __future__ import annotations

import onnx_ir as ir

from dflash_trt.checkpoint.config import TargetConfig
from dflash_trt.checkpoint.linears import stored_linear
from dflash_trt.checkpoint.schema import MoEConfig
from dflash_trt.errors import CheckpointError
from dflash_trt.graph.builder import FLOAT

from . import dense
from .decoder import CachedAttention, Module, attention_block
from .experts import Experts, experts


def layer(m: Module, attention: CachedAttention, c: TargetConfig, i: int, x: ir.Value) -> ir.Value:
    """The residual stream through decoder layer i, x [B*S, D]."""
    g, moe = m.g, c.moe
    if moe is None or not moe.sparse_layers[i]:
        return dense.layer(m, attention, c, i, x)
    x = attention_block(m, attention, i, x)
    with g.scope("mlp"):
        mlp = m.at("mlp")
        h = m.rms_norm(x, "post_attention_layernorm", c.hidden_size, c.rms_norm_eps)
        logits = mlp.linear(g.to_float(h), "gate", c.hidden_size, moe.num_experts, dtype=FLOAT)
        h = experts(g, attention.dialect, c.hidden_size, moe, h, logits, _stack(mlp, c.hidden_size, moe))
        return g.op("Add", x, h, name="residual")


def _stack(m: Module, hidden: int, moe: MoEConfig) -> Experts:
    """Three matrices per expert into the operator's two tensors; an engine does this once, as it loads."""
    g, n, inner = m.g, moe.num_experts, moe.intermediate_size
    first = f"{m.prefix}experts.0.gate_proj"
    stored = stored_linear(m.checkpoint, first, hidden, inner)
    if stored is not None:
        raise CheckpointError(
            f"{stored.weight.file}: {first} is {stored.algorithm.name}, but experts of this family are read "
            "in floating point only; quantize the original one with: dflash-trt quantize, which leaves them so"
        )

    def stacked(name: str, rows: int, columns: int) -> ir.Value:
        each = [m.raw(f"experts.{e}.{name}.weight", rows, columns) for e in range(n)]
        return g.op("Concat", *each, name=f"{name}/stacked", axis=0)

    # Gate and up in turns: [E, I, 1, D] beside [E, I, 1, D] is [E, 2I, D].
    halves = [
        g.op("Reshape", stacked(name, inner, hidden), g.constant([n, inner, 1, hidden]), name=f"{name}/split")
        for name in ("gate_proj", "up_proj")
    ]
    both = g.op("Concat", *halves, name="gate_up/paired", axis=2)
    gate_up = g.op("Reshape", both, g.constant([n, 2 * inner, hidden]), name="gate_up")
    down = g.op("Reshape", stacked("down_proj", hidden, inner), g.constant([n, hidden, inner]), name="down")
    # The dtype on disk, which the operator's body is made for.
    gate_up.type = down.type = ir.TensorType(m.dtype_of("experts.0.gate_proj.weight"))
    return Experts(storage="float", gate_up=gate_up, down=down)
