"""Draft trees: which candidates a round verifies beside the chain of the best ones.

A tree takes its nodes best first (arXiv 2604.12989): each time the node whose path is most probably right. So it is the
tree of its size with the most expected tokens, and its first n nodes are the best tree of n nodes. The probabilities
are the drafter's, as `Rates` has learned to read them. A chain is a tree of one candidate for each place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from heapq import heappop, heappush

import numpy as np

from dflash_trt.decoding.draft import Array, Candidates, Draft
from dflash_trt.decoding.length.policy import FixedLength, RoundDone
from dflash_trt.decoding.length.rates import Rates
from dflash_trt.decoding.request import Request


class Tree:
    """The best tree of a request's candidates, as far as it has grown. Node 0 is the anchor.

    tokens, parents, logprobs, chances: of each node; its chance is P(the node is right).
    """

    def __init__(
        self,
        anchor: int,
        tokens: Sequence[Sequence[int]] = (),
        rights: Sequence[Sequence[Sequence[float]]] = (),
        copied: Sequence[int] = (),
        survival: Sequence[float] = (),
    ) -> None:
        """tokens: the drafter's candidates of each place, best first.
        rights: P(a candidate is right | the path before it is), by whether an ancestor is not the best of its place.
        copied, survival: tokens from the request's own text, and P(the first 1, 2 .. are right).
        """
        self._candidates, self._rights, self._text, self._survival = tokens, rights, copied, survival
        self.tokens, self.parents, self.chances = [anchor], [-1], [1.0]
        self.copied: set[int] = set()  # the nodes that only the text proposes
        self._children: dict[tuple[int, int], int] = {}
        # By falling chance: place, parent, rank, whether an ancestor is not the best of its place, and the chance of
        # the parent. A copied token has the rank -1.
        self._heap: list[tuple[float, int, int, int, bool, float]] = []
        if tokens:
            self._push(0, 0, 0, False, 1.0)
        if copied:
            heappush(self._heap, (-survival[0], 0, 0, -1, False, 1.0))

    def grow(self, nodes: int) -> None:
        """Add nodes up to so many."""
        heap, chances = self._heap, self.chances
        while heap and len(chances) < nodes:
            chance, place, parent, rank, off, before = heappop(heap)
            if rank < 0:
                node = self._node(parent, self._text[place], -chance)
                if place + 1 < len(self._survival):
                    heappush(heap, (-self._survival[place + 1], place + 1, node, -1, False, -chance))
                continue
            node = self._node(parent, self._candidates[place][rank], -chance)
            self.copied.discard(node)
            if rank + 1 < len(self._candidates[place]):
                self._push(parent, place, rank + 1, off, before)
            if place + 1 < len(self._candidates):
                self._push(node, place + 1, 0, off or rank > 0, -chance)

    def _node(self, parent: int, token: int, chance: float) -> int:
        """The child of a node with this token, which both sources may propose."""
        node = self._children.setdefault((parent, token), len(self.tokens))
        if node == len(self.tokens):
            self.tokens.append(token)
            self.parents.append(parent)
            self.chances.append(chance)
            self.copied.add(node)
        return node

    def _push(self, parent: int, place: int, rank: int, off: bool, before: float) -> None:
        heappush(self._heap, (-before * self._rights[off][place][rank], place, parent, rank, off, before))


def grown(
    draft: Draft,
    candidates: Candidates,
    rights: Array,
    slots: Iterable[int],
    takes: Sequence[bool],
    copies: Mapping[int, tuple[Sequence[int], Sequence[float]]],
    nodes: int,
) -> dict[int, Tree]:
    """The trees of some slots, from `Rates.candidates` where a request `takes` the drafter, and from copied tokens with
    their survival.
    """
    anchors, trees = np.asarray(draft.tokens)[:, 0].tolist(), {}
    tokens, rights_of = np.asarray(candidates.tokens).tolist(), rights.swapaxes(0, 1).tolist()
    for slot in slots:
        copied, survival = copies.get(slot, ((), ()))
        found = tokens[slot] if takes[slot] else ()
        trees[slot] = Tree(anchors[slot], found, rights_of[slot], copied, survival)
        trees[slot].grow(nodes)
    return trees


def joined(draft: Draft, trees: Mapping[int, Tree], nodes: int) -> Draft:
    """The first nodes of the trees of some slots, as a draft. Requests without drafts may have any tokens.

    A tree without so many is continued by a chain of its anchor's token, which is as good a draft as any.
    """
    anchors = np.asarray(draft.tokens)[:, :1]
    tokens = np.repeat(anchors, nodes, axis=1)
    parents = np.tile(np.arange(-1, nodes - 1), (len(tokens), 1))
    copied, lengths = {}, {}
    for slot, tree in trees.items():
        lengths[slot] = length = min(nodes, len(tree.tokens))
        tokens[slot, :length], parents[slot, :length] = tree.tokens[:length], tree.parents[:length]
        if from_text := {node for node in tree.copied if node < length}:
            copied[slot] = from_text
    chains = bool((parents == np.arange(-1, nodes - 1)).all())
    logprobs = np.zeros((len(tokens), nodes - 1), np.float32)
    return Draft(tokens, None if chains else parents, logprobs, draft.candidates, copied, lengths)


def spliced(draft: Draft, copies: Mapping[int, Sequence[int]], nodes: int, slots: Iterable[int]) -> Draft:
    """The draft's chains of these slots, with up to `nodes` nodes, and tokens from the text in place of some."""
    known, drafted = np.asarray(draft.tokens), min(nodes, draft.nodes)
    tokens = np.repeat(known[:, :1], nodes, axis=1)
    logprobs = np.zeros((len(tokens), nodes - 1), np.float32)
    tokens[:, :drafted], logprobs[:, : drafted - 1] = known[:, :drafted], draft.logprobs[:, : drafted - 1]
    copied, lengths = {}, dict.fromkeys(slots, drafted)
    for slot, found in copies.items():
        lengths[slot] = length = min(nodes, 1 + len(found))
        tokens[slot, 1:length], copied[slot] = found[: length - 1], set(range(1, length))
    return Draft(tokens, None, logprobs, draft.candidates, copied, lengths)


