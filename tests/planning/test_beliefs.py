"""The times that the adaptive length starts with, where start-up timed no pass."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash_trt import hardware
from dflash_trt.building.build import build
from dflash_trt.bundle.manifest import Bundle
from dflash_trt.formats.precision import parse_precision
from dflash_trt.models.configs import read_drafter_config, read_target_config
from dflash_trt.models.inventory import take_inventory
from dflash_trt.planning.beliefs import beliefs, steps_file, work_of_bundle
from dflash_trt.planning.gpus import find_gpu
from dflash_trt.planning.work import work_of
from dflash_trt.runtime import Runtime, new_adaptive
from tests.doubles.checkpoints import make_drafter, make_target
from tests.planning.test_steps import document, seconds


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Bundle, Path, Path]:
    """A bundle with experts, and the checkpoints that it was built from."""
    folder = tmp_path_factory.mktemp("beliefs")
    target = make_target(folder / "target", favourites=6, layers=3)
    drafter = make_drafter(folder / "drafter", target)
    return build(str(target), str(drafter), folder / "pair", max_seq_len=512), target, drafter


def measured(bundle: Bundle, **others: Any) -> dict[str, Any]:
    """A steps file of this bundle and this machine."""
    manifest = bundle.manifest
    of = {name: manifest[name] for name in ("engine", "target", "drafter", "quantization", "block_size")}
    return document(**of) | {"machine": {"processor": hardware.processor(), "gpus": []}} | others


def test_the_work_of_a_bundle_is_that_of_its_checkpoints(made: tuple[Bundle, Path, Path]) -> None:
    bundle, target, drafter = made
    config = read_target_config(target)
    inventory, gpu = take_inventory(config, read_drafter_config(drafter, config)), find_gpu("b200")
    float32 = parse_precision("target=fp32,drafter=fp32")
    for side in ("target", "drafter"):
        own = work_of_bundle(bundle.manifest, config, side, gpu)
        planned = work_of(inventory, side, gpu, precision=float32)
        assert own.layers == planned.layers
        assert own.experts == planned.experts
        assert own.experts_per_token == planned.experts_per_token
        for name in ("dense_bytes", "dense_operations", "expert_bytes", "expert_operations"):
            assert getattr(own, name) == pytest.approx(getattr(planned, name), rel=0.05), (side, name)


def test_more_rows_and_more_cores(made: tuple[Bundle, Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "cores", lambda: 1)
    slow = beliefs(made[0], 128)
    monkeypatch.setattr(hardware, "cores", lambda: 8)
    fast = beliefs(made[0], 128)
    for side in ("target", "drafter"):
        assert slow[side](1, 1) < slow[side](1, 8) < slow[side](16, 8)
        assert fast[side](16, 8) < slow[side](16, 8)
    assert slow["drafter"](1, 8) < slow["target"](1, 8)


def test_a_steps_file_beside_the_bundle_counts_first(
    made: tuple[Bundle, Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    bundle = made[0]
    file = steps_file(bundle)
    assert file.name == "pair.steps.json"
    model = beliefs(bundle, 128)["target"](4, 8)
    file.write_text(json.dumps(measured(bundle)))
    found = beliefs(bundle, 128)
    assert found["target"](4, 8) == pytest.approx(seconds("target", 4, 8, 128))
    assert found["drafter"](64, 8) == found["drafter"](16, 8)  # beyond what was measured
    assert found["target"](1, 1) == pytest.approx(seconds("target", 1, 1, 128))
    for wrong, reason in (
        ({"machine": {"processor": "another", "gpus": []}}, "measured on another"),
        ({"version": 2}, "version is 2"),
        ({"bundle": measured(bundle)["bundle"] | {"target": {"config_sha256": "0"}}}, "another target"),
        ({"bundle": measured(bundle)["bundle"] | {"engine": "tensorrt"}}, "engine is 'tensorrt'"),
    ):
        file.write_text(json.dumps(measured(bundle) | wrong))
        with caplog.at_level(logging.WARNING):
            assert beliefs(bundle, 128)["target"](4, 8) == model
        assert reason in caplog.text
        caplog.clear()
    file.unlink()


def test_gpus(made: tuple[Bundle, Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of the table has the model's times. Nothing is believed of another one."""
    planned = replace(
        made[0], manifest={**made[0].manifest, "engine": "tensorrt", "tensorrt": {"version": "1"}}
    )
    for name, known in (("NVIDIA B200", True), ("NVIDIA T4", False)):
        monkeypatch.setattr(hardware, "gpus", lambda name=name: [{"name": name}])
        assert bool(beliefs(planned, 128)) is known


def test_a_runtime_starts_with_them(made: tuple[Bundle, Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where only single requests are timed, the times of the others have the shape of the belief."""
    monkeypatch.setattr("dflash_trt.decoding.length.pass_times._START_UP_SECONDS", -1.0)
    asked = []

    def believed(batch: int, rows: int) -> float:
        asked.append((batch, rows))
        return float(batch)

    monkeypatch.setattr("dflash_trt.runtime.beliefs", lambda *_: {"target": believed, "drafter": believed})
    runtime = Runtime(
        made[0].path, max_batch_size=4, prefill_chunk=64, prefix_cache_bytes=0, threads=1, check="size"
    )
    policy = runtime.lengths(True, None)
    single, four = policy.prices(1, 8)[1], policy.prices(4, 8)[1]
    assert {(4, 1), (2, 8)} <= set(asked)
    assert four == pytest.approx(4 * single)
    alone = new_adaptive(runtime.block_size, runtime.pair, 4)
    assert alone.prices(4, 8)[1] == pytest.approx(alone.prices(1, 8)[1])
    runtime.pair.close()
