"""Which rows a new request can take over: those in other slots, and those kept of requests that have ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dflash_trt.decoding.pair import Pair
from dflash_trt.decoding.prefixes import PAGE, Page, PrefixCounts, Prefixes
from dflash_trt.decoding.request import Contents


@dataclass(frozen=True, slots=True)
class Source:
    """Where the first `length` rows of a prompt are: in `slot`, or in the pages of `path`."""

    length: int
    slot: int
    path: Sequence[Page] = ()


class Slots:
    """What ended requests leave in their slots lies there until overwritten; beside that, copies are kept.

    `prefix_cache_bytes` bounds what is kept apart from the slots; with 0 nothing is reused, wherever it lies.
    """

    def __init__(self, pair: Pair, prefix_cache_bytes: int = 0, page: int = PAGE) -> None:
        self.pair = pair
        self.lying: dict[int, Contents] = {}  # by free slot
        self.prefixes = Prefixes(pair, prefix_cache_bytes, page) if prefix_cache_bytes else None

    @property
    def counts(self) -> PrefixCounts:
        return self.prefixes.counts if self.prefixes is not None else PrefixCounts()

    def find(self, slot: int, prompt: Sequence[int], live: dict[int, Contents], *, draft: bool) -> Source:
        """Where most of a prompt's rows are: in a slot, rather in `slot` itself, or else in what is kept.

        `live` are the rows of the requests in flight, by slot. With `draft`, the drafter's rows must be there as well.
        """
        if self.prefixes is None:
            return Source(0, slot)
        sources = [Source(0, slot)]
        sources += [
            Source(contents.shared(prompt, draft=draft), each)
            for each, contents in (live | self.lying).items()
        ]
        best = max(sources, key=lambda each: (each.length, each.slot == slot))
        path, kept = self.prefixes.find(prompt[:-1], draft=draft)
        return Source(kept, slot, path) if kept > best.length else best

    def occupy(self, slot: int, source: Source, *, draft: bool) -> None:
        """Let a new request have `slot`, and in it the rows that `find` has found since anything else was done."""
        self.lying.pop(slot, None)
        if self.prefixes is not None and source.path:
            self.prefixes.restore(slot, source.path, source.length, draft=draft)
        elif source.length and source.slot != slot:
            self.pair.move(source.slot, slot, source.length)

    def keep(self, slot: int, contents: Contents) -> None:
        """The request in `slot` has ended: its rows stay there until overwritten, and a copy is kept."""
        if self.prefixes is None or not contents.tokens:
            return
        self.lying[slot] = contents
        self.prefixes.keep(
            slot,
            contents.tokens[: contents.drafted] if contents.drafted else contents.tokens,
            draft=contents.drafted > 0,
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
