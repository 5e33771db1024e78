"""Drafts that fit the form of their requests: what the form refuses is cut, what it forces is drafted for free."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dflash_trt.decoding.arrays import Arrays
from dflash_trt.decoding.draft import Draft
from dflash_trt.decoding.request import Request

_NEVER = -100.0  # the log-probability of a node that no request has


def fit(
    active: Sequence[Request], proposed: Draft, most: int, arrays: Arrays, pending: Sequence[int]
) -> tuple[Draft, dict[int, int]]:
    """A draft of up to `most` nodes, and the leading drafts of requests with a structure that are the drafter's own.

    pending: rows of each slot that wait for the drafter. All accepted nodes must find room after them.
    `Request.fitting` has the nodes that count. A forced token has probability 1. No token is decided here: a draft is
    accepted if it equals the target's own choice, so this changes the speed only. Trees stay as they are.
    """
    if proposed.parents is not None:
        return proposed, {}
    tokens, logprobs = np.array(proposed.tokens), np.array(proposed.logprobs)
    found: dict[int, list[int]] = {}
    own: dict[int, int] = {}
    odds: dict[int, list[float]] = {}
    for slot, request in enumerate(active):
        request.fitting = proposed.nodes
        if request.draft and request.history is not None and request.history.structure is not None:
            most_own = min(request.block_length or most, most, arrays.most_waiting - pending[slot]) - 1
            taken, forced = request.history.structure.follow(tokens[slot, 1:].tolist(), most_own)
            own[slot] = forced.index(True) if any(forced) else len(taken)
            found[slot] = taken
            odds[slot] = [0.0 if f else float(logprobs[slot, i]) for i, f in enumerate(forced)]
            request.fitting = 1 + len(taken)
    nodes = max([request.fitting or 1 for request in active])
    fitted = np.repeat(tokens[:, :1], nodes, axis=1)  # any token will do where no draft is
    said = np.full((len(active), nodes - 1), _NEVER, np.float32)
    for slot in range(len(active)):
        drafts = found.get(slot, tokens[slot, 1:].tolist())
        fitted[slot, 1 : 1 + len(drafts)] = drafts
        said[slot, : len(drafts)] = odds.get(slot, logprobs[slot].tolist())
    return arrays.chains(fitted, said), own
