"""The times of passes, measured at start-up."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_trt.decoding.length.pass_times import PassTimes, measure


def test_pass_times_between_what_was_measured() -> None:
    times = PassTimes({1: {1: 1.0, 3: 2.0, 7: 4.0}, 4: {1: 3.0, 7: 15.0}}, [1, 2, 4])
    assert times(1) == pytest.approx([1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0])
    assert times(4) == pytest.approx([3, 5, 7, 9, 11, 13, 15])
    assert times(2)[0] == pytest.approx(1 + 2 / 3)
    assert times(2)[0] < times(3)[0] < times(4)[0]
    assert times(64) == pytest.approx(16 * times(4))


def test_large_passes_are_not_run_but_follow_from_smaller_ones() -> None:
    ran = set[tuple[int, int]]()
    times = measure(lambda batch, length: ran.add((batch, length)), [1, 8, 32, 300], [1, 2, 4, 200], 128)
    assert ran == {(1, 1), (1, 2), (1, 4), (1, 200), (8, 1), (8, 2), (8, 4), (32, 1), (32, 2), (32, 4)}
    assert times.warm == ran
    assert times(32)[7] == pytest.approx(2 * times(32)[3])
    assert times(64)[3] == pytest.approx(2 * times(32)[3])


@pytest.mark.parametrize("seconds", [0.0003, 0.045, 0.3])
def test_start_up_times_are_those_of_warm_passes(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """The first pass of each shape takes twenty times as long. Length 1 is measured like the others."""
    clock, seen = [0.0], set[tuple[int, int]]()
    monkeypatch.setattr("dflash_trt.decoding.length.pass_times.perf_counter", lambda: clock[0])

    def run(batch: int, length: int) -> None:
        warm = (batch, length) in seen
        seen.add((batch, length))
        clock[0] += seconds * (1 + length / 16) * (1 if warm else 20)

    times = measure(run, [1, 2, 4], [1, 2, 8])
    assert times(1)[[0, 1, 7]] == pytest.approx(seconds * np.array([1 + 1 / 16, 1 + 1 / 8, 1.5]))
    assert clock[0] < 1.0 + 90 * 1.5 * seconds


def test_a_busy_moment_of_start_up_meets_all_lengths_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, passes = [0.0], [0]
    monkeypatch.setattr("dflash_trt.decoding.length.pass_times.perf_counter", lambda: clock[0])

    def run(batch: int, length: int) -> None:
        passes[0] += 1
        busy = 8 <= passes[0] < 14
        clock[0] += 0.01 * (4 if busy else 1)

    times = measure(run, [1], [1, 2, 4, 8])
    assert times(1) == pytest.approx(np.full(8, 0.01))
