"""How the layers of each number format become nodes of a graph, in each dialect. dflash_trt/formats has the numbers.

fp8    QuantizeLinear and DequantizeLinear of E4M3, which all engines have
nvfp4  look-ups for ONNX Runtime, which has no E2M1; DequantizeLinear twice for TensorRT
mxfp4  look-ups for ONNX Runtime, TensorRT's own operator there; stacks of experts, too
int8   blocked DequantizeLinear, in groups
int4   the same, with two rows or two columns in a byte
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from dflash_trt.checkpoint.linears import StoredLinear
from dflash_trt.formats.base import BLOCK
from dflash_trt.formats.fp8 import FP8
from dflash_trt.formats.numbers import BYTE_TO_PAIR, E2M1_MAX, E4M3_MAX, E4M3_MIN, E8M0
from dflash_trt.formats.nvfp4 import BLOCK as NVFP4_BLOCK
from dflash_trt.graph.builder import FLOAT, GraphBuilder

Values = Mapping[str, ir.Value]
TRT_DOMAIN = "trt"  # its operators are those of TensorRT's own parser
E4M3, E2M1, INT4 = ir.DataType.FLOAT8E4M3FN, ir.DataType.FLOAT4E2M1, ir.DataType.INT4


class Lowering(ABC):
    """Nodes for layers of one number format. `inputs` are the tensors of a `stored` layer as values."""

    # The scale of an input whose largest magnitude is 1, for formats that quantize inputs too.
    unit_input_scale = 1.0

    def operator(self, stored: StoredLinear) -> str:
        """The name of a layer's `dflash::` operator, without the suffixes that all formats share."""
        return f"{stored.algorithm.scheme.upper()}Linear"

    # The engine's type for pairs of numbers in a byte, where it has one.
    pairs: ir.DataType | None = None

    def weight(
        self, g: GraphBuilder, stored: StoredLinear, raw: ir.Value, *, packed_as_bytes: bool
    ) -> ir.Value:
        """The codes `raw`, as they are on disk, in the engine's type for them."""
        if self.pairs is None or packed_as_bytes:
            return raw
        rows, columns = stored.weight.shape
        return g.reinterpret(raw, self.pairs, (rows, 2 * columns))

    @abstractmethod
    def onnxruntime_weight(
        self, g: GraphBuilder, stored: StoredLinear, inputs: Values, x: ir.Value, resident: bool
    ) -> ir.Value:
        """float32 [out, in]. ONNX Runtime folds casts and look-ups of constants when it loads, but never
        DequantizeLinear.
        """

    @abstractmethod
    def tensorrt_weight(self, g: GraphBuilder, stored: StoredLinear, inputs: Values) -> ir.Value:
        """[out, in] in the graph's dtype. A packed constant may only feed a DequantizeLinear."""

    def onnxruntime_input(self, g: GraphBuilder, scale: ir.Value, x: ir.Value) -> ir.Value:
        """x, float32, rounded as the format does, in float32."""
        raise NotImplementedError("this format quantizes weights only")

    def tensorrt_input(self, g: GraphBuilder, scale: ir.Value, x: ir.Value) -> ir.Value:
        """x rounded as the format does, in the graph's dtype."""
        raise NotImplementedError("this format quantizes weights only")

    def expert_factors(self, g: GraphBuilder, stored: StoredLinear, parts: Values) -> ir.Value:
        """The factor of each row or group of a stack of experts, float32, from scales that may be bytes."""
        return g.op("Cast", parts["scale"], name="factors", to=int(FLOAT))


def lookup(g: GraphBuilder, table: ir.Value, codes: ir.Value) -> ir.Value:
    """The entries of a table [n] that codes of any shape stand for."""
    flat = g.op("Reshape", codes, g.constant([-1]), name="flat")
    index = g.op("Cast", flat, name="index", to=int(ir.DataType.INT32))
    found = g.op("GatherElements", table, index, name="looked_up", axis=0)
    return g.op("Reshape", found, g.op("Shape", codes), name="as_codes")


