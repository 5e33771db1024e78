"""`dflash-trt chat`: what it prints, what it remembers, and its commands."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.cli import main
from dflash_trt.llm import LLM
from tests.cli.conftest import Output


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The messages of every answer."""
    seen: list[Any] = []
    chat_prompt = LLM.chat_prompt

    def recorded(self: LLM, messages: Any, *options: Any) -> Any:
        seen.append([message["content"] for message in messages])
        return chat_prompt(self, messages, *options)

    monkeypatch.setattr(LLM, "chat_prompt", recorded)
    return seen


def chat(
    bundle: Path,
    lines: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    *options: str,
) -> Output:
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    return Output(capsys, "chat", bundle, "--max-tokens", "8", "--ignore-eos", *options)


def test_answers_are_those_of_generate_and_stay_in_the_conversation(
    bundle: Path, asked: list[Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fixed = ("--block-length", "4")  # the adaptive length may end drafting
    said = chat(bundle, "Add 1.\nAnd 2.\n", capsys, monkeypatch, "--system", "Be brief.", *fixed)
    assert (said.code, said.err) == (0, "")
    options = ("--max-tokens", "8", "--ignore-eos", "--system", "Be brief.", "--chat")
    first = Output(capsys, "generate", bundle, "-p", "Add 1.", *options).out
    assert said.out.startswith(first)
    assert asked[0] == ["Be brief.", "Add 1."]
    assert asked[1] == ["Be brief.", "Add 1.", first.removesuffix("\n"), "And 2."]
    assert said.out.count("acceptance length") == 2


def test_commands_change_the_conversation(
    bundle: Path, asked: list[Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = (
        "One.\n/reset\nTwo.\n/system Rhyme.\nThree.\n/draft off\nFour.\n/stats\n/rest\n/help\n/quit\nFive.\n"
    )
    said = chat(bundle, lines, capsys, monkeypatch)
    assert [len(each) for each in asked] == [1, 1, 2, 4]
    assert asked[3][0] == "Rhyme."
    assert "8 tokens, " in said.out
    assert "no drafts]" in said.out
    assert "[32 tokens, " in said.out
    assert "[/rest is no command (did you mean '/reset'?); see /help]" in said.out
    assert "/system TEXT" in said.out


def test_a_conversation_that_is_too_long_says_how_to_go_on(
    bundle: Path, asked: list[Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = chat(bundle, "word " * 300 + "\n/reset\nOne.\n", capsys, monkeypatch)
    assert said.code == 0
    assert "/reset begins a new conversation]" in said.out.splitlines()[0]
    assert "256" in said.out.splitlines()[0]
    assert asked[-1] == ["One."]


def test_an_answer_that_is_stopped_stays_as_far_as_it_came(
    bundle: Path, asked: list[Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = LLM.stream

    def stopped(self: LLM, *arguments: Any, **options: Any) -> Any:
        chunks = stream(self, *arguments, **options)
        if len(asked) == 1:
            yield next(chunks)
            raise KeyboardInterrupt
        yield from chunks

    monkeypatch.setattr(LLM, "stream", stopped)
    said = chat(bundle, "One.\nTwo.\n", capsys, monkeypatch)
    assert said.out.count("[stopped]") == 1
    assert len(asked[1]) == 3
    assert said.out.startswith(asked[1][1])


def test_accepted_drafts_are_coloured(
    bundle: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = chat(bundle, "Add 1.\n", capsys, monkeypatch).out
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    coloured = chat(bundle, "Add 1.\n", capsys, monkeypatch).out
    assert "\033[2m[8 tokens" in coloured
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\033[36m" not in chat(bundle, "Add 1.\n", capsys, monkeypatch).out
    assert plain.splitlines()[0] != ""


def test_a_missing_bundle_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", str(tmp_path / "none")]) == 1
    assert capsys.readouterr().err.count("\n") == 1
