"""`dflash-trt chat`: what it prints, what it remembers, and its commands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dflash_trt.llm import LLM
from tests.doubles.commands import Command


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


@pytest.fixture
def chat(bundle: Path, command: Command) -> Command:
    """Says some lines to the bundle."""
    fixed = ("chat", bundle, "--max-tokens", "8", "--ignore-eos")
    return lambda lines, *options: command(*fixed, *options, stdin=lines)


def test_answers_are_those_of_generate_and_stay_in_the_conversation(
    chat: Command, bundle: Path, asked: list[Any], command: Command
) -> None:
    fixed = ("--block-length", "4")  # the adaptive length may end drafting
    said = chat("Add 1.\nAnd 2.\n", "--system", "Be brief.", *fixed)
    assert (said.code, said.err) == (0, "")
    options = ("--max-tokens", "8", "--ignore-eos", "--system", "Be brief.", "--chat")
    first = command("generate", bundle, "-p", "Add 1.", *options).out
    assert said.out.startswith(first)
    assert asked[0] == ["Be brief.", "Add 1."]
    assert asked[1] == ["Be brief.", "Add 1.", first.removesuffix("\n"), "And 2."]
    assert said.out.count("acceptance length") == 2


def test_commands_change_the_conversation(chat: Command, asked: list[Any]) -> None:
    lines = (
        "One.\n/reset\nTwo.\n/system Rhyme.\nThree.\n/draft off\nFour.\n/stats\n/rest\n/help\n/quit\nFive.\n"
    )
    said = chat(lines)
    assert [len(each) for each in asked] == [1, 1, 2, 4]
    assert asked[3][0] == "Rhyme."
    assert "8 tokens, " in said.out
    assert "no drafts]" in said.out
    assert "[32 tokens, " in said.out
    assert "[/rest is no command (did you mean '/reset'?); see /help]" in said.out
    assert "/system TEXT" in said.out


def test_a_conversation_that_is_too_long_says_how_to_go_on(chat: Command, asked: list[Any]) -> None:
    said = chat("word " * 300 + "\n/reset\nOne.\n")
    assert said.code == 0
    assert "/reset begins a new conversation]" in said.out.splitlines()[0]
    assert "256" in said.out.splitlines()[0]
    assert asked[-1] == ["One."]


def test_an_answer_that_is_stopped_stays_as_far_as_it_came(
    chat: Command, asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = LLM.stream

    def stopped(self: LLM, *arguments: Any, **options: Any) -> Any:
        chunks = stream(self, *arguments, **options)
        if len(asked) == 1:
            yield next(chunks)
            raise KeyboardInterrupt
        yield from chunks

    monkeypatch.setattr(LLM, "stream", stopped)
    said = chat("One.\nTwo.\n")
    assert said.out.count("[stopped]") == 1
    assert len(asked[1]) == 3
    assert said.out.startswith(asked[1][1])


def test_accepted_drafts_are_coloured(chat: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = chat("Add 1.\n").out
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    coloured = chat("Add 1.\n").out
    assert "\033[2m[8 tokens" in coloured
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\033[36m" not in chat("Add 1.\n").out
    assert plain.splitlines()[0] != ""


def test_a_missing_bundle_is_one_line(tmp_path: Path, command: Command) -> None:
    missing = command("chat", tmp_path / "none")
    assert (missing.code, missing.err.count("\n")) == (1, 1)
