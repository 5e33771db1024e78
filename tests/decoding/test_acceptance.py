"""Losslessness: any drafts, in any blocks, commit the same tokens as decoding one token at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trt.decoding.acceptance import Verdict, accept, decide, judge
from dflash_trt.decoding.draft import Candidates, Draft, Verified, couple
from dflash_trt.decoding.params import SamplingParams
from dflash_trt.decoding.request import Emission, items
from dflash_trt.decoding.results import Chunk
from dflash_trt.decoding.sampling import philox
from dflash_trt.decoding.sampling.history import History
from dflash_trt.decoding.sampling.sampler import process, sample
from dflash_trt.errors import DecodingError
from tests.doubles.pool import request

VOCABULARY = 12
PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_p=0.8, top_k=6),
    SamplingParams(temperature=1.5, min_p=0.05),
    SamplingParams(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3),
    SamplingParams(temperature=0.9, repetition_penalty=1.3, frequency_penalty=0.5, top_p=0.9),
]
ANY = st.sampled_from(PARAMS) | st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.4, 1.0]),
    top_k=st.sampled_from([0, 3]),
    top_p=st.sampled_from([1.0, 0.7]),
    min_p=st.sampled_from([0.0, 0.1]),
    repetition_penalty=st.sampled_from([1.0, 1.4]),
    presence_penalty=st.sampled_from([0.0, -0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.6]),
    bad_words=st.sampled_from([(), ("x",)]),
    min_tokens=st.sampled_from([0, 9]),
    logit_bias=st.dictionaries(
        st.integers(0, VOCABULARY - 1), st.sampled_from([-100, -1.5, 2.5]), max_size=4
    ),
)


def history_of(params: SamplingParams, prompt: list[int]) -> History:
    return History(params, prompt, [[2, 3], [5]] if params.bad_words else [], [1])


def target(history: Sequence[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """A model whose logits depend on the whole history."""
    seed = list(history)
    return np.random.default_rng(seed).normal(0, 2, VOCABULARY).astype(np.float32)


def one_at_a_time(prompt: list[int], length: int, params: SamplingParams, seed: int) -> list[int]:
    """The reference: no drafts, no shortcuts, everything counted anew for each token."""
    output: list[int] = []
    while len(output) < length:
        logits = target(prompt + output)
        history = history_of(params, prompt)
        for token in output:
            history.add(token)
        if params.temperature == 0:
            output.append(int(np.argmax(history.adjust(logits))))
        else:
            noise = philox.gumbel(seed, len(prompt) + len(output), np.arange(VOCABULARY))
            output.append(int(np.argmax(process(logits, params, history) + noise)))
    return output


@given(
    st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=5),
    ANY,
    st.integers(0, 2**64 - 1),
    st.data(),
)
@settings(deadline=None, max_examples=150)
def test_any_tree_commits_the_same_tokens(
    prompt: list[int], params: SamplingParams, seed: int, data: st.DataObject
) -> None:
    """The path is the longest run of right nodes from the anchor, in any order of nodes. Half are chains."""
    expected = one_at_a_time(prompt, 16, params, seed)
    history = history_of(params, prompt) if params.adjusted else None
    output = [sample(target(prompt), params, seed, len(prompt), history)]
    if history is not None:
        history.add(output[0])
    while len(output) < 9:
        tokens, parents, before = [output[-1]], [-1], list[list[int]]([[]])
        spine, depth, chain = 0, 0, data.draw(st.booleans())
        for _ in range(data.draw(st.integers(0, 8))):
            last = len(tokens) - 1
            right = depth < 6 and (spine == last or not chain) and data.draw(st.booleans())
            parent = spine if right else last if chain else data.draw(st.integers(0, last))
            token = expected[len(output) + depth] if right else data.draw(st.integers(0, VOCABULARY - 1))
            twins = [i for i in range(1, len(tokens)) if (parents[i], tokens[i]) == (parent, token)]
            node = twins[0] if twins else len(tokens)
            if not twins:
                tokens.append(token)
                parents.append(parent)
                before.append([*before[parent], token])
            if right:
                spine, depth = node, depth + 1
        logits = np.stack([target(prompt + output + each) for each in before])
        position, above = len(prompt) + len(output), None if chain else parents
        verdict = accept(tokens, logits, params, seed, position, history, above)
        assert len(verdict.path) >= depth
        assert [parents[node] for node in verdict.path] == [0, *verdict.path][: len(verdict.path)]
        output += [*(tokens[node] for node in verdict.path), verdict.token]
    assert output == expected[: len(output)]


def test_rows_behind_the_first_difference_are_not_looked_at() -> None:
    logits = np.full((3, 4), np.nan, np.float32)
    logits[0] = [0, 1, 0, 0]
    assert accept([3, 2, 2], logits, SamplingParams(), 0, 0) == Verdict([], 1)


@pytest.mark.parametrize(
    ("own", "accepted", "expected"),
    [
        (4, 3, Verdict(range(1, 4), 9)),  # the whole draft
        (4, 2, Verdict(range(1, 3), 9)),
        (
            3,
            3,
            Verdict(range(1, 3), 13),
        ),  # of a request with a shorter part, the next draft is the token after it
        (3, 2, Verdict(range(1, 3), 9)),
        (2, 2, Verdict(range(1, 2), 12)),
        (1, 0, Verdict(range(1, 1), 9)),
        (1, 1, Verdict(range(1, 1), 11)),
    ],
)
def test_an_engine_s_decision_counts_for_a_request_s_own_part(
    own: int, accepted: int, expected: Verdict
) -> None:
    tokens, asked = [10, 11, 12, 13], request([1, 2], SamplingParams(), block_length=own)
    draft = Draft(np.array([tokens]), None, np.zeros((1, 3), np.float32))
    for finite in (None, np.ones((1, 4), bool)):
        verified = Verified(np.array([accepted]), np.array([9]), [True], finite, np.zeros((1, 4, 14)), [True])
        assert judge(asked, tokens, draft, verified, 0) == expected


def test_what_a_request_gets_of_a_round_ends_with_its_budget() -> None:
    """Of three accepted drafts, two of which come from its text, two tokens are left. A stream says no more."""
    asked = request([1, 2], SamplingParams(max_tokens=2, logprobs=True))
    asked.output, logits = [5], np.zeros((1, 4, 14), np.float32)
    draft = Draft(np.array([[5, 6, 7, 8]]), None, np.zeros((1, 3), np.float32), copied={0: {2, 3}})
    verified = Verified(np.array([3]), np.array([9]), [True], None, logits, [True])
    _, end = decide(asked, draft, verified, 0)
    assert (end.token_ids, end.finish_reason) == ([6, 7], "length")
    assert (end.accepted, end.drafts, end.copied) == (2, 3, 1)
    assert len(end.logprobs or []) == len(asked.logprobs) == asked.statistics.num_generation_tokens == 2
    text = Emission(asked, [], "held back", None)
    (chunk,) = items([text, end], first=False)
    assert isinstance(chunk, Chunk)
    assert (chunk.rounds, chunk.prompt_token_ids) == ([(2, 2, 3, 1)], None)
    error = DecodingError("none")
    assert list(items([Emission(asked, [], "", "error", error=error)], first=False)) == [error]


def test_the_first_nodes_of_a_tree() -> None:
    tree = Draft(np.arange(4)[None], np.array([[-1, 0, 0, 2]]), np.zeros((1, 3)), None, {0: {1, 3}})
    first = tree.first(3)
    assert (first.tokens.tolist(), first.parents.tolist()) == ([[0, 1, 2]], [[-1, 0, 0]])
    assert first.logprobs.shape == (1, 2)


def test_an_empty_block_is_an_error() -> None:
    with pytest.raises(ValueError, match="anchor"):
        accept([], np.zeros((0, 4), np.float32), SamplingParams(), 0, 0)


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
        np.testing.assert_allclose(np.exp(found.candidates.logprobs).sum(axis=-1), 1, rtol=1e-5)
        assert couple(draft, active, weight=0.0).tokens.tolist() == draft.tokens.tolist()
        assert found.tokens[1].tolist() == draft.tokens[1].tolist()
        right += draft.tokens[0, 1:].tolist() == tokens
    assert right == 40 if temperature == 0 else right < 20
