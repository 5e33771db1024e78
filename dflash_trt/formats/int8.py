"""INT8: two's complement numbers in groups with a scale each, or with one for each output. Weights only.

Written in groups of 32: the numbers of GGUF's Q8_0, with scales in float32. `W8A16` is Model Optimizer's name for
eight-bit weights alone. A build for a processor that multiplies bytes fast writes one scale for each output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .base import BLOCK, FLOAT_DTYPES, Algorithm, Floats, Form, NumberFormat, Shape
from .numbers import INT8_MAX, scale_for

GROUP = 32
_W8A16 = Algorithm("W8A16", "int8", group_size=GROUP)
PER_CHANNEL = Algorithm("W8A16_PER_CHANNEL", "int8")


def quantize_int8(w: Floats, group: int = GROUP) -> tuple[NDArray[np.int8], Floats]:
    """[out, in] -> codes [out, in] and float32 scales [out, in/group]."""
    blocks = w.reshape(w.shape[0], -1, group)
    scales = scale_for(np.abs(blocks).max(axis=-1), INT8_MAX)
    return np.rint(blocks / scales[..., None]).astype(np.int8).reshape(w.shape), scales


class INT8(NumberFormat):
    name = "int8"
    algorithms = (_W8A16, PER_CHANNEL)
    group_sizes = (GROUP,)
    numbers_in_byte = 1
    integer_bits = 8

    def forms(self, algorithm: Algorithm, rows: int, columns: int) -> dict[str, Form]:
        return {
            "weight": Form([(rows, columns)], ["I8"]),
            "weight_scale": Form([(rows, columns // (algorithm.group_size or columns))], FLOAT_DTYPES),
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
        blocks = codes.reshape(*scale.shape, -1).astype(np.float32)
        widened: Floats = (blocks * scale.astype(np.float32)[..., None]).reshape(codes.shape)
        return widened

    def nbytes(self, parameters: int, rows: int, group_size: int) -> int:
        return parameters + 4 * (parameters // group_size if group_size else rows)

    def algorithm(self, *, calibrated: bool, inputs: Sequence[int]) -> Algorithm:
        return _W8A16

    def written(self, algorithm: Algorithm, rows: int, columns: int) -> dict[str, tuple[str, Shape]]:
        groups = columns // (algorithm.group_size or columns)
        return {"weight": ("I8", (rows, columns)), "weight_scale": ("F32", (rows, groups))}

    def encode(self, algorithm: Algorithm, rows: Floats, shared: Floats) -> dict[str, NDArray[Any]]:
        codes, scales = quantize_int8(rows, algorithm.group_size or rows.shape[1])
        return {"weight": codes, "weight_scale": scales}

    def integers(
        self, codes: NDArray[Any], scale: NDArray[Any], *, by_row: bool
    ) -> tuple[NDArray[np.int8], Floats]:
        repeated = codes.shape[1] // BLOCK // scale.shape[1]
        return codes, np.repeat(scale.astype(np.float32), repeated, axis=1)

    @property
    def byte_values(self) -> NDArray[np.float32]:
        values: NDArray[np.float32] = np.arange(256, dtype=np.uint8).view(np.int8).astype(np.float32)
        return values[:, None]
