"""`compare`: two kinds of drafters for one target, with figures that belong together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash_trt.cli import main
from dflash_trt.reports.comparison import ADAPTIVE, WHOLE, _names, categories_of, rows_of
from tests.doubles.checkpoints import make_drafter, make_target
from tests.doubles.kind_checkpoints import make_eagle3


def test_two_drafters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The figures add up, in the document, the tables and the chart."""
    target = make_target(tmp_path / "target", layers=6, dtype="float32", favourites=6)
    drafters = [make_drafter(tmp_path / "dflash", target), make_eagle3(tmp_path / "eagle", target)]
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"id": i, "category": "ab"[i % 2], "prompt": "The quick brown"[: 5 + 2 * i]} for i in range(4)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    asked = ["compare", "--target", str(target), "--prompts", str(prompts), "--max-tokens", "12"]
    asked += [part for path in drafters for part in ("--drafter", str(path))]
    assert main([*asked, "--temperature", "0.7", "--json", "--svg", str(tmp_path / "chart.svg")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["same_tokens"]
    assert [each["name"] for each in found["drafters"]] == ["dflash", "eagle"]
    for each in found["drafters"]:
        for length in (WHOLE, ADAPTIVE):
            figures = each[length]
            assert figures["tokens"] == found["plain"]["tokens"]
            assert sum(part["tokens"] for part in figures["categories"].values()) == figures["tokens"]
            assert figures["tokens_per_second"] > 0
        whole = each[WHOLE]
        places = whole["acceptance_by_place"]
        assert whole["acceptance_length"] == pytest.approx(1 + sum(places), abs=0.01)
        assert places == sorted(places, reverse=True)
        assert whole["round_ms"]["draft"] > 0
    chart = (tmp_path / "chart.svg").read_text()
    assert all(text in chart for text in ("dflash", "eagle", "tokens per second"))
    first, *rows = rows_of(found)
    assert {len(row) for row in rows} == {len(first)}
    assert [row[0] for row in rows] == ["(none)", "dflash", "eagle"]
    assert categories_of(found)[0] == ["category", "dflash", "eagle"]
    assert [row[0] for row in categories_of(found)[1:]] == ["a", "b"]


def test_names_are_as_long_as_needed() -> None:
    assert _names(["runs/a/best", "runs/b/best"]) == ["a/best", "b/best"]
    assert _names(["runs/a", "b"]) == ["a", "b"]


def test_a_drafter_given_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--target", "tiny", "--drafter", "tiny", "--drafter", "tiny"]) == 1
    assert "--drafter names one drafter twice: tiny, tiny" in capsys.readouterr().err
