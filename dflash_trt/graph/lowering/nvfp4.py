"""NVFP4 layers: look-ups for ONNX Runtime, which has no E2M1; DequantizeLinear twice for TensorRT."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from dflash_trt.formats.numbers import BYTE_TO_PAIR, E2M1_MAX, E4M3, E4M3_MAX, E4M3_MIN
from dflash_trt.formats.nvfp4 import BLOCK
from dflash_trt.graph.builder import GraphBuilder

from . import bodies
from .base import LinearKind, Lowering

_E4M3_VALUES = np.arange(256, dtype=np.uint8).view(E4M3).astype(np.float32)


class NVFP4Lowering(Lowering):
    """Look-ups, or DequantizeLinear for the scales and then for the numbers."""

    pairs = bodies.E2M1
    unit_input_scale = 1 / (E2M1_MAX * E4M3_MAX)

    def onnxruntime_weight(
        self, g: GraphBuilder, kind: LinearKind, inputs: Mapping[str, ir.Value], x: ir.Value, resident: bool
    ) -> ir.Value:
        """Looked up in tables, times both scales."""
        low, high = (bodies.table(g, BYTE_TO_PAIR[:, i], x, resident) for i in (0, 1))
        numbers = bodies.by_block(g, low, high, inputs["weight"], BLOCK)
        scale, second = inputs["scale"], inputs["global_scale"]
        if resident:
            factors = g.op("Cast", scale, name="scale_float", to=int(bodies.FLOAT))
        else:
            factors = g.op("DequantizeLinear", scale, g.constant(1, np.float32), name="scale_float")
        return bodies.times_factors(g, numbers, _times_second(g, kind, factors, second))

    def tensorrt_weight(self, g: GraphBuilder, kind: LinearKind, inputs: Mapping[str, ir.Value]) -> ir.Value:
        """First the scales, then the numbers."""
        both = inputs["scale"], inputs["global_scale"]
        scales = g.op("DequantizeLinear", *both, name="scales", output_dtype=int(g.dtype))
        return g.op("DequantizeLinear", inputs["weight"], scales, name="widened", axis=1, block_size=BLOCK)

    def onnxruntime_input(self, g: GraphBuilder, scale: ir.Value, x: ir.Value) -> ir.Value:
        """Rounded to E2M1 in blocks, their scales to E4M3: from standard operators, as E2M1 has no CPU kernels."""
        second = scale

        def number(value: float) -> ir.Value:
            return g.constant(value, np.float32)

        blocks = g.op("Reshape", x, g.constant([0, -1, BLOCK]), name="blocks")
        magnitude = g.op("Abs", blocks, name="magnitude")
        largest = g.op("ReduceMax", magnitude, g.constant([2]), name="block_largest", keepdims=1)
        scale = g.op("Div", largest, g.op("Mul", second, number(E2M1_MAX)), name="block_scale")
        scale = g.op("Clip", scale, number(E4M3_MIN), number(E4M3_MAX), name="block_scale_in_range")
        scale = g.op("Cast", scale, name="block_scale_code", to=int(bodies.E4M3))
        scale = g.op("Mul", g.op("Cast", scale, to=int(bodies.FLOAT)), second, name="block_scale_rounded")
        v = g.op("Clip", g.op("Div", blocks, scale), number(-E2M1_MAX), number(E2M1_MAX), name="in_range")
        # Numbers lie 0.5 apart below 2, 1 apart below 4, 2 apart up to 6; Round takes ties to even, as the codes do.
        magnitude = g.op("Abs", v, name="magnitude")
        step = g.op("Where", g.op("Less", magnitude, number(4)), number(1), number(2), name="step")
        step = g.op("Where", g.op("Less", magnitude, number(2)), number(0.5), step, name="step")
        rounded = g.op("Mul", g.op("Round", g.op("Div", v, step), name="round"), step, name="rounded")
        return g.op("Reshape", g.op("Mul", rounded, scale), g.constant([0, -1]), name="x_rounded")

    def tensorrt_input(self, g: GraphBuilder, scale: ir.Value, x: ir.Value) -> ir.Value:
        """By TensorRT's own operator, then back."""
        codes, scales = g.multi(
            *("TRT_FP4DynamicQuantize", x, scale),
            outputs=2,
            name="x_codes",
            domain=bodies.TRT_DOMAIN,
            axis=-1,
            block_size=BLOCK,
            scale_type=int(bodies.E4M3),
        )
        scales = g.op("DequantizeLinear", scales, scale, name="x_scales", output_dtype=int(g.dtype))
        return g.op("DequantizeLinear", codes, scales, name="x_rounded", axis=-1, block_size=BLOCK)

    def expert_factors(self, g: GraphBuilder, kind: LinearKind, parts: Mapping[str, ir.Value]) -> ir.Value:
        """Both scales of each block."""
        factors = bodies.lookup(g, g.constant(_E4M3_VALUES, np.float32), parts["scale"])
        return _times_second(g, kind, factors, parts["global_scale"])


def _times_second(g: GraphBuilder, kind: LinearKind, scales: ir.Value, second: ir.Value) -> ir.Value:
    """The factor of each block."""
    return g.op("Div" if kind.reciprocal else "Mul", scales, second, name="factors")
