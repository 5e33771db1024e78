"""The numbers of quantized weights in NumPy: E2M1, E4M3, E8M0 and INT4, and their packing.

Sources: OCP Microscaling Formats v1.0 (MXFP4), OCP 8-bit Floating Point v1.0 (E4M3). For NVFP4 and INT4, the
checkpoints of NVIDIA's Model Optimizer. All encoders round to nearest, ties to even, and saturate.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

# The 16 numbers of E2M1: sign, two exponent bits, one mantissa bit.
E2M1: Floats = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
E2M1_MAX = 6.0
# Two numbers per byte, the first in the low half.
BYTE_TO_PAIR = np.stack([E2M1[np.arange(256) & 15], E2M1[np.arange(256) >> 4]], axis=-1)
# All powers of two that a scale can have; 255 is NaN.
E8M0: Floats = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E4M3_MAX = 448.0
E4M3_MIN = 2.0**-9
CACHE_SCALE_BYTES = 4  # of the float32 scale after the E4M3 numbers of a head in a cache row
INT4_MAX, INT8_MAX = 7.0, 127.0


def encode_e4m3(x: Floats) -> NDArray[Any]:
    return np.clip(x, -E4M3_MAX, E4M3_MAX).astype(E4M3)


def encode_e2m1(x: Floats) -> Bytes:
    """4-bit codes, one per byte."""
    return x.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)


def pack_pairs(codes: Bytes) -> Bytes:
    """Two 4-bit codes per byte along the last axis, the first in the low half."""
    packed: Bytes = codes[..., 0::2] | (codes[..., 1::2] << np.uint8(4))
    return packed


def unpack_pairs(packed: Bytes) -> Bytes:
    """The reverse of `pack_pairs`."""
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)


def pack_rows(codes: Bytes) -> Bytes:
    """Model Optimizer's INT4: row i of the bytes holds rows 2i and 2i+1; [out, in] -> [out/2, in]."""
    packed: Bytes = codes[0::2] | (codes[1::2] << np.uint8(4))
    return packed


def unpack_rows(packed: Bytes) -> Bytes:
    """[out/2, in] bytes -> [out, in] codes."""
    return np.stack([packed & 15, packed >> 4], axis=1).reshape(-1, packed.shape[-1])


def unpack_words(words: NDArray[np.int32], bits: int) -> Bytes:
    """[rows, words] of 32 bits -> [rows, words * 32 / bits] unsigned codes of 4 or 8 bits, the lowest bits first."""
    data = np.ascontiguousarray(words).view(np.uint8)
    return unpack_pairs(data) if bits == 4 else data


# AutoAWQ keeps output c of a word's eight in its nibble number _AWQ_NIBBLES[c].
_AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)


def unpack_awq(words: NDArray[np.int32]) -> Bytes:
    """[rows, words] of AutoAWQ -> [rows, 8 * words] unsigned codes of 4 bits."""
    nibbles = unpack_words(words, 4).reshape(*words.shape, 8)
    return nibbles[..., _AWQ_NIBBLES].reshape(len(words), -1)


def scale_for(largest: Any, top: float) -> Floats:
    """The scale at which `top` represents the largest magnitude; 1 if that is 0."""
    largest = np.asarray(largest, np.float32)
    normal = np.maximum(largest / np.float32(top), np.finfo(np.float32).tiny)
    return np.where(largest > 0, normal, np.float32(1))


def cache_numbers(rows: Any) -> Floats:
    """The numbers of cache rows [..., d + 4] in E4M3, bytes: float32 [..., d]."""
    codes, scale = rows[..., :-CACHE_SCALE_BYTES], np.ascontiguousarray(rows[..., -CACHE_SCALE_BYTES:])
    numbers: Floats = codes.view(E4M3).astype(np.float32)
    return numbers * scale.view(np.float32)
