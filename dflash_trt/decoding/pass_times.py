"""What a pass over `batch` sequences of `length` tokens takes: measured before the first request, and ever since."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

# A pass that takes this much longer or shorter than expected teaches no more than one that differs by so much.
_SURPRISE = log(1.5)
# The weight of the newest pass, once many have been seen.
_RATE = 0.05
# After so many seconds no further batch size is measured, and no pass is repeated that took so long in all.
_START_UP_SECONDS, _PASS_SECONDS = 0.5, 0.1


@dataclass
class _Pass:
    initial: float  # seconds
    own: float = 0.0  # its correction: a logarithm, as the shared one
    seen: int = 0


class PassTimes:
    """Seconds per pass, by batch and length.

    `measured` [batch][length] holds some of them, each batch at least length 1 or 2 and one more; in between they are
    interpolated, and a batch larger than all of them takes what as many tokens of the largest one would.
    What passes really take is observed: each has a correction of its own, and all share one, for the moments when the
    machine is slower or the sequences are longer.
    """

    def __init__(self, measured: Mapping[int, Mapping[int, float]]) -> None:
        self._curves = {
            batch: (np.array(sorted(row)), np.array([row[n] for n in sorted(row)]))
            for batch, row in sorted(measured.items())
        }
        self._shared = 0.0
        self._passes: dict[tuple[int, int], _Pass] = {}

    def __call__(self, batch: int, length: int) -> float:
        known = self._pass(batch, length)
        return known.initial * exp(self._shared + known.own)

    def observe(self, batch: int, length: int, seconds: float) -> None:
        surprise = min(max(log(seconds / self(batch, length)), -_SURPRISE), _SURPRISE)
        self._shared += _RATE * surprise
        known = self._pass(batch, length)
        known.seen += 1
        known.own += max(_RATE, 1 / (known.seen + 1)) * surprise

    def _pass(self, batch: int, length: int) -> _Pass:
        if (batch, length) not in self._passes:
            self._passes[batch, length] = _Pass(self._initial(batch, length))
        return self._passes[batch, length]

    def _initial(self, batch: int, length: int) -> float:
        batches = list(self._curves)
        above = next((b for b in batches if b >= batch), None)
        if above is None:
            return _along(*self._curves[batches[-1]], length * batch / batches[-1])
        if above == batch or above == batches[0]:
            return _along(*self._curves[above], length)
        below = batches[batches.index(above) - 1]
        share = (batch - below) / (above - below)
        low, high = (_along(*self._curves[b], length) for b in (below, above))
        return low + share * (high - low)


def _along(lengths: Array, seconds: Array, length: float) -> float:
    """Piecewise linear, and on along the last piece."""
    if length <= lengths[-1] or len(lengths) == 1:
        return float(np.interp(length, lengths, seconds))
    slope = max(0.0, (seconds[-1] - seconds[-2]) / (lengths[-1] - lengths[-2]))
    return float(seconds[-1] + slope * (length - lengths[-1]))


def measure(run: Callable[[int, int], object], batches: Sequence[int], lengths: Sequence[int]) -> PassTimes:
    """Time passes `run(batch, length)`: the smallest batch, then the largest, then those between while time is left."""
    begin, measured = perf_counter(), dict[int, dict[int, float]]()
    order = sorted(batches)
    for batch in [order[0], *reversed(order[1:])]:
        if measured and perf_counter() - begin > _START_UP_SECONDS:
            break
        measured[batch] = {length: _seconds(run, batch, length) for length in lengths}
    return PassTimes(measured)


def _seconds(run: Callable[[int, int], object], batch: int, length: int) -> float:
    """The median of five after one that warms up, or, of long passes, of fewer."""
    times: list[float] = []
    while len(times) < 6 and sum(times) < _PASS_SECONDS:
        begin = perf_counter()
        run(batch, length)
        times.append(perf_counter() - begin)
    return median(times[1:] or times)
