"""What a drafter has not read yet: it waits in bounded memory, and is read before the drafter is asked again."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_trt.decoding.arrays import HostArrays
from dflash_trt.decoding.params import SamplingParams
from tests.doubles.fake_engines import BLOCK, expected
from tests.doubles.pool import Pool, request
from tests.doubles.schedules import Lengths, drive, finish, prompt


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
