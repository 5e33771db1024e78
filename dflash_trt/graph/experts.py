"""`dflash::MoE`: a layer of gated experts. Each row uses the k experts with the largest router logits.

MoE(x [rows,D], router_logits [rows,E], gate_up, gate_up_scales, gate_up_bias [E,2I], down, down_scales,
    down_bias [E,D]; k, alpha, beta, limit) -> y [rows,D]

y = sum over the k best experts e of p_e * (down_e(act(gate_up_e(x))) + bias), p = softmax over the k best logits.
gate_up interleaves gate and up: row 2j is gate j, row 2j+1 is up j. act = (up + beta) * gate * sigmoid(alpha * gate).
The gate is clipped at `limit`, up at -limit .. limit. Weights by kind of storage:
    "float"  gate_up [E,2I,D], down [E,D,I] in BF16, FP16 or FP32
    "mxfp4"  blocks uint8 [E,2I,D/32,16] and [E,D,I/32,16], two E2M1 numbers per byte, low half first;
             scales uint8 [E,2I,D/32] and [E,D,I/32]: 2**(s-127) for 32 numbers (OCP Microscaling Formats v1.0)
Absent inputs are left out of the signature: "float" has no scales, and biases are optional.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import onnx_ir as ir

from dflash_trt.checkpoint.schema import Activation
from dflash_trt.formats.numbers import BYTE_TO_PAIR, E8M0
from dflash_trt.graph import MICROSOFT_DOMAIN
from dflash_trt.graph.builder import FLOAT, GraphBuilder

Storage = Literal["float", "mxfp4"]


def activated(g: GraphBuilder, gate: ir.Value, activation: Activation) -> ir.Value:
    """The activation of a gate."""
    if activation == "gelu_tanh":
        return g.op("Gelu", gate, name="gelu", approximate="tanh")
    return g.op("Swish", gate, name="silu")


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The weights of one layer's experts, as inputs of `dflash::MoE`. Those with scales are in MXFP4."""

    gate_up: ir.Value
    down: ir.Value
    gate_up_scales: ir.Value | None = None
    gate_up_bias: ir.Value | None = None
    down_scales: ir.Value | None = None
    down_bias: ir.Value | None = None


def onnxruntime_moe(
    storage: Storage, weight_dtype: ir.DataType, *, biased: bool, resident: bool
) -> ir.Function:
    """The body for ONNX Runtime: its fused CPU operator, in float32, on weights widened in the graph (exactly).

    `resident`: all experts are widened when the engine loads, which then holds them in float32. Otherwise each pass
    widens just the experts that some row chose; what it reads follows their number.
    """
    g = GraphBuilder("MoE", opsets={MICROSOFT_DOMAIN: 1})
    x, router = g.input("x", FLOAT, ["rows", "D"]), g.input("router_logits", FLOAT, ["rows", "E"])
    tensors: list[ir.Value | None] = []
    for name, shape in (("gate_up", ["E", "2I", "D"]), ("down", ["E", "D", "I"])):
        packed = storage == "mxfp4"
        weight = g.input(
            name, ir.DataType.UINT8 if packed else weight_dtype, ["E", "O", "G", 16] if packed else shape
        )
        scales = g.input(f"{name}_scales", ir.DataType.UINT8, ["E", "O", "G"]) if packed else None
        tensors += [weight, scales, g.input(f"{name}_bias", FLOAT, ["E", "O"]) if biased else None]
    k = ir.RefAttr("value_int", "k", ir.AttributeType.INT)
    count = g.op("Reshape", g.op("Constant", name="k", value_int=k), g.constant([1]), name="count")
    pairs = PairedRows(g, router, count)
    x, router = pairs.extended(x), pairs.extended(router)
    if not resident:
        logits, best = pairs.extended(pairs.logits), pairs.extended(pairs.best)
        # Where logits tie, the operator would choose otherwise, and by what other rows brought in: leave it no choice.
        lowest = g.constant(np.finfo(np.float32).min, np.float32)
        none = g.op("Expand", lowest, g.op("Shape", router, name="all"), name="none")
        chosen = g.op("ScatterElements", none, best, logits, name="chosen", axis=1)
        # Sorted, and only those in use: the operator sees a layer that has no other experts.
        active = g.op("Unique", best, name="active", sorted=1)
        router = g.op("Gather", chosen, active, name="router_active", axis=1)
        tensors = [t and g.op("Gather", t, active, name=f"{t.name}_active", axis=0) for t in tensors]
    gate_up, gate_up_scales, gate_up_bias, down, down_scales, down_bias = tensors
    assert gate_up is not None
    assert down is not None
    y = g.op(
        "MoE",
        x,
        router,
        _widen(g, gate_up, gate_up_scales, resident),
        gate_up_bias,
        _widen(g, down, down_scales, resident),
        down_bias,
        domain=MICROSOFT_DOMAIN,
        activation_type="swiglu",
        swiglu_fusion=1,
        normalize_routing_weights=1,
        k=ir.RefAttr("k", "k", ir.AttributeType.INT),
        activation_alpha=ir.RefAttr("activation_alpha", "alpha", ir.AttributeType.FLOAT),
        activation_beta=ir.RefAttr("activation_beta", "beta", ir.AttributeType.FLOAT),
        swiglu_limit=ir.RefAttr("swiglu_limit", "limit", ir.AttributeType.FLOAT),
    )
    g.output(pairs.own(y), "y", FLOAT, ["rows", "D"])
    return g.function(declared())


