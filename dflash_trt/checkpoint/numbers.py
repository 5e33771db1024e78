"""Number formats of quantized weights, in NumPy: E2M1, E4M3, E8M0 and INT4, and matrices [out, in] kept in them.

Sources: OCP Microscaling Formats v1.0 (MXFP4), OCP 8-bit Floating Point v1.0 (E4M3), and for NVFP4 and INT4 the
checkpoints of NVIDIA's Model Optimizer. Everything that encodes rounds to nearest, ties to even, and saturates.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

# The 16 numbers of E2M1: sign, two exponent bits, one mantissa bit.
_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E2M1 = np.concatenate([_MAGNITUDES, -_MAGNITUDES])
E2M1_MAX = 6.0
# Two numbers a byte, the first in the low half.
BYTE_TO_PAIR = np.stack([E2M1[np.arange(256) & 15], E2M1[np.arange(256) >> 4]], axis=-1)
# Every power of two that a scale can be; 255 is NaN.
E8M0 = np.append(np.ldexp(np.float32(1), np.arange(-127, 128)), np.nan).astype(np.float32)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E4M3_MAX = 448.0
E4M3_MIN = 2.0**-9
INT4_MAX = 7.0

NVFP4_BLOCK, MXFP4_BLOCK = 16, 32


def encode_e4m3(x: Floats) -> NDArray[Any]:
    return np.clip(x, -E4M3_MAX, E4M3_MAX).astype(E4M3)


def encode_e2m1(x: Floats) -> Bytes:
    """4-bit codes, one a byte."""
    # A tie goes to the code whose mantissa bit is 0, which is the even code.
    middles = (_MAGNITUDES[:-1] + _MAGNITUDES[1:]) / 2
    magnitude = np.abs(x)
    below = np.searchsorted(middles, magnitude, side="left")
    above = np.searchsorted(middles, magnitude, side="right")
    codes = np.where(below % 2 == 0, below, above).astype(np.uint8)
    signed: Bytes = codes | (np.signbit(x).astype(np.uint8) << np.uint8(3))
    return signed


def pack_pairs(codes: Bytes) -> Bytes:
    """Two 4-bit codes a byte along the last axis, the first in the low half."""
    packed: Bytes = codes[..., 0::2] | (codes[..., 1::2] << np.uint8(4))
    return packed


def unpack_pairs(packed: Bytes) -> Bytes:
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)


def pack_rows(codes: Bytes) -> Bytes:
    """Model Optimizer's INT4: rows 2i and 2i+1 share the bytes of row i; [out, in] -> [out/2, in]."""
    packed: Bytes = codes[0::2] | (codes[1::2] << np.uint8(4))
    return packed


def unpack_rows(packed: Bytes) -> Bytes:
    """[out/2, in] bytes -> [out, in] codes."""
    return np.stack([packed & 15, packed >> 4], axis=1).reshape(-1, packed.shape[-1])


def fp8_scale(largest: Any) -> Floats:
    """What E4M3 codes are multiplied by, from the largest magnitude they stand for; 1 where that is 0."""
    return _scale(largest, E4M3_MAX)


def nvfp4_global_scale(largest: Any) -> Floats:
    """The second scale of NVFP4: block scales, E4M3, then reach from their largest number down."""
    return _scale(largest, E2M1_MAX * E4M3_MAX)


def _scale(largest: Any, top: float) -> Floats:
    largest = np.asarray(largest, np.float32)
    normal = np.maximum(largest / np.float32(top), np.finfo(np.float32).tiny)
    return np.where(largest > 0, normal, np.float32(1))


def quantize_nvfp4(w: Floats, global_scale: Floats) -> tuple[Bytes, NDArray[Any]]:
    """[out, in] -> bytes [out, in/2] and E4M3 scales [out, in/16]; w is about E2M1 * scale * global_scale."""
    blocks = w.reshape(w.shape[0], -1, NVFP4_BLOCK)
    scales = np.abs(blocks).max(axis=-1) / (np.float32(E2M1_MAX) * global_scale)
    scales[scales == 0] = 1
    stored = np.clip(scales, E4M3_MIN, E4M3_MAX).astype(E4M3)
    codes = encode_e2m1(blocks / (stored.astype(np.float32) * global_scale)[..., None])
    return pack_pairs(codes.reshape(w.shape)), stored


def dequantize_nvfp4(packed: Bytes, scales: NDArray[Any], global_scale: Floats) -> Floats:
    numbers = E2M1[unpack_pairs(packed)].reshape(packed.shape[0], -1, NVFP4_BLOCK)
    found: Floats = numbers * (scales.astype(np.float32) * global_scale)[..., None]
    return found.reshape(packed.shape[0], -1)


def quantize_mxfp4(w: Floats) -> tuple[Bytes, Bytes]:
    """[out, in] -> bytes [out, in/2] and exponents [out, in/32] + 127.

    Each block takes the least power of two that cuts nothing off or the one below it: whichever has less squared error.
    """
    blocks = w.reshape(w.shape[0], -1, MXFP4_BLOCK)
    # frexp: largest / 6 is in [0.5, 1) * 2**exponent, and exactly 0.5 needs one less.
    mantissa, exponent = np.frexp(np.abs(blocks).max(axis=-1) / np.float32(E2M1_MAX))
    safe = np.clip(exponent - (mantissa == 0.5), -127, 127)
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


def dequantize_mxfp4(packed: Bytes, scales: Bytes) -> Floats:
    numbers = E2M1[unpack_pairs(packed)].reshape(packed.shape[0], -1, MXFP4_BLOCK)
    return (numbers * E8M0[scales][..., None]).reshape(packed.shape[0], -1)


def quantize_int4(w: Floats, block: int) -> tuple[Bytes, Floats]:
    """[out, in] -> two's complement codes [out, in], one a byte, and float32 scales [out, in/block]."""
    blocks = w.reshape(w.shape[0], -1, block)
    scales = np.abs(blocks).max(axis=-1) / np.float32(INT4_MAX)
    scales[scales == 0] = 1
    codes = np.clip(np.rint(blocks / scales[..., None]), -8, 7).astype(np.int8)
    return codes.view(np.uint8).reshape(w.shape) & 15, scales


def dequantize_int4(codes: Bytes, scales: Floats) -> Floats:
    signed = (codes.astype(np.int8) ^ 8) - 8
    blocks = signed.reshape(*scales.shape, -1).astype(np.float32)
    return (blocks * scales.astype(np.float32)[..., None]).reshape(codes.shape)
