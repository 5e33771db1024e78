"""Experts with gate and up apart, quantized or with an activation that `dflash::MoE` lacks (Qwen3-MoE, Gemma 4).

QuantizedExperts(x [rows,D], router_logits [rows,E], and for gate, up and down each: weight, scale, zero_point, order,
    pre_quant_scale, each concatenated over all experts; expert_scales [E]; k) -> y [rows,D]

y = sum over the k best experts e of p_e * s_e * down_e(act(gate_e(x)) * up_e(x)), p = softmax over the k best logits.
Without expert_scales, s is 1. act is silu, or the activation in the operator's name. This operator is ONNX Runtime's,
whose layers are in floating point or integers in blocks; the other engines get the layers of quantized.py, with inputs
rounded as the format does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import onnx_ir as ir

from dflash_trt.checkpoint.linears import StoredLinear
from dflash_trt.checkpoint.schema import Activation
from dflash_trt.checkpoint.tensors import TensorInfo
from dflash_trt.formats.base import BLOCK
from dflash_trt.graph.builder import BOOL, FLOAT, INT64, GraphBuilder
from dflash_trt.graph.experts import PairedRows, activated
from dflash_trt.graph.lowering import Values
from dflash_trt.graph.quantized import prepared

Projection = Literal["gate", "up", "down"]
_PARTS = ("weight", "scale", "zero_point", "order", "pre_quant_scale")


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
        return [name for name in _PARTS if getattr(self.stored[0], name) is not None]


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
    """The operator's inputs for one projection."""
    layers = [{"weight": info} for info in stack.plain] or [
        {part: getattr(stored, part) for part in stack.parts} for stored in stack.stored
    ]
    inputs = {
        part: stacked(g, [g.raw_weight(layer[part], folder) for layer in layers]) for part in stack.parts
    }
    if "scale" in inputs:
        inputs["scale"] = g.op("Cast", inputs["scale"], name="scale", to=int(FLOAT))
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
    by_expert: dict[Projection, dict[str, ir.Value]] = {}
    for name, stack in stacks.items():
        inputs = {part: ir.Value(name=f"{name}_{part}") for part in stack.parts}
        g.graph.inputs.extend(inputs.values())
        by_expert[name] = _by_expert(g, stack, inputs, resident)
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
        parts = {
            part: body.op("Gather", whole, expert, name=f"{name}_{part}", axis=0)
            for part, whole in by_expert[name].items()
        }
        weight = parts["weight"]
        if stacks[name].first is None:
            weight = body.op("Cast", weight, name=name, to=int(FLOAT))
        elif not resident:
            weight = _widened(body, stacks[name], parts)
        value = prepared(body, value, parts.get("order"), parts.get("pre_quant_scale"), FLOAT)
        return body.op("Gemm", value, weight, name=f"{name}_product", transB=1)

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
    return f"INT{_bits(stored)}x{stack.columns // stored.scale.shape[1]}_{'_'.join(stack.parts[2:])}"


def _bits(stored: StoredLinear) -> int:
    return 8 * stored.weight.shape[2] // BLOCK


def _by_expert(g: GraphBuilder, stack: Stack, parts: Values, resident: bool) -> dict[str, ir.Value]:
    """Everything with an axis of experts in front; `weight` in float32 where it is resident."""
    shapes: dict[str, list[int]] = {"weight": [stack.rows, stack.columns]}
    if (stored := stack.first) is not None:
        groups, row = [stack.rows, stored.scale.shape[1]], [stack.columns]
        shapes |= {"scale": groups, "zero_point": groups, "order": row, "pre_quant_scale": row}
        if resident:
            widened = {"weight": _widened(g, stack, parts)}
            parts = widened | {name: parts[name] for name in ("order", "pre_quant_scale") if name in parts}
        else:
            shapes["weight"] = [stack.rows, stack.columns * _bits(stored) // 8]
    return {
        name: g.op("Reshape", value, g.constant([-1, *shapes[name]]), name=f"{name}_by_expert")
        for name, value in parts.items()
    }


def _widened(g: GraphBuilder, stack: Stack, parts: Values) -> ir.Value:
    """Weights of one expert or of all, [rows, columns]: exactly the numbers that the codes stand for."""
    stored, codes = stack.first, parts["weight"]
    assert stored is not None
    groups, bits = stored.scale.shape[1], _bits(stored)
    if bits == 4:
        low = g.op("BitwiseAnd", codes, g.constant(15, np.uint8), name="low")
        high = g.op("BitShift", codes, g.constant(4, np.uint8), name="high", direction="RIGHT")
        codes = g.op("Concat", *(g.unsqueeze(half, -1) for half in (low, high)), name="codes", axis=-1)

    def by_group(value: ir.Value, size: int) -> ir.Value:
        value = g.op("Cast", value, name="as_float", to=int(FLOAT))
        return g.op("Reshape", value, g.constant([-1, groups, size]), name="by_group")

    zero = (
        by_group(parts["zero_point"], 1) if "zero_point" in parts else g.constant(1 << (bits - 1), np.float32)
    )
    numbers = g.op("Sub", by_group(codes, stack.columns // groups), zero, name="numbers")
    widened = g.op("Mul", numbers, by_group(parts["scale"], 1), name="widened_by_block")
    return g.op("Reshape", widened, g.constant([-1, stack.columns]), name="widened")
