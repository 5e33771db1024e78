"""The kernels' checks of `selftest`, in Triton's interpreter: right kernels pass, and a wrong one is named."""

from __future__ import annotations

from typing import Any

import pytest
from dflash_plugins import attention, checks, launch, moe

from tests.doubles import triton_interpreter  # noqa: F401  # corrects it

SIZES: dict[str, int] = {"vocab": 300, "taps": 2, "hidden": 48}


def test_right_kernels_pass() -> None:
    assert checks.problems("cpu", **SIZES) == dict.fromkeys(
        ("HiddenStateTap", "SampleRows", "BlockAcceptance", "Attention", "MoE", "Round"), ""
    )


def test_a_wrong_kernel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    taps, sample, attend, experts = launch.gather_taps, launch.sample_rows, attention.attention, moe.moe

    def other_noise(logits: Any, params: Any, positions: Any) -> Any:
        return sample(logits, params, positions + 1)

    def no_sinks(*, sinks: Any, **given: Any) -> Any:
        return attend(**given)

    def other_experts(x: Any, logits: Any, layer: Any) -> Any:
        return experts(x, -logits, layer)

    monkeypatch.setattr(launch, "gather_taps", lambda rows, *given: taps(rows[::-1], *given))
    monkeypatch.setattr(launch, "sample_rows", other_noise)
    monkeypatch.setattr(moe, "moe", other_experts)
    monkeypatch.setattr(attention, "attention", no_sinks)
    found = checks.problems("cpu", **SIZES)
    assert [name for name, problem in found.items() if problem] == [
        *("HiddenStateTap", "SampleRows", "Attention", "MoE")
    ]
