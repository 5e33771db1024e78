"""Times from aiconfigurator-core: with a double of its interface, and with itself where it is installed."""

from __future__ import annotations

import json
import sys
import types
from functools import cache
from importlib import metadata
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import Any

import pytest

from dflash_trt.checkpoint.catalogue import known_configs
from dflash_trt.cli import main
from dflash_trt.models.configs import read_drafter_config, read_target_config
from dflash_trt.models.inventory import take_inventory
from dflash_trt.planning import times
from dflash_trt.planning.acceptance import published
from dflash_trt.planning.gpus import find_gpu
from dflash_trt.planning.layouts import ModelLayout, model_layouts
from dflash_trt.planning.memory import Settings
from dflash_trt.planning.operators import best_layouts, operator_layouts

installed = find_spec("aiconfigurator_core") is not None


@cache
def models(pair: str, gpu: str) -> list[ModelLayout]:
    target, drafter = known_configs(pair)
    inventory = take_inventory(read_target_config(target), read_drafter_config(drafter))
    settings = Settings(
        engine="tensorrt-llm", gpu=find_gpu(gpu), max_seq_len=2048, max_batch_size=1, block_size=8
    )
    return model_layouts(inventory, settings, name=pair, context=2048)


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The two calls of the package. 36 layers; a pass takes 1 ms and 0.1 ms per row. Returns what was compiled."""
    compiled: list[dict[str, Any]] = []

    def compile_engine(
        model: str, system: str, backend: str, version: str | None, **options: Any
    ) -> dict[str, Any]:
        known = {"tp_size", "moe_tp_size", "moe_ep_size", "nextn", "moe_quant_mode"}
        assert set(options) <= known
        assert version is None
        if options["tp_size"] == 4:
            raise RuntimeError("no table")
        compiled.append({"model": model, "system": system, "backend": backend, **options})
        return compiled[-1]

    class AicEngine:
        def __init__(self, spec: dict[str, Any]) -> None:
            self.drafts = spec["nextn"]

        @classmethod
        def from_spec(cls, spec: dict[str, Any]) -> AicEngine:
            return cls(spec)

        def predict_decode_latency(self, batch: int, isl: int, osl: int) -> float:
            assert (isl, osl) == (2048, 2)
            return (1 + 0.1 * batch * (self.drafts + 1)) * (36 + self.drafts) / 36

    package: Any = types.ModuleType("aiconfigurator_core")
    package.AicEngine, package.__spec__ = AicEngine, ModuleSpec("aiconfigurator_core", None)
    engine: Any = types.ModuleType("aiconfigurator_core.sdk.engine")
    engine.compile_engine = compile_engine
    monkeypatch.setitem(sys.modules, "aiconfigurator_core", package)
    monkeypatch.setitem(sys.modules, "aiconfigurator_core.sdk", types.ModuleType("aiconfigurator_core.sdk"))
    monkeypatch.setitem(sys.modules, "aiconfigurator_core.sdk.engine", engine)
    version = metadata.version
    monkeypatch.setattr(
        metadata, "version", lambda name: "0.12.0" if name == "aiconfigurator-core" else version(name)
    )
    return compiled


def test_the_habits_of_the_package_are_taken_out(double: list[dict[str, Any]]) -> None:
    found, source = operator_layouts(models("gpt-oss-120b", "b300"), "tensorrt-llm", "gpt-oss-120b")
    assert [layout.gpus for layout in found] == [1, 2, 8]  # there is no table for 4
    assert "trtllm on b300_sxm, aiconfigurator-core 0.12.0" in source
    layout = found[-1]
    assert layout.plain(5) == pytest.approx(1.5e-3)
    model = layout.model
    draft = times.pass_seconds(model.drafter, model.gpu, model.constants, requests=5, width=8, context=2048)
    assert layout.round(5, 8) == pytest.approx(
        5e-3 + draft
    )  # 40 rows, without a factor for eight layers more
    assert double[-1] == {
        "model": "openai/gpt-oss-120b",
        "system": "b300_sxm",
        "backend": "trtllm",
        "tp_size": 8,
        "nextn": 7,
        "moe_tp_size": 1,
        "moe_ep_size": 8,
        "moe_quant_mode": "w4a8_mxfp4_mxfp8",
    }


def test_dense_targets_and_older_gpus_name_no_mode(double: list[dict[str, Any]]) -> None:
    assert operator_layouts(models("qwen3-8b", "h100"), "tensorrt-llm", "qwen3-8b")[0]
    assert set(double[-1]) == {"model", "system", "backend", "tp_size", "nextn"}
    assert operator_layouts(models("qwen3-8b", "h100"), "tensorrt", "qwen3-8b") == ([], "")
    assert operator_layouts(models("qwen3-8b", "h100"), "tensorrt-llm", "mine") == ([], "")


def test_a_plan_for_a_time_per_token_takes_them(
    double: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    """`--slo` plans with the times of `--curve`; another precision has no measured operators."""
    card = ["plan", "--target", "gpt-oss-120b", "--gpu", "b300", "--engine", "tensorrt-llm"]
    assert main([*card, "--slo", "tpot=4", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert "measured operators of trtllm on b300_sxm" in plan["times"]
    choice = plan["choice"]
    layout = next(
        layout
        for layout in operator_layouts(models("gpt-oss-120b", "b300"), "tensorrt-llm", "gpt-oss-120b")[0]
        if layout.gpus == choice["gpus"]
    )
    block, batch = choice["schedule"][-1]["block"], choice["batch"]
    acceptance, _ = published("gpt-oss-120b")
    assert acceptance is not None
    speeds = [
        1 / layout.plain(batch),
        *(acceptance.length(k) / layout.round(batch, k) for k in (2, 4, 6, 8, 10)),
    ]
    assert block == (1, 2, 4, 6, 8, 10)[speeds.index(max(speeds))]
    assert choice["tokens_per_second_per_user"] == pytest.approx(max(speeds), rel=1e-3)
    layouts, source = best_layouts(
        models("gpt-oss-120b", "b300"), "tensorrt-llm", "gpt-oss-120b", stored=False
    )
    assert (layouts, source) == (models("gpt-oss-120b", "b300"), times.SOURCE)


@pytest.mark.skipif(installed, reason="the package is installed")
def test_the_model_is_used_without_the_package() -> None:
    assert operator_layouts(models("qwen3-8b", "h100"), "tensorrt-llm", "qwen3-8b") == ([], "")


@pytest.mark.skipif(not installed, reason="needs aiconfigurator-core")
def test_the_package_itself_has_the_known_times() -> None:
    found, _ = operator_layouts(models("gpt-oss-120b", "b300")[:1], "tensorrt-llm", "gpt-oss-120b")
    assert [round(1e3 * found[0].plain(batch), 2) for batch in (1, 8)] == [2.33, 4.41]
    assert found[0].round(8, 8) > 10.29e-3
