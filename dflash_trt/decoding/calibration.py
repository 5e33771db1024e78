"""How likely drafts are right, from what the drafter says of them and from what became of earlier ones."""

from __future__ import annotations

from itertools import accumulate
from math import exp, expm1
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

# The drafter is taken at its word at first. How far off it may be, in log-odds: all places of the block alike, each
# place by itself, and the weight of what it says (standard deviations).
_ALL, _EACH, _WEIGHT = 0.7, 0.7, 0.3
# What is remembered of a round after the next.
_MEMORY = 0.99
# Beyond e**6 : 1 a drafter's certainty is not told apart: the same as log-probabilities.
_CERTAIN = 6.0
_LEAST, _MOST = -float(np.log1p(np.exp(_CERTAIN))), -float(np.log1p(np.exp(-_CERTAIN)))
_NEWTON_STEPS = 3
# A draft less likely than this to count is not counted.
_NEGLIGIBLE = 1e-3


def log_odds(logprobs: Array) -> Array:
    """Of the drafts' log-probabilities [..., drafts]; log-odds, clipped."""
    bounded = np.maximum(np.minimum(logprobs, _MOST, dtype=np.float64), _LEAST)
    odds: Array = -np.log(np.expm1(-bounded))
    return odds


class Calibration:
    """Logistic regression, followed online: P(draft j is right | those before it are) = s(offset_j + weight x).

    x are the drafter's log-odds. Each round is a step to the posterior's maximum (Laplace's approximation); the past
    fades, back to the prior.
    """

    def __init__(self, drafts: int) -> None:
        covariance = np.zeros((drafts + 1, drafts + 1))
        covariance[:drafts, :drafts] = _ALL**2 + _EACH**2 * np.eye(drafts)
        covariance[drafts, drafts] = _WEIGHT**2
        self._prior_precision: Array = np.linalg.inv(covariance)
        self._prior: Array = np.append(np.zeros(drafts), 1.0)
        self._hope = np.append(np.full(drafts, _ALL), 1.0)
        self._precision, self._mean = self._prior_precision, self._prior

    def survival(self, x: Array) -> Array:
        """P(the first j+1 drafts are all right), for log-odds [..., drafts]."""
        return _survival(x, self._mean)

    def gains(self, logprobs: Array, *, hope: bool) -> list[float]:
        """How many drafts are expected to be right, in all, of the first 0, 1, 2 .. of each row of log-probabilities.

        With `hope`, had the drafter a standard deviation more of luck than it says, whatever was learnt.
        """
        *offsets, weight = (self._hope if hope else self._mean).tolist()
        factors = [exp(-offset) for offset in offsets]
        right = [0.0] * (logprobs.shape[1] + 1)
        for row in np.asarray(logprobs).tolist():  # few numbers: this is quicker than a dozen NumPy calls
            survival = 1.0
            for place, logprob in enumerate(row):
                odds_against = expm1(-min(max(logprob, _LEAST), _MOST)) ** weight
                survival /= 1 + factors[place] * odds_against
                right[place + 1] += survival
                if survival < _NEGLIGIBLE:
                    break
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
        before = mean = np.linalg.solve(precision, toward)
        offsets = np.arange(len(mean) - 1)
        for _ in range(_NEWTON_STEPS):
            p = _logistic(mean[places] + mean[-1] * said)
            gradient = precision @ (before - mean) + _features_times(outcome - p, places, said, len(mean))
            spread = p * (1 - p)
            curvature = precision.copy()
            curvature[-1] += _features_times(spread * said, places, said, len(mean))
            curvature[:-1, -1] = curvature[-1, :-1]
            curvature[offsets, offsets] += np.bincount(places, spread, len(offsets))
            mean = mean + np.linalg.solve(curvature, gradient)
        self._precision, self._mean = curvature, mean


def _features_times(weights: Array, places: Array, said: Array, size: int) -> Array:
    """Sum of weight times features, which are 1 at the draft's place and what the drafter said at the end."""
    total: Array = np.bincount(places, weights, size)
    total[-1] = weights @ said
    return total


def _survival(x: Array, parameters: Array) -> Array:
    drafts = x.shape[-1]
    survival: Array = np.cumprod(_logistic(parameters[:drafts] + parameters[-1] * x), axis=-1)
    return survival


def _logistic(z: Array) -> Array:
    return 1 / (1 + np.exp(-z))
