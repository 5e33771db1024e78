"""Probabilities as integers, for top-p. Sums of integers are the same in any order and on any machine.

The weight of a token is exp(value) in units of 2**-34, where value is its scaled logit minus the best one's. As in
philox.py, all float32 operations are correctly rounded. So a GPU kernel that evaluates the same expressions gets the
same integers, the same sums, and the same set of tokens.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

WEIGHT_BITS = 34  # with these, sums over 2**18 tokens are also exact in float64
TILE = 4096  # tokens that `total_weight` sums under their own maximum: the tile of one program of the kernel
LOG2_E = np.float32(1.4426950408889634)
# 2**f for 0 <= f < 1, interpolated at Chebyshev points, within 1e-7.
_EXP2_DECIMALS = (2.1877505e-4, 1.2387822e-3, 9.6845804e-3, 5.548043e-2, 2.402305e-1, 6.9314694e-1, 1.0)
EXP2 = tuple(np.float32(c) for c in _EXP2_DECIMALS)
_LEAST = np.float32(-64)  # 2**-64 adds nothing to a sum of weights
NEGLIGIBLE = np.float32(-24)  # tokens this far below the largest have weight 0


def exponential(value: Floats) -> Floats:
    """exp(value) for value <= 0, within 2e-6 where the weight is not 0."""
    fraction: Floats = np.maximum(value * LOG2_E, _LEAST)
    whole = np.floor(fraction)
    fraction -= whole
    result: Floats = fraction * EXP2[0]
    for coefficient in EXP2[1:-1]:
        result += coefficient
        result *= fraction
    result += EXP2[-1]
    exponent = whole.astype(np.int32)
    exponent += 127
    exponent <<= 23
    result *= exponent.view(np.float32)
    return result


def weight(value: Floats) -> NDArray[np.int64]:
    """Weights, int64 of the shape of `value`, which is <= 0."""
    return (exponential(value) * np.float32(2.0**WEIGHT_BITS)).astype(np.int64)


def total_weight(scaled: Floats) -> int:
    """The weight of all tokens, from their scaled logits [V]. The best logit is finite.

    Sums over tiles, each under its own maximum, because one pass over the logits does not know the best of all. The
    sums are rounded down when they are brought to a common scale.
    """
    starts = range(0, scaled.size, TILE)
    largest = np.maximum.reduceat(scaled, starts)
    sums = np.zeros(largest.size)
    for i, start in enumerate(starts):  # tile by tile, so that it stays in the cache
        if np.isfinite(largest[i]):
            relative = scaled[start : start + TILE] - largest[i]
            sums[i] = weight(relative[relative > NEGLIGIBLE]).sum()
    return int(np.floor(sums * exponential(largest - largest.max())).sum())
