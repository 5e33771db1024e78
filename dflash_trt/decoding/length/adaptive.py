"""The adaptive block length: each round drafts and verifies what is expected to commit the most tokens per second.

With S_j the probability that the first j drafts of a request are all right, a round of length L commits
G(L) = 1 + S_1 + ... + S_{L-1} tokens per request on average, and takes T(L) seconds. Over many rounds, the tokens per
second are G(L) / T(L). S comes from earlier drafts (`AcceptanceByPlace`). T is the usual time of the round
(`round_times`) plus the time of the host and the mean stall, which all lengths share (`stalls`).

The drafter's own probabilities say more about the draft at hand, once they are calibrated (`NodeOdds`). So where the
host can read them, only those of its first tokens are verified that are worth the time of their rows. They also stand
for the results of earlier drafts, because a probability is known of every place and varies less than a result.

Times and chances of lengths that are not in use grow old. So a share of the time is spent on trials of other lengths.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from dflash_trt.decoding.draft import Draft
from dflash_trt.decoding.length.node_odds import NodeOdds
from dflash_trt.decoding.length.pass_times import PassTimes, measure
from dflash_trt.decoding.length.policy import RoundDone
from dflash_trt.decoding.length.round_times import LAST, RoundTimes, quarter_up
from dflash_trt.decoding.length.stalls import Stalls
from dflash_trt.decoding.pair import Pair

Array = np.ndarray[Any, Any]

# `python -m build_scripts.bench.adaptive_length --constants` shows what half or twice each of these does.
# What trials may cost: a share of the rounds, and so many rounds in advance.
_SHARE, _CREDIT = 0.01, 2.0
# Drafting rounds over which evidence on the running requests fades by 1/e, rounds for the evidence on all requests and
# for any evidence that no draft renews, and the weight of what is assumed without evidence, in drafts.
_DRAFTED, _IDLE, _PRIOR = 50, 500, 2.0
# How much faster than plain decoding drafting has to promise to be: an estimate near 1 is as often wrong as right.
_MARGIN = 0.05
# Two bounds of the CPU time of a round: the rounds between plans, and the requests of a round that are counted.
_INTERVAL, _COUNTED = 8, 8


class AcceptanceByPlace:
    """The share of drafts that are right, by place, among those that came after right ones.

    Requests differ, so evidence on the running requests counts most. Without it, they are taken to be like all earlier
    requests.
    """

    def __init__(self, drafts: int) -> None:
        # For each place: right drafts and those after right ones, of all requests, then of the running ones.
        self._counts = [[0.0] * 4 for _ in range(drafts)]

    def observe(self, requests: Sequence[Sequence[float]]) -> None:
        """For each request the probability that its first 1, 2 .. drafts are right, or 1 and 0 as they were, up to the
        last place that this is known of.
        """
        self._fade(1 - 1 / _IDLE, 1 - 1 / _DRAFTED)
        for survival in requests:
            before = 1.0
            for counts, right in zip(self._counts, survival, strict=False):
                counts[0] += right
                counts[1] += before
                counts[2] += right
                counts[3] += before
                before = right

    def observe_plain(self) -> None:
        """No draft was verified."""
        self._fade(1 - 1 / _IDLE, 1 - 1 / _IDLE)

    def leave(self, share: float) -> None:
        """A share of the running requests has ended."""
        self._fade(1.0, 1 - share)

    def tokens(self) -> Array:
        """The expected tokens of a request, for lengths 1, 2 .. A place without evidence is as the one before it."""
        tokens, survival, usual = [1.0], 1.0, 0.7
        for right, judged, own_right, own_judged in self._counts:
            usual = (right + _PRIOR * usual) / (judged + _PRIOR)
            survival *= (own_right + _PRIOR * usual) / (own_judged + _PRIOR)
            tokens.append(tokens[-1] + survival)
        return np.array(tokens)

    def _fade(self, of_all: float, of_running: float) -> None:
        for counts in self._counts:
            counts[0] *= of_all
            counts[1] *= of_all
            counts[2] *= of_running
            counts[3] *= of_running


@dataclass(frozen=True)
class _Plan:
    """The best length for one batch size, including the anchor, and the next one to try."""

    length: int
    trial: int
    seconds: float  # that a round takes in all
    beside: float  # of these, beside the usual time of its passes
    tokens: float  # that it commits


class AdaptiveLength:
    """A `Lengths` that learns. It knows no engine: the scheduler reports pass times and results of drafts.

    For any numbers, it returns a length from 1 to the block size.
    """

    def __init__(self, block_size: int, draft_times: PassTimes, verify_times: PassTimes) -> None:
        self.block_size = self.most = block_size
        self._times = RoundTimes(draft_times, verify_times, block_size)
        self._warm = verify_times.warm
        self._acceptance, self._stalls = AcceptanceByPlace(block_size - 1), Stalls()
        self._odds = NodeOdds(block_size - 1)
        # Of the round, by slot, where the host could read them: the drafter's log-probabilities, and for each place the
        # probability that all drafts up to it are right.
        self._said: dict[int, tuple[list[float], list[float]]] = {}
        # What `_odds` has not learned from yet, by round: log-probabilities of drafts, and the ranks of decided tokens.
        self._judged = list[list[tuple[list[float], list[int]]]]()
        self._host = deque[float](maxlen=LAST)  # seconds of recent rounds beside their passes
        self._plans: dict[int, _Plan] = {}
        self._last: dict[int, Array] = {}  # the round in which each length last ran, by batch size
        self._batch, self._trial = 1, False  # of this round
        self._untimed = False  # whether the trial before had no time for its draft
        self._rounds = self._idle = 0  # rounds in all, and since the last draft
        self._credit = _CREDIT

    @classmethod
    def measured(cls, block_size: int, pair: Pair, most_requests: int, most_nodes: int = 0) -> Self:
        """The policy of a pair, for up to `most_requests` at a time. Times the pair's passes, which overwrites rows of
        slots 0 .. most_requests-1.

        most_nodes: the most nodes of a tree, whose times are followed too.
        """
        return cls(block_size, *_times(block_size, pair, most_requests, most_nodes))

    def measure(self, pair: Pair, most_requests: int, most_nodes: int = 0) -> None:
        """Time the passes again, for more requests at a time. What was learned of drafts is kept."""
        draft_times, verify_times = _times(self.block_size, pair, most_requests, most_nodes)
        self._times = RoundTimes(draft_times, verify_times, self.block_size)
        self._warm = verify_times.warm
        self._plans.clear()
        self._last.clear()

    def draft(self, batch: int) -> int:
        """The planned length, or now and then another one on trial."""
        self._batch, self._said = max(1, batch), {}
        plan = self._plan(self._batch)
        self._trial = (self._credit > 0 or self._untimed) and self._times.settled(self._batch)
        return plan.trial if self._trial else plan.length

    def select(self, draft: Draft, slots: Sequence[int], most: int) -> Draft:
        """The first nodes of each chain, as many as are expected to be fastest."""
        if draft.nodes == 1 or not slots or not draft.at_hand:
            return draft
        counted = self._some(slots)
        for slot in counted:
            said = draft.logprobs[slot].tolist()
            self._said[slot] = said, self._odds.chain(said)
        if self._trial:
            return draft  # results of all places show whether the probabilities are right
        plan = self._plan(self._batch)
        rate = plan.tokens / plan.seconds * len(counted) / len(slots)
        seconds = self._times.verify(self._batch, draft.nodes).tolist()
        nodes, best, gain = 1, -rate * seconds[0], 0.0
        for place, right in enumerate(zip(*(survival for _, survival in self._said.values()), strict=True)):
            gain += sum(right)
            if gain - rate * seconds[place + 1] > best:
                nodes, best = place + 2, gain - rate * seconds[place + 1]
        return Draft(draft.tokens[:, :nodes], None, draft.logprobs[:, : nodes - 1], draft.candidates)

    def prices(self, batch: int, nodes: int) -> tuple[float, Array]:
        """The best tokens per second of chains, and the seconds of verifying 1, 2 .. nodes of each request."""
        plan = self._plan(max(1, batch))
        return plan.tokens / plan.seconds, self._times.verify(max(1, batch), nodes)

    @property
    def in_trial(self) -> bool:
        """Whether this round tries a length."""
        return self._trial

    def observe(self, done: RoundDone) -> None:
        """Learn the times and the acceptance of a round. What a trial cost is taken from the credit."""
        batch, drafts = max(1, done.batch), done.drafted > 1
        plan, results = self._plan(batch), self._results(done)
        last, seconds = self._last[batch], done.verify_seconds + (done.draft_seconds if drafts else 0.0)
        # Engines prepare a size when it first comes. A drafter that was off also reads the rows committed meanwhile.
        timed = last[done.drafted - 1] >= 0 and not (drafts and self._idle)
        if timed:
            usual = self._times.observe(batch, done.drafted, done.verified, seconds, self._trial)
            self._stalls.observe(usual, seconds)
        else:
            usual = float(self._times(batch)[done.drafted - 1])
        if 0 <= done.host_seconds < 1e9:
            self._host.append(done.host_seconds)
        self._credit = min(self._credit + _SHARE, _CREDIT)
        lost = 0.0
        if self._trial:
            # By its usual time, with what is beside it in a usual round: its own stalls say little.
            right = sum(sum(survival[: done.verified - 1]) for survival in results)
            tokens = batch + right * len(done.accepted) / max(1, len(results))
            lost = (min(usual, seconds) + plan.beside) / plan.seconds - tokens / plan.tokens
            self._credit = max(self._credit - max(0.0, lost), -10 * _CREDIT)
        self._untimed = self._trial and not timed
        if lost >= 0 or not timed:  # a trial that pays is repeated
            last[done.drafted - 1] = self._rounds
        if drafts:
            self._acceptance.observe(results)
            if self._said:
                each = zip(done.judged, done.accepted, done.offered, strict=True)
                ranks = {slot: [0] * right + [1] * (right < offered) for slot, right, offered in each}
                self._judged.append([(said, ranks[s]) for s, (said, _) in self._said.items() if s in ranks])
            self._idle = 0
        else:
            self._acceptance.observe_plain()
            self._idle += 1
        if done.ended:
            self._acceptance.leave(done.ended / batch)
        self._rounds += 1
        if self._trial or self._rounds % _INTERVAL == 0 or self._rounds < _INTERVAL or done.ended:
            self._learn()
            self._plans.clear()
        self._trial = False

    def _some(self, requests: Sequence[int]) -> Sequence[int]:
        """Those that are counted in this round."""
        few = len(requests) // _COUNTED + 1
        return requests[self._rounds % few :: few]

    def _results(self, done: RoundDone) -> list[list[float]]:
        """As `AcceptanceByPlace.observe` takes them."""
        if self._said:
            return [self._said[slot][1] for slot in done.judged if slot in self._said]
        counted = self._some(range(len(done.accepted)))
        return [[1.0] * done.accepted[i] + [0.0] * (done.accepted[i] < done.offered[i]) for i in counted]

    def _learn(self) -> None:
        """Learn what the drafter's probabilities of the last rounds were worth."""
        drafts = [each for some in self._judged for each in some]
        if drafts:
            logprobs = np.zeros((len(drafts), self.block_size - 1, 1))
            for row, (said, _) in zip(logprobs, drafts, strict=True):
                row[: len(said), 0] = said
            self._odds.observe(logprobs, [ranks for _, ranks in drafts], len(self._judged))
        self._judged.clear()

    def _plan(self, batch: int) -> _Plan:
        if batch not in self._plans:
            self._plans[batch] = self._make_plan(batch)
        return self._plans[batch]

    def _make_plan(self, batch: int) -> _Plan:
        seconds = self._times(batch)
        # Fewer rows take no longer than more: a start-up time that a busy machine made too long is found out.
        seconds = np.minimum.accumulate(seconds[::-1])[::-1]
        beside = self._stalls(seconds) + (quarter_up(self._host) if self._host else 0.0)
        seconds = seconds + beside
        tokens = batch * self._acceptance.tokens()
        rates = tokens / seconds
        best = int(rates.argmax())
        if rates[best] < (1 + _MARGIN) * rates[0]:
            best = 0
        # Each trial costs about as much in sum: what costs half is tried twice as often.
        lost = np.maximum(seconds / seconds[best] - tokens / tokens[best], 0) + 0.05
        if batch not in self._last:
            warm = [(batch, length) in self._warm for length in range(1, self.block_size + 1)]
            self._last[batch] = np.array(warm, int) - 1
        last = self._last[batch]
        waiting = (1 + self._rounds - last) / lost
        waiting[best] = -1.0
        return _Plan(
            best + 1,
            int(waiting.argmax()) + 1,
            float(seconds[best]),
            float(beside[best]),
            float(tokens[best]),
        )


def _times(block_size: int, pair: Pair, most_requests: int, most_nodes: int) -> tuple[PassTimes, PassTimes]:
    """Of drafting and of verifying, by start-up's measurement."""
    powers = [2**i for i in range(most_requests.bit_length())]
    batches = [*(power for power in powers if power < most_requests), most_requests]
    lengths = sorted({n for n in (1, 2, 4, 8, 16, block_size) if n <= block_size})
    nodes = sorted({n for n in (16, most_nodes) if block_size < n <= most_nodes})
    most_tokens = pair.arrays.most_timed
    return (
        measure(pair.dummy_draft, batches, lengths[1:], most_tokens),
        measure(pair.dummy_verify, batches, lengths + nodes, most_tokens),
    )
