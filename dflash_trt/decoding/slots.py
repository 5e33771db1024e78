"""The tokens that a new request can reuse: from slots, and from kept copies of ended requests."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass

from dflash_trt.decoding.pair import Pair
from dflash_trt.decoding.prefixes import PAGE, Page, Prefixes, Tree, common, longest
from dflash_trt.decoding.request import Request

# So many kept prefixes before and after a prompt, in the order of their tokens, are looked at. Of those with windows or
# states, the nearest one may be cut to no length that the prompt shares.
_NEAR = 4


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """The content of a slot: the first `count` tokens of a request, and the lengths to which the target's and the
    drafter's caches can be cut.

    salt, prompt, answer: of the request, which is not kept itself.
    step: a reused prefix has a multiple of so many tokens.
    """

    salt: str
    prompt: Sequence[int]
    answer: Sequence[int]
    count: int
    target: Sequence[int]
    drafter: Sequence[int]
    step: int = 1

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple([*self.prompt, *self.answer][: self.count])

    @property
    def tree(self) -> Tree:
        return self.salt, len(self.drafter) > 0

    def longest(self, most: int, *, draft: bool) -> int:
        """The longest prefix of up to `most` tokens; with `draft`, also in the drafter's caches."""
        lengths = [self.target, self.drafter] if draft else [self.target]
        while (length := longest(most, *lengths)) % self.step:
            most = length - length % self.step
        return length

    def shared(self, prompt: Sequence[int], *, draft: bool) -> int:
        """The number of tokens of a prompt that can be reused. The last one must be run."""
        mine, answer, most = self.prompt, self.answer, min(self.count, len(prompt) - 1)
        same = common(mine, prompt, min(len(mine), most))
        if same == len(mine) < most:
            same += common(answer, prompt[same:most], most - same)
        return self.longest(same, draft=draft)


@dataclass(frozen=True, slots=True)
class Reuse:
    """The place of the first `length` tokens of a prompt: `slot`, or the pages of `path`."""

    length: int
    slot: int
    path: Sequence[Page] = ()


