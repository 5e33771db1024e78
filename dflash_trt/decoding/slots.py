"""What a new request can take over: from slots, and from copies kept of requests that have ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dflash_trt.decoding.caches import longest
from dflash_trt.decoding.pair import Pair
from dflash_trt.decoding.prefixes import PAGE, Page, PrefixCounts, Prefixes, common
from dflash_trt.decoding.request import Request


@dataclass(frozen=True, slots=True)
class Contents:
    """What a slot holds of `tokens`: the lengths that it can be cut to, in the target's caches and in the drafter's."""

    tokens: Sequence[int]
    target: Sequence[int]
    drafter: Sequence[int]

    def longest(self, most: int, *, draft: bool) -> int:
        """The longest beginning up to `most` that is there; with `draft`, for the drafter as well."""
        return longest(most, self.target, self.drafter) if draft else longest(most, self.target)

    def shared(self, prompt: Sequence[int], *, draft: bool) -> int:
        """How many tokens of a prompt can be taken over: the last one has to be run."""
        same = common(self.tokens, prompt, min(len(self.tokens), len(prompt) - 1))
        return self.longest(same, draft=draft)


@dataclass(frozen=True, slots=True)
class Source:
    """Where the first `length` tokens of a prompt are: in `slot`, or in the pages of `path`."""

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

    def contents(self, request: Request) -> Contents:
        """What the slot of a request holds."""
        lengths = self.pair.lengths(request.slot, request.committed, draft=request.draft)
        return Contents(request.taken_in, *lengths)

    def find(self, slot: int, prompt: Sequence[int], live: Sequence[Request], *, draft: bool) -> Source:
        """Where most of a prompt is: in a slot, rather in `slot` itself, or else in what is kept.

        `live` are the requests in flight. With `draft`, it must be there for the drafter as well.
        """
        if self.prefixes is None:
            return Source(0, slot)
        held = {each.slot: self.contents(each) for each in live} | self.lying
        sources = [Source(0, slot)]
        sources += [Source(contents.shared(prompt, draft=draft), each) for each, contents in held.items()]
        best = max(sources, key=lambda each: (each.length, each.slot == slot))
        path, kept = self.prefixes.find(prompt[:-1], draft=draft)
        return Source(kept, slot, path) if kept > best.length else best

    def occupy(self, slot: int, source: Source, *, draft: bool) -> None:
        """Let a new request have `slot`, and in it what `find` has found since anything else was done."""
        self.lying.pop(slot, None)
        if self.prefixes is not None and source.path:
            self.prefixes.restore(slot, source.path, source.length, draft=draft)
        elif source.length and source.slot != slot:
            self.pair.copy(source.slot, slot, source.length, draft=draft)

    def keep(self, ended: Request) -> None:
        """A request has ended. What its slot holds lies there until it is overwritten, and a copy is kept."""
        if self.prefixes is None or not ended.committed:
            return
        contents = self.lying[ended.slot] = self.contents(ended)
        both = contents.longest(ended.committed, draft=True)
        length = both or contents.longest(ended.committed, draft=False)
        self.prefixes.keep(ended.slot, contents.tokens[:length], draft=both > 0)

    def move(self, request: Request, slot: int) -> None:
        """A request in flight moves to a free slot, over what lies there."""
        self.lying.pop(slot, None)
        self.pair.move(request.slot, slot, request.committed)
        request.slot = slot

    def overwritten(self) -> None:
        """Nothing lies in the slots any more."""
        self.lying.clear()

    def forget(self) -> None:
        """Nothing of the requests that have ended is reused."""
        self.overwritten()
        if self.prefixes is not None:
            self.prefixes.clear()
