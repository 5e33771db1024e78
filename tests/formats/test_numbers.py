"""Number formats, compared with ml_dtypes and their definitions: rounding, ties, saturation, tiny and zero blocks."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dflash_trt.formats import numbers
from dflash_trt.formats.fp8 import fp8_scale
from dflash_trt.formats.int4 import dequantize_int4, quantize_int4
from dflash_trt.formats.int8 import quantize_int8
from dflash_trt.formats.mxfp4 import dequantize_mxfp4, quantize_mxfp4
from dflash_trt.formats.nvfp4 import dequantize_nvfp4, nvfp4_global_scale, quantize_nvfp4

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
TIES = st.sampled_from([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -5.0, 6.0, 7.0, -0.0, 2.0**-140])


def matrices(columns: int) -> Any:
    magnitudes = st.sampled_from([0.0, 2.0**-149, 2.0**-60, 2.0**-20, 1.0, 2.0**40])
    units = arrays(np.float32, (4, columns), elements=st.floats(-1, 1, width=32))
    return st.builds(lambda w, m: (w * np.float32(m)).astype(np.float32), units, magnitudes)


@given(arrays(np.float32, 64, elements=st.one_of(FLOATS, TIES)))
def test_e2m1_rounds_as_ml_dtypes_does_and_saturates(x: np.ndarray) -> None:
    expected = np.clip(x, -6, 6).astype(ml_dtypes.float4_e2m1fn)
    codes = numbers.encode_e2m1(x)
    np.testing.assert_array_equal(codes, expected.view(np.uint8) & 15)
    np.testing.assert_array_equal(numbers.E2M1[codes], expected.astype(np.float32))


@given(arrays(np.float32, 64, elements=FLOATS))
def test_e4m3_saturates_in_place_of_nan(x: np.ndarray) -> None:
    found = numbers.encode_e4m3(x).astype(np.float32)
    inside = np.abs(x) <= 448
    np.testing.assert_array_equal(found[inside], x[inside].astype(numbers.E4M3).astype(np.float32))
    np.testing.assert_array_equal(found[~inside], np.sign(x[~inside]) * 448)


@given(arrays(np.uint8, (6, 8), elements=st.integers(0, 15)))
def test_packing_loses_nothing(codes: np.ndarray) -> None:
    np.testing.assert_array_equal(numbers.unpack_pairs(numbers.pack_pairs(codes)), codes)
    np.testing.assert_array_equal(numbers.unpack_rows(numbers.pack_rows(codes)), codes)
    # The first of two is in the low half, as in ONNX's FLOAT4E2M1 and INT4.
    assert numbers.pack_pairs(codes)[0, 0] & 15 == codes[0, 0]
    assert numbers.pack_rows(codes)[0, 0] & 15 == codes[0, 0]


@given(matrices(32))
def test_nvfp4_is_near_or_the_block_is_too_small_to_tell(w: np.ndarray) -> None:
    second = nvfp4_global_scale(np.abs(w).max())
    packed, scales = quantize_nvfp4(w, second)
    assert np.isfinite(scales.astype(np.float32)).all()
    found = dequantize_nvfp4(packed, scales, second)
    largest = np.abs(w.reshape(4, 2, 16)).max(axis=-1, keepdims=True)
    # Half a step of E2M1 at its top is a sixth of the block's largest number. Scales are rounded by a sixteenth, to
    # 2**-9.
    bound = largest * (1 / 6 + 1 / 8) + 0.5 * numbers.E4M3_MIN * second + 2.0**-149
    assert (np.abs(found.reshape(4, 2, 16) - w.reshape(4, 2, 16)) <= bound).all()


@given(matrices(64))
def test_mxfp4_takes_the_better_of_two_powers_of_two(w: np.ndarray) -> None:
    packed, exponents = quantize_mxfp4(w)
    assert exponents.max(initial=0) < 255
    blocks = w.reshape(4, 2, 32).astype(np.float64)
    found = dequantize_mxfp4(packed, exponents).reshape(blocks.shape)
    error = np.square(found - blocks).sum(axis=-1)
    # The smallest that clips nothing, and the one below, computed in another way.
    largest = np.abs(blocks).max(axis=-1)
    safe = np.clip(np.ceil(np.log2(np.where(largest > 0, largest / 6, 1.0))), -127, 127)
    for step in (0, -1):
        scale = np.exp2(np.maximum(safe + step, -127))[..., None]
        other = numbers.E2M1[numbers.encode_e2m1((blocks / scale).astype(np.float32))] * scale
        assert (error <= np.square(other - blocks).sum(axis=-1) * (1 + 1e-6) + 1e-90).all()


@given(matrices(64))
def test_int4_is_within_half_a_step(w: np.ndarray) -> None:
    codes, scales = quantize_int4(w, 32)
    found = dequantize_int4(codes, scales)
    steps = np.repeat(scales, 32, axis=1)
    assert (np.abs(found - w) <= steps * 0.5001 + 2.0**-149).all()


@given(matrices(64))
def test_int8_is_within_half_a_step(w: np.ndarray) -> None:
    codes, scales = quantize_int8(w)
    assert np.abs(codes.astype(np.int16)).max() <= 127
    steps = np.repeat(scales, 32, axis=1)
    assert (np.abs(codes * steps - w) <= steps * 0.5001 + 2.0**-149).all()


@given(matrices(16))
def test_fp8_reaches_from_the_largest_number_down(w: np.ndarray) -> None:
    scale = fp8_scale(np.abs(w).max(axis=1))[:, None]
    assert (scale > 0).all()
    found = numbers.encode_e4m3(w / scale).astype(np.float32) * scale
    assert (np.abs(found - w) <= np.abs(w) / 16 + scale * 2.0**-10 + 2.0**-149).all()


def test_zero_blocks_stay_zero() -> None:
    w = np.zeros((2, 128), np.float32)
    one = nvfp4_global_scale(0.0)
    assert not dequantize_nvfp4(*quantize_nvfp4(w, one), one).any()
    assert not dequantize_mxfp4(*quantize_mxfp4(w)).any()
    assert not dequantize_int4(*quantize_int4(w, 64)).any()
    assert not quantize_int8(w)[0].any()
