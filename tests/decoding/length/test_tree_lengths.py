"""Draft trees from candidates: the best ones, for what they cost, and what is learnt from their results."""

from __future__ import annotations

import random
from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trt.decoding.draft import Candidates, Draft
from dflash_trt.decoding.length.adaptive import AdaptiveLength
from dflash_trt.decoding.length.node_odds import NodeOdds
from dflash_trt.decoding.length.pass_times import PassTimes
from dflash_trt.decoding.length.policy import FixedLength
from dflash_trt.decoding.length.trees import TreeLengths, best_first, ranks_of
from dflash_trt.decoding.params import SamplingParams
from dflash_trt.decoding.request import Request
from tests.doubles.fake_engines import BLOCK, VOCAB, Pool, expected, request
from tests.doubles.schedules import finish, prompt


@st.composite
def tables(draw: st.DrawFn) -> np.ndarray:
    """[2, drafts, W]: falling from rank to rank."""
    drafts, width = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    chances = st.floats(0.01, 0.99)
    found = np.array(draw(st.lists(chances, min_size=2 * drafts * width, max_size=2 * drafts * width)))
    return -np.sort(-found.reshape(2, drafts, width), axis=-1)


@given(tables(), st.integers(1, 12))
@settings(max_examples=80, deadline=None)
def test_no_tree_of_its_size_is_better(table: np.ndarray, nodes: int) -> None:
    """Compared with the likeliest of all paths. So the first nodes are the best smaller tree, too."""
    on, off = table
    drafts, width = on.shape
    parents, places, ranks, chances = best_first(on.tolist(), off.tolist(), nodes)
    every = [
        prod((off if any(path[:i]) else on)[i, rank] for i, rank in enumerate(path))
        for length in range(1, drafts + 1)
        for path in product(range(width), repeat=length)
    ]
    wanted = sorted(every, reverse=True)[: nodes - 1]
    np.testing.assert_allclose(chances, [1.0, *wanted])
    assert parents[0] == -1
    for node in range(1, len(parents)):
        assert 0 <= parents[node] < node
        assert places[node] == places[parents[node]] + 1
        before = (off if any(ranks[above] for above in _above(parents, node)) else on)[places[node]]
        assert chances[node] == pytest.approx(chances[parents[node]] * before[ranks[node]])
    assert len({(parent, rank) for parent, rank in zip(parents, ranks, strict=True)}) == len(parents)


def _above(parents: list[int], node: int) -> list[int]:
    line = []
    while (node := parents[node]) > 0:
        line.append(node)
    return line


def test_ranks_end_with_the_first_token_that_is_no_candidate() -> None:
    candidates = np.array([[1, 2], [3, 4], [5, 6]])
    assert ranks_of(candidates, [1, 4, 5, 9]) == [0, 1, 0]
    assert ranks_of(candidates, [2, 7, 5]) == [1, 2]
    assert ranks_of(candidates, []) == []


def test_the_odds_are_learnt_by_place_rank_and_path() -> None:
    """A drafter that says the same everywhere, and whose truth differs by place, by rank and behind a second choice."""
    rng, odds = np.random.default_rng(0), NodeOdds(3)
    on = np.array([[0.7, 0.2], [0.5, 0.3], [0.4, 0.1]])
    off = np.array([[0.0, 0.0], [0.2, 0.1], [0.15, 0.05]])
    said = np.tile(np.log([0.5, 0.2]).astype(np.float32), (3, 1))
    for _ in range(1500):
        ranks, left = list[int](), False
        for place in range(3):
            chances = (off if left else on)[place]
            ranks.append(int(rng.choice(3, p=[*chances, 1 - chances.sum()])))
            if ranks[-1] == 2:
                break
            left |= ranks[-1] > 0
        odds.observe(said[None], [ranks])
    found = odds(said)
    assert np.abs(found[0] - on).max() < 0.12
    assert np.abs(found[1][1:] - off[1:]).max() < 0.15
    assert (found[1] <= found[0]).all()
    np.testing.assert_allclose(odds.chain(said[:, 0].tolist()), found[0][:, 0].cumprod())


def candidates(said: np.ndarray) -> Draft:
    """A draft of candidates with these log-probabilities [n, drafts, W]."""
    n, drafts, width = said.shape
    tokens = np.tile(np.arange(1, width + 1), (n, drafts, 1))
    chain = np.concatenate((np.zeros((n, 1), int), tokens[:, :, 0]), axis=1)
    return Draft(chain, None, said[:, :, 0], Candidates(tokens, said))


