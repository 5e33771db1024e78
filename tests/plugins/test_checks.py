"""The kernels' checks of `selftest`, in Triton's interpreter: right kernels pass, and a wrong one is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dflash_plugins import launch, layers, packed

from dflash_trt.engines.device import adjusting
from dflash_trt.engines.torch import kernels
from dflash_trt.reports import kernels as checks
from tests.doubles import triton_interpreter  # noqa: F401  # corrects it


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operators of layers run kernels, but for the float64 of what is exact."""
    ours = kernels.LayerKernels(launch.by_triton)
    monkeypatch.setattr(kernels, "of", lambda x: None if x.dtype == torch.float64 else ours)


def problems() -> dict[str, str]:
    sizes: dict[str, Any] = {"vocab": 300, "features": 96, "dtype": torch.bfloat16, "block_size": 4}
    return dict(checks.problems("cpu", launch.by_triton, **sizes, of_layers=True))


def test_right_kernels_pass() -> None:
    found = problems()
    names = {"SampleRows", "AdjustRows", "BlockAcceptance", "Round", "Attention", "MoE", "GatedDeltaNet"}
    assert found == dict.fromkeys(found, "")
    assert found.keys() == names | {
        "AddNorm",
        "AddNorm, experts",
        "BestToken",
        "Gate",
        "Attention, FP8",
        "PlaceHeads",
        "PlaceHeads, FP8",
        "ProductHeads",
        "QuantizedRows fp8",
        "QuantizedRows nvfp4",
        "Router",
        "NormRouter",
        "GroupedProduct",
    }


def test_a_wrong_kernel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    sample, attend, experts, delta = launch.sample_rows, layers.attention, layers.moe, layers.gated_delta_net
    gate, end, plain = layers.gate, launch.end_round, packed.experts_product
    best, joined = layers.best_token, packed.by_product

    def other_state(*given: Any, run: Any) -> Any:
        state, replayed = given[4], given[6]
        return delta(*given[:4], state * (1 + 1e-6 * replayed[0]), *given[5:], run=run)

    def other_round(logits: Any, *given: Any, run: Any, **memory: Any) -> None:
        end(logits if run is None else logits * 0, *given, run=run, **memory)

    wrong = {
        (launch, "sample_rows"): lambda logits, params, at, run: sample(logits, params, at + 1, run=run),
        (launch, "end_round"): other_round,
        (adjusting, "adjust_rows"): lambda logits, *given, **options: None,
        (layers, "attention"): lambda *given, sinks, **options: attend(*given, **options),
        (layers, "moe"): lambda x, logits, *given, **options: experts(x, -logits, *given, **options),
        (layers, "gated_delta_net"): other_state,
        (layers, "best_token"): lambda x, **options: best(x.flip(1), **options),
        (layers, "gate"): lambda x, *given, **options: gate(-x, *given, **options),
        (packed, "experts_product"): lambda x, *given: plain(-x, *given),
        (packed, "by_product"): lambda x, *given: joined(x * 1.01, *given),
    }
    for (module, name), function in wrong.items():
        monkeypatch.setattr(module, name, function)
    found = problems()
    assert {name for name, problem in found.items() if problem} == {
        *(
            "SampleRows",
            "AdjustRows",
            "Round",
            "Attention",
            "Attention, FP8",
            "MoE",
            "GatedDeltaNet",
            "BestToken",
            "Gate",
            "GroupedProduct",
            "ProductHeads",
        ),
    }
    assert found["GatedDeltaNet"] == "rows that are replayed get other bits"
