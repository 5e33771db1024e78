"""Parameters of a request over a real bundle: the same tokens with and without drafts, words, and log-probabilities."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash_trt import LLM, AsyncLLM, Completion, SamplingParams, StructuredOutputs
from dflash_trt.decoding.request import Queue
from dflash_trt.decoding.sampling.history import History
from dflash_trt.errors import RequestError
from tests.doubles.bundles import prompt
from tests.doubles.pool import request


@pytest.fixture(scope="module")
def llm(bundle: Path) -> Iterator[LLM]:
    with LLM(bundle, threads=1, max_batch_size=3, prefill_chunk=16) as llm:
        yield llm


ANY = st.builds(
    SamplingParams,
    max_tokens=st.sampled_from([4, 14, 30]),
    min_tokens=st.sampled_from([0, 4]),
    temperature=st.sampled_from([0.0, 0.5, 1.2]),
    top_k=st.sampled_from([0, 30]),
    top_p=st.sampled_from([1.0, 0.9]),
    min_p=st.sampled_from([0.0, 0.02]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    frequency_penalty=st.sampled_from([0.0, 0.4]),
    bad_words=st.sampled_from([(), ("a", "th")]),
    logit_bias=st.dictionaries(st.integers(0, 383), st.sampled_from([-100, 1, 4]), max_size=5),
    allowed_token_ids=st.sampled_from([None, tuple(range(90, 200)), (5,)]),
    ignore_eos=st.booleans(),
    stop=st.sampled_from([(), "(", ("!!", "*!", "a")]),
    stop_token_ids=st.sampled_from([(), (0, 8), (16, 24, 32, 97)]),
    seed=st.integers(0, 2**64 - 1),
)


@given(st.lists(ANY, min_size=3, max_size=5), st.sampled_from([None, 2, 5, 8]))
@settings(deadline=None, max_examples=12, suppress_health_check=list(HealthCheck))
def test_any_parameters_give_the_same_tokens_with_and_without_drafts(
    llm: LLM, several: list[SamplingParams], block_length: int | None
) -> None:
    prompts = [prompt(5 + 9 * i, i) for i in range(len(several))]
    drafted = llm.generate(prompts, several, block_length=block_length)
    for tokens, params, found in zip(prompts, several, drafted, strict=True):
        plain = llm.generate(tokens, params, speculate=False)
        assert (found.token_ids, found.text, found.finish_reason) == (
            plain.token_ids,
            plain.text,
            plain.finish_reason,
        )


def log_softmax(logits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    exact = logits.astype(np.float64)
    exact -= exact.max()
    return exact - np.log(np.exp(exact).sum())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_prompt_s_and_the_top_log_probabilities(llm: LLM, temperature: float) -> None:
    """The target's own, whatever is sampled from. Also for a prompt whose rows are left, and in streams."""
    ids, sampling = prompt(40, 5), {"temperature": temperature, "top_k": 50, "seed": 4}
    params = SamplingParams(max_tokens=5, logprobs=True, top_logprobs=3, prompt_logprobs=True, **sampling)
    plain = llm.generate(ids, SamplingParams(max_tokens=5, ignore_eos=True, **sampling))
    assert (plain.logprobs, plain.prompt_logprobs) == (None, None)
    found = llm.generate(ids, params)
    assert found.token_ids == plain.token_ids[: len(found.token_ids)]
    assert found.statistics.num_cached_tokens == 0
    numbers = [*(found.prompt_logprobs or []), *(found.logprobs or [])]
    tops = [*(found.prompt_top_logprobs or []), *(found.top_logprobs or [])]
    whole = ids + found.token_ids
    assert (numbers[0], tops[0], len(numbers), len(tops)) == (None, [], len(whole), len(whole))
    for at in (1, 2, 15, 16, 17, 39, 40, 41, len(whole) - 1):
        exact = log_softmax(llm.logits(whole[:at]))
        assert numbers[at] == pytest.approx(exact[whole[at]], abs=1e-3)
        assert [number for _, number in tops[at]] == pytest.approx(np.sort(exact)[:-4:-1].tolist(), abs=1e-3)
    first, *rest = llm.stream(ids, params)
    assert (first.prompt_token_ids, {chunk.prompt_logprobs for chunk in rest}) == (ids, {None})
    assert first.prompt_logprobs is not None
    assert first.prompt_logprobs[1:] == pytest.approx((found.prompt_logprobs or [])[1:], abs=1e-4)
    streamed = [top for chunk in (first, *rest) for top in chunk.top_logprobs or []]
    assert [[token for token, _ in top] for top in streamed] == [
        [token for token, _ in top] for top in found.top_logprobs or []
    ]


