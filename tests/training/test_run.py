"""Real training for the shipped target `tiny`: its answers, a new drafter, acceptance, and resuming after a kill."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from dflash_trt import LLM, SamplingParams
from dflash_trt.building.build import build
from dflash_trt.checkpoint.catalogue import SHIPPED
from dflash_trt.cli import main
from dflash_trt.errors import DFlashError, PairError
from dflash_trt.files.reading import read_object
from dflash_trt.models.configs import read_drafter_config, read_target_config
from dflash_trt.prompts import read_prompts
from dflash_trt.text.tokenizer import Tokenizer
from dflash_trt.training.answers import Answer, AnswerFile, read_answers, write_prompts
from dflash_trt.training.blocks import Batches, head_loss
from dflash_trt.training.checkpoint import default_mask_token, default_taps, new_config, open_drafter
from dflash_trt.training.evaluation import ALL, average, read_history
from dflash_trt.training.loop import _step, train
from dflash_trt.training.model import DrafterModel, dense_mask
from dflash_trt.training.recipe import Design, Recipe
from dflash_trt.training.run import run
from dflash_trt.training.target import FrozenTarget
from tests.doubles.reference import target_outputs
from tests.doubles.text_checkpoints import (
    GEMMA_IMAGES,
    MINISTRAL_IMAGES,
    load_text,
    make_gemma,
    make_ministral,
    make_muse,
)

TARGET, DRAFTER = SHIPPED / "tiny" / "target", SHIPPED / "tiny" / "drafter"
CPU = torch.device("cpu")
HELD_OUT = read_prompts(None, 8)
SMALL = Recipe(steps=6, batch_size=4, anchors=8, learning_rate=2e-3, max_length=160)


@pytest.fixture(scope="module")
def target() -> FrozenTarget:
    return FrozenTarget(TARGET, read_target_config(TARGET), (1, 3, 5, 7), CPU, torch.float32)


def umask() -> int:
    os.umask(mask := os.umask(0o077))
    return mask


def in_float32() -> Accelerator:
    return Accelerator(mixed_precision="no", cpu=True)


def small_drafter(seed: int = 0) -> DrafterModel:
    torch.manual_seed(seed)
    return DrafterModel(read_drafter_config(DRAFTER))


def rounds(drafter: DrafterModel, target: FrozenTarget, answer: Answer) -> list[int]:
    """Drafts accepted in each round of a greedy answer. The training module drafts with its own mask."""
    config, tokens = drafter.config, torch.tensor([answer.token_ids])
    features = target.features(tokens)[0]
    anchor, accepted = len(answer.prompt_ids), []
    while anchor < tokens.shape[1] - 1:
        block = torch.tensor([[answer.token_ids[anchor]] + [config.mask_token_id] * (config.block_size - 1)])
        place, size = torch.tensor([[anchor]]), torch.tensor([[config.block_size]])
        masks = {
            kind: dense_mask(kind, place, size, tokens.shape[1], config.block_size) for kind in config.layers
        }
        positions = torch.arange(tokens.shape[1])[None]
        hidden = drafter(
            features, positions, target.embed(block), place + torch.arange(config.block_size), masks
        )
        drafts = (hidden[0, 1:] @ target.head.T).argmax(-1).tolist()
        right = 0
        for draft, token in zip(drafts, answer.token_ids[anchor + 1 :], strict=False):
            if draft != token:
                break
            right += 1
        accepted.append(right)
        anchor += right + 1
    return accepted


@torch.no_grad()
def test_the_module_that_is_trained_drafts_what_the_engine_drafts(bundle: Path, target: FrozenTarget) -> None:
    drafter = open_drafter(DRAFTER, DRAFTER, TARGET)
    with LLM(bundle, threads=1, prefix_cache_bytes=0) as llm:
        for prompt in HELD_OUT:
            assert not isinstance(prompt.content, str)
            ids = llm.chat_prompt(prompt.content)
            done = llm.generate(ids, SamplingParams(max_tokens=48), block_length=8)
            found = rounds(
                drafter, target, Answer(prompt.id, "", ids, done.token_ids, 0.0, done.finish_reason)
            )
            histogram = np.bincount(found, minlength=8).tolist()
            expected = done.statistics.acceptance_histogram + [0] * (
                8 - len(done.statistics.acceptance_histogram)
            )
            # The last round may draft beyond the end of the answer, or nothing if one token is left.
            assert sum(abs(a - b) for a, b in zip(histogram, expected, strict=True)) <= 2
            assert 0 <= sum(histogram) - sum(expected) <= 1


def test_the_targets_own_distribution_is_taken_from_the_row_before_each_label(answers, monkeypatch) -> None:
    """The answers are greedy. So the target's rows behind the loss must give exactly their labels."""
    both = FrozenTarget(TARGET, read_target_config(TARGET), (1, 3, 5, 7), CPU, torch.float32, final=True)
    seen: list[tuple[torch.Tensor, ...]] = []

    def spy(hidden: Any, head: Any, labels: Any, valid: Any, *, teacher: Any, share: float) -> Any:
        seen.append((teacher, head, labels, valid))
        return head_loss(hidden, head, labels, valid, teacher=teacher, share=share)

    monkeypatch.setattr("dflash_trt.training.loop.head_loss", spy)
    recipe = replace(SMALL, distill=0.5)
    batches = Batches(read_answers(answers), recipe.batch_size, recipe.max_length, 0)
    recipe = replace(recipe, anchors=64)  # more than some answers have, so that some places stay empty
    _step(small_drafter(), both, batches, recipe, 0, in_float32())
    ((teacher, head, labels, valid),) = seen
    assert valid.sum() > 100
    assert torch.equal((teacher[valid] @ head.T).argmax(-1), labels[valid])


