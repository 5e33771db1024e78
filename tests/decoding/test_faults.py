"""One request never affects another: a fault ends only the request it belongs to, and leaves nothing behind."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trt.decoding import scheduler as scheduler_module
from dflash_trt.decoding.length.adaptive import AdaptiveLength
from dflash_trt.decoding.length.times import PassTimes
from dflash_trt.decoding.output import StopChecker
from dflash_trt.decoding.output import StoppedText as Stopped
from dflash_trt.decoding.params import FinishReason, SamplingParams
from dflash_trt.decoding.request import Request
from dflash_trt.decoding.sampling.history import History
from dflash_trt.errors import DecodingError, NonFiniteError
from tests.doubles.device_pool import DevicePool
from tests.doubles.fake_engines import BLOCK, FakeTarget, expected, nothing, rows_of
from tests.doubles.fake_states_and_windows import LongStrideTarget, StateTarget, WindowTarget
from tests.doubles.pool import Letters, Pool, request
from tests.doubles.schedules import AnyLengths, Clock, Lengths, arrivals, drive, finish, prompt


class Panic(BaseException):
    """A panic of a library in another language: not a Python Exception."""


class FailingStop(StopChecker):
    """Raises instead of taking its n-th run of tokens. If it panics, it also raises whenever text is requested."""

    def __init__(self, params: SamplingParams, at: int, error: type[BaseException]) -> None:
        super().__init__(params, (), Letters())  # type: ignore[arg-type]
        self.left, self.error = at, error

    def push(self, tokens: Any) -> Stopped:
        self.left -= 1
        if self.left < 0:
            raise self.error("in the middle of a text")
        return super().push(tokens)

    def abandon(self, reason: FinishReason) -> str:
        text = super().abandon(reason)
        if self.error is Panic:
            raise self.error("again")
        return text


class FailingHistory(History):
    """Takes no token from its n-th on, which only a history on the host may do."""

    leaves_some = False

    def __init__(
        self, params: SamplingParams, prompt: list[int], at: int, error: type[BaseException]
    ) -> None:
        super().__init__(params, prompt)
        self.left, self.error = at, error

    def add(self, token: int) -> None:
        self.left -= 1
        if self.left < 0:
            raise self.error("at this token")
        super().add(token)


def every(modulus: int | None) -> Callable[[int], bool]:
    """Rows that are not numbers: about one in `modulus`."""
    return nothing if modulus is None else lambda number: number % modulus == 3


each = st.sampled_from([None, None, None, (0, ValueError), (1, Panic), (3, ValueError), (5, MemoryError)])
faults = st.just([None] * 14) | st.lists(each, min_size=14, max_size=14)


@settings(max_examples=250, deadline=None, derandomize=True)
@given(
    arrivals=arrivals,
    faults=faults,
    batch=st.integers(1, 4),
    spare=st.sampled_from([0, 1, 2, 12]),
    chunk=st.integers(1, 24) | st.just(64),
    delay=st.sampled_from([0.0, 9.0]),
    memory=st.sampled_from([None, None, 1.0, 1.4, 2.5]),
    seed=st.integers(0, 1000),
    target=st.sampled_from([None, None, 37, 61, 400]),
    drafter=st.sampled_from([None, None, 37, 61, 400]),
    kind=st.sampled_from([FakeTarget, FakeTarget, StateTarget, WindowTarget, LongStrideTarget]),
    ahead=st.booleans(),
    further=st.sampled_from([0, 3, 40]),
    of_history=st.booleans(),
)
def test_any_schedule_with_any_faults_gives_each_request_its_own_tokens(
    arrivals,
    faults,
    batch,
    spare,
    chunk,
    delay,
    memory,
    seed,
    target,
    drafter,
    kind,
    ahead,
    further,
    of_history,
) -> None:
    """Arrivals, cancellations and deadlines at any step, any neighbours, block lengths and pools, targets with states
    and windows, and rounds that start before the host has read the ones before. Also numbers that are not finite in
    both models, and errors and panics in the host's code: in texts, or in histories, whose requests get all tokens
    before, as without drafts.
    """
    longest = max(len(a["prefix"]) + a["length"] + a["max_tokens"] for a in arrivals)
    if kind is not FakeTarget:  # whose doubles hold no rows that are not numbers, and take no longer passes
        chunk, target, further = min(chunk, 12), None, 0 if kind is StateTarget else further
    if ahead and kind is not StateTarget:  # which has no double on a device
        pool = DevicePool(
            batch, chunk=chunk, max_seq_len=longest, kept=spare * 80, target=kind, further=further
        )
    else:
        pool = Pool(batch, batch + spare, chunk=chunk, max_seq_len=longest, target=kind, further=further)
    pool.target.not_a_number, pool.drafter.not_a_number = every(target), every(drafter)
    pool.scheduler.prompt_delay = delay
    for engine in (pool.target, pool.drafter):  # rows for so many sequences of the most tokens
        engine.memory = memory and int(memory * pool.pair.capacity)
    lengths, clock = AnyLengths(seed) if seed % 3 else Lengths(1 + seed % BLOCK), Clock()
    due: list[tuple[int, int, Request, Any]] = []
    got, texts = dict[Request, list[int]](), dict[Request, str]()
    ends: dict[Request, tuple[str, Exception | None]] = {}
    for a, fault in zip(arrivals, faults, strict=False):
        names = {"max_tokens": "max_tokens", "temperature": "temperature", "repetition_penalty": "penalty"}
        params = SamplingParams(seed=a["seed"], **{name: a[key] for name, key in names.items()})
        deadline = None if a["deadline"] is None else clock.now + a["at"] + a["deadline"]
        made = request(
            a["prefix"] + prompt(a["length"], a["seed"]), params, draft=a["draft"], deadline=deadline
        )
        if fault is not None and of_history and made.history is not None:
            made.history = FailingHistory(params, made.prompt, *fault)
        elif fault is not None:
            made.stop = FailingStop(params, *fault)
        due.append((a["at"], 10_000 if a["leaves"] is None else a["at"] + a["leaves"], made, fault))
        got[made], texts[made] = [], ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler_module, "perf_counter", clock)
        for step in range(10_000):
            for at, leaves, made, _ in due:
                if at == step:
                    pool.scheduler.submit(made)
                if leaves == step:
                    pool.scheduler.cancel(made)
            for emission in [each for part in pool.scheduler.parts(lengths) for each in part]:
                assert emission.request not in ends, "an emission after the end"
                got[emission.request] += emission.token_ids
                texts[emission.request] += emission.text
                if emission.finish_reason is not None:
                    ends[emission.request] = emission.finish_reason, emission.error
            pool.check()
            clock.now += 1
            if step > 50 and pool.scheduler.idle:
                break
    for _, leaves, made, fault in due:
        whole = expected(made.prompt, made.params, made.seed, every(target))
        reason, error = ends[made]
        assert got[made] == whole[: len(got[made])]
        assert made.statistics.num_generation_tokens == len(got[made])
        assert fault or texts[made] == "".join(chr(65 + token) for token in got[made])
        if reason == "length":
            assert got[made] == whole
        elif isinstance(error, NonFiniteError):
            assert got[made] == whole
            assert len(whole) < made.params.max_tokens
        elif reason == "error":
            assert isinstance(error, DecodingError)
            assert isinstance(error.__cause__, fault[1])
            assert fault[1].__name__ in str(error)
            assert isinstance(made.stop, FailingStop) or got[made] == whole[: fault[0]]
        else:
            assert reason == "timeout" or leaves < 10_000
            assert reason == "cancelled" or made.deadline is not None


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("ahead", [False, True])
def test_a_prompt_without_memory_for_its_pass_ends_alone(ahead: bool, together: bool) -> None:
    """The error says what there is memory for. Where several prompts do not fit into a pass, each has its own."""
    pool: Any = DevicePool(4, chunk=64, further=4) if ahead else Pool(4, 4, chunk=64)
    prefill, lacking, lacked = pool.pair.prefill, False, list[int]()
    error = torch.OutOfMemoryError("CUDA out of memory. Tried") if ahead else MemoryError("Tried")

    def read(tokens: Any, start: int, slot: int, **options: Any) -> Any:
        nonlocal lacking
        lacking = start == 64
        try:
            return prefill(tokens, start, slot, **options)
        finally:
            lacking = False

    def before_pass() -> None:
        if lacking:
            lacked.append(1)
            raise error

    def none(*_: Any, **__: Any) -> Any:
        lacked.append(2)
        raise MemoryError("for both")

    pool.pair.prefill, pool.target.before_pass = read, before_pass
    if together and ahead:
        pool.pair.prefill_together = none
    few = [request(prompt(3, i), SamplingParams(max_tokens=30, seed=i)) for i in range(3)]
    large = request(prompt(70), SamplingParams(max_tokens=9))
    for each in few:
        pool.scheduler.submit(each)
    for _ in range(4):
        pool.scheduler.step(Lengths(3))
    assert pool.scheduler.active
    pool.scheduler.submit(large)
    (end,) = [each for part in drive(pool, Lengths(3)) for each in part if each.error is not None]
    assert end.request is large
    assert isinstance(end.error, DecodingError)
    assert re.search(
        rf"over 6 of the 70 tokens .*Tried\); .* have memory for {pool.pair.tokens} tokens", str(end.error)
    )
    again = request(large.prompt, SamplingParams(max_tokens=9))
    pool.pair.prefill = prefill
    finish(pool, Lengths(3), again)
    for each in [*few, again]:
        assert each.output[: each.params.max_tokens] == expected(each.prompt, each.params, each.seed)
    assert lacked.count(2) == (together and ahead)


@pytest.mark.parametrize("before", [0, 7])
@pytest.mark.parametrize("role", ["target", "drafter"])
@pytest.mark.parametrize("ahead", [False, True])
def test_a_round_without_memory_ends_the_newest_request(ahead: bool, role: str, before: int) -> None:
    """The first round of all three, or one after some. The others have their tokens, and the newest those before."""
    pool: Any = DevicePool(4, further=4) if ahead else Pool(4, 4)
    error = torch.OutOfMemoryError("CUDA out of memory. Tried") if ahead else MemoryError("Tried")
    passes, scheduler = 0, pool.scheduler

    def before_pass() -> None:
        nonlocal passes
        passes += (many := len(scheduler.active) == 3 and not scheduler.filling)
        if many and passes > before:
            raise error

    getattr(pool, role).before_pass = before_pass
    few = [request(prompt(3, i), SamplingParams(max_tokens=40, seed=i), arrived=i) for i in range(3)]
    for each in few:
        scheduler.submit(each)
    (end,) = [each for part in drive(pool, Lengths(3)) for each in part if each.error is not None]
    assert end.request is few[2]
    assert isinstance(end.error, DecodingError)
    assert re.search(
        r"round of 3 requests \(.*Tried\); lower max_batch_size, or cache_tokens", str(end.error)
    )
    for each in few:
        whole = expected(each.prompt, each.params, each.seed)
        assert each.output[: each.params.max_tokens] == (
            whole if each is not few[2] else whole[: len(each.output)]
        )
    assert before < len(few[2].output) < 40 or not before
    getattr(pool, role).before_pass = lambda: None
    again = request(few[2].prompt, few[2].params)
    assert finish(pool, Lengths(3), again)[again] == expected(again.prompt, again.params, again.seed)


@pytest.mark.parametrize("work", ["start_round", "blocks", "drafts", "verified", "finite", "readable"])
def test_work_around_a_pass_without_memory_ends_one_request(work: str) -> None:
    """Whatever allocates on the device, or in pinned memory. The others have their tokens."""
    pool, calls = DevicePool(3, further=3), 0
    done = getattr(pool.pair.arrays, work)

    def refused(*given: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried")
        return done(*given, **named)

    setattr(pool.pair.arrays, work, refused)
    few = [request(prompt(3, i), SamplingParams(max_tokens=40, seed=i), arrived=i) for i in range(3)]
    for each in few:
        pool.scheduler.submit(each)
    errors = [each for part in drive(pool, Lengths(3)) for each in part if each.error is not None]
    assert calls > 2
    assert len(errors) <= 1  # a round that started ahead comes in its turn
    for each in few:
        whole = expected(each.prompt, each.params, each.seed)
        assert each.output[:40] == (
            whole if each.stop.finish_reason == "length" else whole[: len(each.output)]
        )


@pytest.mark.parametrize("role", ["target", "drafter"])
def test_a_round_that_finds_no_memory_ahead_comes_in_its_turn(role: str) -> None:
    pool, refused = DevicePool(3), list[int]()
    follow = pool.pair.follow

    def following(*given: Any) -> Any:
        getattr(pool, role).before_pass = before_pass
        try:
            return follow(*given)
        finally:
            getattr(pool, role).before_pass = lambda: None

    def before_pass() -> None:
        if pool.followed % 3 == 1:
            refused.append(pool.followed)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried")

    pool.pair.follow = following  # type: ignore[method-assign]
    few = [request(prompt(3, i), SamplingParams(max_tokens=60, seed=i)) for i in range(3)]
    tokens = finish(pool, Lengths(3), *few)
    for each in few:
        assert tokens[each] == expected(each.prompt, each.params, each.seed)
    assert len(refused) > 2


def test_a_drafter_without_numbers_costs_speed_only(caplog: pytest.LogCaptureFixture) -> None:
    """Its request continues without drafts, also under the adaptive length, and its neighbour drafts as before."""
    pool = Pool(2, 4)
    spoilt = set(rows_of(prompt(4, 1) + expected(prompt(4, 1), SamplingParams(max_tokens=60), 0)))
    for lengths in (Lengths(5), adaptive(pool)):
        pool.drafter.not_a_number = spoilt.__contains__
        flights = [request(prompt(4, i), SamplingParams(max_tokens=60)) for i in range(2)]
        tokens = finish(pool, lengths, *flights)
        for each in flights:
            assert tokens[each] == expected(each.prompt, each.params, 0)
        assert [each.takes_drafter for each in flights] == [True, False]
        pool.scheduler.forget()
    assert [each.message.partition(" (")[0] for each in caplog.records] == [
        "drafts have numbers that are not finite"
    ]


def test_a_drafter_without_numbers_at_a_request_s_end_leaves_a_clear_slot() -> None:
    """It reads the last tokens only when the request has ended, because a state is kept for its end alone."""
    pool = Pool(1, 4, target=StateTarget)
    pool.pair.arrays.prompts_wait = False
    ends = request(prompt(4), SamplingParams(max_tokens=6))
    pool.scheduler.submit(ends)
    pool.scheduler.step(Lengths(1))
    pool.drafter.not_a_number = lambda number: True
    assert finish(pool, Lengths(1))[ends] == expected(ends.prompt, ends.params, 0)[1:]
    pool.drafter.not_a_number = nothing
    again = request([*ends.prompt, *ends.output, 3], SamplingParams(max_tokens=20))
    assert finish(pool, Lengths(5), again)[again] == expected(again.prompt, again.params, 0)
    assert again.takes_drafter


def adaptive(pool: Pool) -> Any:
    return AdaptiveLength(BLOCK, PassTimes(BLOCK), PassTimes(BLOCK))


def test_logits_of_a_prompt_that_is_not_finite_leave_a_clear_slot() -> None:
    pool, whole = Pool(1, 1), prompt(20)
    spoilt = rows_of(whole)[3]
    pool.target.not_a_number = lambda number: number == spoilt
    assert np.isnan(pool.scheduler.logits(whole)).all()
    pool.check()
    pool.pair._prompt_pass = 2  # the second pass has it
    assert not pool.pair.prefill(whole[:8], 0, 0, draft=False)[1]


def test_the_round_after_one_without_finite_logits_has_no_drafts() -> None:
    """The drafts may have spoilt them. Here it was the request's own token, which ends it."""
    pool, lengths, asked = Pool(1, 1), Lengths(BLOCK), request(prompt(9), SamplingParams(max_tokens=20))
    whole = expected(asked.prompt, asked.params, 0)
    spoilt = rows_of([*asked.prompt, *whole])[14]
    pool.target.not_a_number = lambda number: number == spoilt
    assert finish(pool, lengths, asked)[asked] == whole[:6]
    assert asked.stop.finish_reason == "error"
    assert asked.statistics.generation_time > 0
    assert [seen.verified for seen in lengths.rounds[-2:]] == [BLOCK, 1]
    assert len(lengths.rounds) < 8


