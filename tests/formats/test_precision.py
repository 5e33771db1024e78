"""`--precision`: accepted and refused values."""

from __future__ import annotations

import pytest

from dflash_trt.errors import BuildError
from dflash_trt.formats.precision import Precision, parse_precision


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
        ("", "expected ROLE=VALUE"), ("fp8", "expected ROLE=VALUE"), ("model=fp8", "target, drafter, head"),
        ("target=", "expected one of"), ("target=fp4", "did you mean"),
        ("head=bf16", "fp8, nvfp4, mxfp4, int8, int4"), ("target=fp8,target=fp8", "twice"),
    ],
)  # fmt: skip
def test_wrong_precisions_are_refused(text: str, message: str) -> None:
    with pytest.raises(BuildError, match=message):
        parse_precision(text)
