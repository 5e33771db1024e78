"""Qwen3-MoE: Qwen3 with experts, stored one by one, in place of the MLP of most layers."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from dflash_trt.checkpoint.config import TargetConfig
from dflash_trt.checkpoint.linears import stored_experts
from dflash_trt.checkpoint.schema import MoEConfig
from dflash_trt.graph.builder import FLOAT, ONNX_DTYPES
from dflash_trt.graph.experts import Experts
from dflash_trt.graph.quantized_experts import Projection, Stack

from . import dense
from .decoder import CachedAttention, Module, attention_block
from .experts import experts, weighted, widened_bytes


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
        stacks = _stacks(mlp, c.hidden_size, moe)
        dialect = attention.dialect
        if dialect.experts_apart or any(stack.stored for stack in stacks.values()):
            y = dialect.quantized_experts(
                *(g, h, logits, stacks, m.folder),
                k=moe.experts_per_token,
                widened_bytes=widened_bytes(c.hidden_size, moe),
            )
            y = weighted(g, y, logits, moe)
        else:
            y = experts(g, dialect, c.hidden_size, moe, h, logits, _joined(mlp, stacks))
        return g.op("Add", x, y, name="residual")


def _stacks(m: Module, hidden: int, moe: MoEConfig) -> dict[Projection, Stack]:
    def stack(name: Projection, rows: int, columns: int) -> Stack:
        layers = [f"experts.{e}.{name}_proj" for e in range(moe.num_experts)]
        stored = stored_experts(m.checkpoint, [m.prefix + layer for layer in layers], columns, rows)
        if stored is None:
            plain = [m.stored(f"{layer}.weight", rows, columns) for layer in layers]
            return Stack(rows, columns, plain=tuple(plain))
        m.used.update(info.name for each in stored for info in each.tensors)
        return Stack(rows, columns, tuple(stored))

    inner = moe.intermediate_size
    return {
        "gate": stack("gate", inner, hidden),
        "up": stack("up", inner, hidden),
        "down": stack("down", hidden, inner),
    }


def _joined(m: Module, stacks: Mapping[Projection, Stack]) -> Experts:
    """Three matrices per expert into the operator's two tensors; an engine does this once, as it loads."""
    g, stack = m.g, stacks["gate"]
    n, inner, hidden = len(stack.plain), stack.rows, stack.columns

    def stacked(name: Projection) -> ir.Value:
        each = [g.raw_weight(info, m.folder) for info in stacks[name].plain]
        return g.op("Concat", *each, name=f"{name}_proj/stacked", axis=0)

    # Gate and up in turns: [E, I, 1, D] beside [E, I, 1, D] is [E, 2I, D].
    halves = [
        g.op("Reshape", stacked(name), g.constant([n, inner, 1, hidden]), name=f"{name}_proj/split")
        for name in ("gate", "up")
    ]
    both = g.op("Concat", *halves, name="gate_up/paired", axis=2)
    gate_up = g.op("Reshape", both, g.constant([n, 2 * inner, hidden]), name="gate_up")
    down = g.op("Reshape", stacked("down"), g.constant([n, hidden, inner]), name="down")
    # The dtype on disk, which the operator's body is made for.
    gate_up.type = down.type = ir.TensorType(ONNX_DTYPES[stack.plain[0].dtype])
    return Experts(storage="float", gate_up=gate_up, down=down)
