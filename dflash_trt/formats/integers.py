"""INT8 and INT4: two's complement numbers in groups with a scale each; INT8 also with one for each output. Weights
only.

INT8 is written in groups of 32: the numbers of GGUF's Q8_0, with scales in float32. `W8A16` is Model Optimizer's name
for eight-bit weights alone. A build for a processor that multiplies bytes fast writes one scale for each output.

Model Optimizer packs two rows of INT4 into a byte, ONNX and TensorRT pack two columns.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from .base import FLOAT_DTYPES, Algorithm, Form, NumberFormat
from .numbers import INT4_MAX, INT8_MAX, Floats, pack_rows, scale_for, unpack_pairs

GROUP = 32
PER_CHANNEL = Algorithm("W8A16_PER_CHANNEL", "int8")


class INT8(NumberFormat):
    name = "int8"
    algorithms = (Algorithm("W8A16", "int8", group_size=GROUP), PER_CHANNEL)
    byte_values = np.arange(256, dtype=np.uint8).view(np.int8).astype(np.float32)[:, None]
    group_sizes = (GROUP,)
    integer_bits = 8

    def forms(self, algorithm: Algorithm, rows: int, columns: int) -> dict[str, Form]:
        """weight [rows, columns] and weight_scale [rows, groups]."""
        return {
            "weight": Form([(rows, columns)], ["I8"]),
            "weight_scale": Form([(rows, columns // (algorithm.group_size or columns))], FLOAT_DTYPES),
        }

    def encode(self, algorithm: Algorithm, rows: Floats, shared: Floats) -> dict[str, NDArray[Any]]:
        blocks = rows.reshape(len(rows), -1, algorithm.group_size or rows.shape[1])
        scales = scale_for(np.abs(blocks).max(axis=-1), INT8_MAX)
        codes = np.rint(blocks / scales[..., None]).astype(np.int8)
        return {"weight": codes.reshape(rows.shape), "weight_scale": scales}


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
