"""Schedules for the scheduler's tests: block lengths, a clock, arrivals, and loops that run a pool to its end."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import numpy as np
from hypothesis import strategies as st

from dflash_trt.decoding.draft import Draft
from dflash_trt.decoding.length.policy import RoundDone
from dflash_trt.decoding.request import Emission, Request
from tests.doubles.fake_engines import BLOCK, VOCAB
from tests.doubles.pool import Pool


class Lengths:
    """Returns the lengths it was given, and records the reports."""

    most = BLOCK

    def __init__(self, *draft: int) -> None:
        self.lengths, self.rounds = list(draft), list[RoundDone]()

    def draft(self, active: Sequence[Request]) -> int:
        return self.lengths.pop(0) if len(self.lengths) > 1 else self.lengths[0]

    def select(self, draft: Draft, active: Sequence[Request], slots: Sequence[int], most: int) -> Draft:
        return draft

    def observe(self, done: RoundDone) -> None:
        assert len(done.judged) == len(done.decided) <= len(done.active)
        assert all(1 <= len(tokens) <= done.verified for tokens in done.decided)
        self.rounds.append(done)


class AnyLengths(Lengths):
    def __init__(self, seed: int) -> None:
        super().__init__(1)
        self.random, self.off = random.Random(seed), 0

    def draft(self, active: Sequence[Request]) -> int:
        self.off = self.off - 1 if self.off else self.random.choice([0, 0, 0, 0, 0, 25])
        return 1 if self.off else self.random.randint(1, BLOCK)


class Clock:
    """The scheduler's clock, which advances when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def drive(pool: Pool, lengths: Lengths, steps: int = 10_000) -> Iterator[list[Emission]]:
    for _ in range(steps):
        if pool.scheduler.idle:
            return
        emissions = pool.scheduler.step(lengths)
        pool.check()
        yield emissions


def finish(pool: Pool, lengths: Lengths, *requests: Request) -> dict[Request, list[int]]:
    """Submit, run to the end, and return the tokens of each request."""
    for one in requests:
        pool.scheduler.submit(one)
    tokens: dict[Request, list[int]] = {one: [] for one in requests}
    copied = dict.fromkeys(requests, 0)
    for emissions in drive(pool, lengths):
        for emission in emissions:
            tokens.setdefault(emission.request, []).extend(emission.token_ids)
            copied[emission.request] = copied.get(emission.request, 0) + emission.copied
    for one in requests:
        dropped = (
            len(one.output) - one.statistics.num_generation_tokens
        )  # what the last round decided beyond the end
        assert copied[one] >= one.statistics.num_lookup_accepted_tokens - dropped
    return tokens


shared = [prompt(n, seed=9) for n in (3, 20, 45)]
arrivals = st.lists(
    st.fixed_dictionaries(
        {
            "prefix": st.sampled_from([[], *shared]),
            "length": st.integers(1, 30),
            "seed": st.integers(0, 3),
            "max_tokens": st.integers(1, 40),
            "temperature": st.sampled_from([0.0, 0.0, 0.8]),
            "penalty": st.sampled_from([1.0, 1.0, 1.3]),
            "draft": st.sampled_from([True, True, False]),
            "at": st.integers(0, 40),
            "leaves": st.sampled_from([None, None, None, 0, 1, 4, 9]),
            "deadline": st.sampled_from([None, None, None, 0, 2, 7]),
        }
    ),
    min_size=1,
    max_size=14,
)
