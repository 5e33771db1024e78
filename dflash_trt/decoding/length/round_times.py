"""The usual time of a round, followed while the engine runs.

Each of the two passes of a round takes its start-up time, times a factor of its own length, times a scale of the batch
size. Other programs only ever make a round longer, and some of them stop one round for many times its usual time. So
each of the two numbers is the ratio a quarter up among the last sixteen: it does not follow stalls in half of the
rounds, and needs no limit from which on a time counts as one.

Rounds of the length in use tell the scale: the machine may become faster or slower for all lengths. Trials tell the
factors of their lengths. Rounds that verify fewer tokens than they draft only tell the scale.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np

from dflash_trt.decoding.length.pass_times import PassTimes

Array = np.ndarray[Any, Any]

# The rounds that a scale or factor rests on.
LAST = 16


def quarter_up(ratios: Iterable[float]) -> float:
    """The value a quarter up, or the least of up to three."""
    ordered = sorted(ratios)
    return ordered[len(ordered) // 4]


class RoundTimes:
    """Usual seconds per round, by batch size and length. Of each batch size that start-up measured, scale and factors
    are followed; other sizes share those of the nearest one.
    """

    def __init__(self, draft: PassTimes, verify: PassTimes, block_size: int) -> None:
        self._draft, self._verify, self._block_size = draft, verify, block_size
        self._followed = [_Followed(block_size) for _ in verify.batches]
        self._of = dict[int, tuple[Array, Array, _Followed]]()

    def __call__(self, batch: int) -> Array:
        """Usual seconds of rounds of length 1, 2 .. block size."""
        draft, verify, followed = self._batch(batch)
        seconds: Array = (draft + verify[: self._block_size]) * followed.factors * followed.scale
        return seconds

    def verify(self, batch: int, nodes: int) -> Array:
        """Usual seconds of verifying 1, 2 .. nodes. Fewer take no longer than more."""
        _, verify, followed = self._batch(batch)
        seconds = verify * followed.scale
        seconds[: self._block_size] *= followed.factors
        least: Array = np.minimum.accumulate(seconds[::-1])[::-1][:nodes]
        return least

    def settled(self, batch: int) -> bool:
        """Whether enough rounds have told the scale for factors to be learned."""
        return self._batch(batch)[2].settled

    def observe(self, batch: int, drafted: int, verified: int, seconds: float, trial: bool) -> float:
        """Learn from a round that took `seconds`, and return what is now its usual time.

        trial: whether its length was not the one in use. An impossible time is ignored.
        """
        draft, verify, followed = self._batch(batch)
        passes = float(draft[drafted - 1]), float(verify[min(verified, len(verify)) - 1])
        if 1e-9 < seconds < 1e9:
            if drafted == verified:
                followed.observe(drafted, seconds / sum(passes), trial)
            else:
                followed.observe_cut(seconds / followed.without_scale(passes, drafted, verified))
        return followed.without_scale(passes, drafted, verified) * followed.scale

    def _batch(self, batch: int) -> tuple[Array, Array, _Followed]:
        """Start-up times of a batch size, and what was learned of the nearest one that is followed."""
        if batch not in self._of:
            nearest = int(np.abs(np.log2(self._verify.batches) - np.log2(batch)).argmin())
            draft = np.append(0.0, self._draft(batch)[1 : self._block_size])  # length 1 has no draft
            self._of[batch] = draft, self._verify(batch), self._followed[nearest]
        return self._of[batch]


class _Followed:
    """The scale and the factors of one batch size."""

    def __init__(self, block_size: int) -> None:
        self.scale, self.factors = 1.0, np.ones(block_size)
        self._recent = deque[float](maxlen=LAST)
        # The start-up measurement counts as one round, so a single stalled trial changes nothing.
        self._own = [deque([1.0], maxlen=LAST) for _ in range(block_size)]

    def observe(self, length: int, ratio: float, trial: bool) -> None:
        """ratio: a round's time, relative to start-up."""
        own = self._own[length - 1]
        if trial or (self.settled and len(own) < LAST):
            own.append(ratio / self.scale)
            self.factors[length - 1] = quarter_up(own)
        else:
            self.observe_cut(ratio / float(self.factors[length - 1]))

    def observe_cut(self, ratio: float) -> None:
        """ratio: the time of a round that verified another length than it drafted, relative to that without scale."""
        self._recent.append(ratio)
        self.scale = quarter_up(self._recent)

    def without_scale(self, passes: tuple[float, float], drafted: int, verified: int) -> float:
        """The usual time of two passes, by their start-up times. Trees of more nodes than a block have no factor."""
        draft, verify = passes
        factor = float(self.factors[verified - 1]) if verified <= len(self.factors) else 1.0
        return draft * float(self.factors[drafted - 1]) + verify * factor

    @property
    def settled(self) -> bool:
        """Whether enough rounds have told the scale."""
        return len(self._recent) == LAST
