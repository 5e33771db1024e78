"""`selftest --first-gpu`: every step on ONNX Runtime and on a double of TensorRT, and the archive that is sent."""

from __future__ import annotations

import contextlib
import json
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from dflash_trt import hardware
from dflash_trt.cli import main
from dflash_trt.engines.base import Availability
from dflash_trt.engines.registry import engines
from dflash_trt.engines.torch.entry import TorchEntry
from dflash_trt.reports.first_gpu import FirstGPU
from tests.doubles import fake_tensorrt
from tests.doubles.one_gpu import one_gpu

# The commands as they are, but for the size of what they measure. Kernels are not for this double.
SHORT = {
    "build": ["--max-seq-len", "96"],
    "verify": ["--limit", "1", "--temperatures", "0", "--max-tokens", "8"],
    "bench": ["--requests", "2", "--concurrency", "1", "--max-tokens", "4", "--methods", "plain,draft"],
}


def here(words: Sequence[str], output: Path, errors: Path) -> int:
    """Runs a command in this process, where the doubles are."""
    more = SHORT.get(words[0], [])
    if "tensorrt" in words:
        more = [*more, "--plugins", "none", "--max-batch-size", "4", "--prefill-chunk", "32"]
    with (
        output.open("w") as out,
        errors.open("w") as err,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        print(f"begins in {Path.home()} with hf_0123456789", file=err)
        return main([*words, *more])


@pytest.fixture
def gpu() -> Iterator[None]:
    with one_gpu() as patch:
        # Its passes are slow on this double.
        patch.setattr(TorchEntry, "availability", lambda *given: Availability(False, False, "not here"))
        yield


def packed(archive: Path) -> dict[str, str]:
    with zipfile.ZipFile(archive) as file:
        return {name: file.read(name).decode(errors="replace") for name in file.namelist()}


def states(first: FirstGPU) -> dict[str, str]:
    return {step.name: step.state for step in first.run()}


def test_without_a_gpu_the_steps_run_on_onnxruntime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "compute_capabilities", list)
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789")
    first = FirstGPU(tmp_path / "first.zip", here)
    found = states(first)
    assert list(found) == [
        *("doctor", "build", "selftest onnxruntime", "verify onnxruntime"),
        *("verify onnxruntime widths", "bench onnxruntime"),
    ]
    assert set(found.values()) == {"passed"}
    assert set(first.left_out) == {"torch", "tensorrt-rtx", "tensorrt", "tensorrt-llm"}
    files = packed(tmp_path / "first.zip")
    assert json.loads(files["first_gpu.json"])["left_out"] == first.left_out
    assert json.loads(files["verify-onnxruntime-widths.json"])["equal"] is True
    assert files["doctor.errors.txt"].startswith("begins in ~ with ***")
    everything = "".join(files.values())
    assert str(Path.home()) not in everything
    assert not [name for name in files if name.endswith((".onnx", ".safetensors"))]


def test_on_a_gpu_every_engine_is_built_and_compared(tmp_path: Path, gpu: None) -> None:
    first = FirstGPU(tmp_path / "first.zip", here)
    found = states(first)
    assert set(found.values()) <= {"passed", "differs"}, [step.detail for step in first.steps]
    assert list(found)[2:] == [
        *(
            "build tensorrt",
            "selftest tensorrt",
            "verify tensorrt",
            "verify tensorrt widths",
            "bench tensorrt",
        )
    ]
    files = packed(tmp_path / "first.zip")
    checks = {check["name"]: check for check in json.loads(files["tensorrt/selftest.json"])["checks"]}
    assert checks["layers"]["state"] == "passed"
    assert json.loads(files["bundles/tensorrt/manifest.json"])["precision"]["target"] == "bfloat16"
    assert json.loads(files["tensorrt/layers.json"])["first"] is None
    assert "bundles/tensorrt/plans/sm90/target.log" in files
    assert not [name for name in files if name.endswith(".plan")]


def test_it_stops_at_the_first_failure(
    tmp_path: Path, gpu: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fake_tensorrt.Builder, "build_serialized_network_to_stream", lambda *given: False)
    monkeypatch.setattr(FirstGPU.__init__, "__defaults__", (here,))
    archive = tmp_path / "first.zip"
    assert main(["selftest", "--first-gpu", str(archive)]) == 1
    (*before, last) = json.loads(packed(archive)["first_gpu.json"])["steps"]
    assert [step["state"] for step in before] == ["passed", "passed"]
    assert (last["name"], last["state"], last["exit_code"]) == ("build tensorrt", "failed", 1)
    assert "TensorRT" in last["detail"]
    assert f"archive to send: {archive}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("code", "printed", "detail"),
    [
        (-11, "", "ended by signal 11"),
        (1, "passed  a\nfailed  layers  of x\nfailed  b\n", "failed  layers  of x"),
    ],
)
def test_a_failure_has_the_first_words_about_it(tmp_path: Path, code: int, printed: str, detail: str) -> None:
    def run(words: Sequence[str], output: Path, errors: Path) -> int:
        output.write_text(printed)
        return code

    first = FirstGPU(tmp_path / "first.zip", run)
    assert [(step.state, step.detail.partition(";")[0]) for step in first.run()] == [("failed", detail)]


def test_on_a_gpu_engines_are_compared_with_torch_in_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[Sequence[str]] = []
    rows = [{"engine": e.name, "build": True, "run": True, "note": ""} for e in engines()]

    def run(words: Sequence[str], output: Path, errors: Path) -> int:
        commands.append(words)
        output.write_text(json.dumps({"engines": rows}) if words[0] == "doctor" else "{}")
        return 0

    monkeypatch.setattr(hardware, "compute_capabilities", lambda: [90])
    assert set(states(FirstGPU(tmp_path / "first.zip", run)).values()) == {"passed"}
    assert commands[1][3:7] == ["--engine", "torch", "--precision", "target=fp32,drafter=fp32"]
    (reference,) = {words[words.index("--reference") + 1] for words in commands if "--reference" in words}
    assert commands[1][-1] == reference
    assert [words[4] for words in commands[2:] if words[0] == "build"] == [
        "torch",
        "tensorrt-rtx",
        "tensorrt",
    ]
