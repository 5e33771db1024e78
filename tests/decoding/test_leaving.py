"""Requests that leave, are late or are dropped: gone before the next round, at no cost to the others."""

from __future__ import annotations

from typing import Any

import pytest

from dflash_trt.decoding.params import SamplingParams
from dflash_trt.decoding.request import Request
from tests.doubles.fake_engines import expected
from tests.doubles.pool import Pool, request
from tests.doubles.schedules import Clock, Lengths, finish, prompt


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
