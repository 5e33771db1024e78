"""Draft trees: which candidates a round verifies beside the chain of the best ones.

A tree takes its nodes best first (arXiv 2604.12989): each time the node whose path is most probably right. So it is the
tree of its size with the most expected tokens, and its first n nodes are the best tree of n nodes. The probabilities
are the drafter's, calibrated by place and rank (`NodeOdds`).

The width follows the rule of the adaptive length: the number of nodes with the largest gain - rate * seconds. Where
more rows do not pay, that is a chain, and the chain's own policy decides its length.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Any

import numpy as np

from dflash_trt.decoding.draft import Draft
from dflash_trt.decoding.length.adaptive import AdaptiveLength
from dflash_trt.decoding.length.node_odds import NodeOdds
from dflash_trt.decoding.length.policy import Lengths, RoundDone

Array = np.ndarray[Any, Any]

# The most nodes that the policy itself chooses. Beyond, the measured gains are small.
MOST_NODES = 32
# The share of the evidence on tokens per second that remains after a round.
_MEMORY = 0.98


def best_first(on: Sequence[Sequence[float]], off: Sequence[Sequence[float]], nodes: int) -> tuple[Any, ...]:
    """The best tree of `nodes` nodes, including the anchor: parents, places, ranks, and P(the node is right) of each.

    on, off [drafts][W]: the probability of each candidate if its parent is right; `off` after a path that left the
    best candidates. They fall from rank to rank. Fewer nodes if there are no more.
    """
    parents, places, ranks, chances = [-1], [-1], [0], [1.0]
    heap: list[tuple[float, int, int, int, bool]] = []

    def push(parent: int, place: int, rank: int, left: bool) -> None:
        chance = chances[parent] * (off if left else on)[place][rank]
        heappush(heap, (-chance, place, parent, rank, left))

    if on:
        push(0, 0, 0, False)
    while heap and len(parents) < nodes:
        chance, place, parent, rank, left = heappop(heap)
        parents.append(parent)
        places.append(place)
        ranks.append(rank)
        chances.append(-chance)
        if rank + 1 < len(on[place]):
            push(parent, place, rank + 1, left)
        if place + 1 < len(on):
            push(len(parents) - 1, place + 1, 0, left or rank > 0)
    return parents, places, ranks, chances


class TreeLengths:
    """A `Lengths` that adds trees to one for chains.

    nodes: the nodes of every tree, including the anchor. None: as many as are expected to be fastest, which needs the
    adaptive length.
    """

    def __init__(self, chains: Lengths, drafts: int, nodes: int | None = None) -> None:
        if nodes is None and not isinstance(chains, AdaptiveLength):
            raise ValueError("only the adaptive length knows how many nodes are fastest")
        self.chains, self.most, self._nodes = chains, chains.most, nodes
        self._odds = NodeOdds(drafts)
        self._batch = 1
        self._tokens = self._seconds = 0.0  # of recent rounds
        # The candidates of the round: tokens and log-probabilities.
        self._seen: tuple[Array, Array] | None = None

    def draft(self, batch: int) -> int:
        """The length of the chains."""
        self._batch, self._seen = batch, None
        return self.chains.draft(batch)

    def select(self, draft: Draft, slots: Sequence[int], most: int) -> Draft:
        """Trees of the given number of nodes, or of the fastest one; chains where other nodes do not pay."""
        # On a device, waiting for the numbers costs more than it saves.
        alone = self._nodes is None and (self._trial or not draft.at_hand)
        if alone or draft.candidates is None or not slots or most <= 1:
            return self.chains.select(draft, slots, most)
        tokens, said = (np.asarray(x) for x in (draft.candidates.tokens, draft.candidates.logprobs))
        self._seen = tokens, said
        wanted = min(most, MOST_NODES if self._nodes is None else self._nodes)
        on, off = self._odds(said)
        trees = {slot: best_first(on[slot].tolist(), off[slot].tolist(), wanted) for slot in slots}
        nodes = len(next(iter(trees.values()))[0])
        if self._nodes is None:
            nodes = self._fastest(np.array([tree[3] for tree in trees.values()]))
        parents = np.zeros((len(tokens), nodes), np.int64)
        parents[:, 0] = -1
        # Requests without drafts may have any tokens.
        drafted = np.repeat(np.asarray(draft.tokens)[:, :1], nodes, axis=1)
        logprobs = np.zeros((len(tokens), nodes - 1), np.float32)
        for slot, (above, places, ranks, _) in trees.items():
            parents[slot] = above[:nodes]
            chosen = places[1:nodes], ranks[1:nodes]
            drafted[slot, 1:] = tokens[slot][chosen]
            logprobs[slot] = said[slot][chosen]
        chains = (parents[list(slots)] == np.arange(-1, nodes - 1)).all()
        if chains and self._nodes is None:
            return self.chains.select(draft, slots, most)
        if chains:
            return Draft(draft.tokens[:, :nodes], None, draft.logprobs[:, : nodes - 1], draft.candidates)
        return Draft(drafted, parents, logprobs, draft.candidates)

    def observe(self, done: RoundDone) -> None:
        """Learn which candidates were right, and let the chains' policy learn."""
        seconds = done.draft_seconds + done.verify_seconds
        if done.drafted > 1 and 0 < seconds < 1e9:
            self._tokens = _MEMORY * self._tokens + sum(map(len, done.decided))
            self._seconds = _MEMORY * self._seconds + seconds
        if self._seen is not None:
            tokens, said = self._seen
            ranks = [
                ranks_of(tokens[slot], taken) for slot, taken in zip(done.judged, done.decided, strict=True)
            ]
            self._odds.observe(said[list(done.judged)], ranks)
        self.chains.observe(done)

    @property
    def _trial(self) -> bool:
        return isinstance(self.chains, AdaptiveLength) and self.chains.in_trial

    def _fastest(self, chances: Array) -> int:
        """The best number of nodes, from P(right) of each [requests, nodes], best first."""
        assert isinstance(self.chains, AdaptiveLength)
        rate, seconds = self.chains.prices(self._batch, chances.shape[1])
        if self._seconds > 0:
            rate = max(rate, self._tokens / self._seconds)
        gains = np.cumsum(chances.sum(axis=0))[: len(seconds)]
        return int(np.argmax(gains - rate * seconds[: len(gains)])) + 1


def ranks_of(candidates: Array, taken: Sequence[int]) -> list[int]:
    """The rank of each decided token among the candidates [drafts, W] of its place.

    The first token that is not a candidate has rank W, and ends the list.
    """
    ranks = list[int]()
    width = candidates.shape[1]
    for place, token in enumerate(taken[: len(candidates)]):
        of_token = np.flatnonzero(candidates[place] == token)
        ranks.append(int(of_token[0]) if len(of_token) else width)
        if not len(of_token):
            break
    return ranks
