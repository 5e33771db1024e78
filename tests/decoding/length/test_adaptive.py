"""The adaptive block length: on simulated pairs with known answers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dflash_trt.decoding.draft import Draft
from dflash_trt.decoding.length.adaptive import AdaptiveLength
from dflash_trt.decoding.length.policy import RoundDone
from dflash_trt.decoding.length.times import PassTimes
from dflash_trt.decoding.params import SamplingParams
from tests.doubles.pool import request
from tests.doubles.simulated_pairs import (
    BEGINNINGS,
    CONFIDENCES,
    DRAFTS,
    HARD,
    LOADS,
    PAIRS,
    VERIFY,
    Kind,
    World,
    constant,
    done,
    gpu,
    honest,
    prompts,
    small_drafter,
    turns,
    world,
)


@pytest.mark.parametrize("verify", VERIFY)
def test_close_to_the_best_fixed_length_and_never_much_below_plain_decoding(verify: str) -> None:
    """Over 500 rounds from the start, so that the cost of learning counts."""
    for i, drafts in enumerate(DRAFTS, list(VERIFY).index(verify)):
        simulated = world(verify, drafts, list(PAIRS)[i % 2], seed=i % 2)
        assert simulated.compare(simulated.run(simulated.controller(), 500)).min() > 0.94, drafts


@pytest.mark.parametrize("name", [*BEGINNINGS, *LOADS])
def test_wrong_times_and_a_shared_machine(name: str) -> None:
    """Kept times wrong by up to four times, changes in the middle, stalls, drifts and busy periods, over 1,500 rounds
    from the start. The mean time counts, with all stalls.

    One of the six pairs for each; `python -m build_scripts.bench.adaptive_length` plays all.
    """
    names = HARD[[*BEGINNINGS, *LOADS].index(name) % len(HARD)]
    simulated = world(*names, **({"load": name} if name in LOADS else {"beginning": name}))
    ratios = simulated.compare(simulated.run(simulated.controller(), 1500))
    assert ratios[0] > 0.95, names
    assert ratios.min() > 0.92, names


@pytest.mark.parametrize(
    ("kind", "lengths"), [("draft", (2, 4, 8, 16)), ("draft", (8,)), ("verify", (1,)), ("verify", (4, 8))]
)
@pytest.mark.parametrize("factor", [1e-3, 1e3])
def test_kept_times_may_be_wrong_by_any_factor(kind: Kind, lengths: tuple[int, ...], factor: float) -> None:
    """Of all lengths or of some, of both kinds of pass: no run is much below plain decoding."""
    for names in HARD[::2]:
        simulated = world(*names)
        simulated.beginning = lambda rng, of, batch, n: factor if of == kind and n in lengths else 1.0
        ratios = simulated.compare(simulated.run(simulated.controller(), 800))
        assert ratios[0] > 0.95, names
        assert ratios.min() > 0.9, names


@pytest.mark.parametrize(("rows", "drafter"), [(1.0, 20.0), (20.0, 1.0), (20.0, 20.0)])
def test_kept_times_that_are_far_too_long_are_forgotten_within_100_rounds(
    rows: float, drafter: float
) -> None:
    """In truth, drafts take 0.3 passes and are nearly always right."""
    pair = World(8, lambda batch, n: 1 + 0.03 * (n - 1), lambda batch, n: 0.3, constant(0.98))
    kept = {n: (rows if n > 1 else 1.0) * pair.verify(1, n) for n in (1, 2, 4, 8)}
    draft = dict.fromkeys((2, 4, 8), drafter * 0.3)
    log = pair.run(AdaptiveLength(8, PassTimes(8, {1: draft}), PassTimes(8, {1: kept})), 200)
    tokens, seconds, _ = log[100:].sum(axis=0)
    assert tokens / seconds > 0.95 * pair.fixed(200)[0].max()


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
        "confidence": draw(ANY_NUMBER),
    }


def feed(policy: AdaptiveLength, seen: dict[str, Any]) -> None:
    """One round with these numbers, as the scheduler would report it."""
    batch, drafts, requests = seen["batch"], seen["drafts"], seen["requests"]
    active = [request([1], SamplingParams()) for _ in range(batch)]
    assert 1 <= policy.draft(active) <= policy.block_size
    with np.errstate(over="ignore"):
        confidence = np.full((batch, drafts), seen["confidence"], np.float32)
    draft = Draft(np.zeros((batch, drafts + 1), int), None, confidence)
    slots = range(min(requests, batch))
    verified = policy.select(draft, active, slots, 1).nodes
    right = min(seen["right"], verified - 1)
    decided = [[0] * right + [1]] * len(slots)
    passes = seen["draft_seconds"], seen["verify_seconds"]
    policy.observe(RoundDone(active, draft, verified, slots, decided, *passes))


NAN_ROUND = {"batch": 1, "requests": 1, "drafts": 5, "right": 0, "confidence": -0.1} | dict.fromkeys(
    ("draft_seconds", "verify_seconds"), float("nan")
)


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.floats(1e-9, 1e9), min_size=12, max_size=12),
    st.lists(rounds(), max_size=12),
    st.lists(rounds(), max_size=3),
)
@example([1.0] * 12, [NAN_ROUND], [NAN_ROUND])
def test_no_numbers_stop_the_controller(
    kept: list[float], some: list[dict[str, Any]], often: list[dict[str, Any]]
) -> None:
    """For any numbers of drafters and clocks in every round, each length is one of the block's."""
    draft, verify = (
        PassTimes(6, {1: dict(zip((2, 4, 6), a, strict=True)), 8: dict(zip((2, 4, 6), b, strict=True))})
        for a, b in ((kept[:3], kept[3:6]), (kept[6:9], kept[9:]))
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
    simulated = World(8, gpu, small_drafter, turns([DRAFTS["hopeless"], honest(3.0)], every=400))
    lengths = simulated.run(simulated.controller(), 800)[:, 2]
    assert (lengths[100:400] == 1).mean() > 0.9
    assert (lengths[500:] > 1).mean() > 0.9


def test_trials_cost_one_round_in_a_hundred() -> None:
    """In worlds where no draft is ever right, and trials are expensive or cheap, after the first credit is spent."""
    for verify, pair in (("moe", "large"), ("gpu", "small")):
        simulated = world(verify, "hopeless", pair)
        policy = simulated.controller()
        simulated.run(policy, 500)
        later = simulated.compare(simulated.run(policy, 2500))
        assert 0.975 < later[0] < 1.0, (verify, pair)


def test_prompts_that_wait_are_part_of_what_a_trial_costs() -> None:
    """No draft is right, and the first of every so many rounds brings prompts that take the drafter 20 plain passes.
    Such a pass tells no usual time.
    """
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
        assert policy.draft_times(1)[7] < 1
    assert 0 < lost < 0.04 * 9000


@pytest.mark.parametrize(("rows", "confidence"), [(0.17, None), (0.07, "the truth")])
@pytest.mark.parametrize("mean", [-1.0, 0.3])
def test_hardly_any_request_loses_by_drafts(rows: float, mean: float, confidence: str | None) -> None:
    """Where drafts pay for some requests and not for others, those that they do not pay for soon go without."""
    speeds = prompts(rows, mean, count=24, confidence=confidence)
    assert (speeds < 0.97).sum() <= 2
    assert speeds.min() > 0.94
    assert speeds.max() > (1.05 if mean > 0 else 0.99)


def test_a_change_of_temperature_does_not_cost_the_next_requests() -> None:
    """The drafter says the same as of greedy requests, but its drafts are mostly wrong."""
    pair = World(8, lambda batch, n: 1 + 0.17 * (n - 1), lambda batch, n: 0.12 + 0.01 * n, honest(0.0))
    greedy, sampled = (1 / (1 + np.exp(-mean + 0.2 * np.arange(7))) for mean in (1.5, -1.5))
    pair.confidence = lambda chance: greedy[None, : chance.shape[1]]
    policy = pair.controller()
    assert pair.requests(policy, np.tile(greedy, (20, 1)))[-1] > 1.6
    speeds = pair.requests(policy, np.tile(sampled, (4, 1)), temperature=1.0)
    assert min(speeds) > 0.88
    assert speeds[-1] > 0.95


@pytest.mark.parametrize("confidence", CONFIDENCES)
def test_whatever_the_drafter_says_of_its_drafts(confidence: str) -> None:
    """Over 500 rounds from the start. Fixed lengths verify whole drafts, so they can all be slower."""
    speeds = []
    for names in HARD:
        simulated = world(*names)
        simulated.confidence = CONFIDENCES[confidence]
        speeds.append(simulated.compare(simulated.run(simulated.controller(), 500)))
    assert min(ratios[0] for ratios in speeds) > 0.95
    assert np.mean([ratios.min() for ratios in speeds]) > 0.94, speeds


def test_only_drafts_that_are_worth_their_rows_are_verified() -> None:
    """Rows cost a fifth of a pass each. A draft that is sure is verified whole, others up to the first doubt."""
    policy = World(8, lambda batch, n: 0.8 + 0.2 * n, small_drafter, honest(0.0)).controller()
    confidence = np.log([[0.99] * 7, [0.9, 0.8, 0.02, 0.99, 0.99, 0.99, 0.99], [0.01] * 7]).astype(np.float32)
    tokens, active = np.arange(8)[None], [request([1], SamplingParams())]
    policy.draft(active)
    for row, nodes in zip(confidence, (8, 3, 1), strict=True):
        draft = policy.select(Draft(tokens, None, row[None]), active, [0], 1)
        assert draft.tokens.tolist() == [list(range(nodes))]
    # On a device, waiting for the numbers costs more than it saves.
    on_device = Draft(tokens, None, torch.from_numpy(confidence[2:]))
    assert policy.select(on_device, active, [0], 1) is on_device
    assert policy.select(whole := Draft(tokens, None, confidence[2:]), active, [], 1) is whole


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
