"""Draft trees: which candidates a round verifies beside the chain of the best ones.

A tree takes its nodes best first (arXiv 2604.12989): each time the node whose path is most probably right. So it is the
tree of its size with the most expected tokens, and its first n nodes are the best tree of n nodes. The probabilities
are the drafter's, as `Odds` has learned to read them. A chain is a tree of one candidate for each place.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from math import exp, log
from typing import Any

import numpy as np

from dflash_trt.decoding.draft import Draft
from dflash_trt.decoding.length.odds import FEW_RANKS, Odds, Own, log_odds
from dflash_trt.decoding.length.policy import FixedLength, RoundDone
from dflash_trt.decoding.lookup import Lookups
from dflash_trt.decoding.request import Request

Array = np.ndarray[Any, Any]
_NO_ODDS = Odds(1)  # of trees without candidates


class Tree:
    """The best tree of a request's candidates, as far as it has grown. Node 0 is the anchor.

    tokens, parents, logprobs, chances: of each node; its chance is P(the node is right).
    """

    def __init__(
        self,
        odds: Odds,
        own: Own,
        anchor: int,
        tokens: Sequence[Sequence[int]],
        said: Sequence[Sequence[float]],
        copied: Sequence[int] = (),
        survival: Sequence[float] = (),
    ) -> None:
        """tokens, said [places][W]: the drafter's candidates of each place, best first, and their log-probabilities.

        copied, survival: tokens from the request's own text, and the probability that the first 1, 2 .. are right.
        """
        self._odds, self._own, self._candidates, self._said = odds, own, tokens, said
        self._text, self._survival = copied, survival
        self.tokens, self.parents, self.logprobs, self.chances = [anchor], [-1], [0.0], [1.0]
        self.copied = set[int]()  # the nodes that only the text proposes
        self._children: dict[tuple[int, int], int] = {}
        # By falling chance: place, parent, rank, whether an ancestor is not the best of its place, the probability of
        # the path without better siblings of this candidate, and the mass that these had for the drafter. A copied
        # token has the rank -1.
        self._heap: list[tuple[float, int, int, int, bool, float, float]] = []
        if tokens:
            self._push(0, 0, 0, False, 1.0, 0.0)
        if copied:
            heappush(self._heap, (-survival[0], 0, 0, -1, False, 0.0, 0.0))

    def grow(self, nodes: int, least: Sequence[float] | None = None) -> None:
        """Add nodes up to so many, while the next one's chance is at least `least[nodes so far]`."""
        heap, chances = self._heap, self.chances
        while heap and len(chances) < nodes:
            if least is not None and -heap[0][0] < least[len(chances)]:
                return
            chance, place, parent, rank, left, rest, mass = heappop(heap)
            if rank < 0:
                node = self._node(parent, self._text[place], 0.0, -chance)
                if place + 1 < len(self._text):
                    heappush(heap, (-self._survival[place + 1], place + 1, node, -1, False, 0.0, 0.0))
                continue
            logprob = self._said[place][rank]
            node = self._node(parent, self._candidates[place][rank], logprob, -chance)
            self.copied.discard(node)
            if rank + 1 < len(self._said[place]):
                self._push(parent, place, rank + 1, left, rest + chance, mass + exp(min(logprob, 0.0)))
            if place + 1 < len(self._said):
                self._push(node, place + 1, 0, left or rank > 0, -chance, 0.0)

    def _node(self, parent: int, token: int, logprob: float, chance: float) -> int:
        """The child of a node with this token, which both sources may propose."""
        node = self._children.setdefault((parent, token), len(self.tokens))
        if node == len(self.tokens):
            self.tokens.append(token)
            self.parents.append(parent)
            self.logprobs.append(logprob)
            self.chances.append(chance)
            self.copied.add(node)
        return node

    def _push(self, parent: int, place: int, rank: int, left: bool, rest: float, mass: float) -> None:
        x = relative(self._said[place][rank], mass)
        chance = rest * self._odds.drafted(self._own, place, x, rank, left)
        heappush(self._heap, (-chance, place, parent, rank, left, rest, mass))


def relative(logprob: float, mass: float) -> float:
    """The log-odds of a candidate if its better siblings, with this mass, are wrong."""
    return log_odds(logprob - log(max(1 - mass, 1e-9)) if mass else logprob)


