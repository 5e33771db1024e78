"""The interface of a policy for the number of drafted and verified tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from dflash_trt.decoding.acceptance import Verdict
from dflash_trt.decoding.draft import Draft
from dflash_trt.decoding.request import Request


@dataclass(frozen=True)
class RoundDone:
    """A finished round, as the policy that chose its length sees it.

    batch: its requests. n of them take drafts: `judged` are their slots.
    drafted, verified: the tokens per request, including the anchor.
    accepted, offered: of each of the n, the drafts that were accepted, and those that could have been. In a tree too,
    they count the chain of the best candidates.
    draft_seconds, verify_seconds, host_seconds: of the passes, and of all else in the round.
    decided: of each of the n, the tokens that the round decided.
    ended: how many requests of the batch ended with the round.
    """

    batch: int
    drafted: int
    verified: int
    accepted: Sequence[int]
    offered: Sequence[int]
    draft_seconds: float
    verify_seconds: float
    judged: Sequence[int] = ()
    decided: Sequence[Sequence[int]] = ()
    ended: int = 0
    host_seconds: float = 0.0


def round_done(
    active: Sequence[Request],
    judged: Sequence[int],
    proposed: Draft,
    draft: Draft,
    own: Mapping[int, int],
    verdicts: Sequence[Verdict],
    draft_seconds: float,
    verify_seconds: float,
    host_seconds: float,
) -> RoundDone:
    """The report on a round whose tokens are committed.

    judged: the slots of requests whose drafts were judged.
    proposed, draft: what the drafter gave, and what was verified.
    own: of requests with a structure, the leading drafts that are the drafter's own.
    """
    drafted, verified = proposed.nodes, draft.nodes
    accepted, offered, decided = list[int](), list[int](), list[Sequence[int]]()
    for slot in judged:
        request, path = active[slot], verdicts[slot].path
        decided.append(request.output[-len(path) - 1 :])
        if draft.parents is not None and proposed.parents is None:
            right, known = _of_chain(proposed, slot, decided[-1])
        else:
            most = min(request.block_length or drafted, drafted, verified) - 1
            known = min(most, own.get(slot, most))
            right = min(len(path), known)
        accepted.append(right)
        offered.append(known)
    return RoundDone(
        batch=len(active),
        drafted=drafted,
        verified=verified,
        accepted=accepted,
        offered=offered,
        draft_seconds=draft_seconds,
        verify_seconds=verify_seconds,
        judged=judged,
        decided=decided,
        ended=sum(request.stop.finish_reason is not None for request in active),
        host_seconds=host_seconds,
    )


def _of_chain(proposed: Draft, slot: int, decided: Sequence[int]) -> tuple[int, int]:
    """How many of a request's proposed drafts are the decided tokens, and of how many this is known."""
    drafts = proposed.tokens_of(slot)[1:]
    right = [a == b for a, b in zip(drafts, decided, strict=False)]
    accepted = right.index(False) if False in right else len(right)
    return accepted, min(accepted + 1, len(right))


class Lengths(Protocol):
    """Chooses how many tokens a round drafts and verifies per request, including the anchor; 1 is no drafting.

    The choice never changes the committed tokens, only their time (see `acceptance.accept`).
    """

    @property
    def most(self) -> int:
        """The most tokens of a round, including the anchor, where a structured output adds tokens to a draft."""

    def draft(self, batch: int) -> int:
        """The tokens that this round drafts for each of `batch` requests, including the anchor."""

    def select(self, draft: Draft, slots: Sequence[int], most: int) -> Draft:
        """What is verified for the `slots` that take drafts: the first nodes of the draft, or trees of at most `most`
        nodes from its candidates.
        """

    def observe(self, done: RoundDone) -> None:
        """Learn from what a round did."""


class FixedLength:
    """The same length in every round."""

    def __init__(self, length: int) -> None:
        self.most = length

    def draft(self, batch: int) -> int:
        """The length."""
        return self.most

    def select(self, draft: Draft, slots: Sequence[int], most: int) -> Draft:
        """The whole draft."""
        return draft

    def observe(self, done: RoundDone) -> None:
        """Nothing is learnt."""
