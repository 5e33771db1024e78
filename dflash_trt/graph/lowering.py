"""How the layers of each number format become nodes of a graph. dflash_trt/formats has the numbers.

On ONNX Runtime, layers of integers are nodes of its own (quantized.py), and a build widens all others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from dflash_trt.checkpoint.linears import StoredLinear
from dflash_trt.formats.base import BLOCK
from dflash_trt.formats.floats import NVFP4_BLOCK
from dflash_trt.formats.numbers import E2M1_MAX, E4M3_MAX, E4M3_MIN
from dflash_trt.graph.builder import FLOAT, GraphBuilder

Values = Mapping[str, ir.Value]
TRT_DOMAIN = "trt"  # its operators are those of TensorRT's own parser
E4M3, E2M1, INT4 = ir.DataType.FLOAT8E4M3FN, ir.DataType.FLOAT4E2M1, ir.DataType.INT4


class Lowering(ABC):
    """Nodes for layers of one number format. `inputs` are the tensors of a `stored` layer as values."""

    # The scale of an input whose largest magnitude is 1, for formats that quantize inputs too.
    unit_input_scale = 1.0
    # TensorRT's type for pairs of numbers in a byte, where there is one.
    pairs: ir.DataType | None = None

    def weight(self, g: GraphBuilder, stored: StoredLinear, raw: ir.Value) -> ir.Value:
        """The codes `raw`, as they are on disk, in TensorRT's type for them."""
        if self.pairs is None:
            return raw
        rows, columns = stored.weight.shape
        return g.reinterpret(raw, self.pairs, (rows, 2 * columns))

    @abstractmethod
    def tensorrt_weight(self, g: GraphBuilder, stored: StoredLinear, inputs: Values) -> ir.Value:
        """[out, in] in the graph's dtype. A packed constant may only feed a DequantizeLinear."""

    def rounded_input(self, g: GraphBuilder, scale: ir.Value, x: ir.Value) -> ir.Value:
        """x, float32, rounded as the format does, in float32, by standard operators."""
        raise NotImplementedError("this format quantizes weights only")

    def tensorrt_input(self, g: GraphBuilder, scale: ir.Value, x: ir.Value) -> ir.Value:
        """x rounded as the format does, in the graph's dtype."""
        raise NotImplementedError("this format quantizes weights only")


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
    """QuantizeLinear and DequantizeLinear of E4M3."""

    unit_input_scale = 1 / E4M3_MAX

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

    def rounded_input(self, g: GraphBuilder, scale: ir.Value, x: ir.Value) -> ir.Value:
        """There and back, in float32."""
        codes = g.op("QuantizeLinear", x, scale, name="x_codes", output_dtype=int(E4M3))
        return g.op("DequantizeLinear", codes, scale, name="x_rounded")

    def tensorrt_input(self, g: GraphBuilder, scale: ir.Value, x: ir.Value) -> ir.Value:
        """There and back, in the graph's dtype."""
        codes = g.op("QuantizeLinear", x, scale, name="x_codes", output_dtype=int(E4M3))
        return g.op("DequantizeLinear", codes, scale, name="x_rounded", output_dtype=int(g.dtype))


class NVFP4Lowering(Lowering):
    """DequantizeLinear for the scales and then for the numbers."""

    pairs = E2M1
    unit_input_scale = 1 / (E2M1_MAX * E4M3_MAX)

    def tensorrt_weight(self, g: GraphBuilder, stored: StoredLinear, inputs: Values) -> ir.Value:
        both = inputs["scale"], inputs["global_scale"]
        scales = g.op("DequantizeLinear", *both, name="scales", output_dtype=int(g.dtype))
        return g.op(
            "DequantizeLinear", inputs["weight"], scales, name="widened", axis=1, block_size=NVFP4_BLOCK
        )

    def rounded_input(self, g: GraphBuilder, scale: ir.Value, x: ir.Value) -> ir.Value:
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


class MXFP4Lowering(Lowering):
    """TensorRT's own operator."""

    pairs = E2M1

    def tensorrt_weight(self, g: GraphBuilder, stored: StoredLinear, inputs: Values) -> ir.Value:
        return microscaled(g, inputs["weight"], inputs["scale"])


class INT8Lowering(Lowering):
    """Blocked DequantizeLinear of numbers in two's complement by row."""

    def tensorrt_weight(self, g: GraphBuilder, stored: StoredLinear, inputs: Values) -> ir.Value:
        scales, block = g.cast(inputs["scale"], g.dtype, name="scales"), stored.algorithm.group_size
        return g.op("DequantizeLinear", inputs["weight"], scales, name="widened", axis=1, block_size=block)


class INT4Lowering(INT8Lowering):
    """The same, with two columns in a byte."""

    pairs = INT4


# By the names in formats.FORMATS.
LOWERINGS: Mapping[str, Lowering] = {
    "fp8": FP8Lowering(),
    "nvfp4": NVFP4Lowering(),
    "mxfp4": MXFP4Lowering(),
    "int8": INT8Lowering(),
    "int4": INT4Lowering(),
}
