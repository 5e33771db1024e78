"""FP8: E4M3 numbers, with a scale for the whole weight, for each row, for each block, or for each 32 columns (MXFP8).

Sources: OCP 8-bit Floating Point v1.0, OCP Microscaling Formats v1.0, the checkpoints of NVIDIA's Model Optimizer
(whole weights, rows), of DeepSeek and Qwen (blocks), and of compressed-tensors (all of these).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .base import BLOCK, EXPONENT_DTYPES, ONE, Algorithm, Form, NumberFormat, Shape
from .numbers import E4M3, E4M3_MAX, Floats, encode_e4m3

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
