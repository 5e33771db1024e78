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
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

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
        self._most, self._target = most, target
        self._followed: dict[int, _Followed] = {}
        self._ran = set[tuple[int, int]]()
        for batch, seconds in (kept or {}).items():
            followed = self._followed[_power(batch)] = _Followed()
            least = min(seconds)
            followed.scale = seconds[least] / self._default(batch, least)
            for rows, each in seconds.items():
                followed.factors[rows] = each / self._default(batch, rows) / followed.scale

    def __call__(self, batch: int) -> Array:
        """Seconds of passes over `batch` sequences of 1, 2 .. rows. Fewer rows take no longer than more, and what was
        observed corrects what was not.
        """
        followed, rows = self._of(batch), np.arange(1, self._most + 1)
        seconds = self._default(batch, rows) * followed.scale
        if factors := followed.factors:
            known = sorted(factors)
            seconds = seconds * np.interp(rows, known, [factors[n] for n in known])
        observed = np.isin(rows, list(followed.own))
        least = np.minimum.accumulate(np.where(observed, seconds, np.inf)[::-1])[::-1]
        floor = np.maximum.accumulate(np.where(observed, least, 0.0))
        corrected: Array = np.minimum(np.maximum(seconds, floor), least)
        return np.minimum.accumulate(corrected[::-1])[::-1]

    def of(self, batch: int, rows: int) -> float:
        """Usual seconds of one pass."""
        followed = self._of(batch)
        return float(self._default(batch, rows)) * followed.scale * followed.between(rows)

    def settled(self, batch: int) -> bool:
        """Whether enough passes have told the scale for factors to be learned."""
        return len(self._of(batch).recent) == LAST

    def ran(self, batch: int, rows: int) -> bool:
        """Whether such a pass ran before: engines prepare a size when it first comes."""
        return (batch, rows) in self._ran

    def observe(self, batch: int, rows: int, seconds: float, trial: bool) -> None:
        """Learn from a pass. The first one of its size and impossible times are ignored.

        trial: whether its length was not the one in use.
        """
        if not self.ran(batch, rows):
            self._ran.add((batch, rows))
        elif 1e-9 < seconds < 1e9:
            followed = self._of(batch)
            self._followed[_power(batch)] = followed
            followed.observe(rows, seconds / self._default(batch, rows), trial)

    def kept(self) -> dict[int, dict[int, float]]:
        """What was learned, for `kept` of a later process."""
        return {
            batch: {n: self.of(batch, n) for n in sorted(followed.factors)}
            for batch, followed in sorted(self._followed.items())
        }

    @staticmethod
    def _default(batch: int, rows: Any) -> Any:
        return 1 + _ROW * (batch * rows - 1)

    def _of(self, batch: int) -> _Followed:
        """What is known of a batch size, or of the nearest one."""
        power = _power(batch)
        if power in self._followed:
            return self._followed[power]
        alike = _Followed()
        if self._followed:
            nearest = self._followed[min(self._followed, key=lambda each: abs(np.log2(each / power)))]
            alike.scale = nearest.scale
            alike.factors = dict(nearest.factors)
        elif self._target is not None:
            alike.scale = _DRAFTER * self._target.of(batch, 1) / self._default(batch, 1)
        return alike


class _Followed:
    """The scale and the factors of one batch size."""

    def __init__(self) -> None:
        self.scale, self.recent = 1.0, deque[float](maxlen=LAST)
        self.own: dict[int, deque[float]] = {}
        # Of the number of rows. Those without an own time come from elsewhere, until there is one.
        self.factors: dict[int, float] = {}

    def between(self, rows: int) -> float:
        """The factor of so many rows, from those of the nearest known ones."""
        if rows in self.factors or not self.factors:
            return self.factors.get(rows, 1.0)
        known = sorted(self.factors)
        return float(np.interp(rows, known, [self.factors[n] for n in known]))

    def observe(self, rows: int, ratio: float, trial: bool) -> None:
        """ratio: a pass's time, relative to the default."""
        if not self.recent:
            self.scale = ratio / self.between(rows)
        own = self.own.setdefault(rows, deque(maxlen=LAST))
        if trial or not own or (len(self.recent) == LAST and len(own) < LAST):
            own.append(ratio / self.scale)
            self.factors[rows] = quarter_up(own)
        if not trial:
            self.recent.append(ratio / self.factors[rows])
            self.scale = quarter_up(self.recent)


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
        self._sums: tuple[float, ...] = (0.0,) * 6

    def observe(self, u: float, seconds: float) -> None:
        """A round whose usual passes take u seconds took `seconds`."""
        if 1e-9 < u < 1e9 and seconds == seconds:
            s = min(max(seconds - u, -u), _LONGEST * u)
            new = (1.0, u, s, u * u, u * s, s * s)
            self._sums = tuple((1 - 1 / _ROUNDS) * a + b for a, b in zip(self._sums, new, strict=True))

    def __call__(self, usual: Array) -> Array:
        """The mean stall of rounds whose usual passes take so many seconds."""
        n, u, s, uu, us, ss = self._sums
        if s <= 0:
            return np.zeros_like(usual)
        u, s = u / n, s / n
        most, noise = s / u, (ss / n - s * s) / n
        slope = ((us / n - u * s) + 2 * noise / most) / (
            (uu / n - u * u) + 4 * noise / most**2 + 1e-12 * u * u
        )
        slope = min(max(slope, 0.0), most)
        expected: Array = n / (n + _FEW) * (s + slope * (usual - u))
        return expected
