"""A draft, and the result of the target's pass over it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


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

    The arrays may be on a device until their numbers are read.
    """

    tokens: Any
    parents: Any
    logprobs: Any
    candidates: Candidates | None = None

    @property
    def nodes(self) -> int:
        """N, including the anchor."""
        return int(self.tokens.shape[1])

    @property
    def at_hand(self) -> bool:
        """Whether the host can read the log-probabilities without waiting for a device."""
        return isinstance(self.logprobs, np.ndarray)

    def tokens_of(self, slot: int) -> list[int]:
        """The tokens of one request's nodes."""
        tokens: list[int] = np.asarray(self.tokens[slot]).tolist()
        return tokens

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
    They hold for the requests that the engine has `decided` [n]. The host decides for the others from their logits.
    For a greedy request the engine covers all nodes, whatever the request's own length.
    finite: bool [n, N], whether a row of logits has a finite largest value; None if all have. NaN and +infinity are
    not finite; -infinity only excludes a token.
    logits: float32 [n, N, V]; they may be on a device.
    `finite` and `logits` may have further rows, of a pass's padding.
    drafts_finite: [n], whether the drafter's numbers of this round were finite.
    """

    accepted: Any
    next_token: Any
    decided: Sequence[bool]
    finite: Any
    logits: Any
    drafts_finite: Sequence[bool]
