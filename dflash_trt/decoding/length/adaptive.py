"""The adaptive block length: each round drafts and verifies what is expected to commit the most tokens per second.

With S_j the probability that the first j drafts of a request are all right, a round that verifies L tokens of each
commits G(L) = sum over requests of 1 + S_1 + ... + S_{L-1}. S comes from the drafter's own log-probabilities,
calibrated by what became of earlier drafts (`calibration`); time from measured passes (`pass_times`).

Maximizing tokens per second over many rounds is maximizing G - rate * seconds in each, where `rate` is the best tokens
per second there are (Dinkelbach's method). So a plan holds that rate and the best number of tokens to draft, worked
out over the recent rounds; when the drafts are there, their own log-probabilities decide how many of them to verify.

What is believed may be wrong. Lengths whose times are in doubt are tried, those first that are expected to cost the
fewest tokens, and a small share of the tokens committed is what all trials may cost.
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

Array = np.ndarray[Any, Any]

# Drafts (of single requests) that a plan looks back on, and the rounds after which it is made anew.
_RECENT, _REPLAN = 64, 16
# What trials may cost: a share of the tokens committed, and so many tokens of each request in advance.
_SHARE, _ADVANCE = 0.01, 3.0


@dataclass(frozen=True)
class _Plan:
    """What is best for one batch size, and what to try. Lengths count the anchor."""

    draft: int
    prices: list[float]  # of verifying 1, 2 .. tokens: what the time it takes is worth, in tokens
    losses: list[float]  # of drafting and verifying 1, 2 .. tokens instead: in tokens per request
    trial: int  # the length in doubt that loses least; 0 where nothing is


class AdaptiveLength:
    """A `Lengths` that learns. It knows no engine: pass times and drafts' fates are told.

    Whatever numbers it is given, it answers with a length from 1 to the block size.
    """

    def __init__(self, block_size: int, draft_times: PassTimes, verify_times: PassTimes) -> None:
        self.block_size, self._draft_times, self._verify_times = block_size, draft_times, verify_times
        self._calibration = Calibration(block_size - 1)
        self._recent: deque[Array] = deque([np.zeros(block_size - 1)], maxlen=_RECENT)
        self._unlearnt: list[tuple[Array, Sequence[int], Sequence[int]]] = []
        self._plans: dict[int, _Plan] = {}
        self._batch, self._trial = 1, False  # of this round
        self._rounds = self._idle = 0  # rounds since the last plan, and since the last draft
        self._interval = 1
        self._allowance = _ADVANCE

    def draft(self, batch: int) -> int:
        self._batch = max(1, batch)
        plan = self._plan(self._batch)
        # The first pass of a drafter that was off takes in what was committed meanwhile: it is the next that is timed.
        passes = 2 if self._idle and plan.trial > 1 else 1
        self._trial = plan.trial == 1 or (
            plan.trial > 1 and passes * plan.losses[plan.trial - 1] <= self._allowance
        )
        return plan.trial if self._trial else plan.draft

    def verify(self, draft: Draft, slots: Sequence[int]) -> int:
        if self._trial:
            return draft.nodes
        gains = self._calibration.gains(draft.logprobs_of(slots))
        values = [gain - price for gain, price in zip(gains, self._plan(self._batch).prices, strict=False)]
        return values.index(max(values)) + 1

    def observe(
        self,
        *,
        batch: int,
        drafted: int,
        verified: int,
        accepted: Sequence[int],
        offered: Sequence[int],
        logprobs: Array | None,
        draft_seconds: float,
        verify_seconds: float,
    ) -> None:
        batch = max(1, batch)
        self._verify_times.observe(batch, verified, verify_seconds)
        self._draft_times.observe(batch, drafted, 0.0 if self._idle else draft_seconds)
        self._idle += 1
        self._rounds += 1
        if logprobs is not None and logprobs.shape[1]:
            self._idle = 0
            self._unlearnt.append(
                (np.array(logprobs), accepted, offered)
            )  # a view: the next pass overwrites it
        if self._plan(batch).trial:  # otherwise there is nothing to save for
            self._allowance += _SHARE * (1 + sum(accepted) / batch)
        if self._trial or self._rounds >= self._interval:
            self._learn()
        if self._trial and verified > 1:
            self._allowance -= self._plan(batch).losses[verified - 1]
        self._trial = False

    def _learn(self) -> None:
        """What the rounds since the last plan showed. Plans are made anew, often at first."""
        self._interval = min(2 * self._interval, _REPLAN)
        self._rounds = 0
        self._plans.clear()
        if not self._unlearnt:
            return
        said, accepted, offered = zip(*self._unlearnt, strict=True)
        whole = np.empty((sum(map(len, said)), self.block_size - 1))
        at = 0
        for rows in said:
            drafts = rows.shape[1]
            whole[at : at + len(rows), :drafts] = rows
            whole[at : at + len(rows), drafts:] = rows[:, -1:]  # not drafted: as the last one that was
            at += len(rows)
        x = log_odds(whole)
        self._recent.extend(x)
        self._calibration.observe(x, np.concatenate(accepted), np.concatenate(offered), len(said))
        self._unlearnt.clear()

    def _plan(self, batch: int) -> _Plan:
        if batch not in self._plans:
            self._plans[batch] = self._make_plan(batch)
        return self._plans[batch]

    def _make_plan(self, batch: int) -> _Plan:
        """Over the recent drafts, taken `batch` at a time as the rounds they might have been."""
        verify, draft = self._verify_times(batch), self._draft_times(batch)
        draft[0] = 0.0
        recent = self._calibration.survival(np.array(self._recent))
        rounds = max(1, len(recent) // batch)
        taken = recent[-rounds * batch :]
        per_round = taken.reshape(rounds, -1, taken.shape[1]).sum(axis=1) * (batch * rounds / len(taken))
        gain = np.pad(np.cumsum(per_round, axis=1), ((0, 0), (1, 0))) + batch  # [rounds, length - 1]
        best, rate, row = 0, batch / verify[0], np.arange(rounds)
        for _ in range(self.block_size):  # each step but the last finds a better rate: a few are enough
            value = gain - rate * verify
            # The best length to verify of as many tokens as were drafted, and what it is worth on average.
            worth = np.maximum.accumulate(value, axis=1).mean(axis=0) - rate * draft
            candidate = int(np.argmax(worth))
            chosen = np.argmax(value[:, : candidate + 1], axis=1)
            better = gain[row, chosen].sum() / (verify[chosen].sum() + rounds * draft[candidate])
            if better <= rate * (1 + 1e-9):
                break
            best, rate = candidate, better
        losses = (worth[best] - value.mean(axis=0) + rate * draft) / batch
        doubtful = self._verify_times.doubtful(batch)
        doubtful[1:] |= self._draft_times.doubtful(batch)[1:]
        doubtful[best] = False
        # Plain decoding is what nobody may fall behind: what its time is comes first.
        order = np.where(doubtful, losses, np.inf)
        trial = 1 if doubtful[0] else int(np.argmin(order)) + 1 if doubtful.any() else 0
        return _Plan(best + 1, (rate * verify).tolist(), losses.tolist(), trial)