def table(g: GraphBuilder, values: np.ndarray, x: ir.Value, resident: bool) -> ir.Value:
    """A table to look up in: folded into the weight as the engine loads where that is `resident`, never otherwise."""
    whole = g.constant(values, np.float32)
    if resident:
        return whole
    # A length that only the pass knows, so that nothing looked up can be folded into a widened weight.
    end = g.op("Add", g.dim(x, 0), g.constant([len(values)]), name="table_end")
    return g.op("Slice", whole, g.constant([0]), end, name="table")


def by_block(g: GraphBuilder, low: ir.Value, high: ir.Value, weight: ir.Value, group_size: int) -> ir.Value:
    """Pairs of numbers [out, in/2], looked up in two tables -> [out, groups, group_size]."""
    # On entries this small, Gather takes many times as long as GatherElements on one axis.
    halves = [g.unsqueeze(lookup(g, half, weight), 2) for half in (low, high)]
    numbers = g.op("Concat", *halves, name="numbers", axis=2)
    return g.op("Reshape", numbers, g.constant([0, -1, group_size]), name="numbers_by_block")


def times_factors(g: GraphBuilder, numbers: ir.Value, factors: ir.Value) -> ir.Value:
    """[out, groups, group_size] and [out, groups] -> [out, in]."""
    widened = g.op("Mul", numbers, g.unsqueeze(factors, 2), name="widened_by_block")
    return g.op("Reshape", widened, g.constant([0, -1]), name="widened")


def microscaled(g: GraphBuilder, numbers: ir.Value, exponents: ir.Value) -> ir.Value:
    """E2M1 or E4M3 numbers [..., n] and exponents [..., n/32] -> the graph's dtype, by TensorRT's own operator."""
    return g.op(
        *("TRT_MXFP8DequantizeLinear", numbers, exponents),
        name="widened",
        domain=TRT_DOMAIN,
        axis=-1,
        block_size=BLOCK,
        output_dtype=int(g.dtype),
    )


