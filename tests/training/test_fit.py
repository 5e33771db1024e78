"""`fit`: own prompts, kept features, and a drafter that gets better in its time, also after an interruption."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from dflash_trt import LLM
from dflash_trt.checkpoint.catalogue import SHIPPED
from dflash_trt.cli import main
from dflash_trt.errors import DFlashError, UsageError
from dflash_trt.models.configs import read_target_config
from dflash_trt.prompts import read_prompts
from dflash_trt.text.tokenizer import Tokenizer
from dflash_trt.training.answers import read_answers
from dflash_trt.training.blocks import Batches
from dflash_trt.training.checkpoint import write_tensors
from dflash_trt.training.evaluation import average, read_history
from dflash_trt.training.fit import compare, fit
from dflash_trt.training.own_prompts import PromptFilter, script, user_turn, write_own_prompts
from dflash_trt.training.target import FeatureStore, FrozenTarget
from tests.training.test_answers import small_disk

TARGET, DRAFTER = SHIPPED / "tiny" / "target", SHIPPED / "tiny" / "drafter"


@pytest.fixture(scope="module")
def worse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The drafter of `tiny` with noise in the layer that reads the target's features."""
    folder = tmp_path_factory.mktemp("worse") / "drafter"
    shutil.copytree(DRAFTER, folder)
    weights = load_file(folder / "model.safetensors")
    fc = weights["fc.weight"].float()
    noise = torch.randn(fc.shape, generator=torch.Generator().manual_seed(0))
    weights["fc.weight"] = (fc + 2 * fc.std() * noise).to(torch.bfloat16)
    save_file(weights, folder / "model.safetensors")
    return folder


