"""The kernels' checks of `selftest`, in Triton's interpreter: right kernels pass, and a wrong one is named."""

from __future__ import annotations

from typing import Any

import pytest
from dflash_plugins import checks, launch, moe

SIZES: dict[str, int] = {"vocab": 300, "taps": 2, "hidden": 48}


def test_right_kernels_pass() -> None:
    assert checks.problems("cpu", **SIZES) == dict.fromkeys(
        ("HiddenStateTap", "SampleRows", "BlockAcceptance", "MoE"), ""
    )


def test_a_wrong_kernel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    taps, sample, experts = launch.gather_taps, launch.sample_rows, moe.moe

    def other_noise(logits: Any, params: Any, positions: Any) -> Any:
        return sample(logits, params, positions + 1)

    def other_experts(x: Any, logits: Any, layer: Any) -> Any:
        return experts(x, -logits, layer)

    monkeypatch.setattr(launch, "gather_taps", lambda rows, *given: taps(rows[::-1], *given))
    monkeypatch.setattr(launch, "sample_rows", other_noise)
    monkeypatch.setattr(moe, "moe", other_experts)
    found = checks.problems("cpu", **SIZES)
    assert [name for name, problem in found.items() if problem] == ["HiddenStateTap", "SampleRows", "MoE"]
