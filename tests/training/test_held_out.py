"""What a drafter is measured with: prompts that it was not trained on, before the first step too."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.checkpoint.catalogue import SHIPPED
from dflash_trt.cli import main
from dflash_trt.errors import DFlashError, RequestError
from dflash_trt.prompts import Prompt, read_prompts
from dflash_trt.training.answers import Answer, AnswerFile, hold_out, read_answers, write_prompts
from dflash_trt.training.blocks import Batches
from dflash_trt.training.evaluation import average, read_history
from dflash_trt.training.recipe import Design, Recipe
from dflash_trt.training.run import run

TINY = SHIPPED / "tiny" / "target"
DATA = Path("answers.jsonl")
RECIPE = Recipe(steps=2, batch_size=4, anchors=4, max_length=160, limit=4, eval_tokens=8)


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 prompts, one of which is held out."""
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    write_prompts(file, read_prompts(None, 60, {"add_generation_prompt": True}))
    return file


@pytest.fixture(scope="module")
def data(prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Answers of the target alone, without a bundle that someone built."""
    out = tmp_path_factory.mktemp("answers") / "answers.jsonl"
    command = ["train", "regenerate", "--target", str(TINY), "--prompts", str(prompts), "--out", str(out)]
    assert main([*command, "--max-tokens", "32", "--threads", "1"]) == 0
    assert [file.name for file in out.parent.iterdir()] == [out.name]
    return out


def texts(answers: list[Answer]) -> set[Any]:
    return {json.dumps(answer.content) for answer in answers}


def test_a_target_without_a_drafter_answers_as_its_bundle_does(bundle, prompts, data, tmp_path) -> None:
    out = tmp_path / "answers.jsonl"
    command = ["train", "regenerate", "--bundle", str(bundle), "--prompts", str(prompts), "--out", str(out)]
    assert main([*command, "--max-tokens", "32", "--threads", "1"]) == 0
    assert len(found := {a.id: a for a in read_answers(out)}) == 60
    assert found == {a.id: a for a in read_answers(data)}
    assert {p.id: p.content for p in read_prompts(prompts, 0)} == {i: a.content for i, a in found.items()}


def test_a_tenth_of_the_prompts_is_held_out_by_their_texts_alone() -> None:
    made = [Answer(str(i), "", [1], [2, 3], 0.0, "stop", f"question {i}") for i in range(1000)]
    rest, held = hold_out(made, None, DATA)
    assert len(rest) + len(held) == 1000
    assert 70 < len(held) < 130
    assert not texts(rest) & {json.dumps(prompt.content) for prompt in held}
    again, more = hold_out(
        [replace(a, id=f"another {a.id}") for a in made[::-1]]  # the same prompts under other names
        + made
        + [replace(a, content=f"new {a.id}") for a in made],
        None,
        DATA,
    )
    assert {p.content for p in held} <= {p.content for p in more}
    assert texts(rest) <= texts(again)
    assert not texts(again) & {json.dumps(prompt.content) for prompt in more}
    assert len({p.content for p in more}) == len(more)


def test_prompts_of_a_file_are_left_out_of_the_answers(tmp_path: Path) -> None:
    made = [Answer(str(i), "", [1], [2, 3], 0.0, "stop", f"question {i}") for i in range(20)]
    file = tmp_path / "held_out.jsonl"
    write_prompts(file, [Prompt("mine", "", "question 3"), Prompt("other", "", "nobody answered this")])
    rest, held = hold_out(made, file, DATA)
    assert texts(made) - texts(rest) == {'"question 3"'}
    assert [prompt.id for prompt in held] == ["mine", "other"]
    with pytest.raises(RequestError, match=r"answer 7 .*--held-out"):
        hold_out([replace(made[7], content=None)], None, DATA)
    with pytest.raises(RequestError, match=r"1 answers.*--held-out"):
        hold_out(made[1:2], None, DATA)


def test_a_run_never_trains_on_what_it_is_measured_with(data, tmp_path, monkeypatch) -> None:
    seen: list[Answer] = []
    original = Batches.__call__

    def spy(self: Batches, step: int) -> Any:
        batch = original(self, step)
        seen.extend(batch.answers)
        return batch

    monkeypatch.setattr(Batches, "__call__", spy)
    lines: list[dict[str, Any]] = []
    recipe, out = replace(RECIPE, steps=20), tmp_path / "run"
    run(TINY, "tiny", data, out, Design(layers=1), recipe, report=lines.append)
    held = read_prompts(out / "held_out.jsonl", 0)
    assert held
    assert {str(prompt.variables) for prompt in held} == {"{'add_generation_prompt': True}"}
    answers = read_answers(data)
    assert len(texts(seen)) > 40
    assert texts(seen) | {json.dumps(p.content) for p in held} <= texts(answers)
    assert not texts(seen) & {json.dumps(p.content) for p in held}
    assert [line["measuring"] for line in lines if "measuring" in line] == [len(held)] * 2
    # What it began as is measured, and is the best until something is better.
    assert list(read_history(out / "evaluation.jsonl")) == [0, 20]
    # Other answers later: the run is measured with the same prompts as before.
    more = tmp_path / "more.jsonl"
    with AnswerFile(more) as file:
        for number, answer in enumerate(answers * 3):
            file.add(replace(answer, id=str(number), content=f"{number} {answer.content}"))
    more.write_text(data.read_text() + more.read_text())
    run(TINY, "tiny", more, out, Design(layers=1), replace(recipe, steps=21), evaluate_every=None)
    assert [p.id for p in read_prompts(out / "held_out.jsonl", 0)] == [p.id for p in held]
    # Another number of prompts or other prompts would not compare with the evaluations so far.
    with pytest.raises(DFlashError, match="limit is 4, but now 5"):
        run(TINY, "tiny", data, out, Design(layers=1), replace(recipe, limit=5))
    with pytest.raises(DFlashError, match="held_out is None, but now "):
        run(TINY, "tiny", data, out, Design(layers=1), recipe, held_out=out / "held_out.jsonl")


def test_best_is_what_the_run_began_with_if_nothing_is_better(data: Path, tmp_path: Path) -> None:
    out, recipe = tmp_path / "run", replace(RECIPE, steps=3, learning_rate=10.0)
    run(TINY, "tiny", data, out, Design(checkpoint=SHIPPED / "tiny" / "drafter"), recipe)
    lengths = {step: average(f) for step, f in read_history(out / "evaluation.jsonl").items()}
    assert lengths[3] < lengths[0]
    assert "\n0 steps of 4 answers" in (out / "best" / "README.md").read_text()


def test_held_out_prompts_may_be_longer_than_those_that_are_shipped(tmp_path: Path) -> None:
    """As long as the models take: an answer has the tokens that remain."""
    from dflash_trt.training.evaluation import ALL, measure

    long = Prompt("long", "", "word " * 1015)
    found = measure(TINY, SHIPPED / "tiny" / "drafter", [long], tmp_path, max_tokens=64)
    assert 0 < found[ALL]["tokens"] < 64


def test_a_missing_extra_is_named_with_its_command(capsys, monkeypatch) -> None:
    monkeypatch.setattr("dflash_trt.cli.train.find_spec", lambda name: name != "torch" or None)
    assert main(["train", "drafter", "--target", "tiny", "--data", "a", "--out", "o", "--steps", "1"]) == 1
    assert "torch is not installed; training needs: pip install " in capsys.readouterr().err


def test_the_options_of_regenerate_that_belong_together(capsys: pytest.CaptureFixture[str]) -> None:
    rest = ["--prompts", "p.jsonl", "--out", "a.jsonl"]
    for words, message in (
        (["--server", "http://127.0.0.1:1/v1", "--model", "m", "--bundle", "b"], "--server needs --target"),
        (["--server", "http://127.0.0.1:1/v1", "--target", "tiny"], "--server and --model belong together"),
        (["--target", "tiny", "--bundle", "b"], "not allowed with argument"),
        ([], "one of the arguments --target --bundle is required"),
    ):
        with pytest.raises(SystemExit):
            main(["train", "regenerate", *words, *rest])
        assert message in capsys.readouterr().err
