"""The adaptive block length: each round drafts and verifies what is expected to commit the most tokens per second.

With S_j the probability that the first j drafts of a request are all right, a round that verifies L tokens of each
commits G(L) = sum over requests of 1 + S_1 + ... + S_{L-1}. S comes from the drafter's own log-probabilities,
calibrated by what became of earlier drafts (`calibration`); time from measured passes (`pass_times`).

Maximizing tokens per second over many rounds is maximizing G - rate * seconds in each, where `rate` is the best tokens
per second there are (Dinkelbach's method). So a plan holds that rate and the best number of tokens to draft, worked
out over the recent rounds. If the drafts' own log-probabilities are at hand, they decide how many of them to verify. On
a device they come with the results of the round, and all drafts are verified.

A belief may be wrong. A length whose time is in doubt is tried on credit: the trial that is expected to cost
least runs, and is charged what it lost by the clock. The credit is paid back as a small share of the rounds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash_trt.decoding.draft import Draft
from dflash_trt.decoding.length.calibration import Calibration, log_odds
from dflash_trt.decoding.length.pass_times import PassTimes
from dflash_trt.decoding.length.policy import RoundDone

Array = np.ndarray[Any, Any]

# Drafts (of single requests) that a plan looks back on. It is made anew after a quarter as many rounds.
_RECENT = 64
# The cost that trials may have: a share of the rounds, and so many rounds on credit.
_SHARE, _CREDIT = 0.01, 3.0


@dataclass(frozen=True)
class _Plan:
    """The best choice for one batch size, and the next trial. Lengths include the anchor."""

    draft: int
    seconds: float  # that a round takes
    tokens: float  # that it commits
    prices: list[float]  # of verifying 1, 2 .. tokens: what the time it takes is worth, in tokens
    trial: int  # the length in doubt that loses least; 0 where nothing is


class AdaptiveLength:
    """A `Lengths` that learns. It knows no engine: the scheduler reports pass times and results of drafts.

    For any numbers, it returns a length from 1 to the block size.
    """

    def __init__(self, block_size: int, draft_times: PassTimes, verify_times: PassTimes) -> None:
        self.block_size, self._draft_times, self._verify_times = block_size, draft_times, verify_times
        self._calibration = Calibration(block_size - 1)
        self._recent: deque[Array] = deque([np.zeros(block_size - 1)], maxlen=_RECENT)
        self._unlearnt: list[tuple[Array, Sequence[int], Sequence[int]]] = []
        self._plans: dict[int, _Plan] = {}
        self._batch, self._trial = 1, False  # of the current round
        self._rounds = self._idle = 0  # rounds since the last plan, and since the last draft
        self._interval, self._drafting = 1, True
        self._credit, self._untimed = _CREDIT, False
        self._cuts = True  # whether `verify` can choose by the log-probabilities of the draft

    @property
    def most(self) -> int:
        return self.block_size

    def draft(self, batch: int) -> int:
        self._batch = max(1, batch)
        plan = self._plan(self._batch)
        if self._drafting != (plan.draft > 1):  # a belief so new is looked at again soon
            self._interval, self._drafting = 1, plan.draft > 1
        self._trial = plan.trial > 0 and (self._credit > 0 or self._untimed)
        return plan.trial if self._trial else plan.draft

    def verify(self, draft: Draft, slots: Sequence[int]) -> int:
        self._cuts = draft.at_hand  # on a device, waiting for them costs more than it saves
        if self._trial or not self._cuts:
            return draft.nodes
        gains = self._calibration.gains(draft.logprobs_of(slots))
        values = [gain - price for gain, price in zip(gains, self._plan(self._batch).prices, strict=False)]
        return values.index(max(values)) + 1

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
        batch, seconds = max(1, done.batch), done.draft_seconds + done.verify_seconds
        plan = self._plan(batch)
        if plan.trial:  # otherwise there is nothing to save for
            self._credit += _SHARE
        if self._trial and seconds < 1e9:  # otherwise the clock is broken
            rounds = seconds / plan.seconds  # of those that were not run instead
            lost = max(0.0, rounds - (batch + sum(done.accepted)) / plan.tokens)
            self._credit = max(self._credit - lost, -10 * _CREDIT)
        # The first pass of a drafter that was off also reads the rows committed meanwhile. So the next pass is timed.
        self._untimed = self._trial and done.drafted > 1 and self._idle > 0
        self._verify_times.observe(batch, done.verified, done.verify_seconds)
        self._draft_times.observe(batch, done.drafted, 0.0 if self._idle else done.draft_seconds)
        self._idle += 1
        self._rounds += 1
        logprobs = done.logprobs
        if logprobs is not None and logprobs.shape[1]:
            self._idle = 0
            # A copy: the next pass overwrites them. Places that were not drafted are taken to be as the last that was.
            said = np.asarray(logprobs).take(range(self.block_size - 1), axis=1, mode="clip")
            self._unlearnt.append((said, done.accepted, done.offered))
        if self._trial or self._rounds >= self._interval:
            self._learn()
        self._trial = False

    def _learn(self) -> None:
        """Learn from the rounds since the last plan. Plans are renewed, often at first."""
        self._interval = min(2 * self._interval, _RECENT // 4)
        self._rounds = 0
        self._plans.clear()
        if not self._unlearnt:
            return
        said, accepted, offered = map(np.concatenate, zip(*self._unlearnt, strict=True))
        x = log_odds(said)
        self._recent.extend(x)
        self._calibration.observe(x, accepted, offered, len(self._unlearnt))
        self._unlearnt.clear()

    def _plan(self, batch: int) -> _Plan:
        if batch not in self._plans:
            self._plans[batch] = self._make_plan(batch)
        return self._plans[batch]

    def _make_plan(self, batch: int) -> _Plan:
        """Make a plan from the recent drafts, grouped into rounds of `batch`."""
        # Times of verifying more than a block are those of trees.
        verify, draft = self._verify_times(batch)[: self.block_size], self._draft_times(batch)
        draft[0] = 0.0
        recent = self._calibration.survival(np.array(self._recent))
        rounds = max(1, len(recent) // batch)
        taken = recent[-rounds * batch :]
        per_round = taken.reshape(rounds, -1, taken.shape[1]).sum(axis=1) * (batch * rounds / len(taken))
        gain = np.pad(np.cumsum(per_round, axis=1), ((0, 0), (1, 0))) + batch  # [rounds, length - 1]
        best, rate, row = 0, batch / verify[0], np.arange(rounds)
        for _ in range(self.block_size):  # each step but the last improves the rate; few steps are enough
            value = gain - rate * verify
            # The best length to verify among the drafted tokens, and its average value.
            worth = (np.maximum.accumulate(value, axis=1) if self._cuts else value).mean(
                axis=0
            ) - rate * draft
            candidate = int(np.argmax(worth))
            chosen = (
                np.argmax(value[:, : candidate + 1], axis=1) if self._cuts else np.full(rounds, candidate)
            )
            better = gain[row, chosen].sum() / (verify[chosen].sum() + rounds * draft[candidate])
            if better <= rate * (1 + 1e-9):
                break
            best, rate = candidate, better
        doubtful = self._verify_times.doubtful(batch)[: self.block_size]
        doubtful[1:] |= self._draft_times.doubtful(batch)[1:]
        doubtful[best] = False
        gains = gain.mean(axis=0)
        # Plain decoding comes first, because the result must not be slower than it.
        order = np.where(doubtful, gains - rate * (verify + draft), -np.inf)
        trial = 1 if doubtful[0] else int(np.argmax(order)) + 1 if doubtful.any() else 0
        return _Plan(best + 1, gains[best] / rate, gains[best], (rate * verify).tolist(), trial)
