"""The adaptive length: each round drafts and verifies what is expected to commit the most tokens per second.

With S_j the probability that the first j drafts of a request are all right, a round of length L commits
G(L) = 1 + S_1 + ... + S_{L-1} tokens per request on average, and takes T(L) seconds. Over many rounds, the tokens per
second are G(L) / T(L). T is the usual time of the round's passes (`PassTimes`) plus the time of the host. S is the mean
of recent drafts (`Rates`), because before the drafter has run, nothing else is known of a draft.

A request's own text proposes drafts at once (`Lookup`). Where they promise more than the drafter's for the time that
both take, the drafter is not asked in this round, and reads what it missed later. Where it is asked, each request gets
the better source, or a tree of both.

Once it has run, its log-probabilities say more. So where the host can read them, those nodes are verified that are
worth the time of their rows: the number of nodes with the largest gain - rate * seconds.

Times and rates of lengths that are not in use grow old. So a share of the time is spent on trials of other lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dflash_trt.decoding.draft import Array, Candidates, Draft
from dflash_trt.decoding.length.policy import RoundDone
from dflash_trt.decoding.length.rates import Rates
from dflash_trt.decoding.length.times import PassTimes
from dflash_trt.decoding.length.trees import grown, joined, spliced
from dflash_trt.decoding.request import Request

# The most nodes of a tree. Beyond, the measured gains are small.
MOST_NODES = 32
# `python -m build_scripts.bench.adaptive_length --constants` shows what half or twice each of these does.
# What trials may cost: a share of the rounds, and so many rounds in advance.
_SHARE, _CREDIT = 0.01, 2.0
# What a trial costs at least, in rounds: the plan is made anew after each. And how often it is repeated at most.
_LEAST, _REPEATS = 0.03, 3
# How much faster than plain decoding drafting has to promise to be: an estimate near 1 is as often wrong as right.
_MARGIN = 0.05
# Rounds over which evidence on stalls fades by 1/e, and the most usual rounds that one counts for: a suspended machine
# says nothing about the next round.
_ROUNDS, _LONGEST = 100, 32.0
_INTERVAL = 16  # rounds between plans, at most: new requests are soon known


@dataclass(frozen=True, slots=True)
class _Plan:
    """The best length for one batch size, including the anchor, and the next one to try.

    seconds, tokens: of a round of the best length.
    gains: the drafts that are expected to be right, of a request, by length.
    draft, verify: seconds of passes by rows. costs: tokens that are worth the rows after the first of the target's.
    """

    length: int
    trial: int
    seconds: float
    tokens: float
    gains: Array
    draft: list[float]
    verify: list[float]
    costs: Array

    def best(self, right: Array) -> int:
        """The nodes with the largest gain - rate * seconds. right: the drafts of all requests that are expected to be
        right at places 1, 2 ..
        """
        worth = right.cumsum() - self.costs[1 : len(right) + 1]
        nodes = int(worth.argmax())
        return nodes + 2 if worth[nodes] > 0 else 1


class AdaptiveLength:
    """A `Lengths` that learns. It knows no engine. For any numbers, it returns a length from 1 to the block size."""

    def __init__(
        self, block_size: int, draft_times: PassTimes, verify_times: PassTimes, most_nodes: int = 0
    ) -> None:
        """most_nodes: the most nodes of a tree; 0 verifies chains only."""
        self.block_size = self.most = block_size
        self.draft_times, self.verify_times, self._most_nodes = draft_times, verify_times, most_nodes
        self._rates = Rates(block_size - 1)
        # Of this round: whether each request takes the drafter, whether the length is a trial, drafts from the text
        # and the length of their match by slot, the probabilities that their first 1, 2 .. are right, and those of the
        # drafter's, if the host knows them, with the candidates of trees.
        self._takes: list[bool] = []
        self._trial = False
        self._found: dict[int, tuple[list[int], int]] = {}
        self._copied = self._none = np.zeros((0, block_size - 1))
        self._survival: Array | None = None
        self._right: list[int] = []  # how many were right, by slot
        self._candidates: Candidates | None = None
        # By batch size, and how many requests take the drafter.
        self._plans: dict[tuple[int, int], _Plan] = {}
        self._tried: dict[int, Array] = {}  # the round in which each length last ran, by batch size
        self._beside = 0.0  # mean seconds of a round beside its usual passes
        self._again = self._repeats = 0  # the length of a trial that is repeated, and how often it was
        self._rounds = self._idle = 0  # rounds in all, and since the last draft
        self._since, self._until = 0, 0.0  # rounds since the last plan, and until the next one
        self._credit = _CREDIT

    def draft(self, active: Sequence[Request]) -> int:
        """The planned length, or now and then another one on trial; 1 where drafts from the texts promise more."""
        self._rates.seat(active)
        self._takes = [request.takes_drafter for request in active]
        self._survival, self._candidates, self._copied, self._found = None, None, self._none, {}
        for slot, request in enumerate(active):
            tokens, match = request.copied(self.block_size - 1)
            if match:
                self._found[slot] = tokens, match
        if self._found:
            matches = [match for _, match in self._found.values()]
            self._copied = self._rates.copies(list(self._found), matches, self.block_size - 1)
        batch = max(1, len(active))
        plan, due = self._plan(batch), True in self._takes and (self._credit > 0 or self._again > 0)
        self._trial = due and self.verify_times.settled(batch)
        length = self._with_texts(plan) if self._found and plan.length > 1 else plan.length
        if self._found and length != plan.length:  # texts promise more: trials wait
            self._trial = False
        return (self._again or plan.trial) if self._trial else length

    def _with_texts(self, plan: _Plan) -> int:
        """The length where some texts propose drafts: 1 where the drafter is not worth its time."""
        copied, costs = np.zeros((len(self._found), self.block_size)), plan.costs[: self.block_size]
        copied[:, 1:] = self._copied.cumsum(axis=1)
        alone = copied.sum(axis=0) - costs
        takes = [self._takes[slot] for slot in self._found]
        both = np.maximum(copied, np.outer(takes, plan.gains)).sum(axis=0)
        both += (self._takes.count(True) - sum(takes)) * plan.gains
        both -= costs + plan.tokens / plan.seconds * np.array(plan.draft)
        length = int(both[1:].argmax()) + 2
        return length if both[length - 1] > alone.max() else 1

    def select(self, draft: Draft, active: Sequence[Request], slots: Sequence[int], most: int) -> Draft:
        """As many nodes as are expected to be fastest: the first of each chain, or trees of at most `most` nodes."""
        if not slots or (draft.nodes == 1 and (self._trial or not self._found)):
            return draft
        if not draft.at_hand:  # waiting for a device's numbers costs more than it saves
            return self._replaced(draft, active) if self._found else draft
        most = min(most, self._most_nodes)
        wide = draft.nodes > 1 and most > 1 and (draft.candidates is not None or bool(self._found))
        plan = self._plan(max(1, len(active)))
        if wide:
            return self._trees(plan, draft, slots, min(most, len(plan.verify)))
        if draft.nodes > 1:
            self._survival = self._rates.chains(draft.logprobs)
        return draft if self._trial else self._chains(plan, draft, slots)

    def _chains(self, plan: _Plan, draft: Draft, slots: Sequence[int]) -> Draft:
        """Of each request the chain that promises more, up to where rows are no longer worth their time."""
        if not self._found and self._survival is not None:
            taken = self._survival if all(self._takes) else self._survival[self._takes]
            return draft.first(plan.best(taken.sum(axis=0) if len(taken) > 1 else taken[0]))
        survival, copies = np.zeros((draft.tokens.shape[0], self.block_size - 1)), dict[int, list[int]]()
        if self._survival is not None:
            survival[self._takes, : draft.nodes - 1] = self._survival[self._takes]
        for (slot, (tokens, _)), right in zip(self._found.items(), self._copied, strict=True):
            if right.sum() > survival[slot].sum():
                copies[slot], survival[slot] = tokens, right
        return spliced(draft, copies, plan.best(survival.sum(axis=0)), slots)

    def _trees(self, plan: _Plan, draft: Draft, slots: Sequence[int], most: int) -> Draft:
        """Trees of both sources."""
        candidates = draft.candidates or Candidates(draft.tokens[:, 1:, None], draft.logprobs[:, :, None])
        rights = self._rates.candidates(candidates.logprobs)
        self._survival, self._candidates = rights[0, :, :, 0].cumprod(axis=1), candidates
        if self._trial:
            return draft
        copied = dict(zip(self._found, self._copied.tolist(), strict=True))
        texts = {slot: (self._found[slot][0], right) for slot, right in copied.items()}
        trees = grown(draft, candidates, rights, slots, self._takes, texts, most)
        right = np.zeros(most - 1)
        for tree in trees.values():
            right[: len(tree.chances) - 1] += tree.chances[1:]
        nodes = plan.best(right)
        return joined(draft, trees, nodes) if nodes > 1 else draft.first(1)

    def _replaced(self, draft: Draft, active: Sequence[Request]) -> Draft:
        """The drafter's chains, or what texts propose for requests without it, and where that promises more than its
        drafts are worth on average.
        """
        drafts = draft.nodes - 1
        usual = self._plan(max(1, len(active))).gains[drafts]
        for (slot, (copied, _)), right in zip(self._found.items(), self._copied, strict=True):
            if not active[slot].takes_drafter or (not self._trial and right[:drafts].sum() > usual):
                draft.replaced[slot] = copied[:drafts]
                draft.copied[slot] = set(range(1, 1 + len(copied[:drafts])))
        return draft

    def observe(self, done: RoundDone) -> None:
        """Learn the times and the acceptance of a round. What a trial cost is taken from the credit."""
        batch, drafted = max(1, len(done.active)), done.proposed.nodes
        timed = self.verify_times.observe(batch, done.verified, done.verify_seconds, self._trial)
        if drafted > 1:
            # A pass that also read prompts, or tokens committed while the drafter was off, tells no usual time.
            late = self._idle > 0 or done.read > self.block_size
            timed &= not late and self.draft_times.observe(batch, drafted, done.draft_seconds, self._trial)
        if timed and not self._trial:
            self._learn_beside(done, batch)
        self._learn(done)
        self._credit = min(self._credit + _SHARE, _CREDIT)
        if self._trial:
            self._account(done, batch, timed)
        self._idle = 0 if drafted > 1 else self._idle + 1
        if done.ended:
            self._rates.end(done.ended / batch)
        self._rounds += 1
        self._since += 1
        if done.ended:
            self._until *= 1 - done.ended / batch
        if self._trial or self._since >= self._until:
            self._plans.clear()
            self._since, self._until = 0, min(2 * self._until + 1, _INTERVAL)
            if True not in self._takes:
                self.verify_times.forget_old(batch)
        self._trial = False

    def _learn(self, done: RoundDone) -> None:
        """Learn which drafts were right."""
        if self._found:
            judged = dict(zip(done.judged, done.decided, strict=True))
            pairs = [_compared(tokens, judged.get(slot, ())) for slot, (tokens, _) in self._found.items()]
            self._rates.learn_copies(
                list(self._found), [right for right, _ in pairs], [seen for _, seen in pairs]
            )
        if done.proposed.nodes == 1:
            self._rates.pause()
            return
        proposed, copied = np.asarray(done.proposed.tokens)[:, 1:].tolist(), done.proposed.copied
        self._right, seen = [0] * len(proposed), [0] * len(proposed)
        for slot, tokens in zip(done.judged, done.decided, strict=True):
            if self._takes[slot] and slot not in copied:
                self._right[slot], seen[slot] = _compared(proposed[slot], tokens)
        if self._candidates is not None:
            self._rates.learn_candidates(self._candidates, done.judged, done.decided)
        self._rates.learn(self._right, seen, read=self._survival is not None)

    def _learn_beside(self, done: RoundDone, batch: int) -> None:
        """The mean of the host's time and of half of the stalls: some come in so many rounds, others in so much
        work.
        """
        plan, drafted = self._plan(batch), done.proposed.nodes
        stall = (
            done.verify_seconds
            - plan.verify[done.verified - 1]
            + done.draft_seconds
            - plan.draft[drafted - 1]
        )
        longest = _LONGEST * (plan.draft[plan.length - 1] + plan.verify[plan.length - 1])
        beside = min(max(done.host_seconds + stall / 2, 0.0), longest)
        if beside == beside:
            self._beside += (beside - self._beside) / _ROUNDS

    def _account(self, done: RoundDone, batch: int, timed: bool) -> None:
        """Take the cost of a trial from the credit, by its usual time, and the time of prompts that it read. One that
        had no time, or whose time no other confirmed, is repeated: it may be a stall, or a kept one that is wrong.
        """
        plan, drafted = self._plan(batch), done.proposed.nodes
        seconds = self.verify_times(batch)[done.verified - 1]
        if drafted > 1:
            usual = self.draft_times(batch)[drafted - 1]
            seconds += max(usual, done.draft_seconds) if done.read > self.block_size else usual
        if not timed:
            seconds = min(seconds, done.verify_seconds + done.draft_seconds)
        tokens = batch + self._gained(done)
        lost = float((seconds + self._beside) / plan.seconds - tokens / plan.tokens)
        sure = timed and self.verify_times.sure(batch, done.verified)
        sure &= drafted == 1 or self.draft_times.sure(batch, drafted)
        if done.read > self.block_size:
            self._credit = max(self._credit - lost, -10 * _CREDIT)
        else:
            cost = max(_LEAST, lost if sure else min(lost, 1.0))
            self._credit = max(self._credit - cost, min(self._credit, -2 * _CREDIT))
        self._repeats = 0 if sure else (self._repeats + 1) % _REPEATS
        self._again = drafted if self._repeats else 0
        if lost >= 0 and not self._repeats:
            self._tried[batch][drafted - 1] = self._rounds

    def _gained(self, done: RoundDone) -> float:
        """The drafts of the drafter that a round was expected to commit, or did where the host did not read them."""
        if done.proposed.nodes == 1:
            return 0.0
        if self._survival is not None:
            return float(self._survival[self._takes, : done.verified - 1].sum())
        return float(sum([min(right, done.verified - 1) for right in self._right]))

    def _plan(self, batch: int) -> _Plan:
        """The plan for a batch size, made anew after `_plans` was cleared."""
        asked = self._takes.count(True)
        if (known := self._plans.get((batch, asked))) is not None:
            return known
        verify, draft = self.verify_times(batch), self.draft_times(batch)[: self.block_size]
        draft[0] = 0.0
        gains = self._rates.gains()
        seconds, tokens = verify[: self.block_size] + draft + self._beside, batch + asked * gains
        rates = tokens / seconds
        best = int(rates.argmax())
        if not asked or not rates[best] > (1 + _MARGIN) * rates[0]:
            best = 0
        tried = self._tried.setdefault(batch, np.full(self.block_size, -1.0))
        # Each trial costs about as much in sum: what costs half is tried twice as often.
        lost = np.maximum(seconds / seconds[best] - tokens / tokens[best], 0.0)
        waiting = (1 + self._rounds - tried) / (lost + 0.05)
        waiting[best] = -1.0
        costs, trial = rates[best] * (verify - verify[0]), int(waiting.argmax()) + 1
        if self.verify_times.changed(batch) and best:  # plain decoding may be faster now
            self._again, self._repeats = 1, 0
        usual = float(seconds[best]), float(tokens[best])
        plan = _Plan(best + 1, trial, *usual, gains, draft.tolist(), verify.tolist(), costs)
        self._plans[batch, asked] = plan
        return plan


def _compared(drafts: Sequence[int], decided: Sequence[int]) -> tuple[int, int]:
    """How many drafts were right, and how many were judged."""
    right = 0
    for draft, token in zip(drafts, decided, strict=False):
        if draft != token:
            return right, right + 1
        right += 1
    return right, right
