"""The adaptive block length: on simulated pairs with known answers, and in the scheduler."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_trt.decoding.adaptive import AdaptiveLength
from dflash_trt.decoding.calibration import Calibration, log_odds
from dflash_trt.decoding.pass_times import PassTimes, measure
from dflash_trt.decoding.request import SamplingParams
from tests.fake_engines import BLOCK, Pool, expected, request
from tests.simulation import (
    World,
    biased,
    cliff,
    compute_bound,
    dense_cpu,
    gpu,
    honest,
    large_drafter,
    moe,
    small_drafter,
    turns,
    uninformative,
)

ROUNDS = 500
VERIFY = {"dense_cpu": dense_cpu, "gpu": gpu, "moe": moe, "compute_bound": compute_bound}
HOPELESS = biased(honest(2.0), -12.0)
DRAFTS = {
    "great": honest(3.0),
    "good": honest(1.5),
    "fading": honest(3.0, 1.0, decay=0.6),
    "poor": honest(-2.0),
    "hopeless": HOPELESS,
    "overconfident": biased(honest(2.0), -2.0),
    "underconfident": biased(honest(0.0), 2.0),
    "uninformative": uninformative(0.8),
    "cliff": cliff(3),
    "by turns": turns([honest(2.5), honest(-0.5)], every=60),
}


@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize("verify", VERIFY)
def test_close_to_the_best_fixed_length_and_never_much_below_plain_decoding(verify: str, drafts: str) -> None:
    """Over 500 rounds from the start, so what it takes to learn is counted."""
    for drafter, batch, block in ((small_drafter, 1, 8), (large_drafter, 4, 16)):
        speeds = []
        for seed in range(3):
            world = World(block, VERIFY[verify], drafter, DRAFTS[drafts], batch=batch, seed=seed)
            fixed = world.fixed(ROUNDS)
            tokens, seconds, _ = world.run(world.controller(), ROUNDS).sum(axis=0)
            assert tokens / seconds > 0.97 * fixed[0]
            speeds.append(tokens / seconds / fixed.max())
        assert np.mean(speeds) > 0.95, (drafter.__name__, batch, block, speeds)


def test_drafting_comes_back_when_it_pays_again() -> None:
    world = World(8, gpu, small_drafter, turns([HOPELESS, honest(3.0)], every=400))
    lengths = world.run(world.controller(), 800)[:, 2]
    assert (lengths[100:400] == 1).mean() > 0.9
    assert (lengths[500:] > 1).mean() > 0.9


def test_probes_grow_rare() -> None:
    world = World(8, moe, large_drafter, HOPELESS)
    drafted = list[int]()
    policy = world.controller()
    draft = policy.draft
    policy.draft = lambda batch: drafted.append(draft(batch)) or drafted[-1]  # type: ignore[method-assign,func-returns-value]
    world.run(policy, 2000)
    counts = [sum(n > 1 for n in drafted[i : i + 500]) for i in range(0, 2000, 500)]
    assert 0 < counts[-1] <= counts[0] < 25


def test_the_drafters_word_decides_how_much_of_a_block_is_verified() -> None:
    policy = World(8, dense_cpu, small_drafter, honest(2.0), noise=0.0).controller()
    lengths = []
    for sure in range(8):
        policy.draft(1)
        lengths.append(
            policy.verify(np.log(np.where(np.arange(7) < sure, 0.99, 0.02))[None].astype(np.float32))
        )
    assert lengths[0] == 1
    assert lengths == sorted(lengths)
    assert lengths[-1] == 8


def test_blocks_cut_short_by_a_budget() -> None:
    world = World(8, gpu, small_drafter, honest(2.0))
    policy = world.controller()
    rng = np.random.default_rng(0)
    for _ in range(200):
        drafted = min(policy.draft(3), int(rng.integers(1, 9)))
        said = np.log(rng.uniform(0.3, 0.99, (2, drafted - 1))).astype(np.float32)
        verified = policy.verify(said) if drafted > 1 else 1
        assert 1 <= verified <= drafted
        policy.observe(
            batch=3,
            drafted=drafted,
            verified=verified,
            accepted=rng.integers(0, verified, 2).tolist(),
            offered=[verified - 1, verified - 1],
            logprobs=said if drafted > 1 else None,
            draft_seconds=0.1,
            verify_seconds=1.0,
        )


class OnDevice:
    """What an engine's outputs are on a GPU: a shape, and numbers when somebody asks; the next pass overwrites them."""

    def __init__(self, memory: np.ndarray) -> None:
        self.memory, self.shape = memory, memory.shape

    def __array__(self, dtype: object = None, copy: bool | None = None) -> np.ndarray:
        return self.memory.copy() if copy else self.memory


