"""Draft trees in the scheduler: the tokens of plain decoding, and accepted nodes in their final positions."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trt import LLM
from dflash_trt.decoding.draft import Draft
from dflash_trt.decoding.params import SamplingParams
from dflash_trt.decoding.request import Request
from dflash_trt.engines.device.caches import DevicePool
from dflash_trt.engines.onnxruntime.caches import CachePool
from tests.doubles.fake_engines import VOCAB, FakeTarget, expected
from tests.doubles.fake_states_and_windows import StateTarget
from tests.doubles.pool import Pool, request
from tests.doubles.schedules import AnyLengths, Lengths, finish, prompt


class Trees:
    """Replaces a pair's `propose`: the drafter's pass, with random trees instead of its chains.

    A node behind right ones is often right itself. Siblings have different tokens.
    """

    def __init__(self, pool: Pool, seed: int) -> None:
        self.propose, self.rng = pool.pair.drafter.propose, random.Random(seed)
        self.right: dict[Request, list[int]] = {}
        pool.pair.drafter.propose = self  # type: ignore[method-assign]

    def __call__(self, active: Sequence[Request], length: int) -> Draft:
        chains = self.propose(active, length)
        if length == 1:
            return chains
        grown = [self.grow(each, length) for each in active]
        tokens, parents = (np.array(part) for part in zip(*grown, strict=True))
        return Draft(tokens, parents, chains.logprobs)

    def grow(self, each: Request, nodes: int) -> tuple[list[int], list[int]]:
        if each not in self.right:
            self.right[each] = expected(each.prompt, each.params, each.seed)
        right = self.right[each][len(each.output) :]
        tokens, parents, depths = [each.anchor], [-1], {0: 0}  # depths of the nodes whose history is right
        while len(tokens) < nodes:
            parent = self.rng.choice([*range(len(tokens)), *2 * [*depths]])
            taken = {token for token, above in zip(tokens, parents, strict=True) if above == parent}
            depth = depths.get(parent, len(right))
            token = self.rng.choice([t for t in range(VOCAB) if t not in taken])
            if depth < len(right) and right[depth] not in taken and self.rng.random() < 0.7:
                token = right[depth]
            if depth < len(right) and token == right[depth]:
                depths[len(tokens)] = depth + 1
            tokens.append(token)
            parents.append(parent)
        return tokens, parents


@pytest.mark.parametrize("target", [FakeTarget, StateTarget])
def test_trees_give_the_tokens_of_plain_decoding(target: type[FakeTarget]) -> None:
    """Greedy, sampled and penalized requests, with and without drafts, of several lengths, in one batch."""
    moved: list[Sequence[int]] = []
    for seed in range(6):
        rng, pool = random.Random(seed), Pool(3, 5, target=target)
        Trees(pool, seed)
        compact = pool.target.compact

        def watched(
            slot: int, start: int, nodes: Sequence[int], compact: Callable[..., None] = compact
        ) -> None:
            moved.append(nodes)
            compact(slot, start, nodes)

        pool.target.compact = watched  # type: ignore[method-assign]
        asked = []
        for i in range(6):
            temperature, penalty = rng.choice([(0.0, 0.0), (0.8, 0.0), (1.0, 0.5)])
            params = SamplingParams(
                max_tokens=rng.randint(15, 40), temperature=temperature, presence_penalty=penalty, seed=i
            )
            asked.append(request(prompt(rng.randint(1, 30), i), params, draft=rng.random() < 0.8))
        tokens = finish(pool, AnyLengths(seed), *asked)
        for each in asked:
            assert tokens[each] == expected(each.prompt, each.params, each.seed)
    assert len(moved) > 5


@given(st.sets(st.integers(1, 15)), st.integers(0, 8))
@settings(max_examples=40, deadline=None)
def test_accepted_nodes_move_to_their_places_in_every_cache(drafts: set[int], start: int) -> None:
    """The rows of the path become the next ones; those before them, and other slots, stay."""
    rng, nodes = np.random.default_rng(start), [0, *sorted(drafts)]
    kept = [*range(start), *(start + node for node in nodes)]
    device = {
        name: torch.tensor(rng.standard_normal((2, heads, 24, 3))) for name, heads in (("k", 2), ("v", 1))
    }
    before = {name: rows.clone() for name, rows in device.items()}
    DevicePool(device, None, 2).compact(1, start, nodes)
    for name, rows in device.items():
        assert torch.equal(rows[1, :, : len(kept)], before[name][1, :, kept])
        assert torch.equal(rows[0], before[name][0])
    host = CachePool({"k": (6, np.float32), "v": (3, np.float32)}, slots=2, capacity=24)
    written = [rng.standard_normal((24, width)).astype(np.float32) for width in (6, 3)]
    for slot in range(2):
        host.write(written, slot, 0)
    host.compact(1, start, nodes)
    for whole, other, rows in zip(host.read(1, 0, len(kept)), host.read(0, 0, 24), written, strict=True):
        np.testing.assert_array_equal(whole, rows[kept])
        np.testing.assert_array_equal(other, rows)


def test_a_tree_at_the_end_of_the_context_leaves_a_row_for_a_sink() -> None:
    """A policy that takes as many nodes as it may."""
    pool, most = Pool(1, 1, max_seq_len=60), list[int]()

    class Widest(Lengths):
        def select(self, draft: Draft, active: Sequence[Request], slots: Sequence[int], nodes: int) -> Draft:
            most.append(nodes)
            chain = np.arange(-1, nodes - 1)[None]
            logprobs = np.zeros((1, nodes - 1), np.float32)
            return Draft(np.resize(draft.tokens, (1, nodes)), chain, logprobs)

    asked = request(prompt(20), SamplingParams(max_tokens=40))
    assert finish(pool, Widest(2), asked)[asked] == expected(asked.prompt, asked.params, 0)
    assert most[-1] < most[0]


def test_a_tree_is_refused_by_graphs_that_verify_chains(bundle: Path) -> None:
    tree = Draft(np.array([[1, 2, 3]]), np.array([[-1, 0, 0]]), np.zeros((1, 2), np.float32))
    with LLM(bundle, threads=1) as llm, pytest.raises(ValueError, match="chains only"):
        llm.runtime.pair.verify([request(prompt(4), SamplingParams())], tree)
