"""MXFP4: E2M1 numbers in blocks of 32 with one power of two each. Weights only.

Source: OCP Microscaling Formats v1.0. gpt-oss stores its experts as blocks [E,O,G,16] and exponents [E,O,G].
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .base import BLOCK, EXPONENT_DTYPES, Algorithm, Form, NumberFormat
from .numbers import BYTE_TO_PAIR, E2M1, E2M1_MAX, Floats, encode_e2m1, pack_pairs


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
    """E2M1 with powers of two."""

    name = "mxfp4"
    algorithms = tuple(Algorithm(name, "mxfp4", group_size=BLOCK) for name in ("W4A16_MXFP4", "MXFP4"))
    byte_values = BYTE_TO_PAIR
    group_sizes = (BLOCK,)
    scale_bytes = 1
    capabilities = (100, 103, 110, 120, 121)  # seen with TensorRT-RTX 1.7

    def forms(self, algorithm: Algorithm, rows: int, columns: int) -> dict[str, Form]:
        """weight [rows, columns / 2] and weight_scale [rows, columns / 32], both bytes."""
        return {
            "weight": Form([(rows, columns // 2)], ["U8"]),
            "weight_scale": Form([(rows, columns // BLOCK)], EXPONENT_DTYPES),
        }

    def encode(self, algorithm: Algorithm, rows: Floats, shared: Floats) -> dict[str, NDArray[Any]]:
        codes, scales = quantize_mxfp4(rows)
        return {"weight": codes, "weight_scale": scales}