def test_every_epoch_has_every_answer_once_in_another_order(answers: Path) -> None:
    read = read_answers(answers)
    batches = Batches(read[::-1], 5, 128, 0)
    epochs = [
        [a.id for step in range(batches.per_epoch) for a in batches(step + e * batches.per_epoch).answers]
        for e in (0, 1)
    ]
    assert [len(set(epoch)) for epoch in epochs] == [batches.per_epoch * 5] * 2
    assert epochs[0] != epochs[1]
    again = Batches(read, 5, 128, 0)
    assert [a.id for a in again(3).answers] == [a.id for a in batches(3).answers]


def test_a_run_that_was_killed_ends_as_one_that_was_not(answers, target, tmp_path) -> None:
    recipe = SMALL
    batches = Batches(read_answers(answers), recipe.batch_size, recipe.max_length, 0)
    ends: dict[str, dict[str, torch.Tensor]] = {}

    def go(out: Path, name: str, seed: int) -> list[int]:
        """The steps that were taken."""
        steps: list[int] = []
        train(
            *(small_drafter(seed), target, batches, recipe, out, in_float32()),
            save_every=2,
            on_weights=lambda step, weights: ends.update({name: {n: w.clone() for n, w in weights.items()}}),
            report=lambda line: steps.append(line["step"]),
        )
        return steps

    assert go(tmp_path / "whole", "whole", 0) == [1, 2, 3, 4, 5, 6]
    # Killed after step 5, which was not saved, so it resumes after step 4. A new process has other initial weights.
    cut = tmp_path / "cut"
    stop = 5
    calls = {"count": 0}
    original = Batches.__call__

    def dies(self: Batches, step: int) -> Any:
        calls["count"] += 1
        if calls["count"] > stop:
            raise KeyboardInterrupt
        return original(self, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Batches, "__call__", dies)
        with pytest.raises(KeyboardInterrupt):
            go(cut, "cut", 0)
    assert json.loads((cut / "state" / "state.json").read_text())["step"] == 4
    assert go(cut, "cut", seed=9) == [5, 6]
    assert set(ends["cut"]) == set(ends["whole"])
    for name, weight in ends["whole"].items():
        assert torch.equal(weight, ends["cut"][name]), name
    assert not torch.equal(ends["whole"]["fc.weight"], small_drafter().fc.weight)
    with pytest.raises(DFlashError, match=r"recipe.json: anchors is 8, but now 9"):
        train(small_drafter(), target, batches, replace(recipe, anchors=9), cut, in_float32())


