"""The usual times of passes, learned from the passes of rounds.

The time of a pass over `batch` sequences of n rows is a default for so many rows, times a factor of n, times a scale of
the batch size. Rounds of the length in use tell the scale, because the machine may become faster or slower for all
lengths, and trials tell the factors of their lengths; between them, factors are interpolated. Other programs only ever
make a pass longer, and some of them stop one for many times its usual time. So each number is the ratio a quarter up
among the last sixteen: it does not follow stalls in half of the rounds, and needs no limit from which on a time counts
as one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

# The passes that a scale or factor rests on.
LAST = 16
# The default: what each row after the first adds, in passes of one row. On processors it is 0.03 to 0.2 (README).
_ROW = 0.08
# A drafter's pass, in passes of its target, before any was timed: of published pairs it is 0.1 to 0.4.
_DRAFTER = 0.25
# Rounds over which evidence on stalls fades by 1/e, rounds without one that are assumed at the start, and the most
# usual rounds that one counts for: a suspended machine says nothing about the next round.
_ROUNDS, _FEW, _LONGEST = 500, 16, 32.0
# Seconds by batch size and rows of each sequence, as they are kept for later.
Kept = Mapping[int, Mapping[int, float]]


def quarter_up(ratios: Iterable[float]) -> float:
    """The value a quarter up, or the least of up to three."""
    ordered = sorted(ratios)
    return ordered[len(ordered) // 4]


class PassTimes:
    """Usual seconds of one model's passes. Batch sizes share what is learned with those of the same power of two."""

    def __init__(self, most: int, kept: Kept | None = None, target: PassTimes | None = None) -> None:
        """most: the most rows of a sequence. kept: seconds of an earlier process. target: for a drafter, the times of
        its target, which tell of its own before any was timed.
        """
        self._most, self._rows, self._target = most, np.arange(1, most + 1), target
        self._followed: dict[int, _Followed] = {}
        self._ran = set[tuple[int, int]]()
        for batch, seconds in (kept or {}).items():
            ratios = {rows: each / self._default(batch, rows) for rows, each in seconds.items()}
            scale = ratios[min(ratios)]
            self._followed[_power(batch)] = _Followed(scale, {n: each / scale for n, each in ratios.items()})

    def __call__(self, batch: int) -> list[float]:
        """Seconds of passes over `batch` sequences of 1, 2 .. rows. Fewer rows take no longer than more, and what was
        observed corrects what was not.
        """
        followed = self._of(batch)
        scale = followed.scale
        return [scale * each for each in self._shape(followed, batch)[0]]

    def steps(self, batch: int) -> list[float]:
        """By rows so far: the seconds that each further row takes at least, where as many are added as is cheapest."""
        followed = self._of(batch)
        scale = followed.scale
        return [scale * each for each in self._shape(followed, batch)[1]]

    def _shape(self, followed: _Followed, batch: int) -> tuple[list[float], list[float]]:
        """The seconds and the steps in a scale of 1."""
        if batch not in followed.shapes:
            seconds = self._default(batch, self._rows) * followed.between(self._rows)
            observed = np.isin(self._rows, list(followed.own))
            least = np.minimum.accumulate(np.where(observed, seconds, np.inf)[::-1])[::-1]
            floor = np.maximum.accumulate(np.where(observed, least, 0.0))
            seconds = np.minimum.accumulate(np.clip(seconds, floor, least)[::-1])[::-1]
            more = self._rows - self._rows[:, None]
            steps = np.where(more > 0, seconds - seconds[:, None], np.inf) / np.maximum(more, 1)
            followed.shapes[batch] = seconds.tolist(), steps.min(axis=1).tolist()
        return followed.shapes[batch]

    def settled(self, batch: int) -> bool:
        """Whether enough passes have told the scale for factors to be learned."""
        return len(self._of(batch).recent) == LAST

    def observe(self, batch: int, rows: int, seconds: float, trial: bool) -> bool:
        """Learn from a pass. Times that are impossible are ignored, and so is the first one of its size, because
        engines prepare a size when it first comes. Returns whether it was not the first.

        trial: whether its length was not the one in use.
        """
        if (batch, rows) not in self._ran:
            self._ran.add((batch, rows))
            return False
        if 1e-9 < seconds < 1e9:
            followed = self._of(batch)
            self._followed[_power(batch)] = followed
            followed.observe(rows, seconds / self._default(batch, rows), trial)
        return True

    def kept(self) -> dict[int, dict[int, float]]:
        """What was learned, for `kept` of a later process."""
        return {
            batch: {n: each.scale * f * self._default(batch, n) for n, f in sorted(each.factors.items())}
            for batch, each in sorted(self._followed.items())
        }

    @staticmethod
    def _default(batch: int, rows: Any) -> Any:
        return 1 + _ROW * (batch * rows - 1)

    def _of(self, batch: int) -> _Followed:
        """What is known of a batch size, or of the nearest one."""
        power = _power(batch)
        if power in self._followed:
            return self._followed[power]
        if self._followed:
            nearest = self._followed[min(self._followed, key=lambda each: abs(np.log2(each / power)))]
            return _Followed(nearest.scale, nearest.factors)
        if self._target is not None:
            return _Followed(_DRAFTER * self._target(batch)[0] / self._default(batch, 1))
        return _Followed()


