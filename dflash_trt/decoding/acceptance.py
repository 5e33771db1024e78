"""The acceptance rule."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dflash_trt.decoding.request import SamplingParams
from dflash_trt.decoding.sampling import TokenCounts, sample


def accept(
    block: Sequence[int],
    logits: NDArray[np.float32],
    params: SamplingParams,
    seed: int,
    position: int,
    counts: TokenCounts | None = None,
) -> tuple[int, int]:
    """How many drafts of a verified block are right, and the token after them: (accepted, next_token).

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
        token = sample(logits[row], params, seed, position + row, counts)
        if counts is not None:
            counts.add(token)
        if row == last or token != block[row + 1]:
            return row, token
    raise ValueError("accept needs a block of at least the anchor")
