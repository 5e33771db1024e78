"""NVFP4: E2M1 numbers in blocks of 16 with one E4M3 scale each, and one float32 scale for the whole weight.

Source: the checkpoints of NVIDIA's Model Optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

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

BLOCK = 16
_NVFP4 = Algorithm("NVFP4", "nvfp4", activations=True, group_size=BLOCK)


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
        self,
        algorithm: Algorithm,
        codes: NDArray[Any],
        scale: NDArray[Any],
        global_scale: NDArray[Any] | None,
        *,
        by_row: bool,
    ) -> Floats:
        assert global_scale is not None
        second = np.asarray(global_scale, np.float32).reshape(())
        if algorithm.reciprocal:  # compressed-tensors divides by it
            return dequantize_nvfp4(codes, scale.astype(np.float32) / second, np.ones((), np.float32))
        return dequantize_nvfp4(codes, scale, second)

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

    @property
    def byte_values(self) -> NDArray[np.float32]:
        return BYTE_TO_PAIR
