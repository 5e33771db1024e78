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
from dflash_trt.engines.torch import checks
from dflash_trt.engines.torch.entry import TorchEntry
from dflash_trt.reports import first_gpu
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
    if "--kernels" in words:  # they do not run on this double
        Path(words[-1]).write_text('{"gpu": "A double", "copy_gb_per_s": 12}')
        return 0
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
        patch.setattr(first_gpu, "PAIRS", ("tiny",))  # that of experts needs kernels
        patch.setattr(hardware, "gpus", lambda: [{"name": "A double"}, {"name": "Another"}])
        patch.setattr(TorchEntry, "availability", lambda *given: Availability(False, False, "not here"))
        yield


def packed(archive: Path) -> dict[str, str]:
    with zipfile.ZipFile(archive) as file:
        return {name: file.read(name).decode(errors="replace") for name in file.namelist()}


def states(first: FirstGPU) -> dict[str, str]:
    return {step.name: step.state for step in first.run()}


def test_without_a_gpu_the_steps_run_on_onnxruntime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "compute_capabilities", list)
    monkeypatch.setattr(first_gpu, "PAIRS", ("tiny",))
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789")
    monkeypatch.setattr(first_gpu, "in_process_of_its_own", here)
    first = FirstGPU(tmp_path / "first.zip")
    found = states(first)
    assert list(found) == [
        *("doctor", "build tiny reference", "selftest tiny onnxruntime", "verify tiny onnxruntime"),
        *("verify tiny onnxruntime widths", "bench tiny onnxruntime"),
    ]
    assert set(found.values()) == {"passed"}
    assert set(first.left_out) == {"kernels", "torch", "tensorrt-rtx", "tensorrt", "tensorrt-llm"}
    assert (first.exit_code, first.not_tested()) == (3, ["no GPU is here"])
    files = packed(tmp_path / "first.zip")
    assert json.loads(files["first_gpu.json"])["left_out"] == first.left_out
    assert json.loads(files["verify-tiny-onnxruntime-widths.json"])["equal"] is True
    assert files["doctor.errors.txt"].startswith("begins in ~ with ***")
    everything = "".join(files.values())
    assert str(Path.home()) not in everything
    assert not [name for name in files if name.endswith((".onnx", ".safetensors"))]


def test_on_a_gpu_every_engine_is_built_and_compared(
    tmp_path: Path, gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_gpu, "in_process_of_its_own", here)
    first = FirstGPU(tmp_path / "first.zip")
    found = states(first)
    assert set(found.values()) <= {"passed", "differs"}, [step.detail for step in first.steps]
    assert list(found)[1:] == [
        "kernels",
        "build tiny reference",
        *(f"{step} tiny tensorrt" for step in ("build", "selftest", "verify")),
        *("verify tiny tensorrt widths", "bench tiny tensorrt"),
    ]
    assert (first.touched, first.not_tested()) == ("A double", ["Another"])
    files = packed(tmp_path / "first.zip")
    assert json.loads(files["first_gpu.json"])["not_tested"] == ["Another"]
    checks = {check["name"]: check for check in json.loads(files["tiny-tensorrt/selftest.json"])["checks"]}
    assert checks["layers"]["state"] == "passed"
    assert json.loads(files["bundles/tiny-tensorrt/manifest.json"])["precision"]["target"] == "bfloat16"
    assert json.loads(files["tiny-tensorrt/selftest.json"])["layers"]
    assert "bundles/tiny-tensorrt/plans/sm90/target.log" in files
    assert not [name for name in files if name.endswith(".plan")]


def test_a_failure_leaves_out_what_needs_its_result_and_no_more(
    tmp_path: Path, gpu: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fake_tensorrt.Builder, "build_serialized_network_to_stream", lambda *given: False)
    monkeypatch.setattr(first_gpu, "in_process_of_its_own", here)
    archive = tmp_path / "first.zip"
    assert main(["selftest", "--first-gpu", str(archive)]) == 1
    steps = json.loads(packed(archive)["first_gpu.json"])["steps"]
    assert [(step["name"], step["state"]) for step in steps][1:] == [
        *(("kernels", "passed"), ("build tiny reference", "passed"), ("build tiny tensorrt", "failed")),
    ]
    assert steps[-1]["exit_code"] == 1
    assert "TensorRT" in steps[-1]["detail"]
    said = capsys.readouterr().out
    assert "ran on A double, whose memory copies 12 GB/s" in said
    assert f"archive to send: {archive}" in said


