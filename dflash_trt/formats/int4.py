"""INT4: two's complement numbers in groups with one scale each. Weights only.

Model Optimizer packs two rows into a byte, ONNX and TensorRT pack two columns (`by_row`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .base import BLOCK, FLOAT_DTYPES, Algorithm, Floats, Form, NumberFormat, Shape
from .numbers import INT4_MAX, pack_rows, unpack_pairs, unpack_rows

_AWQ = Algorithm("W4A16_AWQ", "int4", group_size=128)
_BYTES = np.arange(256, dtype=np.uint8)
_NIBBLES = np.stack([_BYTES & 15, _BYTES >> 4], axis=-1).astype(np.int8)


def quantize_int4(w: Floats, block: int) -> tuple[NDArray[np.uint8], Floats]:
    """[out, in] -> two's complement codes [out, in], one per byte, and float32 scales [out, in/block]."""
    blocks = w.reshape(w.shape[0], -1, block)
    scales = np.abs(blocks).max(axis=-1) / np.float32(INT4_MAX)
    scales[scales == 0] = 1
    codes = np.clip(np.rint(blocks / scales[..., None]), -8, 7).astype(np.int8)
    return codes.view(np.uint8).reshape(w.shape) & 15, scales


def dequantize_int4(codes: NDArray[np.uint8], scales: NDArray[Any]) -> Floats:
    signed = (codes.astype(np.int8) ^ 8) - 8
    blocks = signed.reshape(*scales.shape, -1).astype(np.float32)
    return (blocks * scales.astype(np.float32)[..., None]).reshape(codes.shape)


class INT4(NumberFormat):
    name = "int4"
    algorithms = (_AWQ,)
    group_sizes = (128, 64, 32)  # supported by both TensorRT and ONNX Runtime
    even_rows = True
    integer_bits = 4
    modelopt_config = "INT4_AWQ_CFG"

    def forms(self, algorithm: Algorithm, rows: int, columns: int) -> dict[str, Form]:
        return {
            "weight": Form([(rows // 2, columns), (rows, columns // 2)], ["U8"]),
            "weight_scale": Form([(rows, columns // algorithm.group_size)], FLOAT_DTYPES),
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
        return dequantize_int4(unpack_pairs(codes) if by_row else unpack_rows(codes), scale)

    def nbytes(self, parameters: int, rows: int, group_size: int) -> int:
        return round(parameters * (0.5 + 4 / (group_size or self.group_sizes[0])))

    def algorithm(self, *, calibrated: bool, inputs: Sequence[int]) -> Algorithm:
        """The algorithm with the largest group that divides all `inputs`."""
        fitting = [group for group in self.group_sizes if not any(n % group for n in inputs)]
        return replace(_AWQ, group_size=fitting[0] if fitting else self.group_sizes[-1])

    def written(self, algorithm: Algorithm, rows: int, columns: int) -> dict[str, tuple[str, Shape]]:
        groups = columns // algorithm.group_size
        return {"weight": ("U8", (rows // 2, columns)), "weight_scale": ("F32", (rows, groups))}

    def encode(self, algorithm: Algorithm, rows: Floats, shared: Floats) -> dict[str, NDArray[Any]]:
        codes, scales = quantize_int4(rows, algorithm.group_size)
        return {"weight": pack_rows(codes), "weight_scale": scales}

    def integers(
        self, codes: NDArray[Any], scale: NDArray[Any], *, by_row: bool
    ) -> tuple[NDArray[np.int8], Floats]:
        numbers = unpack_pairs(codes) if by_row else unpack_rows(codes)
        repeated = numbers.shape[1] // BLOCK // scale.shape[1]
        return (numbers.astype(np.int8) ^ 8) - 8, np.repeat(scale.astype(np.float32), repeated, axis=1)

    @property
    def byte_values(self) -> NDArray[np.float32]:
        return ((_NIBBLES ^ 8) - 8).astype(np.float32)
