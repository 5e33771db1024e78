"""A draft, and what the target's pass over it found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Draft:
    """Trees of N nodes for n requests. Node 0 is the anchor; each other node follows its parent, which comes earlier.

    The children of a node have different tokens.

    tokens: int64 [n, N].
    parents: int [n, N], -1 for the anchor. None: chains, where every node follows the one before it.
    logprobs: float32 [n, N-1], the drafter's log-probabilities of nodes 1 .. N-1.

    The arrays may lie elsewhere than on the host, until their numbers are looked at.
    """

    tokens: Any
    parents: Any
    logprobs: Any

    @property
    def nodes(self) -> int:
        """N, the anchor included."""
        return int(self.tokens.shape[1])

    def first(self, nodes: int) -> Draft:
        """Only the first nodes, the anchor included."""
        if nodes >= self.nodes:
            return self
        parents = None if self.parents is None else self.parents[:, :nodes]
        return Draft(self.tokens[:, :nodes], parents, self.logprobs[:, : nodes - 1])

    def tokens_of(self, slot: int) -> list[int]:
        """The tokens of one request's nodes."""
        tokens: list[int] = np.asarray(self.tokens[slot]).tolist()
        return tokens

    def parents_of(self, slot: int) -> list[int] | None:
        """The parents of one request's nodes; None of a chain."""
        if self.parents is None:
            return None
        parents: list[int] = np.asarray(self.parents[slot]).tolist()
        return parents

    def logprobs_of(self, slots: Sequence[int]) -> Any:
        """The log-probabilities of some requests, [len(slots), N-1]; no copy if these are all."""
        return self.logprobs if len(slots) == self.logprobs.shape[0] else self.logprobs[list(slots)]


@dataclass(slots=True)
class Verified:
    """What a pass over a `Draft` of n requests, N nodes each, found. The next pass overwrites its arrays.

    accepted, next_token: int [n], how many nodes of a chain are right behind the anchor, and the token after them. They
        hold for the requests that the engine has `decided` [n]; the host decides for the others, by their logits. The
        engine looks at all nodes of a greedy request, whatever the request's own length.
    finite: bool [n, N], whether a row of logits has a finite largest value; None if all have. NaN anywhere and
        +infinity are not finite; -infinity says that a token cannot be.
    logits: float32 [n, N, V]; they may lie elsewhere than on the host.
    drafts_finite: [n], whether the drafter's numbers for this round were finite.
    """

    accepted: Any
    next_token: Any
    decided: Sequence[bool]
    finite: Any
    logits: Any
    drafts_finite: Sequence[bool]