class Slots:
    """Rows of ended requests: in slots until overwritten, and kept copies. Where slots share memory (`kept_slots`),
    there are copies of windows and states alone: the rows move to further slots, for as long as their memory is not
    needed.

    `prefix_cache_bytes` limits the copies. With 0 nothing is reused, not even from slots.
    """

    def __init__(self, pair: Pair, prefix_cache_bytes: int = 0, page: int = PAGE) -> None:
        self.pair = pair
        self.left: dict[int, CachedPrefix] = {}  # by slot; what was used last comes last
        self.reuses, self._most_marked = prefix_cache_bytes > 0, prefix_cache_bytes
        self.prefixes = Prefixes(pair, 0 if pair.kept_slots else prefix_cache_bytes, page)
        self._free = list(range(pair.slots, pair.slots + pair.kept_slots))
        self._sorted: dict[Tree, list[tuple[tuple[int, ...], int]]] = {}  # tokens and slot of what was moved
        # The tokens that these slots keep. A round that has begun may still write after them.
        self._ended: dict[int, int] = {}
        if pair.kept_slots and self.reuses:
            self.prefixes.counts.limit_bytes = pair.kept_bytes(pair.tokens, draft=True)

    @property
    def step(self) -> int:
        """A reused prefix has a multiple of so many tokens, see `PassRule.any_cut`."""
        return 1 if self.pair.rule.any_cut else self.pair.prefill_chunk

    def prefix_of(self, request: Request) -> CachedPrefix:
        """The content of a request's slot that others may reuse."""
        lengths = self.pair.cut_lengths(request.slot, request.committed, draft=request.takes_drafter)
        count, step = request.committed, self.step
        if step > 1:  # the whole chunks of the prompt, unless each of its rows gave logits, in shorter chunks
            count = 0 if request.params.prompt_logprobs else min(len(request.prompt), count) // step * step
        salt = request.options.cache_salt
        return CachedPrefix(salt, request.prompt, request.output, count, *lengths, step)

    def find(self, request: Request, live: Sequence[Request], free: Collection[int] = ()) -> Reuse:
        """Choose a slot for a request, of these or else of all that are free. The place with the most tokens of its
        prompt: a slot, or kept pages.

        `live` are the requests in flight. The place was filled with the request's salt. If the request takes drafts, it
        has the drafter's part too.
        """
        slot = request.slot = min(free or set(range(self.pair.slots)) - {other.slot for other in live})
        prompt, draft, salt = request.text, request.takes_drafter, request.options.cache_salt
        if not self.reuses or request.params.prompt_logprobs:  # which need every row computed
            return Reuse(0, slot)
        held = {other.slot: self.prefix_of(other) for other in live if other.options.cache_salt == salt}
        held |= self._nearest(prompt, salt, draft=draft)
        sources = [Reuse(prefix.shared(prompt, draft=draft), at) for at, prefix in held.items()]
        best = max([Reuse(0, slot), *sources], key=lambda reuse: (reuse.length, reuse.slot == slot))
        if best.slot in self.left:
            self.left[best.slot] = self.left.pop(best.slot)
        path, kept = self.prefixes.find(prompt[:-1], draft=draft, salt=salt)
        while kept % self.step:
            path, kept = self.prefixes.find(prompt[: kept - kept % self.step], draft=draft, salt=salt)
        return Reuse(kept, slot, path) if kept > best.length else best

    def _nearest(self, prompt: Sequence[int], salt: str, *, draft: bool) -> dict[int, CachedPrefix]:
        """What ended requests left, with the most tokens of a prompt among them."""
        if not self.pair.kept_slots:
            return {at: left for at, left in self.left.items() if left.salt == salt}
        found, tokens = dict[int, CachedPrefix](), tuple(prompt)
        for tree in [(salt, True), *([] if draft else [(salt, False)])]:
            order = self._sorted.get(tree, [])
            place = bisect_left(order, (tokens, 0))
            found |= {at: self.left[at] for _, at in order[max(place - _NEAR, 0) : place + _NEAR]}
        return found

    def occupy(self, slot: int, source: Reuse, *, draft: bool) -> None:
        """Give `slot` to a new request, with the content of `source`. `find` must have been the last call before."""
        self._settle()
        self.left.pop(slot, None)
        if source.path:
            self.prefixes.restore(slot, source.path, source.length, draft=draft)
        elif source.length and source.slot != slot:
            self.pair.copy(source.slot, slot, source.length, draft=draft)
            if source.slot >= self.pair.slots:
                self.prefixes.counts.reused_tokens += source.length
                self.prefixes.counts.reused_bytes += self.pair.kept_bytes(source.length, draft=draft)

    def keep(self, ended: Request) -> None:
        """Leave the content of an ended request's slot until it is overwritten, and keep a copy; or move it."""
        if not (self.reuses and ended.committed):
            self._ended[ended.slot] = 0
        elif not self.pair.kept_slots:
            self.left[ended.slot] = self._keep(ended)
        else:
            self._put_by(ended)

    def _put_by(self, ended: Request) -> None:
        """Move the content of a slot to a further one, if there is more in it than in what others left. It takes the
        place of what is the beginning of it.
        """
        self._ended[ended.slot] = 0
        if not self._free:
            return
        self._mark(ended)
        at = self._free.pop()
        self.pair.move(ended.slot, at, ended.committed, draft=ended.takes_drafter)
        ended.slot, self._ended[at] = at, 0
        prefix = self.prefix_of(ended)
        tokens = prefix.tokens
        order = self._sorted.setdefault(prefix.tree, [])
        place = bisect_left(order, (tokens, 0))
        if not (tokens and prefix.target) or (
            place < len(order) and order[place][0][: len(tokens)] == tokens
        ):
            return
        while place and (before := order[place - 1])[0] == tokens[: len(before[0])]:
            self.pair.adopt(before[1], at)
            prefix = self.prefix_of(ended)
            self._remove(before[1])
            place -= 1
        order.insert(place, (tokens, at))
        self.left[at], self._ended[at] = prefix, prefix.count
        size, counts = self._bytes(prefix), self.prefixes.counts
        counts.tokens += prefix.count
        counts.bytes += size
        counts.kept_tokens += prefix.count
        counts.kept_bytes += size

    def _mark(self, request: Request) -> None:
        """Let the slot of a request be cut to its length, or less than a page before it, once it has moved."""
        if self.pair.marked_bytes >= self._most_marked:  # by requests in flight, too
            return
        with suppress(MemoryError):  # then it cannot be cut there
            self._caught_up(request)
            most = request.committed
            self.pair.mark(request.slot, most, most - PAGE + 1, draft=request.takes_drafter)

    def _bytes(self, prefix: CachedPrefix) -> int:
        return self.pair.kept_bytes(prefix.count, draft=prefix.tree[1])

    def make_room(self, slot: int, length: int) -> bool:
        """Let a slot hold so many tokens, in place of what ended requests left if it must be, the oldest first. Returns
        whether there is memory.
        """
        self._settle()
        while not self.pair.reserve(slot, length):
            if not self.left:
                return False
            self.drop(next(iter(self.left)))
            self._settle()
        return True

    def drop(self, slot: int) -> None:
        """Forget what an ended request left, if anything."""
        if slot in self.left:
            prefix, counts = self._remove(slot), self.prefixes.counts
            if slot >= self.pair.slots:
                counts.dropped_tokens += prefix.count
                counts.dropped_bytes += self._bytes(prefix)

    def _remove(self, slot: int) -> CachedPrefix:
        prefix, self._ended[slot] = self.left.pop(slot), 0
        if slot >= self.pair.slots:
            order, counts = self._sorted[prefix.tree], self.prefixes.counts
            del order[bisect_left(order, (prefix.tokens, slot))]
            counts.tokens -= prefix.count
            counts.bytes -= self._bytes(prefix)
        return prefix

    @property
    def _over(self) -> bool:
        """Whether copies have more memory than they may. What was found last stays: a request may begin with it."""
        several = len(self.left) > 1 and self.pair.kept_slots > 0
        return several and self.pair.marked_bytes > self._most_marked

    def _settle(self) -> None:
        """Free the memory that ended requests do not keep, and further slots for those that end next."""
        while self._ended or self._over:
            if not self._ended:
                self.drop(next(iter(self.left)))
            slot, count = self._ended.popitem()
            self.pair.release(slot, count)
            if slot >= self.pair.slots and not count:
                self._free.append(slot)
            elif len(self.left) > 1 and len(self._free) < self.pair.slots <= self.pair.kept_slots:
                self.drop(next(iter(self.left)))

    def keep_boundary(self, request: Request) -> None:
        """Keep a copy of a prompt's beginning, if its slot cannot be cut to every length after the whole prompt."""
        if not self.reuses:
            return
        later = self.pair.cut_lengths(request.slot, len(request.prompt), draft=request.takes_drafter)
        if any(lengths and lengths[0] > 1 for lengths in later):
            (self._mark if self.pair.kept_slots else self._keep)(request)

    def _caught_up(self, request: Request) -> CachedPrefix:
        """What a request's slot holds, in both models' caches if it can be. Raises MemoryError if the drafter's pass
        finds no memory.
        """
        prefix = self.prefix_of(request)
        # A drafter that is behind may have none of the lengths of a state.
        if prefix.count and request.takes_drafter and not prefix.longest(prefix.count, draft=True):
            if not self.pair.drafter.catch_up(request.slot):
                request.takes_drafter = False
                self.pair.drafter.clear(request.slot)
            prefix = self.prefix_of(request)
        return prefix

    def _keep(self, request: Request) -> CachedPrefix:
        """Keep a copy of a slot's content. Returns what the slot holds."""
        try:
            prefix = self._caught_up(request)
        except MemoryError:  # and so for no copy either
            return self.prefix_of(request)
        if not (most := prefix.count):
            return prefix
        both = prefix.longest(most, draft=True)
        length = both or prefix.longest(most, draft=False)
        tokens = [*request.prompt[:length], *request.output[: max(0, length - len(request.prompt))]]
        self.prefixes.keep(request.slot, tokens, draft=both > 0, salt=request.options.cache_salt)
        return prefix

    def move(self, request: Request, slot: int) -> None:
        """Move a request in flight to a free slot, over the rows there."""
        self._settle()
        self.left.pop(slot, None)
        self.pair.drafter.cut(slot, 0)
        self.pair.move(request.slot, slot, request.committed, draft=request.takes_drafter)
        request.slot = slot

    def forget(self) -> None:
        """Reuse no rows of ended requests."""
        for slot in list(self.left):
            self.drop(slot)
        self._settle()
        self.prefixes.clear()
