"""`plan --slo` and `build --from-plan`: the chosen setting, the plan's file, and plans for something else."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from dflash_trt import hardware
from dflash_trt.bundle.manifest import read_manifest
from dflash_trt.cli import main
from dflash_trt.errors import RequestError
from dflash_trt.planning import slo
from dflash_trt.planning.acceptance import Acceptance, Chain
from dflash_trt.planning.slo import block_schedule, choose, parse_slo, read_plan
from tests.planning.test_steps import document

SCHEMA = json.loads(Path(slo.__file__).with_name("plan.schema.json").read_text())
ACCEPTANCE = Acceptance({2: 1.8, 4: 3.0, 8: 4.0}, "a test")
CARD = ["plan", "--target", "gpt-oss-120b", "--gpu", "b300", "--engine", "tensorrt-llm"]


class Linear:
    """Passes that take 10 ms, and 1 ms more for every `rows` rows. A drafter's pass takes 2 ms."""

    def __init__(self, gpus: int, most: int, rows: float) -> None:
        self.gpus, self.most, self.rows = gpus, most, rows

    def plain(self, batch: int) -> float | None:
        return (10 + batch / self.rows) / 1e3

    def round(self, batch: int, block: int) -> float | None:
        return (12 + batch * block / self.rows) / 1e3

    def chain(self, batch: int, chain: Chain) -> float | None:
        return None


def test_the_setting_with_the_most_tokens_among_those_fast_enough() -> None:
    layouts = [Linear(1, 64, 4), Linear(2, 64, 16)]
    for tpot in (4, 8, 20):
        best = choose(layouts, ACCEPTANCE, blocks=[2, 4, 8], tpot=tpot, node=4, precision=None)
        assert best is not None
        every = [
            (batch * tokens / seconds / layout.gpus, layout.gpus, batch)
            for layout in layouts
            for batch in slo.batches(layout.most)
            for tokens, seconds in [
                (1.0, layout.plain(batch) or 0),
                *((ACCEPTANCE.length(k), layout.round(batch, k) or 0) for k in (2, 4, 8)),
            ]
            if seconds / tokens <= tpot / 1e3
        ]
        assert (best.throughput, best.gpus, best.batch) == pytest.approx(max(every))
        assert best.speed >= 1e3 / tpot
        assert best.users == best.batch * 4 // best.gpus
    assert choose(layouts, ACCEPTANCE, blocks=[2, 4, 8], tpot=2, node=4, precision=None) is None


def test_block_lengths_fall_with_the_number_of_requests() -> None:
    layout = Linear(1, 512, 2)
    steps = block_schedule(layout, ACCEPTANCE, 512, [2, 4, 8])
    assert [block for _, block in steps] == [8, 4, 2, 1]  # with many rows, drafts cost more than they give
    assert steps[-1][0] == 512
    at = [n for n, _ in steps]
    assert at == sorted(at)
    for requests, block in steps[:-1]:
        speed = ACCEPTANCE.length(block) / (layout.round(requests, block) or 1)
        assert speed > 1 / (layout.plain(requests) or 1)


