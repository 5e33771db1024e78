"""NVFP4: E2M1 numbers in blocks of 16 with one E4M3 scale each, and one float32 scale for the whole weight.

Source: the checkpoints of NVIDIA's Model Optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from . import bodies
from .base import ONE, Algorithm, Floats, Form, NumberFormat, Shape
from .numbers import (
    BYTE_TO_PAIR,
    E2M1,
    E2M1_MAX,
    E4M3,
    E4M3_MAX,
    E4M3_MIN,
    encode_e2m1,
    pack_pairs,
    scale_for,
    unpack_pairs,
)

if TYPE_CHECKING:
    from dflash_trt.checkpoint.linears import StoredLinear
    from dflash_trt.graph.builder import GraphBuilder
    from dflash_trt.graph.quantized import LinearKind

BLOCK = 16
_NVFP4 = Algorithm("NVFP4", "nvfp4", activations=True, group_size=BLOCK)
_E4M3_VALUES = np.arange(256, dtype=np.uint8).view(E4M3).astype(np.float32)


def nvfp4_global_scale(largest: Any) -> Floats:
    """The second scale. With it, the largest block scale is E4M3's largest number."""
    return scale_for(largest, E2M1_MAX * E4M3_MAX)


def quantize_nvfp4(w: Floats, global_scale: Floats) -> tuple[NDArray[np.uint8], NDArray[Any]]:
    """[out, in] -> bytes [out, in/2] and E4M3 scales [out, in/16]; w is about E2M1 * scale * global_scale."""
    blocks = w.reshape(w.shape[0], -1, BLOCK)
    scales = np.abs(blocks).max(axis=-1) / (np.float32(E2M1_MAX) * global_scale)
    scales[scales == 0] = 1
    stored = np.clip(scales, E4M3_MIN, E4M3_MAX).astype(E4M3)
    codes = encode_e2m1(blocks / (stored.astype(np.float32) * global_scale)[..., None])
    return pack_pairs(codes.reshape(w.shape)), stored


def dequantize_nvfp4(packed: NDArray[np.uint8], scales: NDArray[Any], global_scale: Floats) -> Floats:
    numbers = E2M1[unpack_pairs(packed)].reshape(packed.shape[0], -1, BLOCK)
    found: Floats = numbers * (scales.astype(np.float32) * global_scale)[..., None]
    return found.reshape(packed.shape[0], -1)


class NVFP4(NumberFormat):
    name = "nvfp4"
    algorithms = (
        _NVFP4,
        Algorithm("NVFP4_AWQ", "nvfp4", activations=True, group_size=BLOCK),
        Algorithm("W4A16_NVFP4", "nvfp4", group_size=BLOCK),
    )
    group_sizes = (BLOCK,)
    capabilities = (100, 103, 110, 120, 121)  # seen with TensorRT-RTX 1.7
    modelopt_config = "NVFP4_DEFAULT_CFG"
    activations = True
    expanded = "global_scale"

    def forms(self, algorithm: Algorithm, rows: int, columns: int) -> dict[str, Form]:
        return {
            "weight": Form([(rows, columns // 2)], ["U8"]),
            "weight_scale": Form([(rows, columns // BLOCK)], ["F8_E4M3"]),
            "weight_scale_2": Form(ONE, ["F32"]),
        }

    def widen(
        self, codes: NDArray[Any], scale: NDArray[Any], global_scale: NDArray[Any] | None, *, by_row: bool
    ) -> Floats:
        assert global_scale is not None
        return dequantize_nvfp4(codes, scale, np.asarray(global_scale, np.float32).reshape(()))

    def nbytes(self, parameters: int, rows: int, group_size: int) -> int:
        return round(parameters * (0.5 + 1 / BLOCK))

    def algorithm(self, *, calibrated: bool, inputs: Sequence[int]) -> Algorithm:
        return _NVFP4

    def written(self, algorithm: Algorithm, rows: int, columns: int) -> dict[str, tuple[str, Shape]]:
        return {
            "weight": ("U8", (rows, columns // 2)),
            "weight_scale": ("F8_E4M3", (rows, columns // BLOCK)),
            "weight_scale_2": ("F32", ()),
        }

    def shared_scale(self, algorithm: Algorithm) -> str | None:
        return "weight_scale_2"

    def scale_of(self, largest: float | NDArray[Any]) -> Floats:
        return nvfp4_global_scale(largest)

    def encode(self, algorithm: Algorithm, rows: Floats, shared: Floats) -> dict[str, NDArray[Any]]:
        codes, scales = quantize_nvfp4(rows, shared)
        return {"weight": codes, "weight_scale": scales}

    def weight(
        self, g: GraphBuilder, stored: StoredLinear, raw: ir.Value, *, packed_as_bytes: bool
    ) -> ir.Value:
        rows, columns = stored.weight.shape
        return raw if packed_as_bytes else g.reinterpret(raw, bodies.E2M1, (rows, 2 * columns))

    def onnxruntime_weight(
        self, g: GraphBuilder, kind: LinearKind, inputs: Mapping[str, ir.Value], x: ir.Value, resident: bool
    ) -> ir.Value:
        low, high = (bodies.table(g, BYTE_TO_PAIR[:, i], x, resident) for i in (0, 1))
        numbers = bodies.by_block(g, low, high, inputs["weight"], BLOCK)
        scale, second = inputs["scale"], inputs["global_scale"]
        if resident:
            factors = g.op("Mul", g.op("Cast", scale, to=int(bodies.FLOAT)), second, name="factors")
        else:
            factors = g.op("DequantizeLinear", scale, second, name="factors")
        return bodies.times_factors(g, numbers, factors)

    def tensorrt_weight(self, g: GraphBuilder, kind: LinearKind, inputs: Mapping[str, ir.Value]) -> ir.Value:
        scales = g.op(
            *("DequantizeLinear", inputs["scale"], inputs["global_scale"]),
            name="scales",
            output_dtype=int(g.dtype),
        )
        return g.op("DequantizeLinear", inputs["weight"], scales, name="widened", axis=1, block_size=BLOCK)

    unit_input_scale = 1 / (E2M1_MAX * E4M3_MAX)

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

    @property
    def byte_values(self) -> NDArray[np.float32]:
        return BYTE_TO_PAIR

    def expert_factors(self, g: GraphBuilder, parts: Mapping[str, ir.Value]) -> ir.Value:
        factors = bodies.lookup(g, g.constant(_E4M3_VALUES, np.float32), parts["scale"])
        return g.op("Mul", factors, parts["global_scale"], name="factors")
