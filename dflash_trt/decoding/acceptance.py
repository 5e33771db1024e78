"""The acceptance rule, and the verdict on a verified block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dflash_trt.decoding.draft import Draft, Verified
from dflash_trt.decoding.params import SamplingParams
from dflash_trt.decoding.request import Request
from dflash_trt.decoding.sampling.history import History
from dflash_trt.decoding.sampling.sampler import sample
from dflash_trt.errors import NonFiniteError


@dataclass(slots=True)
class Verdict:
    """A round's decision for one request, over the nodes of its `Draft`.

    path: the accepted nodes, from the anchor's child down. In a chain: 1, 2, ...
    token: the token after the last of them; -1 if not `ok`.
    ok: whether the logits of that last node have a finite largest value. The nodes of `path` are accepted in either
    case.
    """

    path: Sequence[int]
    token: int
    ok: bool = True


# The verdict of a request that failed before its decision.
UNDECIDED = Verdict((), -1, ok=False)


def judge(request: Request, tokens: Sequence[int], draft: Draft, verified: Verified, slot: int) -> Verdict:
    """The verdict on a request's own part of its draft: the engine's decision if it made one, else that of `accept`.

    tokens: the verified nodes of this request. Its own part is the first of them, and may be shorter.
    """
    own = request.own_length(len(tokens))
    if not verified.decided[slot]:
        logits, position, parents = verified.logits[slot], request.committed + 1, draft.parents_of(slot)
        return accept(tokens[:own], logits, request.params, request.seed, position, request.history, parents)
    accepted, token = int(verified.accepted[slot]), int(verified.next_token[slot])
    # A greedy decision covers the whole chain. Here drafts beyond the own part were accepted too.
    if accepted >= own:
        accepted, token = own - 1, tokens[own]
    if verified.finite is not None and not (finite := verified.finite[slot, : accepted + 1]).all():
        return Verdict(range(1, int(finite.argmin()) + 1), -1, ok=False)
    return Verdict(range(1, accepted + 1), token, ok=token >= 0)


def accept(
    tokens: Sequence[int],
    logits: NDArray[np.float32],
    params: SamplingParams,
    seed: int,
    position: int,
    history: History | None = None,
    parents: Sequence[int] | None = None,
) -> Verdict:
    """The accepted nodes of a draft, and the token after them.

    tokens, parents: the N nodes of one request, as in `Draft`.
    logits: float32 [N, V]. Row i holds the target's logits for the token after node i.
    position: the position of the token that row 0 predicts.
    history: every token up to the anchor, if `params.adjusted`. The committed tokens are added.

    The logits of a node decide the token after it. If a child of the node has that token, the child saw a true
    history, and its own logits decide the next token. The walk ends when no child has the token: all other nodes saw
    a false history. So each committed token is `sample` of the logits after its own true history, at its own
    position. Decoding one token at a time commits the same. The drafts do not influence the tokens; better drafts
    only make the path longer. `sample` draws from the target's distribution, so the result has that distribution.
    """
    if not tokens:
        raise ValueError("accept needs at least the anchor's token")
    if parents is None:
        parents = range(-1, len(tokens) - 1)
    children: dict[tuple[int, int], int] = {}
    for child in range(1, len(tokens)):
        children.setdefault((parents[child], tokens[child]), child)
    node, path = 0, list[int]()
    while True:
        try:
            token = sample(logits[node], params, seed, position + len(path), history)
        except NonFiniteError:
            return Verdict(path, -1, ok=False)
        if history is not None:
            history.add(token)
        if (node := children.get((node, token), 0)) == 0:
            return Verdict(path, token)
        path.append(node)
