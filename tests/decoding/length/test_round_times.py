"""The usual time of rounds, followed while the engine runs."""

from __future__ import annotations

import pytest

from dflash_trt.decoding.length.pass_times import PassTimes
from dflash_trt.decoding.length.round_times import RoundTimes


@pytest.fixture
def times() -> RoundTimes:
    """Of lengths 1 .. 4: 1.0, 1.75, 2.0, 2.25 at a batch of 1, and twice that at 4."""
    draft, verify = (
        PassTimes({1: row, 4: {n: 2 * seconds for n, seconds in row.items()}}, [1, 4])
        for row in ({2: 0.5, 4: 0.5}, {1: 1.0, 2: 1.25, 4: 1.75})
    )
    return RoundTimes(draft, verify, 4)


def settle(times: RoundTimes, batch: int, length: int, seconds: float) -> None:
    for _ in range(32):
        times.observe(batch, length, length, seconds, trial=False)


def test_rounds_start_with_the_times_of_their_passes(times: RoundTimes) -> None:
    assert times(1) == pytest.approx([1.0, 1.75, 2.0, 2.25])
    assert times(4) == pytest.approx([2.0, 3.5, 4.0, 4.5])
    assert times.verify(1, 2) == pytest.approx([1.0, 1.25])


def test_all_lengths_of_a_batch_size_follow_a_slower_machine(times: RoundTimes) -> None:
    settle(times, 1, 4, 4.5)
    assert times(1) == pytest.approx([2.0, 3.5, 4.0, 4.5])
    assert times(4) == pytest.approx([2.0, 3.5, 4.0, 4.5])
    settle(times, 1, 4, 2.25)
    assert times(1) == pytest.approx([1.0, 1.75, 2.0, 2.25])


def test_trials_correct_their_own_length(times: RoundTimes) -> None:
    settle(times, 1, 4, 2.25)
    times.observe(1, 1, 1, 0.25, trial=True)
    assert times(1) == pytest.approx([0.25, 1.75, 2.0, 2.25])


def test_what_rounds_tell_of_a_length_holds_for_its_verification(times: RoundTimes) -> None:
    """Also in rounds that verify fewer tokens than they draft, and fewer tokens take no longer than more."""
    for _ in range(16):
        times.observe(1, 4, 4, 9.0, trial=True)
    assert times.verify(1, 4) == pytest.approx([1.0, 1.25, 1.5, 7.0])
    settle(times, 1, 1, 1.0)
    assert times.observe(1, 4, 2, 3.25, trial=False) == pytest.approx(2.0 + 1.25)
    for _ in range(32):
        times.observe(1, 4, 2, 6.5, trial=False)
    assert times.verify(1, 2) == pytest.approx([2.0, 2.5])
    for _ in range(16):
        times.observe(1, 4, 4, 2.25, trial=True)
    assert times.verify(1, 4) == pytest.approx([7 / 4] * 4)


@pytest.mark.parametrize("trial", [False, True])
def test_a_stall_is_no_usual_time(times: RoundTimes, trial: bool) -> None:
    settle(times, 1, 4, 2.25)
    assert times.observe(1, 2, 2, 300.0, trial) == pytest.approx(1.75)
    assert times(1) == pytest.approx([1.0, 1.75, 2.0, 2.25])
