"""Steps files: times between measured ones, curves from them, and files that are refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.cli import main
from dflash_trt.errors import RequestError
from dflash_trt.planning.steps import read_steps


def seconds(kind: str, batch: float, rows: float, context: float = 0) -> float:
    """Linear along each axis, so interpolation must be exact."""
    base = {"target": 0.02, "drafter": 0.004, "host": 0.001}[kind]
    return base * (1 + 0.1 * batch + 0.05 * batch * rows + 0.0001 * batch * context)


def document(**bundle: Any) -> dict[str, Any]:
    passes = [
        {"pass": kind, "batch": b, "rows": n, "context": c, "seconds": seconds(kind, b, n, c)}
        for kind, least in (("target", 1), ("drafter", 2))
        for b, n, c in product((1, 4, 16), (least, 8), (128, 512))
    ]
    host = [{"batch": b, "rows": n, "seconds": seconds("host", b, n)} for b, n in product((1, 16), (1, 8))]
    return {
        "format": "dflash-trt steps",
        "version": 1,
        "machine": {"processor": "a processor, 2 cores", "gpus": []},
        "versions": {"python": "3.11"},
        "bundle": {
            "name": "tiny",
            "engine": "onnxruntime",
            "target": {"name": "target"},
            "quantization": {"target": "W8A16", "head": None},
            "block_size": 8,
            "gpus": 1,
        }
        | bundle,
        "passes": passes,
        "host": host,
    }


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "steps.json"
    path.write_text(json.dumps(document()))
    return path


def test_times_between_the_measured_ones(file: Path) -> None:
    layout = read_steps(file).layout(200)
    assert (layout.gpus, layout.most) == (1, 16)
    for batch in (1, 3, 4, 11, 16):
        plain = seconds("target", batch, 1, 200) + seconds("host", batch, 1)
        assert layout.plain(batch) == pytest.approx(plain)
        for block in (2, 5, 8):
            passes = sum(seconds(kind, batch, block, 200) for kind in ("target", "drafter"))
            assert layout.round(batch, block) == pytest.approx(passes + seconds("host", batch, block))


def test_the_command_plans_with_the_file(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "--steps", str(file), "--acceptance", "8=5", "--context", "200"]
    assert main([*asked, "--curve", "--json", "--blocks", "4,8", "--target", "tiny"]) == 0
    found = json.loads(capsys.readouterr().out)
    layout = read_steps(file).layout(200)
    assert set(found["points"]) == {"plain", "block 4", "block 8"}
    point = next(p for p in found["points"]["block 8"] if p["batch"] == 6)
    assert point["speed"] == pytest.approx(5 / (layout.round(6, 8) or 0))
    assert point["throughput"] == pytest.approx(6 * point["speed"])
    assert main([*asked, "--curve"]) == 0
    text = capsys.readouterr().out
    assert "a processor, 2 cores" in text
    assert "on 1 machine" in text
    assert main([*asked, "--speed", "1"]) == 0
    assert "16 users" in capsys.readouterr().out


def test_rounds_of_an_engine_that_cannot_decode_plainly(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = document(gpus=2) | {"host": []}
    whole["machine"]["gpus"] = ["NVIDIA H100 80GB HBM3"] * 2
    whole["passes"] = [
        {"pass": "round", "batch": b, "rows": 8, "context": c, "seconds": 0.006 + 0.004 * b}
        for b, c in product((1, 2), (128, 256))
    ]
    file.write_text(json.dumps(whole))
    asked = ["plan", "--steps", str(file), "--acceptance", "8=5"]
    assert main([*asked, "--gpu", "h100", "--speed", "300"]) == 0
    text = capsys.readouterr().out
    assert "plain: no setting reaches 300" in text
    assert "with drafts: 2 users at 357 tokens/s on a node of 2: groups of 2 GPUs, batch 2" in text
    assert main([*asked, "--curve"]) == 0
    table = capsys.readouterr().out
    assert re.search(r"^per user +plain +batch +drafted +block +batch ", table, re.MULTILINE)
    assert re.search(r" 8 +2 on 2 GPUs ", table)
    with pytest.raises(SystemExit) as ended:
        main([*asked, "--gpu", "b300", "--curve"])
    assert ended.value.code == 2
    assert "--gpu b300: steps.json was measured on" in capsys.readouterr().err


WRONG: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda d: d.update(format="x"), "format is 'x', expected 'dflash-trt steps'"),
    (lambda d: d.update(version=2), "version is 2, but this program reads version 1"),
    (lambda d: d.pop("machine"), "machine is None, expected an object"),
    (lambda d: d["bundle"].update(block_size="8"), "bundle.block_size is '8', expected an integer above 0"),
    (lambda d: d.update(passes={}), "passes is not a list"),
    (lambda d: d["passes"][0].update({"pass": "x"}), r"passes\[0\].pass is 'x'"),
    (lambda d: d["passes"][1].update(seconds=-1), r"passes\[1\].seconds is -1, expected a time"),
    (lambda d: d["passes"][1].update(batch=0), r"passes\[1\].batch is 0, expected an integer"),
    (lambda d: d["passes"].append(d["passes"][0]), "a second time"),
    (lambda d: d["passes"].pop(3), "has no time of target at batch 1, rows 8, context 512"),
    (lambda d: d.update(host=[]), "has times of target, drafter, expected"),
    (
        lambda d: d["bundle"].update(block_size=16),
        "rows of target are 1 to 8, expected 1 to the block size 16",
    ),
    (
        lambda d: d.update(host=[row for row in d["host"] if row["batch"] == 1]),
        "batches of host are 1 to 1, expected the same",
    ),
]


@pytest.mark.parametrize(("change", "said"), WRONG)
def test_a_wrong_file_is_refused(file: Path, change: Callable[[dict[str, Any]], object], said: str) -> None:
    wrong = document()
    change(wrong)
    file.write_text(json.dumps(wrong))
    with pytest.raises(RequestError, match=said):
        read_steps(file)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--target", "tiny-gpt-oss"], "--target tiny-gpt-oss: steps.json was measured with tiny"),
        (["--gpu", "h100"], "--gpu h100: steps.json was measured on a processor, 2 cores"),
        (["--context", "1000"], "--context 1000: steps.json has passes behind 128 to 512 rows"),
        (["--engine", "tensorrt"], "--engine tensorrt: "),
        (["--precision", "target=fp8"], "--precision: not with --steps"),
    ],
)
def test_a_plan_for_something_else_is_refused(
    file: Path, options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", "--curve", "--steps", str(file), "--acceptance", "8=5", *options]
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_steps_are_for_curves_only(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--steps", str(file)])
    assert "--steps: only with --curve, --speed or --slo" in capsys.readouterr().err