@pytest.mark.parametrize(("per_row", "chain"), [(0.8, True), (0.001, False)])
def test_a_tree_is_as_wide_as_its_rows_pay(per_row: float, chain: bool) -> None:
    """A second candidate of probability 0.3 pays where a row costs little. Where a row costs most of a pass, not even
    the whole chain does.
    """
    draft_times, verify_times = (
        PassTimes({1: {n: base + rows * n for n in sizes}}, [1])
        for base, rows, sizes in ((0.1, 0.0, (2, 4)), (1.0, per_row, (1, 2, 4, 16)))
    )
    policy = TreeLengths(AdaptiveLength(4, draft_times, verify_times), 3)
    said = np.log(np.array([[[0.5, 0.3], [0.5, 0.3], [0.5, 0.3]]], np.float32))
    policy.draft(1)
    policy.chains._trial = False  # type: ignore[attr-defined]
    tree = policy.select(candidates(said), [0], 100)
    assert (tree.parents is None) == chain
    assert (tree.nodes < 4) == chain
    assert tree.nodes <= 16


def test_a_fixed_number_of_nodes_within_the_room() -> None:
    said = np.log(np.array([[[0.6, 0.2], [0.5, 0.3]]] * 3, np.float32))
    policy = TreeLengths(FixedLength(3), 2, 6)
    tree = policy.select(candidates(said), [0, 2], 100)
    assert tree.tokens.shape == (3, 6)
    assert tree.parents is not None
    assert policy.select(candidates(said), [0, 2], 4).nodes == 4
    assert policy.select(candidates(said), [], 100).parents is None
    with pytest.raises(ValueError, match="adaptive"):
        TreeLengths(FixedLength(3), 2)


@pytest.mark.parametrize("seed", range(4))
def test_trees_of_candidates_give_the_tokens_of_plain_decoding(seed: int) -> None:
    """Greedy, sampled and penalized requests, with and without drafts, and with limits of their own, in one batch."""
    rng, pool = random.Random(seed), Pool(3, 5)
    pool.drafter.width = rng.choice([2, 3])
    policy = TreeLengths(FixedLength(BLOCK), BLOCK - 1, rng.choice([7, 12]))
    asked = list[Request]()
    for i in range(6):
        temperature, penalty = rng.choice([(0.0, 0.0), (0.8, 0.0), (1.0, 0.5), (0.0, 0.7)])
        params = SamplingParams(
            max_tokens=rng.randint(15, 40), temperature=temperature, presence_penalty=penalty, seed=i
        )
        own, ids = rng.choice([None, None, 4]), prompt(rng.randint(1, 30), i)
        asked.append(request(ids, params, draft=rng.random() < 0.8, block_length=own))
    tokens = finish(pool, policy, *asked)  # type: ignore[arg-type]
    for each in asked:
        assert tokens[each] == expected(each.prompt, each.params, each.seed)
    statistics = [each.statistics for each in asked if each.takes_drafts]
    assert sum(s.num_trees for s in statistics) > 10
    assert max(max(t) for t in tokens.values() if t) < VOCAB


@pytest.mark.parametrize(("limits", "most"), [([None, 5], 5), ([9, 30], 9), ([None, 0], BLOCK)])
def test_a_request_limits_the_trees_of_its_batch(limits: list[int | None], most: int) -> None:
    """0 asks for chains. Requests without drafts have no say."""
    pool = Pool(3, 5)
    pool.drafter.width = 3
    asked = [
        request(prompt(4 + i), SamplingParams(max_tokens=30), draft=i < 2, tree_nodes=limit)
        for i, limit in enumerate([*limits, 2])
    ]
    tokens = finish(pool, TreeLengths(FixedLength(BLOCK), BLOCK - 1, 20), *asked)  # type: ignore[arg-type]
    for each in asked:
        assert tokens[each] == expected(each.prompt, each.params, each.seed)
    own = asked[next(i for i, limit in enumerate(limits) if limit is not None)].statistics
    assert own.block_length_histogram[most] > 0
    assert len(own.block_length_histogram) == most + 1
    assert (own.num_trees > 0) == (0 not in limits)
    assert asked[2].statistics.num_drafts == 0


def test_trees_accept_more_than_chains() -> None:
    """One draft in five is wrong, and then the second candidate is right."""
    lengths = {}
    for nodes in (0, 12):
        pool = Pool(1, 1)
        pool.drafter.width = 2
        policy = TreeLengths(FixedLength(BLOCK), BLOCK - 1, nodes) if nodes else FixedLength(BLOCK)
        made = request(prompt(9), SamplingParams(max_tokens=90, temperature=0.0))
        finish(pool, policy, made)  # type: ignore[arg-type]
        lengths[nodes] = made.statistics.mean_acceptance_length
    assert lengths[12] > 1.1 * lengths[0], lengths
