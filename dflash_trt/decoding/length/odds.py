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
# By how much the drafts of a request are taken to be worse than those of others, as long as nothing is known of it: the
# drafter's, and those from the text. So a request does not pay much to find out that drafts do not pay for it.
_CAUTION, _CAUTION_COPIES = 0.5, 1.0
# By how much a round lets the variance of a weight grow again, towards that before any evidence.
_FORGETS = 0.01
# Log-odds are clipped here, and so are the log-probabilities.
_CERTAIN = 6.0
_LEAST, _MOST = -log(1 + exp(_CERTAIN)), -log(1 + exp(-_CERTAIN))
# Matches of at least so many tokens share an offset, which begins here.
_MATCHES = ((1, -1.5), (2, -0.5), (3, 0.0), (4, 0.5), (6, 1.0), (9, 1.5), (16, 2.0))
_OF_MATCH = [max(i for i, (least, _) in enumerate(_MATCHES) if least <= max(n, 1)) for n in range(17)]
# Drafts that are reached more seldom are not looked at.
_SELDOM = 0.01

# Drafting rounds over which evidence on the running requests and on all fades by 1/e, and the weight of what is assumed
# without evidence, in drafts.
DRAFTED, LONG, PRIOR = 50, 500, 2.0

Inputs = list[tuple[int, float]]  # columns of the regression, with their values
# [places][W]: the drafter's candidates of each place, best first, and their log-probabilities.
Tokens = Sequence[Sequence[int]]
Said = Sequence[Sequence[float]]


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
        size = self._lookup + 2
        self._w, self._most = [0.0] * size, [_EACH**2] * size
        self._most[self._drafter] = self._most[self._lookup] = _ALL**2
        self._w[self._drafter + 2], self._most[self._drafter + 2] = 1.0, _SLOPE**2
        self._w[self._match : self._lookup] = [begin for _, begin in _MATCHES]
        self._v = list(self._most)

    def drafted(self, own: Own, place: int, x: float, rank: int = 0, off: bool = False) -> Inputs:
        """The inputs of the drafter's candidate with log-odds x."""
        inputs = [(place, 1.0), (self._drafter, 1.0), (self._drafter + 2, x)]
        if own.temperature:
            inputs.append((self._drafter + 1, own.temperature))
        if rank:
            inputs.append((self._rank + min(rank, FEW_RANKS - 1), 1.0))
        if off:
            inputs.append((self._off, 1.0))
        return inputs

    def copied(self, own: Own, match: int) -> Inputs:
        """The inputs of a token from the text after a match of so many tokens."""
        inputs = [(self._match + _OF_MATCH[min(match, 16)], 1.0), (self._lookup, 1.0)]
        return [*inputs, (self._lookup + 1, own.temperature)] if own.temperature else inputs

    def chance(self, own: Own, inputs: Inputs) -> float:
        """The probability that a draft with these inputs is right."""
        w, z = self._w, own.offset
        for column, value in inputs:
            z += w[column] * value
        return 1 / (1 + exp(-z)) if z > -50 else 0.0

    def candidate(self, own: Own, place: int, x: float, rank: int, off: bool) -> float:
        """`chance` of `drafted`, without a list: trees ask for dozens in a round."""
        w, all_ = self._w, self._drafter
        z = own.offset + w[place] + w[all_] + own.temperature * w[all_ + 1] + x * w[all_ + 2]
        if rank:
            z += w[self._rank + min(rank, FEW_RANKS - 1)]
        if off:
            z += w[self._off]
        return 1 / (1 + exp(-z)) if z > -50 else 0.0

    def chain(self, own: Own, said: Sequence[float]) -> list[float]:
        """The probability that the first 1, 2 .. drafts of a chain with these log-probabilities are right, up to those
        that are hardly ever reached.
        """
        w, slope = self._w, self._w[self._drafter + 2]
        cautious = own.offset - _CAUTION * own.variance
        shared = w[self._drafter] + cautious + own.temperature * w[self._drafter + 1]
        return _survival([shared + w[place] + slope * log_odds(each) for place, each in enumerate(said)])

    def copies(self, own: Own, match: int, drafts: int) -> list[float]:
        """The same of tokens from the text after a match, which each right one makes longer."""
        w, of, column = self._w, _OF_MATCH, self._match
        cautious = own.offset - _CAUTION_COPIES * own.variance
        shared = w[self._lookup] + cautious + own.temperature * w[self._lookup + 1]
        return _survival([shared + w[column + of[min(match + n, 16)]] for n in range(drafts)])

    def learn(self, own: Own, tokens: Tokens, said: Said, decided: Sequence[int]) -> None:
        """Learn which candidates were right. Those after a token that is none were computed for another history."""
        off = False
        for place, token in enumerate(decided[: len(tokens)]):
            mass = 0.0
            for rank, candidate in enumerate(tokens[place]):
                logprob, right = said[place][rank], candidate == token
                if rank < FEW_RANKS:  # they say enough
                    self.judged(own, self.drafted(own, place, relative(logprob, mass), rank, off), right)
                if right:
                    break
                mass += exp(min(logprob, 0.0))
            else:
                return
            off = off or rank > 0

    def learn_copies(self, own: Own, match: int, copied: Sequence[int], decided: Sequence[int]) -> None:
        """Learn which tokens from the text after a match were right."""
        for place, (found, token) in enumerate(zip(copied, decided, strict=False)):
            self.judged(own, self.copied(own, match + place), found == token)
            if found != token:
                return

    def judged(self, own: Own, inputs: Inputs, right: bool) -> None:
        """Learn that a draft with these inputs was right, or another token in its place was."""
        w, v, most, p = self._w, self._v, self._most, self.chance(own, inputs)
        if -0.02 < right - p < 0.02:  # nothing new
            return
        certainty = p * (1 - p) if 0.02 < p < 0.98 else 0.02
        total = own.variance + 1 / certainty
        for column, value in inputs:
            variance = v[column] * (1 + _FORGETS)
            v[column] = variance = variance if variance < most[column] else most[column]
            total += variance * value * value
        wrong = (right - p) / (certainty * total)
        for column, value in inputs:
            gain = v[column] * value
            w[column] += gain * wrong
            v[column] -= gain * gain / total
        own.offset += own.variance * wrong
        own.variance = min(own.variance * (1 - own.variance / total) + _FORGETS, _OWN**2)


