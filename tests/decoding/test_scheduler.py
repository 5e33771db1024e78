"""Continuous batching: who is served when, and what a step costs. `test_faults` has any schedules."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_trt import LLM
from dflash_trt.decoding import scheduler as scheduler_module
from dflash_trt.decoding.arrays import HostArrays
from dflash_trt.decoding.draft import Draft
from dflash_trt.decoding.drafter import Drafter
from dflash_trt.decoding.pair import Pair, PassRule
from dflash_trt.decoding.params import MOST_PRIORITY, RequestOptions, SamplingParams
from dflash_trt.decoding.request import Request
from tests.doubles.fake_engines import BLOCK, expected
from tests.doubles.pool import Pool, request
from tests.doubles.schedules import Clock, Lengths, drive, finish, prompt


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(scheduler_module, "perf_counter", clock)
    return clock


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
    """At a failure, before it. A prompt, and the end of all requests, do not let them wait."""
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
            assert not pool.scheduler.cut_short
            assert pool.scheduler.metrics._generated == given

    monkeypatch.setattr(pool.pair, "start", started)
    one, second = (request(prompt(4, i), SamplingParams(max_tokens=n)) for i, n in ((1, 40), (2, 1)))
    pool.scheduler.submit(one)
    steps(3)
    assert order == ["tokens", "pass", "pass", "tokens"]
    pool.scheduler.submit(second)
    steps(2)
    assert order[4:] == ["pass", "tokens", "tokens", "first", "pass"]
    monkeypatch.setattr(pool.pair, "start", lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        steps(1)
    assert order[9:] == ["tokens"]
    monkeypatch.setattr(pool.pair, "start", started)
    for tokens in (40, 4):  # the results of a request that was dropped come no more
        pool.scheduler.clear()
        order.clear()
        pool.scheduler.submit(request(prompt(4, 1), SamplingParams(max_tokens=tokens)))
        steps(2)
    assert order == ["tokens", "pass", "tokens"]
    assert pool.scheduler.idle
    pool.scheduler.submit(request(prompt(4, 1), SamplingParams(max_tokens=40)))
    assert [len(pool.scheduler.step(lengths)) for _ in range(3)] == [1, 1, 1]  # `step` holds none


def test_exact_mode_cuts_a_prompt_alike_whatever_else_a_step_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Into chunks of 8, or of 3 if the log-probabilities of its tokens are asked for. A step reads no more than 8."""
    pool, cuts, read = Pool(6, 6, chunk=8, kept=0), dict[int, list[int]](), list[int]()
    prefill, asked = pool.pair.prefill, list[Request]()

    def watched(tokens: Sequence[int], start: int, slot: int, **options: Any) -> Any:
        assert pool.scheduler.filling is not None
        cuts.setdefault(asked.index(pool.scheduler.filling), []).append(len(tokens))
        read.append(len(tokens))
        return prefill(tokens, start, slot, **options)

    monkeypatch.setattr(pool.pair, "prefill", watched)
    pool.pair.arrays.most_prompt_rows = 3
    pool.scheduler.follow(PassRule(any_cut=False))
    for i, length in enumerate((5, 13, 2, 20, 8)):
        asked.append(request(prompt(length, i), SamplingParams(max_tokens=2, prompt_logprobs=i % 2 == 1)))
        pool.scheduler.submit(asked[i])
    for _ in drive(pool, Lengths(2)):
        assert sum(read) <= 8
        read.clear()
    assert cuts == {0: [5], 1: [3, 3, 3, 3, 1], 2: [2], 3: [3, 3, 3, 3, 3, 3, 2], 4: [8]}


@pytest.mark.parametrize("state", ["waiting", "filling", "active"])
@pytest.mark.parametrize("how", ["cancelled", "timeout"])
def test_who_leaves_is_gone_before_the_next_round(state: str, how: str, clock: Clock) -> None:
    pool, lengths = Pool(2, 4, chunk=8), Lengths(3)
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
    assert leaves in {"waiting": s.waiting, "filling": [s.filling], "active": s.active}[state]
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


