"""MXFP4 experts for TensorRT and TensorRT-RTX, in groups. Each expert is computed for every row.

TensorRT-RTX widens MXFP4 weights before it multiplies them. A group limits the memory for that (docs/tensorrt.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from dflash_trt.formats.base import BLOCK
from dflash_trt.graph.builder import FLOAT, GraphBuilder
from dflash_trt.graph.experts import Experts
from dflash_trt.graph.lowering.mxfp4 import tensorrt_blocks

WIDENED_BYTES = 1 << 28  # widened weights of one product: eight of gpt-oss's experts


def router_shares(g: GraphBuilder, router: ir.Value, k: ir.Value) -> ir.Value:
    """Softmax over the k (int64 [1]) best logits of each row, in their columns, and 0 elsewhere; [rows, E]."""
    logits, best = g.multi("TopK", router, k, outputs=2, name="best", axis=-1)
    none = g.op("Expand", g.scalar(0.0, FLOAT), g.op("Shape", router, name="all"), name="none")
    chosen = g.op("Softmax", logits, name="softmax", axis=-1)
    return g.op("ScatterElements", none, best, chosen, name="shares", axis=1)


def shared(g: GraphBuilder, y: ir.Value, shares: ir.Value) -> ir.Value:
    """y times the shares of its rows, in float32. Not 0 * y: an expert that was not chosen may have overflowed."""
    zero = g.scalar(0.0, FLOAT)
    y = g.op("Where", g.op("Greater", shares, zero, name="chosen"), g.to_float(y), zero, name="asked")
    return g.op("Mul", y, shares, name="shared")


def mxfp4_experts(
    g: GraphBuilder,
    x: ir.Value,
    router: ir.Value,
    e: Experts,
    k: int,
    some: Callable[..., ir.Value],
) -> ir.Value:
    """x [rows,D] -> [rows,D] in g's dtype, in groups of at least two experts whose widened weights fit WIDENED_BYTES.

    `some` adds the output of n experts to the total [D,rows], in float32. Its inputs are the total, x [1,D,rows],
    shares [n,1,rows], gate_up [n,2I,D], down [n,D,I] and the biases, if any, [n,2I,1] and [n,D,1]. The weights are
    the left operands. TensorRT copies a right operand in transposed form while it builds, once per profile.

    The blocks are FLOAT4E2M1 as on disk, and the plan keeps their four bits. They are dequantized in the main graph.
    Inside a function the parser takes the scales' exponents for numbers.
    """
    assert e.gate_up_scales is not None
    assert e.down_scales is not None
    experts, rows, groups, _ = (int(str(n)) for n in e.gate_up.shape or ())
    steps = experts // at_a_time(experts, rows * groups * BLOCK * g.dtype.numpy().itemsize)

    def by_step(value: ir.Value, name: str) -> Sequence[ir.Value]:
        return g.multi("Split", value, outputs=steps, name=name, axis=0, num_outputs=steps)

    weights = [
        tensorrt_blocks(g, e.gate_up, e.gate_up_scales, steps),
        tensorrt_blocks(g, e.down, e.down_scales, steps),
    ]
    for name, bias in (("gate_up_biases", e.gate_up_bias), ("down_biases", e.down_bias)):
        if bias is not None:
            weights.append(by_step(g.unsqueeze(bias, 2), name))
    shares = router_shares(g, router, g.constant([k]))
    shares = g.unsqueeze(g.op("Transpose", shares, name="by_expert", perm=[1, 0]), 1)
    columns = g.op("Transpose", x, name="columns", perm=[1, 0])
    total = g.op("Expand", g.scalar(0.0, FLOAT), g.op("Shape", columns, name="shape"), name="zero")
    columns = g.unsqueeze(columns, 0)
    for i, inputs in enumerate(zip(by_step(shares, "shares"), *weights, strict=True)):
        total = some(total, after(g, columns, total) if i else columns, *inputs)
    return g.to_dtype(g.op("Transpose", total, name="rows", perm=[1, 0]), FLOAT)


def after(g: GraphBuilder, x: ir.Value, total: ir.Value) -> ir.Value:
    """x [1,...] unchanged, but available only after `total` [...], float32.

    The result is x + 0; the compiler cannot know that the summand is 0. Otherwise it joins all products of the same x
    into one, and widens the weights of all of them.
    """
    zero = g.scalar(0.0, FLOAT)
    nothing = g.op("Min", g.op("Max", total, zero, name="positive"), zero, name="nothing")
    return g.op("Add", x, g.unsqueeze(g.to_dtype(nothing, FLOAT), 0), name="after")


def at_a_time(experts: int, size: int) -> int:
    """The number of experts in one product. `size`: bytes of an expert's larger matrix when widened.

    The result divides the number of experts. It is at least two, also for experts that are too large: TensorRT-RTX
    joins products of a single expert and widens the weights of all of them.
    """
    most = max(WIDENED_BYTES, 2 * size)
    return max(n for n in range(1, experts + 1) if experts % n == 0 and n * size <= most)