class PairedRows:
    """The rows of a pass, and after them a second copy of each one that has an expert to itself.

    ONNX Runtime rounds the product of one row otherwise than that of several. With the copies no expert has just one
    row, and no row depends on which others share its experts.

    best [rows,k], logits [rows,k]: of `router` [rows,E], the k largest.
    """

    def __init__(self, g: GraphBuilder, router: ir.Value, k: ir.Value) -> None:
        self._g, self._count = g, g.dim(router, 0, name="count")
        self.logits, self.best = g.multi("TopK", router, k, outputs=2, name="best", axis=-1)
        none = g.op("Expand", g.constant(0), g.dim(router, 1, name="experts"), name="none")
        flat = g.op("Reshape", self.best, g.constant([-1]), name="flat")
        ones = g.op("Expand", g.constant(1), g.op("Shape", flat), name="ones")
        rows = g.op("ScatterElements", none, flat, ones, name="rows_of_expert", axis=0, reduction="add")
        fewest = g.op(
            "ReduceMin", g.op("Gather", rows, self.best), g.constant([1]), name="fewest", keepdims=0
        )
        self._alone = g.op("Equal", fewest, g.constant(1), name="alone")

    def extended(self, x: ir.Value) -> ir.Value:
        """x [rows, ...] with the copies."""
        g = self._g
        return g.op("Concat", x, g.op("Compress", x, self._alone, axis=0), name="with_copies", axis=0)

    def own(self, y: ir.Value) -> ir.Value:
        """y without the copies."""
        g = self._g
        return g.slice(y, 0, self._count, axis=0, name="own")


def _widen(g: GraphBuilder, weight: ir.Value, scales: ir.Value | None, resident: bool) -> ir.Value:
    """Stored weights to float32 [experts, out, in]."""
    if scales is None:
        return g.op("Cast", weight, name="widen", to=int(FLOAT))
    return widened_blocks(g, weight, scales, resident)


def widened_blocks(g: GraphBuilder, blocks: ir.Value, scales: ir.Value, resident: bool) -> ir.Value:
    """uint8 [E,O,G,16] and [E,O,G] -> float32 [E,O,G*32]: exactly, or infinity where a product reaches 2**128."""
    index, exponent = (g.op("Cast", t, name="index", to=int(ir.DataType.INT32)) for t in (blocks, scales))
    if resident:  # in few steps: until it has folded the whole graph, the engine holds what each step made
        numbers = g.op("Gather", g.constant(BYTE_TO_PAIR, np.float32), index, name="numbers")
        scale = g.op("Gather", g.constant(E8M0, np.float32), exponent, name="scale")
    else:  # in quick ones: on entries this small, Gather takes ten times as long as GatherElements on one axis
        halves = [_entries(g, BYTE_TO_PAIR[:, i], index, name) for i, name in enumerate(("low", "high"))]
        numbers = g.op("Concat", *(g.unsqueeze(half, 4) for half in halves), name="numbers", axis=4)
        scale = _entries(g, E8M0, exponent, "scale")
    scaled = g.op("Mul", numbers, g.unsqueeze(scale, 3, 4), name="scaled")  # [E,O,G,16,2]
    return g.op("Reshape", scaled, g.constant([0, 0, -1]), name="widened")


def _entries(g: GraphBuilder, table: np.ndarray, index: ir.Value, name: str) -> ir.Value:
    flat = g.op("Reshape", index, g.constant([-1]), name="flat")
    found = g.op("GatherElements", g.constant(table, np.float32), flat, name=name, axis=0)
    return g.op("Reshape", found, g.op("Shape", index, name="shape"), name="as_index")


def declared() -> list[ir.Attr]:
    """The attributes that a call must set."""
    return [ir.Attr(name, ir.AttributeType.UNDEFINED, None) for name in ("k", "alpha", "beta", "limit")]
