"""Candidates chosen with the noise that decides the tokens.

At a temperature above 0, the target's token is the one with the largest logit / temperature + noise. The noise is known
before the target runs: it depends on seed, position and token (`sampling.philox`). So a candidate with favourable noise
is more likely to be the target's token than its log-probability says. The tokens do not depend on the drafts, so this
changes the speed only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dflash_trt.decoding.draft import Candidates, Draft
from dflash_trt.decoding.request import Request
from dflash_trt.decoding.sampling.philox import gumbel

# The weight of the noise. Below 1, because the drafter is less sure than the target which tokens are close to each
# other.
WEIGHT = 0.5


def couple(draft: Draft, active: Sequence[Request], weight: float = WEIGHT) -> Draft:
    """The draft with the candidates of sampled requests in the order of log-probability / temperature + weight * noise.

    The chain takes the first ones. Log-probabilities of coupled candidates are of the softmax of these numbers over the
    candidates of a place. Without candidates on the host, the draft stays as it is.
    """
    if draft.candidates is None or not draft.at_hand:
        return draft
    sampled = [slot for slot, each in enumerate(active) if each.draft and each.params.temperature > 0]
    if not sampled:
        return draft
    tokens, said = np.array(draft.candidates.tokens), np.array(draft.candidates.logprobs)
    for slot in sampled:
        request, own = active[slot], tokens[slot]
        first = request.committed + 1  # the position of the first drafted token
        noise = np.array([gumbel(request.seed, first + place, row) for place, row in enumerate(own)])
        score = said[slot] / np.float32(request.params.temperature) + np.float32(weight) * noise
        order = np.argsort(-score, axis=1, kind="stable")
        ranked = np.take_along_axis(score, order, axis=1)
        ranked = ranked - ranked[:, :1]
        tokens[slot] = np.take_along_axis(own, order, axis=1)
        said[slot] = ranked - np.log(np.exp(ranked).sum(axis=1, keepdims=True))
    drafted = np.array(draft.tokens)
    drafted[:, 1:] = tokens[:, :, 0]
    return Draft(drafted, None, said[:, :, 0], Candidates(tokens, said))
