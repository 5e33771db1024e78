"""Copies of slots' contents, kept for prompts with the same beginning."""

from __future__ import annotations

import logging
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from dflash_trt.decoding.caches import Snapshot
from dflash_trt.decoding.pair import Pair
from dflash_trt.logs import warn_once

_log = logging.getLogger(__name__)

# Tokens of a page: prefixes share whole pages. Rows in pages of 16 tokens take twice as long to copy out of a slot. In
# larger pages they take no less time than in these.
PAGE = 64


@dataclass
class PrefixCounts:
    """The kept tokens now, and the events since the start. Bytes are the memory of the tokens."""

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
    """Consecutive tokens of one prefix, from token `start` on. `siblings` is the collection that contains the page."""

    tokens: tuple[int, ...]
    start: int
    kept: Snapshot
    siblings: Children
    children: Children = field(default_factory=lambda: Children())

    @property
    def head(self) -> tuple[int, ...]:
        """The first tokens, without which the page is of no use."""
        return self.tokens[: self.kept.lengths[0] - self.start] if self.kept.lengths else ()

    def usable(self, tokens: tuple[int, ...]) -> int:
        """The length that a slot can get with this page as its last, if `tokens` follow the earlier pages."""
        same = common(self.tokens, tokens, min(len(self.tokens), len(tokens)))
        return longest(self.start + same, self.kept.lengths)


def common(a: Sequence[int], b: Sequence[int], limit: int) -> int:
    """The number of equal items, at most `limit`, at the start of two sequences of one type."""
    # Slices of growing size are compared until they differ, then halves of the last one.
    low, size, limit = 0, 16, max(limit, 0)
    while low < limit and a[low : min(low + size, limit)] == b[low : min(low + size, limit)]:
        low, size = min(low + size, limit), 2 * size
    high = min(low + size, limit)
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def longest(most: int, *lengths: Sequence[int]) -> int:
    """The largest number up to `most` that is in all of these ascending sequences; 0 if there is none."""
    while True:
        least = most
        for cuts in lengths:
            fitting = bisect_right(cuts, least)
            least = cuts[fitting - 1] if fitting else 0
        if least == most:
            return most
        most = least


class Children(dict[tuple[int, ...], Page]):
    """Pages that follow the same page, by their tokens. Finding one takes no longer if there are many."""

    def __init__(self) -> None:
        super().__init__()
        self._sorted: dict[tuple[int, ...], list[tuple[int, ...]]] = {}  # tokens of pages with the same head
        self._sizes = Counter[int]()  # of these heads

    def index(self, page: Page) -> None:
        """Add a page, or add it again after `forget` with another copy."""
        self[page.tokens] = page
        if page.head not in self._sorted:
            self._sizes[len(page.head)] += 1
        insort(self._sorted.setdefault(page.head, []), page.tokens)

    def forget(self, page: Page) -> None:
        """Remove a page."""
        del self[page.tokens]
        pages = self._sorted[page.head]
        del pages[bisect_left(pages, page.tokens)]
        if not pages:
            del self._sorted[page.head]
            self._sizes[size := len(page.head)] -= 1
            if not self._sizes[size]:
                del self._sizes[size]

    def nearest(self, tokens: tuple[int, ...]) -> Page | None:
        """The page that gives a slot the most of these tokens; None if none gives any."""
        found, most = None, 0
        for size in self._sizes:
            pages = self._sorted.get(tokens[:size], []) if size else []
            middle = bisect_left(pages, tokens)
            # The further from their place among the pages, the fewer tokens are the same.
            for side in (range(middle, len(pages)), range(middle - 1, -1, -1)):
                for place in side:
                    page = self[pages[place]]
                    if page.start + common(page.tokens, tokens, min(len(page.tokens), len(tokens))) <= most:
                        break
                    if (usable := page.usable(tokens)) > most:
                        found, most = page, usable
        return found


Tree = tuple[str, bool]
"""The salt of a tree's requests, and whether its pages have the drafter's part."""


