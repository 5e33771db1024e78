"""The mean time that rounds take beyond their usual passes, because the machine is shared.

Some stalls come once in so many rounds, whatever a round does. Others come once in so much work: a processor quota, or
other programs' turns. So the mean stall of a round of u usual seconds is modelled as a + b u, with a, b >= 0. Both are
found by least squares over many rounds. Where these do not tell, b explains all.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

# Rounds that the shares of a and b, and the size of both, look back on.
_SHARES, _SIZE = 1000, 64
# The rounds by which least squares must be sure of `a`.
_RIDGE = 2.0
# A stall counts as at most so many usual rounds: a suspended machine says nothing about the next round.
_LONGEST = 32.0


class Stalls:
    def __init__(self) -> None:
        self._n = self._u = self._uu = self._s = self._us = 0.0  # sums over rounds: 1, u, u*u, stall, u*stall
        self._a = self._b = 0.0
        self._recent = self._expected = 0.0  # mean stall of recent rounds, and what the model says of them

    def observe(self, usual: float, stall: float) -> None:
        """A round whose usual passes take `usual` seconds took `stall` more."""
        if not 1e-9 < usual < 1e9:
            return
        stall = min(max(0.0, stall), _LONGEST * usual)
        keep = 1 - 1 / _SHARES
        self._n = keep * self._n + 1
        self._u = keep * self._u + usual
        self._uu = keep * self._uu + usual * usual
        self._s = keep * self._s + stall
        self._us = keep * self._us + usual * stall
        apart = self._n - self._u * self._u / self._uu + _RIDGE
        self._a = max(0.0, (self._s - self._us * self._u / self._uu) / apart)
        self._b = (self._us - self._a * self._u) / self._uu
        if self._b < 0:
            self._a, self._b = self._s / self._n, 0.0
        self._recent += (stall - self._recent) / _SIZE
        self._expected += (self._a + self._b * usual - self._expected) / _SIZE

    def __call__(self, usual: Array) -> Array:
        """The mean stall of rounds whose usual passes take so many seconds."""
        if self._recent <= 0 or self._expected <= 0:
            return np.zeros_like(usual)
        expected: Array = self._recent / self._expected * (self._a + self._b * usual)
        return expected
