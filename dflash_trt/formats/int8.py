"""INT8: two's complement numbers in groups with a scale each, or with one for each output. Weights only.

Written in groups of 32: the numbers of GGUF's Q8_0, with scales in float32. `W8A16` is Model Optimizer's name for
eight-bit weights alone. A build for a processor that multiplies bytes fast writes one scale for each output.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .base import FLOAT_DTYPES, Algorithm, Form, NumberFormat
from .numbers import INT8_MAX, Floats, scale_for

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
