"""A draft, and the result of the target's pass over it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from dflash_trt.decoding.request import Request
from dflash_trt.decoding.sampling.philox import gumbel

Array = np.ndarray[Any, Any]

# The weight of the noise in `couple`. Below 1, because the drafter is less sure than the target which tokens are close
# to each other.
_NOISE_WEIGHT = 0.5


@dataclass(slots=True)
class Candidates:
    """The W best tokens of each drafted place, for n requests, best first. A drafter that is built for trees has W > 1.

    tokens: int64 [n, K-1, W]. Those of a place differ. Column 0 is the chain.
    logprobs: float32 [n, K-1, W], the drafter's log-probabilities of them.

    A drafter whose places depend on each other gives those that follow column 0 of the place before.
    The arrays may be on a device until their numbers are read.
    """

    tokens: Any
    logprobs: Any


@dataclass(slots=True)
class Draft:
    """Trees of N nodes for n requests. Node 0 is the anchor. Every other node comes after its parent.

    The children of a node have different tokens.

    tokens: int64 [n, N].
    parents: int [n, N], -1 for the anchor. None: chains, where every node follows the previous one.
    logprobs: float32 [n, N-1], the drafter's log-probabilities of nodes 1 .. N-1.
    candidates: what a tree can be built from; None if the drafter gives one token for each place.
    copied: by slot, the nodes that come from the request's own text (`Lookup`) and not from the drafter. `first` leaves
        those in that it cuts off.
    lengths: by slot, how many of a request's nodes count, including the anchor; all, where it says nothing.
    replaced: by slot, copied tokens that shall take the place of a device's chain (`Arrays.replace`).

    The arrays may be on a device until their numbers are read.
    """

    tokens: Any
    parents: Any
    logprobs: Any
    candidates: Candidates | None = None
    copied: dict[int, set[int]] = field(default_factory=dict)
    lengths: dict[int, int] = field(default_factory=dict)
    replaced: dict[int, list[int]] = field(default_factory=dict)
    nodes: int = field(init=False)  # N, including the anchor
    _rows: list[list[int]] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.nodes = int(self.tokens.shape[1])

    @property
    def at_hand(self) -> bool:
        """Whether the host can read the log-probabilities without waiting for a device."""
        return isinstance(self.logprobs, np.ndarray)

    def first(self, nodes: int) -> Draft:
        """Its first nodes. Of a tree, every parent comes before its children."""
        if nodes >= self.nodes:
            return self
        parents = None if self.parents is None else self.parents[:, :nodes]
        tokens, logprobs = self.tokens[:, :nodes], self.logprobs[:, : nodes - 1]
        return Draft(tokens, parents, logprobs, self.candidates, self.copied, self.lengths)

    def length_of(self, slot: int, request: Request) -> int:
        """How many of a request's nodes count, including the anchor."""
        return request.most_nodes(min(self.nodes, self.lengths.get(slot, self.nodes)))

    def tokens_of(self, slot: int) -> list[int]:
        """The tokens of one request's nodes, once they are verified."""
        if self._rows is None:
            self._rows = np.asarray(self.tokens).tolist()
        return self._rows[slot]

    def parents_of(self, slot: int) -> list[int] | None:
        """The parents of one request's nodes; None for a chain."""
        if self.parents is None:
            return None
        parents: list[int] = np.asarray(self.parents[slot]).tolist()
        return parents


@dataclass(slots=True)
class Verified:
    """The result of a pass over a `Draft` of n requests with N nodes each. The next pass overwrites its arrays.

    accepted, next_token: int [n], the number of accepted nodes of a chain after the anchor, and the token after them.
    They hold for the requests that the engine has `decided` [n], and cover all nodes, whatever a request's own
    length. The host decides for the others from their logits.
    finite: bool [n, N], whether a row of logits has a finite largest value; None if all have. NaN and +infinity are
    not finite; -infinity only excludes a token.
    logits: float32 [N, V] by slot, of requests that the engine has not decided or that ask for log-probabilities which
        it does not give.
    logprobs: by slot, for other requests that ask for them, of each node: the log-probability of the token after it
        [N], and the most probable tokens, int64 [N, W], with theirs [N, W], best first.
    drafts_finite: [n], whether the drafter's numbers of this round were finite.
    sampled: int64 [n, N], the engine's token after each node, -1 if its logits are not finite; instead of `accepted`
    and `next_token` where the engine has decided over trees.
    `finite`, `logits`, `logprobs` and `sampled` may have further rows, of a pass's padding.
    """

    accepted: Any
    next_token: Any
    decided: Sequence[bool]
    finite: Any
    logits: Any
    drafts_finite: Sequence[bool]
    sampled: Any = None
    logprobs: Mapping[int, tuple[Array, Array, Array]] = field(default_factory=dict)


def couple(draft: Draft, active: Sequence[Request], weight: float = _NOISE_WEIGHT) -> Draft:
    """The draft with the candidates of sampled requests in the order of log-probability / temperature + weight * noise.

    At a temperature above 0, the target's token is the one with the largest logit / temperature + noise, and the noise
    is known before the target runs: it depends on seed, position and token (`sampling.philox`). So a candidate with
    favourable noise is more likely to be the target's token than its log-probability says.

    The chain takes the first ones. Log-probabilities of coupled candidates are of the softmax of these numbers over the
    candidates of a place. Without candidates on the host, the draft stays as it is.
    """
    if draft.candidates is None or not draft.at_hand:
        return draft
    sampled = [
        slot
        for slot, request in enumerate(active)
        if request.takes_drafter and request.params.temperature > 0
    ]
    if not sampled:
        return draft
    tokens, logprobs = np.array(draft.candidates.tokens), np.array(draft.candidates.logprobs)
    for slot in sampled:
        request, candidates = active[slot], tokens[slot]
        first = request.committed + 1  # the position of the first drafted token
        noise = np.array([gumbel(request.seed, first + place, row) for place, row in enumerate(candidates)])
        score = logprobs[slot] / np.float32(request.params.temperature) + np.float32(weight) * noise
        order = np.argsort(-score, axis=1, kind="stable")
        ranked = np.take_along_axis(score, order, axis=1)
        ranked = ranked - ranked[:, :1]
        tokens[slot] = np.take_along_axis(candidates, order, axis=1)
        logprobs[slot] = ranked - np.log(np.exp(ranked).sum(axis=1, keepdims=True))
    drafted = np.array(draft.tokens)
    drafted[:, 1:] = tokens[:, :, 0]
    return Draft(drafted, None, logprobs[:, :, 0], Candidates(tokens, logprobs))


def tree_rows(parents: Array) -> dict[str, Array]:
    """The target's inputs for trees with these parents [n, N], as in `Draft`.

    depths: int64 [n, N], 0 for the anchor.
    visible: bool [n, N, N]. A node sees itself and its ancestors.
    """
    count, nodes = parents.shape
    slots = np.arange(count)
    visible = np.zeros((count, nodes, nodes), bool)
    for node in range(nodes):
        if node:  # the parent comes first
            visible[:, node] = visible[slots, parents[:, node]]
        visible[:, node, node] = True
    return {"depths": visible.sum(axis=2) - 1, "visible": visible}


def chain_rows(count: int, nodes: int) -> dict[str, Array]:
    """The same inputs for `count` chains of this many nodes."""
    return {
        "depths": np.tile(np.arange(nodes), (count, 1)),
        "visible": np.tile(_triangle(nodes), (count, 1, 1)),
    }


@lru_cache(maxsize=8)
def _triangle(nodes: int) -> Array:
    return np.tri(nodes, dtype=bool)
