"""The adaptive block length: each round drafts and verifies what is expected to commit the most tokens per second.

With S_j the probability that the first j drafts of a request are all right, a round of length L commits
G(L) = 1 + S_1 + ... + S_{L-1} tokens per request on average, and takes T(L) seconds. Over many rounds, the tokens per
second are G(L) / T(L). S comes from the shares of earlier drafts that were right (`AcceptanceByPlace`). T is the usual
time of the passes (`pass_times`) plus the mean stall, which all lengths share (`stalls`).

Times and chances of lengths that are not in use grow old. So a share of the time is spent on trials of other lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash_trt.decoding.draft import Draft
from dflash_trt.decoding.length.pass_times import ROUNDS, PassTimes
from dflash_trt.decoding.length.policy import RoundDone
from dflash_trt.decoding.length.stalls import Stalls

Array = np.ndarray[Any, Any]

# Rounds between plans. At the start, and after a trial, they follow each other.
_INTERVAL = 8
# What trials may cost: a share of the rounds, and so many rounds in advance.
_SHARE, _ADVANCE = 0.01, 2.0
# Drafting rounds over which evidence of acceptance fades by 1/e, and the weight of the place before.
_DRAFTED, _PRIOR = 50, 2.0
# The requests of a round that are counted.
_COUNTED = 8


class AcceptanceByPlace:
    """The share of drafts that are right, by place, among those that came after right ones."""

    def __init__(self, drafts: int) -> None:
        self._right, self._seen = [0.0] * drafts, [0.0] * drafts

    def observe(self, accepted: Sequence[int], offered: Sequence[int]) -> None:
        """The first offered [n] drafts of each request were verified, and the first accepted [n] of them were right."""
        drafts = len(self._seen)
        right, seen = [0] * (drafts + 1), [0] * (drafts + 1)  # of requests that end at a place
        for a, o in zip(accepted, offered, strict=True):
            right[a] += 1
            seen[min(a + 1, o)] += 1
        self.fade(_DRAFTED)
        rights = seens = 0
        for place in range(drafts, 0, -1):
            rights += right[place]
            seens += seen[place]
            self._right[place - 1] += rights
            self._seen[place - 1] += seens

    def fade(self, rounds: float) -> None:
        keep = 1 - 1 / rounds
        self._right = [keep * each for each in self._right]
        self._seen = [keep * each for each in self._seen]

    def tokens(self) -> Array:
        """The expected tokens of a request, for lengths 1, 2 .. A place without evidence is as the one before it."""
        tokens, survival, chance = [1.0], 1.0, 0.7
        for right, seen in zip(self._right, self._seen, strict=True):
            chance = (right + _PRIOR * chance) / (seen + _PRIOR)
            survival *= chance
            tokens.append(tokens[-1] + survival)
        return np.array(tokens)


@dataclass(frozen=True)
class _Plan:
    """The best length for one batch size, including the anchor, and the next one to try."""

    length: int
    trial: int
    seconds: float  # that a round takes, with stalls
    stall: float
    tokens: float  # that it commits


class AdaptiveLength:
    """A `Lengths` that learns. It knows no engine: the scheduler reports pass times and results of drafts.

    For any numbers, it returns a length from 1 to the block size.
    """

    def __init__(self, block_size: int, draft_times: PassTimes, verify_times: PassTimes) -> None:
        self.block_size, self._draft_times, self._verify_times = block_size, draft_times, verify_times
        self._acceptance, self._stalls = AcceptanceByPlace(block_size - 1), Stalls()
        self._plans: dict[int, _Plan] = {}
        self._trial = self._untimed = (
            False  # of this round; whether the trial before had no time for its draft
        )
        self._rounds = self._idle = 0  # rounds in all, and since the last draft
        self._next = 0
        self._advance = _ADVANCE

    @property
    def most(self) -> int:
        return self.block_size

    def draft(self, batch: int) -> int:
        plan = self._plan(max(1, batch))
        self._trial = self._advance > 0 or self._untimed
        return plan.trial if self._trial else plan.length

    def verify(self, draft: Draft, slots: Sequence[int]) -> int:
        return draft.nodes

    def grow(self, draft: Draft, slots: Sequence[int], most: int) -> Draft:
        return draft

    def prices(self, batch: int, nodes: int) -> tuple[float, Array]:
        """The best tokens per second of chains, and the seconds of verifying 1, 2 .. nodes of each request."""
        plan, seconds = self._plan(max(1, batch)), self._verify_times(max(1, batch))[:nodes]
        return plan.tokens / plan.seconds, seconds

    @property
    def in_trial(self) -> bool:
        """Whether this round tries a length."""
        return self._trial

    def observe(self, done: RoundDone) -> None:
        batch, drafts = max(1, done.batch), done.drafted > 1
        plan = self._plan(batch)
        usual, verify, change = self._verify_times.observe(batch, done.verified, done.verify_seconds)
        # The first pass of a drafter that was off also reads the rows committed meanwhile.
        timed = drafts and not self._idle
        draft = done.draft_seconds if drafts else 0.0
        if timed:
            of_draft, draft, _ = self._draft_times.observe(batch, done.drafted, draft)
            usual += of_draft
        else:
            self._draft_times.scale(batch, change)
        if timed or not drafts:
            self._stalls.observe(usual, done.verify_seconds + (done.draft_seconds if drafts else 0.0))
        self._advance = min(self._advance + _SHARE, _ADVANCE)
        if self._trial and draft < 1e9:
            tokens = (batch + sum(done.accepted)) / plan.tokens
            # By its passes, with the stalls of a usual round: its own say little.
            lost = (draft + verify + plan.stall) / plan.seconds - tokens
            self._advance = max(self._advance - max(0.0, lost), -10 * _ADVANCE)
        self._untimed = self._trial and drafts and not timed
        if drafts:
            few = len(done.accepted) // _COUNTED + 1
            first = self._rounds % few
            self._acceptance.observe(done.accepted[first::few], done.offered[first::few])
            self._idle = 0
        else:
            self._acceptance.fade(ROUNDS)
            self._idle += 1
        self._rounds += 1
        if self._trial or self._rounds >= self._next:
            self._next = self._rounds + min(_INTERVAL, self._rounds)
            self._plans.clear()
        self._trial = False

    def _plan(self, batch: int) -> _Plan:
        if batch not in self._plans:
            self._plans[batch] = self._make_plan(batch)
        return self._plans[batch]

    def _make_plan(self, batch: int) -> _Plan:
        # Times of verifying more than a block are those of trees.
        seconds = self._verify_times(batch)[: self.block_size]
        evidence = self._verify_times.evidence(batch)[: self.block_size]
        seconds[1:] += self._draft_times(batch)[1 : self.block_size]
        # Fewer rows take no longer than more: a start-up time that a busy machine made too long is found out.
        seconds = np.minimum.accumulate(seconds[::-1])[::-1]
        stalls = self._stalls(seconds)
        seconds = seconds + stalls
        tokens = batch * self._acceptance.tokens()
        best = int((tokens / seconds).argmax())
        # Each trial costs about as much in sum: what costs half is tried twice as often.
        lost = seconds / seconds[best] - tokens / tokens[best] + 0.05
        order = lost * (evidence + 1e-3)
        order[best] = np.inf
        return _Plan(
            best + 1, int(order.argmin()) + 1, float(seconds[best]), float(stalls[best]), float(tokens[best])
        )
