"""How requests of `AsyncLLM` end early: who leaves, deadlines, refusals, failures of the engine and closing."""

from __future__ import annotations

import asyncio
import gc
import threading
from dataclasses import replace
from time import perf_counter
from typing import Any

import pytest

from dflash_trt import AsyncLLM, Chunk, Completion, SamplingParams
from dflash_trt.decoding.request import Request
from dflash_trt.errors import BusyError, DFlashError, RequestError
from tests.api.loops import ASKED, LONG, held, serve, until
from tests.doubles.bundles import prompt
from tests.doubles.exposition import Exposition


@pytest.mark.parametrize("how", ["aclose", "cancel", "break", "generate"])
def test_who_leaves_frees_the_slot_before_the_next_round(bundle, how, monkeypatch) -> None:
    async def body(llm: AsyncLLM) -> None:
        scheduler, rounds, go_on = llm.runtime.scheduler, list[list[Request]](), threading.Event()
        decode = scheduler._launch

        def watched(*given: Any) -> Any:
            rounds.append(list(scheduler.active))
            assert len(scheduler.active) < 2 or go_on.wait(60)
            return decode(*given)

        monkeypatch.setattr(scheduler, "_launch", watched)
        stream = llm.stream(prompt(9), LONG)
        with held(llm):
            other = asyncio.create_task(llm.generate(prompt(5), LONG))
            made = llm.generate(prompt(9), LONG) if how == "generate" else anext(stream)
            whole = asyncio.ensure_future(made)
            await until(lambda: llm.in_flight == 2)
        if how != "generate":
            await whole
        await until(lambda: any(len(active) == 2 for active in rounds))
        gone = next(r for r in scheduler.active if len(r.prompt) == 9)
        if how == "generate":
            whole.cancel()
            await asyncio.gather(whole, return_exceptions=True)
        elif how == "aclose":
            await stream.aclose()
        elif how == "cancel":

            async def consume() -> None:
                async for _ in stream:
                    pass

            task = asyncio.create_task(consume())
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        else:
            del stream, made, whole
            gc.collect()
        await until(lambda: llm.in_flight == 1)
        left = len(rounds)
        go_on.set()
        assert (await other).finish_reason == "length"
        assert len(rounds) > left + 2
        assert all(gone not in active for active in rounds[left:])

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
            await llm.generate(prompt(9), {"max_tokens": 3})
        start = llm.runtime.pair.start
        whole = await llm.generate(prompt(9), LONG)
        passes = []

        def until_too_late(*arguments: Any) -> Any:
            passes.append(0)
            if len(passes) == 5:
                monkeypatch.setattr(
                    "dflash_trt.decoding.scheduler.perf_counter", lambda: perf_counter() + 1000
                )
            return start(*arguments)

        llm.runtime.pair.start = until_too_late
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


@pytest.mark.parametrize("error", [StopIteration, StopAsyncIteration, ValueError, asyncio.CancelledError])
def test_an_error_of_the_caller_s_own_ends_its_stream_alone(bundle, alone, error) -> None:
    """Whatever it is. A coroutine turns StopIteration into RuntimeError, as Python does in all of them."""

    async def body(llm: AsyncLLM) -> None:
        def failing(chunk: Chunk) -> None:
            raise error("own")

        others = [asyncio.create_task(llm.generate(*each)) for each in ASKED]
        for _ in range(3):
            wrong = llm.deliver(prompt(5), LONG, failing)
            with pytest.raises(RuntimeError if error is StopIteration else error):
                await asyncio.wait_for(wrong, 60)
        done = await asyncio.wait_for(asyncio.gather(*others), 60)
        assert [each.token_ids for each in done] == [each.token_ids for each in alone]

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
        start, calls = llm.runtime.pair.start, iter(range(100))

        def failing(*args: Any) -> Any:
            if next(calls) == 5:
                raise RuntimeError("out of order")
            return start(*args)

        llm.runtime.pair.start = failing
        tasks = [asyncio.create_task(llm.generate(prompt(5, i), LONG)) for i in range(5)]
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(outcome, DFlashError)
            assert "engine failed: RuntimeError: out of order" in str(outcome)
            assert isinstance(outcome.__cause__, RuntimeError)
        with pytest.raises(DFlashError, match="engine failed"):
            await llm.generate(prompt(5), LONG)
        assert llm.in_flight == 0
        await llm.close()

    asyncio.run(main())


def test_an_engine_failure_comes_after_the_tokens_before_it(bundle) -> None:
    async def main() -> None:
        llm = AsyncLLM(bundle, threads=1, stream_interval=1e9)
        start, calls = llm.runtime.pair.start, iter(range(100))
        llm.runtime.pair.start = lambda *a: start(*a) if next(calls) < 5 else 1 / 0
        stream = llm.stream(prompt(5), LONG, speculate=False)
        assert [len((await anext(stream)).token_ids) for _ in range(2)] == [1, 5]
        with pytest.raises(DFlashError, match="engine failed: ZeroDivisionError"):
            await anext(stream)
        await llm.close()

    asyncio.run(main())


@pytest.mark.parametrize("tokens", [200, 20])
def test_a_loop_that_was_closed_leaves_no_request_behind(bundle, alone, tokens) -> None:
    """While a stream runs, and when its end was posted and is not read."""
    llm = AsyncLLM(bundle, max_batch_size=1, max_queue=0, threads=1)
    loop, scheduler = asyncio.new_event_loop(), llm.runtime.scheduler
    stream = llm.stream(prompt(5), replace(LONG, max_tokens=tokens))
    posted, post = threading.Event(), loop.call_soon_threadsafe

    def posting(*call: Any, **options: Any) -> Any:
        post(*call, **options)
        if scheduler.idle:
            posted.set()

    start, go_on = llm.runtime.pair.start, threading.Event()
    llm.runtime.pair.start = lambda *feeds: start(*feeds) if go_on.wait(60) else None
    loop.call_soon_threadsafe = posting
    loop.run_until_complete(anext(stream))
    if tokens == 20:
        go_on.set()
        assert posted.wait(60)
    loop.close()
    go_on.set()

    async def main() -> None:
        await until(lambda: llm.in_flight == 0)
        assert (await llm.generate(*ASKED[0])).token_ids == alone[0].token_ids
        ends = Exposition(llm.metrics.prometheus()).samples["request_success_total"]
        assert ends["cancelled"] == (tokens == 200)
        await llm.close()

    asyncio.run(main())
    assert scheduler.idle
