"""FP8 layers: QuantizeLinear and DequantizeLinear of E4M3, which all engines have."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from dflash_trt.formats.numbers import E4M3_MAX
from dflash_trt.graph.builder import GraphBuilder

from . import bodies
from .base import LinearKind, Lowering


class FP8Lowering(Lowering):
    def onnxruntime_weight(
        self, g: GraphBuilder, kind: LinearKind, inputs: Mapping[str, ir.Value], x: ir.Value, resident: bool
    ) -> ir.Value:
        weight, scale = inputs["weight"], inputs["scale"]
        if not resident:
            return g.op("DequantizeLinear", weight, scale, name="widened", axis=0)
        column = g.op("Reshape", scale, g.constant([-1, 1]), name="column")
        return g.op("Mul", g.op("Cast", weight, to=int(bodies.FLOAT)), column, name="widened")

    def tensorrt_weight(self, g: GraphBuilder, kind: LinearKind, inputs: Mapping[str, ir.Value]) -> ir.Value:
        return g.op(
            *("DequantizeLinear", inputs["weight"], inputs["scale"]),
            name="widened",
            axis=0,
            output_dtype=int(g.dtype),
        )

    unit_input_scale = 1 / E4M3_MAX

    def onnxruntime_input(self, g: GraphBuilder, scale: ir.Value, x: ir.Value) -> ir.Value:
        codes = g.op("QuantizeLinear", x, scale, name="x_codes", output_dtype=int(bodies.E4M3))
        return g.op("DequantizeLinear", codes, scale, name="x_rounded")

    def tensorrt_input(self, g: GraphBuilder, scale: ir.Value, x: ir.Value) -> ir.Value:
        codes = g.op("QuantizeLinear", x, scale, name="x_codes", output_dtype=int(bodies.E4M3))
        return g.op("DequantizeLinear", codes, scale, name="x_rounded", output_dtype=int(g.dtype))

    def expert_factors(self, g: GraphBuilder, parts: Mapping[str, ir.Value]) -> ir.Value:
        return parts["scale"]
