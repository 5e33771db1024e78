"""The adaptive length: each round drafts and verifies what is expected to commit the most tokens per second.

With S_j the probability that the first j drafts of a request are all right, a round of length L commits
G(L) = 1 + S_1 + ... + S_{L-1} tokens per request on average, and takes T(L) seconds. Over many rounds, the tokens per
second are G(L) / T(L). T is the usual time of the round's passes (`PassTimes`) plus the time of the host. S is the mean
of the probabilities that `Odds` gave recent drafts, because before the drafter has run, nothing else is known of a
draft.

A request's own text proposes drafts at once (`Lookup`), and `Odds` tells by the length of the match what they are
worth. Where they promise more than the drafter's for the time that both take, the drafter is not asked in this round,
and reads what it missed later. Where it is asked, each request gets the better source, or a tree of both.

Once it has run, its log-probabilities say more. So where the host can read them, those nodes are verified that are
worth the time of their rows: the number of nodes with the largest gain - rate * seconds.

Times and chances of lengths that are not in use grow old. So a share of the time is spent on trials of other lengths.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from dflash_trt.decoding.draft import Draft
from dflash_trt.decoding.length.odds import LONG, Expected, Odds, Said, Tokens
from dflash_trt.decoding.length.policy import RoundDone
from dflash_trt.decoding.length.times import PassTimes
from dflash_trt.decoding.length.trees import Tree, joined
from dflash_trt.decoding.request import Request

# The most nodes of a tree. Beyond, the measured gains are small.
MOST_NODES = 32
# `python -m build_scripts.bench.adaptive_length --constants` shows what half or twice each of these does.
# What trials may cost: a share of the rounds, and so many rounds in advance.
_SHARE, _CREDIT = 0.01, 2.0
# How much faster than plain decoding drafting has to promise to be: an estimate near 1 is as often wrong as right.
_MARGIN = 0.05
# Rounds over which evidence on stalls fades by 1/e, and the most usual rounds that one counts for: a suspended machine
# says nothing about the next round.
_ROUNDS, _LONGEST = 100, 32.0
# Bounds of the CPU time of a round: the rounds between plans, the requests of a round that are counted, and the nodes
# after the best number of them that are looked at.
_INTERVAL, _COUNTED, _PATIENCE = 16, 8, 3


@dataclass(frozen=True, slots=True)
class _Plan:
    """The best length for one batch size, including the anchor, and the next one to try.

    seconds, beside, tokens: of a round of that length: usual ones of its passes, all others, and what it commits.
    draft, verify: the seconds of passes of 1, 2 .. rows of each request.
    """

    length: int
    trial: int
    seconds: float
    beside: float
    tokens: float
    draft: list[float]
    verify: list[float]

    @property
    def rate(self) -> float:
        return self.tokens / (self.seconds + self.beside)

    def best(self, rate: float, chances: Iterable[Sequence[float]]) -> tuple[int, float]:
        """The nodes with the largest gain - rate * seconds, and this. chances: that nodes 1, 2 .. are right."""
        nodes, gain, best = 1, 0.0, -rate * self.verify[0]
        for place, right in enumerate(chances, 1):
            gain += sum(right)
            if (worth := gain - rate * self.verify[place]) > best:
                nodes, best = place + 1, worth
            elif place >= nodes + _PATIENCE:
                break
        return nodes, best


class AdaptiveLength:
    """A `Lengths` that learns. It knows no engine. For any numbers, it returns a length from 1 to the block size."""

    def __init__(
        self, block_size: int, draft_times: PassTimes, verify_times: PassTimes, most_nodes: int = 0
    ) -> None:
        """most_nodes: the most nodes of a tree; 0 verifies chains only."""
        self.block_size = self.most = block_size
        self.draft_times, self.verify_times, self._most_nodes = draft_times, verify_times, most_nodes
        self._odds, self._expected = Odds(block_size - 1), Expected(block_size - 1)
        # Of this round, by slot: drafts of the drafter; drafts from the text, the length of the match, and the
        # probability that the first 1, 2 .. are right.
        self._seen: dict[int, tuple[Tokens, Said, list[float]]] = {}
        self._found: dict[int, tuple[list[int], int, list[float]]] = {}
        self._beside = 0.0  # mean seconds of a round beside its usual passes
        self._plans: dict[tuple[int, bool], _Plan] = {}  # by batch size, and whether the drafter may be asked
        self._tried: dict[int, list[int]] = {}  # the round in which each length last ran, by batch size
        self._asks = self._trial = False  # of this round
        self._untimed = False  # whether the trial before had no time for its draft
        self._rounds = self._idle = 0  # rounds in all, and since the last draft
        self._credit = _CREDIT

    def draft(self, active: Sequence[Request]) -> int:
        """The planned length, or now and then another one on trial; 1 where drafts from the texts promise more."""
        self._seen, self._found = {}, {}
        for slot, request in enumerate(active):
            tokens, match = request.copied(self.block_size - 1)
            if match:
                self._found[slot] = tokens, match, self._odds.copies(request.own, match, len(tokens))
        self._asks = any(request.takes_drafter for request in active)
        batch = max(1, len(active))
        plan = self._plan(batch)
        due = self._asks and (self._credit > 0 or self._untimed)
        self._trial = due and self.verify_times.settled(batch)
        if self._trial:
            return plan.trial
        return 1 if self._found and plan.length > 1 and self._copies_pay(plan, batch) else plan.length

    def _copies_pay(self, plan: _Plan, batch: int) -> bool:
        """Whether drafts from the texts alone promise more tokens for their time than the plan."""
        own = plan.tokens / batch - 1
        survivals = [survival for _, _, survival in self._found.values()]
        rest = own * (batch - len(survivals)) + sum([max(own, sum(survival)) for survival in survivals])
        _, best = plan.best(plan.rate, zip_longest(*survivals, fillvalue=0.0))
        return best > rest - plan.rate * plan.seconds

    def select(self, draft: Draft, active: Sequence[Request], slots: Sequence[int], most: int) -> Draft:
        """As many nodes as are expected to be fastest: the first of each chain, or trees of at most `most` nodes."""
        if not slots or (draft.nodes == 1 and (self._trial or not self._found)):
            return draft
        if not draft.at_hand:  # waiting for a device's numbers costs more than it saves
            return self._replaced(draft, active)
        wide = draft.candidates is not None and most > 1 and self._most_nodes > 0
        trees = wide or bool(self._found)
        for slot in slots if trees else self._some(slots):
            if draft.nodes > 1 and active[slot].takes_drafter:
                tokens, said = draft.tokens[slot, 1:, None], draft.logprobs[slot, :, None]
                if wide and draft.candidates is not None:
                    tokens, said = draft.candidates.tokens[slot], draft.candidates.logprobs[slot]
                survival = self._odds.chain(active[slot].own, draft.logprobs[slot].tolist())
                self._seen[slot] = tokens.tolist(), said.tolist(), survival
        if self._trial:
            return draft
        plan = self._plan(max(1, len(active)))
        if trees:
            return self._trees(plan, draft, active, slots, most)
        survivals = [survival for _, _, survival in self._seen.values()]
        rate = plan.rate * len(survivals) / len(slots)
        return draft.first(plan.best(rate, zip_longest(*survivals, fillvalue=0.0))[0])

    def _trees(
        self, plan: _Plan, draft: Draft, active: Sequence[Request], slots: Sequence[int], most: int
    ) -> Draft:
        """Trees of both sources. Where `most` allows only chains, each has the source that promises more."""
        wide = min(most, self._most_nodes) > 1 and draft.nodes > 1
        most = min(most, self._most_nodes, len(plan.verify)) if wide else self.block_size
        trees: dict[int, Tree] = {}
        for slot in slots:
            tokens, said, own_survival = self._seen.get(slot, ((), (), []))
            copied, _, survival = self._found.get(slot, ([], 0, []))
            if copied and not wide:
                if sum(survival) > sum(own_survival):
                    tokens, said = (), ()
                else:
                    copied = []
            anchor = int(draft.tokens[slot, 0])
            trees[slot] = Tree(self._odds, active[slot].own, anchor, tokens, said, copied, survival)
        chances = ([tree.chance(node) for tree in trees.values()] for node in range(1, most))
        nodes, _ = plan.best(plan.rate, chances)
        return joined(draft, trees, nodes) if nodes > 1 else draft.first(1)

    def _replaced(self, draft: Draft, active: Sequence[Request]) -> Draft:
        """The drafter's chains, or what texts propose for requests without it, and where that promises more than its
        drafts are worth on average.
        """
        usual, drafts = self._expected.tokens()[draft.nodes - 1] - 1, draft.nodes - 1
        for slot, (copied, _, survival) in self._found.items():
            if not active[slot].takes_drafter or (not self._trial and sum(survival[:drafts]) > usual):
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
        survivals = self._survivals(done)
        self._credit = min(self._credit + _SHARE, _CREDIT)
        if self._trial:
            self._account(done, batch, survivals, timed)
        if drafted > 1:
            self._expected.observe(survivals)
            self._idle = 0
        else:
            self._idle += 1
            if self._idle % _INTERVAL == 0:  # what no draft renews grows old, too
                self._expected.fade(*[(1 - 1 / LONG) ** _INTERVAL] * 2)
        if done.ended:
            self._expected.fade(1.0, 1 - done.ended / batch)
        self._rounds += 1
        if self._trial or self._rounds % _INTERVAL == 0 or self._rounds < _INTERVAL or done.ended:
            self._plans.clear()
            if not self._asks:
                self.verify_times.forget_old(batch)
        self._trial = False

    def _learn_beside(self, done: RoundDone, batch: int) -> None:
        """The mean of the host's time and of half of the stalls: some come in so many rounds, others in so much
        work.
        """
        plan = self._plan(batch)
        stall = done.verify_seconds - plan.verify[done.verified - 1]
        if done.proposed.nodes > 1:
            stall += done.draft_seconds - plan.draft[done.proposed.nodes - 1]
        beside = min(max(done.host_seconds + stall / 2, 0.0), _LONGEST * plan.seconds)
        if beside == beside:
            self._beside += (beside - self._beside) / _ROUNDS

    def _account(
        self, done: RoundDone, batch: int, survivals: Sequence[Sequence[float]], timed: bool
    ) -> None:
        """Take the cost of a trial from the credit, by its usual time, and the time of prompts that it read. One that
        pays or had no time is repeated; kept times, which it did not correct, may be far too long.
        """
        plan, drafted = self._plan(batch), done.proposed.nodes
        seconds = self.verify_times(batch)[done.verified - 1]
        if drafted > 1:
            usual = self.draft_times(batch)[drafted - 1]
            seconds += max(usual, done.draft_seconds) if done.read > self.block_size else usual
        if not timed:
            seconds = min(seconds, done.verify_seconds + done.draft_seconds)
        seconds += plan.beside
        right = sum([sum(survival[: done.verified - 1]) for survival in survivals])
        tokens = batch + right * len(done.judged) / max(1, len(survivals))
        lost = seconds / (plan.seconds + plan.beside) - tokens / plan.tokens
        self._credit = max(self._credit - max(0.0, lost), -10 * _CREDIT)
        self._untimed = not timed and not self._untimed
        if lost >= 0 and not self._untimed:
            self._tried[batch][drafted - 1] = self._rounds

    def _survivals(self, done: RoundDone) -> list[list[float]]:
        """Of requests, the probability that their first 1, 2 .. drafts were right, and 1 and 0 as they were where the
        host did not read what the drafter said. The odds learn from the results.
        """
        judged = dict(zip(done.judged, done.decided, strict=True))
        for slot, (copied, match, _) in self._found.items():
            if slot in judged:
                self._odds.learn_copies(done.active[slot].own, match, copied, judged[slot])
        for slot, (tokens, said, _) in self._seen.items():
            if slot in judged:
                self._odds.learn(done.active[slot].own, tokens, said, judged[slot])
        if self._seen or done.proposed.nodes == 1:
            return [survival for _, _, survival in self._seen.values()]
        survivals = []
        copied_slots = done.proposed.copied
        for slot in self._some([s for s in judged if done.active[s].takes_drafter and s not in copied_slots]):
            pairs = zip(done.proposed.tokens_of(slot)[1:], judged[slot], strict=False)
            right = [float(drafted == token) for drafted, token in pairs]
            survivals.append(right[: right.index(0.0) + 1] if 0.0 in right else right)
        return survivals

    def _some(self, slots: Sequence[int]) -> Sequence[int]:
        """Those that are counted in this round."""
        few = len(slots) // _COUNTED + 1
        return slots[self._rounds % few :: few]

    def _plan(self, batch: int) -> _Plan:
        """The plan for a batch size, made anew after `_plans` was cleared."""
        if (known := self._plans.get((batch, self._asks))) is not None:
            return known
        verify, draft = self.verify_times(batch), self.draft_times(batch)
        passes = [verify[0], *map(sum, zip(verify[1 : self.block_size], draft[1:], strict=False))]
        tokens = [batch * each for each in self._expected.tokens()]
        seconds = [each + self._beside for each in passes]
        rates = [each / time for each, time in zip(tokens, seconds, strict=True)]
        best = rates.index(max(rates))
        if not self._asks or rates[best] < (1 + _MARGIN) * rates[0]:
            best = 0
        tried = self._tried.setdefault(batch, [-1] * self.block_size)
        # Each trial costs about as much in sum: what costs half is tried twice as often.
        lost = [max(a / seconds[best] - b / tokens[best], 0.0) for a, b in zip(seconds, tokens, strict=True)]
        waiting = [(1 + self._rounds - last) / (each + 0.05) for last, each in zip(tried, lost, strict=True)]
        waiting[best] = -1.0
        trial = waiting.index(max(waiting)) + 1
        plan = _Plan(best + 1, trial, passes[best], self._beside, tokens[best], draft, verify)
        self._plans[batch, self._asks] = plan
        return plan
