"""FP8 layers: QuantizeLinear and DequantizeLinear of E4M3, which all engines have."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from dflash_trt.formats.base import BLOCK
from dflash_trt.formats.numbers import E4M3_MAX, E8M0
from dflash_trt.graph.builder import GraphBuilder

from . import bodies
from .base import LinearKind, Lowering


class FP8Lowering(Lowering):
    """QuantizeLinear and DequantizeLinear; blocks of scales are repeated."""

    unit_input_scale = 1 / E4M3_MAX

    def operator(self, kind: LinearKind) -> str:
        """A body for each size of a block."""
        block = f"{kind.group_rows}x{kind.group_size}" if kind.group_size else ""
        return f"FP8Linear{block}{'Exponents' * kind.exponents}"

    def onnxruntime_weight(
        self, g: GraphBuilder, kind: LinearKind, inputs: Mapping[str, ir.Value], x: ir.Value, resident: bool
    ) -> ir.Value:
        """Numbers times the scales of their rows or blocks."""
        weight, scale = inputs["weight"], inputs["scale"]
        if not kind.group_size and not resident:
            return g.op("DequantizeLinear", weight, scale, name="widened", axis=0)
        if resident:
            numbers = g.op("Cast", weight, name="numbers", to=int(bodies.FLOAT))
        else:
            numbers = g.op("DequantizeLinear", weight, g.constant(1, np.float32), name="numbers")
        if not kind.group_size:
            column = g.op("Reshape", scale, g.constant([-1, 1]), name="column")
            return g.op("Mul", numbers, column, name="widened")
        rows, columns = g.dim(weight, 0, name="rows"), g.dim(weight, 1, name="columns")
        factors = self._repeated(g, self._factors(g, kind, scale), 0, kind.group_rows, rows)
        if not resident:  # a length that only the pass knows: nothing of the weight's size is folded
            columns = g.dim(x, 1, name="inputs")
        return g.op("Mul", numbers, self._repeated(g, factors, 1, kind.group_size, columns), name="widened")

    def _factors(self, g: GraphBuilder, kind: LinearKind, scale: ir.Value) -> ir.Value:
        if kind.exponents:
            return bodies.lookup(g, g.constant(E8M0, np.float32), scale)
        return g.op("Cast", scale, name="factors", to=int(bodies.FLOAT))

    def _repeated(self, g: GraphBuilder, x: ir.Value, axis: int, times: int, length: ir.Value) -> ir.Value:
        """[a, b] with each entry `times` times along an axis, of which the first `length` are kept."""
        if times == 1:
            return x
        shape = [1, 1, 1]
        shape[axis + 1] = times
        x = g.op("Expand", g.unsqueeze(x, axis + 1), g.constant(shape), name="repeated")
        shape_after = g.shape(-1, g.dim(x, 2)) if axis == 0 else g.constant([0, -1])
        x = g.op("Reshape", x, shape_after, name="repeated_rows" if axis == 0 else "repeated_columns")
        return g.op("Slice", x, g.constant([0]), length, g.constant([axis]), name="own")

    def tensorrt_weight(self, g: GraphBuilder, kind: LinearKind, inputs: Mapping[str, ir.Value]) -> ir.Value:
        """Codes and scales as they are stored. Blocks have an operator of the parser's own, because DequantizeLinear
        knows blocks along one axis only; the last block of an axis may be smaller.
        """
        weight, scale = inputs["weight"], inputs["scale"]
        if kind.exponents and (kind.group_rows, kind.group_size) == (1, BLOCK):
            return bodies.microscaled(g, weight, scale, name="widened")
        if kind.group_size:
            scale = self._block_scales(g, kind, scale)
            if inputs["scale"].shape != (1, 1):
                return g.op(
                    *("TRT_BlockDequantize", weight, scale),
                    name="widened",
                    domain=bodies.TRT_DOMAIN,
                    block_shape=[kind.group_rows, kind.group_size],
                    output_dtype=int(g.dtype),
                )
            scale = g.op("Reshape", scale, g.constant([]), name="scale")  # one block is a whole weight there
        return g.op("DequantizeLinear", weight, scale, name="widened", axis=0, output_dtype=int(g.dtype))

    def _block_scales(self, g: GraphBuilder, kind: LinearKind, scale: ir.Value) -> ir.Value:
        """Scales of blocks in float32 or in the graph's dtype: the compiler refuses others."""
        if kind.exponents:
            power = g.op("Cast", scale, name="exponents", to=int(bodies.FLOAT))
            power = g.op("Sub", power, g.constant(127, np.float32), name="powers")
            return g.op("Pow", g.constant(2, np.float32), power, name="scales")
        return scale if scale.dtype == g.dtype else g.cast(scale, bodies.FLOAT, name="scales")

    def onnxruntime_input(self, g: GraphBuilder, scale: ir.Value, x: ir.Value) -> ir.Value:
        """There and back, in float32."""
        codes = g.op("QuantizeLinear", x, scale, name="x_codes", output_dtype=int(bodies.E4M3))
        return g.op("DequantizeLinear", codes, scale, name="x_rounded")

    def tensorrt_input(self, g: GraphBuilder, scale: ir.Value, x: ir.Value) -> ir.Value:
        """There and back, in the graph's dtype."""
        codes = g.op("QuantizeLinear", x, scale, name="x_codes", output_dtype=int(bodies.E4M3))
        return g.op("DequantizeLinear", codes, scale, name="x_rounded", output_dtype=int(g.dtype))

    def expert_factors(self, g: GraphBuilder, kind: LinearKind, parts: Mapping[str, ir.Value]) -> ir.Value:
        """The scales; those of blocks in float32."""
        return self._factors(g, kind, parts["scale"]) if kind.group_size else parts["scale"]