def test_clear_leaves_nothing_behind() -> None:
    pool = Pool(2, 3)
    for i in range(5):
        pool.scheduler.submit(request(prompt(9, i), SamplingParams(max_tokens=9)))
    pool.scheduler.step(Lengths(3))
    pool.scheduler.clear()
    pool.check()
    assert pool.scheduler.idle
    again = request(prompt(9, 0), SamplingParams(max_tokens=9))
    assert finish(pool, Lengths(3), again)[again] == expected(again.prompt, again.params, 0)


@pytest.mark.parametrize("spare", [0, 3])
def test_one_batch_may_have_requests_that_draft_and_others_that_do_not(spare: int) -> None:
    pool, lengths = Pool(3, 3 + spare), Lengths(5)
    params = [SamplingParams(max_tokens=40, temperature=t, seed=i) for i, t in enumerate([0, 0.8, 0, 0.8])]
    requests = [request(prompt(6, i), p, draft=i % 2 == 0) for i, p in enumerate(params)]
    tokens = finish(pool, lengths, *requests)
    for i, each in enumerate(requests):
        assert tokens[each] == expected(each.prompt, each.params, i)
        assert (each.statistics.num_drafts > 0) == each.takes_drafts
    assert max(each.statistics.mean_acceptance_length for each in requests) > 2
    # The policy learns from the requests that draft, and from the time of all.
    mixed = next(seen for seen in lengths.rounds if len(seen.active) == 3)
    assert len(mixed.judged) == 2
    alone = [seen for seen in lengths.rounds if len(seen.active) == 1 and not seen.judged]
    assert all(seen.proposed.nodes == seen.verified == 1 for seen in alone)


def test_the_drafter_s_context_is_complete_after_it_was_off() -> None:
    """It then accepts the same drafts as a drafter that was never off. Memory stays bounded."""
    params = SamplingParams(max_tokens=100)
    never_off = request(prompt(4), params)
    always = Lengths(BLOCK)
    finish(Pool(1, 1), always, never_off)
    accepted_at: dict[int, int] = {}
    at = 0
    for seen in always.rounds:
        accepted_at[at] = len(seen.decided[0]) - 1
        at += len(seen.decided[0])
    for off in (1, 7, 8, 9, 17, 33):
        pool, lengths = Pool(2, 2, chunk=8), Lengths(*[1] * off, BLOCK)
        flight = request(prompt(4), params)
        neighbour = request(prompt(4, 5), SamplingParams(max_tokens=3))
        pool.scheduler.submit(flight)
        pool.scheduler.submit(neighbour)
        most = 0
        for _ in drive(pool, lengths):
            most = max(most, pool.pair.drafter.unread[flight.slot])
        assert most <= pool.pair.arrays.most_unread
        at = compared = 0
        for seen in lengths.rounds:
            if seen.proposed.nodes == BLOCK and at in accepted_at:
                compared += 1
                assert len(seen.decided[0]) - 1 == accepted_at[at]
            at += len(seen.decided[0]) if seen.decided else 1
        assert compared > 3


@pytest.mark.parametrize(
    ("length", "off", "passes"), [(6, 0, 1), (6, 3, 1), (6, 99, 0), (16, 0, 1), (41, 99, 4)]
)
def test_a_prompt_waits_for_the_drafter_until_drafting_begins(length: int, off: int, passes: int) -> None:
    """A prompt of up to 16 tokens is read with the first block. Of a longer one, in chunks of 8, what has no room."""
    pool, lengths = Pool(1, 1, kept=0), Lengths(*[1] * off, BLOCK)
    made = request(prompt(length), SamplingParams(max_tokens=8))
    pool.scheduler.submit(made)
    while not made.output:
        pool.scheduler.step(lengths)
    assert pool.drafter.passes == passes - (off < 99)
    while len(lengths.rounds) <= min(off, 6):
        assert pool.drafter.passes == passes - (off < 99)
        pool.scheduler.step(lengths)
    assert pool.drafter.passes == passes
    finish(pool, lengths)
    assert made.output == expected(made.prompt, made.params, 0)


