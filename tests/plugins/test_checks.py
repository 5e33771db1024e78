"""The kernels' checks of `selftest`, in Triton's interpreter: right kernels pass, and a wrong one is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dflash_plugins import attention, checks, launch, layers, moe

from tests.doubles import triton_interpreter  # noqa: F401  # corrects it

SIZES: dict[str, Any] = {"vocab": 300, "taps": 2, "hidden": 48, "dtype": torch.bfloat16, "block_size": 4}


def test_right_kernels_pass() -> None:
    assert checks.problems("cpu", launch.by_triton, **SIZES, in_plans=True) == dict.fromkeys(
        (
            "SampleRows",
            "BlockAcceptance",
            "Round",
            "HiddenStateTap",
            "Attention",
            "MoE",
            "GatedDeltaNet",
            "layers",
            "PackedLinear",
        ),
        "",
    )


def test_a_wrong_kernel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    taps, sample, attend, experts = launch.gather_taps, launch.sample_rows, attention.attention, moe.moe
    delta, gate = launch.gated_delta_net, layers.gate

    def other_noise(logits: Any, params: Any, positions: Any, **options: Any) -> Any:
        return sample(logits, params, positions + 1, **options)

    def no_sinks(*, sinks: Any, **given: Any) -> Any:
        return attend(**given)

    def other_experts(x: Any, logits: Any, layer: Any, **options: Any) -> Any:
        return experts(x, -logits, layer, **options)

    def other_state(*, state: Any, **given: Any) -> Any:
        return delta(state=state * (1 + 1e-6 * given["replayed"][0]), **given)

    monkeypatch.setattr(launch, "gated_delta_net", other_state)
    monkeypatch.setattr(
        launch, "gather_taps", lambda rows, *given, **options: taps(rows[::-1], *given, **options)
    )
    monkeypatch.setattr(launch, "sample_rows", other_noise)
    monkeypatch.setattr(moe, "moe", other_experts)
    monkeypatch.setattr(attention, "attention", no_sinks)
    monkeypatch.setattr(layers, "gate", lambda x, **options: gate(-x, **options))
    found = checks.problems("cpu", launch.by_triton, **SIZES, in_plans=True)
    assert [name for name, problem in found.items() if problem] == [
        *("SampleRows", "HiddenStateTap", "Attention", "MoE", "GatedDeltaNet", "layers")
    ]
    assert found["GatedDeltaNet"] == "rows that are replayed get other bits"
