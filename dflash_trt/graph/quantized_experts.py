"""Experts with gate and up apart, quantized or with an activation that `dflash::MoE` lacks (Qwen3-MoE, Gemma 4).

QuantizedExperts(x [rows,D], router_logits [rows,E], and for gate, up and down each: weight, scale, global_scale,
    input_scale, pre_quant_scale, each concatenated over all experts; expert_scales [E]; k) -> y [rows,D]

y = sum over the k best experts e of p_e * s_e * down_e(act(gate_e(x)) * up_e(x)), p = softmax over the k best logits.
Without expert_scales, s is 1. act is silu, or the activation in the operator's name. A layer is in floating point, or
one of quantized.py with its input rounded as the format does; `dflash::MoE` of experts.py cannot round inputs. An
operator has only the inputs that its formats have.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import onnx_ir as ir

from dflash_trt.checkpoint.linears import StoredLinear
from dflash_trt.checkpoint.schema import Activation
from dflash_trt.checkpoint.tensors import TensorInfo
from dflash_trt.errors import BuildError
from dflash_trt.formats.fp8 import FP8
from dflash_trt.formats.numbers import unsigned_values
from dflash_trt.graph.builder import BOOL, FLOAT, INT64, ONNX_DTYPES, GraphBuilder
from dflash_trt.graph.experts import PairedRows, activated
from dflash_trt.graph.lowering import LOWERINGS, LinearKind
from dflash_trt.graph.lowering.bodies import lookup
from dflash_trt.graph.quantized import (
    INPUTS,
    input_scale,
    kind_of,
    operator_name,
    product,
    split_rows,
    tensors,
    zero_points,
)
from dflash_trt.graph.tensorrt_experts import after, at_a_time, router_shares, shared

Projection = Literal["gate", "up", "down"]


@dataclass(frozen=True, slots=True)
class Stack:
    """One linear layer [rows, columns] of every expert: all `stored` in one format, or all `plain`, in floating
    point.
    """

    rows: int
    columns: int
    stored: tuple[StoredLinear, ...] = ()
    plain: tuple[TensorInfo, ...] = ()

    def __len__(self) -> int:
        return len(self.stored or self.plain)

    def part(self, first: int, count: int) -> Stack:
        """The `count` experts from `first` on."""
        some = slice(first, first + count)
        return replace(self, stored=self.stored[some], plain=self.plain[some])

    @property
    def kind(self) -> LinearKind | None:
        return kind_of(self.stored[0], biased=False) if self.stored else None

    @property
    def parts(self) -> list[str]:
        """The names of the operator's inputs that are present."""
        if not self.stored:
            return ["weight"]
        return [name for name in INPUTS[:-1] if getattr(self.stored[0], name) is not None]


def onnxruntime_inputs(g: GraphBuilder, stack: Stack, folder: str) -> list[ir.Value]:
    """The operator's inputs for one projection. Codes and their scales are bytes: no other type can be gathered."""
    if stack.plain:
        return [_concat(g, [g.raw_weight(info, folder) for info in stack.plain])]
    each: dict[str, list[ir.Value]] = {part: [] for part in stack.parts}
    for stored in stack.stored:
        for part, values in each.items():
            info: TensorInfo = getattr(stored, part)
            value = g.raw_weight(info, folder)
            by_row = part == "scale" and stored.format.scale_by_row and not stored.algorithm.group_size
            if info.dtype in ("F8_E4M3", "I8"):
                value = g.reinterpret(value, ir.DataType.UINT8, info.shape)
            elif part in ("global_scale", "input_scale") or by_row:
                value = g.reinterpret(value, ONNX_DTYPES[info.dtype], [math.prod(info.shape)])
            values.append(value)
    found = {part: _concat(g, values) for part, values in each.items()}
    for part in ("scale", "input_scale"):
        info = getattr(stack.stored[0], part)
        if info is not None and info.dtype in ("BF16", "F16"):
            found[part] = g.op("Cast", found[part], name=part, to=int(FLOAT))
    if "zero_point" in found:
        found["zero_point"] = zero_points(g, found["zero_point"], stack.stored[0])
    return list(found.values())


def _concat(g: GraphBuilder, values: list[ir.Value]) -> ir.Value:
    return g.op("Concat", *values, name="stacked", axis=0)


