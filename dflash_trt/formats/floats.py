"""Floating-point numbers of eight and four bits with scales.

FP8: E4M3, with a scale for the whole weight, for each row, for each block, or for each 32 columns (MXFP8).
MXFP4: E2M1, two in a byte, in blocks of 32 with one power of two each, weights only. gpt-oss stores its experts as
blocks [E,O,G,16] and exponents [E,O,G].
NVFP4: E2M1 in blocks of 16 with one E4M3 scale each, and one float32 scale for the whole weight.

Sources: OCP Microscaling Formats v1.0; OCP 8-bit Floating Point v1.0; for NVFP4 and FP8 the checkpoints of NVIDIA's
Model Optimizer (whole weights, rows), of DeepSeek and Qwen (blocks), and of compressed-tensors (all of these).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .base import BLOCK, EXPONENT_DTYPES, ONE, Algorithm, Form, NumberFormat, Shape
from .numbers import (
    BYTE_TO_PAIR,
    E2M1,
    E2M1_MAX,
    E4M3,
    E4M3_MAX,
    E4M3_MIN,
    Floats,
    encode_e2m1,
    encode_e4m3,
    pack_pairs,
)

NVFP4_BLOCK = 16
_CAPABILITIES = (100, 103, 110, 120, 121)  # seen with TensorRT-RTX 1.7


def quantize_mxfp4(w: Floats) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """[out, in] -> bytes [out, in/2] and exponents [out, in/32] + 127.

    Two powers of two are tried per block: the smallest that clips nothing, and the one below. The one with the
    smaller squared error is used.
    """
    blocks = w.reshape(w.shape[0], -1, BLOCK)
    # frexp: largest / 6 is below 2**exponent.
    exponent = np.frexp(np.abs(blocks).max(axis=-1) / np.float32(E2M1_MAX))[1]
    safe = np.clip(exponent, -127, 127)
    tried = []
    for exponents in (safe, np.maximum(safe - 1, -127)):
        scale = np.ldexp(np.float32(1), exponents)[..., None]
        codes = encode_e2m1(blocks / scale)
        error = np.square(E2M1[codes] * scale - blocks, dtype=np.float64).sum(axis=-1)
        tried.append((codes, exponents, error))
    (codes, exponents, error), (tighter, lower, less) = tried
    better = less < error
    codes = np.where(better[..., None], tighter, codes).reshape(w.shape)
    return pack_pairs(codes), (np.where(better, lower, exponents) + 127).astype(np.uint8)


class MXFP4(NumberFormat):
    name = "mxfp4"
    algorithms = tuple(Algorithm(name, "mxfp4", group_size=BLOCK) for name in ("W4A16_MXFP4", "MXFP4"))
    byte_values = BYTE_TO_PAIR
    group_sizes = (BLOCK,)
    scale_bytes = 1
    capabilities = _CAPABILITIES

    def forms(self, algorithm: Algorithm, rows: int, columns: int) -> dict[str, Form]:
        """weight [rows, columns / 2] and weight_scale [rows, columns / 32], both bytes."""
        return {
            "weight": Form([(rows, columns // 2)], ["U8"]),
            "weight_scale": Form([(rows, columns // BLOCK)], EXPONENT_DTYPES),
        }

    def encode(self, algorithm: Algorithm, rows: Floats, shared: Floats) -> dict[str, NDArray[Any]]:
        codes, scales = quantize_mxfp4(rows)
        return {"weight": codes, "weight_scale": scales}


class NVFP4(NumberFormat):
    """By the second scale, the largest block scale is E4M3's largest number."""

    name = "nvfp4"
    algorithms = (
        Algorithm("NVFP4", "nvfp4", activations=True, group_size=NVFP4_BLOCK),
        Algorithm("NVFP4_AWQ", "nvfp4", activations=True, group_size=NVFP4_BLOCK),
        Algorithm("W4A16_NVFP4", "nvfp4", group_size=NVFP4_BLOCK),
    )
    byte_values = BYTE_TO_PAIR
    group_sizes = (NVFP4_BLOCK,)
    scale_bytes = 1
    capabilities = _CAPABILITIES
    modelopt_config = "NVFP4_DEFAULT_CFG"
    largest = E2M1_MAX * E4M3_MAX

    def forms(self, algorithm: Algorithm, rows: int, columns: int) -> dict[str, Form]:
        """weight [rows, columns / 2], weight_scale [rows, columns / 16], and one weight_scale_2."""
        return {
            "weight": Form([(rows, columns // 2)], ["U8"]),
            "weight_scale": Form([(rows, columns // NVFP4_BLOCK)], ["F8_E4M3"]),
            "weight_scale_2": Form(ONE, ["F32"]),
        }

    def encode(self, algorithm: Algorithm, rows: Floats, shared: Floats) -> dict[str, NDArray[Any]]:
        """A row is about E2M1 * scale * shared."""
        blocks = rows.reshape(len(rows), -1, NVFP4_BLOCK)
        scales = np.abs(blocks).max(axis=-1) / (np.float32(E2M1_MAX) * shared)
        stored = np.clip(scales, E4M3_MIN, E4M3_MAX).astype(E4M3)
        codes = encode_e2m1(blocks / (stored.astype(np.float32) * shared)[..., None])
        return {"weight": pack_pairs(codes.reshape(rows.shape)), "weight_scale": stored}


_STATIC = Algorithm("FP8", "fp8", activations=True, static=True)
_BY_ROW = Algorithm("FP8_PER_CHANNEL_PER_TOKEN", "fp8", activations=True)
_IN_BLOCKS = tuple(
    Algorithm(name, "fp8", group_rows=128, group_size=128, layout="scale_inv")
    for name in ("FP8_PB_WO", "FP8_BLOCK_SCALES")
)
_MXFP8 = Algorithm("MXFP8", "fp8", group_size=BLOCK, layout="scale_inv")
_SCALE_DTYPES = ("F32", "BF16", "F16")


class FP8(NumberFormat):
    name = "fp8"
    algorithms = (_STATIC, _BY_ROW, *_IN_BLOCKS, _MXFP8)
    byte_values = np.arange(256, dtype=np.uint8).view(E4M3).astype(np.float32)[:, None]
    capabilities = (89, 90, 100, 103, 110, 120, 121)  # seen with TensorRT-RTX 1.7
    modelopt_config = "FP8_DEFAULT_CFG"
    largest = E4M3_MAX
    scale_by_row = True

    def forms(self, algorithm: Algorithm, rows: int, columns: int) -> dict[str, Form]:
        """weight [rows, columns], and weight_scale by `algorithm`."""
        weight = Form([(rows, columns)], ["F8_E4M3"])
        if algorithm.group_size:
            blocks = (-(-rows // algorithm.group_rows), -(-columns // algorithm.group_size))
            dtypes = () if algorithm.group_size == BLOCK and algorithm.group_rows == 1 else _SCALE_DTYPES
            also = (blocks[0], 1, blocks[1], 1)  # Model Optimizer's
            return {"weight": weight, "weight_scale": Form([blocks, also], (*dtypes, *EXPONENT_DTYPES))}
        per_row: tuple[Shape, ...] = ((rows,), (rows, 1))
        shapes = ONE + per_row if algorithm.static else per_row + ONE
        return {"weight": weight, "weight_scale": Form(shapes, _SCALE_DTYPES)}

    def algorithm(self, *, inputs: Sequence[int]) -> Algorithm:
        """One scale for each row."""
        return _BY_ROW

    def encode(self, algorithm: Algorithm, rows: Floats, shared: Floats) -> dict[str, NDArray[Any]]:
        """weight, and weight_scale where each row has its own."""
        if algorithm.static:
            return {"weight": encode_e4m3(rows / shared)}
        scales = self.scale_of(np.abs(rows).max(axis=1))
        return {"weight": encode_e4m3(rows / scales.reshape(-1, 1)), "weight_scale": scales}
