"""Draft trees: which candidates a round verifies beside the chain of the best ones.

A tree takes its nodes best first (arXiv 2604.12989): each time the node whose path is most probably right. So it is the
tree of its size with the most expected tokens, and its first n nodes are the best tree of n nodes. The probabilities
are the drafter's, as `Odds` has learned to read them. A chain is a tree of one candidate for each place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from math import exp

import numpy as np

from dflash_trt.decoding.draft import Draft
from dflash_trt.decoding.length.odds import Odds, Own, Said, Tokens, relative
from dflash_trt.decoding.length.policy import FixedLength, RoundDone
from dflash_trt.decoding.request import Request

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
        tokens: Tokens,
        said: Said,
        copied: Sequence[int] = (),
        survival: Sequence[float] = (),
    ) -> None:
        """copied, survival: tokens from the request's own text, and P(the first 1, 2 .. are right)."""
        self._odds, self._own, self._candidates, self._said = odds, own, tokens, said
        self._text, self._survival = copied, survival
        self.tokens, self.parents, self.logprobs, self.chances = [anchor], [-1], [0.0], [1.0]
        self.copied: set[int] = set()  # the nodes that only the text proposes
        self._children: dict[tuple[int, int], int] = {}
        # P(a candidate is right | the path before it is), by whether an ancestor is not the best of its place, place
        # and rank, as far as they were asked for.
        self._rights: list[list[list[float]]] = [[[] for _ in tokens] for _ in range(2)]
        # By falling chance: place, parent, rank, whether an ancestor is not the best of its place, and the chance of
        # the parent. A copied token has the rank -1.
        self._heap: list[tuple[float, int, int, int, bool, float]] = []
        if tokens:
            self._push(0, 0, 0, False, 1.0)
        if copied:
            heappush(self._heap, (-survival[0], 0, 0, -1, False, 1.0))

    def chance(self, node: int) -> float:
        """P(a node is right), of a tree that has grown so far; 0 if there is none."""
        self.grow(node + 1)
        return self.chances[node] if node < len(self.chances) else 0.0

    def grow(self, nodes: int) -> None:
        """Add nodes up to so many."""
        heap, chances, said = self._heap, self.chances, self._said
        while heap and len(chances) < nodes:
            chance, place, parent, rank, off, before = heappop(heap)
            if rank < 0:
                node = self._node(parent, self._text[place], 0.0, -chance)
                if place + 1 < len(self._survival):
                    heappush(heap, (-self._survival[place + 1], place + 1, node, -1, False, -chance))
                continue
            node = self._node(parent, self._candidates[place][rank], said[place][rank], -chance)
            self.copied.discard(node)
            if rank + 1 < len(said[place]):
                self._push(parent, place, rank + 1, off, before)
            if place + 1 < len(said):
                self._push(node, place + 1, 0, off or rank > 0, -chance)

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

    def _push(self, parent: int, place: int, rank: int, off: bool, before: float) -> None:
        rights = self._rights[off][place]
        if rank == len(rights):
            said = self._said[place]
            mass = sum([exp(min(logprob, 0.0)) for logprob in said[:rank]])
            right = self._odds.candidate(self._own, place, relative(said[rank], mass), rank, off)
            rights.append((1 - sum(rights)) * right)
        heappush(self._heap, (-before * rights[rank], place, parent, rank, off, before))


def joined(draft: Draft, trees: Mapping[int, Tree], nodes: int) -> Draft:
    """The first nodes of the trees of some slots, as a draft. Requests without drafts may have any tokens.

    A tree without so many is continued by a chain of its anchor's token, which is as good a draft as any.
    """
    tokens, parents, logprobs, copied = [], [], [], {}
    chain, chains = list(range(-1, nodes - 1)), True
    for slot, anchor in enumerate(np.asarray(draft.tokens)[:, 0].tolist()):
        tree = trees.get(slot)
        known = tree.tokens[:nodes] if tree else [anchor]
        before = (tree.parents[:nodes] if tree else []) + chain[len(known) if tree else 0 :]
        said = tree.logprobs[1:nodes] if tree else []
        tokens.append(known + [anchor] * (nodes - len(known)))
        parents.append(before)
        logprobs.append(said + [0.0] * (nodes - 1 - len(said)))
        chains = chains and before == chain
        if tree and (own := {node for node in tree.copied if node < nodes}):
            copied[slot] = own
    said_of = np.array(logprobs, np.float32).reshape(len(tokens), nodes - 1)
    lengths = {slot: min(nodes, len(tree.tokens)) for slot, tree in trees.items()}
    parents_of = None if chains else np.array(parents)
    return Draft(np.array(tokens), parents_of, said_of, draft.candidates, copied, lengths)


class FixedCopies(FixedLength):
    """Chains of the same length from the requests' own texts alone."""

    def draft(self, active: Sequence[Request]) -> int:
        """1: the drafter is not asked."""
        return 1

    def select(self, draft: Draft, active: Sequence[Request], slots: Sequence[int], most: int) -> Draft:
        """What followed the longest matches."""
        trees: dict[int, Tree] = {}
        for slot in slots:
            tokens, match = active[slot].copied(self.most - 1)
            if match:
                anchor, survival = int(draft.tokens[slot, 0]), [1.0] * len(tokens)
                trees[slot] = Tree(_NO_ODDS, active[slot].own, anchor, (), (), tokens, survival)
                trees[slot].grow(self.most)
        found = joined(draft, trees, self.most) if trees else draft
        found.lengths.update({slot: 1 for slot in slots if slot not in trees})
        return found


class FixedTrees(FixedLength):
    """Trees of the same number of nodes in every round, including the anchor."""

    def __init__(self, length: int, drafts: int, nodes: int) -> None:
        super().__init__(length)
        self._nodes, self._odds = nodes, Odds(drafts)
        self._seen: dict[int, tuple[Tokens, Said]] = {}

    def select(self, draft: Draft, active: Sequence[Request], slots: Sequence[int], most: int) -> Draft:
        """Trees of so many nodes, within `most`."""
        self._seen = {}
        nodes = min(self._nodes, most)
        if draft.candidates is None or not slots or nodes <= 1:
            return draft
        tokens, said = (np.asarray(x) for x in (draft.candidates.tokens, draft.candidates.logprobs))
        trees: dict[int, Tree] = {}
        for slot in slots:
            self._seen[slot] = tokens[slot].tolist(), said[slot].tolist()
            trees[slot] = Tree(self._odds, active[slot].own, int(draft.tokens[slot, 0]), *self._seen[slot])
            trees[slot].grow(nodes)
        return joined(draft, trees, max(len(tree.tokens) for tree in trees.values()))

    def observe(self, done: RoundDone) -> None:
        """Learn which candidates were right."""
        for slot, decided in zip(done.judged, done.decided, strict=True):
            if slot in self._seen:
                self._odds.learn(done.active[slot].own, *self._seen[slot], decided)
