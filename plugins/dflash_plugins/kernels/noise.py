"""Gumbel noise and probability weights, bit for bit as in `decoding/sampling/` (philox.py, probability_mass.py).

Compile kernels that call these with enable_fp_fusion=False: a fused multiply-add rounds once where the host rounds
twice. Then every operation below is correctly rounded, and the order of operations is the host's.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dflash_trt.decoding.sampling import philox
from dflash_trt.decoding.sampling import probability_mass as weights

_SCALE = tl.constexpr(2.0**-32)
_LN2_HIGH = tl.constexpr(float(philox.LN2_HIGH))
_LN2_LOW = tl.constexpr(float(philox.LN2_LOW))
_SQRT_HALF_BITS = tl.constexpr(int(philox.SQRT_HALF_BITS))
_ATANH = tl.constexpr(tuple(float(c) for c in philox.ATANH))
_LOG2_E = tl.constexpr(float(weights.LOG2_E))
_EXP2 = tl.constexpr(tuple(float(c) for c in weights.EXP2))
_ONE_WEIGHT = tl.constexpr(2.0**weights.WEIGHT_BITS)


@triton.jit
def philox_words(group, position, key0, key1):
    """The random words of the tokens 4*group .. 4*group+3, four uint32 tensors of the shape of `group`."""
    zero = tl.zeros_like(group).to(tl.uint32)
    return tl.philox_impl(group.to(tl.uint32), zero + position.to(tl.uint32), zero, zero, key0, key1)


@triton.jit
def token_bits(token, position, key0, key1):
    """uint32 random bits of each token."""
    w0, w1, w2, w3 = philox_words(token >> 2, position, key0, key1)
    low, high = tl.where(token & 1 == 0, w0, w1), tl.where(token & 1 == 0, w2, w3)
    return tl.where(token & 2 == 0, low, high)


@triton.jit
def _split(value):
    bits = value.to(tl.int32, bitcast=True)
    exponent = (bits - _SQRT_HALF_BITS) >> 23
    return exponent.to(tl.float32), (bits - (exponent << 23)).to(tl.float32, bitcast=True)


@triton.jit
def _log(s, exponent):
    square = s * s
    series = tl.full(s.shape, _ATANH[0], tl.float32)
    for i in tl.static_range(1, 7):
        series = series * square + _ATANH[i]
    return exponent * _LN2_HIGH + (exponent * _LN2_LOW + s * series)


@triton.jit
def gumbel(bits):
    """Standard Gumbel noise of uint32 bits, float32."""
    x = (bits | 1).to(tl.float32) * _SCALE
    y = ((bits ^ 0xFFFFFFFF) | 1).to(tl.float32) * _SCALE
    exponent, mantissa = _split(y)
    small = x < 0.5
    numerator = tl.where(small, -x, mantissa - 1.0)
    denominator = tl.where(small, 2.0 - x, mantissa + 1.0)
    exponential = -_log(tl.div_rn(numerator, denominator), tl.where(small, 0.0, exponent))
    exponent, mantissa = _split(exponential)
    return -_log(tl.div_rn(mantissa - 1.0, mantissa + 1.0), exponent)


@triton.jit
def exponential(value):
    """exp(value), value <= 0, float32."""
    power = tl.maximum(value * _LOG2_E, -64.0)
    whole = tl.floor(power)
    fraction = power - whole
    result = fraction * _EXP2[0]
    for i in tl.static_range(1, 6):
        result = (result + _EXP2[i]) * fraction
    result += _EXP2[6]
    return result * ((whole.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def weight(value):
    """exp(value), value <= 0, in units of 2**-34: int64."""
    return (exponential(value) * _ONE_WEIGHT).to(tl.int64)
