"""Linear layers whose weights are stored in fewer bits (checkpoint/linears.py), written out in the graph.

x [rows,in] -> y [rows,out] = Q(x * pre_quant_scale) @ widened(weight).T + bias. Q rounds the input to the weight's kind
of numbers:
    "none"    nothing: the format is of weights only
    "static"  one calibrated scale for all rows
    "row"     every row is divided by its largest magnitude first, and its result multiplied by it after: a row's
              result then does not depend on its neighbours, which one scale for a whole pass would make it do
dflash_trt/formats has the numbers, dflash_trt/graph/lowering.py the nodes for them. ONNX Runtime has layers of integers
alone, with products of its own: `onnxruntime_integers` and `onnxruntime_channels`.

For TensorRT they are the patterns of QuantizeLinear and DequantizeLinear that it turns into multiplications of packed
numbers. Weights stay packed in its plans.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from dflash_trt.checkpoint.linears import StoredLinear
from dflash_trt.checkpoint.tensors import TensorInfo
from dflash_trt.formats.base import BLOCK
from dflash_trt.graph import INTEGERS, MICROSOFT_DOMAIN
from dflash_trt.graph.builder import FLOAT, ONNX_DTYPES, GraphBuilder
from dflash_trt.graph.lowering import LOWERINGS

# The smallest magnitude assumed for a row: far below any real one, and safe from overflow of the reciprocal.
TINY = 2.0**-100
CHANNELS = "MatMulIntegerToFloat"  # ONNX Runtime's operator of INT8 layers with one scale for each output
_FINER = 1 / 256  # the low byte's step, in steps of the high byte


@dataclass(frozen=True, kw_only=True)
class QuantizedLinear:
    """A layer as `stored`, with its weights in `folder` and a bias [out] in the graph's dtype."""

    name: str
    stored: StoredLinear
    folder: str
    bias: ir.Value | None = None


def tensors(g: GraphBuilder, stored: StoredLinear, folder: str) -> dict[str, ir.Value]:
    """The tensors of a layer for TensorRT, in place on disk, by the fields of StoredLinear. Absent ones are left out,
    and scales that divide are inverted.
    """

    def raw(info: TensorInfo, dtype: ir.DataType | None = None, *shape: int) -> ir.Value:
        value = g.raw_weight(info, folder)
        return value if dtype is None else g.reinterpret(value, dtype, shape)

    def flat(info: TensorInfo) -> ir.Value:
        """One number as a scalar, one per row of out as a vector, in float32."""
        count = math.prod(info.shape)
        value = raw(info, ONNX_DTYPES[info.dtype], *([count] if count > 1 else []))
        return g.cast(value, FLOAT, name=f"{info.name}/float")

    lowering = LOWERINGS[stored.algorithm.scheme]
    by_row = stored.format.scale_by_row and not stored.algorithm.group_size
    values = {"scale": flat(stored.scale) if by_row else raw(stored.scale)}
    values["weight"] = lowering.weight(g, stored, raw(stored.weight))
    for name in ("global_scale", "input_scale"):
        info = getattr(stored, name)
        if info is not None:
            values[name] = (
                g.constant(_inverse(info), np.float32) if stored.algorithm.reciprocal else flat(info)
            )
    for name in ("pre_quant_scale", "zero_term", "order"):
        info = getattr(stored, name)
        if info is not None:
            values[name] = raw(info)
    return values


def _inverse(info: TensorInfo) -> float:
    """1 / the number: TensorRT's parser takes an input's scale from an initializer only. An outline has no numbers."""
    if not info.file.is_file():
        return 1.0
    dtype = ONNX_DTYPES[info.dtype].numpy()
    return float(1 / np.fromfile(info.file, dtype, 1, offset=info.offset).astype(np.float32)[0])


def prepared(
    g: GraphBuilder, x: ir.Value, order: ir.Value | None, smooth: ir.Value | None, dtype: ir.DataType
) -> ir.Value:
    """x [rows, in], in `dtype`, with its columns in the order of the weight's, and times their `pre_quant_scale`."""
    if order is not None:
        x = g.op("Gather", x, order, name="ordered", axis=1)
    if smooth is not None:
        x = g.op("Mul", x, g.cast(smooth, dtype, name="smooth"), name="smoothed")
    return x


