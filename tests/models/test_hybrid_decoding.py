"""Decoding with hybrid targets: the same tokens with and without drafts, in batches, and those of the plain loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import pytest

from dflash_trt import LLM, SamplingParams
from dflash_trt.decoding.draft import Draft
from dflash_trt.decoding.request import Request
from tests.doubles.hybrid_checkpoints import DENSE, load_hybrid, make_hybrid
from tests.doubles.reference import target_outputs
from tests.models.test_families import (  # noqa: F401  # run on this module's `pair`
    test_drafting_and_batches_change_no_token,
)
from tests.models.test_parity import Case, make_case

LONG = 520
BLOCK_LENGTHS = (2, 16)  # all from 1 to 16 were run once


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Attention between layers with states, so that states depend on rows of attention; and tokens that are favourites,
    so that some drafts are right.
    """
    layers = ["linear_attention", "full_attention", "linear_attention"]
    make = partial(make_hybrid, architecture=DENSE, favourites=6, num_hidden_layers=3, layer_types=layers)
    drafter = {"block_size": 16, "layers": 1, "taps": (0, 1)}
    return make_case(tmp_path_factory.mktemp("hybrid"), make, load_hybrid, drafter, length=LONG + 120)


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


def test_log_probabilities_of_a_prompt(case: Case, llm: LLM) -> None:
    """Their passes give logits for every row, so no row is certain: they have at most 16 rows."""
    prompt = case.tokens(60)
    params = SamplingParams(max_tokens=8, ignore_eos=True, prompt_logprobs=True)
    found = llm.generate(prompt, params, speculate=False)
    assert found.token_ids == llm.generate(prompt, greedy(8), speculate=False).token_ids