def onnxruntime_experts(
    stacks: Mapping[Projection, Stack],
    *,
    resident: bool,
    observed: bool = False,
    activation: Activation = "silu",
    scaled: bool = False,
) -> ir.Function:
    """The body for ONNX Runtime: a loop over the experts that some row chose, in float32.

    `resident`: all experts are widened to float32 as the engine loads. Otherwise every pass widens those in use, one
    at a time, so that what it reads and holds follows their number. `observed`: a second output, the largest magnitude
    that reaches a down projection. `scaled`: each expert has a scale of its own.
    """
    kinds = "_".join(_signature(stack) for stack in stacks.values())
    kinds += f"_{activation}" * (activation != "silu") + "_scaled" * scaled
    g = GraphBuilder(f"QuantizedExperts_{kinds}{'_observed' * observed}")
    x, router = g.input("x", FLOAT, ["rows", "D"]), g.input("router_logits", FLOAT, ["rows", "E"])
    given: dict[Projection, dict[str, ir.Value]] = {}
    for name, stack in stacks.items():
        given[name] = {part: ir.Value(name=f"{name}_{part}") for part in stack.parts}
        g.graph.inputs.extend(given[name].values())
    by_expert = {name: _by_expert(g, stack, given[name], resident) for name, stack in stacks.items()}
    scales = g.input("expert_scales", FLOAT, ["E"]) if scaled else None

    k = g.op("Constant", name="k", value_int=ir.RefAttr("value_int", "k", ir.AttributeType.INT))
    k = g.op("Reshape", k, g.constant([1]), name="count")
    pairs = PairedRows(g, router, k)
    x, logits, best = (pairs.extended(t) for t in (x, pairs.logits, pairs.best))
    shares = g.op("Softmax", logits, name="shares", axis=-1)
    if scales is not None:
        shares = g.op("Mul", shares, g.op("Gather", scales, best, name="own_scales"), name="scaled_shares")
    active = g.op(
        "Unique", best, name="active", sorted=1
    )  # so that a row's sum does not depend on other rows
    nothing = g.op("Expand", g.constant(0, np.float32), g.op("Shape", x, name="all"), name="nothing")

    body = g.body("experts")
    step, go_on = (ir.Value(name=f"{body.graph.name}/{n}", type=ir.TensorType(t), shape=ir.Shape([]))
                   for n, t in (("step", INT64), ("go_on", BOOL)))  # fmt: skip
    total = ir.Value(
        name=f"{body.graph.name}/total", type=ir.TensorType(FLOAT), shape=ir.Shape(["rows", "D"])
    )
    body.graph.inputs.extend([step, go_on, total])
    expert = body.op("Gather", active, step, name="expert", axis=0)
    places = body.op("NonZero", body.op("Equal", best, expert, name="is_chosen"), name="places")
    places = body.op("Transpose", places, name="by_place", perm=[1, 0])  # [n, 2]: row, and which of its k
    rows = body.op("Slice", places, *map(g.constant, ([0], [1], [1])), name="rows")  # [n, 1]

    def linear(name: Projection, value: ir.Value) -> ir.Value:
        stack, kind = stacks[name], stacks[name].kind
        own = {
            part: body.op("Gather", whole, expert, name=f"{name}_{part}", axis=0)
            for part, whole in by_expert[name].items()
        }
        if kind is None:
            weight = body.op("Cast", own["weight"], name=name, to=int(FLOAT))
            return body.op("Gemm", value, weight, name=f"{name}_product", transB=1)
        weight = own["weight"] if resident else _widened(body, kind, stack.columns, own)
        return product(body, kind, own, value, weight)

    asking = body.op("GatherND", x, rows, name="asking")
    gate, up = linear("gate", asking), linear("up", asking)
    hidden = body.op("Mul", activated(body, gate, activation), up, name="gated")
    share = body.unsqueeze(body.op("GatherND", shares, places, name="share"), 1)
    y = body.op("Mul", linear("down", hidden), share, name="weighted")
    y = body.op("ScatterND", total, rows, y, name="added", reduction="add")
    outputs = [(body.op("Identity", go_on), BOOL, []), (y, FLOAT, ["rows", "D"])]
    if observed:
        outputs.append((body.op("ReduceMax", body.op("Abs", hidden), name="largest", keepdims=0), FLOAT, []))
    for value, dtype, shape in outputs:
        value.type, value.shape = ir.TensorType(dtype), ir.Shape(shape)
        body.graph.outputs.append(value)
    count = g.op("Size", active, name="count")
    y, *seen = g.multi("Loop", count, None, nothing, outputs=1 + observed, name="loop", body=body.graph)
    g.output(pairs.own(y), "y", FLOAT, ["rows", "D"])
    if observed:
        g.output(g.op("ReduceMax", seen[0], keepdims=0), "largest", FLOAT, [])
    return g.function([ir.Attr("k", ir.AttributeType.UNDEFINED, None)])


def _signature(stack: Stack) -> str:
    """The traits that the body depends on, besides the layer's size, which is the same throughout a model."""
    if stack.kind is None:
        return "Linear"
    per_row = stack.kind.format.scale_by_row and math.prod(stack.stored[0].scale.shape) > 1
    return operator_name(stack.kind) + "_per_row" * per_row


