"""Rows of requests that have ended, kept for prompts that begin like them."""

from __future__ import annotations

import warnings
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from dflash_trt.decoding.pair import KeptRows, Pair
from dflash_trt.decoding.request import common

# Tokens of a page: prefixes share whole pages. Pages of 16 tokens take twice as long to copy, larger ones no less than
# these (docs/measurements.md).
PAGE = 64


@dataclass
class PrefixCounts:
    """What is kept now, and what has happened since the start. Tokens are rows; bytes are what they take."""

    limit_bytes: int = 0
    tokens: int = 0
    bytes: int = 0
    kept_tokens: int = 0
    kept_bytes: int = 0
    reused_tokens: int = 0
    reused_bytes: int = 0
    dropped_tokens: int = 0
    dropped_bytes: int = 0
    refused_tokens: int = 0
    refused_bytes: int = 0


@dataclass(eq=False)
class Page:
    """Rows of consecutive tokens of one prefix; `start` rows lie before them. `siblings` is where it lies itself."""

    tokens: tuple[int, ...]
    start: int
    rows: KeptRows
    siblings: Children
    children: Children = field(default_factory=dict)

    def usable(self, tokens: tuple[int, ...]) -> int:
        """How many rows a slot can have with this page as its last, if `tokens` follow what lies before the page."""
        lengths = self.rows.lengths
        fitting = bisect_right(
            lengths, self.start + common(self.tokens, tokens, min(len(self.tokens), len(tokens)))
        )
        return lengths[fitting - 1] if fitting else 0


Children = dict[tuple[int, ...], Page]


class Prefixes:
    """Pages of rows in two trees: with the drafter's rows, and without them. The least recently used go first.

    Pages begin at multiples of `page` tokens, so prefixes share those of their common beginning; only the last page of
    a prefix may be shorter. At most `limit_bytes` of rows are kept.
    """

    def __init__(self, pair: Pair, limit_bytes: int, page: int = PAGE) -> None:
        self.pair, self.page = pair, page
        self.counts = PrefixCounts(limit_bytes)
        self._trees: dict[bool, Children] = {True: {}, False: {}}
        # The oldest first, each with its tree. A page is newer than its descendants, so the oldest one has none.
        self._used: dict[Page, bool] = {}
        if (least := pair.kept_bytes(page, draft=True)) > limit_bytes:
            warnings.warn(
                f"prefix_cache_bytes is {limit_bytes}, but {page} tokens of this pair take {least} bytes: prefixes are "
                f"reused only while they lie in a slot; give at least {least}, or 0 to reuse nothing",
                stacklevel=2,
            )

    def clear(self) -> None:
        """Forget everything, also what an interruption has left half-done."""
        self._trees, self._used = {True: {}, False: {}}, {}
        self.counts.tokens = self.counts.bytes = 0

    def find(self, tokens: Sequence[int], *, draft: bool) -> tuple[list[Page], int]:
        """The pages that hold the most rows of `tokens`, and how many; with `draft`, the drafter's rows as well."""
        found = [self._walk(self._trees[tree], tokens) for tree in ([True] if draft else [True, False])]
        return max(found, key=lambda each: each[1])

    def restore(self, slot: int, path: Sequence[Page], length: int, *, draft: bool) -> None:
        """Copy `length` rows into a slot, from pages that `find` found."""
        self._touch(path)
        self.pair.restore(slot, [page.rows for page in path], length, draft=draft)
        self.counts.reused_tokens += length
        self.counts.reused_bytes += self.pair.kept_bytes(length, draft=draft)

    def keep(self, slot: int, tokens: Sequence[int], *, draft: bool) -> None:
        """Copy the slot's rows of `tokens` that are not kept yet, from the first on, as many as there is room for."""
        path, length = self.find(tokens, draft=draft)
        if length == len(tokens):
            self._touch(path)
            return
        children, path = self._trees[draft], []
        for start in range(0, len(tokens), self.page):
            part = tuple(tokens[start : start + self.page])
            page = children.get(part) or self._copy(slot, start, part, children, path, draft=draft)
            if page is None:
                self.counts.refused_tokens += len(tokens) - start
                self.counts.refused_bytes += self.pair.kept_bytes(len(tokens) - start, draft=draft)
                break
            self._touch([page])
            path.append(page)
            children = page.children
        self._touch(path)

    def _walk(self, children: Children, tokens: Sequence[int]) -> tuple[list[Page], int]:
        path: list[Page] = []
        pages, length = 0, 0
        for start in range(0, len(tokens), self.page):
            part = tuple(tokens[start : start + self.page])
            same = children.get(part)
            page = same or max(children.values(), key=lambda each: each.usable(part), default=None)
            if page is None:
                break
            path.append(page)
            if usable := page.usable(part):
                pages, length = len(path), usable
            if same is None:
                break
            children = same.children
        return path[:pages], length

    def _copy(
        self,
        slot: int,
        start: int,
        part: tuple[int, ...],
        siblings: Children,
        path: Sequence[Page],
        *,
        draft: bool,
    ) -> Page | None:
        size = self.pair.kept_bytes(len(part), draft=draft)
        if not self._make_room(size, path):
            return None
        try:
            rows = self.pair.keep(slot, start, start + len(part), draft=draft)
        except MemoryError:
            return None
        for shorter in [page for page in siblings.values() if page.tokens == part[: len(page.tokens)]]:
            if set(shorter.rows.lengths) <= set(rows.lengths):
                self._remove(shorter)
        page = Page(part, start, rows, siblings)
        siblings[part] = page
        self._used[page] = draft
        self.counts.tokens += len(part)
        self.counts.bytes += size
        self.counts.kept_tokens += len(part)
        self.counts.kept_bytes += size
        return page

    def _make_room(self, size: int, path: Sequence[Page]) -> bool:
        """Drop the oldest pages until `size` bytes fit, but none of `path`."""
        while self.counts.bytes + size > self.counts.limit_bytes:
            oldest = next(iter(self._used), None)
            if oldest is None or oldest in path:
                return False
            self.counts.dropped_tokens += len(oldest.tokens)
            self.counts.dropped_bytes += self._remove(oldest)
        return True

    def _remove(self, page: Page) -> int:
        """Take a page out; returns its bytes."""
        del page.siblings[page.tokens]
        size = self.pair.kept_bytes(len(page.tokens), draft=self._used.pop(page))
        self.counts.tokens -= len(page.tokens)
        self.counts.bytes -= size
        return size

    def _touch(self, path: Sequence[Page]) -> None:
        """These pages, each behind its parent, have been used: the last one is the oldest of them."""
        for page in reversed(path):
            self._used[page] = self._used.pop(page)
