"""Continuous batching: who is served when, who leaves, and what a step costs. `test_faults` has any schedules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dflash_trt import LLM
from dflash_trt.decoding.drafter import Drafter
from dflash_trt.decoding.pair import Pair, PassRule
from dflash_trt.decoding.params import MOST_PRIORITY, RequestOptions, SamplingParams
from dflash_trt.decoding.request import Request
from tests.doubles.device_pool import DevicePool
from tests.doubles.fake_engines import expected
from tests.doubles.pool import Pool, request
from tests.doubles.schedules import Clock, Lengths, drive, finish, prompt


def test_requests_start_in_the_order_of_arrival_and_slots_stay_a_prefix(clock: Clock) -> None:
    pool = Pool(3, 3)
    requests = [request(prompt(5 + i, i), SamplingParams(max_tokens=4 + 7 * (i % 3))) for i in range(9)]
    first: list[Request] = []
    for each in requests:
        pool.scheduler.submit(each)
    for emissions in drive(pool, Lengths(4)):
        clock.now += 1
        first += [e.request for e in emissions if e.request not in first]
    assert first == requests
    assert [r.statistics.queue_time for r in requests] == sorted(r.statistics.queue_time for r in requests)


def test_times_of_a_request_are_those_of_its_passes(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass over a prompt takes 2 s and a round 3 s. The second request waits for the first, and has four chunks."""
    pool = Pool(1, 1, chunk=8)

    def taking(seconds: float, run: Any) -> Any:
        def timed(*given: Any, **options: Any) -> Any:
            clock.now += seconds
            return run(*given, **options)

        return timed

    for name, seconds in (("prefill", 2), ("start", 3)):
        monkeypatch.setattr(pool.pair, name, taking(seconds, getattr(pool.pair, name)))
    asked = [request(prompt(n, n), SamplingParams(max_tokens=4), arrived=clock.now) for n in (5, 30)]
    lengths = Lengths(1)
    finish(pool, lengths, *asked)
    assert [seen.ended for seen in lengths.rounds] == [0, 0, 1] * 2
    for each, queued, prefill in zip(asked, (0, 2 + 3 * 3), (2, 4 * 2), strict=True):
        statistics = each.statistics
        assert (statistics.queue_time, statistics.prefill_time) == (queued, prefill)
        assert statistics.host_time == pytest.approx(3 * 3, abs=0.5)  # less the fake engines' own time


def test_every_active_request_gets_a_round_in_every_step() -> None:
    pool = Pool(4, 4)
    for i in range(4):
        pool.scheduler.submit(request(prompt(1, i), SamplingParams(max_tokens=30)))
    seen = [{e.request for e in emissions} for emissions in drive(pool, Lengths(1))]
    assert [len(each) for each in seen] == [4] * 30


def test_a_long_prompt_holds_the_others_up_for_one_chunk_a_round() -> None:
    pool = Pool(3, 3, chunk=8)
    others = [request(prompt(3, i), SamplingParams(max_tokens=60)) for i in range(2)]
    long = request(prompt(50, 7), SamplingParams(max_tokens=2))
    for each in (*others, long, request(prompt(2, 8), SamplingParams(max_tokens=1))):
        pool.scheduler.submit(each)
    steps = 0
    for emissions in drive(pool, Lengths(1)):
        before, steps = (long.committed, steps + 1)
        assert before <= 8 * steps
        if steps > 1:
            assert {e.request for e in emissions} >= {r for r in others if r.stop.finish_reason is None}
        if long.first_token_at:
            break
    assert steps == 7  # 2 of the first chunk, then 8 of each


def test_prompts_share_a_chunk_and_no_step_spends_more_than_one() -> None:
    pool = Pool(8, 8, chunk=10)
    requests = [request([i, *prompt(3, i)], SamplingParams(max_tokens=50)) for i in range(8)]
    for each in requests:
        pool.scheduler.submit(each)
    spent = 0
    for _ in drive(pool, Lengths(1)):
        now = sum(min(r.committed, 4) for r in requests)
        assert now - spent == min(10, 32 - spent)
        spent = now
        if spent == 32:
            break


