"""`compare`: two kinds of drafters for one target, with figures that belong together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.errors import RequestError
from dflash_trt.llm import LLM
from dflash_trt.prompts import Prompt
from dflash_trt.reports.comparison import (
    ADAPTIVE,
    ADAPTIVE_TREE,
    TREE,
    WHOLE,
    _names,
    categories_of,
    compare,
    rows_of,
)
from tests.doubles.checkpoints import make_drafter, make_target
from tests.doubles.commands import Command
from tests.doubles.kind_checkpoints import make_eagle3


def test_two_drafters(tmp_path: Path, command: Command) -> None:
    """The figures add up, in the document, the tables and the chart."""
    target = make_target(tmp_path / "target", layers=6, dtype="float32", favourites=6)
    drafters = [make_drafter(tmp_path / "dflash", target), make_eagle3(tmp_path / "eagle", target)]
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"id": i, "category": "ab"[i % 2], "prompt": "The quick brown"[: 5 + 2 * i]} for i in range(4)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    asked = ["compare", "--target", str(target), "--prompts", str(prompts), "--max-tokens", "12"]
    asked += [part for path in drafters for part in ("--drafter", str(path))]
    asked += ["--temperatures", "0.7,0", "--tree-width", "2", "--tree-nodes", "9"]
    result = command(*asked, "--json", "--svg", tmp_path / "chart.svg").json
    assert result["same_tokens"]
    assert [run["temperature"] for run in result["runs"]] == [0.7, 0]
    found = result["runs"][0]
    assert [each["name"] for each in found["drafters"]] == ["dflash", "eagle"]
    for run, each in [(r, each) for r in result["runs"] for each in r["drafters"]]:
        for way in (WHOLE, ADAPTIVE, TREE, ADAPTIVE_TREE):
            figures = each[way]
            assert figures["tokens"] == run["plain"]["tokens"]
            assert sum(part["tokens"] for part in figures["categories"].values()) == figures["tokens"]
            assert figures["tokens_per_second"] > 0
            assert figures["trees"] == 0 or way in (TREE, ADAPTIVE_TREE)
        assert 0 < each[TREE]["trees"] <= each[TREE]["rounds"]
        assert 8 < each[TREE]["mean_tree_nodes"] <= 9  # less room at the end of an answer
        whole = each[WHOLE]
        places = whole["acceptance_by_place"]
        assert whole["acceptance_length"] == pytest.approx(1 + sum(places), abs=0.01)
        assert places == sorted(places, reverse=True)
        assert whole["round_ms"]["draft"] > 0
    chart = (tmp_path / "chart.svg").read_text()
    assert all(text in chart for text in ("dflash", "eagle", "tokens per pass", "adaptive trees"))
    first, *rows = rows_of(found)
    assert {len(row) for row in rows} == {len(first)}
    assert [row[0] for row in rows] == ["(none)", "dflash", "", "", "", "eagle", "", "", ""]
    assert categories_of(found)[0] == ["category", "dflash", "dflash, trees", "eagle", "eagle, trees"]
    assert [row[0] for row in categories_of(found)[1:]] == ["a", "b"]


def test_a_comparison_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece begins behind the last whole prompt of the one before, also if that was cut off."""
    target = str(make_target(tmp_path / "target", layers=3, dtype="float32", favourites=6))
    drafters = [str(make_drafter(tmp_path / "one", Path(target)))]
    prompts = [Prompt(str(i), "ab"[i % 2], "The quick brown"[: 5 + 2 * i]) for i in range(3)]
    (work := tmp_path / "work").mkdir()
    generate, calls = LLM.generate, list[Any]()

    def watched(self: LLM, prompt: Any, *rest: Any, **options: Any) -> Any:
        calls.append(prompt)
        return generate(self, prompt, *rest, **options)

    monkeypatch.setattr(LLM, "generate", watched)
    found = [compare(target, drafters, prompts, work, max_tokens=6, seconds=0) for _ in range(2)]
    assert [each["prompts"] for each in found] == [1, 2]
    log = work / "decoded.jsonl"
    log.write_text(log.read_text()[:-9])  # the second prompt is not whole
    whole = compare(target, drafters, prompts, work, max_tokens=6)
    assert whole["prompts"] == 3
    assert whole["same_tokens"]
    assert whole["runs"][0]["plain"]["tokens"] == 18
    calls.clear()
    assert compare(target, drafters, prompts, work, max_tokens=6) == whole
    assert calls == []
    with pytest.raises(
        RequestError, match=r"work: holds a comparison of other checkpoints, prompts or options"
    ):
        compare(target, drafters, prompts, work, max_tokens=7)
    make_drafter(tmp_path / "one", Path(target), seed=5)  # trained further
    with pytest.raises(RequestError, match=r"work: holds a comparison of other checkpoints"):
        compare(target, drafters, prompts, work, max_tokens=6)


def test_names_are_as_long_as_needed() -> None:
    assert _names(["runs/a/best", "runs/b/best"]) == ["a/best", "b/best"]
    assert _names(["runs/a", "b"]) == ["a", "b"]


def test_a_drafter_given_twice(command: Command) -> None:
    refused = command("compare", "--target", "tiny", "--drafter", "tiny", "--drafter", "tiny")
    assert refused.code == 2
    assert "--drafter names one drafter twice: tiny, tiny" in refused.err
