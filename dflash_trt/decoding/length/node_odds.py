"""The probability that a node of a tree is right, from its candidate's log-probability and earlier results."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, expm1, log
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

# Log-odds below the negative of it are of an impossible draft.
_LARGE = 100.0

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
        self._weights: list[float] = self._mean.tolist()  # for `chain`

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

    def chain(self, logprobs: Sequence[float]) -> list[float]:
        """The probability that the first 1, 2 .. drafts of a chain with these log-probabilities are right.

        As for the best candidates above, but of single numbers: every round needs it, and NumPy takes several times as
        long for so few.
        """
        survival, right = 1.0, list[float]()
        for offset, said in zip(self._weights, logprobs, strict=False):
            said = min(said, _MOST) if said > _LEAST else _LEAST
            z = offset - self._weights[-1] * log(expm1(-said))
            survival *= 1 / (1 + exp(-max(z, -_LARGE)))
            right.append(survival)
        return right

    def observe(self, logprobs: Array, ranks: Sequence[Sequence[int]], rounds: int = 1) -> None:
        """Learn from n drafts with candidates [n, drafts, W] in so many rounds; the evidence of earlier ones fades.

        ranks: of each draft, the ranks of the tokens that were decided for the first places; W or more for a token
        that is not a candidate. Places after such a token were computed for another history, and count no more.
        """
        kept = MEMORY**rounds
        precision = kept * self._precision + (1 - kept) * self._prior_precision
        toward = kept * self._precision @ self._mean + (1 - kept) * self._prior_precision @ self._prior
        mean = np.linalg.solve(precision, toward)
        places = max([len(each) for each in ranks], default=0)
        if places:
            taken = min(logprobs.shape[2], _RANKS)  # the first ranks say enough
            decided = np.array([[*each, *[-1] * (places - len(each))] for each in ranks])
            off = np.cumsum(decided[:, :-1] > 0, axis=1) > 0
            place = np.arange(places)
            x = np.zeros((len(ranks), places, taken, len(mean)))
            x[:, place, :, np.minimum(place, self._drafts - 1)] = 1
            for rank in range(1, taken):
                x[:, :, rank, self._drafts + rank - 1] = 1
            x[:, 1:, :, -2] = off[:, :, None]
            x[..., -1] = log_odds(logprobs[:, :places, :taken])
            judged = decided >= 0
            features = x[judged].reshape(-1, len(mean))
            right = (decided[judged][:, None] == np.arange(taken)).ravel()
            p = logistic(features @ mean)
            precision = precision + (features * (p * (1 - p))[:, None]).T @ features
            mean = mean + np.linalg.solve(precision, features.T @ (right - p))
        self._precision, self._mean, self._weights = precision, mean, mean.tolist()

    def _by_rank(self, width: int) -> Array:
        offsets = np.zeros(width)
        known = self._mean[self._drafts : self._drafts + _RANKS - 1]
        offsets[1:] = known[np.minimum(np.arange(width - 1), len(known) - 1)]
        return offsets


def log_odds(logprobs: Array) -> Array:
    """Clipped log-odds of log-probabilities. One that is not a number counts as that of a wrong draft."""
    said = np.asarray(logprobs, np.float64)
    said = np.fmin(np.fmax(said, _LEAST), _MOST)  # of a number and NaN, these choose the number
    odds: Array = -np.log(np.expm1(-said))
    return odds


def logistic(z: Array) -> Array:
    """The probability of log-odds z."""
    return 1 / (1 + np.exp(-z))