def test_a_prompt_that_was_read_waits_in_no_memory() -> None:
    pool, lengths = Pool(1, 1, chunk=64, kept=0), Lengths(1, 1, BLOCK)
    pool.scheduler.submit(request(prompt(64), SamplingParams(max_tokens=30)))
    waiting = [sum(each.nbytes for each in pool.pair.arrays._unread) for _ in drive(pool, lengths)]
    assert max(waiting[:3]) >= 64 * 4
    assert max(waiting[4:]) <= 4 * 2 * BLOCK


def test_much_to_take_in_and_a_neighbour_at_the_end_of_its_context() -> None:
    """The unread rows of one request's drafter must not push another's rows past its slot."""
    pool, lengths = Pool(2, 2, chunk=32, max_seq_len=64), Lengths(*[1] * 30, BLOCK)
    behind = request(prompt(2, 1), SamplingParams(max_tokens=60))
    full = request(prompt(29, 2), SamplingParams(max_tokens=35, seed=2), draft=False)
    late = request(prompt(60, 3), SamplingParams(max_tokens=4))
    tokens = finish(pool, lengths, behind, full, late)
    assert all(tokens[r] == expected(r.prompt, r.params, r.seed) for r in (behind, full, late))


def test_features_that_wait_take_memory_in_their_own_slot_only() -> None:
    arrays, features = (
        HostArrays(slots=32, feature_size=100, most_unread=512),
        np.ones((400, 100), np.float32),
    )
    arrays.add_unread(3, 0, [None, None, None, features], range(200))
    first = arrays.unread_features_of(3, 0, 200)
    arrays.add_unread(3, 200, [None, None, None, features], range(200))
    assert np.shares_memory(
        first, arrays.unread_features_of(3, 0, 200)
    )  # growing would leave this memory behind
    assert sum(each.nbytes for each in arrays._unread) <= 2 * features.nbytes
    found = arrays.unread_features([1, 0, 0, 400])
    assert (found.shape, found[3].min(), np.abs(found[:3]).max()) == ((4, 400, 100), 1, 0)
    arrays.copy_unread(3, 5, 7)
    assert arrays.unread_features_of(5, 0, 7).sum() == 700
    for slot in (3, 5):
        arrays.clear_unread(slot)
    assert sum(each.nbytes for each in arrays._unread) == 0


def test_a_tree_at_the_end_of_the_context_leaves_a_row_for_a_sink() -> None:
    """A policy that takes as many nodes as it may."""
    pool, most = Pool(1, 1, max_seq_len=60), list[int]()

    class Widest(Lengths):
        def select(self, draft: Draft, active: Sequence[Request], slots: Sequence[int], nodes: int) -> Draft:
            most.append(nodes)
            chain = np.arange(-1, nodes - 1)[None]
            logprobs = np.zeros((1, nodes - 1), np.float32)
            return Draft(np.resize(draft.tokens, (1, nodes)), chain, logprobs)

    asked = request(prompt(20), SamplingParams(max_tokens=40))
    assert finish(pool, Widest(2), asked)[asked] == expected(asked.prompt, asked.params, 0)
    assert most[-1] < most[0]


def test_a_tree_is_refused_by_graphs_that_verify_chains(bundle: Path) -> None:
    tree = Draft(np.array([[1, 2, 3]]), np.array([[-1, 0, 0]]), np.zeros((1, 2), np.float32))
    with LLM(bundle, threads=1) as llm, pytest.raises(ValueError, match="chains only"):
        llm._runtime.pair.verify([request(prompt(4), SamplingParams())], tree)


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
            policies.add(llm._runtime.lengths(RequestOptions()))
        (policy,) = policies
        known = policy.verify_times.kept()
    with LLM(bundle, max_batch_size=6, threads=1) as llm:
        again: Any = llm._runtime.lengths(RequestOptions())
        assert again.verify_times.kept().keys() == known.keys()