def split_rows(g: GraphBuilder, x: ir.Value) -> tuple[ir.Value, ir.Value]:
    """x in float32 as x / m and m [..., 1], the largest magnitude of each row."""
    largest = g.op("ReduceMax", g.op("Abs", x), g.constant([-1]), name="largest", keepdims=1)
    largest = g.op("Max", largest, g.constant(TINY, np.float32), name="at_least")
    return g.op("Div", x, largest, name="by_row"), largest


def rounded(
    g: GraphBuilder, stored: StoredLinear, x: ir.Value, scale: ir.Value | None
) -> tuple[ir.Value, ir.Value | None]:
    """x in float32 as the layer's format rounds it, and the factor of each row. scale: `input_scale`, in float32."""
    factor: ir.Value | None = None
    if stored.rounding == "none":
        return x, factor
    if stored.rounding == "row":
        x, factor = split_rows(g, x)
    scale = input_scale(g, stored, scale)
    if stored.algorithm.reciprocal and stored.rounding == "static":
        scale = g.op("Reciprocal", scale, name="input_scale")
    return LOWERINGS[stored.algorithm.scheme].rounded_input(g, scale, x), factor


def multiplied(
    g: GraphBuilder,
    x: ir.Value,
    weight: ir.Value,
    factor: ir.Value | None,
    bias: ir.Value | None,
    dtype: ir.DataType,
) -> ir.Value:
    """x @ weight.T, times each row's factor, plus bias; all but the factor, float32, in `dtype`."""
    if factor is None:
        return g.op("Gemm", x, weight, *([] if bias is None else [bias]), name="product", transB=1)
    y = g.op("Gemm", x, weight, name="product", transB=1)
    y = y if dtype == FLOAT else g.op("Cast", y, name="product_float", to=int(FLOAT))
    y = g.op("Mul", y, factor, name="rescaled")
    y = y if dtype == FLOAT else g.op("Cast", y, name="narrow", to=int(dtype))
    return y if bias is None else g.op("Add", y, bias, name="with_bias")


def onnxruntime_integers(g: GraphBuilder, x: ir.Value, layer: QuantizedLinear) -> ir.Value:
    """A layer in blocks, x in float32, by ONNX Runtime's own product of integers.

    It rounds every row of x to eight bits, 32 numbers at a time, and adds in integers: a row does not depend on others.
    Scales and zero points of larger groups are repeated for their blocks, which the engine does as it loads.
    """
    stored, folder, bias = layer.stored, layer.folder, layer.bias
    rows, blocks, block_bytes = stored.weight.shape
    bits, repeats = 8 * block_bytes // BLOCK, blocks // stored.scale.shape[1]
    zeros = None
    with g.scope(layer.name):
        order, smooth = (
            None if info is None else g.raw_weight(info, folder)
            for info in (stored.order, stored.pre_quant_scale)
        )
        x = prepared(g, x, order, smooth, FLOAT)
        scale = g.cast(g.raw_weight(stored.scale, folder), FLOAT, name="scale")
        if stored.zero_point is not None:
            zeros = _repeated(g, g.raw_weight(stored.zero_point, folder), repeats)
            zeros = _packed_points(g, zeros, blocks, bits)
        scale = _repeated(g, scale, repeats)
    inputs = [x, g.raw_weight(stored.weight, folder), scale, zeros, None, bias]
    while inputs[-1] is None:
        inputs.pop()
    g.graph.opset_imports[MICROSOFT_DOMAIN] = 1
    y = g.op(
        "MatMulNBits",
        *inputs,
        name=layer.name,
        domain=MICROSOFT_DOMAIN,
        K=blocks * BLOCK,
        N=rows,
        bits=bits,
        block_size=BLOCK,
        accuracy_level=INTEGERS,
    )
    if stored.zero_term is None:
        return y
    with g.scope(layer.name):
        return _with_zeros(g, y, x, g.raw_weight(stored.zero_term, folder))


def _repeated(g: GraphBuilder, x: ir.Value, times: int) -> ir.Value:
    """[out, groups] -> [out, groups * times]"""
    if times == 1:
        return x
    x = g.op("Expand", g.unsqueeze(x, 2), g.constant([1, 1, times]), name="repeated")
    return g.op("Reshape", x, g.constant([0, -1]), name="by_block")