class _Followed:
    """The scale and the factors of one batch size."""

    def __init__(self, scale: float = 1.0, factors: Mapping[int, float] | None = None) -> None:
        self._begin, self.recent = scale, deque[float](maxlen=LAST)
        self.own: dict[int, deque[float]] = {}
        # Of the number of rows. Those without an own time come from elsewhere, until there is one.
        self.factors = dict(factors or {})
        self.shapes: dict[int, tuple[list[float], list[float]]] = {}  # by batch size, while factors stay

    @property
    def scale(self) -> float:
        """Of recent passes, or as they began."""
        return quarter_up(self.recent) if self.recent else self._begin

    def between(self, rows: Any) -> Any:
        """The factor of so many rows, from those of the nearest known ones."""
        known = sorted(self.factors) or [1]
        return np.interp(rows, known, [self.factors.get(n, 1.0) for n in known])

    def observe(self, rows: int, ratio: float, trial: bool) -> None:
        """ratio: a pass's time, relative to the default."""
        if not self.recent:
            self._begin = ratio / float(self.between(rows))
        own = self.own.get(rows)
        if trial or not own or (len(own) < LAST == len(self.recent)):
            own = self.own.setdefault(rows, deque(maxlen=LAST))
            own.append(ratio / self.scale)
            if (factor := quarter_up(own)) != self.factors.get(rows) or len(own) == 1:
                self.factors[rows] = factor
                self.shapes.clear()
        if not trial:
            self.recent.append(ratio / self.factors[rows])


@cache
def _power(batch: int) -> int:
    """The nearest power of two."""
    below = 1 << (max(1, batch).bit_length() - 1)
    return below if batch * batch <= 2 * below * below else 2 * below


class Stalls:
    """The mean time of rounds beyond the usual time of their passes, because the machine is shared.

    Some stalls come once in so many rounds, others once in so much work. So the mean is a line over the usual time of a
    round: the regression of the stalls, drawn towards half and half where they tell little.
    """

    def __init__(self) -> None:
        # Over recent rounds: their number, and sums of usual times u and stalls s: u, s, u*u, u*s, s*s.
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0)

    def observe(self, u: float, seconds: float) -> None:
        """A round whose usual passes take u seconds took `seconds`."""
        if 1e-9 < u < 1e9 and seconds == seconds:
            s, k = min(max(seconds - u, -u), _LONGEST * u), 1 - 1 / _ROUNDS
            n, a, b, uu, us, ss = self._sums
            self._sums = (k * n + 1, k * a + u, k * b + s, k * uu + u * u, k * us + u * s, k * ss + s * s)

    def __call__(self, usual: Sequence[float]) -> list[float]:
        """The mean stall of rounds whose usual passes take so many seconds."""
        n, u, s, uu, us, ss = self._sums
        if s <= 0:
            return [0.0] * len(usual)
        u, s = u / n, s / n
        most, noise = s / u, (ss / n - s * s) / n
        slope = ((us / n - u * s) + 2 * noise / most) / (
            (uu / n - u * u) + 4 * noise / most**2 + 1e-12 * u * u
        )
        slope = min(max(slope, 0.0), most)
        return [n / (n + _FEW) * (s + slope * (each - u)) for each in usual]
