"""Serving from asyncio: streams, cancellation, deadlines, refusal, failure and closing. Nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pytest

from dflash_trt import LLM, AsyncLLM, Completion, SamplingParams, async_llm
from dflash_trt.decoding.request import Request
from dflash_trt.decoding.results import Chunk
from dflash_trt.errors import BusyError, DFlashError, RequestError
from tests.doubles.checkpoints import VOCAB
from tests.doubles.exposition import Exposition

LONG = SamplingParams(max_tokens=200, ignore_eos=True)


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


# Prompts with common beginnings, greedy and sampled.
ASKED = [
    (prompt(30, 1)[: 10 + i] + prompt(5 * (i % 3), i), SamplingParams(max_tokens=n, temperature=t, seed=i))
    for i, (n, t) in enumerate([(24, 0.0), (40, 0.9), (1, 0.0), (60, 0.0), (33, 1.2), (7, 0.0)])
]


@pytest.fixture(scope="module")
def alone(bundle: Path) -> list[Completion]:
    with LLM(bundle, max_batch_size=1, prefix_cache_bytes=0, threads=1) as llm:
        return [llm.generate(tokens, params, speculate=False) for tokens, params in ASKED]


def serve(bundle: Path, body: Callable[[AsyncLLM], Coroutine[Any, Any, None]], **options: Any) -> None:
    """Run `body` and close. Afterwards no stream, slot or task may be left."""

    async def main() -> None:
        options.setdefault("max_batch_size", 3)
        async with AsyncLLM(bundle, threads=1, prefill_chunk=16, **options) as llm:
            await body(llm)
        scheduler = llm._runtime.scheduler
        assert (llm.in_flight, scheduler.idle, llm._arrivals) == (0, True, [])
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert not llm._thread.is_alive()

    asyncio.run(main())


async def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        await asyncio.sleep(0.001)


@contextmanager
def held(llm: AsyncLLM) -> Iterator[None]:
    """Within the block the engine waits before it reads a prompt, so no request ends."""
    go_on, prefill = threading.Event(), llm._runtime.pair.prefill

    def waits(*arguments: Any, **options: Any) -> Any:
        assert go_on.wait(600)
        return prefill(*arguments, **options)

    llm._runtime.pair.prefill = waits  # type: ignore[method-assign]
    try:
        yield
    finally:
        go_on.set()


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


@pytest.mark.parametrize("how", ["aclose", "cancel", "break", "generate"])
def test_who_leaves_frees_the_slot_before_the_next_round(bundle, how, monkeypatch) -> None:
    async def body(llm: AsyncLLM) -> None:
        scheduler, rounds = llm._runtime.scheduler, list[list[Request]]()
        decode = scheduler._launch

        def watched(lengths: Any) -> Any:
            rounds.append(list(scheduler.active))
            time.sleep(0.005)
            return decode(lengths)

        monkeypatch.setattr(scheduler, "_launch", watched)
        other = asyncio.create_task(llm.generate(prompt(5), LONG))
        whole = asyncio.create_task(llm.generate(prompt(9), LONG)) if how == "generate" else None
        if whole is None:
            stream = llm.stream(prompt(9), LONG)
            await anext(stream)
        await until(lambda: any(len(active) == 2 for active in rounds))
        gone = next(r for r in scheduler.active if len(r.prompt) == 9)
        if whole is not None:
            whole.cancel()
            await asyncio.gather(whole, return_exceptions=True)
        elif how == "aclose":
            await stream.aclose()
        elif how == "cancel":

            async def consume() -> None:
                async for _ in stream:
                    pass

            task = asyncio.create_task(consume())
            await asyncio.sleep(0.001)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        else:
            del stream
            gc.collect()
            await until(lambda: gone.cancelled)
        left = len(rounds)
        assert llm.in_flight == 1
        await until(lambda: len(rounds) > left + 2 or other.done())
        assert all(gone not in active for active in rounds[left + 1 :])
        assert (await other).finish_reason == "length"

    serve(bundle, body)


@pytest.mark.parametrize("stream_interval", [0.0, 1e9])
def test_a_timeout_ends_with_the_tokens_so_far(bundle, alone, stream_interval, monkeypatch) -> None:
    async def body(llm: AsyncLLM) -> None:
        late = await llm.generate(prompt(9), LONG, timeout=0)
        assert (late.token_ids, late.text, late.finish_reason) == ([], "", "timeout")
        assert (await llm.generate(*ASKED[0], timeout=60)).token_ids == alone[0].token_ids
        with pytest.raises(RequestError, match="empty"):
            await llm.generate([])
        with pytest.raises(RequestError, match="expected a SamplingParams"):
            await llm.generate(prompt(9), {"max_tokens": 3})  # type: ignore[arg-type]
        start = llm._runtime.pair.start
        whole = await llm.generate(prompt(9), LONG)
        passes = []

        def until_too_late(*arguments: Any) -> Any:
            passes.append(0)
            if len(passes) == 5:
                monkeypatch.setattr(
                    "dflash_trt.decoding.scheduler.perf_counter", lambda: perf_counter() + 1000
                )
            return start(*arguments)

        llm._runtime.pair.start = until_too_late  # type: ignore[method-assign]
        chunks = [chunk async for chunk in llm.stream(prompt(9), LONG, timeout=600)]
        tokens = [token for chunk in chunks for token in chunk.token_ids]
        assert chunks[-1].finish_reason == "timeout"
        assert chunks[-1].statistics.num_generation_tokens == len(tokens)
        assert chunks[-1].statistics.generation_time > 0
        assert 5 <= len(tokens) < 20
        assert tokens == whole.token_ids[: len(tokens)]
        reasons = Exposition(llm.metrics.prometheus()).samples["request_success_total"]
        assert reasons == {"stop": 0, "length": 2, "cancelled": 0, "timeout": 2, "error": 0}

    serve(bundle, body, block_length=2, stream_interval=stream_interval)


def test_a_full_queue_is_refused_at_once(bundle) -> None:
    async def body(llm: AsyncLLM) -> None:
        with held(llm):
            tasks = [asyncio.create_task(llm.generate(prompt(5, i), LONG)) for i in range(3)]
            await until(lambda: llm.in_flight == 3)
            with pytest.raises(BusyError, match="3 requests are in flight"):
                await llm.generate(prompt(5), LONG)
        await asyncio.gather(*tasks)
        assert len((await llm.generate(prompt(5), SamplingParams(max_tokens=3))).token_ids) == 3

    serve(bundle, body, max_batch_size=1, max_queue=2)
    with pytest.raises(DFlashError, match="max_queue is -1"):
        AsyncLLM(bundle, max_queue=-1)


@pytest.mark.parametrize("finish", [True, False])
def test_close_finishes_or_cancels(bundle, alone, finish) -> None:
    async def body(llm: AsyncLLM) -> None:
        with held(llm):
            tasks = [asyncio.create_task(llm.generate(*ASKED[i % 4])) for i in range(8)]
            await until(lambda: llm.in_flight == 8)
            closing = asyncio.create_task(llm.close(finish=finish))
            await asyncio.sleep(0)
            with pytest.raises(DFlashError, match="closed"):
                await llm.generate(prompt(5), LONG)
        completions = await asyncio.gather(*tasks)
        await closing
        for i, done in enumerate(completions):
            assert done.token_ids == alone[i % 4].token_ids[: len(done.token_ids)]
            assert done.finish_reason in (
                (alone[i % 4].finish_reason,) if finish else ("cancelled", "length", "stop")
            )
        if not finish:
            assert completions[-1].finish_reason == "cancelled"
        with pytest.raises(DFlashError, match="closed"):
            await llm.generate(prompt(5), LONG)
        await llm.close()

    serve(bundle, body)


def test_an_error_inside_the_context_cancels_what_runs(bundle) -> None:
    async def main() -> None:
        async with AsyncLLM(bundle, threads=1) as llm:
            with held(llm):
                task = asyncio.create_task(llm.generate(prompt(5), LONG))
                await until(lambda: llm.in_flight == 1)
            seen.append(task)
            raise LookupError("of the caller")

    seen: list[asyncio.Task[Completion]] = []
    with pytest.raises(LookupError):
        asyncio.run(main())
    assert seen[0].done()


def test_an_engine_failure_reaches_every_stream_and_later_requests(bundle) -> None:
    async def main() -> None:
        llm = AsyncLLM(bundle, max_batch_size=2, threads=1)
        start, calls = llm._runtime.pair.start, iter(range(100))

        def failing(*args: Any) -> Any:
            if next(calls) == 5:
                raise MemoryError("no room for a pass")
            return start(*args)

        llm._runtime.pair.start = failing  # type: ignore[method-assign]
        tasks = [asyncio.create_task(llm.generate(prompt(5, i), LONG)) for i in range(5)]
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(outcome, DFlashError)
            assert "engine failed: MemoryError: no room for a pass" in str(outcome)
            assert isinstance(outcome.__cause__, MemoryError)
        with pytest.raises(DFlashError, match="engine failed"):
            await llm.generate(prompt(5), LONG)
        assert llm.in_flight == 0
        await llm.close()

    asyncio.run(main())


def test_an_engine_failure_comes_after_the_tokens_before_it(bundle) -> None:
    async def main() -> None:
        llm = AsyncLLM(bundle, threads=1, stream_interval=1e9)
        start, calls = llm._runtime.pair.start, iter(range(100))
        llm._runtime.pair.start = lambda *a: start(*a) if next(calls) < 5 else 1 / 0  # type: ignore[method-assign]
        stream = llm.stream(prompt(5), LONG, speculate=False)
        assert [len((await anext(stream)).token_ids) for _ in range(2)] == [1, 5]
        with pytest.raises(DFlashError, match="engine failed: ZeroDivisionError"):
            await anext(stream)
        await llm.close()

    asyncio.run(main())


def test_a_loop_that_was_closed_leaves_no_request_behind(bundle, alone) -> None:
    llm = AsyncLLM(bundle, max_batch_size=1, max_queue=0, threads=1)
    loop = asyncio.new_event_loop()
    streams = [llm.stream(prompt(5), LONG)]
    loop.run_until_complete(anext(streams[0]))
    loop.close()

    async def main() -> None:
        await until(lambda: llm.in_flight == 0)
        assert (await llm.generate(*ASKED[0])).token_ids == alone[0].token_ids
        await llm.close()

    asyncio.run(main())
    assert llm._runtime.scheduler.idle


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
            await asyncio.sleep(rng.random() * 0.5)
            which, timeout = rng.randrange(len(ASKED)), rng.choice([None, None, 0.005, 0.05])
            got: list[int] = []
            stream = llm.stream(*ASKED[which], timeout=timeout, speculate=rng.random() < 0.8)
            leave = rng.choice([None, None, 0, 1, 3])
            reason = None
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

        ends: list[str | None] = []
        tasks = [asyncio.create_task(one(i)) for i in range(300)]
        for task in tasks[::7]:
            await asyncio.sleep(0.002)
            task.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert not [o for o in outcomes if o is not None and not isinstance(o, asyncio.CancelledError)]
        assert {None, "length", "timeout"} <= set(ends)
        scheduler = llm._runtime.scheduler
        await until(lambda: scheduler.idle and not llm._arrivals)
        assert (llm.in_flight, scheduler.filling, scheduler.active) == (0, None, [])
        counts = Exposition(llm.metrics.prometheus())
        assert (counts["num_requests_running"], counts["num_requests_waiting"]) == (0, 0)
        del tasks, outcomes
        await asyncio.sleep(0.06)  # until then, deadlines of ended requests are watched
        assert (await llm.generate(*ASKED[3])).token_ids == alone[3].token_ids
        gc.collect()
        alive = [each for each in gc.get_objects() if type(each) is Request]
        assert len(alive) <= 2  # the engine thread's last ones

    serve(bundle, body, max_queue=1000, stream_interval=stream_interval)
