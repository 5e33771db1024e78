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
from collections.abc import Callable, Mapping
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
from dflash_trt.graph.lowering import LOWERINGS, Values, lookup
from dflash_trt.graph.quantized import INPUTS, operator_name, product, zero_points

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
    def first(self) -> StoredLinear | None:
        """The first expert's layer, as whose all are stored; None for floating point."""
        return self.stored[0] if self.stored else None

    @property
    def parts(self) -> list[str]:
        """The names of the operator's inputs that are present."""
        if not self.stored:
            return ["weight"]
        return [name for name in INPUTS[:-1] if getattr(self.stored[0], name) is not None]


@dataclass(frozen=True, kw_only=True)
class ExpertLayer:
    """A layer of experts with gate and up apart. Each row has its `k` best.

    folder: of the weights. widened_bytes: bytes of all experts of the model in float32. activation: of gates.
    scales: float32 [E], of each expert's output; None: 1.
    """

    stacks: Mapping[Projection, Stack]
    folder: str
    k: int
    widened_bytes: int
    activation: Activation = "silu"
    scales: ir.Value | None = None


def onnxruntime_inputs(g: GraphBuilder, stack: Stack, folder: str) -> list[ir.Value]:
    """The operator's inputs for one projection. Codes and their scales are bytes: no other type can be gathered."""
    if stack.plain:
        return [stacked(g, [g.raw_weight(info, folder) for info in stack.plain])]
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
    inputs = {part: stacked(g, values) for part, values in each.items()}
    for part in ("scale", "input_scale"):
        info = getattr(stack.stored[0], part)
        if info is not None and info.dtype in ("BF16", "F16"):
            inputs[part] = g.op("Cast", inputs[part], name=part, to=int(FLOAT))
    if "zero_point" in inputs:
        inputs["zero_point"] = zero_points(g, inputs["zero_point"], stack.stored[0])
    return list(inputs.values())


def stacked(g: GraphBuilder, values: list[ir.Value]) -> ir.Value:
    """Values of all experts, one after the other on the first axis."""
    return g.op("Concat", *values, name="stacked", axis=0)


def onnxruntime_experts(layer: ExpertLayer, *, resident: bool) -> ir.Function:
    """The body for ONNX Runtime: a loop over the experts that some row chose, in float32.

    `resident`: all experts are widened to float32 as the engine loads. Otherwise every pass widens those in use, one
    at a time, so that what it reads and holds follows their number.
    """
    stacks, activation, scaled = layer.stacks, layer.activation, layer.scales is not None
    kinds = "_".join(_signature(stack) for stack in stacks.values())
    kinds += f"_{activation}" * (activation != "silu") + "_scaled" * scaled
    g = GraphBuilder(f"QuantizedExperts_{kinds}")
    x, router = g.input("x", FLOAT, ["rows", "D"]), g.input("router_logits", FLOAT, ["rows", "E"])
    given: dict[Projection, dict[str, ir.Value]] = {}
    for name, stack in stacks.items():
        given[name] = {part: ir.Value(name=f"{name}_{part}") for part in stack.parts}
        g.graph.inputs.extend(given[name].values())
    by_expert = {name: widened_by_expert(g, stack, given[name], resident) for name, stack in stacks.items()}
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

    def linear(name: Projection, expert: ir.Value, value: ir.Value) -> ir.Value:
        stack, stored = stacks[name], stacks[name].first
        own = {
            part: body.op("Gather", whole, expert, name=f"{name}_{part}", axis=0)
            for part, whole in by_expert[name].items()
        }
        if stored is None:
            weight = body.op("Cast", own["weight"], name=name, to=int(FLOAT))
            return body.op("Gemm", value, weight, name=f"{name}_product", transB=1)
        weight = own["weight"] if resident else _widened(body, stored, stack.columns, own)
        return product(body, stored, own, value, weight)

    _add_expert(body, linear, x, (active, best, shares), activation)
    count = g.op("Size", active, name="count")
    y = g.op("Loop", count, None, nothing, name="loop", body=body.graph)
    g.output(pairs.own(y), "y", FLOAT, ["rows", "D"])
    return g.function([ir.Attr("k", ir.AttributeType.UNDEFINED, None)])


def _add_expert(
    body: GraphBuilder,
    linear: Callable[[Projection, ir.Value, ir.Value], ir.Value],
    x: ir.Value,
    chosen: tuple[ir.Value, ir.Value, ir.Value],
    activation: Activation,
) -> None:
    """The body of the loop: add to the total what one expert gives for the rows that chose it.

    `linear`: a projection of an expert. `chosen`: the experts in use, and by row its experts and their shares.
    """
    active, best, shares = chosen
    step, go_on, total = (
        ir.val(f"{body.graph.name}/{name}", dtype, shape)
        for name, dtype, shape in (("step", INT64, []), ("go_on", BOOL, []), ("total", FLOAT, ["rows", "D"]))
    )
    body.graph.inputs.extend([step, go_on, total])
    expert = body.op("Gather", active, step, name="expert", axis=0)
    places = body.op("NonZero", body.op("Equal", best, expert, name="is_chosen"), name="places")
    places = body.op("Transpose", places, name="by_place", perm=[1, 0])  # [n, 2]: row, and which of its k
    rows = body.slice(places, 0, 1, axis=1, name="rows")  # [n, 1]
    asking = body.op("GatherND", x, rows, name="asking")
    gate, up = (linear(name, expert, asking) for name in ("gate", "up"))
    hidden = body.op("Mul", activated(body, gate, activation), up, name="gated")
    share = body.unsqueeze(body.op("GatherND", shares, places, name="share"), 1)
    y = body.op("Mul", linear("down", expert, hidden), share, name="weighted")
    y = body.op("ScatterND", total, rows, y, name="added", reduction="add")
    body.output(body.op("Identity", go_on), f"{go_on.name}_out", BOOL, [])
    body.output(y, f"{total.name}_out", FLOAT, ["rows", "D"])


