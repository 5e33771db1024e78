"""Counter-based noise: the Gumbel noise of a token depends only on (seed, position, token).

The bits are Philox 4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011). From bits to
noise, all float32 operations are correctly rounded: additions, subtractions, multiplications, divisions and
conversions. There is no fused multiply-add and no library logarithm. So every IEEE 754 machine that evaluates the
expressions in the written order gets the same 32 bits, GPU kernels included.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Bits = NDArray[np.uint32]
Floats = NDArray[np.float32]

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF
_ROUNDS = 10
_FEW = 8  # up to this many tokens, Python's integers are faster than 30 NumPy calls

GUMBEL_MIN = np.float32(-3.099223)  # for bits 0xFFFFFFFE and 0xFFFFFFFF: -log(32 log 2)
GUMBEL_MAX = np.float32(22.18071)  # for bits 0 and 1: 32 log 2


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox 4x32-10 of one counter: four words in, four words out. This is the specification in plain integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    m0, m1 = _MULTIPLIERS
    for _ in range(_ROUNDS):
        p, q = m0 * c0, m1 * c2
        c0, c1, c2, c3 = (q >> 32) ^ c1 ^ k0, q & _WORD, (p >> 32) ^ c3 ^ k1, p & _WORD
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def philox4x32_array(counter: Bits, seed: int) -> Bits:
    """Philox 4x32-10 of many counters: uint32 [4, N] in, uint32 [4, N] out. The key is the two words of `seed`."""
    even, odd = counter[0::2], counter[1::2]
    multipliers, keys = _tables(seed)
    for key in keys:
        # A little-endian uint64 product seen as uint32 is (low, high). The two products change places.
        product = np.multiply(even, multipliers, order="C").view(np.uint32)
        odd, even = product[::-1, 0::2], product[::-1, 1::2] ^ odd ^ key
    return np.stack((even, odd), axis=1).reshape(4, -1)


@lru_cache(maxsize=64)
def _tables(seed: int) -> tuple[NDArray[np.uint64], list[Bits]]:
    key = seed & _WORD, seed >> 32
    keys = [[(k + i * step) & _WORD for k, step in zip(key, _KEY_STEPS, strict=True)] for i in range(_ROUNDS)]
    columns = np.array(keys, dtype=np.uint32).reshape(_ROUNDS, 2, 1)
    return np.array(_MULTIPLIERS, dtype=np.uint64).reshape(2, 1), list(columns)


def token_bits(seed: int, position: int, tokens: NDArray[np.int64]) -> Bits:
    """The 32 random bits of each token, uint32 of the shape of `tokens` [N].

    Token v owns word v % 4 of the counter (v // 4, position, 0, 0) under the key (seed % 2**32, seed // 2**32).
    """
    if tokens.size <= _FEW:
        key = seed & _WORD, seed >> 32
        words = [philox4x32((v >> 2, position, 0, 0), key)[v & 3] for v in tokens.tolist()]
        return np.array(words, dtype=np.uint32)
    groups = tokens >> 2
    first = int(groups.min())
    span = int(groups.max()) - first + 1
    if span <= tokens.size:  # dense: one counter serves up to four tokens
        columns = groups - first
        groups = np.arange(first, first + span)
    else:
        columns = np.arange(tokens.size)
    counter = np.zeros((4, groups.size), dtype=np.uint32)
    counter[0], counter[1] = groups, position
    bits: Bits = philox4x32_array(counter, seed)[tokens & 3, columns]
    return bits


_SCALE = np.float32(2.0**-32)
_HALF, _ONE, _TWO = np.float32(0.5), np.float32(1), np.float32(2)
LN2_HIGH = np.float32(0.693359375)  # 9 significant bits, so its product with an exponent is exact
LN2_LOW = np.float32(-2.12194440e-4)
SQRT_HALF_BITS = np.int32(0x3F3504F3)
# 2 atanh(s) = s (2 + 2/3 s^2 + 2/5 s^4 + ...). With |s| <= 1/3 the first omitted term is 1.4e-8 of the sum.
ATANH = tuple(np.float32(2 / k) for k in (13, 11, 9, 7, 5, 3, 1))


def gumbel_from_bits(bits: Bits) -> Floats:
    """Standard Gumbel noise -log(E), E ~ Exp(1), of uint32 random bits; float32 in [GUMBEL_MIN, GUMBEL_MAX].

    E = -log(1 - x) with x = (bits | 1) / 2**32. Below one half it is computed from x itself. That keeps large noise
    exact, and large noise wins. Above one half it is the logarithm of 1 - x = (~bits | 1) / 2**32, which is exact in
    integers. The error is at most 3 units in the last place of max(|noise|, 1).
    """
    x = (bits | np.uint32(1)).astype(np.float32) * _SCALE
    y = (~bits | np.uint32(1)).astype(np.float32) * _SCALE
    exponent, mantissa = _split(y)
    small = x < _HALF
    numerator: Floats = np.where(small, -x, mantissa - _ONE)
    denominator: Floats = np.where(small, _TWO - x, mantissa + _ONE)
    exponent[small] = 0
    exponential: Floats = -_log(numerator / denominator, exponent)
    exponent, mantissa = _split(exponential)
    return -_log((mantissa - _ONE) / (mantissa + _ONE), exponent)


def _split(value: Floats) -> tuple[Floats, Floats]:
    """value = 2**exponent * mantissa, mantissa in [sqrt(1/2), sqrt(2)); for positive normal numbers."""
    bits = value.view(np.int32)
    exponent = (bits - SQRT_HALF_BITS) >> 23
    return exponent.astype(np.float32), (bits - (exponent << 23)).view(np.float32)


def _log(s: Floats, exponent: Floats) -> Floats:
    """log(2**exponent * (1 + s) / (1 - s)), as exponent * log 2 + 2 atanh(s)."""
    square = s * s
    series = np.full_like(s, ATANH[0])
    for coefficient in ATANH[1:]:
        series = series * square + coefficient
    return exponent * LN2_HIGH + (exponent * LN2_LOW + s * series)


def gumbel(seed: int, position: int, tokens: NDArray[np.int64]) -> Floats:
    """Standard Gumbel noise of `tokens` [N] at `position` under `seed` (0 <= seed < 2**64): float32 [N]."""
    return gumbel_from_bits(token_bits(seed, position, tokens))


def rough_gumbel_from_bits(bits: Bits) -> Floats:
    """The same noise within 1e-4, by NumPy's logarithm. It may rule tokens out, but never decide between two."""
    y = (~bits | np.uint32(1)).astype(np.float32) * _SCALE
    x = (bits | np.uint32(1)).astype(np.float32) * _SCALE
    # -log(y) loses its digits as y approaches 1, where E = x + x^2/2 + O(x^3).
    exponential = np.where(x < np.float32(2.0**-8), x + _HALF * x * x, -np.log(y))
    return -np.log(exponential)
