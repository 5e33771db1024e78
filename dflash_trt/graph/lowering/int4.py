"""INT4 layers: blocked DequantizeLinear, with two rows or two columns in a byte."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from dflash_trt.checkpoint.linears import StoredLinear
from dflash_trt.graph.builder import GraphBuilder

from . import bodies
from .base import LinearKind, Lowering


class INT4Lowering(Lowering):
    """Blocked DequantizeLinear, or a product of blocks that can be folded."""

    def operator(self, kind: LinearKind) -> str:
        """A body for each size of a group and each packing."""
        return f"INT4Linear{kind.group_size}{'' if kind.by_row else 'x2'}"

    def weight(
        self, g: GraphBuilder, stored: StoredLinear, raw: ir.Value, *, packed_as_bytes: bool
    ) -> ir.Value:
        """[out, in], or [out/2, in, 2] where two rows share bytes."""
        rows, columns = stored.weight.shape
        return g.reinterpret(raw, bodies.INT4, (rows, 2 * columns) if stored.by_row else (rows, columns, 2))

    def onnxruntime_weight(
        self, g: GraphBuilder, kind: LinearKind, inputs: Mapping[str, ir.Value], x: ir.Value, resident: bool
    ) -> ir.Value:
        """Widened in the order of its bytes, then in rows."""
        weight = inputs["weight"]
        scale = g.op("Cast", inputs["scale"], name="scale_float", to=int(bodies.FLOAT))
        if not kind.by_row:  # the weight is [out/2, in, 2]: bring its scales, [out, groups], into that order
            pairs = g.op("Reshape", scale, g.shape(-1, 2, g.dim(scale, 1)), name="scale_pairs")
            scale = g.op("Transpose", pairs, name="scale_by_pair", perm=[0, 2, 1])
        if resident:
            split = [0, -1, kind.group_size, 2][: 3 if kind.by_row else 4]
            numbers = g.op("Cast", weight, to=int(bodies.FLOAT))
            numbers = g.op("Reshape", numbers, g.constant(split), name="by_block")
            widened = g.op("Mul", numbers, g.unsqueeze(scale, 2), name="widened_by_block")
            whole = [0, -1] if kind.by_row else [0, -1, 2]
            widened = g.op("Reshape", widened, g.constant(whole), name="widened")
        else:
            block = kind.group_size
            widened = g.op("DequantizeLinear", weight, scale, name="widened", axis=1, block_size=block)
        if kind.by_row:
            return widened
        by_row = g.op("Transpose", widened, name="by_row", perm=[0, 2, 1])
        return g.op("Reshape", by_row, g.shape(-1, g.dim(x, 1)), name="rows")

    def tensorrt_weight(self, g: GraphBuilder, kind: LinearKind, inputs: Mapping[str, ir.Value]) -> ir.Value:
        """By row, as `int4_by_row` writes it."""
        weight, scales = inputs["weight"], g.cast(inputs["scale"], g.dtype, name="scales")
        return g.op("DequantizeLinear", weight, scales, name="widened", axis=1, block_size=kind.group_size)
