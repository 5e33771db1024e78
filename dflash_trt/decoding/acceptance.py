"""The acceptance rule, and the verdict on a verified block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dflash_trt.decoding.pair import Verified
from dflash_trt.decoding.params import SamplingParams
from dflash_trt.decoding.request import Request
from dflash_trt.decoding.sampling.sampler import TokenCounts, sample
from dflash_trt.errors import NonFiniteError


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a round decided for one request. Node 0 of a block is the anchor.

    path: the accepted nodes, from the anchor's child down. Where every node follows the one before it: 1, 2, ...
    token: the token after the last of them; -1 if not `ok`.
    ok: whether the logits of that last node have a finite largest value. The nodes of `path` are right either way.
    """

    path: Sequence[int]
    token: int
    ok: bool = True


# Of a request that failed before anything was decided for it.
UNDECIDED = Verdict((), -1, ok=False)


def judge(request: Request, block: Sequence[int], found: Verified, slot: int) -> Verdict:
    """The verdict on a request's own part of its block: the engine's decision where it has made one, else `accept`'s.

    block: [anchor, draft, ...], as many tokens as the round verified; the request's own part may be shorter.
    """
    own = request.own_length(len(block))
    if not found.decided[slot]:
        logits, position = found.logits[slot], request.committed + 1
        return accept(block[:own], logits, request.params, request.seed, position, request.counts)
    accepted, token = int(found.accepted[slot]), int(found.next_token[slot])
    if (
        accepted >= own
    ):  # the greedy decision on the whole block: the draft behind the own part was right, too
        accepted, token = own - 1, block[own]
    finite = found.finite[slot, : accepted + 1]
    if not finite.all():
        return Verdict(range(1, int(finite.argmin()) + 1), -1, ok=False)
    return Verdict(range(1, accepted + 1), token, ok=token >= 0)


def accept(
    block: Sequence[int],
    logits: NDArray[np.float32],
    params: SamplingParams,
    seed: int,
    position: int,
    counts: TokenCounts | None = None,
) -> Verdict:
    """How many drafts of a verified block are right, and the token after them.

    block: [anchor, draft, ...], n tokens.
    logits: float32 [n, V]; row i is the target's for the token after block[i].
    position: of the token that row 0 predicts.
    counts: if `params.penalized`, every token up to the anchor, included; the committed tokens are added.

    Row i decides the token at position + i. While that is the drafted one, the next row saw a true history
    and decides the next token; the first that is not ends the block, and the rows behind it saw a history
    that did not happen. So each committed token is `sample` of the logits that follow its own true history,
    at its own position: what decoding one token at a time commits. Neither the drafts nor the length of the
    block appear in that; a better draft only makes the run longer. `sample` draws from the target's
    distribution, so the result has it.
    """
    last = len(block) - 1
    for row in range(last + 1):
        try:
            token = sample(logits[row], params, seed, position + row, counts)
        except NonFiniteError:
            return Verdict(range(1, row + 1), -1, ok=False)
        if counts is not None:
            counts.add(token)
        if row == last or token != block[row + 1]:
            return Verdict(range(1, row + 1), token)
    raise ValueError("accept needs a block of at least the anchor")
