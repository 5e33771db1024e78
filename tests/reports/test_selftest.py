"""The self-test: a sound bundle passes, and each broken engine is named by the check that is meant for it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash_plugins import launch

from dflash_trt.bundle.manifest import Bundle
from dflash_trt.cli import main
from dflash_trt.engines.device.arrays import DeviceArrays
from dflash_trt.engines.device.sizes import DECODE
from dflash_trt.engines.tensorrt.options import TensorRTOptions
from dflash_trt.engines.tensorrt.runner import TensorRTRunner
from dflash_trt.reports.selftest import Check, Selftest
from tests.doubles import (
    fake_tensorrt,
    triton_interpreter,  # noqa: F401  # corrects it
)
from tests.doubles.checkpoints import make_drafter, make_target
from tests.doubles.cuda_double import Cuda
from tests.doubles.one_gpu import one_gpu
from tests.doubles.two_engines import for_both

Pair = tuple[Bundle, Bundle]


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """One pair for ONNX Runtime and for a double of TensorRT."""
    directory = tmp_path_factory.mktemp("selftest")
    target = make_target(directory / "target", layers=2, favourites=6)
    drafter = make_drafter(directory / "drafter", target, layers=1, taps=(0, 1), block_size=4)
    options = TensorRTOptions(max_batch_size=2, prefill_chunk=32)
    with one_gpu():
        yield for_both(directory, target, drafter, "tensorrt", options, max_seq_len=96)


def first_failure(bundles: Pair, tmp_path: Path) -> Check:
    test = Selftest(bundles[1].path, bundles[0].path)
    try:
        return next(check for check in test.run(tmp_path / "selftest.json", 600) if check.state == "failed")
    finally:
        test.close()


def test_a_sound_bundle_passes(bundles: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "selftest.json"
    command = ["selftest", str(bundles[1].path), "--reference", str(bundles[0].path), "--report", str(report)]
    assert main(command) == 0, capsys.readouterr().out
    found = json.loads(report.read_text())
    states = {check["name"]: check["state"] for check in found["checks"]}
    skipped = {"kernels"}
    assert {name: state for name, state in states.items() if state != "passed"} == dict.fromkeys(
        skipped, "skipped"
    )
    assert found["bundle"]["engine"] == "tensorrt"
    lines = capsys.readouterr().out.splitlines()
    assert all(each["error"] <= each["limit"] for each in found["layers"])
    assert {each["stage"] for each in found["layers"]} == {"prefill", "verification", "draft"}
    assert sum(line.startswith(("passed", "skipped")) for line in lines) == len(found["checks"])


def wrong_alias(patch: pytest.MonkeyPatch) -> None:
    def swapped(self: Any, name: str) -> str:
        return name.replace("k_cache_out.", "v_cache.") if "k_cache_out." in name else ""

    patch.setattr(fake_tensorrt.Engine, "get_aliased_input_tensor", swapped)


def unordered_reads(patch: pytest.MonkeyPatch) -> None:
    """Caches are filled on another stream, which nothing waits for."""
    cache = TensorRTRunner._cache

    def on_the_default_stream(self: Any, *given: Any) -> Any:
        with torch.cuda.stream(Cuda.default):
            return cache(self, *given)

    patch.setattr(TensorRTRunner, "_cache", on_the_default_stream)


def altered_pass(patch: pytest.MonkeyPatch, alter: Callable[[Any, Any], None]) -> None:
    run = TensorRTRunner.run

    def altered(self: Any, profile: int, feeds: Any, **slot: int) -> Any:
        out = run(self, profile, feeds, **slot)
        if profile == DECODE:
            with torch.cuda.stream(self.stream):
                alter(self, out)
        return out

    patch.setattr(TensorRTRunner, "run", altered)


def stale_features(patch: pytest.MonkeyPatch) -> None:
    """The drafter reads what the target wrote one verification ago."""
    earlier: dict[Any, Any] = {}

    def alter(engine: Any, out: Any) -> None:
        if "features" in out:
            now = out["features"].clone()
            key = id(engine), tuple(now.shape)
            out["features"].copy_(earlier.get(key, torch.zeros_like(now)))
            earlier[key] = now

    altered_pass(patch, alter)


def accepts_nothing(patch: pytest.MonkeyPatch) -> None:
    def alter(engine: Any, out: Any) -> None:
        if "accepted" in out:
            out["accepted"].zero_()
            out["next_token"].copy_(out["logits"][:, 0].argmax(dim=-1))

    altered_pass(patch, alter)


def writes_too_early(patch: pytest.MonkeyPatch) -> None:
    def alter(engine: Any, out: Any) -> None:
        if "accepted" in out:
            for rows in engine.caches.arrays.values():
                rows[0, :, 3].add_(1)

    altered_pass(patch, alter)


@pytest.mark.parametrize(
    ("break_it", "check", "message"),
    [
        (wrong_alias, "integrity", "updates 'v_cache.0' in place"),
        (unordered_reads, "cache writes", "changed earlier rows"),
        (writes_too_early, "cache writes", "changed earlier rows of slot 0"),
        (stale_features, "drafts", "after a verification"),
        (accepts_nothing, "acceptance", "0 of 3 drafts"),
    ],
)
def test_a_broken_engine_is_named_by_the_first_check_that_fails(
    break_it, check, message, bundles, tmp_path, monkeypatch
) -> None:
    break_it(monkeypatch)
    first = first_failure(bundles, tmp_path)
    assert (first.name, message in first.detail) == (check, True), first.detail


def test_the_time_is_that_of_passes_of_its_own(bundles: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = Selftest(bundles[0].path)
    subject.integrity()
    arrays = subject.pair.arrays
    decode, now = arrays.decode, [0.0]

    def slow(*feeds: Any) -> Any:
        now[0] += 2
        return decode(*feeds)

    monkeypatch.setattr("dflash_trt.decoding.arrays.perf_counter", lambda: now[0])
    monkeypatch.setattr(arrays, "decode", slow)
    assert subject.time()["verify_seconds"] == 2
    subject.close()


def test_a_wrong_kernel_is_named(bundles: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel of the operator runs in Triton's interpreter."""
    accept = launch.accept_block

    def nothing(*given: Any, **options: Any) -> Any:
        made = accept(*given, **options)
        made.accepted.zero_()
        return made

    monkeypatch.setattr(launch, "accept_block", nothing)
    monkeypatch.setattr(DeviceArrays, "samples", property(lambda self: True, lambda self, value: None))
    by_triton = property(lambda self: launch.by_triton, lambda self, value: None)
    monkeypatch.setattr(DeviceArrays, "run", by_triton, raising=False)
    first = first_failure(bundles, tmp_path)
    assert first.name == "kernels"
    assert first.detail.startswith("BlockAcceptance: [0, 0, 0, 0] drafts accepted, expected [")