class FixedCopies(FixedLength):
    """Chains of the same length from the requests' own texts alone."""

    def draft(self, active: Sequence[Request]) -> int:
        """1: the drafter is not asked."""
        return 1

    def select(self, draft: Draft, active: Sequence[Request], slots: Sequence[int], most: int) -> Draft:
        """What followed the longest matches."""
        copies = {slot: tokens for slot in slots if (tokens := active[slot].copied(self.most - 1)[0])}
        return spliced(draft, copies, self.most if copies else 1, slots)


class FixedTrees(FixedLength):
    """Trees of the same number of nodes in every round, including the anchor."""

    def __init__(self, length: int, drafts: int, nodes: int) -> None:
        super().__init__(length)
        self._nodes, self._rates = nodes, Rates(drafts)
        self._candidates: Candidates | None = None

    def select(self, draft: Draft, active: Sequence[Request], slots: Sequence[int], most: int) -> Draft:
        """Trees of so many nodes, within `most`."""
        nodes = min(self._nodes, most)
        if draft.candidates is None or not slots or nodes <= 1:
            return draft
        self._rates.seat(active)
        self._candidates = draft.candidates
        rights = self._rates.candidates(np.asarray(draft.candidates.logprobs))
        trees = grown(draft, draft.candidates, rights, slots, [True] * len(active), {}, nodes)
        return joined(draft, trees, max(len(tree.tokens) for tree in trees.values()))

    def observe(self, done: RoundDone) -> None:
        """Learn which candidates were right."""
        if self._candidates is not None and self._candidates is done.proposed.candidates:
            self._rates.learn_candidates(self._candidates, done.judged, done.decided)
