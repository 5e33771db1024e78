"""The mean time that rounds take beyond the usual time of their passes, because the machine is shared.

Some stalls come once in so many rounds, whatever a round does. Others come once in so much work: a processor quota, or
other programs' turns. So a share of the mean stall is taken as the same for all rounds, and the rest as proportional to
their usual time. The share is a regression of stalls on usual times. Where both tell little, it is a half. No
fixed share does for all loads of the benchmark.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

# Rounds over which evidence fades by 1/e.
_ROUNDS = 500
# Rounds without a stall that are assumed at the start.
_FEW = 16
# A stall counts as at most so many usual rounds: a suspended machine says nothing about the next round.
_LONGEST = 32.0


class Stalls:
    """Sums over the stalls of recent rounds, and their mean by the usual time of a round."""

    def __init__(self) -> None:
        # Over rounds: 1, u, s, u*u, u*s, s*s, of usual times u and stalls s.
        self._sums: tuple[float, ...] = (0.0,) * 6

    def observe(self, u: float, seconds: float) -> None:
        """A round whose usual passes take u seconds took `seconds`."""
        if 1e-9 < u < 1e9 and seconds == seconds:
            s = min(max(seconds - u, -u), _LONGEST * u)
            self._sums = tuple(
                each + new - each / _ROUNDS
                for each, new in zip(self._sums, (1.0, u, s, u * u, u * s, s * s), strict=True)
            )

    def __call__(self, usual: Array) -> Array:
        """The mean stall of rounds whose usual passes take so many seconds."""
        n, u, s, uu, us, ss = self._sums
        if s <= 0:
            return np.zeros_like(usual)
        # In units of their means, stalls are 1 - share + share * u. The prior: all or nothing, each a chance of a half.
        noise = 4 * (ss * n / (s * s) - 1)
        by_time = (us * n / (u * s) - 1) * n + noise / 2
        by_time = min(1.0, max(0.0, by_time / ((uu * n / (u * u) - 1) * n + noise + 1e-9)))
        expected: Array = s / (n + _FEW) * (1 - by_time + by_time * n / u * usual)
        return expected