class Prefixes:
    """Pages in two trees per salt: with the drafter's part, and without. The least recently used page is dropped first.

    Requests share no pages with those of another salt. Pages begin at multiples of `page` tokens, so prefixes share the
    pages of their common beginning. Only the last page of a prefix may be shorter. At most `limit_bytes` are kept.
    """

    def __init__(self, pair: Pair, limit_bytes: int, page: int = PAGE) -> None:
        self.pair, self.page = pair, page
        self.counts = PrefixCounts(limit_bytes)
        self._trees: dict[Tree, Children] = {}  # none is empty
        # The oldest page first, each with its tree. A page is newer than its descendants, so the oldest one has none.
        self._used: dict[Page, Tree] = {}
        if 0 < limit_bytes < (least := pair.kept_bytes(page, draft=True)):
            warn_once(
                _log,
                f"prefix_cache_bytes is {limit_bytes}, but {page} tokens of this pair take {least} bytes: prefixes "
                f"are reused only from slots; give at least {least}, or 0 to reuse nothing",
            )

    def clear(self) -> None:
        """Forget everything, including the partial work of an interruption."""
        self._trees, self._used = {}, {}
        self.counts.tokens = self.counts.bytes = 0

    def find(self, tokens: Sequence[int], *, draft: bool, salt: str = "") -> tuple[list[Page], int]:
        """The pages with the most of `tokens`, and the number of tokens; with `draft`, with the drafter's part."""
        trees = [(salt, drafted) for drafted in ([True] if draft else [True, False])]
        return max(
            (self._walk(self._trees.get(tree, Children()), tokens) for tree in trees),
            key=lambda path: path[1],
        )

    def restore(self, slot: int, path: Sequence[Page], length: int, *, draft: bool) -> None:
        """Copy `length` tokens into a slot, from pages that `find` returned."""
        self._touch(path)
        self.pair.restore(slot, [page.kept for page in path], length, draft=draft)
        self.counts.reused_tokens += length
        self.counts.reused_bytes += sum(page.kept.size for page in path)

    def keep(self, slot: int, tokens: Sequence[int], *, draft: bool, salt: str = "") -> None:
        """Keep a copy of the tokens that are not kept yet: from the first on, as many as fit.

        The slot can be cut to the length of `tokens`.
        """
        path, length = self.find(tokens, draft=draft, salt=salt)
        if length == len(tokens):
            self._touch(path)
            return
        tree = (salt, draft)
        children, path = self._trees.get(tree, Children()), []
        shortest = (len(tokens) - 1) // self.page * self.page + 1  # the slot gets lengths of the last page
        for start in range(0, len(tokens), self.page):
            part = tuple(tokens[start : start + self.page])
            if (page := self._page(slot, start, part, shortest, children, path, tree)) is None:
                self.counts.refused_tokens += len(tokens) - start
                self.counts.refused_bytes += self.pair.kept_bytes(len(tokens) - start, draft=draft)
                break
            self._touch([page])
            path.append(page)
            children = page.children
        self._touch(path)

    def _walk(self, children: Children, tokens: Sequence[int]) -> tuple[list[Page], int]:
        path: list[Page] = []
        longest_path, length = path, 0
        for start in range(0, len(tokens), self.page):
            part = tuple(tokens[start : start + self.page])
            same = last = children.get(part)
            if same is None or same.usable(part) < start + len(part):
                last = children.nearest(part)
            if last is not None and (usable := last.usable(part)):
                longest_path, length = [*path, last], usable
            if same is None:
                break
            path.append(same)
            children = same.children
        return longest_path, length

    def _page(
        self,
        slot: int,
        start: int,
        part: tuple[int, ...],
        shortest: int,
        siblings: Children,
        path: Sequence[Page],
        tree: Tree,
    ) -> Page | None:
        """The page of these tokens after `path`: a new copy, or the kept one, with what it lacks. None if there is no
        room.
        """
        page, draft = siblings.get(part), tree[1]
        if page is not None and not self.pair.lacks(slot, page.kept, shortest, draft=draft):
            return page
        copy, needed = (None, path) if page is None else (page.kept, [*path, page])
        held = copy.size if copy else 0
        if not self._make_room(self.pair.kept_bytes(len(part), draft=draft) - held, needed):
            return None
        try:
            kept = self.pair.keep(slot, start, start + len(part), shortest, draft=draft, kept=copy)
        except MemoryError:
            return None
        self.counts.bytes += kept.size - held
        if page is not None:
            siblings.forget(page)
            page.kept = kept
            siblings.index(page)
            return page
        for shorter in [page for page in siblings.values() if page.tokens == part[: len(page.tokens)]]:
            if set(shorter.kept.lengths) <= set(kept.lengths):
                self._remove(shorter)
        page = Page(part, start, kept, siblings)
        siblings.index(page)
        if not start:
            self._trees[tree] = siblings
        self._used[page] = tree
        self.counts.tokens += len(part)
        self.counts.kept_tokens += len(part)
        self.counts.kept_bytes += kept.size
        return page

    def _make_room(self, size: int, path: Sequence[Page]) -> bool:
        """Drop the oldest pages until `size` bytes fit, except those of `path`."""
        while self.counts.bytes + size > self.counts.limit_bytes:
            oldest = next(iter(self._used), None)
            if oldest is None or oldest in path:
                return False
            self.counts.dropped_tokens += len(oldest.tokens)
            self.counts.dropped_bytes += self._remove(oldest)
        return True

    def _remove(self, page: Page) -> int:
        """Remove a page. Returns its bytes."""
        page.siblings.forget(page)
        tree = self._used.pop(page)
        if not self._trees.get(tree, True):
            del self._trees[tree]
        self.counts.tokens -= len(page.tokens)
        self.counts.bytes -= page.kept.size
        return page.kept.size

    def _touch(self, path: Sequence[Page]) -> None:
        """Mark these pages as used, each after its parent. The last one counts as the oldest of them."""
        for page in reversed(path):
            self._used[page] = self._used.pop(page)
