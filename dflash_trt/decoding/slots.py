"""Which rows lie in which cache slot: requests in flight in front, and behind them prefixes worth keeping."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import count

from dflash_trt.decoding.inflight import Rows
from dflash_trt.decoding.pair import Pair


class Slots:
    """The pool's contents. The scheduler's requests take slots 0 .. n-1; finished ones leave their rows in the others.

    Kept rows are dropped least recently used first, when a slot is needed. A pool with no more slots than the
    scheduler uses keeps only what lies in slots that are free at the moment.
    """

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.kept: dict[int, Rows] = {}  # slot -> rows of requests that have ended
        self._clock = count(1)

    def occupy(self, slot: int, prompt: Sequence[int], live: dict[int, Rows], *, draft: bool) -> int:
        """Make `slot` ready for a new request; returns how many of the prompt's rows it already holds.

        `live` are the rows of the requests in flight, by slot: those before `slot`.
        """
        sources = live | self.kept
        best = max(sources, key=lambda s: sources[s].shared(prompt, draft=draft), default=None)
        shared = 0 if best is None else sources[best].shared(prompt, draft=draft)
        if best is not None and shared and best in self.kept:
            self.kept[best].last_used = next(self._clock)
        in_the_way = self.kept.pop(slot, None)
        if in_the_way is not None and not (best == slot and shared == len(in_the_way.tokens)):
            self._give_way(slot, in_the_way, best)
        if shared and best is not None and best != slot:
            self.pair.move(best, slot, shared)
        return shared

    def keep(self, slot: int, rows: Rows, live: int) -> None:
        """Rows of a request that has ended, in a slot about to be reused, move behind the `live` first slots."""
        rows.last_used = next(self._clock)
        for lying, other in list(self.kept.items()):
            if other.covers(rows):
                other.last_used = rows.last_used
                return
            if rows.covers(other):
                del self.kept[lying]
        place = self._free(live)
        if place is not None:
            self._put(slot, place, rows)

    def _give_way(self, slot: int, rows: Rows, best: int | None) -> None:
        """Kept rows that lie where a request must go move behind it, unless all that lies there is newer."""
        place = self._free(slot + 1, best, rows.last_used)
        if place is not None:
            self._put(slot, place, rows)

    def _put(self, slot: int, place: int, rows: Rows) -> None:
        if place != slot:
            self.pair.move(slot, place, len(rows.tokens))
        self.kept[place] = rows

    def _free(self, first: int, spare: int | None = None, before: float = math.inf) -> int | None:
        """An empty slot at or behind `first`, else that of the least recently used rows, where used `before` that;
        never `spare`.
        """
        places = range(first, self.pair.slots)
        empty = next((p for p in places if p not in self.kept), None)
        if empty is not None:
            return empty
        old = min((p for p in places if p != spare), key=lambda p: self.kept[p].last_used, default=None)
        if old is None or self.kept[old].last_used >= before:
            return None
        del self.kept[old]
        return old