def test_nothing_ends_before_min_tokens(llm: LLM) -> None:
    """The end tokens are everywhere at first: a bias prefers them."""
    ends = llm.bundle.manifest["eos_token_ids"]
    likes = dict.fromkeys(ends, 90.0)
    at_once = llm.generate(prompt(9), SamplingParams(max_tokens=20, logit_bias=likes))
    assert (len(at_once.token_ids), at_once.finish_reason) == (1, "stop")
    later = llm.generate(prompt(9), SamplingParams(max_tokens=20, logit_bias=likes, min_tokens=7))
    assert (len(later.token_ids), later.finish_reason) == (8, "stop")
    assert set(later.token_ids[:7]).isdisjoint(ends)
    mine = SamplingParams(
        max_tokens=20, logit_bias={11: 90.0}, stop_token_ids=[11], min_tokens=3, ignore_eos=True
    )
    assert llm.generate(prompt(9), mine).token_ids[3:] == [11]


def test_only_allowed_tokens_are_generated(llm: LLM) -> None:
    (end, *_) = llm.bundle.manifest["eos_token_ids"]
    allowed = [97, 98, 99]
    for temperature in (0.0, 1.0):
        params = SamplingParams(
            max_tokens=20, temperature=temperature, allowed_token_ids=allowed, bad_words=["a"]
        )
        assert set(llm.generate(prompt(9), params).token_ids) <= set(allowed)
    ended = SamplingParams(max_tokens=20, allowed_token_ids=[*allowed, end], logit_bias={end: 90.0})
    assert llm.generate(prompt(9), ended).token_ids == [end]
    vocab = llm.bundle.manifest["vocab_size"]
    with pytest.raises(RequestError, match=f"allowed_token_ids contains {vocab}, expected 0"):
        llm.generate(prompt(5), SamplingParams(max_tokens=5, allowed_token_ids=[vocab]))


def test_samples_are_what_each_seed_gives_alone(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=2**64 - 2)
    four = llm.generate(prompt(30), params.samples(4))
    assert [each.seed for each in four] == [2**64 - 2, 2**64 - 1, 0, 1]
    alone = [
        llm.generate(prompt(30), SamplingParams(max_tokens=12, temperature=1.0, seed=each.seed))
        for each in four
    ]
    assert [each.token_ids for each in four] == [each.token_ids for each in alone]
    assert len({tuple(each.token_ids) for each in four}) == 4
    assert len({each.seed for each in SamplingParams(temperature=1.0).samples(5)}) == 5
    assert params.samples(1) == [params]
    for n in (0, 129, True, 1.0):
        with pytest.raises(RequestError, match="n is"):
            params.samples(n)  # type: ignore[arg-type]


def test_requests_wait_by_priority_and_then_by_arrival() -> None:
    priorities = (0, 5, -1, 0, 5, -1, 9)
    waiting, made = Queue(), [request([1], SamplingParams(), priority=each) for each in priorities]
    for each in made:
        waiting.add(each)
    waiting.remove(made[5])
    assert list(waiting) == [made[i] for i in (0, 1, 2, 3, 4, 6)]
    assert [waiting.pop() for _ in range(6)] == [made[i] for i in (2, 0, 3, 1, 4, 6)]
    assert not waiting


def test_a_request_of_lower_number_starts_first(bundle: Path) -> None:
    order: list[int] = []

    async def main() -> None:
        async with AsyncLLM(bundle, max_batch_size=1, threads=1, block_length=4) as llm:

            async def ask(priority: int) -> Completion:
                done = await llm.generate(prompt(5), SamplingParams(max_tokens=20), priority=priority)
                order.append(priority)
                return done

            first = asyncio.create_task(ask(0))
            await asyncio.sleep(0)
            await asyncio.gather(first, *(ask(priority) for priority in (9, 3, 7, -2)))
            with pytest.raises(RequestError, match="priority is 'high'"):
                await llm.generate(prompt(5), priority="high")  # type: ignore[arg-type]

    asyncio.run(main())
    assert order[0] in (0, -2)  # the first may or may not have started before the others came
    assert [each for each in order if each != 0] == [-2, 3, 7, 9]


FORM = StructuredOutputs(choice=["yes"])


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens is 9, expected at most max_tokens"),
        ({"min_tokens": -1}, "min_tokens is -1"), ({"top_logprobs": 21, "logprobs": True}, "top_logprobs is 21"),
        ({"top_logprobs": 2}, "top_logprobs is 2, but logprobs"), ({"prompt_logprobs": 1}, "prompt_logprobs is 1"),
        ({"logit_bias": [1]}, "logit_bias is"), ({"allowed_token_ids": []}, "allowed_token_ids is"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids is"), ({"allowed_token_ids": 7}, "allowed_token_ids is 7"),
        ({"stop_outside": [("a",)]}, "stop_outside contains"), ({"stop_outside": ["ab"]}, "stop_outside contains"),
        ({"skip_special_tokens": 1}, "skip_special_tokens is 1"),
        ({"logit_bias": {"1": 2}}, "logit_bias contains '1'"),
        ({"logit_bias": {-1: 2}}, "logit_bias has token id -1"),
        ({"logit_bias": {3: 101}}, r"logit_bias\[3\] is 101"),
        ({"logit_bias": {3: float("nan")}}, r"logit_bias\[3\] is nan"),
        ({"logit_bias": dict.fromkeys(range(1025), 1)}, "1025 ids"), ({"logprobs": 1}, "logprobs is 1"),
        *(({field: ["a", each]}, f"{field} contains {each!r}") for field in ("stop", "bad_words") for each in ("", 1)),
        ({"structured_outputs": "x"}, "structured_outputs is 'x'"),
        ({"structured_outputs": FORM, "ignore_eos": True}, "ignore_eos is True, but structured_outputs"),
    ],
)  # fmt: skip
def test_wrong_parameters_are_named(wrong: dict[str, Any], match: str) -> None:
    with pytest.raises(RequestError, match=match):
        SamplingParams(**wrong)


