"""The adaptive block length: on simulated pairs with known answers, and in the scheduler."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dflash_trt.decoding.draft import Draft
from dflash_trt.decoding.length import adaptive
from dflash_trt.decoding.length.adaptive import AdaptiveLength
from dflash_trt.decoding.length.policy import RoundDone
from dflash_trt.decoding.length.times import PassTimes
from dflash_trt.decoding.params import SamplingParams
from tests.doubles.pool import request
from tests.doubles.simulated_pairs import (
    BEGINNINGS,
    DRAFTS,
    HARD,
    LOADS,
    PAIRS,
    SAYINGS,
    VERIFY,
    constant,
    gpu,
    honest,
    prompts,
    small_drafter,
    turns,
    world,
)
from tests.doubles.simulation import World, done

HOPELESS = DRAFTS["hopeless"]


@pytest.mark.parametrize("verify", VERIFY)
def test_close_to_the_best_fixed_length_and_never_much_below_plain_decoding(verify: str) -> None:
    """Over 500 rounds from the start, so that the cost of learning counts."""
    for i, drafts in enumerate(DRAFTS, list(VERIFY).index(verify)):
        simulated = world(verify, drafts, list(PAIRS)[i % 2], seed=i % 2)
        assert simulated.compare(simulated.run(simulated.controller(), 500)).min() > 0.94, drafts


@pytest.mark.parametrize("beginning", BEGINNINGS)
def test_recovers_from_wrong_times(beginning: str) -> None:
    """Kept times wrong by up to four times, or times that change later: over 1,500 rounds, including learning.

    One of the six pairs for each; `python -m build_scripts.bench.adaptive_length` plays all.
    """
    names = HARD[list(BEGINNINGS).index(beginning) % len(HARD)]
    simulated = world(*names, beginning)
    ratios = simulated.compare(simulated.run(simulated.controller(), 1500))
    assert ratios[0] > 0.95, names
    assert ratios.min() > 0.92, names


@pytest.mark.parametrize(
    ("draft", "verify"),
    [
        ({2: 4.0, 4: 5.0, 8: 8.0}, {1: 1.0, 2: 1.03, 4: 1.09, 8: 1.21}),
        ({2: 0.3, 8: 0.3}, {1: 1.0, 2: 20.0, 4: 22.0, 8: 24.0}),
        ({2: 0.3, 8: 0.3}, {1: 1.0, 2: 1.03, 4: 1.09, 8: 24.0}),
        ({2: 6.0, 8: 6.0}, {1: 20.0, 2: 20.6, 4: 22.0, 8: 24.0}),
    ],
    ids=["drafts", "all drafted rows", "the longest", "all"],
)
def test_kept_times_that_are_far_too_long_are_forgotten_within_100_rounds(
    draft: dict[int, float], verify: dict[int, float]
) -> None:
    """In truth, drafts take 0.3 passes and are nearly always right."""
    pair = World(8, lambda batch, n: 1 + 0.03 * (n - 1), lambda batch, n: 0.3, constant(0.98))
    log = pair.run(AdaptiveLength(8, PassTimes(8, {1: draft}), PassTimes(8, {1: verify})), 200)
    tokens, seconds, _ = log[100:].sum(axis=0)
    assert tokens / seconds > 0.95 * pair.fixed(200)[0].max()


@pytest.mark.parametrize("beginning", ["length 1 a quarter", "length 8 four times"])
def test_wrong_times_do_not_cut_drafts_for_good(beginning: str) -> None:
    """Where the drafter's probabilities choose the rows, rounds and trials correct the time of each number of rows."""
    for names in (("dense_cpu", "good", "small"), ("gpu", "great", "large")):
        ratios = []
        for seed in range(2):
            simulated = world(*names, beginning, seed)
            simulated.said = SAYINGS["the truth"]
            ratios.append(simulated.compare(simulated.run(simulated.controller(), 1500)).min())
        assert np.mean(ratios) > 0.87, names


@pytest.fixture
def _no_hang() -> Iterator[None]:
    """Turn an endless search into an error. The limit is CPU time, so that load does not matter."""

    def late(*_: object) -> None:
        raise AssertionError("the controller hangs")

    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, 60)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.signal(signal.SIGPROF, before)


ANY_NUMBER = st.one_of(
    st.sampled_from(
        [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 5e-324, -5e-324, -1.0, 1e308, 1e-3, -0.1]
    ),
    st.floats(),
    st.floats(-8, 0),
)


@st.composite
def rounds(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "batch": draw(st.integers(0, 9)),
        "requests": draw(st.integers(0, 3)),
        "drafts": draw(st.integers(0, 5)),
        "draft_seconds": draw(ANY_NUMBER),
        "verify_seconds": draw(ANY_NUMBER),
        "right": draw(st.integers(0, 5)),
        "said": draw(ANY_NUMBER),
    }


