"""From logits to a token: adjustments, temperature, min-p, top-k, top-p, and the noise that chooses.

The token at a position is argmax_v(process(logits)[v] + gumbel(seed, position, v)), the Gumbel-max form of sampling
(Gumbel 1954; Maddison et al. 2014, "A* Sampling"). At temperature 0 it is the argmax of the adjusted logits.
`process` adjusts the logits (history.py), applies the temperature, and keeps the tokens that min-p, top-k and top-p
leave. It depends only on the logits, the parameters, the seed, the position and the tokens so far. Speculation
changes none of these.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from dflash_trt.decoding.params import SamplingParams
from dflash_trt.decoding.sampling.history import History
from dflash_trt.decoding.sampling.philox import (
    GUMBEL_MAX,
    gumbel,
    gumbel_from_bits,
    rough_gumbel_from_bits,
    token_bits,
)
from dflash_trt.decoding.sampling.probability_mass import NEGLIGIBLE, WEIGHT_BITS, total_weight, weight
from dflash_trt.errors import NonFiniteError

Floats = NDArray[np.float32]
Tokens = NDArray[np.int64]

# A value this far below a score cannot win with any noise. The slack covers rounding of value + noise.
_REACH = np.float32(float(GUMBEL_MAX) + 1e-3)
# So many tokens, at most, this close to the best one, are drawn first. Their best score tells which others can win.
_FIRST, _NEAR = 8, np.float32(-3)
# Rough scores are within 2e-4 of the exact ones. So only scores this close to the best must be exact.
_MARGIN = np.float32(1e-3)


def process(logits: Floats, params: SamplingParams, history: History | None = None) -> Floats:
    """Scaled logits, float32 [V]: the best token has 0, excluded tokens -inf. The temperature must not be 0.

    In vLLM's order: adjustments, temperature, min-p, top-k, top-p. top-p uses the probability of the tokens that min-p
    and top-k left. It keeps the smallest set that reaches it, at least one token. Among equal logits, top-k and top-p
    keep the lower token ids first. Raises NonFiniteError if no largest logit exists (NaN, or infinite).
    """
    tokens, values = _kept(logits, params, history)
    full = np.full_like(logits, -np.inf)
    full[tokens] = values
    return full


def sample(
    logits: Floats, params: SamplingParams, seed: int, position: int, history: History | None = None
) -> int:
    """The token at `position`, from its logits, float32 [V]. `history`, if adjusted, has the tokens before it.

    Ties go to the lowest token id. Raises NonFiniteError if no largest logit exists (NaN, or infinite).
    """
    if params.temperature == 0:
        logits = _adjusted(logits, history)
        token = int(logits.argmax())  # the first NaN, if any
        _check_finite(logits[token])
        return token
    tokens, values = _kept(logits, params, history)
    if tokens.size == 1:
        return int(tokens[0])
    first = (values >= _NEAR).nonzero()[0][:_FIRST]
    leading = (values[first] + gumbel(seed, position, tokens[first])).max()
    can_win = (values >= leading - _REACH).nonzero()[0]
    tokens, values = tokens[can_win], values[can_win]
    bits = token_bits(seed, position, tokens)
    rough = values + rough_gumbel_from_bits(bits)
    close = (rough >= rough.max() - _MARGIN).nonzero()[0]
    if close.size > 1:
        close = close[[(values[close] + gumbel_from_bits(bits[close])).argmax()]]
    return int(tokens[close[0]])


def log_probabilities(logits: Floats, token: int, top: int) -> tuple[float, list[tuple[int, float]]]:
    """The log-probability of `token`, and those of the `top` most probable tokens, best first.

    They belong to the softmax of the raw `logits` [V]. Lower token ids come first among equals. The same on a device,
    but for the sum's order: engines/device/logprobs.py.
    """
    distances = logits - logits.max()
    best = _top_k(distances, min(top, logits.size)) if top else np.arange(0)
    ranked = best[np.argsort(-distances[best], kind="stable")]
    kept = distances[[token, *ranked]]
    logprob, *tops = (kept - np.log(np.exp(distances, out=distances).sum())).tolist()
    return logprob, list(zip(ranked.tolist(), tops, strict=True))


def rank(logits: Floats, token: int) -> int:
    """The place of `token` among all by their `logits` [V], from 1 on. Lower token ids come first among equals."""
    logit = logits[token]
    return 1 + int((logits > logit).sum() + (logits[:token] == logit).sum())


def _check_finite(best: np.float32) -> None:
    if not math.isfinite(best):
        raise NonFiniteError(
            f"the largest of the target's logits is {best}, expected a finite number: "
            "the engine's numbers overflowed; build with a wider precision"
        )


def _adjusted(logits: Floats, history: History | None) -> Floats:
    if history is None:
        return logits
    _check_finite(logits.max())  # also where what is not finite would be excluded
    return history.adjust(logits)


def _kept(logits: Floats, params: SamplingParams, history: History | None) -> tuple[Tokens, Floats]:
    """The tokens that may be sampled, ascending, and their scaled logits (the best has 0)."""
    logits = _adjusted(logits, history)
    if params.temperature != 1:
        logits = logits / np.float32(params.temperature)
    best = logits.max()  # NaN if there is any
    _check_finite(best)
    values = logits - best
    tokens: Tokens | None = None
    if params.min_p > 0:
        tokens = (values >= np.float32(math.log(params.min_p))).nonzero()[0]
        values = values[tokens]
    if 0 < params.top_k < values.size:
        kept = _top_k(values, params.top_k)
        tokens, values = kept if tokens is None else tokens[kept], values[kept]
    if params.top_p < 1:
        total = total_weight(logits) if tokens is None else int(weight(values).sum())
        kept = _top_p(values, total, np.float32(params.top_p))
        tokens, values = kept if tokens is None else tokens[kept], values[kept]
    return np.arange(values.size) if tokens is None else tokens, values


def _top_k(values: Floats, k: int) -> Tokens:
    """Indices of the k largest values, ascending. Lower indices come first among equals."""
    width = values.size // (4 * k)
    if width > 1:
        # k groups hold a value of at least `bound`, so the k largest values are all at least `bound`.
        groups = values[: values.size // width * width].reshape(-1, width).max(axis=1)
        bound = np.partition(groups, -k)[-k]
        indices = (values >= bound).nonzero()[0]
    else:
        indices = np.arange(values.size)
    order = np.argsort(-values[indices], kind="stable")
    return np.sort(indices[order[:k]])


def _top_p(values: Floats, total: int, p: np.float32) -> Tokens:
    """Indices, ascending, of the smallest set that holds p of the weight `total`. Lower indices come first among
    equals.

    A token belongs to it if it has weight, and the tokens ranked before it weigh less than p * total.
    """
    target = float(p) * float(total)
    # The tokens below `lowest` together weigh less than half of total - target, so the set can be found without them.
    # It is half, because the tokens' sum may differ from `total` by rounding. For p very near 1 even that is not
    # enough.
    least = (total - target) * 0.5 / values.size
    lowest = math.log(least / 2**WEIGHT_BITS) if target < total * (1 - 2.0**-16) else NEGLIGIBLE
    indices = (values >= np.float32(lowest)).nonzero()[0]
    weights = weight(values[indices])
    if lowest == NEGLIGIBLE:
        indices, weights = indices[weights > 0], weights[weights > 0]
    sure, held = indices[:0], 0
    if indices.size > 512:  # sort only the slice of values in which p is reached
        slices = (values[indices] * np.float32(-32)).astype(np.int64)
        mass = np.cumsum(np.bincount(slices, weights=weights))  # exact: probability_mass.py
        edge = min(int(np.searchsorted(mass, target)), mass.size - 1)
        sure, held = indices[slices < edge], int(mass[edge - 1]) if edge else 0
        indices, weights = indices[slices == edge], weights[slices == edge]
    order = np.argsort(-values[indices], kind="stable")
    ranked = weights[order]
    before = held + np.cumsum(ranked) - ranked
    return np.sort(np.concatenate((sure, indices[order[: int(np.searchsorted(before, target))]])))