def joined(draft: Draft, trees: dict[int, Tree], nodes: int) -> Draft:
    """The first nodes of the trees of some slots, as a draft. Requests without drafts may have any tokens.

    A tree without so many is continued by a chain of its anchor's token, which is as good a draft as any.
    """
    count = draft.tokens.shape[0]
    tokens = np.repeat(np.asarray(draft.tokens)[:, :1], nodes, axis=1)
    parents = np.tile(np.arange(-1, nodes - 1), (count, 1))
    logprobs = np.zeros((count, nodes - 1), np.float32)
    copied: dict[int, set[int]] = {}
    for slot, tree in trees.items():
        known = min(nodes, len(tree.tokens))
        tokens[slot, :known], parents[slot, :known] = tree.tokens[:known], tree.parents[:known]
        logprobs[slot, : known - 1] = tree.logprobs[1:known]
        if own := {node for node in tree.copied if node < known}:
            copied[slot] = own
    chains = (parents == np.arange(-1, nodes - 1)).all()
    return Draft(tokens, None if chains else parents, logprobs, draft.candidates, copied)


def learn_ranks(
    odds: Odds,
    own: Own,
    tokens: Sequence[Sequence[int]],
    said: Sequence[Sequence[float]],
    decided: Sequence[int],
) -> None:
    """Learn which candidates were right. Places after a token that is no candidate count no more: they were computed
    for another history.
    """
    off = False
    for place, (candidates, logprobs, token) in enumerate(zip(tokens, said, decided, strict=False)):
        mass = 0.0
        for rank, (candidate, logprob) in enumerate(zip(candidates, logprobs, strict=True)):
            if rank < FEW_RANKS:  # they say enough
                odds.learn_drafted(own, place, relative(logprob, mass), candidate == token, rank, off)
            if candidate == token:
                break
            mass += exp(min(logprob, 0.0))
        else:
            return
        off = off or rank > 0


class FixedCopies(FixedLength):
    """Chains of the same length from the requests' own texts alone."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self._lookups = Lookups()

    def draft(self, active: Sequence[Request]) -> int:
        """1: the drafter is not asked."""
        return 1

    def select(self, draft: Draft, active: Sequence[Request], slots: Sequence[int], most: int) -> Draft:
        """What followed the longest matches."""
        trees: dict[int, Tree] = {}
        for slot, (tokens, _) in self._lookups.find(active, self.most - 1).items():
            anchor, own = int(draft.tokens[slot, 0]), Own(0.0)
            trees[slot] = Tree(_NO_ODDS, own, anchor, (), (), tokens, [1.0] * len(tokens))
            trees[slot].grow(self.most)
        for slot in slots:
            active[slot].fitting = self.most if slot in trees else 1
        return joined(draft, trees, self.most) if trees else draft


class FixedTrees(FixedLength):
    """Trees of the same number of nodes in every round, including the anchor."""

    def __init__(self, length: int, drafts: int, nodes: int) -> None:
        super().__init__(length)
        self._nodes, self._odds = nodes, Odds(drafts)
        self._seen: dict[int, tuple[Own, list[list[int]], list[list[float]]]] = {}

    def select(self, draft: Draft, active: Sequence[Request], slots: Sequence[int], most: int) -> Draft:
        """Trees of so many nodes, within `most`."""
        self._seen = {}
        nodes = min(self._nodes, most)
        if draft.candidates is None or not slots or nodes <= 1:
            return draft
        tokens, said = (np.asarray(x) for x in (draft.candidates.tokens, draft.candidates.logprobs))
        trees: dict[int, Tree] = {}
        for slot in slots:
            own = Own(active[slot].params.temperature)
            self._seen[slot] = own, tokens[slot].tolist(), said[slot].tolist()
            trees[slot] = Tree(self._odds, own, int(draft.tokens[slot, 0]), *self._seen[slot][1:])
            trees[slot].grow(nodes)
        return joined(draft, trees, max(len(tree.tokens) for tree in trees.values()))

    def observe(self, done: RoundDone) -> None:
        """Learn which candidates were right."""
        for slot, decided in zip(done.judged, done.decided, strict=True):
            if slot in self._seen:
                learn_ranks(self._odds, *self._seen[slot], decided)
