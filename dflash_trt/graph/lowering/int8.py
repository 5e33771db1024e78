"""INT8 layers in groups, for ONNX Runtime only."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from dflash_trt.errors import BuildError
from dflash_trt.graph.builder import GraphBuilder

from . import bodies
from .base import LinearKind, Lowering


class INT8Lowering(Lowering):
    def onnxruntime_weight(
        self, g: GraphBuilder, kind: LinearKind, inputs: Mapping[str, ir.Value], x: ir.Value, resident: bool
    ) -> ir.Value:
        scale = g.op("Cast", inputs["scale"], name="scale_float", to=int(bodies.FLOAT))
        if not resident:
            return g.op(
                *("DequantizeLinear", inputs["weight"], scale),
                name="widened",
                axis=1,
                block_size=kind.group_size,
            )
        numbers = g.op("Cast", inputs["weight"], to=int(bodies.FLOAT))
        numbers = g.op("Reshape", numbers, g.constant([0, -1, kind.group_size]), name="numbers_by_block")
        return bodies.times_factors(g, numbers, scale)

    def tensorrt_weight(self, g: GraphBuilder, kind: LinearKind, inputs: Mapping[str, ir.Value]) -> ir.Value:
        raise BuildError(
            "INT8 weights are in groups of 32, which TensorRT does not read: use --engine onnxruntime, or quantize "
            "to int4 or fp8"
        )

    def expert_factors(self, g: GraphBuilder, kind: LinearKind, parts: Mapping[str, ir.Value]) -> ir.Value:
        return g.op("Cast", parts["scale"], name="factors", to=int(bodies.FLOAT))
