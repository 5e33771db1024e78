"""`bench --steps`: the times of passes, in a file that `plan --steps` reads."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dflash_trt.building.build import build
from dflash_trt.cli import main
from dflash_trt.decoding.pair import Pair
from dflash_trt.planning.steps import read_steps
from dflash_trt.reports import steps as measuring
from dflash_trt.trtllm.options import TensorRTLLMOptions
from tests.doubles.checkpoints import make_drafter, make_target
from tests.doubles.tensorrt_llm_double import make_double


def test_every_pass_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target(tmp_path / "target", favourites=6, layers=3)
    drafter = make_drafter(tmp_path / "drafter", target)
    bundle = build(str(target), str(drafter), tmp_path / "bundle", max_seq_len=512).path
    monkeypatch.setattr(measuring, "_CONTEXTS", (32, 128, 2048))
    monkeypatch.setattr(measuring, "_MOST", 3)
    ran = set()
    rehearse = Pair.rehearse_verify

    def watched(pair: Any, batch: int, length: int, context: int) -> None:
        ran.add((batch, length, context))
        rehearse(pair, batch, length, context)

    monkeypatch.setattr(Pair, "rehearse_verify", watched)
    file = tmp_path / "steps.json"
    assert main(["bench", str(bundle), "--steps", str(file), "--concurrency", "3", "--threads", "1"]) == 0
    steps = read_steps(file)
    assert steps.grids["target"].axes == ((1, 2, 3), (1, 2, 4, 8), (32, 128))
    assert steps.grids["drafter"].axes == ((1, 2, 3), (2, 4, 8), (32, 128))
    assert steps.grids["host"].axes == ((1, 3), (1, 8))
    assert ran >= set(steps.grids["target"].seconds)
    assert all(0 < each < 10 for grid in steps.grids.values() for each in grid.seconds.values())
    assert steps.versions["onnxruntime"]
    assert steps.name == "bundle"
    steps.check_target(str(target))
    layout = steps.layout(100)
    assert layout.round(3, 8)
    assert layout.plain(3)


def test_an_engine_with_its_own_loop_is_timed_by_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = TensorRTLLMOptions(gpu="h100", tensor_parallel=2)
    bundle = build("tiny", None, tmp_path / "tiny", engine="tensorrt-llm", options=options).path
    monkeypatch.setitem(sys.modules, "tensorrt_llm", make_double(lambda prompt: [9] * 2000))
    for package in ("flash_attn", "flash_attn.cute", "flashinfer"):  # the drafter's attention on H100
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
    file = tmp_path / "steps.json"
    assert main(["bench", str(bundle), "--steps", str(file), "--concurrency", "2"]) == 0
    steps = read_steps(file)
    assert set(steps.grids) == {"round"}
    assert steps.grids["round"].axes == ((1, 2), (8,), (128, 512))
    assert (steps.known, steps.bundle["gpus"], steps.plain) == ("tiny", 2, False)
    assert (steps.layout(128).round(2, 8) or 0) > 0
    assert steps.layout(128).round(2, 4) is None


def test_steps_and_loads_are_two_things(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "any", "--steps", "steps.json", "--rate", "4"])
    assert "--steps: not with --rate" in capsys.readouterr().err