def test_a_short_training_makes_drafts_longer(answers: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    held_out = tmp_path / "held_out.jsonl"
    write_prompts(held_out, HELD_OUT)
    recipe = replace(SMALL, steps=60, anchors=16, learning_rate=None, max_length=200, eval_tokens=32)
    run(TARGET, "tiny", answers, out, Design(layers=1), recipe, held_out=held_out, evaluate_every=30)
    assert {path.stat().st_mode & 0o777 for path in out.rglob("*") if path.is_file()} == {0o666 & ~umask()}
    history = read_history(out / "evaluation.jsonl")
    assert list(history) == [0, 30, 60]
    lengths = [average(figures) for figures in history.values()]
    assert lengths[0] < 1.05  # an untrained one
    assert lengths[0] < lengths[1] < lengths[2]
    assert lengths[2] > 1.1
    # A category counts its own passes. The best checkpoint is the one with the longest acceptance.
    figures = history[60]
    assert set(figures) == {"chat", "code", "math", "tools", ALL}
    assert figures[ALL]["passes"] == sum(part["passes"] for name, part in figures.items() if name != ALL)
    best = max(history, key=lambda step: average(history[step]))
    assert f"{best} steps" in (out / "best" / "README.md").read_text()
    assert (
        f"math {figures['math']['acceptance_length']:.2f}" in (out / "checkpoint" / "README.md").read_text()
    )
    assert "<svg" in (out / "acceptance.svg").read_text()
    with pytest.raises(DFlashError, match=r"layer_types is .*choose another --out"):
        run(TARGET, "tiny", answers, out, Design(layers=3), recipe, held_out=held_out)


def test_a_refused_drafter_does_not_bind_the_run(answers: Path, tmp_path: Path) -> None:
    recipe = replace(SMALL, steps=1)
    with pytest.raises(DFlashError, match="mask_token_id is 99999"):
        run(TARGET, "tiny", answers, tmp_path, Design(mask_token_id=99999), recipe, evaluate_every=None)
    assert run(TARGET, "tiny", answers, tmp_path, Design(layers=1), recipe, evaluate_every=None) == 1


def test_a_new_drafter_for_another_block_begins_with_the_weights_it_is_given(answers, tmp_path) -> None:
    recipe = replace(SMALL, steps=1, learning_rate=1e-9)
    design = Design(checkpoint=DRAFTER, block_size=6)
    run(TARGET, "tiny", answers, tmp_path / "run", design, recipe, evaluate_every=None)
    assert read_drafter_config(tmp_path / "run" / "checkpoint").block_size == 6
    before, after = (
        load_file(DRAFTER / "model.safetensors"),
        load_file(tmp_path / "run" / "checkpoint" / "model.safetensors"),
    )
    assert before.keys() == after.keys()
    for name, weight in before.items():
        torch.testing.assert_close(after[name], weight, atol=1e-8, rtol=0, msg=name)
    assert (
        build(str(TARGET), str(tmp_path / "run" / "checkpoint"), tmp_path / "b").manifest["block_size"] == 6
    )


def test_answers_of_another_target_and_drafters_of_another_size_are_refused(answers, tmp_path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"id":"far","prompt_ids":[1],"answer_ids":[2,90000]}\n', encoding="utf-8")
    with pytest.raises(DFlashError, match=r"answer far has token 90000.* 2048"):
        run(TARGET, "tiny", data, tmp_path / "run", Design(), SMALL)
    other = tmp_path / "other"
    shutil.copytree(DRAFTER, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "num_target_layers": 12}))
    with pytest.raises(PairError, match="num_target_layers is 12"):
        open_drafter(other, other, TARGET)
    with pytest.raises(DFlashError, match="a step needs 400"):
        Batches(read_answers(answers), 400, 128, 0)


def test_defaults_of_a_new_drafter_follow_from_the_target() -> None:
    config = read_target_config(TARGET)
    assert default_taps(36) == [1, 9, 17, 25, 33]  # as z-lab's for Qwen3-8B
    assert default_taps(30) == [1, 8, 14, 20, 27]
    assert [default_taps(n) for n in (1, 2, 3, 5)] == [[0], [0], [0], [1, 2]]
    mask = default_mask_token(Tokenizer(TARGET), config)
    assert mask == 3  # <|MASK|>: no chat has it
    made = new_config(config, layers=2, taps=[1, 3, 5, 7], block_size=8, mask_token_id=3)
    shipped = json.loads((DRAFTER / "config.json").read_text())
    assert {key: made[key] for key in shipped if key in made} == {
        key: shipped[key] for key in shipped if key in made
    }


