"""Decoding with hybrid targets: the same tokens with and without drafts, in batches, and behind reused prefixes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_trt import LLM, AsyncLLM, SamplingParams
from dflash_trt.building.build import build
from dflash_trt.decoding.draft import Draft
from dflash_trt.decoding.request import Request
from tests.doubles.checkpoints import VOCAB, make_drafter
from tests.doubles.hybrid_checkpoints import DENSE, load_hybrid, make_hybrid
from tests.doubles.reference import Drafter, target_outputs
from tests.models.test_families import (  # noqa: F401  # run on this module's `pair`
    test_a_pair_decodes_as_the_oracle_does,
    test_drafting_and_batches_change_no_token,
)
from tests.models.test_parity import Case

LONG = 520
BLOCK_LENGTHS = (2, 16)  # all from 1 to 16 were run once


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hybrid")


def make_case(directory: Path, architecture: str, **settings: Any) -> Case:
    """A target with favourite tokens, so that some drafts are right."""
    target = make_hybrid(directory / "target", architecture, favourites=6, **settings)
    drafter = make_drafter(directory / "drafter", target, block_size=16, layers=1, taps=(0, 1))
    bundle = build(str(target), str(drafter), directory / "bundle", max_seq_len=LONG + 120)
    return Case(bundle, load_hybrid(target), Drafter(drafter), VOCAB)


@pytest.fixture(scope="module")
def case(directory: Path) -> Case:
    """Attention between layers with states, so that states depend on rows of attention."""
    layers = ["linear_attention", "full_attention", "linear_attention"]
    return make_case(directory / "dense", DENSE, num_hidden_layers=3, layer_types=layers)


@pytest.fixture(scope="module")
def llm(case: Case) -> Iterator[LLM]:
    with LLM(case.bundle.path, max_batch_size=3, prefill_chunk=32, threads=1) as llm:
        yield llm


@pytest.fixture(scope="module")
def pair(case: Case, llm: LLM) -> tuple[Case, LLM]:
    return case, llm


def greedy(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, ignore_eos=True)


def test_drafts_change_no_token_of_a_long_answer(
    case: Case, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts are right up to a random place, so that states are taken back by every number of rows."""
    prompt, rng = case.tokens(50), np.random.default_rng(0)
    plain = llm.generate(prompt, greedy(LONG), speculate=False).token_ids
    assert len(plain) == LONG
    drafter = llm.runtime.pair.drafter
    real = drafter.propose

    def propose(active: Sequence[Request], length: int) -> Draft:
        draft = real(active, length)
        right = plain[len(active[0].output) :][: rng.integers(draft.nodes)]
        draft.tokens[0, 1 : 1 + len(right)] = right
        return draft

    monkeypatch.setattr(drafter, "propose", propose)
    for block_length in BLOCK_LENGTHS:
        found = llm.generate(prompt, greedy(LONG), block_length=block_length)
        assert found.token_ids == plain, block_length
        assert min(found.statistics.acceptance_histogram[:block_length]) > 0


def test_a_long_answer_is_that_of_the_plain_loop(case: Case, llm: LLM) -> None:
    """One pass of the target in plain torch over the whole answer: each of its tokens is the best after those before.

    The same pass gives the drafter's features of every round.
    """
    prompt = case.tokens(25)
    found = llm.generate(prompt, greedy(LONG), block_length=8)
    tokens = prompt + found.token_ids
    logits, features = target_outputs(case.target, tokens, case.drafter.taps)
    best = logits.argmax(-1).tolist()
    assert best[len(prompt) - 1 : -1] == found.token_ids
    assert llm.generate(prompt, greedy(LONG), speculate=False).token_ids == found.token_ids
    accepted, rows = 0, len(prompt)
    while rows < len(tokens) - 1:
        length = min(8, len(tokens) - 1 - rows)
        draft = case.drafter.propose(case.target, features[:rows], tokens[rows], length).tokens
        kept = next((n for n, each in enumerate(draft) if each != tokens[rows + 1 + n]), len(draft))
        accepted, rows = accepted + kept, rows + kept + 1
    assert found.statistics.num_accepted_tokens == accepted > 0


def test_who_leaves_changes_no_token(case: Case) -> None:
    """Requests leave while their prompt is read and while they decode. The next ones get their slots and states."""
    prompts = [case.tokens(n, seed=n) for n in (40, 70, 30, 66, 9)]

    async def body() -> list[list[int]]:
        async with AsyncLLM(case.bundle.path, max_batch_size=2, prefill_chunk=32, threads=1) as llm:

            async def leave(prompt: list[int], after: int) -> None:
                seen, stream = 0, llm.stream(prompt, greedy(200), block_length=4)
                async for chunk in stream:
                    seen += len(chunk.token_ids)
                    if seen >= after:
                        await stream.aclose()
                        return

            async def give_up(prompt: list[int]) -> None:
                task = asyncio.create_task(llm.generate(prompt, greedy(200)))
                await asyncio.sleep(0.02)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

            stays = asyncio.create_task(llm.generate(prompts[0], greedy(150), block_length=5))
            others = []
            for n, prompt in enumerate(prompts[1:]):
                await (give_up(prompt) if n % 2 else leave(prompt, 5 + 3 * n))
                others.append(await llm.generate(prompt, greedy(20), block_length=16))
            return [(await stays).token_ids, *(each.token_ids for each in others)]

    found = asyncio.run(body())
    with LLM(case.bundle.path, threads=1, prefix_cache_bytes=0) as alone:
        counts = [150, 20, 20, 20, 20]
        for tokens, prompt, count in zip(found, prompts, counts, strict=True):
            assert tokens == alone.generate(prompt, greedy(count), speculate=False).token_ids


def test_prefixes_are_reused_at_boundaries(case: Case) -> None:
    """A state is kept where a chunk of a prompt ends, and where a request ends. Tokens are those without reuse."""
    shared, params = case.tokens(150), greedy(20)
    prompts = [shared + case.tokens(9, seed=seed) for seed in (1, 2)] + [shared]
    with LLM(case.bundle.path, prefix_cache_bytes=0, threads=1, prefill_chunk=64) as alone:
        expected = [alone.generate(prompt, params, speculate=False).token_ids for prompt in prompts]
    with LLM(case.bundle.path, prefix_cache_bytes=1 << 24, threads=1, prefill_chunk=64) as llm:
        first = llm.generate(prompts[0], params)
        assert first.statistics.num_cached_tokens == 0
        second = llm.generate(prompts[1], params)
        assert second.statistics.num_cached_tokens == 128  # two chunks
        again = llm.generate(prompts[0], params)
        assert again.statistics.num_cached_tokens == len(prompts[0]) - 1
        talk = prompts[0] + first.token_ids
        onward = llm.generate(talk + case.tokens(5), params)
        assert onward.statistics.num_cached_tokens >= len(talk) - 1
        third = llm.generate(prompts[2], params)
        assert third.statistics.num_cached_tokens == 128
        counts = llm.runtime.scheduler.slots.prefixes.counts
        assert 0 < counts.bytes <= counts.limit_bytes
    assert [first.token_ids, second.token_ids, third.token_ids] == expected
    assert again.token_ids == expected[0]


def test_log_probabilities_of_a_prompt(case: Case, llm: LLM) -> None:
    """Their passes give logits for every row, so no row is certain: they have at most 16 rows."""
    prompt = case.tokens(60)
    params = SamplingParams(max_tokens=8, ignore_eos=True, prompt_logprobs=True)
    found = llm.generate(prompt, params, speculate=False)
    assert found.token_ids == llm.generate(prompt, greedy(8), speculate=False).token_ids
