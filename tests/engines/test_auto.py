"""The engine that `auto` stands for, on machines with other GPUs and packages."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from dflash_trt import LLM, hardware
from dflash_trt.building import defaults
from dflash_trt.building.build import build
from dflash_trt.building.first_use import open_bundle
from dflash_trt.bundle.manifest import Bundle
from dflash_trt.cli import main
from dflash_trt.engines import registry
from dflash_trt.engines.base import Availability
from dflash_trt.errors import BuildError, BundleError, UsageError
from dflash_trt.reports.environment import describe
from tests.doubles import fake_tensorrt, fake_tensorrt_rtx

RTX, TRT = ("tensorrt_rtx", fake_tensorrt_rtx), ("tensorrt", fake_tensorrt)
RTX_PACKAGES, TRT_PACKAGES = ("tensorrt_rtx", "torch"), ("tensorrt", "torch")
ALL = ("tensorrt_rtx", "tensorrt", "torch")


def machine(
    patch: pytest.MonkeyPatch, place: Path, capability: str, packages: tuple[str, ...], driver: str = "580.65"
) -> None:
    """A machine with this GPU, as nvidia-smi says, and these packages."""
    program = place / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho 'NVIDIA X, {capability}, 81559 MiB, {driver}'\n")
    program.chmod(0o755)
    patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    patch.setenv("PATH", f"{place}{os.pathsep}{os.environ['PATH']}")
    for name, double in (RTX, TRT):
        patch.setitem(sys.modules, name, double if name in packages else None)
    if "torch" not in packages:
        patch.setitem(sys.modules, "torch", None)
    torch_says(patch, "13.0", ["NVIDIA X"])
    major, minor = map(int, capability.split("."))
    patch.setattr(torch.cuda, "get_device_capability", lambda: (major, minor))
    patch.setattr(torch.cuda, "get_arch_list", lambda: [f"sm_{major}{minor}"])


def torch_says(patch: pytest.MonkeyPatch, cuda: str | None, gpus: list[str], said: str = "") -> None:
    def is_available() -> bool:
        if said:
            warnings.warn(said, stacklevel=1)
        return bool(gpus)

    patch.setattr(torch.version, "cuda", cuda)
    patch.setattr(torch.cuda, "is_available", is_available)
    patch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    patch.setattr(torch.cuda, "get_device_name", gpus.__getitem__)


@pytest.mark.parametrize(
    ("capability", "packages", "expected"),
    [
        ("8.9", ALL, "torch"), ("12.0", RTX_PACKAGES, "torch"), ("9.0", TRT_PACKAGES, "torch"),
        ("9.0", ("torch",), "torch"),
        ("9.0", ("tensorrt",), "onnxruntime"),  # plans run on torch
        ("7.5", ALL, "torch"), ("9.0", (), "onnxruntime"),
    ],
)  # fmt: skip
def test_a_gpu_is_used_as_well_as_the_packages_allow(
    capability: str, packages: tuple[str, ...], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, tmp_path, capability, packages)
    chosen = registry.best_here()
    assert chosen.engine == expected
    assert chosen.leaves_gpu_idle == (expected == "onnxruntime")
    best = registry.best_on(int(capability.replace(".", "")), several=False)
    assert packages != ALL or best.engine == expected


@pytest.mark.parametrize(
    ("driver", "cuda", "gpus", "said", "expected"),
    [
        ("580.65", "13.0", ["NVIDIA X"], "", "on NVIDIA X, by torch"),
        ("550.54", "12.8", ["NVIDIA X"], "", "on NVIDIA X, by torch"),
        ("580.65", None, [], "", "has no CUDA: pip uninstall -y torch && pip install 'torch>="),
        ("550.54", None, [], "", "has no CUDA: pip uninstall -y torch && pip install 'torch==2.10.*'"),
        ("550.54", "13.0", [], "too old", "needs driver 580 or newer, and 550 is here: pip install 'torch==2.10.*'"),
        ("470.82", "12.8", [], "too old", "the driver is 470, and torch needs 525 or newer: update the driver"),
        ("580.65", "13.0", [], "busy or unavailable", "for CUDA 13.0 sees no GPU: busy or unavailable"),
    ],
)  # fmt: skip
def test_auto_and_doctor_ask_torch_itself(
    driver: str,
    cuda: str | None,
    gpus: list[str],
    said: str,
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine(monkeypatch, tmp_path, "9.0", ALL, driver)
    torch_says(monkeypatch, cuda, gpus, said)
    rows = {row["engine"]: row for row in describe()["engines"]}
    assert rows["torch"]["run"] == bool(gpus)
    assert expected in rows["torch"]["note"]
    plans = bool(gpus) and driver >= "580"
    assert rows["tensorrt"]["run"] == plans
    assert plans or "driver" in rows["tensorrt"]["note"] or expected in rows["tensorrt"]["note"]
    choice = registry.best_here()
    assert choice.engine == ("torch" if gpus else "onnxruntime")
    assert gpus or expected in choice.why


@pytest.mark.parametrize(
    ("capability", "codes", "expected"),
    [
        ("12.0", "sm_80 sm_90", "12.0: pip install --upgrade 'torch>=2.10' 'triton<3.10,>=3.6'"),
        ("12.0", "sm_80 compute_90", ""),  # which the driver compiles
        ("9.0", "sm_80 compute_100", "9.0: pip install --upgrade 'torch>=2.10' 'triton<3.10,>=3.6'"),
        ("8.9", "sm_75 sm_80", ""), ("12.1", "sm_100 sm_120", ""), ("10.3", "sm_100a", ""), ("9.0", "", ""),
        ("8.0", "sm_75 sm_86", "8.0: pip install --upgrade 'torch>=2.10' 'triton<3.10,>=3.6'"),
        ("7.0", "sm_75 sm_80", "7.0: pip install 'torch==2.10.*'"),
        ("6.1", "sm_75 sm_80", "6.1; --engine onnxruntime runs on the CPU"),
    ],
)  # fmt: skip
def test_a_torch_without_code_for_the_gpu_does_not_run_on_it(
    capability: str, codes: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, tmp_path, capability, ("torch",))
    monkeypatch.setattr(torch.cuda, "get_arch_list", codes.split)
    assert hardware.torch_problem().partition("has no code for compute capability ")[2] == expected
    choice = registry.best_here()
    assert choice.engine == ("onnxruntime" if expected else "torch")
    assert expected in choice.why


def test_an_old_driver_gets_a_torch_that_it_can_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest torch would lack no code for this GPU, and be refused by its driver."""
    machine(monkeypatch, tmp_path, "12.0", ("torch",), driver="575.51")
    torch_says(monkeypatch, "12.4", ["NVIDIA X"])
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_90"])
    assert hardware.torch_problem().endswith("compute capability 12.0: pip install 'torch==2.10.*'")