def test_what_the_next_pass_overwrites_is_remembered() -> None:
    rng, memory = np.random.default_rng(2), np.zeros((2, 7), np.float32)
    policies = [World(8, gpu, small_drafter, honest(2.0)).controller() for _ in range(2)]
    for _ in range(100):
        said = np.log(rng.uniform(0.05, 0.99, (2, 7))).astype(np.float32)
        right = rng.random((2, 7)) < np.exp(said)
        memory[...] = said
        chosen = []
        for policy, given in zip(policies, (said, OnDevice(memory)), strict=True):
            policy.draft(2)
            chosen.append(policy.verify(given))  # type: ignore[arg-type]
            accepted = np.cumprod(right[:, : chosen[-1] - 1], axis=1).sum(axis=1).tolist()
            policy.observe(
                batch=2,
                drafted=8,
                verified=chosen[-1],
                accepted=accepted,
                offered=[chosen[-1] - 1] * 2,
                logprobs=given,  # type: ignore[arg-type]
                draft_seconds=0.2,
                verify_seconds=1.0,
            )
        assert chosen[0] == chosen[1]
    said = np.full((1, 7), 0.5)
    assert np.array_equal(*(policy._calibration.survival(said) for policy in policies))


def test_the_smallest_block() -> None:
    world = World(2, gpu, small_drafter, honest(2.0))
    assert world.run(world.controller(), 100)[:, 2].mean() > 1.8


def test_in_the_scheduler_tokens_are_those_of_plain_decoding() -> None:
    """And the drafter's rows are whole whenever it is on, which the pool checks at every step."""
    costs = PassTimes({1: {1: 1.0, 2: 1.2, BLOCK: 2.0}})
    for draft_cost in (0.01, 100.0):
        pool = Pool(3, 6)
        policy = AdaptiveLength(BLOCK, PassTimes({1: {2: draft_cost, BLOCK: draft_cost}}), costs)
        requests = [
            request([1 + i, 2, 3], SamplingParams(max_tokens=50, temperature=0.5 * (i % 2), seed=i))
            for i in range(9)
        ]
        for each in requests:
            pool.scheduler.submit(each)
        while not pool.scheduler.idle:
            pool.scheduler.step(policy)
            pool.check()
        for i, each in enumerate(requests):
            assert each.output[:50] == expected(each.prompt, each.params, i)


def test_pass_times_between_and_beyond_what_was_measured() -> None:
    times = PassTimes({1: {1: 1.0, 3: 2.0, 7: 4.0}, 4: {1: 3.0, 7: 15.0}})
    assert [times(1, n) for n in (1, 2, 3, 5, 7)] == [1.0, 1.5, 2.0, 3.0, 4.0]
    assert times(1, 9) == pytest.approx(5.0)
    assert times(2, 1) == pytest.approx(1 + 2 / 3)
    assert times(4, 4) == pytest.approx(9.0)
    assert times(8, 2) == pytest.approx(times(4, 4))


def test_pass_times_follow_the_machine() -> None:
    times = PassTimes({1: {1: 1.0, 4: 2.0}})
    for _ in range(200):
        times.observe(1, 4, 3.0)
    assert times(1, 4) == pytest.approx(3.0, rel=0.01)
    assert 1.0 < times(1, 1) < 1.5  # some of it is the moment's, and shared
    before = times(1, 4)
    times.observe(1, 4, 300.0)  # a hiccup
    assert times(1, 4) < 1.1 * before


def test_measuring_is_over_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, passes = [0.0], list[tuple[int, int]]()
    monkeypatch.setattr("dflash_trt.decoding.pass_times.perf_counter", lambda: clock[0])

    def run(batch: int, length: int) -> None:
        passes.append((batch, length))
        clock[0] += 0.12 * batch + 0.01 * length

    times = measure(run, [1, 2, 4], [1, 8])
    assert passes == [(1, 1), (1, 8), (4, 1), (4, 8)]  # no batch between, no pass twice
    assert times(1, 8) == pytest.approx(0.2)
    passes.clear()
    quick = measure(lambda b, n: clock.__setitem__(0, clock[0] + 1e-4 * n), [1, 2, 4], [1, 8])
    assert quick(2, 8) == pytest.approx(8e-4)


@pytest.mark.parametrize("truth", [-3.0, 0.0, 2.5])
def test_calibration_finds_the_chance_behind_what_is_said(truth: float) -> None:
    rng, calibration = np.random.default_rng(1), Calibration(3)
    said = np.full((1, 3), 1.5)
    chance = 1 / (1 + np.exp(-truth))
    for _ in range(600):
        right = rng.random(3) < chance
        accepted = int(np.cumprod(right).sum())
        calibration.observe(said, np.array([accepted]), np.array([3]), 1)
    assert calibration.survival(said)[0, 0] == pytest.approx(chance, abs=0.08)


def test_calibration_learns_where_a_block_ends() -> None:
    calibration = Calibration(5)
    said = np.full((1, 5), 2.0)
    for _ in range(60):
        calibration.observe(said, np.array([2]), np.array([5]), 1)
    survival = calibration.survival(said)[0]
    assert survival[1] > 0.75
    assert survival[2] < 0.15


def test_log_odds_of_certain_and_impossible_drafts_are_finite() -> None:
    x = log_odds(np.array([[0.0, -1e-9, -0.6931472, -50.0, -np.inf]], np.float32))
    assert x[0].tolist() == pytest.approx([6.0, 6.0, 0.0, -6.0, -6.0], abs=1e-5)