def test_first_tokens_come_before_the_next_prompt_is_read() -> None:
    pool, lengths = Pool(4, 4, chunk=10), Lengths(1)
    first, *others = [request(prompt(3, i), SamplingParams(max_tokens=20)) for i in range(4)]
    pool.scheduler.submit(first)
    pool.scheduler.step(lengths)
    for each in others:
        pool.scheduler.submit(each)
    got, read = [], []
    for part in pool.scheduler.parts(lengths):
        got.append([emission.request for emission in part])
        read.append(sum(other.committed > 0 for other in others))
    assert got == [[first], *([other] for other in others)]
    assert read == [0, 1, 2, 3]
    assert not pool.scheduler.cut_short


def test_a_gpu_starts_the_next_pass_before_a_consumer_takes_the_results_of_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At a failure, before it, which the next step raises. They do not wait for prompts."""
    pool, lengths, order, given = Pool(2, 4), Lengths(3), list[str](), 0
    pool.pair.arrays.asynchronous = True
    start = pool.pair.start

    def started(*given: Any) -> Any:
        order.append("pass")
        return start(*given)

    def steps(count: int) -> None:
        nonlocal given
        for _ in range(count):
            for part in pool.scheduler.parts(lengths):
                order.extend("first" if emission.request is second else "tokens" for emission in part)
                given += sum(len(emission.token_ids) for emission in part)
            assert pool.scheduler.metrics._generated == given

    monkeypatch.setattr(pool.pair, "start", started)
    one, second = (request(prompt(4, i), SamplingParams(max_tokens=n)) for i, n in ((1, 40), (2, 1)))
    pool.scheduler.submit(one)
    steps(3)
    assert order == ["pass", "tokens"] * 3
    pool.scheduler.submit(second)
    steps(2)
    assert order[6:] == ["tokens", "pass", "first", "pass", "tokens"]
    assert not pool.scheduler.cut_short
    monkeypatch.setattr(pool.pair, "start", lambda *given: 1 / 0)
    steps(1)
    assert order[11:] == ["tokens"]
    assert pool.scheduler.cut_short
    with pytest.raises(ZeroDivisionError):
        steps(1)
    monkeypatch.setattr(pool.pair, "start", started)
    for tokens in (40, 4):  # the results of a request that was dropped come no more
        pool.scheduler.clear()
        order.clear()
        pool.scheduler.submit(request(prompt(4, 1), SamplingParams(max_tokens=tokens)))
        steps(2)
    assert order == ["pass", "tokens", "tokens"]
    assert pool.scheduler.idle
    pool.scheduler.submit(request(prompt(4, 1), SamplingParams(max_tokens=40)))
    assert [len(pool.scheduler.step(lengths)) for _ in range(3)] == [1, 1, 1]


def test_exact_mode_cuts_a_prompt_alike_whatever_else_a_step_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Into chunks of 8, or of 3 if the log-probabilities of its tokens are asked for. A step reads no more than 8."""
    pool, cuts, read = Pool(6, 6, chunk=8, kept=0), dict[int, list[int]](), list[int]()
    prefill, asked = pool.pair.prefill, list[Request]()

    def watched(tokens: Sequence[int], start: int, slot: int, **options: Any) -> Any:
        cuts.setdefault(asked.index(*pool.scheduler.filling), []).append(len(tokens))
        read.append(len(tokens))
        return prefill(tokens, start, slot, **options)

    monkeypatch.setattr(pool.pair, "prefill", watched)
    pool.pair.arrays.most_prompt_rows = 3
    pool.pair.rule = PassRule(any_cut=False)
    for i, length in enumerate((5, 13, 2, 20, 8)):
        asked.append(request(prompt(length, i), SamplingParams(max_tokens=2, prompt_logprobs=i % 2 == 1)))
        pool.scheduler.submit(asked[i])
    for _ in drive(pool, Lengths(2)):
        assert sum(read) <= 8
        read.clear()
    assert cuts == {0: [5], 1: [3, 3, 3, 3, 1], 2: [2], 3: [3, 3, 3, 3, 3, 3, 2], 4: [8]}


