"""The usual times of passes, learned from the passes of rounds.

The time of a pass over `batch` sequences of n rows is a default for so many rows, times a factor of n, times a scale of
the batch size. Rounds of the length in use tell the scale, because the machine may become faster or slower for all
lengths. Trials tell the factors of their lengths, and so do rounds where several lengths are in use, each by the scale
of the others; between them, factors are interpolated. Other programs only ever make a pass longer, and some of them
stop one for many times its usual time. So each number is the ratio a quarter up among the last sixteen: it does not
follow stalls in half of the rounds, and needs no limit from which on a time counts as one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import log2
from typing import Any

import numpy as np

# The passes that a scale or factor rests on, and those of other lengths among them from which on every fourth pass
# tells the factor of its own.
LAST, _FEW = 16, 4
# By how much a scale differs from the one before if the machine has changed.
_CHANGE = 1.4
# The passes after which times of other rows are old. One pass to learn them anew is a share of 0.002.
_OLD = 500
# The default: what each row after the first adds, in passes of one row. On processors it is 0.03 to 0.2 (README).
_ROW = 0.08
# A drafter's pass, in passes of its target, before any was timed: of published pairs it is 0.1 to 0.4.
_DRAFTER = 0.25
# Seconds by batch size and rows of each sequence, as they are kept for later.
Kept = Mapping[int, Mapping[int, float]]


class PassTimes:
    """Usual seconds of one model's passes. Batch sizes share what is learned with those of the same power of two."""

    def __init__(self, most: int, kept: Kept | None = None, target: PassTimes | None = None) -> None:
        """most: the most rows of a sequence. kept: seconds of an earlier process. target: for a drafter, the times of
        its target, which tell of its own before any was timed.
        """
        self._rows, self._target = np.arange(1, most + 1), target
        self._tables: dict[int, _Table] = {}
        self._ran = set[tuple[int, int]]()
        for batch, seconds in (kept or {}).items():
            ratios = {rows: usual / _default(batch, rows) for rows, usual in _plausible(seconds).items()}
            scale = ratios[min(ratios)]
            factors = {rows: ratio / scale for rows, ratio in ratios.items()}
            self._tables[_power(batch)] = _Table(scale, factors)

    def __call__(self, batch: int) -> Any:
        """Seconds [rows] of passes over `batch` sequences of 1, 2 .. rows. Fewer rows take no longer than more."""
        table = self._of(batch)
        seconds = table.scale * _default(batch, self._rows) * table.factor(self._rows)
        return np.minimum.accumulate(seconds[::-1])[::-1]

    def settled(self, batch: int) -> bool:
        """Whether enough passes have told the scale for factors to be learned."""
        return len(self._of(batch).scales) == LAST

    def observe(self, batch: int, rows: int, seconds: float, trial: bool) -> bool:
        """Learn from a pass. Times that are impossible are ignored, and so is the first one of its size, because
        engines prepare a size when it first comes. Returns whether it was not the first.

        trial: whether its length was not the one in use.
        """
        if (batch, rows) not in self._ran:
            self._ran.add((batch, rows))
            return False
        if not 1e-9 < seconds < 1e9:
            return True
        table = self._tables[_power(batch)] = self._of(batch)
        ratio = seconds / _default(batch, rows)
        if not table.scales:
            table.begin = ratio / float(table.factor(rows))
        told, table.passes = table.told.get(rows), table.passes + 1
        full, others = len(table.scales) == LAST, len(table.rows) - table.rows.count(rows)
        if trial or not told or (len(told) < LAST and full) or (others >= _FEW and table.passes % 4 == 0):
            table.correct(batch, rows, ratio)
        if not trial:
            table.rows.append(rows)
            table.scales.append(ratio / table.factors[rows])
        table.last[rows] = table.passes
        return True

    def sure(self, batch: int, rows: int) -> bool:
        """Whether at least two passes told the factor of these rows: one alone may be a stall."""
        return len(self._of(batch).told.get(rows, ())) > 1

    def changed(self, batch: int) -> bool:
        """Whether the scale is another one than before, so that the factor of one row may be another one, too. What
        was told of it is forgotten.
        """
        table = self._of(batch)
        before, scale = table.settled, table.scale
        if len(table.scales) < LAST or (before and 1 / _CHANGE < scale / before < _CHANGE):
            return False
        table.settled = scale
        if before and 1 in table.told:
            table.told[1].clear()
        return before > 0

    def forget_old(self, batch: int) -> None:
        """Forget the times of rows that no recent pass had. Nothing corrects them where there are no trials, and those
        of a busy machine may be so long that such a pass would never be chosen again.
        """
        table = self._of(batch)
        for rows in [n for n in table.factors if table.passes - table.last.get(n, 0) >= _OLD]:
            del table.factors[rows]
            table.told.pop(rows, None)

    def kept(self) -> dict[int, dict[int, float]]:
        """What was learned, for `kept` of a later process."""
        return {
            batch: {n: table.scale * f * _default(batch, n) for n, f in sorted(table.factors.items())}
            for batch, table in sorted(self._tables.items())
        }

    def _of(self, batch: int) -> _Table:
        """What is known of a batch size, or a copy of what is known of the nearest one."""
        power = _power(batch)
        if power in self._tables:
            return self._tables[power]
        if self._tables:
            nearest = self._tables[min(self._tables, key=lambda other: abs(log2(other / power)))]
            return _Table(nearest.scale, dict(nearest.factors))
        return _Table(_DRAFTER * self._target(batch)[0] / _default(batch, 1) if self._target else 1.0)