@pytest.mark.parametrize("text", ["80", "tpot=", "tpot=0", "tpot=x", "ttft=200", "tpot=1e9"])
def test_a_wrong_slo_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="expected tpot=MILLISECONDS"):
        parse_slo(text)
    assert parse_slo("TPOT=12.5ms") == 12.5


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real plan, as the command prints it."""
    file = tmp_path_factory.mktemp("plan") / "plan.json"
    with file.open("w") as out, redirect_stdout(out):
        assert main([*CARD, "--slo", "tpot=12.5", "--json"]) == 0
    return file


def test_a_plan_is_built_for_tensorrt_llm(plan: Path, tmp_path: Path) -> None:
    jsonschema.validate(json.loads(plan.read_text()), SCHEMA)
    found = read_plan(plan)
    assert found.choice.speed >= 80
    assert (
        main(["build", "--from-plan", str(plan), "--weights", "none", "--out", str(tmp_path / "bundle")]) == 0
    )
    args = yaml.safe_load((tmp_path / "bundle" / "llm_args.yaml").read_text())
    assert args["max_batch_size"] == found.choice.batch
    assert args["tensor_parallel_size"] == found.choice.gpus
    assert args["max_seq_len"] == found.context
    assert args["speculative_config"]["max_draft_len"] == found.choice.block_size - 1
    drafts = {n: block - 1 for n, block in found.choice.schedule}
    assert args["speculative_config"]["draft_len_schedule"] == drafts
    assert len(drafts) > 1


def test_the_command_shows_the_choice(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--target", "qwen3-8b", "--gpu", "rtx-4090", "--engine", "tensorrt-rtx"]
    assert main([*words, "--slo", "tpot=4"]) == 0
    text = capsys.readouterr().out
    assert "as stored" in text
    assert "target=fp8" in text
    assert "target=nvfp4" not in text  # no such arithmetic on that GPU
    assert "block length by active requests" in text
    assert main([*words, "--slo", "tpot=0.5"]) == 1
    assert "no setting keeps --slo tpot=0.5" in capsys.readouterr().out


def other_options() -> list[tuple[list[str], str]]:
    return [
        (["--target", "gpt-oss-20b"], "--target gpt-oss-20b: {} is a plan for --target gpt-oss-120b"),
        (["--gpu", "h100"], "--gpu h100: {} is a plan for --gpu b300"),
        (["--engine", "tensorrt"], "--engine tensorrt: {} is a plan for --engine tensorrt-llm"),
        (["--max-batch-size", "7"], "--max-batch-size 7: {} is a plan for"),
        (["--draft-len-schedule", "4:9"], "--draft-len-schedule 4:9: {} is a plan for"),
    ]


@pytest.mark.parametrize(("options", "said"), other_options())
def test_a_plan_for_something_else_is_refused(
    plan: Path, options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["build", "--from-plan", str(plan), *options])
    assert said.format(plan) in capsys.readouterr().err


def test_a_plan_for_another_machine_is_refused(
    plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    values = json.loads(plan.read_text()) | {"target": "tiny", "engine": "tensorrt", "gpu": "h200"}
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(values))
    monkeypatch.setattr(hardware, "gpus", lambda: [{"name": "NVIDIA H100 80GB HBM3", "compute_cap": "9.0"}])
    assert main(["build", "--from-plan", str(file)]) != 0
    assert "is a plan for h200, but this machine has NVIDIA H100 80GB HBM3" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["build", "--from-plan", str(file), "--compute-capability", "120"])
    assert "is a plan for h200, which has 90" in capsys.readouterr().err


def test_a_plan_from_measured_steps_is_built(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps, file = tmp_path / "steps.json", tmp_path / "plan.json"
    steps.write_text(json.dumps(document()))
    assert main(["plan", "--steps", str(steps), "--slo", "tpot=50", "--acceptance", "4=3,8=5", "--json"]) == 0
    file.write_text(capsys.readouterr().out)
    jsonschema.validate(json.loads(file.read_text()), SCHEMA)
    assert read_plan(file).gpu is None
    assert main(["build", "--from-plan", str(file), "--out", str(tmp_path / "bundle")]) == 0
    manifest = read_manifest(tmp_path / "bundle")
    assert manifest["engine"] == "onnxruntime"
    assert manifest["block_size"] == read_plan(file).choice.block_size
    assert manifest["quantization"] == {"target": "W8A16", "drafter": None, "head": None}


WRONG: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda d: d.update(format="x"), "format is 'x', expected 'dflash-trt plan'"),
    (lambda d: d.update(version=2), "version is 2, but this program reads version 1"),
    (lambda d: d.pop("target"), "target is missing"),
    (lambda d: d.update(context=0), "context is 0, expected 1 or more"),
    (lambda d: d["choice"].update(batch="4"), "choice.batch is '4'"),
    (lambda d: d["choice"].update(block_size=1), "choice.block_size is 1, expected 2 or more"),
    (lambda d: d["choice"]["schedule"][0].pop("block"), r"choice.schedule\[0\].block is missing"),
    (lambda d: d["choice"].update(schedule=[]), "expected rising numbers up to"),
    (lambda d: d["choice"]["schedule"][-1].update(requests=3), "expected rising numbers up to"),
    (lambda d: d["choice"]["schedule"][0].update(block=99), "expected falling ones of at most"),
]


@pytest.mark.parametrize(("change", "said"), WRONG)
def test_a_wrong_plan_is_refused(
    plan: Path, tmp_path: Path, change: Callable[[dict[str, Any]], object], said: str
) -> None:
    values, file = json.loads(plan.read_text()), tmp_path / "wrong.json"
    change(values)
    file.write_text(json.dumps(values))
    with pytest.raises(RequestError, match=said):
        read_plan(file)
    if "expected rising" not in said and "expected falling" not in said:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(values, SCHEMA)