def test_a_gpu_that_nothing_ran_on_is_not_tested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As with a torch for the CPU, or a driver that torch does not take."""
    rows = [{"engine": e.name, "build": True, "run": True, "note": ""} for e in engines()]

    def run(words: Sequence[str], output: Path, errors: Path) -> int:
        output.write_text(json.dumps({"engines": rows} if words[0] == "doctor" else {}))
        return 0

    monkeypatch.setattr(hardware, "gpus", lambda: [{"name": "NVIDIA X", "compute_cap": "9.0"}])
    monkeypatch.setattr(first_gpu, "in_process_of_its_own", run)
    assert main(["selftest", "--first-gpu", str(tmp_path / "first.zip")]) == 3
    assert "not tested  NVIDIA X" in capsys.readouterr().out


def test_kernels_are_checked_without_a_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "kernels.json"
    words = ["selftest", "--kernels", "--report", str(report)]
    assert main(words) == 0
    found = json.loads(report.read_text())
    assert found["gpu"] is None
    assert found["problems"] == {"float16": dict.fromkeys(("SampleRows", "BlockAcceptance", "Round"), "")}
    monkeypatch.setattr(checks, "_accepted", lambda *given: "counts are wrong")
    assert main(words) == 1
    assert "failed  BlockAcceptance  float16  counts are wrong" in capsys.readouterr().out
    monkeypatch.delenv("TRITON_INTERPRET")
    assert main(words) == 1
    assert "sees no GPU here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("code", "printed", "detail"),
    [
        (-11, "", "ended by signal 11"),
        (1, "passed  a\nfailed  layers  of x\nfailed  b\n", "failed  layers  of x"),
    ],
)
def test_a_failure_has_the_first_words_about_it(
    tmp_path: Path, code: int, printed: str, detail: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(words: Sequence[str], output: Path, errors: Path) -> int:
        output.write_text(printed)
        return code

    monkeypatch.setattr(first_gpu, "in_process_of_its_own", run)
    first = FirstGPU(tmp_path / "first.zip")
    assert [(step.state, step.detail.partition(";")[0]) for step in first.run()] == [("failed", detail)]


@pytest.mark.parametrize(("capability", "fails"), [(90, False), (80, True)])
def test_on_a_gpu_engines_are_compared_with_torch_in_float32(
    capability: int, fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[Sequence[str]] = []
    rows = [{"engine": e.name, "build": True, "run": True, "note": ""} for e in engines()]

    def run(words: Sequence[str], output: Path, errors: Path) -> int:
        commands.append(words)
        output.write_text(json.dumps({"engines": rows}) if words[0] == "doctor" else "{}")
        return int(
            fails
            and words[:5] == ["build", "--target", "tiny", "--engine", "torch"]
            and "--precision" not in words
        )

    monkeypatch.setattr(hardware, "compute_capabilities", lambda: [capability])
    monkeypatch.setattr(first_gpu, "in_process_of_its_own", run)
    first = FirstGPU(tmp_path / "first.zip")
    found = states(first)
    assert [name for name, state in found.items() if state != "passed"] == ["build tiny torch"] * fails
    assert ("selftest tiny torch" in found) != fails
    assert "selftest tiny-gpt-oss torch" in found
    assert commands[1][:2] == ["selftest", "--kernels"]
    assert commands[2][3:7] == ["--engine", "torch", "--precision", "target=fp32,drafter=fp32"]
    references = {words[words.index("--reference") + 1] for words in commands if "--reference" in words}
    assert references == {words[-1] for words in commands if words[-1].endswith("-reference")}
    built = [
        (words[2], words[4]) for words in commands[2:] if words[0] == "build" and words[-1] not in references
    ]
    experts = [("tiny-gpt-oss", "tensorrt")] * (capability == 90)  # whose kernels it has
    assert built[:2] == [(pair, "torch") for pair in first_gpu.PAIRS]  # before any plan
    assert [each for each in built[2:] if each[1] == "tensorrt"] == [("tiny", "tensorrt"), *experts]
    assert ("tiny-gpt-oss tensorrt" in first.left_out) == (capability == 80)
