"""Streams and completions of many requests at once: each is that of its request alone, and nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import threading
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from dflash_trt import AsyncLLM, Completion, SamplingParams, async_llm
from dflash_trt.decoding.request import Request
from dflash_trt.decoding.results import Chunk
from dflash_trt.errors import DFlashError
from tests.api.jobs import known_answers, run
from tests.api.loops import ASKED, serve, until
from tests.doubles.bundles import prompt
from tests.doubles.exposition import Exposition


@pytest.mark.parametrize("stream_interval", [0.0, 0.004])
def test_streams_and_completions_are_what_each_request_gets_alone(bundle, alone, stream_interval) -> None:
    async def body(llm: AsyncLLM) -> None:
        async def stream(i: int) -> None:
            chunks = [chunk async for chunk in llm.stream(*ASKED[i], speculate=i % 2 == 0)]
            assert [token for chunk in chunks for token in chunk.token_ids] == alone[i].token_ids
            assert "".join(chunk.text for chunk in chunks) == alone[i].text
            assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
            assert chunks[-1].finish_reason == alone[i].finish_reason
            assert chunks[-1].statistics is not None
            assert [c.prompt_token_ids for c in chunks] == [ASKED[i][0], *[None] * (len(chunks) - 1)]

        async def generate(i: int) -> None:
            done = await llm.generate(*ASKED[i])
            assert (done.token_ids, done.text) == (alone[i].token_ids, alone[i].text)
            assert (done.finish_reason, done.seed) == (alone[i].finish_reason, i)

        await asyncio.gather(*(each(i) for i in range(len(ASKED)) for each in (stream, generate)))
        text = await llm.generate("The answer is", SamplingParams(max_tokens=3))
        assert text.prompt_token_ids == llm.tokenizer.encode("The answer is")
        assert len(llm.chat_prompt([{"role": "user", "content": "Hi"}])) > 5

    serve(bundle, body, stream_interval=stream_interval)


def test_what_follows_a_chunk_too_soon_comes_as_one(bundle, monkeypatch) -> None:
    """Each step of the engine advances the clock by 10 ms and gives one token."""
    params = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=True)

    async def chunks(llm: AsyncLLM) -> list[Chunk]:
        return [chunk async for chunk in llm.stream(prompt(9), params, speculate=False)]

    async def each_round(llm: AsyncLLM) -> None:
        got[0.0] = await chunks(llm)

    async def at_intervals(llm: AsyncLLM) -> None:
        clock = itertools.count()
        monkeypatch.setattr("dflash_trt.async_llm.perf_counter", lambda: next(clock) / 100)
        got[0.035] = await chunks(llm)
        whole.append(await llm.generate(prompt(9), params, speculate=False))

    got: dict[float, list[Chunk]] = {}
    whole: list[Completion] = []
    serve(bundle, each_round)
    serve(bundle, at_intervals, stream_interval=0.035)
    assert [len(chunk.token_ids) for chunk in got[0.0]] == [1] * 12
    assert [len(chunk.token_ids) for chunk in got[0.035]] == [1, 4, 4, 3]
    for each in got.values():
        assert [token for chunk in each for token in chunk.token_ids] == whole[0].token_ids
        assert "".join(chunk.text for chunk in each) == whole[0].text
        assert [x for chunk in each for x in chunk.logprobs] == pytest.approx(whole[0].logprobs, abs=1e-4)
        assert [chunk.finish_reason for chunk in each] == [None] * (len(each) - 1) + ["length"]
    with pytest.raises(DFlashError, match="stream_interval is -1"):
        AsyncLLM(bundle, stream_interval=-1)


def test_first_chunks_and_ends_are_delivered_before_others(bundle, monkeypatch) -> None:
    delivered = list[list[tuple[object, bool]]]()  # per delivery: the streams, and whether they end

    def watched(due: Any) -> None:
        delivered.append([(queue, item.finish_reason is not None) for _, queue, item in due])
        put(due)

    async def body(llm: AsyncLLM) -> None:
        params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (40, 7, 13, 5, 11)]
        streams = (llm.stream(prompt(9, i), each, speculate=False) for i, each in enumerate(params))
        await asyncio.gather(*map(drain, streams))

    async def drain(stream: AsyncGenerator[Chunk, None]) -> None:
        async for _ in stream:
            pass

    put = async_llm._put
    monkeypatch.setattr(async_llm, "_put", watched)
    serve(bundle, body)
    begun, mixed = set[object](), 0
    for due in delivered:
        can_wait = [queue in begun and not ends for queue, ends in due]
        begun.update(queue for queue, _ in due)
        assert can_wait == sorted(can_wait)
        mixed += len(set(can_wait)) == 2
    assert mixed  # the longest answer goes on while another ends


def test_two_event_loops_share_one_engine(bundle, alone) -> None:
    llm = AsyncLLM(bundle, max_batch_size=4, threads=1)
    got: dict[int, list[Completion]] = {}

    async def ask() -> list[Completion]:
        return await asyncio.gather(*(llm.generate(*each) for each in ASKED))

    def run(name: int) -> None:
        got[name] = asyncio.run(ask())

    threads = [threading.Thread(target=run, args=(name,)) for name in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [[c.token_ids for c in each] for each in got.values()] == [[c.token_ids for c in alone]] * 3
    asyncio.run(llm.close())


@pytest.mark.parametrize("stream_interval", [0.0, 0.004])
def test_hundreds_of_requests_that_come_and_go_leave_nothing_behind(bundle, alone, stream_interval) -> None:
    rng = random.Random(5)

    async def body(llm: AsyncLLM) -> None:
        async def one(i: int) -> None:
            which, timeout = rng.randrange(len(ASKED)), rng.choice([None, None, 0.005, 0.05])
            got: list[int] = []
            stream = llm.stream(*ASKED[which], timeout=timeout, speculate=rng.random() < 0.8)
            leave, reason = rng.choice([None, None, 0, 1, 3]), None
            async with places:
                async for chunk in stream:
                    got += chunk.token_ids
                    reason = chunk.finish_reason
                    if leave is not None and reason is None:
                        leave -= 1
                        if leave < 0:
                            break
                await stream.aclose()
            whole = alone[which].token_ids
            assert got == (whole if reason in ("stop", "length") else whole[: len(got)])
            ends.append(reason)
            if i % 5 == 0:  # another one leaves, wherever it is
                tasks[(i + rng.randrange(30)) % len(tasks)].cancel()

        ends, places, tasks = list[str | None](), asyncio.Semaphore(40), list[asyncio.Task[None]]()
        tasks += [asyncio.create_task(one(i)) for i in range(300)]
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert not [o for o in outcomes if o is not None and not isinstance(o, asyncio.CancelledError)]
        assert {None, "length", "timeout"} <= set(ends)
        scheduler = llm.runtime.scheduler
        await until(lambda: scheduler.idle and not llm._arrivals)
        assert (llm.in_flight, scheduler.filling, scheduler.active) == (0, [], [])
        counts = Exposition(llm.metrics.prometheus())
        assert (counts["num_requests_running"], counts["num_requests_waiting"]) == (0, 0)
        tasks.clear()
        del outcomes
        assert (await llm.generate(*ASKED[3])).token_ids == alone[3].token_ids

        def alive() -> int:
            gc.collect()
            return sum(type(each) is Request for each in gc.get_objects())

        await until(lambda: alive() <= 2)  # deadlines have passed; the engine thread has its last ones

    serve(bundle, body, max_queue=1000, stream_interval=stream_interval)


def test_jobs_of_all_kinds_that_leave_at_any_time_have_their_own_tokens(bundle) -> None:
    """Samplings and structures beside each other, with deadlines; `python -m tests.api.jobs` runs thousands."""
    known = known_answers(bundle, 1)

    async def body(llm: AsyncLLM) -> None:
        ends = await run(llm, known, 120, 6, 1)
        assert not ends["differs"]
        assert {"None", "length"} <= set(ends)

    serve(bundle, body, max_batch_size=4)
