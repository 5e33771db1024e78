"""The engine that `auto` stands for, on machines with other GPUs and packages."""

from __future__ import annotations

import os
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest

from dflash_trt import LLM, hardware
from dflash_trt.building import choice
from dflash_trt.building.first_use import open_bundle
from dflash_trt.bundle.manifest import Bundle
from dflash_trt.cli import main
from dflash_trt.engines import registry
from dflash_trt.errors import BuildError, BundleError, UsageError
from tests.doubles import fake_tensorrt, fake_tensorrt_rtx

RTX, TRT = ("tensorrt_rtx", fake_tensorrt_rtx), ("tensorrt", fake_tensorrt)
RTX_PACKAGES, TRT_PACKAGES = ("tensorrt_rtx", "torch"), ("tensorrt", "torch")
ALL = ("tensorrt_rtx", "tensorrt", "torch")


def machine(patch: pytest.MonkeyPatch, place: Path, capability: str, packages: tuple[str, ...]) -> None:
    """A machine with this GPU, as nvidia-smi says, and these packages."""
    program = place / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho 'NVIDIA X, {capability}, 81559 MiB, 580.65'\n")
    program.chmod(0o755)
    patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    patch.setenv("PATH", f"{place}{os.pathsep}{os.environ['PATH']}")
    for name, double in (RTX, TRT):
        patch.setitem(sys.modules, name, double if name in packages else None)
    if "torch" not in packages:
        patch.setitem(sys.modules, "torch", None)
    torch_with_cuda(patch)


def torch_with_cuda(patch: pytest.MonkeyPatch, version: str = "2.9.0") -> None:
    known = metadata.version
    patch.setattr(metadata, "version", lambda name: version if name == "torch" else known(name))


@pytest.mark.parametrize(
    ("capability", "packages", "expected"),
    [
        ("8.9", ALL, "tensorrt-rtx"), ("12.0", RTX_PACKAGES, "tensorrt-rtx"), ("12.0", TRT_PACKAGES, "tensorrt"),
        ("9.0", ALL, "tensorrt"),  # TensorRT-RTX is for other GPUs
        ("10.0", RTX_PACKAGES, "torch"), ("9.0", ("torch",), "torch"),
        ("9.0", ("tensorrt",), "onnxruntime"),  # plans run on torch
        ("7.5", ALL, "torch"), ("9.0", (), "onnxruntime"),
    ],
)  # fmt: skip
def test_a_gpu_is_used_as_well_as_the_packages_allow(
    capability: str,
    packages: tuple[str, ...],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine(monkeypatch, tmp_path, capability, packages)
    chosen = registry.best_here()
    assert chosen.engine == expected
    assert chosen.leaves_gpu_idle == (expected == "onnxruntime")
    best = registry.best_on(int(capability.replace(".", "")), several=False)
    assert packages != ALL or best.engine == expected


def test_a_torch_for_the_cpu_runs_nothing_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, tmp_path, "9.0", ALL)
    torch_with_cuda(monkeypatch, "2.9.0+cpu")
    assert registry.best_here().engine == "onnxruntime"


def test_without_a_gpu_it_is_the_engine_that_runs_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "gpus", list)
    assert registry.best_here().engine == registry.DEFAULT


