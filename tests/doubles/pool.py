"""A scheduler over the fake engines, the requests it is given, and what must hold between two of its steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

import numpy as np

from dflash_trt.decoding.arrays import HostArrays
from dflash_trt.decoding.output import StopChecker
from dflash_trt.decoding.pair import Pair
from dflash_trt.decoding.params import RequestOptions, SamplingParams, ServingOptions
from dflash_trt.decoding.prefixes import Page, Prefixes
from dflash_trt.decoding.request import Request
from dflash_trt.decoding.sampling.history import History
from dflash_trt.decoding.scheduler import Scheduler
from dflash_trt.decoding.slots import Slots
from tests.doubles.fake_engines import BLOCK, MASK, ROW_BYTES, VOCAB, FakeDrafter, FakeTarget, rows_of


class Letters:
    """A detokenizer: one letter per token."""

    def push(self, tokens: Sequence[int]) -> str:
        return "".join(chr(65 + token) for token in tokens)

    def flush(self) -> str:
        return ""


def request(
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    arrived: float = 0.0,
    draft: bool = True,
    deadline: float | None = None,
    **options: Unpack[ServingOptions],
) -> Request:
    drawn = Request(
        prompt=list(prompt),
        params=params,
        seed=params.seed or 0,
        stop=StopChecker(params, (), Letters()),
        history=History(params, prompt) if params.adjusted else None,
        arrived=arrived,
        options=RequestOptions(speculate=draft, **options),
        deadline=deadline,
    )
    drawn.statistics.num_prompt_tokens = len(prompt)
    return drawn


def scheduler_over(target: FakeTarget, drafter: FakeDrafter, *, chunk: int, kept: int) -> Scheduler:
    """A scheduler with memory for `kept` rows of prefixes, in pages of 8 tokens."""
    capacity, slots = target.cache.shape[1], len(target.cache) - target.kept_slots
    pair = Pair(
        target,
        drafter,
        HostArrays(slots=slots, feature_size=1, most_unread=2 * chunk),
        slots=slots,
        capacity=capacity,
        mask_token_id=MASK,
        vocab_size=VOCAB,
        prefill_chunk=chunk,
        trees=True,
    )
    scheduler = Scheduler(pair)
    scheduler.slots = Slots(pair, kept * 2 * ROW_BYTES, page=8)
    return scheduler


def both(target: type[FakeTarget], slots: int, capacity: int, further: int) -> tuple[FakeTarget, FakeDrafter]:
    """The engines, with so many slots for passes and for ended requests."""
    engines = target(slots + further, capacity), FakeDrafter(slots + further, capacity)
    for engine in engines:
        engine.share(None, further)
    return engines


class Pool:
    """A scheduler over fake engines, and its invariants between two steps.

    Prefixes may take the memory of the slots beyond `batch`, or `kept` rows. Their pages have 8 tokens. With `further`
    slots, ended requests have those.
    """

    def __init__(
        self,
        batch: int,
        slots: int,
        *,
        chunk: int = 8,
        max_seq_len: int = 120,
        kept: int | None = None,
        target: type[FakeTarget] = FakeTarget,
        further: int = 0,
    ) -> None:
        capacity = max_seq_len + 2 * BLOCK + 1
        self.target, self.drafter = both(target, batch, capacity, further)
        kept = (slots - batch) * capacity if kept is None else kept
        self.scheduler = scheduler_over(self.target, self.drafter, chunk=chunk, kept=kept)
        self.pair = self.scheduler.pair

    @property
    def prefixes(self) -> Prefixes:
        assert self.scheduler.slots.prefixes is not None
        return self.scheduler.slots.prefixes

    def check(self) -> None:
        s = self.scheduler
        if s._begun is None:  # else its pass is here already, and what it wrote is not judged
            assert not self.target.nan.any()
            assert not self.drafter.nan.any()
        live = s._running
        assert len(s.active) <= s.max_batch_size
        taken = [member.slot for member in live]
        assert len(set(taken)) == len(live)
        assert all(member.slot >= len(s.active) for member in s.filling), "in the way of a round"
        for slot, member in zip(taken, live, strict=True):
            history = rows_of([*member.prompt, *member.output][: member.committed])
            assert self.target.holds(slot, history)
            behind = self.pair.drafter.unread[slot]
            if member.takes_drafter:
                unread = self.waiting(slot, behind)
                seen = member.committed - behind
                assert self.drafter.cache[slot, :seen].tolist() + unread == history
                assert behind <= max(self.pair.arrays.most_unread, BLOCK)  # a round may accept all of a block
            else:
                assert behind == 0
        for member in s.active:
            assert member.committed == len(member.prompt) + len(member.output) - 1
        assert set(s.slots.left) <= set(range(len(self.target.cache))) - set(taken)
        for slot, left in s.slots.left.items():
            history = rows_of([*left.prompt, *left.answer][: left.count])
            assert self.target.holds(slot, history)
            drafted, seen = min(max(left.drafter, default=0), left.count), self.pair.drafter.seen[slot]
            waiting = self.waiting(slot, max(drafted - seen, 0))
            assert [*self.drafter.cache[slot, : min(seen, drafted)], *waiting] == history[:drafted]
        if s.slots.prefixes is not None:
            self.check_prefixes()

    def waiting(self, slot: int, count: int) -> list[int]:
        """The first features of a slot that the drafter has not read."""
        rows = self.pair.arrays.unread_features_of(slot, 0, count) if count else np.zeros(0)
        return [int(x) for x in rows.flatten()]

    def check_prefixes(self) -> None:
        left, prefixes = self.scheduler.slots.left, self.prefixes
        moved = [left[slot] for slot in left if slot >= self.pair.slots]
        tokens = sum(kept.count for kept in moved)
        memory = sum(self.pair.kept_bytes(kept.count, draft=kept.tree[1]) for kept in moved)
        seen: list[Page] = []
        for (_, draft), tree in prefixes._trees.items():
            assert tree
            todo = [((), True, page) for page in tree.values()]
            while todo:
                before, rows_before, page = todo.pop()
                whole = (*before, *page.tokens)
                history = rows_of(whole)
                assert len(page.kept.data) == 1 + draft
                assert self.target.kept_right(page.kept.data[0], history)
                rows = True
                if draft:
                    data: Any = page.kept.data[1].data
                    if not (rows := isinstance(data, np.ndarray)):
                        assert rows_before or data.rows is None, "rows after features"
                        data = np.append([] if data.rows is None else data.rows.data, data.features)
                    assert data.tolist() == history[len(before) :]
                    assert rows_before or not rows, "rows after features"
                assert (page.start, page.kept.start, page.kept.stop) == (len(before), len(before), len(whole))
                assert len(before) % prefixes.page == 0
                assert not page.children or len(page.tokens) == prefixes.page
                tokens += len(page.tokens)
                memory += page.kept.size
                seen.append(page)
                todo += [(whole, rows, child) for child in page.children.values()]
        assert set(seen) == set(prefixes._used)
        place = {page: i for i, page in enumerate(prefixes._used)}
        assert all(place[child] < place[page] for page in seen for child in page.children.values())
        counts = prefixes.counts
        assert (tokens, memory) == (counts.tokens, counts.bytes)
        assert memory <= counts.limit_bytes or self.pair.kept_slots  # then the memory of caches is the limit
