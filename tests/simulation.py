"""A simulated pair: what passes take and whether drafts are right, by processes with known answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from dflash_trt.decoding.adaptive import AdaptiveLength
from dflash_trt.decoding.pass_times import PassTimes

Cost = Callable[[int, int], float]
# The true chance of each draft [requests, drafts], given those before it, and what the drafter says of it, for a round.
Drafts = Callable[[np.random.Generator, int, int, int], tuple[np.ndarray, np.ndarray]]


@dataclass
class World:
    """Times in units of a plain pass of one request. `noise`: of each pass, standard deviation of the logarithm."""

    block: int
    verify: Cost
    draft: Cost
    drafts: Drafts
    batch: int = 1
    noise: float = 0.05
    seed: int = 0
    rng: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)

    def timed(self, seconds: float) -> float:
        return seconds * float(np.exp(self.noise * self.rng.normal()))

    def start_up(self, cost: Cost) -> PassTimes:
        lengths = sorted({1, 2, 4, self.block})
        batches = sorted({1, 2, 4, self.batch})
        return PassTimes(
            {b: {n: median(self.timed(cost(b, n)) for _ in range(3)) for n in lengths} for b in batches}
        )

    def controller(self) -> AdaptiveLength:
        return AdaptiveLength(self.block, self.start_up(self.draft), self.start_up(self.verify))

    def run(self, policy: AdaptiveLength, rounds: int) -> np.ndarray:
        """[rounds, 3]: tokens that the choice was good for on average, true seconds, tokens verified per request."""
        log, memory = np.zeros((rounds, 3)), np.zeros((self.batch, self.block - 1), np.float32)
        for i in range(rounds):
            chance, logprobs = self.drafts(self.rng, i, self.batch, self.block - 1)
            drafted = policy.draft(self.batch)
            verified, said = 1, None
            if drafted > 1:
                said = memory[:, : drafted - 1]  # as an engine's output: the next round overwrites it
                said[...] = logprobs[:, : drafted - 1]
                verified = policy.verify(said)
            right = self.rng.random((self.batch, verified - 1)) < chance[:, : verified - 1]
            accepted = np.cumprod(right, axis=1).sum(axis=1)
            draft_seconds = self.draft(self.batch, drafted) if drafted > 1 else 0.0
            verify_seconds = self.verify(self.batch, verified)
            policy.observe(
                batch=self.batch,
                drafted=drafted,
                verified=verified,
                accepted=accepted.tolist(),
                offered=[verified - 1] * self.batch,
                logprobs=said,
                draft_seconds=self.timed(draft_seconds) if drafted > 1 else 0.0,
                verify_seconds=self.timed(verify_seconds),
            )
            tokens = self.batch + np.cumprod(chance[:, : verified - 1], axis=1).sum()
            log[i] = tokens, draft_seconds + verify_seconds, verified
        return log

    def fixed(self, rounds: int) -> np.ndarray:
        """Expected tokens per second of every fixed length over the same rounds: [block], index 0 is plain decoding."""
        rng = np.random.default_rng(self.seed + 1)
        tokens = np.zeros(self.block)
        for i in range(rounds):
            chance, _ = self.drafts(rng, i, self.batch, self.block - 1)
            tokens += self.batch + np.append(0.0, np.cumprod(chance, axis=1).sum(axis=0).cumsum())
        seconds = [self.verify(self.batch, 1)]
        seconds += [self.verify(self.batch, n) + self.draft(self.batch, n) for n in range(2, self.block + 1)]
        rates: np.ndarray = tokens / (rounds * np.array(seconds))
        return rates


def dense_cpu(batch: int, length: int) -> float:
    """Rows cost: a pass of 8 takes 1.6 passes of one."""
    return 0.9 + 0.1 * batch * length


def gpu(batch: int, length: int) -> float:
    """Memory-bound up to some hundred rows."""
    return 1.0 + 0.01 * batch + max(0.0, 0.01 * (batch * length - 128))


def moe(batch: int, length: int) -> float:
    """Each row reads 4 of 32 experts: the distinct ones are what a pass costs."""
    return 0.3 + 0.7 * (1 - (1 - 4 / 32) ** (batch * length)) / (4 / 32) + 0.01 * batch * length


def compute_bound(batch: int, length: int) -> float:
    return 0.2 + 0.8 * batch * length


def small_drafter(batch: int, length: int) -> float:
    return 0.15 + 0.012 * batch * length


def large_drafter(batch: int, length: int) -> float:
    return 0.6 + 0.05 * batch * length


def _odds(p: np.ndarray) -> np.ndarray:
    return np.log(p / (1 - p))


def _chance(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def honest(mean: float, spread: float = 1.5, decay: float = 0.0) -> Drafts:
    """The drafter's word is the chance. `mean` and `spread` in log-odds; `decay` per place."""

    def drafts(rng: np.random.Generator, _: int, batch: int, n: int) -> tuple[np.ndarray, np.ndarray]:
        chance = _chance(mean - decay * np.arange(n) + spread * rng.normal(size=(batch, n)))
        return chance, np.log(chance).astype(np.float32)

    return drafts


def biased(source: Drafts, offset: float) -> Drafts:
    """The chance is what the drafter says, moved by `offset` in log-odds."""

    def drafts(rng: np.random.Generator, i: int, batch: int, n: int) -> tuple[np.ndarray, np.ndarray]:
        chance, said = source(rng, i, batch, n)
        return _chance(_odds(chance) + offset), said

    return drafts


def uninformative(chance: float) -> Drafts:
    """What the drafter says has nothing to do with it."""

    def drafts(rng: np.random.Generator, _: int, batch: int, n: int) -> tuple[np.ndarray, np.ndarray]:
        said = np.log(_chance(1.5 + 1.5 * rng.normal(size=(batch, n))))
        return np.full((batch, n), chance), said.astype(np.float32)

    return drafts


def cliff(good: int, high: float = 0.92, low: float = 0.05) -> Drafts:
    """The first `good` drafts are mostly right, those behind hardly ever; the drafter does not know."""

    def drafts(rng: np.random.Generator, _: int, batch: int, n: int) -> tuple[np.ndarray, np.ndarray]:
        chance = np.tile(np.where(np.arange(n) < good, high, low), (batch, 1))
        return chance, np.log(_chance(2.0 + 0.5 * rng.normal(size=(batch, n)))).astype(np.float32)

    return drafts


def turns(sources: list[Drafts], every: int) -> Drafts:
    """One process after the other, each for so many rounds."""

    def drafts(rng: np.random.Generator, i: int, batch: int, n: int) -> tuple[np.ndarray, np.ndarray]:
        return sources[i // every % len(sources)](rng, i, batch, n)

    return drafts