def feed(policy: AdaptiveLength, seen: dict[str, Any]) -> None:
    """One round with these numbers, as the scheduler would report it."""
    batch, drafts, requests = seen["batch"], seen["drafts"], seen["requests"]
    active = [request([1], SamplingParams()) for _ in range(batch)]
    asked = policy.draft(active)
    assert 1 <= asked <= policy.block_size
    with np.errstate(over="ignore"):
        said = np.full((batch, drafts), seen["said"], np.float32)
    draft = Draft(np.zeros((batch, drafts + 1), int), None, said)
    slots = range(min(requests, batch))
    verified = policy.select(draft, active, slots, 1).nodes
    right = min(seen["right"], verified - 1)
    decided = [[0] * right + [1]] * len(slots)
    passes = seen["draft_seconds"], seen["verify_seconds"]
    policy.observe(RoundDone(active, draft, verified, slots, decided, *passes))


def one_round(seconds: float, right: int, drafts: int = 7) -> dict[str, Any]:
    """A round of one request, whose passes both take so long."""
    return {
        "batch": 1,
        "requests": 1,
        "drafts": drafts,
        "draft_seconds": seconds,
        "verify_seconds": seconds,
        "right": right,
        "said": -0.1,
    }


NAN_ROUND = one_round(float("nan"), right=0, drafts=5)


@pytest.mark.usefixtures("_no_hang")
@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.floats(1e-9, 1e9), min_size=12, max_size=12),
    st.lists(rounds(), max_size=12),
    st.lists(rounds(), max_size=3),
)
@example([1.0] * 12, [NAN_ROUND], [NAN_ROUND])
def test_no_numbers_stop_the_controller(
    start_up: list[float], some: list[dict[str, Any]], often: list[dict[str, Any]]
) -> None:
    """For any numbers of drafters and clocks in every round, each length is one of the block's."""
    draft, verify = (
        PassTimes(6, {1: dict(zip((2, 4, 6), a, strict=True)), 8: dict(zip((2, 4, 6), b, strict=True))})
        for a, b in ((start_up[:3], start_up[3:6]), (start_up[6:9], start_up[9:]))
    )
    policy = AdaptiveLength(6, draft, verify)
    for seen in [*some, *(20 * often)]:
        feed(policy, seen)
    assert 1 <= policy.draft([request([1], SamplingParams())]) <= 6


def test_the_first_pass_of_a_size_teaches_nothing() -> None:
    """Engines prepare a size when it first comes: only that pass takes many times as long."""
    for names in (("gpu", "great", "small"), ("dense_cpu", "good", "small"), ("gpu", "good", "large")):
        simulated = world(*names)
        simulated.cold = 20.0
        assert simulated.compare(simulated.run(simulated.controller(), 500)).min() > 0.95, names


def test_drafting_comes_back_when_it_pays_again() -> None:
    simulated = World(8, gpu, small_drafter, turns([HOPELESS, honest(3.0)], every=400))
    lengths = simulated.run(simulated.controller(), 800)[:, 2]
    assert (lengths[100:400] == 1).mean() > 0.9
    assert (lengths[500:] > 1).mean() > 0.9


@pytest.mark.parametrize("load", LOADS)
def test_a_shared_machine(load: str) -> None:
    """Stalls, drifts and busy periods, over 1,500 rounds from the start. The mean time counts, with all stalls.

    Two of the six pairs for each; `python -m build_scripts.bench.adaptive_length --loads` plays all.
    """
    speeds = []
    for names in HARD[list(LOADS).index(load) % 3 :: 3]:
        simulated = world(*names, load=load)
        ratios = simulated.compare(simulated.run(simulated.controller(), 1500))
        assert ratios[0] > 0.94, names
        speeds.append(ratios.min())
    assert np.mean(speeds) > 0.94, speeds


def test_trials_cost_one_round_in_a_hundred() -> None:
    """In worlds where no draft is ever right, and trials are expensive or cheap, after the first credit is spent."""
    for verify, pair in (("moe", "large"), ("gpu", "small")):
        simulated = world(verify, "hopeless", pair)
        policy = simulated.controller()
        simulated.run(policy, 500)
        later = simulated.compare(simulated.run(policy, 2500))
        assert 0.975 < later[0] < 1.0, (verify, pair)


def test_prompts_that_wait_are_part_of_what_a_trial_costs() -> None:
    """No draft is right, and the first of every so many rounds brings prompts that take the drafter 20 plain passes."""
    lost = 0.0
    for every in (30, 50, 80):
        policy = AdaptiveLength(8, PassTimes(8), PassTimes(8))
        active, waits = [request([1], SamplingParams())], False
        for i in range(4000):
            length, waits = policy.draft(active), waits or i % every == 0
            seconds = (0.5 + 20 * waits) * (length > 1)
            lost += seconds * (i >= 1000)
            seen = done(active, length, np.zeros((1, length - 1), int), [seconds, 1.0])
            policy.observe(replace(seen, read=100 * waits * (length > 1)))
            waits &= length == 1
    assert 0 < lost < 0.04 * 9000


