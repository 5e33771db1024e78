"""The interface of a policy for the number of drafted and verified tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from dflash_trt.decoding.draft import Draft

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class RoundDone:
    """A finished round, as the policy that chose its length sees it.

    batch: its requests. n of them take drafts: `judged` are their slots.
    logprobs: [n, drafted-1], of their drafts; None if the drafter did not run.
    drafted, verified: the tokens per request, including the anchor.
    accepted, offered: of each of the n, the drafts that were accepted, and those that could have been. In a tree too,
    they count the chain of the best candidates.
    draft_seconds, verify_seconds: the passes.
    decided: of each of the n, the tokens that the round decided.
    """

    batch: int
    drafted: int
    verified: int
    accepted: Sequence[int]
    offered: Sequence[int]
    logprobs: Array | None
    draft_seconds: float
    verify_seconds: float
    judged: Sequence[int] = ()
    decided: Sequence[Sequence[int]] = ()


class Lengths(Protocol):
    """Chooses how many tokens a round drafts and verifies per request, including the anchor; 1 is no drafting.

    `grow` may make trees of at most `most` nodes from the candidates of a draft.
    `verify` returns the number of nodes of a draft to verify. `slots` are the requests of the batch that take drafts.

    `observe` reports what a round did, so that a policy can learn. The choice never changes the committed tokens, only
    their time (see `acceptance.accept`).

    most: the largest number of nodes that `verify` may get.
    """

    @property
    def most(self) -> int: ...
    def draft(self, batch: int) -> int: ...
    def grow(self, draft: Draft, slots: Sequence[int], most: int) -> Draft: ...
    def verify(self, draft: Draft, slots: Sequence[int]) -> int: ...
    def observe(self, done: RoundDone) -> None: ...


class FixedLength:
    """The same length in every round."""

    def __init__(self, length: int) -> None:
        self.length = length

    @property
    def most(self) -> int:
        return self.length

    def draft(self, batch: int) -> int:
        return self.length

    def grow(self, draft: Draft, slots: Sequence[int], most: int) -> Draft:
        return draft

    def verify(self, draft: Draft, slots: Sequence[int]) -> int:
        return draft.nodes

    def observe(self, done: RoundDone) -> None:
        pass