def _packed_points(g: GraphBuilder, points: ir.Value, blocks: int, bits: int) -> ir.Value:
    """[out, blocks] as MatMulNBits has them: those of four bits in pairs, the first in the low half."""
    if bits == 8:
        return points
    if blocks % 2:
        points = g.op("Pad", points, g.constant([0, 0, 0, 1]), name="even")
    pairs = g.op("Reshape", points, g.constant([0, -1, 2]), name="pairs")
    low, high = g.multi("Split", pairs, outputs=2, name="halves", axis=2, num_outputs=2)
    high = g.op("BitShift", high, g.constant(4, np.uint8), name="high", direction="LEFT")
    return g.op("Squeeze", g.op("BitwiseOr", low, high, name="packed"), g.constant([2]), name="points")


def onnxruntime_channels(g: GraphBuilder, x: ir.Value, layer: QuantizedLinear) -> ir.Value:
    """x [rows,in] in float32 through a layer of int8 [out,in] and scales [out].

    Each row of x is divided by the root of its mean square, which one node gives beside the quotient. No number of the
    row is then larger than the root of their count, and it is rounded to 16 bits of that, in two bytes: high + low /
    256. Both are rows of one product of bytes, which reads the weights once and whose sums are exact integers, so a row
    has the same bits whatever other rows the pass has. On x86 without AMX or VNNI such sums saturate, which
    `engines/onnxruntime/products.py` finds out.
    """
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
            CHANNELS,
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


def input_scale(g: GraphBuilder, stored: StoredLinear, static: ir.Value | None = None) -> ir.Value:
    """The static scale, or that of rows that were divided by their largest magnitude: they are at most 1."""
    if stored.rounding == "static":
        assert static is not None
        return static
    return g.constant(LOWERINGS[stored.algorithm.scheme].unit_input_scale, np.float32)


def tensorrt_linear(g: GraphBuilder, x: ir.Value, layer: QuantizedLinear) -> ir.Value:
    """The layer for TensorRT and TensorRT-RTX, strongly typed, in the graph's dtype, BFLOAT16 or FLOAT16.

    It is written out in the graph itself. TensorRT refuses the quantizing layers of a function that is called twice,
    because of their names. Inside a function it also takes MXFP4's exponents for numbers. Scales of E4M3 numbers are
    float32, scales of blocks have the graph's dtype: the builder refuses other types.
    """
    stored, lowering = layer.stored, LOWERINGS[layer.stored.algorithm.scheme]
    inputs = tensors(g, stored, layer.folder)
    factor: ir.Value | None = None
    with g.scope(layer.name):
        ordered = x = prepared(g, x, inputs.get("order"), inputs.get("pre_quant_scale"), g.dtype)
        if stored.rounding == "row":
            x, factor = split_rows(g, g.op("Cast", x, name="x_float", to=int(FLOAT)))
            x = g.op("Cast", x, name="x_by_row", to=int(g.dtype))
        if stored.rounding != "none":
            x = lowering.tensorrt_input(g, input_scale(g, stored, inputs.get("input_scale")), x)
        weight = lowering.tensorrt_weight(g, stored, inputs)
        y = multiplied(g, x, weight, factor, layer.bias, g.dtype)
        return y if stored.zero_term is None else _with_zeros(g, y, ordered, inputs["zero_term"])


def _with_zeros(g: GraphBuilder, y: ir.Value, x: ir.Value, term: ir.Value) -> ir.Value:
    """y + r @ term.T in float32. r [rows, groups]: the sum of each group of x. term [out, groups]: what is added to
    each weight of a group. TensorRT knows numbers around 0 only, and ONNX Runtime zero points that are integers.
    """
    assert term.shape is not None
    groups = int(str(term.shape[1]))
    by_group = g.op("Reshape", g.to_float(x), g.constant([0, groups, -1]), name="by_group")
    sums = g.op("ReduceSum", by_group, g.constant([2]), name="sums", keepdims=0)
    zeros = g.op("Gemm", sums, g.cast(term, FLOAT), g.to_float(y), name="with_zeros", transB=1)
    return g.from_dtype(zeros, FLOAT)