@pytest.mark.parametrize("broken", [False, True])
def test_torch_is_asked_in_a_process_of_its_own(
    broken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.version.cuda is not None:
        pytest.skip("this torch is not for the CPU alone")
    expected = f"torch {torch.__version__} has no CUDA: pip uninstall -y torch && "
    machine(monkeypatch, tmp_path, "9.0", ALL)
    if broken:
        expected = (
            "torch cannot be imported (ImportError: libcudnn.so.9 is missing): pip uninstall -y torch && "
        )
        (tmp_path / "torch.py").write_text("raise ImportError('libcudnn.so.9 is missing')")
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    program = (
        "import sys; from dflash_trt.engines import registry; print(registry.best_here())\n"
        "assert 'torch' not in sys.modules"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.startswith(f"engine onnxruntime: runs on the CPU; {expected}pip install 'torch>=")


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
        assert "engine torch: it has run on GPUs, and no plan of tensorrt has" in capsys.readouterr().err
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
    assert "the GPU that is here needs torch (pip install" in said
    assert "tensorrt (pip install" in said
    assert "--engine onnxruntime builds it all the same" in said


def test_nothing_is_fetched_that_the_memory_cannot_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "gpus", list)
    monkeypatch.setattr(hardware, "memory_bytes", lambda: 24 << 30)
    with pytest.raises(BuildError, match=r"qwen3-8b: needs [\d.]+ GiB .* 24\.00 GiB"):
        defaults.choose_engine("qwen3-8b")
    monkeypatch.setattr(hardware, "memory_bytes", lambda: 256 << 30)
    assert defaults.choose_engine("qwen3-8b") == registry.DEFAULT


def test_nothing_is_fetched_that_the_gpu_cannot_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DFLASH_TRT_CACHE", str(tmp_path))
    monkeypatch.setitem(sys.modules, "huggingface_hub", ModuleType("huggingface_hub"))
    machine(monkeypatch, tmp_path, "8.9", ("torch",))
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'NVIDIA Y, 8.9, 24564 MiB, 580.65'\n")
    assert main(["chat", "qwen3-coder-30b-a3b"]) == 1
    said = capsys.readouterr().err
    assert "GiB of memory for one sequence on NVIDIA Y, of which 23.99 GiB are here (engine torch: " in said
    assert "--engine torch builds it all the same" in said
    assert defaults.choose_engine("qwen3-8b") == "torch"
    assert defaults.choose_engine("qwen3-coder-30b-a3b", weights="none") == "torch"


def test_build_leaves_out_engines_that_cannot_do_what_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans hold their weights."""
    monkeypatch.setattr(registry, "_ON_GPU", ("tensorrt", "torch"))
    monkeypatch.setattr(hardware, "compute_capabilities", lambda: [90])
    find, available = registry.find, Availability(True, True, "")
    monkeypatch.setattr(registry, "find", lambda name: replace(find(name), available=lambda _: available))
    assert defaults.choose_engine("tiny") == "tensorrt"
    assert defaults.choose_engine("tiny", weights="none") == "torch"


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
    assert registry.best_here().engine == ("torch" if expected else "onnxruntime")


def test_cuda_numbers_the_gpus_as_nvidia_smi_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, tmp_path, "9.0", ALL)
    for order, expected in ((None, "PCI_BUS_ID"), ("FASTEST_FIRST", "FASTEST_FIRST")):
        monkeypatch.setenv("CUDA_DEVICE_ORDER", "")
        monkeypatch.delenv("CUDA_DEVICE_ORDER")
        if order is not None:
            monkeypatch.setenv("CUDA_DEVICE_ORDER", order)
        hardware.gpus()
        assert os.environ["CUDA_DEVICE_ORDER"] == expected


@pytest.mark.parametrize(
    ("capabilities", "dtype"), [([], "float"), ([75, 89], "float16"), ([80], "bfloat16"), ([120], "bfloat16")]
)
def test_a_build_is_in_a_dtype_that_the_gpu_computes_in(
    capabilities: list[int], dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "compute_capabilities", lambda: capabilities)
    bundle = build("tiny", None, tmp_path / "bundle", engine="torch", weights="none")
    assert bundle.manifest["precision"] == {"target": dtype, "drafter": dtype}


def test_a_plan_without_a_gpu_named_is_for_the_one_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--target", "qwen3-8b"])
    assert "--gpu is required where nvidia-smi shows none" in capsys.readouterr().err
    machine(monkeypatch, tmp_path, "9.0", ALL)
    assert main(["plan", "--target", "qwen3-8b"]) == 0
    said = capsys.readouterr()
    assert "engine torch: it has run on GPUs, and no plan of tensorrt has" in said.err
    assert "NVIDIA X, torch: GiB on the GPU" in said.out
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
        (["--gpu", "h100"], "torch"),
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
