"""The commands that run a bundle take the name of a pair, too, and build it when it is first used."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.doubles.commands import Command


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def in_an_empty_folder(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DFLASH_TRT_CACHE", str(cache))


def test_a_cache_that_cannot_be_written_may_hold_the_pair(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dflash_trt.building import first_use

    def refused(*_: object) -> None:
        raise PermissionError("no")

    command("generate", "tiny", "--prompt", "x", "--max-tokens", "2")
    monkeypatch.setattr(first_use, "FileLock", refused)
    assert command("generate", "tiny", "--prompt", "x", "--max-tokens", "2").code == 0


def test_the_other_commands_take_it_too(tmp_path: Path, command: Command) -> None:
    said = command("chat", "tiny", "--max-tokens", "4", stdin="Hello\n")
    assert (said.code, "[4 tokens" in said.out) == (0, True)
    verified = command("verify", "tiny", "--limit", "1", "--temperatures", "0", "--max-tokens", "4", "--json")
    assert (verified.code, verified.json["equal"]) == (0, True)
    options = ("--requests", "1", "--concurrency", "1", "--max-tokens", "2", "--methods", "plain", "--json")
    assert command("bench", "tiny", *options).code == 0
    assert command("deploy", "tiny", "--out", tmp_path / "repository").code == 0


def test_a_directory_of_that_name_comes_first(tmp_path: Path, command: Command) -> None:
    (tmp_path / "tiny").mkdir()
    said = command("generate", "tiny", "--prompt", "x")
    assert said.code == 1
    assert "tiny" in said.err
    assert os.listdir(tmp_path / "tiny") == []


def test_verify_begins_with_its_time_and_is_quick_by_default(bundle: Path, command: Command) -> None:
    checked = command("verify", bundle)
    first = checked.err.splitlines()[0]
    assert first.startswith("this takes about ")
    assert checked.out.startswith("4 prompts, 32 tokens each")


def test_the_estimate_grows_with_what_is_asked(bundle: Path) -> None:
    from dflash_trt import LLM
    from dflash_trt.prompts import read_prompts
    from dflash_trt.reports.verification import chains, expected_seconds

    prompts = read_prompts(None, 4)
    with LLM(bundle) as llm:
        few = {"temperatures": [0.0], "ways": chains([8]), "batch_sizes": [1], "max_tokens": 8}
        many = {
            "temperatures": [0.0, 1.0], "ways": chains([8, 4, None]), "batch_sizes": [1, 4], "max_tokens": 64,
        }  # fmt: skip
        small, large = expected_seconds(llm, prompts[:1], **few), expected_seconds(llm, prompts, **many)  # type: ignore[arg-type]
    assert 0 < 4 * small < large
