"""The probability that a draft is right, learned from the drafts that were judged.

One online logistic regression for all requests and sources:

    P(a draft is right | those before it on its path are, and better candidates of its place are not) = s(z)
    drafter:  z = all + place + rank + off + a * temperature + b * x
    lookup:   z = all + match + a * temperature

x are the log-odds that the drafter gives the candidate, `off` counts where an ancestor is not the best candidate of its
place, and `match` depends on how many tokens before the draft are those before its original. Each running request adds
an offset of its own, which leaves with it.

The weights are followed by an extended Kalman filter with a diagonal covariance: a few operations on numbers per draft,
where NumPy would take several times as long for so few.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, expm1, log

# Ranks from here on share an offset.
FEW_RANKS = 4
# Standard deviations before any evidence: of what all drafts of a source share, of a place, rank or match, of a slope,
# and of what a request differs by.
_ALL, _EACH, _SLOPE, _OWN = 1.5, 1.0, 0.3, 1.0
# By how much a round lets the variance of a weight grow again, towards that before any evidence.
_FORGETS = 0.01
# Log-odds are clipped here, and so are the log-probabilities.
_CERTAIN = 6.0
_LEAST, _MOST = -log(1 + exp(_CERTAIN)), -log(1 + exp(-_CERTAIN))
# Matches of at least so many tokens share an offset, which begins here.
_MATCHES = ((1, -1.5), (2, -0.5), (3, 0.0), (4, 0.5), (6, 1.0), (9, 1.5), (16, 2.0))
_OF_MATCH = [max(i for i, (least, _) in enumerate(_MATCHES) if least <= max(n, 1)) for n in range(17)]

# Drafting rounds over which evidence on the running requests fades by 1/e, rounds for the evidence on all requests and
# for any evidence that no draft renews, and the weight of what is assumed without evidence, in drafts.
DRAFTED, IDLE, PRIOR = 50, 500, 2.0


@dataclass(slots=True)
class Own:
    """What the drafts of a running request differ by, in log-odds, with its variance; and the request's temperature."""

    temperature: float
    offset: float = 0.0
    variance: float = _OWN**2