def _signature(stack: Stack) -> str:
    """The traits that the body depends on, besides the layer's size, which is the same throughout a model."""
    if (stored := stack.first) is None:
        return "Linear"
    per_row = stored.format.scale_by_row and math.prod(stored.scale.shape) > 1
    return operator_name(stored) + "_per_row" * per_row


def widened_by_expert(g: GraphBuilder, stack: Stack, given: Values, resident: bool) -> dict[str, ir.Value]:
    """Everything with an axis of experts in front; `weight` in float32 where it is resident."""
    stored, rows = stack.first, stack.rows
    if stored is None:
        return {"weight": g.op("Reshape", given["weight"], g.constant([-1, rows, stack.columns]))}
    group = stored.algorithm.group_size

    def per_row(name: str) -> ir.Value:
        """[E * rows, 1] of one number for each expert, or for each row."""
        value = given[name]
        if name == "global_scale" or math.prod(stored.scale.shape) == 1:
            value = g.op("Reshape", value, g.constant([-1, 1]), name=f"{name}_by_expert")
            experts = g.dim(value, 0, name="experts")
            value = g.op("Expand", value, g.shape(experts, rows), name=f"{name}_of_rows")
        return g.op("Reshape", value, g.constant([-1, 1]), name=f"{name}_per_row")

    parts = dict(given)
    expanded = None if stored.algorithm.scheme == FP8.name and group else stored.format.expanded
    if stored.algorithm.group_rows > 1:
        parts["scale"] = _by_row(g, stack, stored, given["scale"])
    elif expanded is not None:
        parts[expanded] = per_row(expanded)
    shapes = {
        "weight": stored.weight.shape,
        "scale": (rows, stack.columns // (group or stack.columns)),
        "global_scale": (rows, 1),
        "zero_point": (rows, stack.columns // (group or stack.columns)),
        "order": (stack.columns,),
        "pre_quant_scale": (stack.columns,),
        "input_scale": (),
    }
    if resident:
        shapes["weight"] = (rows, stack.columns)
        parts["weight"] = _widened(g, stored, stack.columns, parts)
        parts = {name: v for name, v in parts.items() if name not in ("scale", "global_scale", "zero_point")}
    return {
        name: g.op("Reshape", value, g.constant([-1, *shapes[name]]), name=f"{name}_by_expert")
        for name, value in parts.items()
    }


def _by_row(g: GraphBuilder, stack: Stack, stored: StoredLinear, scale: ir.Value) -> ir.Value:
    """[E * rows, groups] from the scales of blocks, stacked."""
    (blocks, groups), group_rows = stored.scale.shape, stored.algorithm.group_rows
    scale = g.op("Reshape", scale, g.constant([-1, blocks, 1, groups]), name="scale_by_expert")
    scale = g.op("Expand", scale, g.constant([1, 1, group_rows, 1]), name="scale_of_rows")
    scale = g.op("Reshape", scale, g.constant([-1, blocks * group_rows, groups]), name="scale_by_row")
    scale = g.slice(scale, 0, stack.rows, axis=1, name="own")
    return g.op("Reshape", scale, g.constant([-1, groups]), name="scale_per_row")


def _widened(g: GraphBuilder, stored: StoredLinear, columns: int, parts: Values) -> ir.Value:
    """Weights of one expert or of all, [rows, columns]: exactly the numbers that the codes stand for."""
    form, group = stored.format, stored.algorithm.group_size
    lowering, tables = LOWERINGS[form.name], form.byte_values
    if stored.in_blocks:
        tables = unsigned_values(form.numbers_in_byte, middle=stored.zero_point is None)
    in_byte = [lookup(g, g.constant(table, np.float32), parts["weight"]) for table in tables.T]
    if not group:
        return g.op("Mul", in_byte[0], lowering.expert_factors(g, stored, parts), name="widened")
    if columns % group:
        raise BuildError(
            f"experts with {columns} inputs are in blocks of {group} columns, of which the last is smaller: "
            "such experts are not supported"
        )
    numbers = in_byte[0]
    if form.numbers_in_byte == 2:
        axis = -1 if stored.by_row else 1  # the two in a byte are neighbours in a row, or in a column
        halves = [g.unsqueeze(half, axis) for half in in_byte]
        numbers = g.op("Concat", *halves, name="numbers", axis=axis)
    groups = columns // group
    numbers = g.op("Reshape", numbers, g.constant([-1, groups, group]), name="numbers_by_block")
    if stored.zero_point is not None:
        points = g.op("Cast", parts["zero_point"], name="zero_points", to=int(FLOAT))
        numbers = g.op(
            "Sub",
            numbers,
            g.op("Reshape", points, g.constant([-1, groups, 1]), name="by_group"),
            name="numbers",
        )
    factors = lowering.expert_factors(g, stored, parts)
    factors = g.op("Reshape", factors, g.constant([-1, groups]), name="factors_by_group")
    widened = g.op("Mul", numbers, g.unsqueeze(factors, 2), name="widened_by_block")
    return g.op("Reshape", widened, g.constant([-1, columns]), name="widened")