def test_urgent_requests_keep_a_plain_one_waiting_for_a_bounded_time(clock: Clock) -> None:
    """Each second the one slot becomes free, and a request of the most urgent priority comes."""
    pool = Pool(1, 1, chunk=8)
    plain = request(prompt(8), SamplingParams(max_tokens=1), arrived=clock.now)
    pool.scheduler.submit(plain)
    started: list[Request] = []
    while plain not in started and len(started) < 1000:
        params = SamplingParams(max_tokens=1)
        urgent = request(prompt(8), params, arrived=clock.now, priority=-MOST_PRIORITY)
        pool.scheduler.submit(urgent)
        started += [emission.request for emission in pool.scheduler.step(Lengths(1))]
        clock.now += 1
    assert len(started) == MOST_PRIORITY + 1


def test_no_pass_is_timed_before_an_answer(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pass that runs is one of a request. The policy that has learned stays, for the next process too."""
    monkeypatch.delattr(Pair, "dummy_verify")
    monkeypatch.delattr(Drafter, "dummy_pass")
    params, policies = SamplingParams(max_tokens=24, ignore_eos=True), set[Any]()
    with LLM(bundle, max_batch_size=6, threads=1) as llm:
        for requests in (1, 3, 20):
            prompts = [prompt(4, i) for i in range(requests)]
            plain = llm.generate(prompts, params, speculate=False)
            drafted = llm.generate(prompts, params)
            assert [each.token_ids for each in drafted] == [each.token_ids for each in plain]
            policies.add(llm.runtime.lengths(RequestOptions()))
        (policy,) = policies
        known = policy.verify_times.kept()
    with LLM(bundle, max_batch_size=6, threads=1) as llm:
        again: Any = llm.runtime.lengths(RequestOptions())
        assert again.verify_times.kept().keys() == known.keys()


@pytest.mark.parametrize("delay", [0.0, 4.5, 50.0])
def test_slots_fill_as_fast_as_the_delay_of_rounds_allows(delay: float, clock: Clock) -> None:
    """16 slots, prompts of four chunks that take a second each, and answers of 16 rounds. At most one chunk, or as many
    as the delay has room for, come between two rounds.
    """
    pool, gaps, used = Pool(16, 16, chunk=8, kept=0), list[float](), list[int]()
    prefill, pool.scheduler.prompt_delay = pool.pair.prefill, delay

    def timed(*given: Any, **named: Any) -> Any:
        clock.now += 1
        return prefill(*given, **named)

    pool.pair.prefill = timed  # type: ignore[method-assign]
    for i in range(64):
        pool.scheduler.submit(request(prompt(32, i), SamplingParams(max_tokens=17)))
    while pool.scheduler.waiting:
        begin = clock.now
        pool.scheduler.step(Lengths(1))
        gaps.append(clock.now - begin)
        used.append(len(pool.scheduler.active))
    assert max(gaps) <= max(delay, 1.0)
    share = sum(used[16:]) / len(used[16:]) / 16
    assert share >= 0.9 if delay else max(used) == 4


@pytest.mark.parametrize("state", ["waiting", "filling", "active"])
@pytest.mark.parametrize("how", ["cancelled", "timeout"])
@pytest.mark.parametrize("ahead", [False, True])
def test_who_leaves_is_gone_before_the_next_round(ahead: bool, state: str, how: str, clock: Clock) -> None:
    """Nothing is committed to it of a round that is under way."""
    pool, lengths = DevicePool(2, chunk=8) if ahead else Pool(2, 4, chunk=8), Lengths(3)
    stays = request(prompt(4, 1), SamplingParams(max_tokens=40, seed=1))
    deadline = clock.now + 50 if how == "timeout" else None
    leaves = request(prompt(30, 2), SamplingParams(max_tokens=40), deadline=deadline)
    after = request(prompt(3, 3), SamplingParams(max_tokens=5, seed=3))
    s = pool.scheduler
    s.submit(stays)
    s.step(lengths)
    s.submit(leaves)
    for _ in range({"waiting": 0, "filling": 2, "active": 6}[state]):
        s.step(lengths)
        pool.check()
    assert leaves in {"waiting": s.waiting, "filling": s.filling, "active": s.active}[state]
    s.submit(after)
    if how == "cancelled":
        s.cancel(leaves)
    else:
        clock.now += 50
    emissions = s.step(lengths)
    pool.check()
    assert (emissions[0].request, emissions[0].finish_reason) == (leaves, how)
    assert leaves not in s.active
    assert after in s.active
    finish(pool, lengths)
    assert after.statistics.num_generation_tokens == 5
    for each, seed in ((stays, 1), (after, 3)):
        whole = expected(each.prompt, each.params, seed)
        assert each.output[: len(whole)] == whole


class Counted(Request):
    """A request that counts the checks of its deadline and its cancellation."""

    looked_at = 0

    def __getattribute__(self, name: str) -> Any:
        if name in ("deadline", "cancelled"):
            type(self).looked_at += 1
        return super().__getattribute__(name)


def test_a_step_does_not_look_at_the_requests_that_wait(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = Pool(1, 1)
    monkeypatch.setattr(Counted, "looked_at", 0)
    waiting = []
    for i in range(1000):
        made = request([1], SamplingParams(max_tokens=1000), deadline=clock.now + 10 + 7 * i % 1000)
        made.__class__ = Counted
        waiting.append(made)
        pool.scheduler.submit(made)
    submitting, Counted.looked_at = Counted.looked_at, 0
    for _ in range(100):
        assert all(e.finish_reason is None for e in pool.scheduler.step(Lengths(1)))
    assert Counted.looked_at == 0
    assert submitting < 10 * len(waiting)
    pool.scheduler.cancel(waiting[600])
    (gone,) = [e.request for e in pool.scheduler.step(Lengths(1)) if e.finish_reason == "cancelled"]
    assert gone is waiting[600]
    while not pool.scheduler.idle:  # each at its own time
        clock.now += 1
        late = [e.request for e in pool.scheduler.step(Lengths(1)) if e.finish_reason == "timeout"]
        assert all(clock.now - 1 < r.deadline <= clock.now for r in late if r.deadline)
    assert {r.stop.finish_reason for r in waiting} == {"timeout", "cancelled"}


def test_deadlines_of_requests_that_have_ended_are_forgotten(clock: Clock) -> None:
    pool = Pool(4, 4)
    for i in range(500):
        finish(pool, Lengths(1), request([1 + i % 9], SamplingParams(max_tokens=1), deadline=clock.now + 1e6))
    assert len(pool.scheduler.waiting._deadlines) < 100


@pytest.mark.parametrize(("exact", "further"), [(False, 0), (True, 0), (False, 40), (True, 40)])
def test_the_newest_request_waits_again_with_its_tokens_where_memory_runs_out(
    exact: bool, further: int
) -> None:
    """256 requests (or 64) in 16 slots, with memory for the longest three. What ended requests left goes first, also
    while requests that share their beginnings run. In exact mode a request begins when it has memory to its end.
    """
    options: Any = {"kept": 300, "further": further}
    pool: Any = Pool(16, 16, **options) if exact else DevicePool(16, **options)
    pool.pair.rule, begun, admit = PassRule(any_cut=not exact), Counter[Request](), pool.scheduler._admit
    for engine in (pool.target, pool.drafter):
        engine.memory = 3 * pool.pair.capacity

    def counted(request: Request, *given: Any) -> None:
        begun[request] += 1
        admit(request, *given)

    pool.scheduler._admit = counted
    asked = [
        request(
            prompt(40, i % 3)[: 1 + 7 * i % 40],
            SamplingParams(max_tokens=1 + 11 * i % 60, seed=i, temperature=i % 2),
        )
        for i in range(256 if further and not exact else 64)
    ]
    tokens = finish(pool, Lengths(1, 4, 2, 4), *asked)
    assert all(tokens[each] == expected(each.prompt, each.params, each.seed) for each in asked)
    assert len(begun) == len(asked)
    assert (max(begun.values()) == 1) == exact
    assert sum(each.statistics.num_cached_tokens > 0 for each in asked) > 10
