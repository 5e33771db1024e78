"""INT8 layers with one scale for each output, for ONNX Runtime.

INT8ChannelLinear(x [rows,in], weight int8 [out,in], scale [out]) -> y [rows,out]

Each row of x is divided by its largest magnitude and rounded to 16 bits, in two bytes: high / 127 + low / (127 * 256).
Both are rows of one product of bytes, which reads the weights once and whose sums are exact integers, so a row has the
same bits whatever other rows the pass has. On x86 without AMX or VNNI such sums saturate, which
`engines/onnxruntime/products.py` finds out.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from dflash_trt.graph import MICROSOFT_DOMAIN
from dflash_trt.graph.builder import FLOAT, GraphBuilder
from dflash_trt.graph.quantized import QuantizedLinear, prepared, split_rows

OPERATOR = "INT8ChannelLinear"
_STEP = 1 / 127  # of the high byte, for a row whose largest magnitude is 1
_FINER = 1 / 256  # the low byte's step, in steps of the high byte


def onnxruntime_channels(g: GraphBuilder, x: ir.Value, layer: QuantizedLinear) -> ir.Value:
    """A layer with one scale for each output, x in float32."""
    stored, folder, bias = layer.stored, layer.folder, layer.bias
    scale = g.raw_weight(stored.scale, folder)
    assert scale.dtype is not None
    with g.scope(layer.name):
        if stored.pre_quant_scale is not None:
            x = prepared(g, x, None, g.raw_weight(stored.pre_quant_scale, folder), FLOAT)
        scale = g.cast(g.reinterpret(scale, scale.dtype, stored.scale.shape[:1]), FLOAT, name="scale")
    (y,) = g.call(_body(), x, g.raw_weight(stored.weight, folder), scale, name=layer.name)
    return y if bias is None else g.op("Add", y, bias, name=f"{layer.name}/biased")


def _body() -> ir.Function:
    g = GraphBuilder(OPERATOR)
    x = g.input("x", FLOAT, ["rows", "in"])
    weight = g.input("weight", ir.DataType.INT8, ["out", "in"])
    scale = g.input("scale", FLOAT, ["out"])
    zero, step = g.constant(128, np.uint8), g.constant(_STEP, np.float32)
    x, largest = split_rows(g, x)
    high = g.op("QuantizeLinear", x, step, zero, name="high")
    rest = g.op("Sub", x, g.op("DequantizeLinear", high, step, zero, name="rounded"), name="rest")
    low = g.op("QuantizeLinear", rest, g.constant(_STEP * _FINER, np.float32), zero, name="low")
    columns = g.op("Transpose", weight, name="columns", perm=[1, 0])  # once, as the engine loads
    y = g.op(
        "MatMulIntegerToFloat",
        *(g.op("Concat", high, low, name="bytes", axis=0), columns, step, scale, zero),
        name="product",
        domain=MICROSOFT_DOMAIN,
    )
    # high + low / 256 as a product: one pass over both halves. Its products are exact, so it rounds once, as Add does.
    y = g.op("Reshape", y, g.constant([2, -1]), name="halves")
    y = g.op("MatMul", g.constant([[1, _FINER]], np.float32), y, name="sum")
    y = g.op("Reshape", y, g.shape(-1, g.dim(scale, 0, name="out")), name="rows")
    g.output(g.op("Mul", y, largest), "y", FLOAT, ["rows", "out"])
    g.graph.opset_imports[MICROSOFT_DOMAIN] = 1
    return g.function()
