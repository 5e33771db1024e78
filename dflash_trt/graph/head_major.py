"""What the dialects for GPUs share: the heads of a row lie apart, [B,n,S,d] in attention and in caches."""

from __future__ import annotations

import onnx_ir as ir

from dflash_trt.graph.builder import FLOAT, GraphBuilder
from dflash_trt.graph.dialect import Dialect


class HeadMajor(Dialect):
    """The layout, and the activation of experts."""

    by_head = True
    # For adjacent layers, TensorRT would build a joined copy itself, once per profile. Other layers it leaves
    # separate.
    joins_quantized = True

    def _swiglu(self, g: GraphBuilder, x: ir.Value) -> ir.Value:
        """Interleaved gate and up, 2I numbers in a row -> I. In float32, where no limit overflows."""

        def attribute(name: str) -> ir.Value:
            reference = ir.RefAttr("value_float", name, ir.AttributeType.FLOAT)
            return g.op("Constant", name=name, value_float=reference)

        limit = attribute("limit")
        gate, up = (
            g.op("Slice", g.to_float(x), *map(g.constant, ([i], [2**31], [-1], [2])), name=name)
            for i, name in enumerate(("gate", "up"))
        )
        gate = g.op("Min", gate, limit, name="gate_cut")
        up = g.op(
            "Max", g.op("Min", up, limit, name="up_cut"), g.op("Neg", limit, name="least"), name="up_clamped"
        )
        share = g.op("Sigmoid", g.op("Mul", gate, attribute("alpha"), name="scaled_gate"), name="share")
        up = g.op("Add", up, attribute("beta"), name="shifted")
        return g.from_dtype(g.op("Mul", g.op("Mul", gate, share, name="activated"), up, name="gated"), FLOAT)