@dataclass(slots=True)
class _Table:
    """What is known of one batch size.

    begin: the scale before any pass. rows, scales: of recent passes.
    factors, told: by rows, and what passes of these rows told. Factors that no pass told come from elsewhere.
    passes, last: their number, and by rows that of the last one. settled: the scale when `changed` last was true, or
        when there first was one.
    """

    begin: float
    factors: dict[int, float] = field(default_factory=dict)
    rows: deque[int] = field(default_factory=lambda: deque(maxlen=LAST))
    scales: deque[float] = field(default_factory=lambda: deque(maxlen=LAST))
    told: dict[int, deque[float]] = field(default_factory=dict)
    passes: int = 0
    last: dict[int, int] = field(default_factory=dict)
    settled: float = 0.0

    @property
    def scale(self) -> float:
        return _quarter_up(self.scales) if self.scales else self.begin

    def factor(self, rows: Any) -> Any:
        """The factors of numbers of rows, from those of the nearest known ones."""
        known = sorted(self.factors) or [1]
        return np.interp(rows, known, [self.factors.get(n, 1.0) for n in known])

    def correct(self, batch: int, rows: int, ratio: float) -> None:
        """Learn the factor of a pass by the scale of others. A factor that no pass told counts as long as it fits: more
        rows take no less than fewer, and no longer than passes of fewer in turn.
        """
        others = [scale for n, scale in zip(self.rows, self.scales, strict=True) if n != rows]
        told = self.told.setdefault(rows, deque(maxlen=LAST))
        told.append(ratio / (_quarter_up(others) if len(others) >= _FEW else self.scale))
        self.factors[rows] = _quarter_up(told)
        usual = self.factors[rows] * _default(batch, rows)
        for n in [n for n in self.factors if n not in self.told]:
            fewer, more = sorted([(rows, usual), (n, self.factors[n] * _default(batch, n))])
            if not fewer[1] <= more[1] <= -(-more[0] // fewer[0]) * fewer[1]:
                del self.factors[n]


def _plausible(seconds: Mapping[int, float]) -> dict[int, float]:
    """The times that fit that of the fewest rows: a pass takes no less than it, and no longer than so many in turn. A
    process that ended amid stalls may leave others, and a length that seems that slow would not be tried for long.
    """
    fewest = min(seconds)
    least = seconds[fewest] / _CHANGE
    return {
        n: usual for n, usual in seconds.items() if least <= usual <= -(-n // fewest) * least * _CHANGE**2
    }


def _default(batch: int, rows: Any) -> Any:
    return 1 + _ROW * (batch * rows - 1)


def _power(batch: int) -> int:
    """The nearest power of two."""
    return 1 << round(log2(max(1, batch)))


def _quarter_up(ratios: Iterable[float]) -> float:
    """The value a quarter up, or the least of up to three."""
    ordered = sorted(ratios)
    return ordered[len(ordered) // 4]
