"""The probability that a node of a tree is right, from its candidate's log-probability and earlier results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

# The prior trusts the drafter. Standard deviations of its error in log-odds: a common offset for all places, as much
# again for each place, and the weight of the drafter's estimate.
OFFSET, WEIGHT = 1.5, 0.3
# The share of a round's evidence that remains after the next one.
MEMORY = 0.99
# The drafter's log-odds are clipped at 6; the same holds for its log-probabilities.
_CERTAIN = 6.0
_LEAST, _MOST = -float(np.log1p(np.exp(_CERTAIN))), -float(np.log1p(np.exp(-_CERTAIN)))

# Ranks from here on share an offset.
_RANKS = 4


class NodeOdds:
    """Online logistic regression: P(a node is right | its parent is) = s(place + rank + off + weight x).

    x are the log-odds of the candidate's log-probability. `place` and `rank` are offsets of the candidate. `off` counts
    where an ancestor is not the best candidate of its place: the drafter gave later places for the best ones. A chain
    is a tree with one candidate per place.
    """

    def __init__(self, drafts: int) -> None:
        self._drafts = drafts
        size = drafts + _RANKS + 1
        covariance = OFFSET**2 * np.eye(size)
        covariance[:drafts, :drafts] += OFFSET**2  # a common offset of all places
        covariance[-1, -1] = WEIGHT**2
        self._prior_precision: Array = np.linalg.inv(covariance)
        self._prior: Array = np.append(np.zeros(size - 1), 1.0)
        self._precision, self._mean = self._prior_precision, self._prior

    def __call__(self, logprobs: Array) -> tuple[Array, Array]:
        """The probability of each candidate [.., drafts, W] after the best ones, and after any others.

        A worse rank is never more probable than a better one.
        """
        places, width = logprobs.shape[-2:]
        known = min(places, self._drafts)
        offset = np.append(self._mean[:known], np.repeat(self._mean[known - 1], places - known))
        on = offset[:, None] + self._by_rank(width) + self._mean[-1] * log_odds(logprobs)
        after_best, after_others = (
            np.minimum.accumulate(logistic(z), axis=-1) for z in (on, on + self._mean[-2])
        )
        return after_best, after_others

    def observe(self, logprobs: Array, ranks: Sequence[int], rounds: float = 1.0) -> None:
        """Learn from one request's candidates [drafts, W].

        ranks: the ranks of the tokens that were decided for the first places; W or more for a token that is not a
        candidate. Places after such a token were computed for another history, and count no more.
        rounds: how many rounds this is; the evidence of earlier ones fades.
        """
        width = logprobs.shape[1]
        taken = min(width, _RANKS)  # the first ranks say enough
        kept = MEMORY**rounds
        precision = kept * self._precision + (1 - kept) * self._prior_precision
        toward = kept * self._precision @ self._mean + (1 - kept) * self._prior_precision @ self._prior
        if ranks:
            x = log_odds(logprobs[: len(ranks), :taken])
            off = np.concatenate(([False], np.cumsum(np.array(ranks)) > 0))[:-1]
            features = np.zeros((*x.shape, len(self._mean)))
            place = np.arange(len(ranks))
            features[place, :, np.minimum(place, self._drafts - 1)] = 1
            for rank in range(1, taken):
                features[:, rank, self._drafts + rank - 1] = 1
            features[..., -2] = off[:, None]
            features[..., -1] = x
            flat = features.reshape(-1, len(self._mean))
            outcome = (np.array(ranks)[:, None] == np.arange(taken)).ravel()
            mean = np.linalg.solve(precision, toward)
            p = logistic(flat @ mean)
            precision = precision + (flat * (p * (1 - p))[:, None]).T @ flat
            mean = mean + np.linalg.solve(precision, flat.T @ (outcome - p))
        else:
            mean = np.linalg.solve(precision, toward)
        self._precision, self._mean = precision, mean

    def _by_rank(self, width: int) -> Array:
        offsets = np.zeros(width)
        known = self._mean[self._drafts : self._drafts + _RANKS - 1]
        offsets[1:] = known[np.minimum(np.arange(width - 1), len(known) - 1)]
        return offsets


def log_odds(logprobs: Array) -> Array:
    """Clipped log-odds of log-probabilities. One that is not a number counts as that of a wrong draft."""
    said = np.asarray(logprobs, np.float64)
    said = np.clip(np.where(np.isnan(said), _LEAST, said), _LEAST, _MOST)
    odds: Array = -np.log(np.expm1(-said))
    return odds


def logistic(z: Array) -> Array:
    """The probability of log-odds z."""
    return 1 / (1 + np.exp(-z))
