"""INT8 layers with one scale for each output, for ONNX Runtime.

Each row of x is divided by the root of its mean square, which one node gives beside the quotient. No number of the row
is then larger than the root of their count, and it is rounded to 16 bits of that, in two bytes: high + low / 256. Both
are rows of one product of bytes, which reads the weights once and whose sums are exact integers, so a row has the same
bits whatever other rows the pass has. On x86 without AMX or VNNI such sums saturate, which
`engines/onnxruntime/products.py` finds out.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from dflash_trt.graph import MICROSOFT_DOMAIN
from dflash_trt.graph.builder import FLOAT, GraphBuilder
from dflash_trt.graph.quantized import TINY, QuantizedLinear, prepared

PRODUCT = "MatMulIntegerToFloat"
_FINER = 1 / 256  # the low byte's step, in steps of the high byte


def onnxruntime_channels(g: GraphBuilder, x: ir.Value, layer: QuantizedLinear) -> ir.Value:
    """x [rows,in] in float32 through a layer of int8 [out,in] and scales [out]."""
    stored, folder, bias = layer.stored, layer.folder, layer.bias
    outputs, inputs = stored.weight.shape
    size = inputs**0.5 / 127
    zero, step = g.constant(128, np.uint8), g.constant(size, np.float32)
    g.graph.opset_imports[MICROSOFT_DOMAIN] = 1
    with g.scope(layer.name):
        if stored.pre_quant_scale is not None:
            x = prepared(g, x, None, g.raw_weight(stored.pre_quant_scale, folder), FLOAT)
        scale = g.raw_weight(stored.scale, folder)
        assert scale.dtype is not None
        scale = g.cast(g.reinterpret(scale, scale.dtype, [outputs]), FLOAT, name="scale")
        ones = g.constant(np.ones(inputs), np.float32)
        x, inverse = g.multi(
            "SimplifiedLayerNormalization", x, ones, outputs=2, name="by_row", axis=-1, epsilon=TINY
        )
        high = g.op("QuantizeLinear", x, step, zero, name="high")
        rest = g.op("Sub", x, g.op("DequantizeLinear", high, step, zero, name="rounded"), name="rest")
        low = g.op("QuantizeLinear", rest, g.constant(size * _FINER, np.float32), zero, name="low")
        # Transposed once, as the engine loads.
        columns = g.op("Transpose", g.raw_weight(stored.weight, folder), name="columns", perm=[1, 0])
        y = g.op(
            PRODUCT,
            *(g.op("Concat", high, low, name="bytes", axis=0), columns, step, scale, zero),
            name="product",
            domain=MICROSOFT_DOMAIN,
        )
        # high + low / 256 in one pass over both halves. Its products are exact, so it rounds once, as Add does.
        y = g.op("Reshape", y, g.constant([2, -1]), name="halves")
        y = g.op("MatMul", g.constant([[1, _FINER]], np.float32), y, name="sum")
        y = g.op("Reshape", y, g.constant([-1, outputs]), name="rows")
        y = g.op("Div", y, inverse, name="rescaled")
        return y if bias is None else g.op("Add", y, bias, name="biased")
