"""Products with weights as they are stored, in fewer bits or not, in Triton's interpreter against torch's operators and
tables of numbers.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import cycle

import numpy as np
import pytest
import torch
from dflash_plugins import packed

from dflash_trt.engines.torch.layers import grouped_product
from dflash_trt.engines.torch.packed import _has_nan as has_nan
from dflash_trt.engines.torch.packed import widened
from dflash_trt.formats import numbers
from tests.doubles.packed_weights import random_weight, rows_product
from tests.doubles.triton_interpreter import unrounded

FORMS = [
    packed.Packing(80, 1184, "int4", "bf16", group=32),
    packed.Packing(80, 1184, "int4", "fp16", zeros=True),
    packed.Packing(72, 1024, "e2m1", "e4m3", group=16, second="times"),
    packed.Packing(80, 1184, "e2m1", "e8m0", group=32),
    packed.Packing(80, 1184, "e4m3", "bf16"),
    packed.Packing(200, 1024, "e4m3", "fp32", group=128, group_rows=128),
    packed.Packing(80, 1024, "int8", "fp32", group=64),
    packed.Packing(80, 1184, "plain"),
    packed.Packing(200, 1030, "plain"),
]
TYPES = (torch.bfloat16, torch.float16)
# With scales of whole weights, and of blocks and stripes that are not full.
STACKS = [
    *(replace(form, outputs=72, inputs=288, experts=5) for form in FORMS[:-1]),
    packed.Packing(72, 100, "plain", experts=5),
    packed.Packing(72, 288, "e2m1", "e4m3", group=16, second="over", experts=5),
    packed.Packing(72, 288, "e4m3", "fp32", group_rows=0, experts=5),
]


@pytest.mark.parametrize(
    ("form", "dtype"), [*zip(FORMS, cycle(TYPES))], ids=lambda x: getattr(x, "codes", None)
)
def test_a_row_is_the_same_in_passes_of_any_length(
    form: packed.Packing, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weight's numbers are those of the format, bit for bit; its inputs are divided alike for all rows."""
    stored, wide = random_weight(form, dtype=dtype)
    x, bias = (
        torch.from_numpy(np.random.default_rng(1).standard_normal(s))
        for s in ((64, form.inputs), (form.outputs,))
    )
    x, bias = x.to(dtype), bias.to(dtype)
    exact = x.double() @ wide.to(dtype).double().T + bias.double()
    assert packed.splits_of(form, stored.tile)[0] == 2
    if form.codes != "plain":
        assert torch.equal(packed.widen(stored, dtype), wide.to(dtype))
    product = partial(unrounded, packed.product)
    longest = product(x, stored, bias)
    error = (longest.double() - exact).abs().max() / exact.abs().max()
    assert error <= (2**-8 if dtype == torch.bfloat16 else 2**-10)
    for rows in (1, 17):
        assert torch.equal(product(x[:rows].contiguous(), stored, bias), longest[:rows])
    monkeypatch.setattr(packed, "MOST_ROWS", 128)
    assert torch.equal(product(x.repeat(3, 1)[:150], stored, bias), longest.repeat(3, 1)[:150])
    assert stored.counters is not None
    assert not stored.counters.any()


@pytest.mark.parametrize(
    ("form", "dtype"), [*zip(STACKS, cycle(TYPES[::-1]))], ids=lambda x: getattr(x, "codes", None)
)
def test_a_row_is_multiplied_by_its_expert_alone(form: packed.Packing, dtype: torch.dtype) -> None:
    """One expert has most rows, more than a step takes, another has none. Steps take 16, 32 and 64 rows."""
    stored, wide = random_weight(form, dtype=dtype)
    random = np.random.default_rng(1)
    x = torch.from_numpy(random.standard_normal((161, form.inputs))).to(dtype)
    logits = torch.from_numpy(random.random((161, form.experts))).float()
    logits[:, 3], logits[::2, 4] = -1, 2
    exact = grouped_product({}, x.double(), wide.to(dtype).double(), logits.argmax(1))
    longest = unrounded(rows_product, x, stored, logits)
    error = (longest.double() - exact).abs().max() / exact.abs().max()
    assert error <= (2**-8 if dtype == torch.bfloat16 else 2**-10)
    for part in (slice(5, 6), slice(5, 12), slice(40, 110)):
        alone = unrounded(rows_product, x[part].contiguous(), stored, logits[part].contiguous())
        assert torch.equal(alone, longest[part])
    for expert in range(form.experts if form.codes != "plain" else 0):
        assert torch.equal(packed.widen(stored.one(expert), dtype), wide[expert].to(dtype))


def test_numbers_at_the_ends_of_their_range() -> None:
    """Every exponent of E8M0, the subnormal one and infinite products too, and every code of E4M3 that is a number."""
    exponents = replace(FORMS[3], outputs=255, inputs=32)
    given, _ = random_weight(exponents)
    codes = torch.arange(16, dtype=torch.uint8)[None].repeat(255, 1) * 17
    scales = torch.arange(255, dtype=torch.uint8)[:, None]
    stored = replace(given, codes=codes, scales=scales)
    pairs = torch.stack((codes & 15, codes >> 4), -1).flatten(1)
    expected = numbers.E2M1[pairs.numpy()] * numbers.E8M0[:255, None]
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        got = packed.widen(stored, dtype)
        assert torch.equal(got, torch.from_numpy(expected).to(dtype))
    bytes_ = replace(FORMS[4], outputs=1, inputs=256, scales="fp32")
    codes = torch.arange(256, dtype=torch.uint8)[None]
    codes[(codes & 127) == 127] = 0
    stored = replace(given, form=bytes_, codes=codes, scales=torch.ones(1, 1), tile=bytes_.tiles[0])
    for dtype in (torch.bfloat16, torch.float16):
        got = packed.widen(stored, dtype)
        assert torch.equal(got, codes.view(torch.float8_e4m3fn).to(dtype))


def test_codes_of_no_number_are_seen() -> None:
    """The kernels would take them for numbers."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert [has_nan(code) for code in codes] == codes.float().isnan().tolist()


@pytest.mark.parametrize("reciprocal", [0, 1])
def test_a_second_scale_multiplies_or_divides(reciprocal: int) -> None:
    """As checkpoints of ModelOpt and of compressed-tensors have it."""
    a = {"codes": "e2m1", "columns": 32, "group_size": 16, "group_rows": 1, "reciprocal": reciprocal}
    codes = torch.arange(48, dtype=torch.uint8).reshape(3, 16) * 5
    scales = torch.arange(1, 7).reshape(3, 2).to(torch.float8_e4m3fn)
    pairs = torch.stack((codes & 15, codes >> 4), -1).flatten(1)
    exact = numbers.E2M1[pairs.numpy()] * scales.float().numpy().repeat(16, 1) * (0.25 if reciprocal else 4)
    assert np.array_equal(widened(a, codes, scales, torch.tensor(4.0)).numpy(), exact)
