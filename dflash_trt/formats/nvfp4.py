"""NVFP4: E2M1 numbers in blocks of 16 with one E4M3 scale each, and one float32 scale for the whole weight.

Source: the checkpoints of NVIDIA's Model Optimizer.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .base import ONE, Algorithm, Form, NumberFormat
from .numbers import BYTE_TO_PAIR, E2M1_MAX, E4M3, E4M3_MAX, E4M3_MIN, Floats, encode_e2m1, pack_pairs

BLOCK = 16


class NVFP4(NumberFormat):
    """E2M1 with two scales. By the second, the largest block scale is E4M3's largest number."""

    name = "nvfp4"
    algorithms = (
        Algorithm("NVFP4", "nvfp4", activations=True, group_size=BLOCK),
        Algorithm("NVFP4_AWQ", "nvfp4", activations=True, group_size=BLOCK),
        Algorithm("W4A16_NVFP4", "nvfp4", group_size=BLOCK),
    )
    byte_values = BYTE_TO_PAIR
    group_sizes = (BLOCK,)
    scale_bytes = 1
    capabilities = (100, 103, 110, 120, 121)  # seen with TensorRT-RTX 1.7
    modelopt_config = "NVFP4_DEFAULT_CFG"
    largest = E2M1_MAX * E4M3_MAX

    def forms(self, algorithm: Algorithm, rows: int, columns: int) -> dict[str, Form]:
        """weight [rows, columns / 2], weight_scale [rows, columns / 16], and one weight_scale_2."""
        return {
            "weight": Form([(rows, columns // 2)], ["U8"]),
            "weight_scale": Form([(rows, columns // BLOCK)], ["F8_E4M3"]),
            "weight_scale_2": Form(ONE, ["F32"]),
        }

    def encode(self, algorithm: Algorithm, rows: Floats, shared: Floats) -> dict[str, NDArray[Any]]:
        """A row is about E2M1 * scale * shared."""
        blocks = rows.reshape(len(rows), -1, BLOCK)
        scales = np.abs(blocks).max(axis=-1) / (np.float32(E2M1_MAX) * shared)
        stored = np.clip(scales, E4M3_MIN, E4M3_MAX).astype(E4M3)
        codes = encode_e2m1(blocks / (stored.astype(np.float32) * shared)[..., None])
        return {"weight": pack_pairs(codes.reshape(rows.shape)), "weight_scale": stored}
