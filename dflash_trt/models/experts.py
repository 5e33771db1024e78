"""Expert layers: the common part of the families that have them."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from dflash_trt.checkpoint.schema import MoEConfig
from dflash_trt.graph.builder import FLOAT, GraphBuilder
from dflash_trt.graph.experts import Experts
from dflash_trt.models.module import Module


def experts(m: Module, hidden: int, moe: MoEConfig, x: ir.Value, logits: ir.Value, e: Experts) -> ir.Value:
    """x [rows, D], router logits [rows, E] in float32 -> [rows, D]."""
    y = m.dialect.experts(
        *(m.g, x, logits, e),
        widened_bytes=widened_bytes(hidden, moe),
        k=moe.experts_per_token,
        alpha=moe.alpha,
        beta=1.0 if moe.activation == "gpt_oss" else 0.0,
        limit=float(np.finfo(np.float32).max) if moe.limit is None else moe.limit,
    )
    return weighted(m.g, y, logits, moe)


def widened_bytes(hidden: int, moe: MoEConfig) -> int:
    """Bytes of all experts of the model in float32."""
    return 4 * 3 * hidden * moe.intermediate_size * moe.num_experts * sum(moe.sparse_layers)


def weighted(g: GraphBuilder, y: ir.Value, logits: ir.Value, moe: MoEConfig) -> ir.Value:
    """Scale y where the family's weights are a softmax over all logits.

    The operators weight by a softmax over the chosen logits. The softmax over all logits is that times the chosen
    share.
    """
    if moe.normalize_weights:
        return y
    best, _ = g.multi("TopK", logits, g.constant([moe.experts_per_token]), outputs=2, name="chosen")
    axis = g.constant([-1])
    chosen, total = (g.op("ReduceLogSumExp", v, axis, name="log_total") for v in (best, logits))
    share = g.op("Exp", g.op("Sub", chosen, total, name="log_share"), name="share")
    return g.op("Mul", y, g.from_dtype(share, FLOAT), name="weighted")
