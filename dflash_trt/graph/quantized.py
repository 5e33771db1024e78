"""`dflash::` operators for linear layers whose weights are stored in fewer bits (checkpoint/linears.py).

FP8Linear, NVFP4Linear, MXFP4Linear, INT4Linear(x [rows,in], weight, scale, global_scale, input_scale,
    pre_quant_scale [in], bias [out]) -> y [rows,out]

y = Q(x * pre_quant_scale) @ widened(weight).T + bias. What a format does not have is absent. Q is what happens to the
input, in the weight's kind of numbers:
    "none"    nothing: the format is of weights only
    "static"  one calibrated scale for all rows
    "row"     every row is divided by its largest magnitude first, and its result multiplied by it after: a row's
              result then does not depend on its neighbours, which one scale for a whole pass would make it do
NVFP4 quantizes the input in blocks of 16, each with an E4M3 scale of its own, in all but the first of these.

The bodies for ONNX Runtime compute in float32 on the exact numbers that the codes stand for, with the input rounded as
the format rounds it. What TensorRT gets are the patterns of QuantizeLinear and DequantizeLinear that it turns into
multiplications of packed numbers; weights stay packed in its plans.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import onnx_ir as ir

from dflash_trt.checkpoint.linears import StoredLinear
from dflash_trt.checkpoint.numbers import (
    BYTE_TO_PAIR,
    E2M1_MAX,
    E4M3_MAX,
    E4M3_MIN,
    E8M0,
    NVFP4_BLOCK,
)
from dflash_trt.checkpoint.quantization import Scheme
from dflash_trt.checkpoint.tensors import TensorInfo

from .builder import FLOAT, GraphBuilder

TRT_DOMAIN = "trt"  # its operators are those of TensorRT's own parser
Activations = Literal["none", "static", "row"]
E4M3, E2M1, INT4 = ir.DataType.FLOAT8E4M3FN, ir.DataType.FLOAT4E2M1, ir.DataType.INT4
# What a row's magnitude is at least taken for: far below anything, and far from where a reciprocal overflows.
_TINY = 2.0**-100


@dataclass(frozen=True, slots=True)
class LinearKind:
    """What decides the body of one of the operators."""

    scheme: Scheme
    group_size: int
    activations: Activations
    smoothed: bool
    biased: bool
    by_row: bool

    @property
    def operator(self) -> str:
        variants = (self.activations, "smoothed" * self.smoothed, "biased" * self.biased)
        rows = f"{self.group_size}{'' if self.by_row else 'x2'}" * (self.scheme == "int4")
        return "_".join([f"{self.scheme.upper()}Linear{rows}", *filter(None, variants)])


def kind_of(stored: StoredLinear, *, biased: bool) -> LinearKind:
    activations: Activations = "none"
    if stored.algorithm.activations:
        activations = "row" if stored.input_scale is None else "static"
    return LinearKind(
        stored.scheme,
        stored.algorithm.group_size,
        activations,
        stored.pre_quant_scale is not None,
        biased,
        stored.by_row,
    )


def tensors(
    g: GraphBuilder, stored: StoredLinear, folder: str, *, packed_as_bytes: bool
) -> dict[str, ir.Value]:
    """The operator's inputs from `weight` to `pre_quant_scale`, where they lie on disk; what is absent is left out.

    `packed_as_bytes`: E2M1 pairs as UINT8 [out, in/2], for an engine without that type.
    """

    def raw(info: TensorInfo, dtype: ir.DataType | None = None, *shape: int) -> ir.Value:
        value = g.raw_weight(info, folder)
        return value if dtype is None else g.reinterpret(value, dtype, shape)

    def flat(info: TensorInfo) -> ir.Value:
        """One number as a scalar, one per row of out as a vector."""
        count = info.nbytes // 4
        return raw(info, FLOAT, *([count] if count > 1 else []))

    rows, columns = stored.weight.shape
    found = {"scale": flat(stored.scale) if stored.scheme == "fp8" else raw(stored.scale)}
    if stored.scheme == "int4":
        shape = (rows, 2 * columns) if stored.by_row else (rows, columns, 2)
        found["weight"] = raw(stored.weight, INT4, *shape)
    elif stored.scheme == "fp8" or packed_as_bytes:
        found["weight"] = raw(stored.weight)
    else:
        found["weight"] = raw(stored.weight, E2M1, rows, 2 * columns)
    for name in ("global_scale", "input_scale"):
        info = getattr(stored, name)
        if info is not None:
            found[name] = flat(info)
    if stored.pre_quant_scale is not None:
        found["pre_quant_scale"] = raw(stored.pre_quant_scale)
    return found


INPUTS = ("weight", "scale", "global_scale", "input_scale", "pre_quant_scale", "bias")


def split_rows(g: GraphBuilder, x: ir.Value) -> tuple[ir.Value, ir.Value]:
    """x in float32 as x / m and m [..., 1], the largest magnitude of each row."""
    largest = g.op("ReduceMax", g.op("Abs", x), g.constant([-1]), name="largest", keepdims=1)
    largest = g.op("Max", largest, g.constant(_TINY, np.float32), name="at_least")
    return g.op("Div", x, largest, name="by_row"), largest


def _product(
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


def onnxruntime_linear(
    kind: LinearKind, present: Iterable[str], dtype: ir.DataType, *, resident: bool
) -> ir.Function:
    """The body for ONNX Runtime on a CPU; `present`: which inputs there are after x.

    `resident`: the weight is widened to float32 once, as the engine loads. Otherwise every pass widens it again: many
    times slower, in the memory of the packed weights and one widened one.
    """
    g = GraphBuilder(kind.operator)
    x = g.input("x", dtype, ["rows", "in"])
    inputs = {name: ir.Value(name=name) for name in INPUTS if name in present}
    g.graph.inputs.extend(inputs.values())
    weight = _widened(g, kind, inputs, x, resident)
    x = x if dtype == FLOAT else g.op("Cast", x, name="x_float", to=int(FLOAT))
    y = product(g, kind, inputs, x, weight)
    g.output(y if dtype == FLOAT else g.op("Cast", y, to=int(dtype)), "y", dtype, ["rows", "out"])
    return g.function()


def product(
    g: GraphBuilder, kind: LinearKind, inputs: Mapping[str, ir.Value], x: ir.Value, weight: ir.Value
) -> ir.Value:
    """The layer for ONNX Runtime, its weight widened already; all in float32."""
    if kind.smoothed:
        smooth = g.op("Cast", inputs["pre_quant_scale"], name="smooth", to=int(FLOAT))
        x = g.op("Mul", x, smooth, name="smoothed")
    factor: ir.Value | None = None
    if kind.activations == "row":
        x, factor = split_rows(g, x)
    if kind.activations != "none":
        scale = input_scale(g, kind, inputs)
        x = _rounded_fp8(g, scale, x) if kind.scheme == "fp8" else _rounded_nvfp4(g, scale, x)
    bias = g.op("Cast", inputs["bias"], name="bias_float", to=int(FLOAT)) if kind.biased else None
    return _product(g, x, weight, factor, bias, FLOAT)


def input_scale(g: GraphBuilder, kind: LinearKind, inputs: Mapping[str, ir.Value]) -> ir.Value:
    """A row that was divided by its largest magnitude is at most 1."""
    if kind.activations == "static":
        return inputs["input_scale"]
    return g.constant(1 / E4M3_MAX if kind.scheme == "fp8" else 1 / (E2M1_MAX * E4M3_MAX), np.float32)


def _rounded_fp8(g: GraphBuilder, scale: ir.Value, x: ir.Value) -> ir.Value:
    codes = g.op("QuantizeLinear", x, scale, name="x_codes", output_dtype=int(E4M3))
    return g.op("DequantizeLinear", codes, scale, name="x_rounded")


def _rounded_nvfp4(g: GraphBuilder, second: ir.Value, x: ir.Value) -> ir.Value:
    """x rounded to E2M1 in blocks of 16, their scales to E4M3: from standard operators, as E2M1 has no CPU kernels."""

    def number(value: float) -> ir.Value:
        return g.constant(value, np.float32)

    blocks = g.op("Reshape", x, g.constant([0, -1, NVFP4_BLOCK]), name="blocks")
    magnitude = g.op("Abs", blocks, name="magnitude")
    largest = g.op("ReduceMax", magnitude, g.constant([2]), name="block_largest", keepdims=1)
    scale = g.op("Div", largest, g.op("Mul", second, number(E2M1_MAX)), name="block_scale")
    scale = g.op("Clip", scale, number(E4M3_MIN), number(E4M3_MAX), name="block_scale_in_range")
    scale = g.op("Cast", scale, name="block_scale_code", to=int(E4M3))
    scale = g.op("Mul", g.op("Cast", scale, to=int(FLOAT)), second, name="block_scale_rounded")
    v = g.op("Clip", g.op("Div", blocks, scale), number(-E2M1_MAX), number(E2M1_MAX), name="in_range")
    # Numbers lie 0.5 apart below 2, 1 apart below 4, 2 apart up to 6; Round takes ties to even, as the codes do.
    magnitude = g.op("Abs", v, name="magnitude")
    step = g.op("Where", g.op("Less", magnitude, number(4)), number(1), number(2), name="step")
    step = g.op("Where", g.op("Less", magnitude, number(2)), number(0.5), step, name="step")
    rounded = g.op("Mul", g.op("Round", g.op("Div", v, step), name="round"), step, name="rounded")
    return g.op("Reshape", g.op("Mul", rounded, scale), g.constant([0, -1]), name="x_rounded")


def _widened(
    g: GraphBuilder, kind: LinearKind, inputs: Mapping[str, ir.Value], x: ir.Value, resident: bool
) -> ir.Value:
    """float32 [out, in]. ONNX Runtime folds casts and look-ups of constants as it loads, but never DequantizeLinear."""
    weight, scale = inputs["weight"], inputs["scale"]
    if kind.scheme == "fp8":
        if not resident:
            return g.op("DequantizeLinear", weight, scale, name="widened", axis=0)
        column = g.op("Reshape", scale, g.constant([-1, 1]), name="column")
        return g.op("Mul", g.op("Cast", weight, to=int(FLOAT)), column, name="widened")
    if kind.scheme == "int4":
        return _widened_int4(g, kind, inputs, x, resident)
    tables = [BYTE_TO_PAIR[:, 0], BYTE_TO_PAIR[:, 1], E8M0]
    low, high, powers = (_table(g, table, x, resident) for table in tables)
    # On entries this small, Gather takes many times as long as GatherElements on one axis.
    halves = [g.unsqueeze(lookup(g, half, weight), 2) for half in (low, high)]
    numbers = g.op("Concat", *halves, name="numbers", axis=2)
    numbers = g.op("Reshape", numbers, g.constant([0, -1, kind.group_size]), name="numbers_by_block")
    if kind.scheme == "mxfp4":
        factors = lookup(g, powers, scale)
    elif resident:
        factors = g.op("Mul", g.op("Cast", scale, to=int(FLOAT)), inputs["global_scale"], name="factors")
    else:
        factors = g.op("DequantizeLinear", scale, inputs["global_scale"], name="factors")
    widened = g.op("Mul", numbers, g.unsqueeze(factors, 2), name="widened_by_block")
    return g.op("Reshape", widened, g.constant([0, -1]), name="widened")


def _widened_int4(
    g: GraphBuilder, kind: LinearKind, inputs: Mapping[str, ir.Value], x: ir.Value, resident: bool
) -> ir.Value:
    weight, scale = inputs["weight"], g.op("Cast", inputs["scale"], name="scale_float", to=int(FLOAT))
    if not kind.by_row:  # the weight is [out/2, in, 2]: bring its scales, [out, groups], into that order
        pairs = g.op("Reshape", scale, g.shape(-1, 2, g.dim(scale, 1)), name="scale_pairs")
        scale = g.op("Transpose", pairs, name="scale_by_pair", perm=[0, 2, 1])
    if resident:
        split = [0, -1, kind.group_size, 2][: 3 if kind.by_row else 4]
        numbers = g.op("Reshape", g.op("Cast", weight, to=int(FLOAT)), g.constant(split), name="by_block")
        widened = g.op("Mul", numbers, g.unsqueeze(scale, 2), name="widened_by_block")
        whole = [0, -1] if kind.by_row else [0, -1, 2]
        widened = g.op("Reshape", widened, g.constant(whole), name="widened")
    else:
        widened = g.op("DequantizeLinear", weight, scale, name="widened", axis=1, block_size=kind.group_size)
    if kind.by_row:
        return widened
    by_row = g.op("Transpose", widened, name="by_row", perm=[0, 2, 1])
    return g.op("Reshape", by_row, g.shape(-1, g.dim(x, 1)), name="rows")


def _table(g: GraphBuilder, values: np.ndarray, x: ir.Value, resident: bool) -> ir.Value:
    table = g.constant(values, np.float32)
    if resident:
        return table
    # A length that only the pass knows, so that nothing looked up can be folded into a widened weight.
    end = g.op("Add", g.dim(x, 0), g.constant([len(values)]), name="table_end")
    return g.op("Slice", table, g.constant([0]), end, name="table")


def lookup(g: GraphBuilder, table: ir.Value, codes: ir.Value) -> ir.Value:
    flat = g.op("Reshape", codes, g.constant([-1]), name="flat")
    index = g.op("Cast", flat, name="index", to=int(ir.DataType.INT32))
    found = g.op("GatherElements", table, index, name="looked_up", axis=0)
    return g.op("Reshape", found, g.op("Shape", codes), name="as_codes")


def tensorrt_linear(
    g: GraphBuilder, x: ir.Value, stored: StoredLinear, folder: str, bias: ir.Value | None, name: str
) -> ir.Value:
    """The layer for TensorRT and TensorRT-RTX, strongly typed, in the graph's dtype, BFLOAT16 or FLOAT16.

    Written out in the graph itself: a function that is called twice has its quantizing layers refused, for their names,
    and inside of one, MXFP4's exponents are taken for numbers. Scales of E4M3 numbers are float32, those of blocks of
    the graph's dtype: the builder refuses other types.
    """
    kind = kind_of(stored, biased=bias is not None)
    inputs = tensors(g, stored, folder, packed_as_bytes=False)
    factor: ir.Value | None = None
    with g.scope(name):
        if kind.smoothed:
            smooth = g.op("Cast", inputs["pre_quant_scale"], name="smooth", to=int(g.dtype))
            x = g.op("Mul", x, smooth, name="smoothed")
        if kind.activations == "row":
            x, factor = split_rows(g, g.op("Cast", x, name="x_float", to=int(FLOAT)))
            x = g.op("Cast", x, name="x_by_row", to=int(g.dtype))
        if kind.activations != "none":
            x = quantized_input(g, kind.scheme, input_scale(g, kind, inputs), x)
        return _product(g, x, tensorrt_weight(g, kind, inputs), factor, bias, g.dtype)


def tensorrt_weight(g: GraphBuilder, kind: LinearKind, inputs: Mapping[str, ir.Value]) -> ir.Value:
    """[out, in] in the graph's dtype. Packed constants go nowhere but into a DequantizeLinear."""
    weight, scale, block = inputs["weight"], inputs["scale"], kind.group_size
    as_dtype: dict[str, Any] = {"output_dtype": int(g.dtype)}
    if kind.scheme == "fp8":
        return g.op("DequantizeLinear", weight, scale, name="widened", axis=0, **as_dtype)
    if kind.scheme == "mxfp4":
        return g.op(
            *("TRT_MXFP8DequantizeLinear", weight, scale),
            name="widened",
            domain=TRT_DOMAIN,
            axis=-1,
            block_size=block,
            **as_dtype,
        )
    if kind.scheme == "nvfp4":
        scale = g.op("DequantizeLinear", scale, inputs["global_scale"], name="scales", **as_dtype)
    else:
        scale = g.op("Cast", scale, name="scales", to=int(g.dtype))
    return g.op("DequantizeLinear", weight, scale, name="widened", axis=1, block_size=block)


def quantized_input(g: GraphBuilder, scheme: Scheme, scale: ir.Value, x: ir.Value) -> ir.Value:
    as_dtype: dict[str, Any] = {"output_dtype": int(g.dtype)}
    if scheme == "fp8":
        codes = g.op("QuantizeLinear", x, scale, name="x_codes", output_dtype=int(E4M3))
        return g.op("DequantizeLinear", codes, scale, name="x_rounded", **as_dtype)
    codes, scales = g.multi(
        *("TRT_FP4DynamicQuantize", x, scale),
        outputs=2,
        name="x_codes",
        domain=TRT_DOMAIN,
        axis=-1,
        block_size=NVFP4_BLOCK,
        scale_type=int(E4M3),
    )
    scales = g.op("DequantizeLinear", scales, scale, name="x_scales", **as_dtype)
    return g.op("DequantizeLinear", codes, scales, name="x_rounded", axis=-1, block_size=NVFP4_BLOCK)
