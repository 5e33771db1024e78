"""INT4: two's complement numbers in groups with one scale each. Weights only.

Model Optimizer packs two rows into a byte, ONNX and TensorRT pack two columns (`by_row`).
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from .base import FLOAT_DTYPES, Algorithm, Form, NumberFormat
from .numbers import INT4_MAX, Floats, pack_rows, scale_for, unpack_pairs


class INT4(NumberFormat):
    name = "int4"
    algorithms = (Algorithm("W4A16_AWQ", "int4", group_size=128),)
    byte_values = (
        unpack_pairs(np.arange(256, dtype=np.uint8)[:, None]).view(ml_dtypes.int4).astype(np.float32)
    )
    group_sizes = (128, 64, 32)  # supported by both TensorRT and ONNX Runtime
    even_rows = True
    integer_bits = 4
    modelopt_config = "INT4_AWQ_CFG"

    def forms(self, algorithm: Algorithm, rows: int, columns: int) -> dict[str, Form]:
        """weight, with two rows or two columns in a byte, and weight_scale [rows, groups]."""
        return {
            "weight": Form([(rows // 2, columns), (rows, columns // 2)], ["U8"]),
            "weight_scale": Form([(rows, columns // algorithm.group_size)], FLOAT_DTYPES),
        }

    def encode(self, algorithm: Algorithm, rows: Floats, shared: Floats) -> dict[str, NDArray[Any]]:
        blocks = rows.reshape(len(rows), -1, algorithm.group_size)
        scales = scale_for(np.abs(blocks).max(axis=-1), INT4_MAX)
        codes = np.clip(np.rint(blocks / scales[..., None]), -8, 7).astype(np.int8)
        return {"weight": pack_rows(codes.view(np.uint8).reshape(rows.shape) & 15), "weight_scale": scales}
