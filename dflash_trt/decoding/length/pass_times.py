"""The usual time of a pass over `batch` sequences of `length` tokens: measured at start-up and in every round.

A pass corrects the time of its own length most, of similar lengths less, and of all lengths of its batch a little: the
machine may be slower. A pass counts as at most 1.5 times its usual time, unless long passes follow each other. So one
pause of the machine says little about one length. It adds to the mean stall, which all lengths share (`stalls`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

# The share of a slow drift of one length that all other lengths of its batch follow.
_SHARED = 0.85
# A pass is long from so many usual times on, and counts no more than that until so many in a row are long.
_LONG, _IN_A_ROW = 1.5, 2
# The passes that a start-up time is worth, and those over which a running mean looks back.
_BELIEF, _PASSES = 0.25, 32
# The rounds over which other evidence fades by 1/e.
ROUNDS = 500
# Limits of start-up measurements, in seconds and in turns.
_START_UP_SECONDS, _TURNS = 0.5, 5


class PassTimes:
    """Usual seconds per pass. `measured` [batch][length] are start-up times, all for lengths 1 or 2 up to the block
    size.

    `batches` are the batch sizes whose times are followed, in order. Other sizes follow the nearest of them. Start-up
    times between the measured ones are interpolated.
    """

    def __init__(self, measured: Mapping[int, Mapping[int, float]], batches: Sequence[int]) -> None:
        self._warm = {(size, length) for size, row in measured.items() for length in row}
        self._sizes = sorted(measured)
        lengths = np.arange(1, max(measured[self._sizes[0]]) + 1)
        rows = [
            np.interp(lengths, sorted(row), [_usable(row[n]) for n in sorted(row)])
            for row in map(measured.__getitem__, self._sizes)
        ]
        self._start = np.transpose(rows)
        self._octaves = np.log2(batches)
        # What was learned, of each followed size and length: a factor, and the number of passes that it rests on.
        self._factors, self._passes = np.ones((2, len(batches), len(lengths)))
        self._passes *= _BELIEF
        octaves = np.abs(np.log2(lengths) - np.log2(lengths)[:, None])
        self._near = np.maximum(0.0, 1 - octaves)
        self._long = dict[tuple[int, int], int]()
        self._of = dict[int, tuple[Array, Array, Array]]()

    def __call__(self, batch: int) -> Array:
        """Usual seconds of passes over `batch` sequences of 1, 2 .. tokens."""
        start, factors, _ = self._row(batch)
        seconds: Array = start * factors
        return seconds

    def evidence(self, batch: int) -> Array:
        """The recent passes on which each of these times rests."""
        return self._row(batch)[2] - _BELIEF

    def observe(self, batch: int, length: int, seconds: float) -> tuple[float, float, float]:
        """Learn from a pass that took `seconds`. Returns the usual time before it, the part that is no stall,
        and the factor by which all lengths of the batch changed.

        An impossible time is ignored. So is the first pass of a size, which may be cold.
        """
        start, factors, passes = self._row(batch)
        usual = float(start[length - 1] * factors[length - 1])
        if (batch, length) not in self._warm:
            self._warm.add((batch, length))
            return usual, usual, 1.0
        if not 1e-9 < seconds < 1e9:
            return usual, usual, 1.0
        known = float(passes[length - 1])
        steady = min(seconds, usual * _LONG * 2.0 ** max(0, self._long.get((batch, length), 0) - _IN_A_ROW))
        self._long[batch, length] = self._long.get((batch, length), 0) + 1 if seconds > _LONG * usual else 0
        wrong = steady / usual - 1
        near, common = self._near[length - 1], _SHARED * wrong / (1 + _PASSES)
        factors *= 1 + common + near * (wrong / (1 + min(known, _PASSES)) - common)
        passes += near - (passes - _BELIEF) / ROUNDS
        return usual, steady, 1 + common

    def scale(self, batch: int, factor: float) -> None:
        """Follow a change of the other passes of a batch."""
        factors = self._row(batch)[1]
        factors *= factor

    def _row(self, batch: int) -> tuple[Array, Array, Array]:
        """Start-up times of a batch size, and views of the factors and passes of the followed size."""
        if batch not in self._of:
            start = np.array([np.interp(batch, self._sizes, column) for column in self._start])
            at = int(np.abs(self._octaves - np.log2(batch)).argmin())
            self._of[batch] = start, self._factors[at], self._passes[at]
        return self._of[batch]


def _usable(seconds: float) -> float:
    return min(max(seconds, 1e-9), 1e9) if seconds == seconds else 1e9


def measure(
    run: Callable[[int, int], object],
    batches: Sequence[int],
    lengths: Sequence[int],
) -> PassTimes:
    """Time passes `run(batch, length)`: of the smallest batch, then the largest, then those between.

    Each runs once to warm up, for as many batch sizes as time permits. Then all are timed in turn, so that a busy
    moment of the machine affects all of them.
    """
    begin, order = perf_counter(), [batches[0], *reversed(batches[1:])]
    times: dict[int, dict[int, list[float]]] = {}
    for batch in order:
        if times and perf_counter() - begin > _START_UP_SECONDS:
            break
        times[batch] = {length: [] for length in lengths}
        for length in lengths:
            run(batch, length)
    begin = perf_counter()
    for turn in range(_TURNS):
        if turn and perf_counter() - begin > _START_UP_SECONDS:
            break
        for batch, row in times.items():
            for length, seconds in row.items():
                start = perf_counter()
                run(batch, length)
                seconds.append(perf_counter() - start)
    least = {batch: {n: min(s) for n, s in row.items()} for batch, row in times.items()}
    return PassTimes(least, batches)
