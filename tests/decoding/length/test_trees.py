"""Draft trees from candidates: the best ones, for what they cost, and what is learnt from their results."""

from __future__ import annotations

from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trt.decoding.draft import Candidates, Draft
from dflash_trt.decoding.length.adaptive import AdaptiveLength
from dflash_trt.decoding.length.policy import FixedLength
from dflash_trt.decoding.length.rates import Rates
from dflash_trt.decoding.length.times import PassTimes
from dflash_trt.decoding.length.trees import FixedTrees, Tree
from dflash_trt.decoding.params import SamplingParams
from tests.doubles.fake_engines import BLOCK, expected
from tests.doubles.pool import Pool, request
from tests.doubles.schedules import finish, prompt


@st.composite
def tables(draw: st.DrawFn) -> np.ndarray:
    """Log-probabilities [drafts, W] that fall from rank to rank."""
    drafts, width = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    chances = st.floats(0.01, 0.99)
    found = np.array(draw(st.lists(chances, min_size=drafts * width, max_size=drafts * width)))
    found = -np.sort(-found.reshape(drafts, width), axis=-1)
    return np.log(found / np.maximum(found.sum(axis=1, keepdims=True) + 0.01, 1))


@given(tables(), st.integers(1, 12))
@settings(max_examples=80, deadline=None)
def test_no_tree_of_its_size_is_better(said: np.ndarray, nodes: int) -> None:
    """Compared with the likeliest of all paths. So the first nodes are the best smaller tree, too."""
    drafts, width = said.shape
    tokens = [[10 * place + rank for rank in range(width)] for place in range(drafts)]
    on, off = np.exp(said), np.exp(said) / 2
    tree = Tree(99, tokens, [on.tolist(), off.tolist()])
    tree.grow(nodes)
    every = [
        prod((off if any(path[:i]) else on)[i, rank] for i, rank in enumerate(path))
        for length in range(1, drafts + 1)
        for path in product(range(width), repeat=length)
    ]
    np.testing.assert_allclose(tree.chances, [1.0, *sorted(every, reverse=True)[: nodes - 1]], rtol=1e-6)
    assert (tree.tokens[0], tree.parents[0]) == (99, -1)
    for node in range(1, len(tree.parents)):
        assert 0 <= tree.parents[node] < node
        above = tree.tokens[tree.parents[node]]
        assert tree.tokens[node] // 10 == (0 if above == 99 else above // 10 + 1)
    children = set(zip(tree.parents, tree.tokens, strict=True))
    assert len(children) == len(tree.parents) == min(nodes, 1 + len(every))


def test_rates_are_learnt_by_place_rank_and_path() -> None:
    """A drafter that says the same everywhere, and whose truth differs by place, by rank and behind a second choice."""
    rng, rates, active = np.random.default_rng(0), Rates(3), [request([1], SamplingParams())]
    on = np.array([[0.7, 0.2], [0.5, 0.3], [0.4, 0.1]])
    off = np.array([[0.0, 0.0], [0.2, 0.1], [0.15, 0.05]])
    found = Candidates(np.array([[[1, 2]] * 3]), np.log([[[0.5, 0.2]] * 3]))
    rates.seat(active)
    for _ in range(1500):
        decided, left = list[int](), False
        for place in range(3):
            chances = (off if left else on)[place]
            decided.append(1 + int(rng.choice(3, p=[*chances, 1 - chances.sum()])))
            left |= decided[-1] > 1
        learned = rates.candidates(found.logprobs)
        rates.learn_candidates(found, [0], [decided])
        right = ([token == 1 for token in decided] + [False]).index(False)
        rates.learn([right], [min(right + 1, 3)], read=True)
    assert learned[0, 0] == pytest.approx(on, abs=0.15)
    assert learned[1, 0, 1:] == pytest.approx(off[1:], abs=0.15)


@pytest.mark.parametrize("sampled", [False, True])
def test_a_request_whose_drafts_differ_does_not_cost_the_others(sampled: bool) -> None:
    """After many good requests one with bad drafts is known within a few, and is forgotten when it has left."""
    rates, rng, said = Rates(3), np.random.default_rng(0), np.log([[0.7, 0.7, 0.7]])
    for chance, temperature in ((0.9, 0.0), (0.05, 1.0 if sampled else 0.0)):
        rates.seat([request([1], SamplingParams(temperature=temperature))])
        for _ in range(200 if chance > 0.5 else 8):
            rates.chains(said)
            rates.learn([right := int(rng.random() < chance)], [1], read=True)
        assert abs(rates.chains(said)[0, 0] - chance) < (0.15 if chance > 0.5 else 0.35), right
    rates.seat([request([1], SamplingParams(temperature=0.0))])
    assert rates.chains(said)[0, 0] > 0.6


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
        PassTimes(16, {1: {n: base + rows * n for n in sizes}})
        for base, rows, sizes in ((0.1, 0.0, (2, 4)), (1.0, per_row, (1, 2, 4, 16)))
    )
    policy = AdaptiveLength(4, draft_times, verify_times, 16)
    said = np.log(np.array([[[0.5, 0.3], [0.5, 0.3], [0.5, 0.3]]], np.float32))
    active = [request([1], SamplingParams())]
    policy.draft(active)
    tree = policy.select(candidates(said), active, [0], 100)
    assert (tree.parents is None) == chain
    assert (tree.nodes < 4) == chain
    assert tree.nodes <= 16


def test_a_fixed_number_of_nodes_within_the_room() -> None:
    said = np.log(np.array([[[0.6, 0.2], [0.5, 0.3]]] * 3, np.float32))
    policy, active = FixedTrees(3, 2, 6), [request([1], SamplingParams()) for _ in range(3)]
    tree = policy.select(candidates(said), active, [0, 2], 100)
    assert tree.tokens.shape == (3, 6)
    assert tree.parents is not None
    assert policy.select(candidates(said), active, [0, 2], 4).nodes == 4
    assert policy.select(candidates(said), active, [], 100).parents is None


def test_a_fixed_length_asks_the_drafter_where_a_request_has_it() -> None:
    without, with_it = (request([1], SamplingParams(), draft=draft) for draft in (False, True))
    assert [FixedLength(4).draft(active) for active in ([without], [without, with_it])] == [1, 4]


@pytest.mark.parametrize(
    ("limits", "most"), [([None, BLOCK + 2], BLOCK + 2), ([9, 30], 9), ([None, 0], BLOCK)]
)
def test_a_request_limits_the_trees_of_its_batch(limits: list[int | None], most: int) -> None:
    """0 asks for chains. Requests without drafts have no say."""
    pool = Pool(3, 5)
    pool.drafter.width = 3
    asked = [
        request(prompt(4 + i), SamplingParams(max_tokens=30), draft=i < 2, tree_nodes=limit)
        for i, limit in enumerate([*limits, 2])
    ]
    tokens = finish(pool, FixedTrees(BLOCK, BLOCK - 1, 20), *asked)  # type: ignore[arg-type]
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
        policy = FixedTrees(BLOCK, BLOCK - 1, nodes) if nodes else FixedLength(BLOCK)
        made = request(prompt(9), SamplingParams(max_tokens=90, temperature=0.0))
        finish(pool, policy, made)  # type: ignore[arg-type]
        lengths[nodes] = made.statistics.mean_acceptance_length
    assert lengths[12] > 1.1 * lengths[0], lengths
