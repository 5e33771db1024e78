"""The comparisons of decoders, and the demo: on the shipped pair `tiny`."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from build_scripts import demo
from build_scripts.bench import natural
from dflash_trt.checkpoint import gguf


def record(prompt: str, peer: str, first: float, seconds: float, **more: Any) -> dict[str, Any]:
    base = {"category": "chat", "requests": 1, "rounds": 0, "accepted": 0, "peak_mb": 1, "tokens": [[1] * 11]}
    return base | {"prompt": prompt, "peer": peer, "first": first, "seconds": seconds} | more


def test_a_rate_is_of_the_median_of_the_rounds_of_each_prompt() -> None:
    rounds = [record("a", "p", 1.0, 2.0), record("a", "p", 1.0, 3.0), record("a", "p", 1.0, 9.0)]
    assert natural.rate(rounds) == pytest.approx(10 / 2)
    assert natural.rate([*rounds, record("b", "p", 0.0, 8.0)]) == pytest.approx(20 / 10)
    assert natural.rate([]) is None
    together = record("a", "p", 1.0, 4.0, requests=2, tokens=[[1] * 8, [1] * 4])
    assert natural.rate([together]) == pytest.approx(12 / 4)


def test_the_table_has_ratios_acceptance_and_equal_answers() -> None:
    records = [
        record("a", "llama.cpp:Q8_0", 0.0, 4.0, tokens=[[2] * 11]),
        record("a", "plain:default", 0.0, 2.0),
        record("a", "adaptive:default", 0.0, 1.0, rounds=4, accepted=6),
    ]
    rows = natural.table(records, ["plain:default", "adaptive:default", "llama.cpp:Q8_0"])
    assert [rows[name]["ratio"] for name in rows] == [1.0, 2.0, 0.5]
    assert rows["adaptive:default"]["acceptance_length"] == 2.5
    assert [rows[name]["same_answers"] for name in rows] == [1, 1, 0]
    text = natural.markdown(rows, ["chat"])
    assert "| adaptive:default | 10.0 | 10.0 | 2.00 | 2.50 | 1/1 | 1 |" in text


def test_decoders_run_in_processes_of_their_own_and_agree(tmp_path, capsys) -> None:
    options = ["--target", "tiny", "--models", str(tmp_path), "--categories", "chat", "--prompts", "2"]
    options += ["--max-tokens", "12", "--rounds", "1", "--requests", "1,2"]
    names = ["plain:default", "adaptive:default"]
    assert natural.main([*options, "--peers", *names]) == 0
    tables = json.loads(capsys.readouterr().out.splitlines()[-1])["tables"]
    assert [each["requests"] for each in tables] == [1, 2]
    for table in tables:
        same = [table["rows"][name]["same_answers"] for name in names]
        assert same == [2 // table["requests"]] * 2


def test_a_decoder_that_is_not_known_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"'vllm:bf16' is no KIND:WEIGHTS; kinds: "):
        natural.main(["--target", "tiny", "--models", str(tmp_path), "--peers", "vllm:bf16"])


def test_the_demo_falls_back_to_the_shipped_pair_and_shows_equal_tokens(tmp_path, monkeypatch, capfd) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(demo, "MAX_TOKENS", 24)
    monkeypatch.setattr(gguf, "distribution", Mock(side_effect=PackageNotFoundError))
    assert demo.main("smollm2-135m") == 0
    out = capfd.readouterr().out
    assert "smollm2-135m cannot be shown:" in out
    assert "The shipped pair tiny is shown instead." in out
    assert "\x1b" not in out  # no colours where there is no terminal
    assert [line.split()[-1] for line in out.splitlines() if line.strip()[:2] in ("1 ", "2 ", "3 ")] == [
        "yes"
    ] * 3