def test_a_biased_token_has_to_exist(llm: LLM) -> None:
    vocab = llm.bundle.manifest["vocab_size"]
    with pytest.raises(RequestError, match=f"logit_bias has token id {vocab}, expected 0..{vocab - 1}"):
        llm.generate(prompt(5), SamplingParams(max_tokens=5, logit_bias={vocab: 1}))


def test_a_stop_string_and_the_budget_cut_the_logprobs_too(bundle: Path) -> None:
    with LLM(bundle, threads=1) as llm:
        whole = llm.generate(prompt(9), SamplingParams(max_tokens=30, logprobs=True, ignore_eos=True))
        middle = whole.text[len(whole.text) // 2 :][:2]
        stopped = llm.generate(prompt(9), SamplingParams(stop=middle, max_tokens=30, logprobs=True))
        assert len(stopped.logprobs or []) == len(stopped.token_ids) < 30
        assert stopped.logprobs == pytest.approx((whole.logprobs or [])[: len(stopped.token_ids)], abs=1e-4)


def contains(tokens: list[int], word: list[int]) -> bool:
    return any(tokens[i : i + len(word)] == word for i in range(len(tokens)))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("length", [1, 2])
def test_bad_words_are_never_completed(bundle: Path, temperature: float, length: int) -> None:
    params = SamplingParams(max_tokens=40, temperature=temperature, seed=1, ignore_eos=True)
    with LLM(bundle, threads=1) as llm:
        free = llm.generate(prompt(9), params)
        encode = llm.tokenizer.encode
        pieces = [
            llm.tokenizer.decode(free.token_ids[i : i + length])
            for i in range(len(free.token_ids))
            if 0 <= min(free.token_ids[i : i + length]) < 300
        ]
        banned = [p for p in dict.fromkeys(pieces) if len(encode(p, add_special_tokens=False)) == length]
        banned = [p for p in banned if contains(free.token_ids, encode(p, add_special_tokens=False))][:3]
        assert banned, pieces
        params = SamplingParams(
            max_tokens=40, temperature=temperature, seed=1, ignore_eos=True, bad_words=banned
        )
        held = llm.generate(prompt(9), params)
        assert held.token_ids == llm.generate(prompt(9), params, speculate=False).token_ids != free.token_ids
        for word in banned:
            for spelling in (word, " " + word.lstrip()):
                assert not contains(held.token_ids, encode(spelling, add_special_tokens=False))


def test_a_bad_word_is_held_back_only_where_it_would_be_completed() -> None:
    history = History(SamplingParams(bad_words=["x"]), [5, 6], [[5, 6, 7], [3]])
    logits = np.arange(10, dtype=np.float32)

    def banned() -> list[int]:
        return np.flatnonzero(np.isneginf(history.adjust(logits))).tolist()

    assert banned() == [3]  # the prompt's 5, 6 do not count as the beginning
    for token, expected in ((5, [3]), (6, [3, 7]), (5, [3]), (6, [3, 7]), (6, [3])):
        history.add(token)
        assert banned() == expected
    assert np.isfinite(logits).all()


def test_each_request_may_have_a_block_length_of_its_own(bundle: Path) -> None:
    params = SamplingParams(max_tokens=40, ignore_eos=True)

    async def main() -> None:
        size = json.loads((bundle / "manifest.json").read_text())["block_size"]
        async with AsyncLLM(bundle, max_batch_size=3, block_length=size, threads=1) as llm:
            lengths = (2, None, 1)
            done = await asyncio.gather(*(llm.generate(prompt(9), params, block_length=n) for n in lengths))
            assert done[0].token_ids == done[1].token_ids == done[2].token_ids
            widths = [len(d.statistics.block_length_histogram) - 1 for d in done]
            assert widths == [2, llm.block_size, 1]
            alone = await llm.generate(prompt(9), params, block_length=3)
            assert len(alone.statistics.block_length_histogram) - 1 == 3
            for wrong in (0, llm.block_size + 1):
                with pytest.raises(RequestError, match=f"block_length is {wrong}"):
                    await llm.generate(prompt(9), params, block_length=wrong)

    asyncio.run(main())