class FP8Lowering(Lowering):
    """QuantizeLinear and DequantizeLinear; blocks of scales are repeated."""

    unit_input_scale = 1 / E4M3_MAX

    def operator(self, stored: StoredLinear) -> str:
        """A body for each size of a block."""
        rows, columns = stored.algorithm.group_rows, stored.algorithm.group_size
        block = f"{rows}x{columns}" if columns else ""
        return f"FP8Linear{block}{'Exponents' * stored.exponents}"

    def onnxruntime_weight(
        self, g: GraphBuilder, stored: StoredLinear, inputs: Values, x: ir.Value, resident: bool
    ) -> ir.Value:
        """Numbers times the scales of their rows or blocks."""
        weight, scale, algorithm = inputs["weight"], inputs["scale"], stored.algorithm
        if not algorithm.group_size and not resident:
            return g.op("DequantizeLinear", weight, scale, name="widened", axis=0)
        if resident:
            numbers = g.op("Cast", weight, name="numbers", to=int(FLOAT))
        else:
            numbers = g.op("DequantizeLinear", weight, g.constant(1, np.float32), name="numbers")
        if not algorithm.group_size:
            column = g.op("Reshape", scale, g.constant([-1, 1]), name="column")
            return g.op("Mul", numbers, column, name="widened")
        rows, columns = g.dim(weight, 0, name="rows"), g.dim(weight, 1, name="columns")
        factors = self._repeated(g, self._factors(g, stored, scale), 0, algorithm.group_rows, rows)
        if not resident:  # a length that only the pass knows: nothing of the weight's size is folded
            columns = g.dim(x, 1, name="inputs")
        factors = self._repeated(g, factors, 1, algorithm.group_size, columns)
        return g.op("Mul", numbers, factors, name="widened")

    def _factors(self, g: GraphBuilder, stored: StoredLinear, scale: ir.Value) -> ir.Value:
        if stored.exponents:
            return lookup(g, g.constant(E8M0, np.float32), scale)
        return g.op("Cast", scale, name="factors", to=int(FLOAT))

    def _repeated(self, g: GraphBuilder, x: ir.Value, axis: int, times: int, length: ir.Value) -> ir.Value:
        """[a, b] with each entry `times` times along an axis, of which the first `length` are kept."""
        if times == 1:
            return x
        shape = [1, 1, 1]
        shape[axis + 1] = times
        x = g.op("Expand", g.unsqueeze(x, axis + 1), g.constant(shape), name="repeated")
        shape_after = g.shape(-1, g.dim(x, 2)) if axis == 0 else g.constant([0, -1])
        x = g.op("Reshape", x, shape_after, name="repeated_rows" if axis == 0 else "repeated_columns")
        return g.slice(x, 0, length, axis=axis, name="own")

    def tensorrt_weight(self, g: GraphBuilder, stored: StoredLinear, inputs: Values) -> ir.Value:
        """Codes and scales as they are stored. Blocks have an operator of the parser's own, because DequantizeLinear
        knows blocks along one axis only; the last block of an axis may be smaller.
        """
        weight, scale = inputs["weight"], inputs["scale"]
        block = [stored.algorithm.group_rows, stored.algorithm.group_size]
        if stored.exponents and block == [1, BLOCK]:
            return microscaled(g, weight, scale)
        if stored.algorithm.group_size:
            scale = self._block_scales(g, stored, scale)
            if inputs["scale"].shape != (1, 1):
                return g.op(
                    *("TRT_BlockDequantize", weight, scale),
                    name="widened",
                    domain=TRT_DOMAIN,
                    block_shape=block,
                    output_dtype=int(g.dtype),
                )
            scale = g.op("Reshape", scale, g.constant([]), name="scale")  # one block is a whole weight there
        return g.op("DequantizeLinear", weight, scale, name="widened", axis=0, output_dtype=int(g.dtype))

    def _block_scales(self, g: GraphBuilder, stored: StoredLinear, scale: ir.Value) -> ir.Value:
        """Scales of blocks in float32 or in the graph's dtype: the compiler refuses others."""
        if stored.exponents:
            power = g.op("Cast", scale, name="exponents", to=int(FLOAT))
            power = g.op("Sub", power, g.constant(127, np.float32), name="powers")
            return g.op("Pow", g.constant(2, np.float32), power, name="scales")
        return scale if scale.dtype == g.dtype else g.cast(scale, FLOAT, name="scales")

    def onnxruntime_input(self, g: GraphBuilder, scale: ir.Value, x: ir.Value) -> ir.Value:
        """There and back, in float32."""
        codes = g.op("QuantizeLinear", x, scale, name="x_codes", output_dtype=int(E4M3))
        return g.op("DequantizeLinear", codes, scale, name="x_rounded")

    def tensorrt_input(self, g: GraphBuilder, scale: ir.Value, x: ir.Value) -> ir.Value:
        """There and back, in the graph's dtype."""
        codes = g.op("QuantizeLinear", x, scale, name="x_codes", output_dtype=int(E4M3))
        return g.op("DequantizeLinear", codes, scale, name="x_rounded", output_dtype=int(g.dtype))

    def expert_factors(self, g: GraphBuilder, stored: StoredLinear, parts: Values) -> ir.Value:
        """The scales; those of blocks in float32."""
        return self._factors(g, stored, parts["scale"]) if stored.algorithm.group_size else parts["scale"]


