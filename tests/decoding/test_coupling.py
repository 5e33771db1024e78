"""Candidates that know the noise of the target's choice."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_trt.decoding.draft import Candidates, Draft, couple
from dflash_trt.decoding.params import SamplingParams
from dflash_trt.decoding.sampling.sampler import sample
from tests.doubles.fake_engines import request


def drafted(logits: np.ndarray) -> Draft:
    """Drafts of a drafter that gives every token as a candidate, from logits [n, drafts, V]."""
    logprobs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    tokens = np.argsort(-logprobs, axis=-1)
    said = np.take_along_axis(logprobs, tokens, axis=-1).astype(np.float32)
    chain = np.concatenate((np.zeros((len(logits), 1), np.int64), tokens[:, :, 0]), axis=1)
    return Draft(chain, None, said[:, :, 0], Candidates(tokens, said))


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_a_drafter_as_good_as_the_target_is_always_right(temperature: float) -> None:
    """With the whole noise. Greedy requests, and those without drafts, keep their drafts."""
    rng = np.random.default_rng(0)
    right = 0
    for seed in range(40):
        logits = rng.normal(size=(2, 3, 50)).astype(np.float32)
        params = SamplingParams(temperature=temperature, seed=seed)
        active = [request([1, 2, 3], params), request([1], params, draft=False)]
        active[0].committed = 3 + seed
        draft = drafted(logits)
        found = couple(draft, active, weight=1.0)
        assert found.candidates is not None
        tokens = [sample(logits[0, place], params, seed, 4 + seed + place) for place in range(3)]
        assert found.tokens[0, 1:].tolist() == tokens
        assert found.candidates.tokens[0, :, 0].tolist() == tokens
        assert np.sort(found.candidates.tokens[0], axis=1).tolist() == [list(range(50))] * 3
        assert (np.diff(found.candidates.logprobs[0]) <= 0).all()
        assert found.tokens[1].tolist() == draft.tokens[1].tolist()
        right += draft.tokens[0, 1:].tolist() == tokens
    assert right == 40 if temperature == 0 else right < 20
