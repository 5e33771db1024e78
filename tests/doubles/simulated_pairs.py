"""The pairs that are simulated: what passes cost, what drafts are right, and what other programs do to the times."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.doubles.simulation import Beginning, Cost, Drafts, Drift, Kind, Load, World, as_measured, steady


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
SAYINGS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "the truth": lambda chance: chance,
    "too much": lambda chance: chance**0.25,
    "too little": lambda chance: chance**3,
    "always the same": lambda chance: np.full_like(chance, 0.9),
    "the opposite": lambda chance: 1 - chance,
}


def prompts(rows: float, mean: float, seed: int = 0, count: int = 40, said: str | None = None) -> np.ndarray:
    """The median speed of each of `count` requests over three turns, relative to plain decoding, on a CPU's integers.

    rows: what each row after the first adds to a pass, in plain passes. mean: of the log-odds of the first drafts,
    which have a standard deviation of 0.8 between requests, and fall by 0.35 per place. said: what the drafter says.
    """
    pair = World(
        8, lambda batch, n: 1 + rows * (n - 1), lambda batch, n: 0.12 + 0.01 * n, constant(0), seed=seed
    )
    pair.said = SAYINGS[said] if said else None
    odds = mean + 0.8 * pair.rng.normal(size=count)
    chances, policy = _chance(odds[:, None] - 0.35 * np.arange(7)), pair.controller()
    medians: np.ndarray = np.median([pair.requests(policy, chances) for _ in range(3)], axis=0)
    return medians
