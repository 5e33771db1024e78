"""Passes over trees: each node has the logits of its own path, and accepted nodes become rows of the cache."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trt import LLM
from dflash_trt.building.build import build
from dflash_trt.decoding.draft import Draft, chain_rows, tree_rows
from dflash_trt.decoding.pair import Pair
from dflash_trt.decoding.params import SamplingParams
from dflash_trt.decoding.request import Request
from tests.doubles.checkpoints import make_drafter, make_target
from tests.doubles.family_checkpoints import make_gpt_oss, make_gpt_oss_drafter
from tests.doubles.pool import request

VOCAB_USED = 60


@st.composite
def trees(draw: st.DrawFn) -> list[int]:
    nodes = draw(st.integers(1, 12))
    return [-1, *(draw(st.integers(0, node - 1)) for node in range(1, nodes))]


@given(st.lists(trees(), min_size=1, max_size=3))
@settings(max_examples=30, deadline=None)
def test_a_node_sees_itself_and_its_ancestors(forest: list[list[int]]) -> None:
    nodes = min(len(tree) for tree in forest)
    rows = tree_rows(np.array([tree[:nodes] for tree in forest]))
    for tree, depths, visible in zip(forest, rows["depths"], rows["visible"], strict=True):
        for node in range(nodes):
            line, above = {node}, node
            while (above := tree[above]) >= 0:
                line.add(above)
            assert set(np.flatnonzero(visible[node])) == line
            assert depths[node] == len(line) - 1


def test_chains_are_trees_too() -> None:
    for count, nodes in ((1, 1), (2, 5), (1, 3)):
        parents = np.tile(np.arange(-1, nodes - 1), (count, 1))
        for name, rows in tree_rows(parents).items():
            np.testing.assert_array_equal(chain_rows(count, nodes)[name], rows)


@pytest.fixture(scope="module", params=["qwen3", "gpt-oss"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """gpt-oss has attention sinks, and windows of 8 that end within a tree."""
    directory = tmp_path_factory.mktemp("trees")
    if request.param == "qwen3":
        target = make_target(directory / "target")
        drafter = make_drafter(directory / "drafter", target)
    else:
        target = make_gpt_oss(directory / "target")
        drafter = make_gpt_oss_drafter(directory / "drafter", target)
    build(str(target), str(drafter), directory / "bundle", max_seq_len=96, tree_width=2)
    with LLM(directory / "bundle", max_batch_size=2, threads=1) as llm:
        yield llm.runtime.scheduler.pair


def prefilled(pair: Pair, prompts: list[list[int]]) -> list[Request]:
    active = []
    for slot, prompt in enumerate(prompts):
        pair.prefill(prompt[:-1], 0, slot, draft=False)
        each = request(prompt[:-1], SamplingParams(), draft=False)
        each.output, each.committed, each.slot = prompt[-1:], len(prompt) - 1, slot
        active.append(each)
    return active


def path_to(parents: list[int], node: int) -> list[int]:
    path = [node]
    while (node := parents[node]) >= 0:
        path.insert(0, node)
    return path


@pytest.mark.parametrize("nodes", [7, 24])  # few rows and many have other bodies
def test_every_node_has_the_logits_of_its_own_path(pair: Pair, nodes: int) -> None:
    """Also behind a compacted path. The sequences of the batch have other trees and other lengths."""
    rng = np.random.default_rng(nodes)
    prompts = [rng.integers(VOCAB_USED, size=n).tolist() for n in (20, 9)]
    parents = np.array(
        [[-1, *(int(rng.integers(max(0, n - 6), n)) for n in range(1, nodes))] for _ in prompts]
    )
    tokens = rng.integers(VOCAB_USED, size=(2, nodes))
    tokens[:, 0] = [prompt[-1] for prompt in prompts]
    active = prefilled(pair, prompts)
    found = pair.verify(active, Draft(tokens, parents, np.zeros((2, nodes - 1), np.float32)))
    logits, features = np.array(found.logits), np.array(pair._features)
    ends = [nodes - 1, nodes // 2]
    paths = [path_to(parents[slot].tolist(), end) for slot, end in enumerate(ends)]
    assert any(path[-1] >= len(path) for path in paths)  # otherwise nothing moves
    for each, path in zip(active, paths, strict=True):
        pair.commit(each, each.slot, path)
        each.committed += len(path)
    after = rng.integers(VOCAB_USED, size=(2, 1))
    next_logits = np.array(pair.verify(active, Draft(after, None, np.zeros((2, 0), np.float32))).logits)
    for slot, prompt in enumerate(prompts):
        line = parents[slot].tolist()
        for node in [0, *ends, *rng.integers(1, nodes, size=4).tolist()]:
            path = path_to(line, node)
            alone = prefilled(pair, [prompt])
            expected = pair.verify(
                alone, Draft(tokens[slot : slot + 1, path], None, np.zeros((1, len(path) - 1)))
            )
            np.testing.assert_allclose(logits[slot, node], expected.logits[0, -1], atol=2e-4)
            np.testing.assert_allclose(features[slot, node], pair._features[0, -1], atol=2e-4)
        whole = [*prompt, *tokens[slot, paths[slot]][1:].tolist(), int(after[slot, 0])]
        expected = pair.verify(
            prefilled(pair, [whole]), Draft(after[slot : slot + 1], None, np.zeros((1, 0)))
        )
        np.testing.assert_allclose(next_logits[slot, 0], expected.logits[0, 0], atol=2e-4)
