"""A simulated pair: pass times and right drafts come from processes with known answers; and those that are played."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from math import exp
from typing import Any, Literal

import numpy as np
import torch

from dflash_trt.decoding.draft import Draft
from dflash_trt.decoding.length.adaptive import AdaptiveLength
from dflash_trt.decoding.length.policy import RoundDone
from dflash_trt.decoding.length.times import PassTimes
from dflash_trt.decoding.params import SamplingParams
from dflash_trt.decoding.request import Request
from tests.doubles.pool import request

Cost = Callable[[int, int], float]


# The time that each token the drafter still has to read adds to its pass.
CATCH_UP = 0.01


Kind = Literal["draft", "verify"]


# Assumed cost of a pass at start-up, relative to its real cost: of (random numbers, kind, batch, length).
Beginning = Callable[[np.random.Generator, Kind, int, int], float]


# Cost of a pass from the middle of a run on, relative to its earlier cost: of (kind, batch, length).
Drift = Callable[[Kind, int, int], float]


# For a round: the chance of each draft [requests, drafts] to be right, given the earlier ones.
Drafts = Callable[[np.random.Generator, int, int, int], np.ndarray]


@dataclass(frozen=True)
class Load:
    """What other programs do to the times. Each is a function of the share of the run that is over.

    share, stall: the share of rounds that stall, and for how many plain passes.
    slower: the factor of (kind, length) on each pass.
    quota: work and pause of a processor quota, in plain passes: after so much work everything pauses for so long.
    """

    share: Callable[[float], float] = lambda at: 0.0
    stall: float = 0.0
    slower: Callable[[float, Kind, int], float] = lambda at, kind, length: 1.0
    quota: tuple[float, float] = (1.0, 0.0)


def as_measured(rng: np.random.Generator, kind: Kind, batch: int, length: int) -> float:
    return 1.0


def steady(kind: Kind, batch: int, length: int) -> float:
    return 1.0


@dataclass
class World:
    """Times in units of a plain pass of one request. `noise`: standard deviation of the logarithm of each pass's
    time.

    confidence: what the drafter says of the chance of each draft, if the host can read it.
    """

    block: int
    verify: Cost
    draft: Cost
    drafts: Drafts
    batch: int = 1
    noise: float = 0.05
    seed: int = 0
    beginning: Beginning = as_measured
    drift: Drift = steady
    cold: float = 1.0  # time of the first pass of a size that start-up did not run, relative to later ones
    single: bool = False  # kept times are of single requests only
    kept: bool = True  # whether an earlier process kept times
    load: Load = field(default_factory=Load)
    confidence: Callable[[np.ndarray], np.ndarray] | None = None
    rng: np.random.Generator = field(init=False)

    active: list[Request] = field(init=False)

    def __post_init__(self) -> None:
        self.active = [request([1], SamplingParams()) for _ in range(self.batch)]
        self.rng = np.random.default_rng(self.seed)

    def cost(self, kind: Kind, length: int, at: float = 0.0) -> float:
        """The time of a pass without stalls, after a share `at` of the run."""
        seconds = (self.verify if kind == "verify" else self.draft)(self.batch, length)
        return (
            seconds
            * self.load.slower(at, kind, length)
            * (self.drift(kind, self.batch, length) if at >= 0.5 else 1.0)
        )

    def with_stalls(self, seconds: float, at: float) -> float:
        """The expected time of a round whose passes take so long."""
        work, pause = self.load.quota
        return seconds * (1 + pause / work) + self.load.share(at) * self.load.stall * self.verify(
            self.batch, 1
        )

    def lengths(self) -> list[int]:
        """The lengths measured at start-up."""
        return sorted({n for n in (1, 2, 4, 8, 16, self.block) if n <= self.block})

    def timed(self, seconds: float) -> float:
        return seconds * exp(self.noise * self.rng.normal())

    def _at_start(self, seconds: float, batch: int) -> float:
        share, (work, pause) = self.load.share(0.0), self.load.quota
        plain = self.verify(batch, 1)
        stall = self.load.stall * (share > 0 and self.rng.random() < share)
        return seconds + plain * (stall + pause * (pause > 0 and self.rng.random() < seconds / plain / work))

    def start_up(self, kind: Kind) -> PassTimes:
        """The kept times of an earlier process, with their errors."""
        cost = self.verify if kind == "verify" else self.draft
        batches = sorted({1, 2, 4, self.batch})
        return PassTimes(
            self.block,
            {
                b: {
                    n: min(self.timed(self._at_start(cost(b, n), b)) for _ in range(3))
                    * self.beginning(self.rng, kind, b, n)
                    for n in self.lengths()
                    if kind == "verify" or n > 1
                }
                for b in (batches[:1] if self.single else batches)
            }
            if self.kept
            else None,
        )

    def controller(self) -> AdaptiveLength:
        return AdaptiveLength(self.block, self.start_up("draft"), self.start_up("verify"))

    def run(self, policy: AdaptiveLength, rounds: int) -> np.ndarray:
        """[rounds, 3]: expected tokens of the chosen length, true seconds, length."""
        log = np.zeros((rounds, 3))
        behind, warm = 0, {(kind, n) for kind in ("draft", "verify") for n in self.lengths()}
        plain, (quota, pause), worked = self.verify(self.batch, 1), self.load.quota, 0.0
        for i in range(rounds):
            at = i / rounds
            chance = self.drafts(self.rng, i, self.batch, self.block - 1)
            drafted, verified = self.choose(policy, chance)
            right = self.rng.random((self.batch, drafted - 1)) < chance[:, : drafted - 1]
            draft_seconds = 0.0
            if drafted > 1:  # it also reads the tokens committed since its last pass
                draft_seconds, behind = self.cost("draft", drafted, at) * (1 + CATCH_UP * behind), 0
            else:
                behind += 1
            verify_seconds = self.cost("verify", verified, at)
            cold = [
                1.0 if shape in warm else self.cold for shape in (("draft", drafted), ("verify", verified))
            ]
            warm |= {("draft", drafted), ("verify", verified)}
            true = draft_seconds + verify_seconds
            worked += true / plain
            stall = plain * pause * (worked // quota)
            worked %= quota
            if self.rng.random() < self.load.share(at):
                stall += plain * self.load.stall
            stalled = self.rng.random() * true < draft_seconds  # which of the passes
            passes = [
                cold[0] * self.timed(draft_seconds) + stall * stalled if drafted > 1 else 0.0,
                cold[1] * self.timed(verify_seconds) + stall * (not stalled),
            ]
            policy.observe(done(self.active, verified, right, passes))
            tokens = self.batch + chance[:, : verified - 1].cumprod(axis=1).sum()
            log[i] = tokens, self.with_stalls(true, at), drafted
        return log

    def choose(self, policy: AdaptiveLength, chance: np.ndarray) -> tuple[int, int]:
        """The drafted and the verified tokens of a round whose drafts have this chance [requests, drafts]."""
        drafted, batch = policy.draft(self.active), len(chance)
        odds: Any = torch.zeros((batch, drafted - 1))
        if self.confidence is not None:
            odds = np.log(self.confidence(chance[:, : drafted - 1])).astype(np.float32)
        draft = Draft(np.zeros((batch, drafted), np.int64), None, odds)
        return drafted, policy.select(draft, self.active, range(batch), 1).nodes

    def requests(
        self, policy: AdaptiveLength, chances: np.ndarray, tokens: int = 128, temperature: float = 0.0
    ) -> list[float]:
        """The speed of requests of so many tokens, one after the other, relative to plain decoding.

        chances: of each request's drafts [requests, drafts]. `drafts`, loads and catching up play no part.
        """
        speeds = []
        for chance in chances:
            self.active = [request([1], SamplingParams(temperature=temperature))]
            tokens_done = seconds = 0.0
            while tokens_done < tokens:
                drafted, verified = self.choose(policy, chance[None])
                right = self.rng.random((1, drafted - 1)) < chance[: drafted - 1]
                costs = [self.cost("draft", drafted) if drafted > 1 else 0.0, self.cost("verify", verified)]
                tokens_done += 1 + chance[: verified - 1].cumprod().sum()
                seconds += sum(costs)
                passes, ended = [*map(self.timed, costs)], int(tokens_done >= tokens)
                policy.observe(done(self.active, verified, right, passes, ended))
            speeds.append(tokens_done * self.cost("verify", 1) / seconds)
        return speeds

    def fixed(self, rounds: int) -> np.ndarray:
        """Expected tokens per second of every fixed length over the same rounds, in each part of the run.

        [_PARTS, block]; index 0 is plain decoding.
        """
        tokens = _fixed_tokens(self.drafts, self.batch, self.block, self.seed + 1, rounds)
        seconds = np.zeros((_PARTS, self.block))
        for part in range(_PARTS):
            for length in range(1, self.block + 1):
                for at in (part + np.arange(_POINTS) / _POINTS) / _PARTS:
                    passes = self.cost("verify", length, at) + (length > 1) * self.cost("draft", length, at)
                    seconds[part, length - 1] += self.with_stalls(passes, at) / _POINTS
        rates: np.ndarray = np.array(tokens) / seconds
        return rates

    def compare(self, log: np.ndarray, since: int = 0) -> np.ndarray:
        """The speed of a run, relative to that of each fixed length for the same tokens, without its first parts."""
        parts = np.array_split(log, _PARTS)[since:]
        tokens = np.array([part[:, 0].sum() for part in parts])
        ratios: np.ndarray = (tokens[:, None] / self.fixed(len(log))[since:]).sum(axis=0) / sum(
            part[:, 1].sum() for part in parts
        )
        return ratios


def done(
    active: list[Request], verified: int, right: np.ndarray, passes: list[float], ended: int = 0
) -> RoundDone:
    """The report on a round of drafts of the token 0, of which these [requests, drafts] are right."""
    drafted = right.shape[1] + 1
    proposed = Draft(np.zeros((len(active), drafted), np.int64), None, np.zeros((len(active), drafted - 1)))
    decided = []
    for accepted, row in zip(right[:, : verified - 1].cumprod(axis=1).sum(axis=1), right, strict=True):
        decided.append([0] * accepted + [0 if accepted < drafted - 1 and row[accepted] else 1])
    return RoundDone(active, proposed, verified, range(len(active)), decided, *passes, ended=ended)


# A run is compared in equal parts, because the best length may change. Their times are means over some points.
_PARTS, _POINTS = 10, 30


@cache
def _fixed_tokens(
    drafts: Drafts, batch: int, block: int, seed: int, rounds: int
) -> tuple[tuple[float, ...], ...]:
    """Expected tokens per round of every fixed length, in each part of the rounds."""
    rng, tokens = np.random.default_rng(seed), []
    for part in np.array_split(np.arange(rounds), _PARTS):
        later = np.zeros(block)
        for i in part:
            later[1:] += drafts(rng, int(i), batch, block - 1).cumprod(axis=1).sum(axis=0).cumsum()
        tokens.append(tuple(batch + later / len(part)))
    return tuple(tokens)


def dense_cpu(batch: int, length: int) -> float:
    """Rows cost time: a pass of 8 takes 1.6 passes of one."""
    return 0.9 + 0.1 * batch * length


def gpu(batch: int, length: int) -> float:
    """Memory-bound up to some hundred rows."""
    return 1.0 + 0.01 * batch + max(0.0, 0.01 * (batch * length - 128))


def moe(batch: int, length: int) -> float:
    """Each row reads 4 of 32 experts. A pass costs the distinct ones."""
    return 0.3 + 0.7 * (1 - (1 - 4 / 32) ** (batch * length)) / (4 / 32) + 0.01 * batch * length


def compute_bound(batch: int, length: int) -> float:
    return 0.2 + 0.8 * batch * length


def small_drafter(batch: int, length: int) -> float:
    return 0.15 + 0.012 * batch * length


def large_drafter(batch: int, length: int) -> float:
    return 0.6 + 0.05 * batch * length


def _chance(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def honest(mean: float, spread: float = 1.5, decay: float = 0.0) -> Drafts:
    """Chances whose log-odds have this mean and spread, and fall by `decay` per position."""

    def drafts(rng: np.random.Generator, _: int, batch: int, n: int) -> np.ndarray:
        return _chance(mean - decay * np.arange(n) + spread * rng.normal(size=(batch, n)))

    return drafts


def constant(chance: float) -> Drafts:
    """Every draft has the same chance."""
    return lambda rng, i, batch, n: np.full((batch, n), chance)


def cliff(good: int, high: float = 0.92, low: float = 0.05) -> Drafts:
    """The first `good` drafts are mostly right, later ones hardly ever."""
    return lambda rng, i, batch, n: np.tile(np.where(np.arange(n) < good, high, low), (batch, 1))


def turns(sources: list[Drafts], every: int) -> Drafts:
    """One process after the other, each for a number of rounds."""

    def drafts(rng: np.random.Generator, i: int, batch: int, n: int) -> np.ndarray:
        return sources[i // every % len(sources)](rng, i, batch, n)

    return drafts


VERIFY: dict[str, Cost] = {"dense_cpu": dense_cpu, "gpu": gpu, "moe": moe, "compute_bound": compute_bound}


DRAFTS: dict[str, Drafts] = {
    "great": honest(3.0),
    "good": honest(1.5),
    "fading": honest(3.0, 1.0, decay=0.6),
    "poor": honest(-2.0),
    "hopeless": honest(-10.0),
    "even": honest(0.0),
    "constant": constant(0.8),
    "cliff": cliff(3),
    "by turns": turns([honest(2.5), honest(-0.5)], every=60),
}


# Drafter, batch size and block size.
PAIRS: dict[str, tuple[Cost, int, int]] = {"small": (small_drafter, 1, 8), "large": (large_drafter, 4, 16)}


# The worlds in which wrong times harm most: one for each kind of target and of drafter.
HARD: list[tuple[str, str, str]] = [
    ("moe", "cliff", "small"), ("moe", "even", "large"), ("dense_cpu", "hopeless", "large"),
    ("dense_cpu", "good", "small"), ("gpu", "great", "large"), ("compute_bound", "poor", "small"),
]  # fmt: skip


def each_by_its_own_factor(rng: np.random.Generator, kind: Kind, batch: int, length: int) -> float:
    return float(4 ** rng.uniform(-1, 1))


def all_by(draft: float, verify: float) -> Beginning:
    return lambda rng, kind, batch, length: draft if kind == "draft" else verify


def one_length_by(wrong: int, factor: float) -> Beginning:
    return lambda rng, kind, batch, length: factor if kind == "verify" and length == wrong else 1.0


# The errors at start-up, and the changes in the middle.
BEGINNINGS: dict[str, tuple[Beginning, Drift]] = {
    "right": (as_measured, steady),
    "all a quarter": (all_by(0.25, 0.25), steady),
    "all four times": (all_by(4, 4), steady),
    "drafter four times": (all_by(4, 1), steady),
    "drafter a quarter": (all_by(0.25, 1), steady),
    "target a quarter, drafter four times": (all_by(4, 0.25), steady),
    "each by its own factor": (each_by_its_own_factor, steady),
    "length 1 four times": (one_length_by(1, 4), steady),
    "length 1 a quarter": (one_length_by(1, 0.25), steady),
    "length 4 a quarter": (one_length_by(4, 0.25), steady),
    "length 8 four times": (one_length_by(8, 4), steady),
    "all three times from the middle": (as_measured, lambda kind, batch, length: 3.0),
    "drafter four times from the middle": (
        as_measured,
        lambda kind, batch, length: 4.0 if kind == "draft" else 1.0,
    ),
    "drafter a quarter from the middle": (
        as_measured,
        lambda kind, batch, length: 0.25 if kind == "draft" else 1.0,
    ),
    "more than 1 row twice from the middle": (
        as_measured,
        lambda kind, batch, length: 2.0 if kind == "verify" and length > 1 else 1.0,
    ),
}


def _stalls(share: float, passes: float) -> Load:
    return Load(share=lambda at: share, stall=passes)


def _busy(at: float) -> bool:
    """The second and the fourth fifth of a run."""
    return int(5 * at) % 2 == 1


def _slow_waves(at: float, kind: Kind, length: int) -> float:
    """From 1 to 3 and back, twice."""
    return float(2 - np.cos(4 * np.pi * at))


def _rows_dearer(at: float, kind: Kind, length: int) -> float:
    """Cores are lost little by little: more rows take up to twice as long, and one row as long as before."""
    return 1 + at * (1 - 1 / length)


# Loads of a machine that is shared, and how they change.
LOADS: dict[str, Load] = {
    "none": Load(),
    "stalls of 3 passes in 10% of rounds": _stalls(0.1, 3),
    "stalls of 10 passes in 30% of rounds": _stalls(0.3, 10),
    "stalls of 30 passes in 3% of rounds": _stalls(0.03, 30),
    "slow waves of a factor 3": Load(slower=_slow_waves),
    "more rows slowly take twice as long": Load(slower=_rows_dearer),
    "busy periods: twice as slow": Load(slower=lambda at, kind, length: 2.0 if _busy(at) else 1.0),
    "busy periods: drafter 4 times as slow": Load(
        slower=lambda at, kind, length: 4.0 if _busy(at) and kind == "draft" else 1.0
    ),
    "busy periods: stalls of 10 passes in 30% of rounds": Load(
        share=lambda at: 0.3 if _busy(at) else 0.0, stall=10
    ),
    "waves and stalls": Load(share=lambda at: 0.2, stall=5, slower=_slow_waves),
    "quota: 10 passes of pause after 10 of work": Load(quota=(10, 10)),
}


def world(
    verify: str, drafts: str, pair: str, beginning: str = "right", seed: int = 0, load: str = "none"
) -> World:
    """One of the worlds above, by its names."""
    drafter, batch, block = PAIRS[pair]
    wrong, drift = BEGINNINGS[beginning]
    return World(
        block, VERIFY[verify], drafter, DRAFTS[drafts], batch=batch, seed=seed, beginning=wrong, drift=drift,
        load=LOADS[load],
    )  # fmt: skip


# What drafters may say of the chance of a draft.
CONFIDENCES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "the truth": lambda chance: chance,
    "too much": lambda chance: chance**0.25,
    "too little": lambda chance: chance**3,
    "always the same": lambda chance: np.full_like(chance, 0.9),
    "the opposite": lambda chance: 1 - chance,
}


def prompts(
    rows: float, mean: float, seed: int = 0, count: int = 40, confidence: str | None = None
) -> np.ndarray:
    """The median speed of each of `count` requests over three turns, relative to plain decoding, on a CPU's integers.

    rows: what each row after the first adds to a pass, in plain passes. mean: of the log-odds of the first drafts,
    which have a standard deviation of 0.8 between requests, and fall by 0.35 per place. confidence: see World.
    """
    pair = World(
        8, lambda batch, n: 1 + rows * (n - 1), lambda batch, n: 0.12 + 0.01 * n, constant(0), seed=seed
    )
    pair.confidence = CONFIDENCES[confidence] if confidence else None
    odds = mean + 0.8 * pair.rng.normal(size=count)
    chances, policy = _chance(odds[:, None] - 0.35 * np.arange(7)), pair.controller()
    medians: np.ndarray = np.median([pair.requests(policy, chances) for _ in range(3)], axis=0)
    return medians
