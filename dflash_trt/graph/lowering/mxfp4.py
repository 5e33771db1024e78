"""MXFP4 layers and stacks of experts: look-ups for ONNX Runtime, TensorRT's own operator there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from dflash_trt.formats.base import BLOCK
from dflash_trt.formats.numbers import BYTE_TO_PAIR, E8M0
from dflash_trt.graph.builder import GraphBuilder

from . import bodies
from .base import LinearKind, Lowering


class MXFP4Lowering(Lowering):
    """Look-ups of bytes and of exponents, or TensorRT's own operator."""

    pairs = bodies.E2M1

    def onnxruntime_weight(
        self, g: GraphBuilder, kind: LinearKind, inputs: Mapping[str, ir.Value], x: ir.Value, resident: bool
    ) -> ir.Value:
        """Looked up in tables."""
        tables = [BYTE_TO_PAIR[:, 0], BYTE_TO_PAIR[:, 1], E8M0]
        low, high, powers = (bodies.table(g, values, x, resident) for values in tables)
        numbers = bodies.by_block(g, low, high, inputs["weight"], BLOCK)
        return bodies.times_factors(g, numbers, bodies.lookup(g, powers, inputs["scale"]))

    def tensorrt_weight(self, g: GraphBuilder, kind: LinearKind, inputs: Mapping[str, ir.Value]) -> ir.Value:
        """By TensorRT's own operator."""
        return bodies.microscaled(g, inputs["weight"], inputs["scale"], name="widened")

    def expert_factors(self, g: GraphBuilder, kind: LinearKind, parts: Mapping[str, ir.Value]) -> ir.Value:
        """Powers of two."""
        return bodies.lookup(g, g.constant(E8M0, np.float32), parts["scale"])


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


def tensorrt_blocks(g: GraphBuilder, blocks: ir.Value, scales: ir.Value, steps: int) -> Sequence[ir.Value]:
    """One [E/steps,O,I] in the graph's dtype per step, from blocks [E,O,G,16] and scales [E,O,G]."""
    experts, rows, groups, _ = (int(str(n)) for n in blocks.shape or ())
    count = experts // steps
    fp4 = g.parts(blocks, steps, ir.DataType.FLOAT4E2M1, (count, rows, groups * BLOCK))
    exponents = g.parts(scales, steps, ir.DataType.UINT8, (count, rows, groups))
    widened = [bodies.microscaled(g, *pair, name="dequantize") for pair in zip(fp4, exponents, strict=True)]
    for weight in widened:
        weight.type = ir.TensorType(g.dtype)
    return widened
