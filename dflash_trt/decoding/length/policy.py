"""The interface of a policy for the number of drafted and verified tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from dflash_trt.decoding.draft import Draft

Array = np.ndarray[Any, Any]


class Lengths(Protocol):
    """Chooses how many tokens a round drafts and verifies per request, including the anchor; 1 is no drafting.

    `grow` may make trees of at most `most` nodes from the candidates of a draft.
    `verify` returns the number of nodes of a draft to verify. `slots` are the requests of the batch that take drafts.

    `observe` reports the result of each round, so that a policy can learn. `logprobs` [n, drafted-1], `accepted` and
    `offered` (the drafts that could be accepted) belong to the n requests that take drafts. `judged` are their slots,
    and `decided` the tokens that the round decided for each. `accepted` and `offered` count the chain of the best
    candidates, in a tree too. The choice never changes
    the committed tokens, only their time (see `acceptance.accept`).

    most: the largest number of nodes that `verify` may get.
    """

    @property
    def most(self) -> int: ...
    def draft(self, batch: int) -> int: ...
    def grow(self, draft: Draft, slots: Sequence[int], most: int) -> Draft: ...
    def verify(self, draft: Draft, slots: Sequence[int]) -> int: ...
    def observe(
        self,
        *,
        batch: int,
        drafted: int,
        verified: int,
        accepted: Sequence[int],
        offered: Sequence[int],
        logprobs: Array | None,
        draft_seconds: float,
        verify_seconds: float,
        judged: Sequence[int],
        decided: Sequence[Sequence[int]],
    ) -> None: ...


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

    def observe(self, **round_: object) -> None:
        pass
