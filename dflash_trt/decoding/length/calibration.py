"""The probability that drafts are right, from the drafter's log-probabilities and the results of earlier drafts."""

from __future__ import annotations

from itertools import accumulate
from math import exp, expm1
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

# The prior trusts the drafter. Standard deviations of its error in log-odds: a common offset for all positions, as
# much again for each position, and the weight of the drafter's estimate.
OFFSET, WEIGHT = 1.5, 0.3
# The share of a drafting round's evidence that remains after the next one.
MEMORY = 0.99
# The drafter's log-odds are clipped at 6; the same holds for its log-probabilities.
_CERTAIN = 6.0
_LEAST, _MOST = -float(np.log1p(np.exp(_CERTAIN))), -float(np.log1p(np.exp(-_CERTAIN)))


def log_odds(logprobs: Array) -> Array:
    """Clipped log-odds of the drafts' log-probabilities [..., drafts]."""
    odds: Array = -np.log(np.expm1(-_bounded(logprobs)))
    return odds


def _bounded(logprobs: Array) -> Array:
    """Bounded log-probabilities in float64. A draft whose log-probability is not a number counts as wrong."""
    said = np.asarray(logprobs, np.float64)
    return np.clip(np.where(np.isnan(said), _LEAST, said), _LEAST, _MOST)


class Calibration:
    """Online logistic regression: P(draft j is right | the earlier ones are) = s(offset_j + weight x).

    x are the drafter's log-odds. The results of a few rounds give one Newton step towards the posterior's maximum
    (Laplace's approximation). Past evidence fades, back to the prior.
    """

    def __init__(self, drafts: int) -> None:
        covariance = np.zeros((drafts + 1, drafts + 1))
        covariance[:drafts, :drafts] = OFFSET**2 * (1 + np.eye(drafts))
        covariance[drafts, drafts] = WEIGHT**2
        self._prior_precision: Array = np.linalg.inv(covariance)
        self._prior: Array = np.append(np.zeros(drafts), 1.0)
        self._precision, self._mean = self._prior_precision, self._prior

    def survival(self, x: Array) -> Array:
        """P(the first j+1 drafts are all right), for log-odds [..., drafts]."""
        drafts = x.shape[-1]
        survival: Array = np.cumprod(logistic(self._mean[:drafts] + self._mean[-1] * x), axis=-1)
        return survival

    def gains(self, logprobs: Array) -> list[float]:
        """The expected number of accepted drafts among the first 0, 1, 2 .. of each row of log-probabilities, summed
        over rows.
        """
        *offsets, weight = self._mean.tolist()
        factors = [exp(-offset) for offset in offsets]
        right = [0.0] * (logprobs.shape[1] + 1)
        for row in _bounded(logprobs).tolist():  # few numbers: faster than a dozen NumPy calls
            survival = 1.0
            for place, logprob in enumerate(row):
                survival /= 1 + factors[place] * expm1(-logprob) ** weight
                right[place + 1] += survival
        return list(accumulate(right))

    def observe(self, x: Array, accepted: Array, offered: Array, rounds: int) -> None:
        """Learn from `rounds` rounds with log-odds x [n, drafts].

        The first offered [n] drafts of each row were verified, and the first accepted [n] of them were right.
        """
        place = np.arange(x.shape[1])
        rows, places = np.nonzero(place < np.minimum(accepted + 1, offered)[:, None])
        outcome = (places < accepted[rows]).astype(np.float64)
        said = x[rows, places]

        kept = MEMORY**rounds
        precision = kept * self._precision + (1 - kept) * self._prior_precision
        toward = kept * self._precision @ self._mean + (1 - kept) * self._prior_precision @ self._prior
        mean = np.linalg.solve(precision, toward)
        p = logistic(mean[places] + mean[-1] * said)
        spread = p * (1 - p)
        precision[-1] += _features_times(spread * said, places, said, len(mean))
        precision[:-1, -1] = precision[-1, :-1]
        offsets = np.arange(len(mean) - 1)
        precision[offsets, offsets] += np.bincount(places, spread, len(offsets))
        step = np.linalg.solve(precision, _features_times(outcome - p, places, said, len(mean)))
        self._precision, self._mean = precision, mean + step


def _features_times(weights: Array, places: Array, said: Array, size: int) -> Array:
    """Sum of weight times features. The features are 1 at the draft's position, and the drafter's estimate at the
    end.
    """
    total: Array = np.bincount(places, weights, size)
    total[-1] = weights @ said
    return total


def logistic(z: Array) -> Array:
    return 1 / (1 + np.exp(-z))