def test_a_pass_that_reads_a_prompt_tells_no_usual_time() -> None:
    policy, active, usual = (
        AdaptiveLength(8, PassTimes(8), PassTimes(8)),
        [request([1], SamplingParams())],
        0.0,
    )
    for i in range(200):
        read, length = 100 * (i >= 100), policy.draft(active)
        seen = done(active, length, np.ones((1, length - 1), int), [20.0 if read else 0.5, 1.0])
        policy.observe(replace(seen, read=read))
        if i == 99:
            usual = policy.draft_times(1)[7]
    assert policy.draft_times(1)[7] == usual < 1


@pytest.mark.parametrize(("rows", "said"), [(0.17, None), (0.07, "the truth")])
@pytest.mark.parametrize("mean", [-3.0, -1.0, 0.3])
def test_hardly_any_request_loses_by_drafts(rows: float, mean: float, said: str | None) -> None:
    """Where drafts pay for some requests and not for others, those that they do not pay for soon go without."""
    speeds = prompts(rows, mean, count=24, said=said)
    assert (speeds < 0.97).sum() <= 1
    assert speeds.min() > 0.95
    assert speeds.max() > (1.05 if mean > 0 else 0.99)


def test_a_change_of_temperature_does_not_cost_the_next_requests() -> None:
    """The drafter says the same as of greedy requests, but its drafts are mostly wrong."""
    pair = World(8, lambda batch, n: 1 + 0.17 * (n - 1), lambda batch, n: 0.12 + 0.01 * n, honest(0.0))
    greedy, sampled = (1 / (1 + np.exp(-mean + 0.2 * np.arange(7))) for mean in (1.5, -1.5))
    pair.said = lambda chance: greedy[None, : chance.shape[1]]
    policy = pair.controller()
    assert pair.requests(policy, np.tile(greedy, (20, 1)))[-1] > 1.6
    assert min(pair.requests(policy, np.tile(sampled, (3, 1)), temperature=1.0)) > 0.93


@pytest.mark.parametrize("said", SAYINGS)
def test_whatever_the_drafter_says_of_its_drafts(said: str) -> None:
    """Over 500 rounds from the start. Fixed lengths verify whole drafts, so they can all be slower."""
    speeds = []
    for names in HARD:
        simulated = world(*names)
        simulated.said = SAYINGS[said]
        speeds.append(simulated.compare(simulated.run(simulated.controller(), 500)))
    assert min(each[0] for each in speeds) > 0.94
    assert np.mean([each.min() for each in speeds]) > 0.95, speeds


def test_only_drafts_that_are_worth_their_rows_are_verified() -> None:
    """Rows cost a fifth of a pass each. A draft that is sure is verified whole, others up to the first doubt."""
    policy = World(8, lambda batch, n: 0.8 + 0.2 * n, small_drafter, honest(0.0)).controller()
    said = np.log([[0.99] * 7, [0.9, 0.8, 0.02, 0.99, 0.99, 0.99, 0.99], [0.01] * 7]).astype(np.float32)
    tokens = np.arange(8)[None]
    active = [request([1], SamplingParams())]
    policy.draft(active)
    for row, nodes in zip(said, (8, 3, 1), strict=True):
        draft = policy.select(Draft(tokens, None, row[None]), active, [0], 1)
        assert draft.tokens.tolist() == [list(range(nodes))]
        assert draft.logprobs.shape == (1, nodes - 1)
    # On a device, waiting for the numbers costs more than it saves.
    on_device = Draft(tokens, None, torch.from_numpy(said[2:]))
    assert policy.select(on_device, active, [0], 1) is on_device
    assert policy.select(whole := Draft(tokens, None, said[2:]), active, [], 1) is whole


def test_a_share_of_many_requests_stands_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes, active = list[int](), [request([1], SamplingParams()) for _ in range(16)]
    said = np.log(np.full((16, 7), 0.7, np.float32))
    for counted in (16, 8, 4):
        monkeypatch.setattr(adaptive, "_COUNTED", counted)
        policy = World(8, lambda batch, n: 0.7 + 0.3 * n, small_drafter, honest(0.0), batch=16).controller()
        policy.draft(active)
        draft = Draft(np.zeros((16, 8), np.int64), None, said)
        nodes.append(policy.select(draft, active, range(16), 1).nodes)
    assert 1 < nodes[0] == nodes[1] == nodes[2] < 8


def test_the_smallest_block() -> None:
    simulated = World(2, gpu, small_drafter, honest(2.0))
    assert simulated.run(simulated.controller(), 100)[:, 2].mean() > 1.8


@pytest.mark.parametrize("kept", [False, True])
def test_times_that_were_not_kept(kept: bool) -> None:
    """Nothing was kept, or larger batches begin with the times of single requests."""
    for names in HARD[1::2]:
        simulated = replace(world(*names), batch=4, single=True, kept=kept)
        ratios = simulated.compare(simulated.run(simulated.controller(), 1500))
        assert ratios[0] > 0.95, names
        assert ratios.min() > 0.93, names