def test_fit_makes_a_worse_drafter_better_and_continues_where_it_was_interrupted(
    worse: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first call sees a GPU with memory for 32 requests, and ends while it answers. The second ends when the
    answers are there, which the third takes as they are. The last has more time.
    """
    out = tmp_path / "mine"
    together: list[int] = []
    said: list[str] = []

    def lacking(*arguments: Any, concurrency: int, **options: Any) -> Any:
        together.append(concurrency)
        if concurrency > 32:
            raise DFlashError("no memory is left")
        return write_own_prompts(*arguments, concurrency=concurrency, **options)

    def call(seconds: float, until: str = "never") -> Any:
        """Of `fit`, which is interrupted when it says this after it has trained a little."""
        said.clear()

        def report(share: float, text: str) -> None:
            said.append(text)
            if text.startswith(until) and (until != "answer" or "trial step 8" in said):
                raise KeyboardInterrupt

        return fit(TARGET, "tiny", out, seconds, start=worse, threads=2, report=report)

    with monkeypatch.context() as gpu:
        gpu.setattr("dflash_trt.training.fit.compute_capabilities", lambda: [90])
        gpu.setattr("dflash_trt.training.fit.write_own_prompts", lacking)
        with pytest.raises(KeyboardInterrupt):
            call(400.0, "answer")
    assert together[:4] == [256, 128, 64, 32]
    assert set(together[4:]) <= {32}
    work = tmp_path / "mine.fit"
    state, answers = json.loads((work / "fit.json").read_text()), read_answers(work / "answers.jsonl")
    seconds = state["spent"] + 12
    with pytest.raises(KeyboardInterrupt):
        call(seconds, "what rounds take")
    assert not any(text.startswith(("how fast", "trial")) for text in said)
    assert read_answers(work / "answers.jsonl")[: len(answers)] == answers
    answers = read_answers(work / "answers.jsonl")
    with pytest.raises(KeyboardInterrupt):
        call(seconds, "what rounds take")
    assert not any(text.startswith(("prompt", "answer")) for text in said)
    assert read_answers(work / "answers.jsonl") == answers
    with pytest.raises(DFlashError, match=r"start is .* but now None"):
        fit(TARGET, "tiny", out, seconds)
    assert not out.exists()

    outcome = call(1.3 * json.loads((work / "fit.json").read_text())["spent"] + 15)
    assert len(read_answers(work / "answers.jsonl")) > len(answers)
    assert read_answers(work / "answers.jsonl")[: len(answers)] == answers
    lengths = [average(figures) for figures in read_history(work / "run" / "evaluation.jsonl").values()]
    assert max(lengths[1:]) > lengths[0]
    assert outcome.rows[-1].category == "all"
    assert (outcome.bundle is None) == bool(outcome.advice)
    if outcome.bundle is not None:
        with LLM(out, threads=1) as llm:
            question = [
                {"role": "user", "content": "We have 2 days for Kelmar and Corvel. What should we do?"}
            ]
            assert llm.chat(question).token_ids == llm.chat(question, speculate=False).token_ids


def test_what_fits_nothing_is_refused_before_any_work(tmp_path, capsys) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(UsageError, match="taken"):
        fit(TARGET, "tiny", tmp_path / "taken", 60.0)
    with pytest.raises(SystemExit):
        main(["fit", "tiny", "--hours", "0", "--out", str(tmp_path / "out")])
    assert "--hours" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


@pytest.mark.parametrize(
    ("changed", "prompts", "said"),
    [
        ({"config.json": {"architectures": ["GooseForCausalLM"]}}, None, "GooseForCausalLM"),
        ({"tokenizer_config.json": {"chat_template": "{{ bos_token }}"}}, None, "--prompts"),
        (
            {"tokenizer_config.json": {"chat_template": None}},
            {"messages": [{"role": "user", "content": "Why?"}]},
            "chat_template",
        ),
        ({}, {"question": "Why?"}, "mine.jsonl:1"),
    ],
)
def test_a_target_or_prompts_that_cannot_be_used_are_named_before_any_work(
    changed: dict[str, Any], prompts: dict[str, Any] | None, said: str, tmp_path, capsys
) -> None:
    folder = tmp_path / "target"
    shutil.copytree(TARGET, folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    for name, fields in changed.items():
        (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | fields))
    command = ["fit", str(folder), "--hours", "1", "--out", str(tmp_path / "out")]
    if prompts is not None:
        (tmp_path / "mine.jsonl").write_text(json.dumps(prompts) + "\n")
        command += ["--prompts", str(tmp_path / "mine.jsonl")]
    assert main(command) == 1
    message = capsys.readouterr().err
    assert said in message
    assert message.count("\n") == 1
    assert not list(tmp_path.glob("out*"))


def test_prompts_on_a_disk_that_fills_are_kept_and_continued(tmp_path: Path, capsys) -> None:
    command = ["fit", str(TARGET), "--hours", "1", "--out", str(tmp_path / "out"), "--threads", "1"]
    with small_disk(600):
        assert main(command) == 1
    message = capsys.readouterr().err
    file = tmp_path / "out.fit" / "prompts.jsonl"
    assert f"{file}: the disk is full" in message
    assert "the same command continues" in message
    kept = read_prompts(file, 0)
    with file.open("a") as cut:
        cut.write('{"id": "own-9')  # killed while writing
    write_own_prompts(tmp_path / "out.fit" / "target", file, len(kept) + 2, concurrency=4, threads=1)
    assert read_prompts(file, 0)[: len(kept)] == kept
    assert len(read_prompts(file, 0)) == len(kept) + 2


def test_weights_on_a_full_disk_are_an_error_of_the_system(tmp_path: Path, monkeypatch) -> None:
    def full(*_: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("dflash_trt.training.checkpoint.save_file", full)
    file = tmp_path / "state.safetensors"
    with pytest.raises(OSError, match="No space left") as caught:
        write_tensors({"a": torch.zeros(2)}, file)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(file))


def test_own_prompts_are_turns_of_the_targets_template(bundle: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    write_own_prompts(bundle, file, 6, concurrency=4, threads=1)
    before = file.read_text()
    write_own_prompts(bundle, file, 9, concurrency=4, threads=1)  # continues with further samples
    assert file.read_text().startswith(before)
    prompts = read_prompts(file, 0)
    assert len({prompt.id for prompt in prompts}) == len(prompts) == 9
    tokenizer = Tokenizer(TARGET)
    opening, end = user_turn(tokenizer)
    for prompt in prompts:
        ids = prompt.token_ids(tokenizer)
        assert ids[: len(opening)] == opening
        assert end in ids[len(opening) :]


def test_prompts_are_finished_unmarked_and_differ_in_their_beginning() -> None:
    tokenizer = Tokenizer(TARGET)
    mark = next(t.content for t in tokenizer.backend.get_added_tokens_decoder().values() if t.special)
    texts = PromptFilter(tokenizer, ["What is a goose?"])
    assert texts.takes("Name three rivers.", finished=True)
    for text, finished in (
        ("Name three rivers!", True),
        ("what is  a goose?", True),
        ("Name four", False),
        (f"Two {mark}", True),
        ("a\ufffdb", True),
        ("", True),
    ):
        assert not texts.takes(text, finished=finished)
    assert texts.dropped == {"duplicate": 2, "unfinished": 1, "broken": 3}
    assert [script(text) for text in ("Wer bist du?", "你好吗", "кто ты", "12 + 4")] == [
        "LATIN", "CJK", "CYRILLIC", "",
    ]  # fmt: skip


def test_kept_features_are_the_computed_ones_and_the_target_runs_once(
    answers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = read_target_config(TARGET)
    target = FrozenTarget(TARGET, config, (1, 3), torch.device("cpu"), torch.float32, final=True)
    batches = Batches(read_answers(answers), 4, 128, 0)
    width = config.hidden_size
    passes: list[int] = []
    compute = target.features

    def counted(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        passes.append(len(tokens))
        return compute(tokens)

    target.features = counted
    epoch = range(6)
    if hasattr(os, "posix_fallocate"):

        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as disk:
            disk.setattr(os, "posix_fallocate", full)
            with pytest.raises(OSError, match="No space left"):
                FeatureStore(tmp_path / "kept", target, batches, 2 * width, width)
    store = FeatureStore(tmp_path / "kept", target, batches, 2 * width, width)
    for step in epoch:
        store(batches(step))
    assert len(passes) == len(epoch)
    again = FeatureStore(tmp_path / "kept", target, batches, 2 * width, width)  # as of another process
    for step in epoch:
        batch = batches(step)
        features, final = again(batch)
        expected, rows = compute(batch.tokens)
        for row, end in enumerate(batch.ends.tolist()):
            assert torch.equal(features[row, :end], expected[row, :end])
            assert final is not None
            assert rows is not None
            assert torch.equal(final[row, :end], rows[row, :end])
    assert len(passes) == len(epoch)
    again.remove()
    assert not list(tmp_path.iterdir())


def test_a_comparison_counts_every_prompt_once(bundle: Path) -> None:
    prompts = read_prompts(None, 3)
    with LLM(bundle, max_batch_size=1, threads=1) as llm:
        rows = compare(llm, prompts)
    assert [row.category for row in rows] == [*sorted({prompt.category for prompt in prompts}), "all"]
    assert all(row.tokens_per_pass >= 1 and row.plain > 0 and row.drafted > 0 for row in rows)
