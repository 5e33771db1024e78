"""`dflash-trt chat`: what it prints, what it remembers, and its commands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.cli.chat import figures_of
from dflash_trt.decoding.results import Statistics
from dflash_trt.llm import LLM
from tests.cli.conftest import build_arguments
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


def test_answers_are_those_of_generate_and_stay_in_the_conversation(chat, bundle, asked, command) -> None:
    fixed = ("--block-length", "4")  # the adaptive length may end drafting
    said = chat("Add 1.\nAnd 2.\n", "--system", "Be brief.", *fixed)
    assert (said.code, said.err) == (0, "")
    options = ("--max-tokens", "8", "--ignore-eos", "--system", "Be brief.", "--chat")
    first = command("generate", bundle, "-p", "Add 1.", *options).out
    assert said.out.startswith(first)
    assert asked[0] == ["Be brief.", "Add 1."]
    assert asked[1] == ["Be brief.", "Add 1.", first.removesuffix("\n"), "And 2."]
    assert said.out.count("tokens per pass") == 2


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
    assert "[/rest is no command; see /help]" in said.out
    assert "/system TEXT" in said.out


def test_the_speed_of_several_answers_is_of_the_time_of_all() -> None:
    each = Statistics(num_generation_tokens=10, time_to_first_token=1.0, generation_time=1.0)
    assert figures_of(Statistics.merge([each])).startswith("10 tokens, 5 tokens/s")
    assert figures_of(Statistics.merge([each] * 4)).startswith("40 tokens, 5 tokens/s")


def test_a_conversation_that_is_too_long_says_how_to_go_on(chat: Command, asked: list[Any]) -> None:
    said = chat("word " * 300 + "\n/reset\nOne.\n")
    assert said.code == 0
    assert "/reset begins a new conversation]" in said.out.splitlines()[0]
    assert "256" in said.out.splitlines()[0]
    assert asked[-1] == ["One."]


def test_an_answer_that_is_stopped_stays_as_far_as_it_came(chat, asked, monkeypatch) -> None:
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


@pytest.fixture(scope="module")
def wide(pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle that verifies trees."""
    from dflash_trt.cli import main

    out = tmp_path_factory.mktemp("wide") / "wide"
    assert main(build_arguments(pair, out, "--max-seq-len", "256", "--tree-width", "2")) == 0
    return out


def test_statistics_say_how_large_the_trees_were(wide: Path, command: Command) -> None:
    options = ("generate", wide, "-p", "12 + 7 =", "--max-tokens", "24", "--ignore-eos")
    plain = command(*options, "--no-draft")
    drafted = command(*options, "--tree-nodes", "11", "--stats")
    assert drafted.out == plain.out
    found = re.search(r"trees: (\d+) of (\d+) rounds, ([\d.]+) nodes each", drafted.err)
    assert found is not None, drafted.err
    assert 0 < int(found[1]) <= int(found[2])
    assert 8 < float(found[3]) <= 11  # there is room for fewer at the end
    chains = command(*options, "--tree-nodes", "0", "--stats")
    assert chains.out == plain.out
    assert "trees" not in chains.err


def test_verify_tries_trees(wide: Path, bundle: Path, command: Command) -> None:
    options = ("--limit", "2", "--max-tokens", "12", "--temperatures", "0.7", "--block-lengths", "4")
    shown = command("verify", wide, *options, "--batch-sizes", "2")
    assert shown.code == 0
    assert "tree 12" in shown.out
    assert "tree auto" in shown.out
    found = command("verify", wide, *options, "--batch-sizes", "1", "--tree-nodes", "0,6", "--json")
    ways = [(case["block_length"], case["tree_nodes"], case["draft_source"]) for case in found.json["cases"]]
    assert ways == [(4, 0, "drafter,lookup"), (None, 6, "drafter,lookup"), (4, 0, "lookup")]
    assert found.json["equal"] is True
    refused = command("verify", bundle, *options, "--tree-nodes", "8")
    assert refused.code == 2
    assert "this bundle drafts chains: build it with --tree-width" in refused.err
