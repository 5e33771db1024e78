"""What a pass over `batch` sequences of `length` tokens takes: measured before the first request, and ever since.

The logarithms of the times are taken as jointly Gaussian and followed by a Kalman filter. A pass tells its own time,
much about passes of nearly its size, and something about all (the machine is slower, the sequences are longer). Doubt
returns while a pass is not run, so a time that was wrong, or has changed, comes to be measured again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import log
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

# How wrong start-up times may be: all by one factor, and each by its own (standard deviations of the logarithm).
_ALL, _EACH = 1.0, 0.7
# How much two passes of the same size differ (likewise), and the share of the first doubt that returns each round.
_NOISE, _RETURNING = 0.1, 3e-5
# Measuring at start-up goes on for so many seconds, or turns.
_START_UP_SECONDS, _TURNS = 0.5, 5


class PassTimes:
    """Seconds per pass. `measured` [batch][length] are start-up times, all of lengths 1 or 2 up to the block size.

    `batches` are the sizes whose times are followed, in order; between two of them, times are interpolated.
    """

    def __init__(self, measured: Mapping[int, Mapping[int, float]], batches: Sequence[int]) -> None:
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
        self._doubt = _ALL**2 + _EACH**2 * np.exp(-np.abs(b - b[:, None]) - np.abs(n - n[:, None]))
        self._covariance = self._doubt.copy()
        self._warm = {(size, length) for size, row in measured.items() for length in row}

    def __call__(self, batch: int) -> Array:
        """Seconds of passes over `batch` sequences of 1, 2 .. tokens."""
        seconds: Array = np.exp(self._parts(batch) @ self._mean)
        return seconds

    def doubtful(self, batch: int) -> Array:
        """Of which lengths 1, 2 .. one more pass would tell more than is known."""
        doubtful: Array = self._parts(batch) @ np.diag(self._covariance) > _NOISE**2
        return doubtful

    def observe(self, batch: int, length: int, seconds: float) -> None:
        """One round has passed, with a pass that took so long.

        A time that no pass can take teaches nothing, nor does the first pass of its size, which may be cold.
        """
        returning = _RETURNING
        if (batch, length) not in self._warm:
            self._warm.add((batch, length))
        elif 1e-9 < seconds < 1e9:
            parts = self._parts(batch)[length - 1]
            along = self._covariance @ parts
            variance = float(along @ parts) + _NOISE**2
            surprise = log(seconds) - float(parts @ self._mean)
            most = 3 * variance**0.5  # a hiccup teaches no more than that
            self._mean += along * (min(max(surprise, -most), most) / variance)
            self._covariance -= np.outer(along, along / variance)
            returning *= max(1.0, surprise**2 / variance)  # times have changed, if the next pass says so too
        self._covariance += min(returning, 1.0) * (self._doubt - self._covariance)

    def _parts(self, batch: int) -> Array:
        """Shares [lengths, sizes x lengths] of the followed times in the times of this batch size."""
        if batch not in self._shares:
            place = np.interp(np.log2(batch), self._octaves, np.arange(len(self._octaves)))
            near = np.maximum(0.0, 1 - np.abs(np.arange(len(self._octaves)) - place))
            self._shares[batch] = np.kron(near, np.eye(self._lengths))
        return self._shares[batch]


def measure(run: Callable[[int, int], object], batches: Sequence[int], lengths: Sequence[int]) -> PassTimes:
    """Time passes `run(batch, length)`: of the smallest batch, then the largest, then those between.

    Each is run once to warm up, as many batch sizes as there is time for. All are then timed in turn, so that a busy
    moment of the machine meets all of them.
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
    return PassTimes({b: {n: median(s) for n, s in row.items()} for b, row in times.items()}, batches)
