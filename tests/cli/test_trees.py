"""Draft trees in the commands: the same tokens, and figures that say how large the trees were."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cli.conftest import build_arguments
from tests.doubles.commands import Command


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


def test_answers_of_a_chat(wide: Path, command: Command) -> None:
    options = ("--max-tokens", "16", "--ignore-eos")
    said = []
    for drafting in (("--no-draft",), ("--tree-nodes", "9")):
        said.append(command("chat", wide, *options, *drafting, stdin="Add 1.\n").out)
    plain, drafted = (each.rpartition("[") for each in said)
    assert plain[0] == drafted[0]
    assert re.search(r"trees in \d+ of \d+ rounds, [6-9]\.\d nodes each", drafted[2])
    assert "tree" not in plain[2]


def test_verify_tries_trees(wide: Path, bundle: Path, command: Command) -> None:
    options = ("--limit", "2", "--max-tokens", "12", "--temperatures", "0.7", "--block-lengths", "4")
    shown = command("verify", wide, *options, "--batch-sizes", "2")
    assert shown.code == 0
    assert "tree 12" in shown.out
    assert "tree auto" in shown.out
    found = command("verify", wide, *options, "--batch-sizes", "1", "--tree-nodes", "0,6", "--json")
    assert [(case["block_length"], case["tree_nodes"]) for case in found.json["cases"]] == [(4, 0), (None, 6)]
    assert found.json["equal"] is True
    refused = command("verify", bundle, *options, "--tree-nodes", "8")
    assert refused.code == 2
    assert "this bundle drafts chains: build it with --tree-width" in refused.err
