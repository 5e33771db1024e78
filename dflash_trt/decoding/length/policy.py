"""The interface of a policy for the drafts of a round, and the policy that always drafts the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from dflash_trt.decoding.draft import Draft
from dflash_trt.decoding.request import Request


@dataclass(frozen=True)
class RoundDone:
    """A finished round, as the policy that chose its drafts sees it.

    active: its requests, by slot.
    proposed: the drafter's chains.
    verified: the nodes that were verified of each request, including the anchor.
    judged: the slots of requests that take drafts and got tokens.
    decided: of each of these, the tokens that the round decided.
    draft_seconds, verify_seconds, host_seconds: of the passes, and of all else in the round.
    ended: how many of its requests ended with the round.
    read: the most features of a request that the drafter read in it.
    """

    active: Sequence[Request]
    proposed: Draft
    verified: int
    judged: Sequence[int]
    decided: Sequence[Sequence[int]]
    draft_seconds: float
    verify_seconds: float
    host_seconds: float = 0.0
    ended: int = 0
    read: int = 0


class Lengths(Protocol):
    """Chooses what a round drafts and verifies, and so its time. docs/decoding.md says where no token depends on it."""

    @property
    def most(self) -> int:
        """The most tokens of a round, including the anchor, where a structured output adds tokens to a draft."""

    def draft(self, active: Sequence[Request]) -> int:
        """The tokens that the drafter's chains have in this round, including the anchor; 1 asks for no drafts."""

    def select(self, draft: Draft, active: Sequence[Request], slots: Sequence[int], most: int) -> Draft:
        """What is verified for the `slots` that take drafts: the first nodes of the draft, or trees of at most `most`
        nodes from its candidates.
        """

    def observe(self, done: RoundDone) -> None:
        """Learn from what a round did."""


class FixedLength:
    """The same length in every round."""

    def __init__(self, length: int) -> None:
        self.most = length

    def draft(self, active: Sequence[Request]) -> int:
        """The length, while the drafter is there for a request: its numbers may have stopped being finite."""
        return self.most if any(request.takes_drafter for request in active) else 1

    def select(self, draft: Draft, active: Sequence[Request], slots: Sequence[int], most: int) -> Draft:
        """The whole draft."""
        return draft

    def observe(self, done: RoundDone) -> None:
        """Nothing is learnt."""