class Expected:
    """The mean probability that drafts are right, by place, given those before it.

    Requests differ, so those that run count most. Without evidence of them, they are taken to be like all earlier ones.
    """

    def __init__(self, drafts: int) -> None:
        # For each place: probabilities of drafts and of those before them, of all requests, then of the running ones.
        self._counts = [[0.0] * 4 for _ in range(drafts)]

    def observe(self, requests: Sequence[Sequence[float]]) -> None:
        """For each request the probability that its first 1, 2 .. drafts are right."""
        self.fade(1 - 1 / LONG, 1 - 1 / DRAFTED)
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


def relative(logprob: float, mass: float) -> float:
    """The log-odds of a candidate if its better siblings, with this mass, are wrong."""
    return log_odds(logprob - log(max(1 - mass, 1e-9)) if mass else logprob)


def log_odds(logprob: float) -> float:
    """Clipped log-odds of a log-probability. One that is not a number counts as that of a wrong draft."""
    if _LEAST < logprob < _MOST:
        return -log(expm1(-logprob))
    return _CERTAIN if logprob >= _MOST else -_CERTAIN


def _survival(log_odds_of_places: Sequence[float]) -> list[float]:
    survival, found = 1.0, list[float]()
    for z in log_odds_of_places:
        survival *= 1 / (1 + exp(-z)) if z > -50 else 0.0
        found.append(survival)
        if survival < _SELDOM:
            break
    return found
