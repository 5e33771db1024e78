"""The time of a pass over `batch` sequences of `length` tokens: measured at start-up and in every round.

The logarithms of the times are modelled as jointly Gaussian, with a Kalman filter. A pass tells its own time, much
about passes of similar size, and something about all (a slower machine, longer sequences). Uncertainty returns while
a pass is not run. So a time that was wrong or has changed is measured again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import log
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

# The error of start-up times: a common factor, and one per size (standard deviation of the logarithm of either).
_DOUBT = 0.7
# The difference between two passes of one size (likewise), and the share of the prior variance that returns per
# round.
_NOISE, _RETURNING = 0.1, 3e-5
# Limits of start-up measurements, in seconds and in turns.
_START_UP_SECONDS, _TURNS = 0.5, 5


class PassTimes:
    """Seconds per pass. `measured` [batch][length] are start-up times, all for lengths 1 or 2 up to the block size.

    `batches` are the batch sizes whose times are followed, in order. Times of other sizes are interpolated. `believed`
    gives the time of a batch that start-up did not measure. Its scale plays no part. Without it, the nearest
    measured batches count.
    """

    def __init__(
        self,
        measured: Mapping[int, Mapping[int, float]],
        batches: Sequence[int],
        believed: Callable[[int, int], float] | None = None,
    ) -> None:
        warm = {(size, length) for size, row in measured.items() for length in row}
        if believed is not None:
            measured = _filled(measured, batches, believed)
        sizes = sorted(measured)
        self._lengths = max(measured[sizes[0]])
        lengths = np.arange(1, self._lengths + 1)
        rows = [
            np.interp(lengths, sorted(row), [row[n] for n in sorted(row)])
            for row in map(measured.__getitem__, sizes)
        ]
        seconds = np.array([np.interp(batches, sizes, column) for column in np.transpose(rows)]).T
        self._mean: Array = np.log(np.clip(np.nan_to_num(seconds), 1e-9, 1e9)).ravel()
        self._octaves, self._shares = np.log2(batches), dict[int, Array]()
        b, n = (each.ravel() for each in np.meshgrid(self._octaves, np.log2(lengths), indexing="ij"))
        self._doubt = _DOUBT**2 * (1 + np.exp(-np.abs(b - b[:, None]) - np.abs(n - n[:, None])))
        self._covariance = self._doubt.copy()
        self._warm = warm

    def __call__(self, batch: int) -> Array:
        """Seconds of passes over `batch` sequences of 1, 2 .. tokens."""
        seconds: Array = np.exp(self._parts(batch) @ self._mean)
        return seconds

    def doubtful(self, batch: int) -> Array:
        """Whether one more pass of length 1, 2 .. would reduce its uncertainty."""
        doubtful: Array = self._parts(batch) @ np.diag(self._covariance) > _NOISE**2
        return doubtful

    def observe(self, batch: int, length: int, seconds: float) -> None:
        """Learn from one round, whose pass took `seconds`.

        An impossible time is ignored. So is the first pass of a size, which may be cold.
        """
        returning = _RETURNING
        if (batch, length) not in self._warm:
            self._warm.add((batch, length))
        elif 1e-9 < seconds < 1e9:
            parts = self._parts(batch)[length - 1]
            along = self._covariance @ parts
            variance = float(along @ parts) + _NOISE**2
            surprise = log(seconds) - float(parts @ self._mean)
            most = 3 * variance**0.5  # an outlier changes no more than this
            self._mean += along * (min(max(surprise, -most), most) / variance)
            self._covariance -= np.outer(along, along / variance)
            returning *= max(1.0, surprise**2 / variance)  # if the next pass agrees, the times have changed
        self._covariance += min(returning, 1.0) * (self._doubt - self._covariance)

    def _parts(self, batch: int) -> Array:
        """Weights [lengths, sizes x lengths] that combine the followed times into those of this batch size."""
        if batch not in self._shares:
            place = np.interp(np.log2(batch), self._octaves, np.arange(len(self._octaves)))
            near = np.maximum(0.0, 1 - np.abs(np.arange(len(self._octaves)) - place))
            self._shares[batch] = np.kron(near, np.eye(self._lengths))
        return self._shares[batch]


def _filled(
    measured: Mapping[int, Mapping[int, float]],
    batches: Sequence[int],
    believed: Callable[[int, int], float],
) -> dict[int, dict[int, float]]:
    """The measured times, and those believed for the other batches.

    Beliefs are scaled by how wrong they are for the same length, in the batches measured below and above.
    """
    sizes, found = sorted(measured), {size: dict(row) for size, row in measured.items()}
    octaves = np.log2(sizes)
    for length in measured[sizes[0]]:
        wrong = [log(_usable(measured[size][length]) / _usable(believed(size, length))) for size in sizes]
        for batch in batches:
            if batch not in measured:
                scale = np.exp(np.interp(np.log2(batch), octaves, wrong))
                found.setdefault(batch, {})[length] = float(scale * _usable(believed(batch, length)))
    return found


def _usable(seconds: float) -> float:
    return min(max(seconds, 1e-9), 1e9) if seconds == seconds else 1e9


def measure(
    run: Callable[[int, int], object],
    batches: Sequence[int],
    lengths: Sequence[int],
    believed: Callable[[int, int], float] | None = None,
) -> PassTimes:
    """Time passes `run(batch, length)`: of the smallest batch, then the largest, then those between.

    Each runs once to warm up, for as many batch sizes as time permits. Then all are timed in turn, so that a busy
    moment of the machine affects all of them. `believed` tells the times of those that were not (PassTimes).
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
    medians = {batch: {n: median(s) for n, s in row.items()} for batch, row in times.items()}
    return PassTimes(medians, batches, believed)
