"""Limits are checked before work is done for a request. The remaining work does not delay other requests."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_trt import LLM, AsyncLLM, SamplingParams
from dflash_trt.decoding.params import MOST_CHARACTERS, MOST_WORDS
from dflash_trt.decoding.sampling.sampler import process, sample
from dflash_trt.errors import BusyError, DFlashError, RequestError
from tests.api.loops import until
from tests.doubles.bundles import prompt
from tests.doubles.exposition import Exposition

FEW = SamplingParams(max_tokens=3, ignore_eos=True)
SPACES = "a" + " " * 5000  # too long for tokenizing in the event loop


class Watched:
    """A tokenizer that records its texts, and waits if told to."""

    def __init__(self, backend: Any) -> None:
        self.backend, self.encoded = backend, list[str]()
        self.go_on = threading.Event()
        self.go_on.set()
        self.short = False  # encode a long text as a short one
        self.error: BaseException | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)

    def encode(self, text: str, **options: Any) -> Any:
        self.encoded.append(text)
        if self.error is not None:
            raise self.error
        if len(text) > 1000:
            self.go_on.wait(60)
            text = text[:20] if self.short else text
        return self.backend.encode(text, **options)

    def encode_batch_fast(self, texts: list[str], **options: Any) -> list[Any]:
        return [self.encode(text, **options) for text in texts]


@contextmanager
def watched(llm: LLM | AsyncLLM) -> Iterator[Watched]:
    found = Watched(llm.tokenizer.backend)
    llm.tokenizer.backend = found
    try:
        yield found
    finally:
        found.go_on.set()
        llm.tokenizer.backend = found.backend


@pytest.fixture(scope="module")
def llm(bundle: Path) -> Iterator[LLM]:
    with LLM(bundle, threads=1, max_batch_size=2) as llm:
        yield llm


WRONG_IDS = [
    (b"abc", "bytes"), (b"", "bytes"), (bytearray(b"abc"), "bytearray"), ([1, 2.0], "float"), ([1.5], "float"),
    ([True, 1], "bool"), ([1, np.True_], "bool"), ([1, "2"], "str"), ([1, None], "NoneType"),
    (np.array([1.0, 2.0]), "float"), (np.array([True]), "bool"), (5, "int"), (None, "NoneType"), ({1, 2}, "set"),
    ([1, 10**5000], "token id"), ([1, -(10**5000)], "token id"),
]  # fmt: skip


@pytest.mark.parametrize(("ids", "match"), WRONG_IDS, ids=lambda value: type(value).__name__)
def test_what_is_no_token_id_is_refused_by_name(llm: LLM, ids: Any, match: str) -> None:
    with pytest.raises(RequestError, match=match) as caught:
        llm.generate(ids, FEW)
    assert "the prompt" in str(caught.value)
    with pytest.raises(RequestError, match=match):
        llm.stream(ids, FEW)


def test_numpy_integers_are_token_ids(llm: LLM) -> None:
    ids = prompt(9)
    expected = llm.generate(ids, FEW).token_ids
    for same in (np.array(ids), np.array(ids, np.uint16), [np.int32(i) for i in ids], tuple(ids)):
        done = llm.generate(same, FEW)
        assert done.token_ids == expected
        assert [type(i) for i in done.prompt_token_ids] == [int] * 9
    given = SamplingParams(
        max_tokens=np.int32(4), temperature=np.float32(0.5), top_k=np.uint8(3), ignore_eos=np.True_,
        stop_token_ids=np.array([1, 2]), stop=[np.str_("x")],
    )  # fmt: skip
    plain = {"max_tokens": 4, "temperature": 0.5, "top_k": 3, "ignore_eos": True}
    assert given == SamplingParams(stop_token_ids=(1, 2), stop=("x",), **plain)
    assert [type(getattr(given, name)) for name in plain] == [int, float, int, bool]
    assert type(given.stop_token_ids[0]) is int
    with pytest.raises(RequestError, match="max_tokens is"):
        SamplingParams(max_tokens=np.float64(4))


@pytest.mark.parametrize("top_p", [1e-50, 5e-324, 2.0**-149, 1e-30])
def test_a_tiny_top_p_keeps_the_best_token(top_p: float) -> None:
    rng = np.random.default_rng(0)
    for seed in range(20):
        logits = rng.standard_normal(300).astype(np.float32)
        params = SamplingParams(temperature=100.0, top_p=top_p, min_p=[0.0, 5e-324][seed % 2], top_k=seed % 3)
        assert sample(logits, params, seed, 5) == logits.argmax()
        assert np.isfinite(process(logits, params)).sum() == 1
    assert np.float32(SamplingParams(top_p=top_p).top_p) >= np.finfo(np.float32).smallest_normal


@pytest.mark.parametrize("field", ["stop", "bad_words", "stop_token_ids"])
def test_words_are_limited_in_number_and_length(field: str) -> None:
    item: Any = 1 if field == "stop_token_ids" else "a"
    SamplingParams(**{field: [item] * MOST_WORDS})
    with pytest.raises(RequestError, match=f"{field} has 1025 .*at most 1024"):
        SamplingParams(**{field: [item] * (MOST_WORDS + 1)})
    if isinstance(item, str):
        SamplingParams(**{field: ["a" * MOST_CHARACTERS]})
        with pytest.raises(RequestError, match=f"{field} has 8193 characters.*at most 8192"):
            SamplingParams(**{field: ["a" * MOST_CHARACTERS, "b"]})
    with pytest.raises(RequestError, match=f"{field} is b"):
        SamplingParams(**{field: b"abc"})


@pytest.mark.parametrize("text", ["x" * 10**7, "hello world, " * 200_000, " " * 4_000_000])
def test_a_long_text_is_refused_before_it_is_tokenized(llm: LLM, text: str) -> None:
    with watched(llm) as tokenizer, pytest.raises(RequestError, match=f"the prompt has {len(text)} bytes"):
        llm.generate(text, FEW)
    assert sum(map(len, tokenizer.encoded)) <= 16 * llm.max_seq_len


def test_only_the_beginning_of_a_text_of_too_many_tokens_is_tokenized(llm: LLM) -> None:
    most = 300
    text = "a b " * (llm.tokenizer.most_bytes(most) // 4)
    assert len(text) > 30 * most
    with watched(llm) as tokenizer, pytest.raises(RequestError, match="over 300 tokens"):
        llm.tokenizer.encode(text, max_tokens=most)
    assert sum(map(len, tokenizer.encoded)) < 20 * most


def test_a_text_is_not_refused_for_its_length_while_its_tokens_fit(llm: LLM) -> None:
    """Even with the longest tokens: the longest token of the vocabulary, repeated."""
    longest = max(llm.tokenizer.backend.get_vocab().items(), key=lambda entry: len(entry[0]))[1]
    ids = [longest] * (llm.max_seq_len - 3)
    text = llm.tokenizer.decode(ids, skip_special_tokens=False)
    assert llm.generate(text, FEW).prompt_token_ids == ids
    with pytest.raises(RequestError, match=f"the prompt has {llm.max_seq_len + 9} tokens"):
        llm.generate(text + text[:-1][: len(text) // len(ids) * 12], FEW)


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "x" * 10**7}],
        [{"role": "user", "content": "x" * 100}] * 10**6,
        [{"role": "user", "content": [{"type": "text", "text": "x" * 10**7}]}],
        [{"role": "user", "content": [[[["x"]]]] * 10**6}],
    ],
)
def test_long_messages_are_refused_before_they_are_rendered(llm, messages, monkeypatch) -> None:
    def never(*args: Any, **kwargs: Any) -> str:
        raise AssertionError("rendered")

    monkeypatch.setattr(llm.tokenizer, "apply_chat_template", never)
    with pytest.raises(RequestError, match="the messages have over"):
        llm.chat_prompt(messages)
    with pytest.raises(RequestError, match="the messages have over"):
        llm.chat_prompt([{"role": "user", "content": "Hi"}], {"documents": ["x" * 10**7]})


def test_no_memory_for_a_prompt_is_an_error_of_the_request(llm: LLM) -> None:
    with watched(llm) as tokenizer:
        tokenizer.error = MemoryError()
        with pytest.raises(RequestError, match="no memory is left"):
            llm.generate("a text", FEW)
    assert len(llm.generate("a text", FEW).token_ids) == 3


@pytest.mark.parametrize("number", [10**9, 10**18, 10**30])
def test_no_memory_for_the_caches_is_said_with_what_to_lower(bundle: Path, number: int) -> None:
    with pytest.raises(DFlashError, match=f"{number} sequences.*lower max_batch_size"):
        LLM(bundle, threads=1, max_batch_size=number)


@pytest.mark.parametrize("name", ["max_batch_size", "prefill_chunk", "prefix_cache_bytes"])
@pytest.mark.parametrize("value", [True, 1.5, "8", -1])
def test_the_limits_of_an_engine_are_integers(bundle: Path, name: str, value: Any) -> None:
    with pytest.raises(DFlashError, match=f"{name} is {value!r}"):
        LLM(bundle, threads=1, **{name: value})


def serving(body: Callable[[AsyncLLM, Watched], Any], bundle: Path, **options: Any) -> None:
    async def main() -> None:
        async with AsyncLLM(bundle, threads=1, max_batch_size=2, block_length=4, **options) as llm:
            with watched(llm) as tokenizer:
                await body(llm, tokenizer)
                assert llm.in_flight == 0

    asyncio.run(main())


def test_a_long_text_holds_nobody_up_while_it_is_tokenized(bundle: Path) -> None:
    async def body(llm: AsyncLLM, tokenizer: Watched) -> None:
        tokenizer.go_on.clear()
        tokenizer.short = True
        slow = asyncio.create_task(llm.generate(SPACES, FEW))
        await until(lambda: len(tokenizer.encoded) > 0)
        assert llm.in_flight == 1
        done = await llm.generate("short", FEW)  # handled while the other one is being tokenized
        assert len(done.token_ids) == 3
        assert not slow.done()
        tokenizer.go_on.set()
        assert len((await slow).token_ids) == 3

    serving(body, bundle)


def test_who_leaves_while_a_text_is_tokenized_leaves_its_place(bundle: Path) -> None:
    async def body(llm: AsyncLLM, tokenizer: Watched) -> None:
        tokenizer.go_on.clear()
        tokenizer.short = True
        texts = [SPACES + str(i) for i in range(4)]
        tasks = [asyncio.create_task(llm.generate(text, FEW)) for text in texts[:3]]
        await until(lambda: len(tokenizer.encoded) > 0)
        assert llm.in_flight == 3
        with pytest.raises(BusyError, match="3 requests are in flight"):
            await llm.generate(SPACES, FEW)
        with pytest.raises(BusyError):
            await llm.generate("short", FEW)
        tasks[0].cancel()  # the one being tokenized
        tasks[1].cancel()  # the one that waits for it
        await asyncio.gather(*tasks[:2], return_exceptions=True)
        assert llm.in_flight == 1
        last = asyncio.create_task(llm.generate(texts[3], FEW))
        await asyncio.sleep(0)
        tokenizer.go_on.set()
        assert [len((await task).token_ids) for task in (tasks[2], last)] == [3, 3]
        assert texts[1] not in tokenizer.encoded, "the text of a client that had left was tokenized"

    serving(body, bundle, max_queue=1)


def test_time_spent_waiting_for_the_tokenizer_counts(bundle: Path) -> None:
    async def body(llm: AsyncLLM, tokenizer: Watched) -> None:
        tokenizer.go_on.clear()
        late = await llm.generate(SPACES, FEW, timeout=0.02)
        assert (late.finish_reason, late.token_ids, late.prompt_token_ids) == ("timeout", [], [])
        chunks = [chunk async for chunk in llm.stream(SPACES, FEW, timeout=0.02)]
        assert [(c.finish_reason, c.prompt_token_ids) for c in chunks] == [("timeout", [])]
        assert Exposition(llm.metrics.prometheus()).samples["request_success_total"]["timeout"] == 2
        tokenizer.go_on.set()

    serving(body, bundle)


@pytest.mark.parametrize("finish", [True, False])
def test_closing_ends_what_is_being_tokenized(bundle: Path, finish: bool) -> None:
    async def main() -> None:
        llm = AsyncLLM(bundle, threads=1, max_batch_size=2, block_length=4)
        with watched(llm) as tokenizer:
            tokenizer.go_on.clear()
            tokenizer.short = True
            tasks = [asyncio.create_task(llm.generate(SPACES, FEW)) for _ in range(3)]
            await until(lambda: len(tokenizer.encoded) > 0)
            closing = asyncio.create_task(llm.close(finish=finish))
            if not finish:
                await closing
            tokenizer.go_on.set()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            await closing
        if finish:
            assert [len(end.token_ids) for end in ends] == [3, 3, 3]
        else:
            assert [type(end) for end in ends] == [DFlashError] * 3
            assert "closed" in str(ends[0])

    asyncio.run(main())


@pytest.mark.parametrize("timeout", [-1, "5", float("nan"), True])
def test_a_timeout_is_a_number_of_seconds(bundle: Path, timeout: Any) -> None:
    async def body(llm: AsyncLLM, tokenizer: Watched) -> None:
        with pytest.raises(RequestError, match=f"timeout is {timeout!r}"):
            await llm.generate("short", FEW, timeout=timeout)
        for long in (10**400, float("inf")):
            assert (await llm.generate("short", FEW, timeout=long)).finish_reason == "length"

    serving(body, bundle)
