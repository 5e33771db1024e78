"""Number formats, compared with ml_dtypes and their definitions: rounding, ties, saturation, tiny and zero blocks."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dflash_trt.errors import BuildError
from dflash_trt.formats import FORMATS, numbers
from dflash_trt.formats.base import Codes
from dflash_trt.formats.precision import Precision, parse_precision

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


def stored(scheme: str, w: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What a weight is read as after it was written, its block scales, and the scale of the whole."""
    form = FORMATS[scheme]
    algorithm = form.algorithm(inputs=[w.shape[1]])
    second = form.scale_of(np.abs(w).max()) if form.largest else np.ones((), np.float32)
    codes = form.encode(algorithm, w, second)
    written = form.written(algorithm, *w.shape)
    assert {n: codes[n].shape for n in codes} == {n: written[n][1] for n in codes}
    whole = second if "weight_scale_2" in written else None
    packed = codes["weight"]
    if len(packed) < len(w):  # two rows share bytes
        packed = numbers.pack_pairs(numbers.unpack_rows(packed))
    found = form.widen(algorithm, Codes(packed, codes["weight_scale"], whole))
    return found, codes["weight_scale"], second


@given(matrices(32))
@example(np.repeat(np.array([[1, 2.0**-30], [0, 1]] * 2, np.float32), 16, axis=1))
def test_nvfp4_is_near_or_the_block_is_too_small_to_tell(w: np.ndarray) -> None:
    found, scales, second = stored("nvfp4", w)
    assert np.isfinite(scales.astype(np.float32)).all()
    assert (scales.astype(np.float32) > 0).all()  # numbers are divided by it
    largest = np.abs(w.reshape(4, 2, 16)).max(axis=-1, keepdims=True)
    # Half a step of E2M1 at its top is a sixth of the block's largest number. Scales are rounded by a sixteenth, to
    # 2**-9.
    bound = largest * (1 / 6 + 1 / 8) + 0.5 * numbers.E4M3_MIN * second + 2.0**-149
    assert (np.abs(found.reshape(4, 2, 16) - w.reshape(4, 2, 16)) <= bound).all()


@given(matrices(64))
@example(np.full((4, 64), 2.0**-129, np.float32))  # a step of 2**-128 would be nearer, but there is none
def test_mxfp4_takes_the_better_of_two_powers_of_two(w: np.ndarray) -> None:
    found, exponents, _ = stored("mxfp4", w)
    assert exponents.max(initial=0) < 255
    blocks = w.reshape(4, 2, 32).astype(np.float64)
    error = np.square(found.reshape(blocks.shape) - blocks).sum(axis=-1)
    # The smallest that clips nothing, and the one below, computed in another way.
    largest = np.abs(blocks).max(axis=-1)
    safe = np.clip(np.ceil(np.log2(np.where(largest > 0, largest / 6, 1.0))), -127, 127)
    for step in (0, -1):
        scale = np.exp2(np.maximum(safe + step, -127))[..., None]
        other = numbers.E2M1[numbers.encode_e2m1((blocks / scale).astype(np.float32))] * scale
        assert (error <= np.square(other - blocks).sum(axis=-1) * (1 + 1e-6) + 1e-90).all()


@pytest.mark.parametrize("scheme", ["int4", "int8"])
@given(w=matrices(64))
def test_integers_are_within_half_a_step(scheme: str, w: np.ndarray) -> None:
    found, scales, _ = stored(scheme, w)
    steps = np.repeat(scales, 64 // scales.shape[1], axis=1)
    assert (np.abs(found - w) <= steps * 0.5001 + 2.0**-149).all()


@given(matrices(16))
def test_fp8_reaches_from_the_largest_number_down(w: np.ndarray) -> None:
    found, scales, _ = stored("fp8", w)
    assert (scales > 0).all()
    assert (np.abs(found - w) <= np.abs(w) / 16 + scales[:, None] * 2.0**-10 + 2.0**-149).all()


@pytest.mark.parametrize("scheme", FORMATS)
def test_zero_blocks_stay_zero(scheme: str) -> None:
    assert not stored(scheme, np.zeros((2, 128), np.float32))[0].any()


def test_roles_are_parsed() -> None:
    precision = parse_precision("target=nvfp4, drafter=bf16,head=fp8")
    assert precision == Precision(target="nvfp4", drafter="bf16", head="fp8")
    assert precision.scheme("target") == "nvfp4"
    assert precision.scheme("drafter") is None
    assert precision.compute("drafter", "fp32") == "bf16"
    assert precision.compute("target", "fp32") == "fp32"
    assert parse_precision(None) == Precision()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected ROLE=VALUE"), ("fp8", "write target=fp8"), ("model=fp8", "target, drafter, head"),
        ("target=", "expected one of"), ("target=fp4", "did you mean"),
        ("head=bf16", "fp8, nvfp4, mxfp4, int8, int4"), ("target=fp8,target=fp8", "twice"),
    ],
)  # fmt: skip
def test_wrong_precisions_are_refused(text: str, message: str) -> None:
    with pytest.raises(BuildError, match=message):
        parse_precision(text)
