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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from dflash_trt.decoding.draft import Draft
from dflash_trt.decoding.length.odds import IDLE, Expected, Odds, Said, Tokens
from dflash_trt.decoding.length.policy import RoundDone
from dflash_trt.decoding.length.times import LAST, PassTimes, Stalls, quarter_up
from dflash_trt.decoding.length.trees import Tree, joined
from dflash_trt.decoding.request import Request

# The most nodes of a tree. Beyond, the measured gains are small.
MOST_NODES = 32
# `python -m build_scripts.bench.adaptive_length --constants` shows what half or twice each of these does.
# What trials may cost: a share of the rounds, and so many rounds in advance.
_SHARE, _CREDIT = 0.01, 2.0
# How much faster than plain decoding drafting has to promise to be: an estimate near 1 is as often wrong as right.
_MARGIN = 0.05
# Two bounds of the CPU time of a round: the rounds between plans, and the requests of a round that are counted.
_INTERVAL, _COUNTED = 8, 8


@dataclass(frozen=True, slots=True)
class _Plan:
    """The best length for one batch size, including the anchor, and the next one to try.

    seconds, tokens: of a round of that length; beside: its seconds beside the usual time of its passes.
    draft, verify: the seconds of passes of 1, 2 .. rows of each request.
    steps: by the nodes so far, the least seconds of each further one (`PassTimes.steps`).
    """

    length: int
    trial: int
    seconds: float
    beside: float
    tokens: float
    draft: list[float]
    verify: list[float]
    steps: list[float]

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    def best(self, rate: float, chances: Iterable[Sequence[float]]) -> tuple[int, float]:
        """The nodes with the largest gain - rate * seconds, and this. chances: that nodes 1, 2 .. are right."""
        nodes, gain, best = 1, 0.0, -rate * self.verify[0]
        for place, right in enumerate(chances, 1):
            gain += sum(right)
            if (worth := gain - rate * self.verify[place]) > best:
                nodes, best = place + 1, worth
        return nodes, best


