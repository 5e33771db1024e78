"""The adaptive block length: each round drafts and verifies what is expected to commit the most tokens per second.

With S_j the probability that the first j drafts of a request are all right, a round that verifies L tokens of each
commits G(L) = sum over requests of 1 + S_1 + ... + S_{L-1}. S comes from the drafter's own log-probabilities,
calibrated by what became of earlier drafts (`calibration`); time from measured passes (`pass_times`).

Maximizing tokens per second over many rounds is maximizing G - rate * seconds in each, where `rate` is the best tokens
per second there are (Dinkelbach's method). So a plan holds that rate and the best number of tokens to draft, worked
out over the recent rounds; when the drafts are there, their own log-probabilities decide how many of them to verify.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash_trt.decoding.calibration import Calibration, log_odds
from dflash_trt.decoding.pass_times import PassTimes

Array = np.ndarray[Any, Any]

# What the drafter is thought to say before it has said anything: 4 : 1 for each draft.
_FIRST_GUESS = float(np.log(4))
# Drafts (of single requests) that a plan looks back on, and the rounds after which it is made anew.
_RECENT, _REPLAN = 64, 16
# Drafting must promise so much more than plain decoding.
_MARGIN = 1.02
# While it does not, it is tried again after so many rounds, twice as many each time, and not so often that it costs
# more than this share of the time.
_FIRST_PROBE, _LAST_PROBE, _PROBE_SHARE = 8, 64, 0.01
# That share may be drawn so many plain rounds in advance.
_PROBE_CREDIT = 1.0
# What drafting that has just begun may lose, in plain rounds, before it is stopped, whatever it promises.
_CREDIT = 4.0
# Drafting has just begun in its first rounds. What one may lose, in plain rounds, if no draft is right: while probing,
# and in the very first of them.
_NEW, _STAKE, _CAUTIOUS = 16, 2.0, 4


@dataclass(frozen=True)
class _Plan:
    """What is best for one batch size: to draft `draft` tokens a round, the anchor included."""

    draft: int
    stake: int  # the most to draft where little is known
    prices: list[float]  # of verifying 1, 2 .. block tokens: what the time it takes is worth, in tokens


class AdaptiveLength:
    """A `Lengths` that learns. It knows no engine: pass times and drafts' fates are told."""

    def __init__(self, block_size: int, draft_times: PassTimes, verify_times: PassTimes) -> None:
        self.block_size, self._draft_times, self._verify_times = block_size, draft_times, verify_times
        self._calibration = Calibration(block_size - 1)
        self._recent: deque[Array] = deque([np.full(block_size - 1, _FIRST_GUESS)], maxlen=_RECENT)
        self._unlearnt: list[tuple[Array, Sequence[int], Sequence[int]]] = []
        self._plans: dict[int, _Plan] = {}
        self._batch, self._asked, self._probing = 1, 1, False  # of this round
        self._in_a_row = self._idle = 0  # rounds that drafted, or that did not, up to now
        self._probe_after = _FIRST_PROBE
        self._debt = 0.0  # what trying has cost, in plain rounds, and later rounds have not yet made good

    def draft(self, batch: int) -> int:
        self._batch, self._probing = batch, False
        plan = self._plan(batch)
        new = self._idle > 0 or self._in_a_row < _NEW
        if plan.draft > 1 and not (new and self._debt > _CREDIT):
            self._asked = min(plan.draft, plan.stake) if self._in_a_row < _CAUTIOUS else plan.draft
        else:
            self._probing = self._debt <= _PROBE_CREDIT and self._idle >= self._probe_after
            self._asked = plan.stake if self._probing else 1
        return self._asked

    def verify(self, logprobs: Array) -> int:
        gains = self._calibration.gains(logprobs, hope=self._probing)
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
        self._verify_times.observe(batch, verified, verify_seconds)
        if logprobs is None:
            if self._asked > 1:  # there was no room for a draft
                return
            self._idle += 1
            self._debt -= _PROBE_SHARE
            if self._idle % _RECENT == 0:
                self._plans.clear()  # passes may take another time by now
            return
        if self._idle == 0:
            self._in_a_row += 1
            self._draft_times.observe(batch, drafted, draft_seconds)
        else:  # the drafter also took in what was committed meanwhile
            self._idle, self._in_a_row = 0, 1
        self._unlearnt.append((np.array(logprobs), accepted, offered))  # a view: the next pass overwrites it
        if self._in_a_row < _NEW:
            seconds = self._draft_times(batch, drafted) + self._verify_times(batch, verified)
            lost = seconds / self._verify_times(batch, 1) - (batch + sum(accepted)) / batch
            self._debt = max(0.0, self._debt) + lost
            if self._probing:  # one that paid is followed by another at once
                self._probe_after = (
                    0 if lost < 0 else min(max(2 * self._probe_after, _FIRST_PROBE), _LAST_PROBE)
                )
            self._learn()
        else:
            self._debt, self._probe_after = 0.0, _FIRST_PROBE
            if len(self._unlearnt) >= _REPLAN:
                self._learn()

    def _learn(self) -> None:
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
        self._plans.clear()

    def _plan(self, batch: int) -> _Plan:
        if batch not in self._plans:
            self._plans[batch] = self._make_plan(batch)
        return self._plans[batch]

    def _make_plan(self, batch: int) -> _Plan:
        """Over the recent drafts, taken `batch` at a time as the rounds they might have been."""
        lengths = range(1, self.block_size + 1)
        verify = np.array([self._verify_times(batch, n) for n in lengths])
        draft = np.array([0.0] + [self._draft_times(batch, n) for n in lengths[1:]])
        affordable = draft + verify <= (1 + _STAKE) * verify[0]
        stake = max(2, int(np.flatnonzero(affordable)[-1]) + 1)
        recent = self._calibration.survival(np.array(self._recent))
        rounds = max(1, len(recent) // batch)
        taken = recent[-rounds * batch :]
        per_round = taken.reshape(rounds, -1, taken.shape[1]).sum(axis=1) * (batch * rounds / len(taken))
        gain = np.pad(np.cumsum(per_round, axis=1), ((0, 0), (1, 0))) + batch  # [rounds, length - 1]
        best, rate = 1, _MARGIN * batch / verify[0]
        row = np.arange(rounds)
        while True:
            value = gain - rate * verify
            # The best length to verify of as many tokens as were drafted, and what it is worth on average.
            reached = np.maximum.accumulate(value, axis=1)
            candidate = int(np.argmax(reached.mean(axis=0) - rate * draft))
            chosen = np.argmax(value[:, : candidate + 1], axis=1)
            better = gain[row, chosen].sum() / (verify[chosen].sum() + rounds * draft[candidate])
            if better <= rate * (1 + 1e-9):
                return _Plan(best, stake, (rate * verify).tolist())
            best, rate = candidate + 1, float(better)
