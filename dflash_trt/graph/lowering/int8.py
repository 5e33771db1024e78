"""INT8 layers in groups: blocked DequantizeLinear."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from dflash_trt.graph.builder import GraphBuilder

from . import bodies
from .base import LinearKind, Lowering


class INT8Lowering(Lowering):
    """Blocked DequantizeLinear, or a product of blocks that can be folded."""

    def onnxruntime_weight(
        self, g: GraphBuilder, kind: LinearKind, inputs: Mapping[str, ir.Value], x: ir.Value, resident: bool
    ) -> ir.Value:
        """Numbers times the scales of their groups."""
        weight, block = inputs["weight"], kind.group_size
        scale = g.op("Cast", inputs["scale"], name="scale_float", to=int(bodies.FLOAT))
        if not resident:
            return g.op("DequantizeLinear", weight, scale, name="widened", axis=1, block_size=block)
        numbers = g.op("Cast", weight, to=int(bodies.FLOAT))
        numbers = g.op("Reshape", numbers, g.constant([0, -1, block]), name="numbers_by_block")
        return bodies.times_factors(g, numbers, scale)

    def tensorrt_weight(self, g: GraphBuilder, kind: LinearKind, inputs: Mapping[str, ir.Value]) -> ir.Value:
        """In groups, or in one for each row."""
        weight = inputs["weight"]
        assert weight.shape is not None
        columns = kind.group_size or int(str(weight.shape[1]))  # a row may share one scale
        scales = g.cast(inputs["scale"], g.dtype, name="scales")
        return g.op("DequantizeLinear", weight, scales, name="widened", axis=1, block_size=columns)
