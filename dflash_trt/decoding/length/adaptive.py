"""The adaptive length: each round drafts and verifies what is expected to commit the most tokens per second.

With S_j the probability that the first j drafts of a request are all right, a round of length L commits
G(L) = 1 + S_1 + ... + S_{L-1} tokens per request on average, and takes T(L) seconds. Over many rounds, the tokens per
second are G(L) / T(L). T is the usual time of the round (`PassTimes`) plus the time of the host and the mean stall. S
is the mean of the probabilities that `Odds` gave recent drafts, because before the drafter has run, nothing else is
known of a draft.

A request's own text proposes drafts at once (`Lookup`), and `Odds` tells by the length of the match what they are
worth. Where they promise more than the drafter's for the time that both take, the drafter is not asked in this round,
and reads what it missed later. Where it is asked, each request gets the better source, or a tree of both.

Once it has run, its log-probabilities say more. So where the host can read them, those nodes are verified that are
worth the time of their rows: the number of nodes with the largest gain - rate * seconds.

Times and chances of lengths that are not in use grow old. So a share of the time is spent on trials of other lengths.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from dflash_trt.decoding.draft import Draft
from dflash_trt.decoding.length.odds import IDLE, Expected, Odds, Own
from dflash_trt.decoding.length.policy import RoundDone
from dflash_trt.decoding.length.times import LAST, PassTimes, Stalls, quarter_up
from dflash_trt.decoding.length.trees import Tree, joined, learn_ranks
from dflash_trt.decoding.lookup import Lookups
from dflash_trt.decoding.request import Request

Array = np.ndarray[Any, Any]

# The most nodes of a tree. Beyond, the measured gains are small.
MOST_NODES = 32
# `python -m build_scripts.bench.adaptive_length --constants` shows what half or twice each of these does.
# What trials may cost: a share of the rounds, and so many rounds in advance.
_SHARE, _CREDIT = 0.01, 2.0
# How much faster than plain decoding drafting has to promise to be: an estimate near 1 is as often wrong as right.
_MARGIN = 0.05
# Two bounds of the CPU time of a round: the rounds between plans, and the requests of a round that are counted.
_INTERVAL, _COUNTED = 8, 8


@dataclass(frozen=True)
class _Plan:
    """The best length for one batch size, including the anchor, and the next one to try.

    seconds, tokens: of a round of that length; beside: its seconds beside the usual time of its passes.
    verify: the seconds of verifying 1, 2 .. nodes.
    least: by the nodes so far, the fewest tokens with which a further one can pay.
    """

    length: int
    trial: int
    seconds: float
    beside: float
    tokens: float
    verify: list[float]
    least: list[float]

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


@dataclass(slots=True)
class _Seen:
    """What a request's drafts of this round were: candidates [places][W] and their log-probabilities,
    and the probability that the first 1, 2 .. best ones are right.
    """

    tokens: list[list[int]]
    said: list[list[float]]
    survival: list[float]


class AdaptiveLength:
    """A `Lengths` that learns. It knows no engine. For any numbers, it returns a length from 1 to the block size."""

    def __init__(
        self, block_size: int, draft_times: PassTimes, verify_times: PassTimes, most_nodes: int = 0
    ) -> None:
        """most_nodes: the most nodes of a tree; 0 verifies chains only."""
        self.block_size = self.most = block_size
        self.draft_times, self.verify_times, self._most_nodes = draft_times, verify_times, most_nodes
        self._odds, self._expected = Odds(block_size - 1), Expected(block_size - 1)
        self._own = WeakKeyDictionary[Request, Own]()  # of the running requests
        self._lookups = Lookups()
        # Of this round, by slot: drafts of the drafter; drafts from the text, the length of the match, and the
        # probability that the first 1, 2 .. are right.
        self._seen: dict[int, _Seen] = {}
        self._found: dict[int, tuple[list[int], int, list[float]]] = {}
        self._rate = 0.0  # tokens per second of recent rounds of as many requests
        self._host = deque[float](maxlen=LAST)  # seconds of recent rounds beside their passes
        self._stalls = Stalls()
        self._plans: dict[int, _Plan] = {}
        self._tried: dict[int, Array] = {}  # the round in which each length last ran, by batch size
        self._batch, self._trial = 1, False  # of this round
        self._untimed = False  # whether the trial before had no time for its draft
        self._rounds = self._idle = 0  # rounds in all, and since the last draft
        self._credit = _CREDIT

    def draft(self, active: Sequence[Request]) -> int:
        """The planned length, or now and then another one on trial; 1 where drafts from the texts promise more."""
        batch, self._seen = max(1, len(active)), {}
        if list(self._own) != active:
            known, self._own = self._own, WeakKeyDictionary()
            for each in active:
                self._own[each] = known.get(each) or Own(min(each.params.temperature, 2.0))
            self._rate = 0.0
        self._batch = batch
        self._found = {
            slot: (tokens, match, self._odds.copies(self._own[active[slot]], match, len(tokens)))
            for slot, (tokens, match) in self._lookups.find(active, self.block_size - 1).items()
        }
        plan = self._plan(batch)
        asks = any(request.takes_drafter for request in active)
        self._trial = asks and (self._credit > 0 or self._untimed) and self.verify_times.settled(batch)
        if self._trial:
            return plan.trial
        if self._found and (not asks or self._copies_pay(plan)):
            return 1
        return plan.length if asks else 1

    def _copies_pay(self, plan: _Plan) -> bool:
        """Whether drafts from the texts alone promise more tokens for their time than the plan."""
        own = (plan.tokens - self._batch) / self._batch
        best = rest = float(self._batch)
        gains = [0.0] * self.block_size
        for _, _, survival in self._found.values():
            rest += max(own, sum(survival))
            for i, right in enumerate(survival):
                gains[i + 1] += right
        rest += own * (self._batch - len(self._found))
        rate, gain, best = max(plan.rate, self._rate), 0.0, -float("inf")
        for nodes, more in enumerate(gains):
            gain += more
            best = max(best, gain - rate * plan.verify[nodes])
        return self._batch + best - rate * plan.beside > rest - rate * plan.seconds

    def select(self, draft: Draft, active: Sequence[Request], slots: Sequence[int], most: int) -> Draft:
        """As many nodes as are expected to be fastest: the first of each chain, or trees of at most `most` nodes."""
        if not slots or (self._trial and draft.nodes == 1) or not draft.at_hand:
            return draft  # waiting for a device's numbers costs more than it saves
        if draft.nodes == 1 and not self._found:
            return draft
        wide = draft.candidates is not None and most > 1 and self._most_nodes > 0
        counted = slots if wide or self._found else self._some(slots)
        if draft.nodes > 1:
            for slot in counted:
                if active[slot].takes_drafter:
                    self._seen[slot] = self._look(draft, active[slot], slot, wide=wide)
        if self._trial:
            return draft
        plan = self._plan(self._batch)
        if wide or self._found:
            return self._trees(plan, draft, active, slots, most)
        rate = plan.rate * len(counted) / len(slots)
        nodes, best, gain = 1, -rate * plan.verify[0], 0.0
        for place, right in enumerate(zip(*[each.survival for each in self._seen.values()], strict=True)):
            gain += sum(right)
            if gain - rate * plan.verify[place + 1] > best:
                nodes, best = place + 2, gain - rate * plan.verify[place + 1]
        return draft.first(nodes)

    def _trees(
        self, plan: _Plan, draft: Draft, active: Sequence[Request], slots: Sequence[int], most: int
    ) -> Draft:
        """Trees of both sources. Where `most` allows only chains, each has the source that promises more."""
        trees: dict[int, Tree] = {}
        wide = min(most, self._most_nodes) > 1 and draft.nodes > 1
        most = min(most, self._most_nodes, len(plan.verify)) if wide else self.block_size
        least = [each / len(slots) for each in plan.least]
        for slot in slots:
            seen = self._seen.get(slot) or _Seen([], [], [])
            copied, _, survival = self._found.get(slot, ([], 0, []))
            if copied and not wide:
                if sum(survival) > sum(seen.survival):
                    seen = _Seen([], [], [])
                else:
                    copied = []
            own, anchor = self._own[active[slot]], int(draft.tokens[slot, 0])
            trees[slot] = Tree(self._odds, own, anchor, seen.tokens, seen.said, copied, survival)
            trees[slot].grow(most, least)
        nodes, best, gain = 1, -float("inf"), 0.0
        for place in range(max(len(tree.chances) for tree in trees.values())):
            gain += sum([tree.chances[place] for tree in trees.values() if place < len(tree.chances)])
            if gain - plan.rate * plan.verify[place] > best:
                nodes, best = place + 1, gain - plan.rate * plan.verify[place]
        for slot, tree in trees.items():
            tree.grow(nodes)
            active[slot].fitting = min(nodes, len(tree.tokens))
        return joined(draft, trees, nodes) if nodes > 1 else draft.first(1)

    def _look(self, draft: Draft, request: Request, slot: int, *, wide: bool) -> _Seen:
        best: list[float] = draft.logprobs[slot].tolist()
        survival = self._odds.chain(self._own[request], best)
        if wide and draft.candidates is not None:
            return _Seen(
                draft.candidates.tokens[slot].tolist(), draft.candidates.logprobs[slot].tolist(), survival
            )
        return _Seen(
            [[token] for token in draft.tokens[slot, 1:].tolist()], [[each] for each in best], survival
        )

    def observe(self, done: RoundDone) -> None:
        """Learn the times and the acceptance of a round. What a trial cost is taken from the credit."""
        batch, drafts = max(1, done.batch), done.drafted > 1
        plan = self._plan(batch)
        timed, seconds, usual = self._learn_times(done, batch)
        survivals = self._survivals(done) if drafts else []
        self._credit = min(self._credit + _SHARE, _CREDIT)
        lost = 0.0
        if self._trial:
            # By its usual time, with what is beside it in a usual round: its own stalls say little.
            right = sum(sum(survival[: done.verified - 1]) for survival in survivals)
            tokens = batch + right * len(done.judged) / max(1, len(survivals))
            lost = (min(usual, seconds) + plan.beside) / plan.seconds - tokens / plan.tokens
            self._credit = max(self._credit - max(0.0, lost), -10 * _CREDIT)
        self._untimed = self._trial and not timed and not self._untimed
        if (
            lost >= 0 and not self._untimed and (drafts or done.verified == 1)
        ):  # a trial that pays or had no time is repeated
            self._tried[batch][done.drafted - 1] = self._rounds
        if drafts:
            self._expected.observe(survivals)
            self._idle = 0
        else:
            self._expected.fade(1 - 1 / IDLE, 1 - 1 / IDLE)
            self._idle += 1
        for slot, decided in zip(done.judged, done.decided, strict=True):
            self._learn_copies(done.active[slot], slot, decided)
        tokens_now, seconds = sum(map(len, done.decided)), seconds + done.host_seconds
        if 0 < seconds < 1e9 and tokens_now:
            self._rate += (tokens_now / seconds - self._rate) * (0.02 if self._rate else 1.0)
        if done.ended:
            self._expected.fade(1.0, 1 - done.ended / batch)
        self._rounds += 1
        if self._trial or self._rounds % _INTERVAL == 0 or self._rounds < _INTERVAL or done.ended:
            self._plans.clear()
        self._trial = False

    def _learn_times(self, done: RoundDone, batch: int) -> tuple[bool, float, float]:
        """Whether the round's passes tell usual times, its seconds, and the usual ones."""
        drafts, draft, verify = done.drafted > 1, self.draft_times, self.verify_times
        # A drafter that was off also reads the rows committed meanwhile.
        timed = verify.ran(batch, done.verified) and not (
            drafts and (self._idle or not draft.ran(batch, done.drafted))
        )
        if drafts and not self._idle:
            draft.observe(batch, done.drafted, done.draft_seconds, self._trial)
        verify.observe(batch, done.verified, done.verify_seconds, self._trial)
        seconds = done.verify_seconds + (done.draft_seconds if drafts else 0.0)
        usual = verify.of(batch, done.verified) + (draft.of(batch, done.drafted) if drafts else 0.0)
        if timed:
            self._stalls.observe(usual, seconds)
        if 0 <= done.host_seconds < 1e9:
            self._host.append(done.host_seconds)
        return timed, seconds, usual

    def _survivals(self, done: RoundDone) -> list[list[float]]:
        """Of requests, the probability that their first 1, 2 .. drafts were right, and 1 and 0 as they were where the
        host did not read what the drafter said. The odds learn from the results.
        """
        judged = dict(zip(done.judged, done.decided, strict=True))
        for slot, seen in self._seen.items():
            if slot in judged:
                learn_ranks(self._odds, self._own[done.active[slot]], seen.tokens, seen.said, judged[slot])
        if self._seen:
            return [seen.survival for seen in self._seen.values()]
        survivals = []
        asked = [slot for slot in done.judged if done.active[slot].takes_drafter]
        for slot in self._some(asked):
            pairs = zip(done.proposed.tokens_of(slot)[1:], judged[slot], strict=False)
            right = [float(drafted == token) for drafted, token in pairs]
            survivals.append(right[: right.index(0.0) + 1] if 0.0 in right else right)
        return survivals

    def _learn_copies(self, request: Request, slot: int, decided: Sequence[int]) -> None:
        """Learn whether what the text proposed was right, verified or not."""
        copied, match, _ = self._found.get(slot, ([], 0, []))
        for place, (found, token) in enumerate(zip(copied, decided, strict=False)):
            self._odds.learn_copied(self._own[request], match + place, found == token)
            if found != token:
                return

    def _some(self, slots: Sequence[int]) -> Sequence[int]:
        """Those that are counted in this round."""
        few = len(slots) // _COUNTED + 1
        return slots[self._rounds % few :: few]

    def _plan(self, batch: int) -> _Plan:
        if batch not in self._plans:
            self._plans[batch] = self._make_plan(batch)
        return self._plans[batch]

    def _make_plan(self, batch: int) -> _Plan:
        verify, draft = self.verify_times(batch), self.draft_times(batch)[: self.block_size]
        draft[0] = 0.0  # length 1 has no draft
        usual = np.minimum.accumulate((draft + verify[: self.block_size])[::-1])[::-1]
        tokens = batch * np.array(self._expected.tokens())
        beside = self._stalls(usual) + (quarter_up(self._host) if self._host else 0.0)
        seconds = usual + beside
        rates = tokens / seconds
        best = int(rates.argmax())
        if rates[best] < (1 + _MARGIN) * rates[0]:
            best = 0
        # Each trial costs about as much in sum: what costs half is tried twice as often.
        lost = np.maximum(seconds / seconds[best] - tokens / tokens[best], 0) + 0.05
        if batch not in self._tried:
            self._tried[batch] = np.full(self.block_size, -1)
        waiting = (1 + self._rounds - self._tried[batch]) / lost
        waiting[best] = -1.0
        rate, nodes = float(rates[best]), np.arange(len(verify))
        each = (verify[None] - verify[:, None]) / np.maximum(nodes[None] - nodes[:, None], 1)
        each[nodes[None] <= nodes[:, None]] = np.inf
        return _Plan(
            length=best + 1,
            trial=int(waiting.argmax()) + 1,
            seconds=float(seconds[best]),
            beside=float(beside[best]),
            tokens=float(tokens[best]),
            verify=verify.tolist(),
            least=[0.0, *(rate * each.min(axis=1)).tolist()],
        )
