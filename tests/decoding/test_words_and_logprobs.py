"""Log-probabilities of tokens, words that must not occur, and a request's own block length."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from dflash_trt import LLM, AsyncLLM, SamplingParams
from dflash_trt.decoding.sampling.history import History
from dflash_trt.errors import RequestError
from tests.doubles.bundles import prompt


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