def test_the_command_trains_and_measures(answers, tmp_path, capsys, monkeypatch) -> None:
    held_out = tmp_path / "held_out.jsonl"
    lines = [json.dumps({"id": p.id, "category": p.category, "messages": p.content}) for p in HELD_OUT[:2]]
    held_out.write_text("\n".join(lines) + "\n")
    asking = ["--held-out", str(held_out), "--eval-tokens", "8"]
    out = str(tmp_path / "run")
    sizes = ["--batch-size", "4", "--anchors", "4", "--layers", "1", "--max-length", "160"]
    command = [*f"train drafter --target tiny --data {answers} --out {out}".split(), *sizes, *asking]
    with pytest.MonkeyPatch.context() as without:
        without.setattr("dflash_trt.reports.plots.find_spec", lambda name: None)
        assert main([*command, "--steps", "2"]) == 0
    printed, told = capsys.readouterr()
    assert "{" not in printed + told  # no JSON in a terminal
    assert "train ...\n" in told
    assert "matplotlib is not installed: pip install" in told  # at once, not after hours
    assert "tokens per pass before the first step, and at best " in printed
    assert "newest weights in checkpoint/" in printed
    assert "acceptance.svg" not in printed
    card = tmp_path / "README.md"
    card.write_text("# A drafter\n\n## Acceptance\n\nold figures\n\n## Training\n\nlong\n")
    evaluate = [
        "train",
        "evaluate",
        "--target",
        "tiny",
        "--drafter",
        f"{out}/checkpoint",
        "--card",
        str(card),
    ]
    assert main([*evaluate, "--json", *asking]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert set(figures) == {HELD_OUT[0].category, HELD_OUT[1].category, ALL}
    before, measured, after = re.split(r"\n## Acceptance\n|\n## Training\n", card.read_text())
    assert (before, after) == ("# A drafter\n", "\nlong\n")
    rows = {
        cells[1]: cells[2:-1]
        for cells in (re.split(" *\\| *", line) for line in measured.splitlines())
        if cells[1:]
    }
    assert set(figures) < set(rows)
    for category, part in figures.items():
        assert rows[category][0] == f"{part['acceptance_length']:.2f}"
        assert rows[category][4] == str(part["passes"])
        assert float(rows[category][5]) >= 1  # at temperature 1
    assert main([*command, "--steps", "10"]) == 0
    (line,) = (tmp_path / "run" / "log.jsonl").read_text().splitlines()
    assert json.loads(line)["memory_bytes"] > 1e6
    monkeypatch.setattr("dflash_trt.training.loop._asked_to_end", lambda: nullcontext(lambda: True))
    assert main([*command, "--steps", "12"]) == 1
    assert "ended after step 11, as asked" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        main([*command, "--steps", "12", "--taps", "50", "--data", "none.jsonl"])
    assert "--taps has layer 50, but the target has layers 0 to 9" in capsys.readouterr().err


@pytest.mark.parametrize(
    "make",
    [
        lambda path: make_ministral(path, MINISTRAL_IMAGES, dtype="float32"),
        lambda path: make_gemma(path, GEMMA_IMAGES, dtype="float32"),
        make_muse,
    ],
)
def test_the_text_part_of_models_with_images(make: Callable[[Path], Path], tmp_path: Path) -> None:
    """A drafter's rows are scaled as Gemma scales its own, and not normalised as Muse Glimmer normalises its own."""
    directory, tokens = make(tmp_path / "target"), list(range(20))
    model, taps = load_text(directory), (-1, 0, 2)
    frozen = FrozenTarget(directory, read_target_config(directory), taps, torch.device("cpu"), torch.float32)
    _, expected = target_outputs(model, tokens, taps)
    ids = torch.tensor([tokens])
    torch.testing.assert_close(frozen.features(ids)[0][0], expected, rtol=1e-5, atol=1e-5)
    inner = model.get_input_embeddings()
    inner.embed_norm = torch.nn.Identity()
    torch.testing.assert_close(frozen.embed(ids), inner(ids))


def test_two_processes_train_one_drafter_and_resume_it(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    with AnswerFile(tmp_path / "answers.jsonl") as file:
        for number in range(12):
            prompt, answer = (random.integers(1, 500, size).tolist() for size in (8, 40))
            file.add(Answer(str(number), "", prompt, answer, 0.0, "length"))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"),
            *("-m", "tests.training.two_processes", str(tmp_path / "answers.jsonl"), str(tmp_path)),
        ],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"ACCELERATE_MIXED_PRECISION": "no"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert read_object(tmp_path / "resumed" / "recipe.json")["processes"] == 2
    ends = [load_file(tmp_path / f"{rank}.safetensors") for rank in (0, 1)]
    assert torch.equal(ends[0]["straight"], ends[1]["straight"])  # both processes have the same weights
    for end in ends:
        assert torch.equal(end["resumed"], end["straight"])
    saved = load_file(tmp_path / "resumed" / "state" / "state.safetensors")
    assert any(name.startswith("optimizer|") for name in saved)
