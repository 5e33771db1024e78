"""How likely drafts are right, from what the drafter says of them and from what became of earlier ones."""

from __future__ import annotations

from itertools import accumulate
from math import exp, expm1
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

# The drafter is taken at its word at first. How far off it may be (standard deviations): in log-odds, all places of the
# block alike and each by itself as much again, and the weight of what it says.
_OFFSET, _WEIGHT = 1.5, 0.3
# What is remembered of a round that drafted after the next one.
_MEMORY = 0.99
# Beyond e**6 : 1 a drafter's certainty is not told apart: the same as log-probabilities.
_CERTAIN = 6.0
_LEAST, _MOST = -float(np.log1p(np.exp(_CERTAIN))), -float(np.log1p(np.exp(-_CERTAIN)))


def log_odds(logprobs: Array) -> Array:
    """Of the drafts' log-probabilities [..., drafts]; log-odds, clipped."""
    odds: Array = -np.log(np.expm1(-_bounded(logprobs)))
    return odds


def _bounded(logprobs: Array) -> Array:
    """In float64; a draft of which the drafter says nothing that is a number is taken for wrong."""
    said = np.asarray(logprobs, np.float64)
    return np.clip(np.where(np.isnan(said), _LEAST, said), _LEAST, _MOST)


class Calibration:
    """Logistic regression, followed online: P(draft j is right | those before it are) = s(offset_j + weight x).

    x are the drafter's log-odds. What a few rounds show is one Newton step towards the posterior's maximum (Laplace's
    approximation); the past fades, back to the prior.
    """

    def __init__(self, drafts: int) -> None:
        covariance = np.zeros((drafts + 1, drafts + 1))
        covariance[:drafts, :drafts] = _OFFSET**2 * (1 + np.eye(drafts))
        covariance[drafts, drafts] = _WEIGHT**2
        self._prior_precision: Array = np.linalg.inv(covariance)
        self._prior: Array = np.append(np.zeros(drafts), 1.0)
        self._precision, self._mean = self._prior_precision, self._prior

    def survival(self, x: Array) -> Array:
        """P(the first j+1 drafts are all right), for log-odds [..., drafts]."""
        drafts = x.shape[-1]
        survival: Array = np.cumprod(_logistic(self._mean[:drafts] + self._mean[-1] * x), axis=-1)
        return survival

    def gains(self, logprobs: Array) -> list[float]:
        """How many drafts of the first 0, 1, 2 .. of each row of log-probabilities are expected to be right, in all."""
        *offsets, weight = self._mean.tolist()
        factors = [exp(-offset) for offset in offsets]
        right = [0.0] * (logprobs.shape[1] + 1)
        for row in _bounded(logprobs).tolist():  # few numbers: this is quicker than a dozen NumPy calls
            survival = 1.0
            for place, logprob in enumerate(row):
                survival /= 1 + factors[place] * expm1(-logprob) ** weight
                right[place + 1] += survival
        return list(accumulate(right))

    def observe(self, x: Array, accepted: Array, offered: Array, rounds: int) -> None:
        """What `rounds` rounds showed: of log-odds x [n, drafts] the first offered [n] were verified and the first
        accepted [n] of them were right.
        """
        place = np.arange(x.shape[1])
        rows, places = np.nonzero(place < np.minimum(accepted + 1, offered)[:, None])
        outcome = (places < accepted[rows]).astype(np.float64)
        said = x[rows, places]

        kept = _MEMORY**rounds
        precision = kept * self._precision + (1 - kept) * self._prior_precision
        toward = kept * self._precision @ self._mean + (1 - kept) * self._prior_precision @ self._prior
        mean = np.linalg.solve(precision, toward)
        p = _logistic(mean[places] + mean[-1] * said)
        spread = p * (1 - p)
        precision[-1] += _features_times(spread * said, places, said, len(mean))
        precision[:-1, -1] = precision[-1, :-1]
        offsets = np.arange(len(mean) - 1)
        precision[offsets, offsets] += np.bincount(places, spread, len(offsets))
        step = np.linalg.solve(precision, _features_times(outcome - p, places, said, len(mean)))
        self._precision, self._mean = precision, mean + step


def _features_times(weights: Array, places: Array, said: Array, size: int) -> Array:
    """Sum of weight times features, which are 1 at the draft's place and what the drafter said at the end."""
    total: Array = np.bincount(places, weights, size)
    total[-1] = weights @ said
    return total


def _logistic(z: Array) -> Array:
    return 1 / (1 + np.exp(-z))
