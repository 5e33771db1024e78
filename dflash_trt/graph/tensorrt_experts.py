"""Experts for TensorRT and TensorRT-RTX, in groups. Each expert is computed for every row.

TensorRT-RTX widens weights before it multiplies them. A group limits the memory for that (docs/tensorrt.md).
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from dflash_trt.graph.builder import FLOAT, GraphBuilder
from dflash_trt.graph.experts import activated
from dflash_trt.graph.lowering import LOWERINGS, Values
from dflash_trt.graph.quantized import input_scale, split_rows, tensors
from dflash_trt.graph.quantized_experts import ExpertLayer, Projection, Stack, stacked

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


def after(g: GraphBuilder, x: ir.Value, total: ir.Value) -> ir.Value:
    """x [1,...] unchanged, but available only after `total` [...], float32.

    The result is x + 0; the compiler cannot know that the summand is 0. Otherwise it joins all products of the same x
    into one, and widens the weights of all of them.
    """
    zero = g.scalar(0.0, FLOAT)
    nothing = g.op("Min", g.op("Max", total, zero, name="positive"), zero, name="nothing")
    return g.op("Add", x, g.unsqueeze(g.from_dtype(nothing, FLOAT), 0), name="after")


def at_a_time(experts: int, size: int) -> int:
    """The number of experts in one product. `size`: bytes of an expert's larger matrix when widened.

    The result divides the number of experts. It is at least two, also for experts that are too large: TensorRT-RTX
    joins products of a single expert and widens the weights of all of them.
    """
    most = max(WIDENED_BYTES, 2 * size)
    return max(n for n in range(1, experts + 1) if experts % n == 0 and n * size <= most)


def quantized_experts(g: GraphBuilder, x: ir.Value, router: ir.Value, layer: ExpertLayer) -> ir.Value:
    """The layer for TensorRT and TensorRT-RTX, written out in the graph itself (see quantized.py), in its dtype.

    As in tensorrt.py's `moe`, every expert is computed for every row. Packed constants cannot be concatenated, so
    each is dequantized first. Experts are multiplied in groups of the size that `at_a_time` gives, one group
    after the other. Each expert has its own static input scale. So inputs are divided by it and
    rounded with a scale of 1, and the product is multiplied by it.
    """
    shares = router_shares(g, router, g.constant([layer.k]))
    shares = g.unsqueeze(g.op("Transpose", shares, name="by_expert", perm=[1, 0]), 2)
    stacks, scales = layer.stacks, layer.scales
    gate = stacks["gate"]
    count = at_a_time(len(gate), 2 * gate.rows * gate.columns * g.dtype.numpy().itemsize)
    steps = len(gate) // count
    x = g.unsqueeze(x, 0)

    def some(x: ir.Value, first: int, share: ir.Value) -> ir.Value:
        """The contribution of `count` experts, in float32."""

        def linear(name: Projection, value: ir.Value) -> ir.Value:
            """[1 or count, rows, columns] -> [count, rows, rows of the stack]"""
            with g.scope(name):
                return _linear(g, stacks[name].part(first, count), value, layer.folder)

        gate, up = (g.to_float(linear(name, x)) for name in ("gate", "up"))
        gated = g.op("Mul", activated(g, gate, layer.activation), up, name="gated")
        y = shared(g, linear("down", g.from_dtype(gated, FLOAT)), share)
        if scales is not None:
            y = g.op(
                "Mul", y, g.unsqueeze(g.slice(scales, first, first + count, axis=0), 1, 2), name="scaled"
            )
        return g.op("ReduceSum", y, g.constant([0]), name="sum", keepdims=0)

    by_step = g.multi("Split", shares, outputs=steps, name="shares", axis=0, num_outputs=steps)
    total = some(x, 0, by_step[0])
    for i, share in enumerate(by_step[1:], 1):
        total = g.op("Add", total, some(after(g, x, total), i * count, share), name="total")
    return g.from_dtype(total, FLOAT)


def _linear(g: GraphBuilder, stack: Stack, x: ir.Value, folder: str) -> ir.Value:
    first, factor = stack.first, None
    by_expert = [tensors(g, stored, folder) for stored in stack.stored]
    if first is None:
        weights = [g.cast(g.raw_weight(info, folder), g.dtype) for info in stack.plain]
    else:
        lowering = LOWERINGS[first.algorithm.scheme]
        weights = [lowering.tensorrt_weight(g, first, inputs) for inputs in by_expert]
        if first.order is not None:
            x = _in_order(g, x, _by_stack(g, by_expert, "order"))
        if first.pre_quant_scale is not None:
            smooth = [g.unsqueeze(g.cast(inputs["pre_quant_scale"], g.dtype), 0, 1) for inputs in by_expert]
            x = g.op("Mul", x, stacked(g, smooth), name="smoothed")
        if first.rounding == "row":
            x, factor = split_rows(g, g.to_float(x))
            scale = input_scale(g, first)
        elif first.rounding == "static":
            factor = stacked(g, [g.unsqueeze(inputs["input_scale"], 0, 1, 2) for inputs in by_expert])
            x, scale = g.op("Div", g.to_float(x), factor, name="by_scale"), g.scalar(1.0, FLOAT)
        if factor is not None:
            x = lowering.tensorrt_input(g, scale, g.from_dtype(x, FLOAT))
    weight = stacked(g, [g.unsqueeze(value, 0) for value in weights])
    y = g.op("MatMul", x, g.op("Transpose", weight, name="transposed", perm=[0, 2, 1]), name="product")
    if (
        first is not None and first.zero_term is not None
    ):  # only integers have it, whose inputs are not rounded here
        return _with_zeros(g, y, x, _by_stack(g, by_expert, "zero_term"))
    if factor is None:
        return y
    return g.from_dtype(g.op("Mul", g.to_float(y), factor, name="rescaled"), FLOAT)


def _by_stack(g: GraphBuilder, by_expert: Sequence[Values], name: str) -> ir.Value:
    return stacked(g, [g.unsqueeze(inputs[name], 0) for inputs in by_expert])


def _in_order(g: GraphBuilder, x: ir.Value, order: ir.Value) -> ir.Value:
    """x [1 or count, rows, columns] -> [count, rows, columns], with each expert's own order [count, columns]."""
    shape = g.shape(g.dim(order, 0, name="experts"), g.dim(x, 1, name="rows"), g.dim(x, 2, name="columns"))
    x, order = (g.op("Expand", value, shape) for value in (x, g.unsqueeze(order, 1)))
    return g.op("GatherElements", x, order, name="ordered", axis=2)


def _with_zeros(g: GraphBuilder, y: ir.Value, x: ir.Value, term: ir.Value) -> ir.Value:
    """As in quantized.py, for y [count, rows, out], x [1 or count, rows, in] and term [count, out, groups]."""
    groups = g.dim(term, 2, name="groups")
    by_group = g.op("Reshape", g.to_float(x), g.shape(0, 0, groups, -1), name="by_group")
    sums = g.op("ReduceSum", by_group, g.constant([3]), name="sums", keepdims=0)
    term = g.op("Transpose", g.cast(term, FLOAT), name="by_group_of_inputs", perm=[0, 2, 1])
    zeros = g.op("MatMul", sums, term, name="zeros")
    return g.from_dtype(g.op("Add", g.to_float(y), zeros, name="with_zeros"), FLOAT)
