"""The probability that a draft is right, learned from the drafts that were judged.

    drafter:  log-odds = place + rank + off + slope * x + a * temperature + request
    text:     log-odds = those of matches of so many tokens + a * temperature + request

x are the log-odds that the drafter gives a candidate, given that better ones of its place are wrong; `off` counts where
an ancestor is not the best candidate of its place. Each judged draft moves the weights by how wrong its probability was
(stochastic gradient descent), for all requests of a batch at once. What a running request differs by leaves with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from weakref import ref

import numpy as np

from dflash_trt.decoding.draft import Array, Candidates
from dflash_trt.decoding.request import Request

# A weight takes 1 / told of the error of a probability, and the slope this part of it. What is told grows with each
# judged draft by a typical p * (1 - p), up to a most: of a request, and of all.
_TELLS, _MOST_OWN, _MOST_ALL = 0.15, 8.0, 32.0
_SLOPE = 0.2
# By how much the drafts of a new request are taken to be worse than those of others: the drafter's, and those from the
# text. So a request does not pay much to find out that drafts do not pay for it.
_NEW = [-0.5, 1.0, -1.0, 1.0]
# Log-probabilities are clipped to these: log-odds of -6 and 6.
_LEAST, _MOST = np.float32(-6.002476), np.float32(-0.002479)
# The log-odds of a token from the text after a match of so many tokens, at first.
_MATCHES = np.interp(np.arange(17), (1, 2, 3, 4, 6, 9, 16), (-1.5, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0))
_TOGETHER = 4  # the most rounds after which weights are moved at once
_RANKS = 4  # ranks from here on share a weight
# Drafting rounds over which evidence on the running requests and on all fades by 1/e, and the weight of what is assumed
# without evidence, in drafts.
_RUNNING, _ALL, _PRIOR = 50, 500, 2.0


class Rates:
    """The weights, and the evidence by place. Arrays of a batch are by slot; `seat` says whose slots they are."""

    def __init__(self, drafts: int) -> None:
        self._below = np.tri(drafts + 1, drafts, -1)  # [n] is 1 at the first n places
        self._place, self._slope, self._warm = np.zeros(drafts), 1.0, 0.0
        self._match, self._warm_match = _MATCHES.copy(), 0.0
        self._told, self._warm_told, self._match_told = 4.0, 1.0, np.ones(17)
        self._rank, self._off = np.zeros(_RANKS), 0.0
        self._active: list[ref[Request]] = []  # an ended one is not kept
        # Of each request: what the drafter's drafts differ by, what is known of it, and both of those from the text.
        self._own, self._temperature = np.zeros((4, 0)), np.zeros(0)
        self._shift = np.zeros((0, drafts))  # what the log-odds of chains have beside slope * x
        # Of the last chains: minus x, and probabilities; and of those of some rounds, with the right and judged drafts.
        self._x = self._p = self._shift
        self._log: list[tuple[Array, Array, list[int], list[int]]] = []
        # Of the last `copies`: matches and probabilities.
        self._at, self._of_text = np.zeros((0, 0), int), self._x
        self._together = 1
        # By place, of all requests and of the running ones: right drafts, and judged ones.
        self._counts = np.zeros((2, 2, drafts))
        # Since the last fold: rounds with the drafter and without it, and of those whose drafts the host did not read,
        # how many requests had so many right drafts, and judged ones.
        self._rounds, self._seen = [0, 0], [[0] * (drafts + 1), [0] * (drafts + 1)]

    def seat(self, active: Sequence[Request]) -> None:
        """These requests run now. What is known of those that ran before stays."""
        seated = [alive() for alive in self._active]
        if active != seated:
            self._move()
            known = dict(zip(seated, self._own.T.tolist(), strict=True))
            self._own = np.array([known.get(request, _NEW) for request in active]).reshape(-1, 4).T.copy()
            self._temperature = np.array([min(request.params.temperature, 2.0) for request in active])
            self._active, self._together = [ref(request) for request in active], 1
            self._shift_all()

    def _shift_all(self) -> None:
        self._shift = np.add.outer(self._own[0] + self._warm * self._temperature, self._place)

    def chains(self, logprobs: Array) -> Array:
        """P(the first 1, 2 .. drafts are right) of chains with these log-probabilities [n, drafts]."""
        self._x = _against(logprobs)
        self._p = np.reciprocal(1 + np.exp(self._slope * self._x - self._shift[:, : self._x.shape[1]]))
        survival: Array = self._p.cumprod(axis=1)
        return survival

    def candidates(self, logprobs: Array) -> Array:
        """P(a candidate is right | the path before it is) [2, n, drafts, W], at [1] where an ancestor is not the best
        one of its place.
        """
        left = 1 - np.exp(np.minimum(logprobs, 0)).cumsum(axis=2) + np.exp(np.minimum(logprobs, 0))
        x = _against(logprobs - np.log(np.clip(left, 1e-9, 1)))
        rank = self._rank[np.minimum(np.arange(x.shape[2]), _RANKS - 1)]
        z = self._slope * x - rank - self._shift[:, : x.shape[1], None]
        hazard = np.reciprocal(1 + np.exp(np.stack([z, z - self._off])))
        others = np.ones_like(hazard)
        others[..., 1:] = (1 - hazard).cumprod(axis=3)[..., :-1]
        self._x, self._p, self._hazard = x[:, :, 0], hazard[0, :, :, 0], hazard
        rights: Array = hazard * others
        return rights

    def learn(self, right: list[int], judged: list[int], *, read: bool) -> None:
        """By slot: how many drafts were right, and how many were judged. read: whether the host read what the drafter
        says of them, for `chains` or `candidates`.
        """
        self._rounds[0] += 1
        if not read:
            for counts, numbers in zip(self._seen, (right, judged), strict=True):
                for number in numbers:
                    counts[number] += 1
            return
        if self._log and self._log[0][1].shape != self._p.shape:
            self._move()
        self._log.append((self._x, self._p, right, judged))
        if len(self._log) >= self._together:
            self._together = min(self._together + 1, _TOGETHER)
            self._move()

    def _move(self) -> None:
        """Move the weights by how wrong the probabilities of the last chains were, and count them."""
        if not self._log:
            return
        x, p, right, judged = (np.array(numbers) for numbers in zip(*self._log, strict=True))
        self._log.clear()
        drafts = p.shape[2]
        wrong = (self._below[right, :drafts] - p) * self._below[judged, :drafts]
        of_request, of_place = wrong.sum(axis=(0, 2)), wrong.sum(axis=(0, 1))
        weights, told = self._own[:2]
        np.minimum(told + _TELLS * judged.sum(axis=0), _MOST_OWN, out=told)
        weights += of_request / told
        self._told = min(self._told + _TELLS * float(judged.sum()), _MOST_ALL)
        step = 1 / max(self._told, p.shape[1])
        self._place[:drafts] += step * of_place
        self._place += step * of_place.sum()
        self._slope -= _SLOPE * step * float((wrong * x).sum())
        if self._temperature.any():
            told = self._warm_told + _TELLS * float(judged.sum(axis=0) @ self._temperature)
            self._warm_told = min(told, _MOST_ALL)
            self._warm += float(of_request @ self._temperature) / told
        self._shift_all()
        survival = (p.cumprod(axis=2) * (judged > 0)[:, :, None]).sum(axis=(0, 1))
        self._counts[:, 0, :drafts] += survival
        self._counts[:, 1, 1:drafts] += survival[:-1]
        self._counts[:, 1, 0] += np.count_nonzero(judged)

    def learn_candidates(
        self, candidates: Candidates, slots: Iterable[int], decided: Iterable[Sequence[int]]
    ) -> None:
        """Learn the weights of ranks and of other ancestors from the last `candidates`. Those after a token that is
        none of them were computed for another history.
        """
        tokens = np.asarray(candidates.tokens).tolist()
        for slot, found in zip(slots, decided, strict=True):
            off = 0
            for place, token in enumerate(found[: len(tokens[slot])]):
                row = tokens[slot][place]
                rank = row.index(token) if token in row else len(row)
                for n in range(min(rank + 1, len(row))):
                    wrong = 1 / _MOST_ALL * ((n == rank) - float(self._hazard[off, slot, place, n]))
                    self._rank[min(n, _RANKS - 1)] += wrong * (n > 0)
                    self._off += wrong * off
                if rank == len(row):
                    break
                off = int(off or rank > 0)

    def copies(self, slots: list[int], matches: list[int], drafts: int) -> Array:
        """P(the first 1, 2 .. tokens from the text are right) [slots, drafts], after matches of so many tokens. Each
        right one makes the match longer.
        """
        self._at = np.minimum(np.add.outer(matches, np.arange(drafts)), 16)
        shared = self._own[2, slots] + self._warm_match * self._temperature[slots]
        self._of_text = np.reciprocal(1 + np.exp(-self._match[self._at] - shared[:, None]))
        survival: Array = self._of_text.cumprod(axis=1)
        return survival

    def learn_copies(self, slots: list[int], right: list[int], judged: list[int]) -> None:
        """As `learn`, of the last `copies`, by their slots."""
        seen = self._below[judged]
        wrong = (self._below[right] - self._of_text) * seen
        of_request, places = wrong.sum(axis=1), self._at.ravel()
        told = self._own[3, slots] = np.minimum(self._own[3, slots] + _TELLS * seen.sum(axis=1), _MOST_OWN)
        self._own[2, slots] += of_request / told
        told = self._match_told + _TELLS * np.bincount(places, seen.ravel(), minlength=17)
        self._match_told = np.minimum(told, _MOST_ALL)
        self._match += np.bincount(places, wrong.ravel(), minlength=17) / told
        if self._temperature.any():
            self._warm_match += float(of_request @ self._temperature[slots]) / _MOST_ALL

    def pause(self) -> None:
        """A round without the drafter."""
        self._rounds[1] += 1

    def end(self, share: float) -> None:
        """This share of the running requests has ended."""
        self._fold()
        self._counts[1] *= 1 - share

    def _fold(self) -> None:
        """Add the evidence since the last plan, and let what was before it fade."""
        drafting, idle = self._rounds
        self._counts[0] *= (1 - 1 / _ALL) ** (drafting + idle)
        self._counts[1] *= (1 - 1 / _RUNNING) ** drafting * (1 - 1 / _ALL) ** idle
        self._counts += np.array(self._seen) @ self._below
        self._rounds, self._seen = [0, 0], [[0] * len(self._below), [0] * len(self._below)]
        self._move()

    def gains(self) -> Array:
        """The drafts of a request that are expected to be right, for lengths 1, 2 .. A place without evidence is as the
        one before it.
        """
        self._fold()
        gains, survival, usual = [0.0], 1.0, 0.7
        for right, judged, own_right, own_judged in self._counts.reshape(4, -1).T.tolist():
            usual = (right + _PRIOR * usual) / (judged + _PRIOR)
            survival *= (own_right + _PRIOR * usual) / (own_judged + _PRIOR)
            gains.append(gains[-1] + survival)
        return np.array(gains)


def _against(logprobs: Array) -> Array:
    """Clipped log-odds against drafts of these log-probabilities. One that is no number counts as a wrong draft's."""
    x: Array = np.log(np.expm1(-np.minimum(np.fmax(logprobs, _LEAST), _MOST)))
    return x
