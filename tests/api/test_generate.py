"""Generation through the public interface: the oracle's tokens, with and without drafting, alone and in batches."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest

from dflash_trt import SamplingParams
from tests.api.pairs import CHUNK, PAIRS, RANDOM, SAMPLING, SHIPPED, Pair, chooser
from tests.doubles.reference import decode_drafting

# Every sampling with every length, and every pair with each of both.
ROUNDS = [
    (list(RANDOM)[(i + j) % len(RANDOM)], sampling, length)
    for i, sampling in enumerate(SAMPLING)
    for j, length in enumerate((1, 2, 5, 8))
]


def watch_drafts(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> dict[int, list[list[int]]]:
    """Collects the drafts of each request during generation, by the request's index in the call."""
    drafts: dict[int, list[list[int]]] = defaultdict(list)
    runtime, numbers = pair.llm.runtime, dict[Any, int]()
    propose, make = runtime.pair.drafter.propose, runtime.request

    def numbered(*args: Any, **kwargs: Any) -> Any:
        request = make(*args, **kwargs)
        numbers[request] = len(numbers)
        return request

    def watched(active: Any, length: int) -> Any:
        draft = propose(active, length)
        for slot, request in enumerate(active):
            if draft.nodes > 1:
                drafts[numbers[request]].append(draft.tokens_of(slot)[1:])
        return draft

    monkeypatch.setattr(runtime, "request", numbered)
    monkeypatch.setattr(runtime.pair.drafter, "propose", watched)
    return drafts


@pytest.mark.parametrize(("oracle", "sampling", "block_length"), ROUNDS, indirect=["oracle"])
def test_every_round_is_the_oracle_s(oracle, sampling, block_length, monkeypatch) -> None:
    """The same tokens from the same drafts, with the same number accepted in each round."""
    pair, target, drafter = oracle
    prompt = pair.prompt(21)
    params = replace(SAMPLING[sampling], max_tokens=40, ignore_eos=True)
    expected = decode_drafting(
        target, drafter, prompt, 40, chooser(params, prompt), block_length=block_length
    )
    drafts = watch_drafts(pair, monkeypatch)
    chunks = list(pair.llm.stream(prompt, params, block_length=block_length))
    assert [token for chunk in chunks for token in chunk.token_ids] == expected.tokens
    assert drafts.get(0, []) == expected.drafts
    accepted = [len(chunk.token_ids) - 1 for chunk in chunks[1:]]
    assert accepted[: len(expected.accepted)] == expected.accepted
    statistics = chunks[-1].statistics
    assert statistics.num_drafts == len(expected.drafts)
    assert statistics.num_draft_tokens == sum(map(len, expected.drafts))
    assert statistics.num_accepted_tokens == sum(expected.accepted)
    assert statistics.num_generation_tokens == 40


@pytest.mark.parametrize(
    "length", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 1, 5 * CHUNK - 1]
)
def test_prompt_lengths_around_chunk_boundaries(oracle, length) -> None:
    pair, target, drafter = oracle
    prompt = pair.prompt(length, seed=length)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    expected = decode_drafting(target, drafter, prompt, 12)
    completion = pair.llm.generate(prompt, params, block_length=8)
    assert completion.token_ids == expected.tokens == pair.plain(prompt, params).token_ids
    assert completion.statistics.num_accepted_tokens == sum(expected.accepted)
    assert completion.prompt_token_ids == prompt


@pytest.mark.parametrize(
    ("pair", "sampling"),
    [
        (pair, sampling)
        for pair in PAIRS
        for sampling in (("greedy", "everything") if pair in SHIPPED else SAMPLING)
    ],
    indirect=["pair"],
)
def test_drafting_and_batches_change_no_token(pair: Pair, sampling: str) -> None:
    """Seven requests of different lengths in three slots, compared with each alone without drafting."""
    lengths = [3, 40, 17, 1, 16, 60, 9]
    prompts = [pair.prompt(n, seed=n) for n in lengths]
    params = [
        replace(SAMPLING[sampling], max_tokens=budget, seed=seed)
        for seed, budget in enumerate([30, 5, 18, 1, 24, 2, 11])
    ]
    plain = [pair.plain(prompt, p) for prompt, p in zip(prompts, params, strict=True)]
    for block_length in (8, 2):
        drafted = pair.llm.generate(prompts, params, block_length=block_length)
        assert [c.token_ids for c in drafted] == [c.token_ids for c in plain]
        assert [(c.text, c.finish_reason) for c in drafted] == [(c.text, c.finish_reason) for c in plain]
    together = pair.llm.generate(prompts, params, speculate=False)
    assert [c.token_ids for c in together] == [c.token_ids for c in plain]
    assert all(c.statistics.num_drafts == 0 for c in together)


@pytest.mark.parametrize("sampling", ["greedy", "1.0"])
def test_every_draft_in_a_batch_is_the_oracle_s(oracle, sampling, monkeypatch) -> None:
    """Wrong features would change only the drafts, not the tokens. So the drafts are compared while requests come and
    go.
    """
    pair, target, drafter = oracle
    prompts = [pair.prompt(n, seed=n) for n in (3, 40, 17, 1, 16, 60, 9)]
    params = [
        replace(SAMPLING[sampling], max_tokens=n, ignore_eos=True, seed=n) for n in (30, 9, 18, 24, 1, 12, 22)
    ]
    drafts = watch_drafts(pair, monkeypatch)
    completions = pair.llm.generate(prompts, params, block_length=5)
    for i, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
        expected = decode_drafting(target, drafter, prompt, p.max_tokens, chooser(p, prompt), block_length=5)
        assert completions[i].token_ids == expected.tokens
        # Near its end, a request alone drafts less. In a batch it drafts as much as the others need.
        whole = [draft for draft in expected.drafts if len(draft) == 4]
        assert drafts.get(i, [])[: len(whole)] == whole


def test_no_draft_is_accepted_by_the_unlucky_pair_and_some_by_the_lucky(pairs) -> None:
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    found = {
        name: pairs[name].llm.generate(pairs[name].prompt(21), params, block_length=8).statistics
        for name in ("lucky", "unlucky")
    }
    lengths = {name: statistics.mean_acceptance_length for name, statistics in found.items()}
    assert lengths["unlucky"] < 1.3 < 1.8 < lengths["lucky"]