class Odds:
    """The regression. Weights are in one list: of the drafter, then of lookup."""

    def __init__(self, drafts: int) -> None:
        self._rank, self._off = drafts, drafts + FEW_RANKS  # rank 0 has no offset
        self._drafter = self._off + 1  # all, temperature, log-odds
        self._match = self._drafter + 3
        self._lookup = self._match + len(_MATCHES)  # all, temperature
        self._last_place = drafts - 1
        size = self._lookup + 2
        self._w, self._most = [0.0] * size, [_EACH**2] * size
        for column in (self._drafter, self._lookup):
            self._most[column], self._most[column + 1] = _ALL**2, _EACH**2
        self._w[self._drafter + 2], self._most[self._drafter + 2] = 1.0, _SLOPE**2
        self._w[self._match : self._lookup] = [begin for _, begin in _MATCHES]
        self._v = list(self._most)

    def drafted(self, own: Own, place: int, x: float, rank: int = 0, off: bool = False) -> float:
        """The probability of the drafter's candidate with log-odds x."""
        w, drafter = self._w, self._drafter
        z = (
            w[place if place < self._rank else self._last_place]
            + w[drafter]
            + own.offset
            + x * w[drafter + 2]
        )
        if own.temperature:
            z += own.temperature * w[drafter + 1]
        if rank:
            z += w[self._rank + (rank if rank < FEW_RANKS else FEW_RANKS - 1)]
        if off:
            z += w[self._off]
        return 1 / (1 + exp(-z)) if z > -50 else 0.0

    def copied(self, own: Own, match: int) -> float:
        """The probability of a token from the text after a match of so many tokens."""
        w, lookup = self._w, self._lookup
        return _logistic(
            w[self._match + _OF_MATCH[min(match, 16)]]
            + w[lookup]
            + own.temperature * w[lookup + 1]
            + own.offset
        )

    def chain(self, own: Own, said: Sequence[float]) -> list[float]:
        """The probability that the first 1, 2 .. drafts of a chain with these log-probabilities are right."""
        survival, right = 1.0, list[float]()
        for place, logprob in enumerate(said):
            survival *= self.drafted(own, place, log_odds(logprob))
            right.append(survival)
        return right

    def copies(self, own: Own, match: int, drafts: int) -> list[float]:
        """The probability that the first 1, 2 .. tokens from the text after a match are right. Each right one makes the
        match longer.
        """
        survival, right = 1.0, list[float]()
        for place in range(drafts):
            survival *= self.copied(own, match + place)
            right.append(survival)
        return right

    def learn_drafted(
        self, own: Own, place: int, x: float, right: bool, rank: int = 0, off: bool = False
    ) -> None:
        """A candidate was right, or another token in its place was."""
        inputs = [(min(place, self._last_place), 1.0), (self._drafter, 1.0), (self._drafter + 2, x)]
        if rank:
            inputs.append((self._rank + min(rank, FEW_RANKS - 1), 1.0))
        if off:
            inputs.append((self._off, 1.0))
        if own.temperature:
            inputs.append((self._drafter + 1, own.temperature))
        self._learn(own, inputs, self.drafted(own, place, x, rank, off), right)

    def learn_copied(self, own: Own, match: int, right: bool) -> None:
        """A token after a match was right, or another one."""
        inputs = [(self._match + _OF_MATCH[min(match, 16)], 1.0), (self._lookup, 1.0)]
        if own.temperature:
            inputs.append((self._lookup + 1, own.temperature))
        self._learn(own, inputs, self.copied(own, match), right)

    def _learn(self, own: Own, inputs: list[tuple[int, float]], p: float, right: bool) -> None:
        w, v, most = self._w, self._v, self._most
        certainty = p * (1 - p) if 0.02 < p < 0.98 else 0.02
        total = own.variance + 1 / certainty
        for column, value in inputs:
            variance = v[column] * (1 + _FORGETS)
            v[column] = variance = variance if variance < most[column] else most[column]
            total += variance * value * value
        wrong = (right - p) / certainty
        for column, value in inputs:
            gain = v[column] * value / total
            w[column] += gain * wrong
            v[column] *= 1 - gain * value
        gain = own.variance / total
        own.offset += gain * wrong
        own.variance = min(own.variance * (1 - gain) + _FORGETS, _OWN**2)


class Expected:
    """The mean probability that drafts are right, by place, given those before it.

    Requests differ, so those that run count most. Without evidence of them, they are taken to be like all earlier ones.
    """

    def __init__(self, drafts: int) -> None:
        # For each place: probabilities of drafts and of those before them, of all requests, then of the running ones.
        self._counts = [[0.0] * 4 for _ in range(drafts)]

    def observe(self, requests: Sequence[Sequence[float]]) -> None:
        """For each request the probability that its first 1, 2 .. drafts are right."""
        self.fade(1 - 1 / IDLE, 1 - 1 / DRAFTED)
        for survival in requests:
            before = 1.0
            for counts, right in zip(self._counts, survival, strict=False):
                counts[0] += right
                counts[1] += before
                counts[2] += right
                counts[3] += before
                before = right

    def fade(self, of_all: float, of_running: float) -> None:
        """Let only these shares of the evidence remain."""
        for counts in self._counts:
            counts[0] *= of_all
            counts[1] *= of_all
            counts[2] *= of_running
            counts[3] *= of_running

    def tokens(self) -> list[float]:
        """The expected tokens of a request, for lengths 1, 2 .. A place without evidence is as the one before it."""
        tokens, survival, usual = [1.0], 1.0, 0.7
        for right, before, own_right, own_before in self._counts:
            usual = (right + PRIOR * usual) / (before + PRIOR)
            survival *= (own_right + PRIOR * usual) / (own_before + PRIOR)
            tokens.append(tokens[-1] + survival)
        return tokens


def log_odds(logprob: float) -> float:
    """Clipped log-odds of a log-probability. One that is not a number counts as that of a wrong draft."""
    return -log(expm1(-(min(logprob, _MOST) if logprob > _LEAST else _LEAST)))


def _logistic(z: float) -> float:
    return 1 / (1 + exp(-z)) if z > -50 else 0.0
