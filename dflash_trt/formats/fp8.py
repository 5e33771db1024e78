"""FP8: E4M3 numbers, with a scale for the whole weight, for each row, for each block, or for each 32 columns (MXFP8).

Sources: OCP 8-bit Floating Point v1.0, OCP Microscaling Formats v1.0, the checkpoints of NVIDIA's Model Optimizer
(whole weights, rows), of DeepSeek and Qwen (blocks), and of compressed-tensors (all of these).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .base import BLOCK, EXPONENT_DTYPES, ONE, Algorithm, Floats, Form, NumberFormat, Shape
from .numbers import E4M3, E4M3_MAX, E8M0, encode_e4m3, scale_for

_STATIC = Algorithm("FP8", "fp8", activations=True, static=True)
_BY_ROW = Algorithm("FP8_PER_CHANNEL_PER_TOKEN", "fp8", activations=True)
_IN_BLOCKS = tuple(
    Algorithm(name, "fp8", group_rows=128, group_size=128, layout="scale_inv")
    for name in ("FP8_PB_WO", "FP8_BLOCK_SCALES")
)
_MXFP8 = Algorithm("MXFP8", "fp8", group_size=BLOCK, layout="scale_inv")
_SCALE_DTYPES = ("F32", "BF16", "F16")


def fp8_scale(largest: Any) -> Floats:
    """The scale of E4M3 codes, from the largest magnitude they represent; 1 if that is 0."""
    return scale_for(largest, E4M3_MAX)


class FP8(NumberFormat):
    name = "fp8"
    algorithms = (_STATIC, _BY_ROW, *_IN_BLOCKS, _MXFP8)
    numbers_in_byte = 1
    capabilities = (89, 90, 100, 103, 110, 120, 121)  # seen with TensorRT-RTX 1.7
    modelopt_config = "FP8_DEFAULT_CFG"
    scale_by_row = True
    activations = True
    expanded = "scale"

    def forms(self, algorithm: Algorithm, rows: int, columns: int) -> dict[str, Form]:
        weight = Form([(rows, columns)], ["F8_E4M3"])
        if algorithm.group_size:
            blocks = (-(-rows // algorithm.group_rows), -(-columns // algorithm.group_size))
            dtypes = () if algorithm.group_size == BLOCK and algorithm.group_rows == 1 else _SCALE_DTYPES
            also = (blocks[0], 1, blocks[1], 1)  # Model Optimizer's
            return {"weight": weight, "weight_scale": Form([blocks, also], (*dtypes, *EXPONENT_DTYPES))}
        per_row: tuple[Shape, ...] = ((rows,), (rows, 1))
        shapes = ONE + per_row if algorithm.static else per_row + ONE
        return {"weight": weight, "weight_scale": Form(shapes, _SCALE_DTYPES)}

    def widen(
        self,
        algorithm: Algorithm,
        codes: NDArray[Any],
        scale: NDArray[Any],
        global_scale: NDArray[Any] | None,
        *,
        by_row: bool,
    ) -> Floats:
        factors = E8M0[scale.view(np.uint8)] if scale.dtype.itemsize == 1 else scale.astype(np.float32)
        if not algorithm.group_size:
            found: Floats = codes.astype(np.float32) * factors.reshape(-1, 1)
            return found
        rows, columns = codes.shape
        factors = np.repeat(factors.reshape(len(factors), -1), algorithm.group_rows, axis=0)[:rows]
        factors = np.repeat(factors, algorithm.group_size, axis=1)[:, :columns]
        return codes.astype(np.float32) * factors

    def nbytes(self, parameters: int, rows: int, group_size: int) -> int:
        return parameters + 4 * rows

    def algorithm(self, *, calibrated: bool, inputs: Sequence[int]) -> Algorithm:
        return _STATIC if calibrated else _BY_ROW

    def written(self, algorithm: Algorithm, rows: int, columns: int) -> dict[str, tuple[str, Shape]]:
        return {
            "weight": ("F8_E4M3", (rows, columns)),
            "weight_scale": ("F32", () if algorithm.static else (rows,)),
        }

    def shared_scale(self, algorithm: Algorithm) -> str | None:
        return "weight_scale" if algorithm.static else None

    def scale_of(self, largest: float | NDArray[Any]) -> Floats:
        return fp8_scale(largest)

    def encode(self, algorithm: Algorithm, rows: Floats, shared: Floats) -> dict[str, NDArray[Any]]:
        if algorithm.static:
            return {"weight": encode_e4m3(rows / shared)}
        scales = fp8_scale(np.abs(rows).max(axis=1))
        return {"weight": encode_e4m3(rows / scales.reshape(-1, 1)), "weight_scale": scales}

    @property
    def byte_values(self) -> NDArray[np.float32]:
        values: NDArray[np.float32] = np.arange(256, dtype=np.uint8).view(E4M3).astype(np.float32)[:, None]
        return values