def test_a_pair_is_built_and_kept_for_the_engine_that_is_best_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DFLASH_TRT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hardware, "gpus", list)
    on_cpu = open_bundle("tiny", "size")
    said = capsys.readouterr().err
    assert (
        "engine onnxruntime: CUDA_VISIBLE_DEVICES shows no GPU here; --engine NAME (in Python engine=NAME)"
        in said
    )
    monkeypatch.undo()
    with monkeypatch.context() as patch:
        patch.setenv("DFLASH_TRT_CACHE", str(tmp_path / "cache"))
        machine(patch, tmp_path, "9.0", ("torch",))
        on_gpu = open_bundle("tiny", "size")
        assert on_gpu.manifest["engine"] == "torch"
        assert on_gpu.manifest["precision"]["target"] == "bfloat16"
        assert "engine torch: the best with the packages" in capsys.readouterr().err
        assert open_bundle("tiny", "size").path == on_gpu.path
        assert capsys.readouterr().err == ""
    monkeypatch.setenv("DFLASH_TRT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hardware, "gpus", list)
    assert open_bundle("tiny", "size").path == on_cpu.path


@pytest.mark.parametrize(
    "words", [["serve", "qwen3-8b"], ["generate", "qwen3-8b", "-p", "x"], ["build", "--target", "qwen3-8b"]]
)
def test_nothing_large_is_fetched_for_the_cpu_beside_a_gpu(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DFLASH_TRT_CACHE", str(tmp_path))
    monkeypatch.setitem(sys.modules, "huggingface_hub", ModuleType("huggingface_hub"))
    machine(monkeypatch, tmp_path, "9.0", ())
    assert main(words) == 1
    said = capsys.readouterr().err
    assert "the GPU that is here needs tensorrt (pip install" in said
    assert "torch (pip install" in said
    assert "--engine onnxruntime builds it for the CPU all the same" in said


def test_nothing_is_fetched_that_the_memory_cannot_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "gpus", list)
    monkeypatch.setattr(hardware, "memory_bytes", lambda: 24 << 30)
    with pytest.raises(BuildError, match=r"qwen3-8b: needs [\d.]+ GiB of memory .* 24\.00 GiB are here"):
        choice.choose_engine("qwen3-8b")
    monkeypatch.setattr(hardware, "memory_bytes", lambda: 256 << 30)
    assert choice.choose_engine("qwen3-8b") == registry.DEFAULT


def test_build_leaves_out_engines_that_cannot_do_what_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plans hold their weights."""
    machine(monkeypatch, tmp_path, "9.0", ALL)
    assert choice.choose_engine("tiny") == "tensorrt"
    assert main(["build", "--target", "tiny", "--weights", "none", "--out", str(tmp_path / "b")]) == 0
    assert '"engine": "torch"' in (tmp_path / "b" / "manifest.json").read_text()


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, ["A", "B"]), ("", []), ("-1", []), ("1", ["B"]), ("1, 0", ["B", "A"]), ("GPU-b0", ["B"]),
        ("GPU-", []),  # of both
        ("0,7,1", ["A"]), ("MIG-a0", ["A", "B"]),
    ],
)  # fmt: skip
def test_the_gpus_here_are_those_that_cuda_shows(
    visible: str | None, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, tmp_path, "9.0", ALL)
    lines = "A, 8.9, 24564 MiB, 580.65, GPU-a0\nB, 9.0, 81559 MiB, 580.65, GPU-b0"
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho '{lines}'\n")
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu["name"] for gpu in hardware.gpus()] == expected
    best = {"A": "tensorrt-rtx", "B": "tensorrt", "": "onnxruntime"}[(expected or [""])[0]]
    assert registry.best_here().engine == best


def test_a_plan_without_a_gpu_named_is_for_the_one_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--target", "qwen3-8b"])
    assert "--gpu is required where nvidia-smi shows none" in capsys.readouterr().err
    machine(monkeypatch, tmp_path, "9.0", ALL)
    assert main(["plan", "--target", "qwen3-8b"]) == 0
    said = capsys.readouterr()
    assert "engine tensorrt: the best for compute capability 90" in said.err
    assert "NVIDIA X, tensorrt: GiB on the GPU" in said.out
    assert "of 79.65, " in said.out


@pytest.mark.parametrize("by", ["command", "class"])
def test_a_pair_is_built_for_the_engine_that_is_asked_for(
    by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DFLASH_TRT_CACHE", str(tmp_path))
    if by == "command":
        words = ["generate", "--engine", "torch", "-p", "x", "--max-tokens", "2"]
        assert main([*words, "tiny"]) == 0
        assert main([*words, str(tmp_path / "bundles" / "tiny-torch")]) == 0
    else:
        with LLM("tiny", engine="torch") as llm:
            assert llm.bundle.path == tmp_path / "bundles" / "tiny-torch"
    assert "chooses another" not in capsys.readouterr().err
    assert Bundle.open(tmp_path / "bundles" / "tiny-torch").manifest["engine"] == "torch"
    with pytest.raises(BundleError, match="was built for torch, and --engine is onnxruntime"):
        open_bundle(tmp_path / "bundles" / "tiny-torch", "size", "onnxruntime")
    with pytest.raises(UsageError, match=r"--engine is 'torc' \(did you mean 'torch'"):
        open_bundle("tiny", "size", "torc")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--gpu", "h100"], "tensorrt"),
        (["--gpu", "rtx-5090"], "tensorrt-rtx"),
        (["--gpu", "memory=16,sm=75"], "torch"),
        (["--gpu", "b200", "--tp", "8"], "tensorrt-llm"),
    ],
)
def test_a_plan_is_for_what_its_gpu_runs_best(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["plan", "--target", "gpt-oss-20b", *words])
    said = capsys.readouterr()
    assert said.err.startswith(f"engine {expected}: ")
    assert "--engine chooses another" in said.err
    assert f", {expected}: GiB" in said.out
