"""Which rows a new request can take over: those in other slots, and those kept of requests that have ended."""

from __future__ import annotations

from collections.abc import Sequence

from dflash_trt.decoding.inflight import Rows
from dflash_trt.decoding.pair import Pair
from dflash_trt.decoding.prefixes import PAGE, PrefixCounts, Prefixes


class Slots:
    """The requests in flight take slots 0 .. n-1. What ended requests leave in the others lies there until overwritten.

    `prefix_cache_bytes` bounds what is kept apart from the slots; with 0 nothing is reused, wherever it lies.
    """

    def __init__(self, pair: Pair, prefix_cache_bytes: int = 0, page: int = PAGE) -> None:
        self.pair = pair
        self.lying: dict[int, Rows] = {}  # by free slot
        self.prefixes = Prefixes(pair, prefix_cache_bytes, page) if prefix_cache_bytes else None

    @property
    def counts(self) -> PrefixCounts:
        return self.prefixes.counts if self.prefixes is not None else PrefixCounts()

    def occupy(self, slot: int, prompt: Sequence[int], live: dict[int, Rows], *, draft: bool) -> int:
        """Make `slot` ready for a new request; returns how many of the prompt's rows it holds.

        `live` are the rows of the requests in flight, by slot: those before `slot`.
        """
        if self.prefixes is None:
            return 0
        sources = {each: rows.shared(prompt, draft=draft) for each, rows in (live | self.lying).items()}
        best = max(sources, key=lambda each: (sources[each], each == slot), default=slot)
        length = sources.get(best, 0)
        path, kept = self.prefixes.find(prompt[:-1], draft=draft)
        self.lying.pop(slot, None)
        if kept > length:
            self.prefixes.restore(slot, path, kept, draft=draft)
            return kept
        if length and best != slot:
            self.pair.move(best, slot, length)
        return length

    def keep(self, slot: int, rows: Rows) -> None:
        """The request in `slot` has ended: its rows stay there until overwritten, and a copy is kept."""
        if self.prefixes is None or not rows.tokens:
            return
        self.lying[slot] = rows
        self.prefixes.keep(
            slot, rows.tokens[: rows.drafted] if rows.drafted else rows.tokens, draft=rows.drafted > 0
        )

    def move(self, source: int, target: int, rows: int) -> None:
        """A request in flight moves to a free slot, over what lies there."""
        self.lying.pop(target, None)
        self.pair.move(source, target, rows)

    def overwritten(self) -> None:
        """Nothing lies in the slots any more."""
        self.lying.clear()

    def forget(self) -> None:
        """Nothing of the requests that have ended is reused."""
        self.overwritten()
        if self.prefixes is not None:
            self.prefixes.clear()