class NVFP4Lowering(Lowering):
    """Look-ups, or DequantizeLinear for the scales and then for the numbers."""

    pairs = E2M1
    unit_input_scale = 1 / (E2M1_MAX * E4M3_MAX)

    def onnxruntime_weight(
        self, g: GraphBuilder, stored: StoredLinear, inputs: Values, x: ir.Value, resident: bool
    ) -> ir.Value:
        """Looked up in tables, times both scales."""
        low, high = (table(g, BYTE_TO_PAIR[:, i], x, resident) for i in (0, 1))
        numbers = by_block(g, low, high, inputs["weight"], NVFP4_BLOCK)
        scale, second = inputs["scale"], inputs["global_scale"]
        if resident:
            factors = g.op("Cast", scale, name="scale_float", to=int(FLOAT))
        else:
            factors = g.op("DequantizeLinear", scale, g.constant(1, np.float32), name="scale_float")
        return times_factors(g, numbers, _times_second(g, stored, factors, second))

    def tensorrt_weight(self, g: GraphBuilder, stored: StoredLinear, inputs: Values) -> ir.Value:
        both = inputs["scale"], inputs["global_scale"]
        scales = g.op("DequantizeLinear", *both, name="scales", output_dtype=int(g.dtype))
        return g.op(
            "DequantizeLinear", inputs["weight"], scales, name="widened", axis=1, block_size=NVFP4_BLOCK
        )

    def onnxruntime_input(self, g: GraphBuilder, scale: ir.Value, x: ir.Value) -> ir.Value:
        """Rounded to E2M1 in blocks, their scales to E4M3: from standard operators, as E2M1 has no CPU kernels."""
        second = scale

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

    def tensorrt_input(self, g: GraphBuilder, scale: ir.Value, x: ir.Value) -> ir.Value:
        codes, scales = g.multi(
            *("TRT_FP4DynamicQuantize", x, scale),
            outputs=2,
            name="x_codes",
            domain=TRT_DOMAIN,
            axis=-1,
            block_size=NVFP4_BLOCK,
            scale_type=int(E4M3),
        )
        scales = g.op("DequantizeLinear", scales, scale, name="x_scales", output_dtype=int(g.dtype))
        return g.op("DequantizeLinear", codes, scales, name="x_rounded", axis=-1, block_size=NVFP4_BLOCK)

    def expert_factors(self, g: GraphBuilder, stored: StoredLinear, parts: Values) -> ir.Value:
        factors = lookup(g, g.constant(FP8.byte_values[:, 0], np.float32), parts["scale"])
        return _times_second(g, stored, factors, parts["global_scale"])


def _times_second(g: GraphBuilder, stored: StoredLinear, scales: ir.Value, second: ir.Value) -> ir.Value:
    return g.op("Div" if stored.algorithm.reciprocal else "Mul", scales, second, name="factors")


class MXFP4Lowering(Lowering):
    """Look-ups of bytes and of exponents, or TensorRT's own operator."""

    pairs = E2M1

    def onnxruntime_weight(
        self, g: GraphBuilder, stored: StoredLinear, inputs: Values, x: ir.Value, resident: bool
    ) -> ir.Value:
        tables = [BYTE_TO_PAIR[:, 0], BYTE_TO_PAIR[:, 1], E8M0]
        low, high, powers = (table(g, values, x, resident) for values in tables)
        numbers = by_block(g, low, high, inputs["weight"], BLOCK)
        return times_factors(g, numbers, lookup(g, powers, inputs["scale"]))

    def tensorrt_weight(self, g: GraphBuilder, stored: StoredLinear, inputs: Values) -> ir.Value:
        return microscaled(g, inputs["weight"], inputs["scale"])

    def expert_factors(self, g: GraphBuilder, stored: StoredLinear, parts: Values) -> ir.Value:
        return lookup(g, g.constant(E8M0, np.float32), parts["scale"])


def widened_blocks(g: GraphBuilder, blocks: ir.Value, scales: ir.Value, resident: bool) -> ir.Value:
    """uint8 [E,O,G,16] and [E,O,G] -> float32 [E,O,G*32]: exactly, or infinity where a product reaches 2**128."""
    index, exponent = (g.op("Cast", t, name="index", to=int(ir.DataType.INT32)) for t in (blocks, scales))
    if resident:  # in few steps: until it has folded the whole graph, the engine holds what each step made
        numbers = g.op("Gather", g.constant(BYTE_TO_PAIR, np.float32), index, name="numbers")
        scale = g.op("Gather", g.constant(E8M0, np.float32), exponent, name="scale")
    else:  # in quick ones: on entries this small, Gather takes ten times as long as GatherElements on one axis
        halves = [_entries(g, BYTE_TO_PAIR[:, i], index, name) for i, name in enumerate(("low", "high"))]
        numbers = g.op("Concat", *(g.unsqueeze(half, 4) for half in halves), name="numbers", axis=4)
        scale = _entries(g, E8M0, exponent, "scale")
    scaled = g.op("Mul", numbers, g.unsqueeze(scale, 3, 4), name="scaled")  # [E,O,G,16,2]
    return g.op("Reshape", scaled, g.constant([0, 0, -1]), name="widened")


