"""The time of a pass over `batch` sequences of `length` tokens, as measured at start-up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf
from time import perf_counter
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

# Limits of start-up measurements, in seconds and in turns.
_START_UP_SECONDS, _TURNS = 0.5, 5


class PassTimes:
    """Seconds per pass. `measured` [batch][length], for lengths 1 or 2 up to the block size or, with larger batches,
    up to fewer. Times between the measured ones are interpolated; beyond them they grow with the number of tokens.

    batches: the batch sizes that will run, in order. Start-up may have had no time for some of them.
    warm: the measured pairs of batch and length. The first pass of any other is slow, because engines prepare it.
    """

    def __init__(self, measured: Mapping[int, Mapping[int, float]], batches: Sequence[int]) -> None:
        self.batches = batches
        self.warm = {(batch, length) for batch, row in measured.items() for length in row}
        self._sizes = sorted(measured)
        lengths = np.arange(1, max(measured[self._sizes[0]]) + 1)
        rows = [
            _interpolated(lengths, sorted(row), np.array([_usable(row[n]) for n in sorted(row)]))
            for row in map(measured.__getitem__, self._sizes)
        ]
        self._seconds = np.transpose(rows)

    def __call__(self, batch: int) -> Array:
        """Seconds of passes over `batch` sequences of 1, 2 .. tokens."""
        at = np.array([batch])
        return np.concatenate([_interpolated(at, self._sizes, column) for column in self._seconds])


def _interpolated(at: Array, sizes: Sequence[int], seconds: Array) -> Array:
    """Seconds at some sizes, from those of measured sizes; beyond the largest in proportion to it."""
    interpolated: Array = np.interp(at, sizes, seconds) * np.maximum(at / sizes[-1], 1)
    return interpolated


def _usable(seconds: float) -> float:
    return min(max(seconds, 1e-9), 1e9) if seconds == seconds else 1e9


def measure(
    run: Callable[[int, int], object],
    batches: Sequence[int],
    lengths: Sequence[int],
    most_tokens: float = inf,
) -> PassTimes:
    """Time passes `run(batch, length)`: of the smallest batch, then the largest, then those between.

    `most_tokens`: of a pass, except of the smallest batch, so that start-up takes no memory that no request needs.

    Each runs once to warm up, for as many batch sizes as time permits. Then all are timed in turn, so that a busy
    moment of the machine affects all of them.
    """
    fitting = [batch for batch in batches[1:] if batch * lengths[0] <= most_tokens]
    begin, order = perf_counter(), [batches[0], *reversed(fitting)]
    times: dict[int, dict[int, list[float]]] = {}
    for batch in order:
        if times and perf_counter() - begin > _START_UP_SECONDS:
            break
        some = [length for length in lengths if batch == order[0] or batch * length <= most_tokens]
        times[batch] = {length: [] for length in some}
        for length in some:
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