# A request's drafts of a round, and the probability that the first 1, 2 .. best ones are right.
_Seen = tuple[Tokens, Said, list[float]]


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
        self._seen: dict[int, _Seen] = {}
        self._found: dict[int, tuple[list[int], int, list[float]]] = {}
        self._rate = 0.0  # tokens per second of recent rounds of the same requests
        self._host = deque[float](maxlen=LAST)  # seconds of recent rounds beside their passes
        self._stalls = Stalls()
        self._plans: dict[tuple[int, bool], _Plan] = {}  # by batch size, and whether the drafter may be asked
        self._tried: dict[int, list[int]] = {}  # the round in which each length last ran, by batch size
        self._batch, self._asks, self._trial = 1, False, False  # of this round
        self._untimed = False  # whether the trial before had no time for its draft
        self._rounds = self._idle = 0  # rounds in all, and since the last draft
        self._credit = _CREDIT

    def draft(self, active: Sequence[Request]) -> int:
        """The planned length, or now and then another one on trial; 1 where drafts from the texts promise more."""
        if self._batch != (batch := max(1, len(active))):
            self._batch, self._rate = batch, 0.0
        self._seen, self._found = {}, {}
        for slot, request in enumerate(active):
            tokens, match = request.copied(self.block_size - 1)
            if match:
                self._found[slot] = tokens, match, self._odds.copies(request.own, match, len(tokens))
        asks = self._asks = any(request.takes_drafter for request in active)
        plan = self._plan(batch)
        self._trial = asks and (self._credit > 0 or self._untimed) and self.verify_times.settled(batch)
        if self._trial:
            return plan.trial
        if self._found and (not asks or self._copies_pay(plan)):
            return 1
        return plan.length if asks else 1

    def _copies_pay(self, plan: _Plan) -> bool:
        """Whether drafts from the texts alone promise more tokens for their time than the plan."""
        own = (plan.tokens - self._batch) / self._batch
        survivals = [survival for _, _, survival in self._found.values()]
        rest = own * (self._batch - len(survivals)) + sum([max(own, sum(survival)) for survival in survivals])
        rate = max(plan.rate, self._rate)
        _, best = plan.best(rate, zip_longest(*survivals, fillvalue=0.0))
        return best - rate * plan.beside > rest - rate * plan.seconds

    def select(self, draft: Draft, active: Sequence[Request], slots: Sequence[int], most: int) -> Draft:
        """As many nodes as are expected to be fastest: the first of each chain, or trees of at most `most` nodes."""
        if not slots or (self._trial and draft.nodes == 1):
            return draft
        if not draft.at_hand:  # waiting for a device's numbers costs more than it saves
            return self._replaced(draft, active)
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
        survivals = [survival for _, _, survival in self._seen.values()]
        return draft.first(plan.best(rate, zip(*survivals, strict=True))[0])

    def _trees(
        self, plan: _Plan, draft: Draft, active: Sequence[Request], slots: Sequence[int], most: int
    ) -> Draft:
        """Trees of both sources. Where `most` allows only chains, each has the source that promises more."""
        trees: dict[int, Tree] = {}
        wide = min(most, self._most_nodes) > 1 and draft.nodes > 1
        most = min(most, self._most_nodes, len(plan.verify)) if wide else self.block_size
        for slot in slots:
            tokens, said, own_survival = self._seen.get(slot, ((), (), []))
            copied, _, survival = self._found.get(slot, ([], 0, []))
            if copied and not wide:
                if sum(survival) > sum(own_survival):
                    tokens, said = (), ()
                else:
                    copied = []
            own, anchor = active[slot].own, int(draft.tokens[slot, 0])
            trees[slot] = Tree(self._odds, own, anchor, tokens, said, copied, survival)
            trees[slot].grow(most, plan.steps, plan.rate / len(slots))
        chances = zip_longest(*[tree.chances[1:] for tree in trees.values()], fillvalue=0.0)
        nodes, _ = plan.best(plan.rate, chances)
        for slot, tree in trees.items():
            tree.grow(nodes)
            active[slot].fitting = min(nodes, len(tree.tokens))
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

    def _look(self, draft: Draft, request: Request, slot: int, *, wide: bool) -> _Seen:
        survival = self._odds.chain(request.own, draft.logprobs[slot].tolist())
        if wide and draft.candidates is not None:
            tokens, said = draft.candidates.tokens[slot], draft.candidates.logprobs[slot]
        else:
            tokens, said = draft.tokens[slot, 1:, None], draft.logprobs[slot, :, None]
        return tokens.tolist(), said.tolist(), survival

    def observe(self, done: RoundDone) -> None:
        """Learn the times and the acceptance of a round. What a trial cost is taken from the credit."""
        batch, drafts = max(1, len(done.active)), done.drafted > 1
        plan = self._plan(batch)
        timed, seconds, usual = self._learn_times(done, batch, plan)
        survivals = self._survivals(done) if drafts else []
        self._credit = min(self._credit + _SHARE, _CREDIT)
        lost = 0.0
        if self._trial:
            # By its usual time, with what is beside it in a usual round: its own stalls say little.
            right = sum([sum(survival[: done.verified - 1]) for survival in survivals])
            tokens = batch + right * len(done.judged) / max(1, len(survivals))
            lost = (min(usual, seconds) + plan.beside) / plan.seconds - tokens / plan.tokens
            self._credit = max(self._credit - max(0.0, lost), -10 * _CREDIT)
        self._untimed = self._trial and not timed and not self._untimed
        # A trial that pays or had no time is repeated.
        if lost >= 0 and not self._untimed and (drafts or done.verified == 1):
            self._tried[batch][done.drafted - 1] = self._rounds
        if drafts:
            self._expected.observe(survivals)
            self._idle = 0
        else:
            self._expected.fade(1 - 1 / IDLE, 1 - 1 / IDLE)
            self._idle += 1
        for slot, decided in zip(done.judged, done.decided, strict=True):
            if slot in self._found:
                copied, match, _ = self._found[slot]
                self._odds.learn_copies(done.active[slot].own, match, copied, decided)
        tokens_now, seconds = sum(map(len, done.decided)), seconds + done.host_seconds
        if 0 < seconds < 1e9 and tokens_now:
            self._rate += (tokens_now / seconds - self._rate) * (0.02 if self._rate else 1.0)
        if done.ended:
            self._expected.fade(1.0, 1 - done.ended / batch)
            self._rate = 0.0
        self._rounds += 1
        if self._trial or self._rounds % _INTERVAL == 0 or self._rounds < _INTERVAL or done.ended:
            self._plans.clear()
        self._trial = False

    def _learn_times(self, done: RoundDone, batch: int, plan: _Plan) -> tuple[bool, float, float]:
        """Whether the round's passes tell usual times, its seconds, and the usual ones."""
        timed = self.verify_times.observe(batch, done.verified, done.verify_seconds, self._trial)
        drafts, seconds = done.drafted > 1, done.verify_seconds
        if drafts:
            seconds += done.draft_seconds
            # A drafter that was off also reads the rows committed meanwhile.
            timed &= not self._idle and self.draft_times.observe(
                batch, done.drafted, done.draft_seconds, self._trial
            )
        verify, draft = plan.verify, plan.draft
        if self._trial:  # which may have corrected them
            verify, draft = self.verify_times(batch), self.draft_times(batch)
        usual = verify[done.verified - 1] + (draft[done.drafted - 1] if drafts else 0.0)
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
        for slot, (tokens, said, _) in self._seen.items():
            if slot in judged:
                self._odds.learn(done.active[slot].own, tokens, said, judged[slot])
        if self._seen:
            return [survival for _, _, survival in self._seen.values()]
        survivals = []
        copied = done.proposed.copied
        for slot in self._some([s for s in judged if done.active[s].takes_drafter and s not in copied]):
            pairs = zip(done.proposed.tokens_of(slot)[1:], judged[slot], strict=False)
            right = [float(drafted == token) for drafted, token in pairs]
            survivals.append(right[: right.index(0.0) + 1] if 0.0 in right else right)
        return survivals

    def _some(self, slots: Sequence[int]) -> Sequence[int]:
        """Those that are counted in this round."""
        few = len(slots) // _COUNTED + 1
        return slots[self._rounds % few :: few]

    def _plan(self, batch: int) -> _Plan:
        key = batch, self._asks
        if key not in self._plans:
            self._plans[key] = self._make_plan(batch)
        return self._plans[key]

    def _make_plan(self, batch: int) -> _Plan:
        verify, draft = self.verify_times(batch), self.draft_times(batch)
        usual = [verify[0], *map(sum, zip(verify[1 : self.block_size], draft[1:], strict=False))]
        tokens = [batch * each for each in self._expected.tokens()]
        host = quarter_up(self._host) if self._host else 0.0
        beside = [stall + host for stall in self._stalls(usual)]
        seconds = [sum(each) for each in zip(usual, beside, strict=True)]
        rates = [each / time for each, time in zip(tokens, seconds, strict=True)]
        best = rates.index(max(rates))
        if not self._asks or rates[best] < (1 + _MARGIN) * rates[0]:
            best = 0
        tried = self._tried.setdefault(batch, [-1] * self.block_size)
        # Each trial costs about as much in sum: what costs half is tried twice as often.
        lost = [max(a / seconds[best] - b / tokens[best], 0.0) for a, b in zip(seconds, tokens, strict=True)]
        waiting = [(1 + self._rounds - last) / (each + 0.05) for last, each in zip(tried, lost, strict=True)]
        waiting[best] = -1.0
        return _Plan(
            length=best + 1,
            trial=waiting.index(max(waiting)) + 1,
            seconds=seconds[best],
            beside=beside[best],
            tokens=tokens[best],
            draft=draft,
            verify=verify,
            steps=self.verify_times.steps(batch),
        )
