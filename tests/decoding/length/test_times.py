"""The usual times of passes, followed while the engine runs, and what is kept of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_trt.decoding.length.adaptive import AdaptiveLength
from dflash_trt.decoding.length.choice import Policies
from dflash_trt.decoding.length.times import PassTimes
from dflash_trt.decoding.params import RequestOptions

KEPT = {1: {1: 1.0, 2: 1.25, 4: 1.75}, 4: {1: 2.0, 4: 3.5}}


def settle(times: PassTimes, batch: int, rows: int, seconds: float) -> None:
    for _ in range(33):
        times.observe(batch, rows, seconds, trial=False)


def test_passes_start_with_the_times_that_were_kept() -> None:
    times = PassTimes(6, KEPT)
    assert [times(1)[n] for n in (0, 1, 3)] == pytest.approx([1.0, 1.25, 1.75])
    assert [times(4)[n] for n in (0, 3)] == pytest.approx([2.0, 3.5])
    assert (np.diff(times(1)) >= 0).all()
    assert times(1)[3] < times(2)[3] < times(3)[3] <= times(4)[3] < times(8)[3]
    assert times.kept()[1] == pytest.approx(KEPT[1])


def test_kept_times_that_no_pass_has_are_not_taken() -> None:
    """A pass of more rows takes no less than one of fewer, and no longer than so many of those in turn."""
    times = PassTimes(8, {1: {1: 0.010, 2: 0.0104, 4: 29.0, 8: 0.0001}})
    assert times.kept()[1] == pytest.approx({1: 0.010, 2: 0.0104})


def test_without_kept_times_the_first_passes_tell_the_scale() -> None:
    """The first pass of a size is slower, and counts for nothing."""
    target = PassTimes(8)
    drafter = PassTimes(8, target=target)
    target.observe(1, 1, 5.0, trial=False)
    target.observe(1, 1, 0.04, trial=False)
    assert target(1)[0] == pytest.approx(0.04)
    assert 0.04 < target(1)[7] < 0.08
    assert 0 < drafter(1)[3] < 0.04
    for seconds in (1.0, 0.01):
        drafter.observe(1, 4, seconds, trial=False)
    assert drafter(1)[3] == pytest.approx(0.01)


def test_all_lengths_of_a_batch_size_follow_a_slower_machine() -> None:
    times = PassTimes(4, KEPT)
    settle(times, 1, 4, 3.5)
    assert [times(1)[n] for n in (0, 1, 3)] == pytest.approx([2.0, 2.5, 3.5])
    assert times(4)[0] == pytest.approx(2.0)
    settle(times, 1, 4, 1.75)
    assert [times(1)[n] for n in (0, 1, 3)] == pytest.approx([1.0, 1.25, 1.75])


def test_trials_correct_their_own_length_and_bound_others() -> None:
    times = PassTimes(4, KEPT)
    settle(times, 1, 1, 1.0)
    for _ in range(2):
        times.observe(1, 2, 1.6, trial=True)
    assert times(1) == pytest.approx([1.0, 1.6, 1.675, 1.75], rel=0.01)
    for _ in range(2):
        times.observe(1, 3, 3.0, trial=True)
    assert times(1)[:3] == pytest.approx([1.0, 1.6, 3.0], rel=0.01)
    assert times(1)[3] >= 3.0


def test_lengths_in_use_correct_each_other() -> None:
    """Drafts from the text come in some rounds and need no trial: what their passes took at first may be wrong."""
    times = PassTimes(4)
    settle(times, 1, 1, 1.0)
    settle(times, 1, 2, 1.1)
    for _ in range(40):
        for rows, seconds in ((1, 2.0), (2, 2.5), (1, 2.0)):
            times.observe(1, rows, seconds, trial=False)
    assert times(1)[:2] == pytest.approx([2.0, 2.5])


@pytest.mark.parametrize("trial", [False, True])
@pytest.mark.parametrize("nonsense", [300.0, float("nan"), -1.0, float("inf")])
def test_a_stall_and_nonsense_are_no_usual_time(trial: bool, nonsense: float) -> None:
    times = PassTimes(4, KEPT)
    for rows in (2, 4):
        settle(times, 1, rows, KEPT[1][rows])
    before = times(1)
    times.observe(1, 2, nonsense, trial)
    assert times(1) == pytest.approx(before)


def test_times_are_kept_for_the_next_process(tmp_path: Path) -> None:
    """A file that was changed by hand is no obstacle. Policies of one scheduler learn the same times."""
    place = tmp_path / "cache" / "times.json"
    policies = Policies(4, place)
    policies.keep()
    assert not place.exists()
    chains, trees = (policies(RequestOptions(tree_nodes=n), 16) for n in (0, None))
    assert isinstance(chains, AdaptiveLength)
    assert isinstance(trees, AdaptiveLength)
    assert chains is policies(RequestOptions(tree_nodes=0), 16) is not trees
    assert chains.verify_times is trees.verify_times
    settle(chains.verify_times, 1, 1, 0.25)
    policies.keep()
    again: Any = Policies(4, place)(RequestOptions(), 0)
    assert again.verify_times(1)[0] == pytest.approx(0.25)
    for wrong in ("{", "[]", json.dumps({"verify_seconds": {"1": {"1": -1}}, "draft_seconds": {}})):
        place.write_text(wrong)
        unknown: Any = Policies(4, place)(RequestOptions(), 0)
        assert unknown.verify_times.kept() == {}