@pytest.mark.parametrize("length", range(2, BLOCK + 1))
def test_a_draft_whose_row_has_no_numbers_ends_no_request(length: int) -> None:
    """In rounds of any length, though it spoils the rows before it, too."""
    pool, asked = Pool(1, 1), request(prompt(9), SamplingParams(max_tokens=40))
    whole = expected(asked.prompt, asked.params, 0)
    right = set(rows_of([*asked.prompt, *whole]))
    pool.target.not_a_number = lambda number: number not in right
    assert finish(pool, Lengths(length), asked)[asked] == whole
    assert asked.statistics.num_draft_tokens > sum(asked.statistics.acceptance_histogram[1:])


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10_000),
    batch=st.integers(1, 4),
    spare=st.sampled_from([0, 2]),
    after=st.integers(0, 60),
    error=st.sampled_from([KeyboardInterrupt, RuntimeError, Panic]),
)
def test_a_step_that_is_cut_short_leaves_nothing_behind(seed, batch, spare, after, error) -> None:
    """Interrupted by Ctrl-C or by an engine, before any pass or any copy of a slot."""
    rng = random.Random(seed)
    pool = Pool(batch, batch + spare)
    pool.target.not_a_number = every(rng.choice([None, 61]))
    left = after

    def perhaps() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise error("now")

    def between(copy: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*given: Any, **options: Any) -> Any:
            perhaps()
            done = copy(*given, **options)
            perhaps()
            return done

        return guarded

    for name in ("copy", "keep", "restore"):
        setattr(pool.pair, name, between(getattr(pool.pair, name)))
    pool.target.before_pass = pool.drafter.before_pass = perhaps
    base = prompt(12, seed)
    for round_ in range(3):
        params = [SamplingParams(max_tokens=rng.randint(1, 25), seed=i) for i in range(5)]
        requests = [request(base[: rng.randint(1, 12)] + prompt(3, i), p) for i, p in enumerate(params)]
        try:
            tokens = finish(pool, AnyLengths(seed + round_), *requests)
        except (KeyboardInterrupt, RuntimeError, Panic):
            pool.scheduler.clear()
            pool.check()
            assert pool.scheduler.idle
            assert (pool.scheduler.slots.prefixes.counts.tokens, pool.scheduler.slots.left) == (0, {})
            continue
        for each in requests:
            assert tokens[each] == expected(each.prompt, each.params, each.seed, pool.target.not_a_number)
