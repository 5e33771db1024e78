"""The rule for every kernel of a pass: a row has the same bits alone and among any others, in Triton's interpreter."""

from __future__ import annotations

import pytest

from tests.doubles.plugin_targets import functions
from tests.doubles.row_cases import CASES, check

# What computes no rows: `widen` writes a weight.
OTHERS = {"widen"}


@pytest.fixture(scope="module")
def launched() -> set[str]:
    return set()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_row_is_alone(case: object, launched: set[str]) -> None:
    launched |= check(case, seed=3, most=20).launched  # type: ignore[arg-type]


def test_no_kernel_is_left_out(launched: set[str]) -> None:
    assert launched == functions() - OTHERS
