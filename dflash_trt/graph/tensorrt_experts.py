"""MXFP4 experts for TensorRT and TensorRT-RTX: one after the other, each for every row.

TensorRT-RTX widens MXFP4 weights before it multiplies them. Of experts in one product it widens all, and those of
several layers at once; of experts in a chain, a few at a time (docs/tensorrt.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from .builder import FLOAT, GraphBuilder
from .experts import MXFP4_BLOCK, Experts
from .quantized import TRT_DOMAIN


def router_shares(g: GraphBuilder, router: ir.Value, k: ir.Value) -> ir.Value:
    """Softmax over the k (int64 [1]) best logits of each row, at their places, and 0 elsewhere; [rows, E]."""
    logits, best = g.multi("TopK", router, k, outputs=2, name="best", axis=-1)
    none = g.op("Expand", g.scalar(0.0, FLOAT), g.op("Shape", router, name="all"), name="none")
    chosen = g.op("Softmax", logits, name="softmax", axis=-1)
    return g.op("ScatterElements", none, best, chosen, name="shares", axis=1)


def shared(g: GraphBuilder, y: ir.Value, shares: ir.Value) -> ir.Value:
    """y times its rows' shares, in float32. Not 0 * y: an expert that nobody asked may have overflowed."""
    zero = g.scalar(0.0, FLOAT)
    y = g.op("Where", g.op("Greater", shares, zero, name="chosen"), g.to_float(y), zero, name="asked")
    return g.op("Mul", y, shares, name="shared")


def mxfp4_experts(
    g: GraphBuilder,
    x: ir.Value,
    router: ir.Value,
    e: Experts,
    k: int,
    expert: Callable[[ir.Value, ir.Value, list[ir.Value]], ir.Value],
) -> ir.Value:
    """`expert` adds one to the total: from total, share [rows,1], and gate_up [2I,D], down [D,I] and their biases.

    The blocks are FLOAT4E2M1 as they lie; the plan keeps the four bits. They are dequantized in the main graph:
    inside a function the parser takes the scales' exponents for numbers.
    """
    assert e.gate_up_scales is not None
    assert e.down_scales is not None
    weights: list[Sequence[ir.Value]] = [
        _widened(g, e.gate_up, e.gate_up_scales),
        _widened(g, e.down, e.down_scales),
    ]
    count = len(weights[0])
    for bias in (e.gate_up_bias, e.down_bias):
        if bias is not None:
            weights.append(g.multi("Split", bias, outputs=count, name="biases", axis=0, num_outputs=count))
    shares = router_shares(g, router, g.constant([k]))
    share = g.multi("Split", shares, outputs=count, name="by_expert", axis=1, num_outputs=count)
    total = g.op("Expand", g.scalar(0.0, FLOAT), g.op("Shape", x, name="shape"), name="zero")
    for i in range(count):
        total = expert(total, share[i], [w[i] for w in weights])
    return g.to_dtype(total, FLOAT)


def _widened(g: GraphBuilder, blocks: ir.Value, scales: ir.Value) -> list[ir.Value]:
    """[O,I] of each expert, from blocks [E,O,G,16] and scales [E,O,G]."""
    _, rows, groups, _ = (int(str(n)) for n in blocks.shape or ())
    fp4 = g.parts(blocks, ir.DataType.FLOAT4E2M1, (rows, groups * MXFP4_BLOCK))
    exponents = g.parts(scales, ir.DataType.UINT8, (rows, groups))
    widened = [
        g.op(
            *("TRT_MXFP8DequantizeLinear", *pair),
            domain=TRT_DOMAIN,
            name="dequantize",
            axis=-1,
            block_size=MXFP4_BLOCK,
            output_dtype=int(g.dtype),
        )
        for pair in zip(fp4, exponents, strict=True)
    ]
    for weight in widened:
        weight.type = ir.TensorType(g.dtype)
    return widened