def _entries(g: GraphBuilder, table: np.ndarray, index: ir.Value, name: str) -> ir.Value:
    flat = g.op("Reshape", index, g.constant([-1]), name="flat")
    found = g.op("GatherElements", g.constant(table, np.float32), flat, name=name, axis=0)
    return g.op("Reshape", found, g.op("Shape", index, name="shape"), name="as_index")


class INT8Lowering(Lowering):
    """Blocked DequantizeLinear, or a product of blocks that can be folded."""

    def onnxruntime_weight(
        self, g: GraphBuilder, stored: StoredLinear, inputs: Values, x: ir.Value, resident: bool
    ) -> ir.Value:
        weight, block = inputs["weight"], stored.algorithm.group_size
        scale = g.op("Cast", inputs["scale"], name="scale_float", to=int(FLOAT))
        if not resident:
            return g.op("DequantizeLinear", weight, scale, name="widened", axis=1, block_size=block)
        numbers = g.op("Cast", weight, to=int(FLOAT))
        numbers = g.op("Reshape", numbers, g.constant([0, -1, block]), name="numbers_by_block")
        return times_factors(g, numbers, scale)

    def tensorrt_weight(self, g: GraphBuilder, stored: StoredLinear, inputs: Values) -> ir.Value:
        """By row: INT4 as `int4_by_row` writes it."""
        scales, block = g.cast(inputs["scale"], g.dtype, name="scales"), stored.algorithm.group_size
        return g.op("DequantizeLinear", inputs["weight"], scales, name="widened", axis=1, block_size=block)


class INT4Lowering(INT8Lowering):
    """The same, where a byte may also hold numbers of two rows."""

    def operator(self, stored: StoredLinear) -> str:
        """A body for each size of a group and each packing."""
        return f"INT4Linear{stored.algorithm.group_size}{'' if stored.by_row else 'x2'}"

    def weight(
        self, g: GraphBuilder, stored: StoredLinear, raw: ir.Value, *, packed_as_bytes: bool
    ) -> ir.Value:
        """[out, in], or [out/2, in, 2] where two rows share bytes."""
        rows, columns = stored.weight.shape
        return g.reinterpret(raw, INT4, (rows, 2 * columns) if stored.by_row else (rows, columns, 2))

    def onnxruntime_weight(
        self, g: GraphBuilder, stored: StoredLinear, inputs: Values, x: ir.Value, resident: bool
    ) -> ir.Value:
        """Widened in the order of its bytes, then in rows."""
        if stored.by_row:
            return super().onnxruntime_weight(g, stored, inputs, x, resident)
        weight, block = inputs["weight"], stored.algorithm.group_size
        # The weight is [out/2, in, 2]: its scales, [out, groups], get that order.
        scale = g.op("Cast", inputs["scale"], name="scale_float", to=int(FLOAT))
        pairs = g.op("Reshape", scale, g.shape(-1, 2, g.dim(scale, 1)), name="scale_pairs")
        scale = g.op("Transpose", pairs, name="scale_by_pair", perm=[0, 2, 1])
        if resident:
            numbers = g.op("Cast", weight, to=int(FLOAT))
            numbers = g.op("Reshape", numbers, g.constant([0, -1, block, 2]), name="by_block")
            widened = g.op("Mul", numbers, g.unsqueeze(scale, 2), name="widened_by_block")
            widened = g.op("Reshape", widened, g.constant([0, -1, 2]), name="widened")
        else:
            widened = g.op("DequantizeLinear", weight, scale, name="widened", axis=1, block_size=block)
        by_row = g.op("Transpose", widened, name="by_row", perm=[0, 2, 1])
        return g.op("Reshape", by_row, g.shape(-1, g.dim(x, 1)), name="rows")


# By the names in formats.FORMATS.
LOWERINGS: Mapping[str, Lowering] = {
    "fp8": FP8Lowering(),
    "nvfp4": NVFP4Lowering(),
    "mxfp4": MXFP4Lowering(),
    "int8": INT8Lowering(),
    "int4": INT4Lowering(),
}