def _by_expert(
    g: GraphBuilder, stack: Stack, given: Mapping[str, ir.Value], resident: bool
) -> dict[str, ir.Value]:
    """Everything with an axis of experts in front; `weight` in float32 where it is resident."""
    kind = stack.kind
    if kind is None:
        return {"weight": g.op("Reshape", given["weight"], g.constant([-1, stack.rows, stack.columns]))}
    rows = stack.rows

    def per_row(name: str) -> ir.Value:
        """[E * rows, 1] of one number for each expert, or for each row."""
        value = given[name]
        if name == "global_scale" or math.prod(stack.stored[0].scale.shape) == 1:
            value = g.op("Reshape", value, g.constant([-1, 1]), name=f"{name}_by_expert")
            experts = g.dim(value, 0, name="experts")
            value = g.op("Expand", value, g.shape(experts, rows), name=f"{name}_of_rows")
        return g.op("Reshape", value, g.constant([-1, 1]), name=f"{name}_per_row")

    found = dict(given)
    if kind.group_rows > 1:
        found["scale"] = _by_row(g, stack, kind, given["scale"])
    elif (
        expanded := None if kind.scheme == FP8.name and kind.group_size else kind.format.expanded
    ) is not None:
        found[expanded] = per_row(expanded)
    shapes = {
        "weight": stack.stored[0].weight.shape,
        "scale": (rows, stack.columns // (kind.group_size or stack.columns)),
        "global_scale": (rows, 1),
        "zero_point": (rows, stack.columns // (kind.group_size or stack.columns)),
        "order": (stack.columns,),
        "pre_quant_scale": (stack.columns,),
        "input_scale": (),
    }
    if resident:
        shapes["weight"] = (rows, stack.columns)
        found["weight"] = _widened(g, kind, stack.columns, found)
        found = {name: v for name, v in found.items() if name not in ("scale", "global_scale", "zero_point")}
    return {
        name: g.op("Reshape", value, g.constant([-1, *shapes[name]]), name=f"{name}_by_expert")
        for name, value in found.items()
    }


def _by_row(g: GraphBuilder, stack: Stack, kind: LinearKind, scale: ir.Value) -> ir.Value:
    """[E * rows, groups] from the scales of blocks, stacked."""
    blocks, groups = stack.stored[0].scale.shape
    scale = g.op("Reshape", scale, g.constant([-1, blocks, 1, groups]), name="scale_by_expert")
    scale = g.op("Expand", scale, g.constant([1, 1, kind.group_rows, 1]), name="scale_of_rows")
    scale = g.op("Reshape", scale, g.constant([-1, blocks * kind.group_rows, groups]), name="scale_by_row")
    scale = g.op("Slice", scale, *map(g.constant, ([0], [stack.rows], [1])), name="own")
    return g.op("Reshape", scale, g.constant([-1, groups]), name="scale_per_row")


def _widened(g: GraphBuilder, kind: LinearKind, columns: int, parts: Mapping[str, ir.Value]) -> ir.Value:
    """Weights of one expert or of all, [rows, columns]: exactly the numbers that the codes stand for."""
    form = kind.format
    tables = form.byte_values
    if kind.unsigned:
        tables = unsigned_values(form.numbers_in_byte, middle=not kind.zero_points)
    found = [lookup(g, g.constant(table, np.float32), parts["weight"]) for table in tables.T]
    if not kind.group_size:
        return g.op("Mul", found[0], LOWERINGS[kind.scheme].expert_factors(g, kind, parts), name="widened")
    if columns % kind.group_size:
        raise BuildError(
            f"experts with {columns} inputs are in blocks of {kind.group_size} columns, of which the last is smaller: "
            "such experts are not supported"
        )
    numbers = found[0]
    if form.numbers_in_byte == 2:
        axis = 2 if kind.by_row else 1  # the two in a byte are neighbours in a row, or in a column
        halves = [g.unsqueeze(half, axis) for half in found]
        numbers = g.op("Concat", *halves, name="numbers", axis=axis)
    groups = columns // kind.group_size
    numbers = g.op("Reshape", numbers, g.constant([-1, groups, kind.group_size]), name="numbers_by_block")
    if kind.zero_points:
        points = g.op("Cast", parts["zero_point"], name="zero_points", to=int(FLOAT))
        numbers = g.op(
            "Sub",
            numbers,
            g.op("Reshape", points, g.constant([-1, groups, 1]), name="by_group"),
            name="numbers",
        )
    factors = LOWERINGS[kind.scheme].expert_factors(g, kind, parts)
    factors = g.op("Reshape", factors, g.constant([-1, groups]), name="factors_by_group")
    widened = g.op("Mul", numbers, g.unsqueeze(factors, 2), name="widened_by_block")
    return g.op("Reshape", widened, g.constant([-1, columns]), name="widened")


def tensorrt_experts(
    g: GraphBuilder,
    x: ir.Value,
    router: ir.Value,
    stacks: Mapping[Projection, Stack],
    k: int,
    folder: str,
    activation: Activation,
    scales: ir.Value | None,
) -> ir.Value:
    """The layer for TensorRT and TensorRT-RTX, written out in the graph itself (see quantized.py), in its dtype.

    As in tensorrt.py's `moe`, every expert is computed for every row. Packed constants cannot be concatenated, so
    each is dequantized first. Experts are multiplied in groups of the size that tensorrt_experts.py's `at_a_time`
    gives, one group after the other. Each expert has its own static input scale. So inputs are divided by it and
    rounded with a scale of 1, and the product is multiplied by it.
    """
    shares = router_shares(g, router, g.constant([k]))
    shares = g.unsqueeze(g.op("Transpose", shares, name="by_expert", perm=[1, 0]), 2)
    gate = stacks["gate"]
    count = at_a_time(len(gate), 2 * gate.rows * gate.columns * g.dtype.numpy().itemsize)
    steps = len(gate) // count
    x = g.unsqueeze(x, 0)

    def some(x: ir.Value, first: int, share: ir.Value) -> ir.Value:
        """The contribution of `count` experts, in float32."""

        def linear(name: Projection, value: ir.Value) -> ir.Value:
            """[1 or count, rows, columns] -> [count, rows, rows of the stack]"""
            with g.scope(name):
                return _tensorrt_linear(g, stacks[name].part(first, count), value, folder)

        gate, up = (g.to_float(linear(name, x)) for name in ("gate", "up"))
        gated = g.op("Mul", activated(g, gate, activation), up, name="gated")
        y = shared(g, linear("down", g.to_dtype(gated, FLOAT)), share)
        if scales is not None:
            y = g.op(
                "Mul", y, g.unsqueeze(g.slice(scales, first, first + count, axis=0), 1, 2), name="scaled"
            )
        return g.op("ReduceSum", y, g.constant([0]), name="sum", keepdims=0)

    by_step = g.multi("Split", shares, outputs=steps, name="shares", axis=0, num_outputs=steps)
    total = some(x, 0, by_step[0])
    for i, share in enumerate(by_step[1:], 1):
        total = g.op("Add", total, some(after(g, x, total), i * count, share), name="total")
    return g.to_dtype(total, FLOAT)


def _tensorrt_linear(g: GraphBuilder, stack: Stack, x: ir.Value, folder: str) -> ir.Value:
    kind, factor = stack.kind, None
    each = [tensors(g, stored, folder, packed_as_bytes=False) for stored in stack.stored]
    if kind is None:
        weights = [g.cast(g.raw_weight(info, folder), g.dtype) for info in stack.plain]
    else:
        weights = [LOWERINGS[kind.scheme].tensorrt_weight(g, kind, inputs) for inputs in each]
        if kind.ordered:
            x = _in_order(g, x, _by_stack(g, each, "order"))
        if kind.smoothed:
            smooth = [g.unsqueeze(g.cast(inputs["pre_quant_scale"], g.dtype), 0, 1) for inputs in each]
            x = g.op("Mul", x, _concat(g, smooth), name="smoothed")
        if kind.activations == "row":
            x, factor = split_rows(g, g.to_float(x))
            scale = input_scale(g, kind, {})
        elif kind.activations == "static":
            factor = _concat(g, [g.unsqueeze(inputs["input_scale"], 0, 1, 2) for inputs in each])
            x, scale = g.op("Div", g.to_float(x), factor, name="by_scale"), g.scalar(1.0, FLOAT)
        if factor is not None:
            x = LOWERINGS[kind.scheme].tensorrt_input(g, scale, g.to_dtype(x, FLOAT))
    weight = _concat(g, [g.unsqueeze(value, 0) for value in weights])
    y = g.op("MatMul", x, g.op("Transpose", weight, name="transposed", perm=[0, 2, 1]), name="product")
    if kind is not None and kind.zero_term:  # only integers have it, whose inputs are not rounded here
        return _with_zeros(g, y, x, _by_stack(g, each, "zero_term"))
    if factor is None:
        return y
    return g.to_dtype(g.op("Mul", g.to_float(y), factor, name="rescaled"), FLOAT)


def _by_stack(g: GraphBuilder, each: Sequence[Mapping[str, ir.Value]], name: str) -> ir.Value:
    return _concat(g, [g.unsqueeze(inputs[name], 0) for inputs in each])


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
    return g.to_dtype(g.op("Add", g.to_float(y), zeros, name="with_zeros"), FLOAT)
