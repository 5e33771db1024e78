"""Engines that make every fault visible: a cache row depends on all earlier rows, and a token on all rows.

A target row holds a number computed from the sum of all earlier rows, its token and its position. That number is also
the row's feature, and determines the logits. The drafter continues the same sum over its own cache. So its drafts are
right, except for one row in five, only while its context is complete. Values that real engines leave undefined are
poison.

An engine can be given rows that are not numbers. Real attention multiplies masked rows by 0. So one such row in a
slot spoils all rows of a pass over that slot, if the pass, or the longest request in it, reaches that far.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

import numpy as np

from dflash_trt.bundle.cache_kinds import CacheKind, rows_by_window
from dflash_trt.decoding.arrays import HostArrays
from dflash_trt.decoding.caches import Snapshot
from dflash_trt.decoding.output import StopChecker
from dflash_trt.decoding.pair import Pair
from dflash_trt.decoding.params import RequestOptions, SamplingParams, ServingOptions
from dflash_trt.decoding.prefixes import Page, Prefixes
from dflash_trt.decoding.request import Request
from dflash_trt.decoding.sampling.history import History
from dflash_trt.decoding.sampling.sampler import sample
from dflash_trt.decoding.scheduler import Scheduler
from dflash_trt.decoding.slots import Slots
from dflash_trt.engines.caches import SlotCaches, SlotRows

Array = np.ndarray[Any, Any]

VOCAB, MASK, BLOCK, POISON, ROW_BYTES = 16, 15, 6, -7_000_001, 4
TABLE = 2 * np.random.default_rng(0).standard_normal((997, VOCAB)).astype(np.float32)


def row(total: int, token: int, position: int) -> int:
    """The row of a token at a position, if the earlier rows sum to `total`."""
    return (31 * total + 7919 * token + 104729 * position + 17) % 999983


def rows_of(tokens: Sequence[int]) -> list[int]:
    rows: list[int] = []
    total = 0
    for position, token in enumerate(tokens):
        rows.append(row(total, token, position))
        total += rows[-1]
    return rows


def nothing(number: int) -> bool:
    return False


def expected(
    prompt: Sequence[int],
    params: SamplingParams,
    seed: int,
    not_a_number: Callable[[int], bool] = nothing,
) -> list[int]:
    """The tokens of the target alone, one at a time, up to the first row that is not a number."""
    before = rows_of(prompt[:-1])
    tokens, total = list(prompt), sum(before)
    history = History(params, prompt) if params.adjusted else None
    if any(map(not_a_number, before)):
        return []
    for _ in range(params.max_tokens):
        newest = row(total, tokens[-1], len(tokens) - 1)
        if not_a_number(newest):
            break
        total += newest
        tokens.append(sample(TABLE[newest % len(TABLE)], params, seed, len(tokens), history))
        if history is not None:
            history.add(tokens[-1])
    return tokens[len(prompt) :]


class FakeEngine:
    def __init__(self, slots: int, capacity: int) -> None:
        self.cache = np.full((slots, capacity), POISON)
        self.nan = np.zeros((slots, capacity), bool)  # the rows that are not numbers
        self.not_a_number: Callable[[int], bool] = nothing
        self.before_pass: Callable[[], object] = lambda: None
        self.passes = 0

    @property
    def caches(self) -> FakeEngine:
        return self

    def cut_lengths(self, slot: int, length: int) -> Sequence[int]:
        return range(1, length + 1)

    def kept_bytes(self, length: int) -> int:
        return ROW_BYTES * length

    def copy(self, source: int, target: int, length: int) -> None:
        assert source != target
        kept = self.cache[source, :length].copy()
        self.cache[target] = POISON
        self.cache[target, :length] = kept
        self.nan[target, :length] = self.nan[source, :length]

    def clear(self, slot: int, first: int = 0) -> None:
        self.cache[slot, first:] = POISON
        self.nan[slot, first:] = False

    def lacks(self, kept: Snapshot, shortest: int) -> bool:
        return False

    def keep(self, slot: int, start: int, stop: int, shortest: int) -> Snapshot:
        assert POISON not in self.cache[slot, start:stop]
        assert not self.nan[slot, start:stop].any()
        return Snapshot(
            start,
            stop,
            range(start + 1, stop + 1),
            self.cache[slot, start:stop].copy(),
            ROW_BYTES * (stop - start),
        )

    def restore(self, slot: int, kept: Sequence[Snapshot], length: int) -> None:
        assert [each.start for each in kept] == [0, *(each.stop for each in kept[:-1])]
        assert length in kept[-1].lengths
        self.cache[slot] = POISON
        self.cache[slot, :length] = np.concatenate([each.data for each in kept])[:length]
        self.nan[slot, :length] = False

    def compact(self, slot: int, start: int, nodes: Sequence[int]) -> None:
        rows = self.cache[slot, [start + node for node in nodes]]
        self.cache[slot, start:] = POISON
        self.cache[slot, start : start + len(nodes)] = rows

    def close(self) -> None:
        pass

    def room(self, first: int, starts: Array, width: int) -> None:
        self.passes += 1
        self.before_pass()
        assert first + len(starts) <= len(self.cache)
        assert max(starts) + width < self.cache.shape[1], "rows beyond the capacity, with one for a sink"


class FakeTarget(FakeEngine):
    """Also accepts trees: a node's row is computed from the rows before the anchor and those of its ancestors."""

    def total(self, slot: int, length: int) -> int:
        """The sum of the first rows of a slot."""
        return int(self.cache[slot, :length].sum())

    def write(self, slot: int, start: int, rows: Sequence[int]) -> None:
        """Write the nodes of a pass, in its order."""
        self.cache[slot, start:] = POISON
        self.cache[slot, start : start + len(rows)] = rows
        for at, number in enumerate(rows, start):
            self.nan[slot, at] = self.not_a_number(number)

    def holds(self, slot: int, history: Sequence[int]) -> bool:
        """Whether these are the committed rows of a slot."""
        return self.cache[slot, : len(history)].tolist() == list(history)

    def kept_right(self, kept: Snapshot, history: Sequence[int]) -> bool:
        """Whether a copy has the rows of its positions. `history` starts at position 0."""
        return kept.data.tolist() == list(history[kept.start : kept.stop])

    def run(self, feeds: Mapping[str, Array], *, first_slot: int = 0) -> dict[str, Array]:
        tokens, starts = feeds["tokens"], feeds["start"]
        n, width = tokens.shape
        depths, visible = feeds["depths"], feeds["visible"]
        self.room(first_slot, starts, width)
        features = np.zeros((n, width, 1), np.float32)
        for i, start in enumerate(starts):
            slot = first_slot + i
            before = self.total(slot, int(start))
            for j in range(width):
                assert visible[i, j, j]
                assert not visible[i, j, j + 1 :].any()
                total = before + int(features[i, :j, 0][visible[i, j, :j]].sum(dtype=np.int64))
                features[i, j, 0] = row(total, int(tokens[i, j]), int(start + depths[i, j]))
            self.write(slot, int(start), features[i, :, 0].astype(int).tolist())
        logits = TABLE[features[..., 0].astype(int) % len(TABLE)]
        chosen = logits.argmax(-1)
        wrong = np.ones((n, width), bool)
        wrong[:, :-1] = tokens[:, 1:] != chosen[:, :-1]
        accepted = wrong.argmax(1)
        logits = np.take_along_axis(logits, feeds["rows"][..., None], 1)
        next_token = chosen[np.arange(n), accepted]
        for i in np.flatnonzero(self.nan[first_slot : first_slot + n, : max(starts) + width].any(axis=1)):
            logits[i], features[i], accepted[i], next_token[i] = (
                np.nan, np.nan, 0, 0,
            )  # as the graph then decides  # fmt: skip
        return {"logits": logits, "features": features, "accepted": accepted, "next_token": next_token}


class StateTarget(FakeTarget):
    """A target with recurrent layers. Each slot has the sum at one length, and the rows of its last pass.

    The rows are replayed up to the start of the next pass. So a slot can be cut to lengths from that of the sum on. A
    copy has only the sum at its end, and only if the slot could be cut there.
    """

    def __init__(self, slots: int, capacity: int) -> None:
        super().__init__(slots, capacity)
        self.state: list[tuple[int, int]] = [(0, 0)] * slots
        self.last: list[list[int]] = [[] for _ in range(slots)]

    def at(self, slot: int, length: int) -> tuple[int, int]:
        known, total = self.state[slot]
        assert known <= length <= known + len(self.last[slot]), "a state cannot be cut to this length"
        return length, total + sum(self.last[slot][: length - known])

    def put(self, slot: int, state: tuple[int, int], last: Sequence[int] = ()) -> None:
        self.state[slot], self.last[slot] = state, list(last)

    def total(self, slot: int, length: int) -> int:
        self.put(slot, self.at(slot, length) if length else (0, 0))
        return self.state[slot][1]

    def write(self, slot: int, start: int, rows: Sequence[int]) -> None:
        self.last[slot] = list(rows)

    def cut_lengths(self, slot: int, length: int) -> Sequence[int]:
        return range(max(1, self.state[slot][0]), length + 1)

    def kept_bytes(self, length: int) -> int:
        return 4 * ROW_BYTES

    def copy(self, source: int, target: int, length: int) -> None:
        self.put(target, self.at(source, length))

    def lacks(self, kept: Snapshot, shortest: int) -> bool:
        return kept.start < shortest <= kept.stop and not kept.lengths

    def keep(self, slot: int, start: int, stop: int, shortest: int) -> Snapshot:
        known = self.state[slot][0]
        if known <= stop <= known + len(self.last[slot]):
            return Snapshot(start, stop, (stop,), self.at(slot, stop), 4 * ROW_BYTES)
        return Snapshot(start, stop, (), None, 0)

    def restore(self, slot: int, kept: Sequence[Snapshot], length: int) -> None:
        assert (length,) == kept[-1].lengths
        self.put(slot, kept[-1].data)

    def compact(self, slot: int, start: int, nodes: Sequence[int]) -> None:
        assert self.state[slot][0] == start
        self.last[slot] = [self.last[slot][node] for node in nodes]

    def clear(self, slot: int, first: int = 0) -> None:
        if first == 0:
            self.put(slot, (0, 0))
        else:
            del self.last[slot][first - self.state[slot][0] :]

    def holds(self, slot: int, history: Sequence[int]) -> bool:
        known = self.state[slot][0]
        return self.at(slot, len(history))[1] == sum(history) and self.at(slot, known)[1] == sum(
            history[:known]
        )

    def kept_right(self, kept: Snapshot, history: Sequence[int]) -> bool:
        return kept.data == ((kept.stop, sum(history[: kept.stop])) if kept.lengths else None)


class _RowPool:
    """One row of numbers for each slot, beyond which nothing may be written. `RowPool` documents the methods."""

    row_bytes = ROW_BYTES

    def __init__(self, slots: int, rows: int) -> None:
        self.arrays = {"window_cache.0": np.full((slots, rows, 1), POISON)}
        self.rows = self.arrays["window_cache.0"]
        self.records = [SlotRows() for _ in range(slots)]

    def copy(self, source: int, target: int, count: int) -> None:
        kept = self.rows[source, :count].copy()
        self.rows[target] = POISON
        self.rows[target, :count] = kept

    def take(self, slot: int, first: int, stop: int) -> list[Array]:
        assert 0 <= first <= stop
        return [self.rows[slot, first:stop].copy()]

    def write(self, rows: Sequence[Array], slot: int, first: int) -> None:
        self.rows[slot, first:] = POISON
        self.rows[slot, first : first + len(rows[0])] = rows[0]

    def drop(self, slot: int, count: int, left: int) -> None:
        kept = self.rows[slot, count : count + left].copy()
        self.rows[slot] = POISON
        self.rows[slot, :left] = kept

    def compact(self, slot: int, start: int, nodes: Sequence[int]) -> None:
        moved = self.rows[slot, [start + node for node in nodes]].copy()
        self.write([moved], slot, start)

    def clear(self, slot: int, first: int) -> None:
        self.rows[slot, first:] = POISON


class WindowTarget(FakeTarget):
    """A target with a second cache, of a layer that sees 5 rows. Every pass looks at all that its first row sees.

    A pass writes as many rows as a chunk or a block has, and no more rows are there than it needs.
    """

    window, stride, most = 5, 4, 12

    def __init__(self, slots: int, capacity: int) -> None:
        super().__init__(slots, capacity)
        rows = rows_by_window([self.window], self.stride, capacity, self.most)[self.window]
        kind = CacheKind(window=self.window, stride=self.stride, rows=rows, row_bytes=ROW_BYTES, layers=(0,))
        self.rows: SlotCaches[Any, Any] = SlotCaches([(kind, _RowPool(slots, rows))], slots)

    def total(self, slot: int, length: int) -> int:
        self.rows.advance(slot, [length], [self.most])
        self.check_window(slot, length)
        return super().total(slot, length)

    def check_window(self, slot: int, length: int) -> None:
        (each,) = self.rows.kinds
        first, base = each.kind.first(length), each.records[slot].base
        assert base <= first
        seen = each.pool.rows[slot, first - base : length - base, 0]
        assert seen.tolist() == self.cache[slot, first:length].tolist(), (
            "a window's rows are not those of their places"
        )

    def write(self, slot: int, start: int, rows: Sequence[int]) -> None:
        super().write(slot, start, rows)
        (each,) = self.rows.kinds
        each.pool.write([np.array(rows)[:, None]], slot, start - each.records[slot].base)

    def cut_lengths(self, slot: int, length: int) -> Sequence[int]:
        return self.rows.cut_lengths(slot, length)

    def kept_bytes(self, length: int) -> int:
        return super().kept_bytes(length) + self.rows.kept_bytes(length)

    def copy(self, source: int, target: int, length: int) -> None:
        assert length in self.cut_lengths(source, length)
        super().copy(source, target, length)
        self.rows.copy(source, target, length)

    def keep(self, slot: int, start: int, stop: int, shortest: int) -> Snapshot:
        whole, own = super().keep(slot, start, stop, shortest), self.rows.keep(slot, start, stop, shortest)
        return Snapshot(start, stop, own.lengths, (whole, own), whole.size + own.size)

    def lacks(self, kept: Snapshot, shortest: int) -> bool:
        return self.rows.lacks(kept.data[1], shortest)

    def restore(self, slot: int, kept: Sequence[Snapshot], length: int) -> None:
        assert length in kept[-1].lengths
        super().restore(slot, [each.data[0] for each in kept], length)
        self.rows.restore(slot, [each.data[1] for each in kept], length)
        self.check_window(slot, length)

    def compact(self, slot: int, start: int, nodes: Sequence[int]) -> None:
        super().compact(slot, start, nodes)
        self.rows.compact(slot, start, nodes)

    def clear(self, slot: int, first: int = 0) -> None:
        super().clear(slot, first)
        self.rows.clear(slot, first)

    def holds(self, slot: int, history: Sequence[int]) -> bool:
        self.check_window(slot, len(history))
        return super().holds(slot, history)

    def kept_right(self, kept: Snapshot, history: Sequence[int]) -> bool:
        (copy,) = kept.data[1].data.rows
        same = copy.rows[0][:, 0].tolist() == list(history[copy.first : kept.stop])
        return same and super().kept_right(kept.data[0], history)


class FakeDrafter(FakeEngine):
    width = 1  # candidates for each place

    def run(self, feeds: Mapping[str, Array], *, first_slot: int = 0) -> dict[str, Array]:
        features, valid, starts, block = (feeds[k] for k in ("features", "n_features", "start", "block"))
        n, width = block.shape
        self.room(first_slot, starts, features.shape[1] + width)
        tokens = np.zeros((n, width - 1), int)
        for i, (start, count) in enumerate(zip(starts, valid, strict=True)):
            cache = self.cache[first_slot + i]
            cache[start:] = POISON
            spoilt = np.isnan(features[i, :count, 0])
            cache[start : start + count] = np.where(spoilt, POISON, features[i, :count, 0])
            self.nan[first_slot + i, start : start + count] = spoilt
            total, token, at = int(cache[: start + count].sum()), int(block[i, 0]), int(start + count)
            for j in range(width - 1):
                newest = row(total, token, at + j)
                total += newest
                self.nan[first_slot + i, at + j] = self.not_a_number(newest)
                token = int(TABLE[newest % len(TABLE)].argmax())
                if newest % 5 == 0:
                    token = (token + 1) % VOCAB
                tokens[i, j] = token
        # The second candidate is right where the first is wrong.
        candidates = np.stack([(tokens - shift) % VOCAB for shift in range(self.width)], axis=2)
        said = np.array([-0.2, -2.0, -4.0], np.float32)[: self.width]
        logprobs = np.broadcast_to(said, candidates.shape).copy()
        reach = max(starts) + features.shape[1] + width
        for i in np.flatnonzero(self.nan[first_slot : first_slot + n, :reach].any(axis=1)):
            candidates[i], logprobs[i] = 0, np.nan
        return {"draft_tokens": candidates, "draft_logprobs": logprobs}


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
    made = Request(
        prompt=list(prompt),
        params=params,
        seed=params.seed or 0,
        stop=StopChecker(params, (), Letters()),  # type: ignore[arg-type]
        history=History(params, prompt) if params.adjusted else None,
        arrived=arrived,
        options=RequestOptions(speculate=draft, **options),
        deadline=deadline,
    )
    made.statistics.num_prompt_tokens = len(prompt)
    return made


class Pool:
    """A scheduler over fake engines, and its invariants between two steps.

    Prefixes may take the memory of the slots beyond `batch`, or `kept` rows. Their pages have 8 tokens.
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
    ) -> None:
        capacity = max_seq_len + 2 * BLOCK + 1
        self.target, self.drafter = target(batch, capacity), FakeDrafter(batch, capacity)
        self.pair = Pair(
            self.target,
            self.drafter,
            HostArrays(slots=batch, feature_size=1, most_unread=2 * chunk),
            slots=batch,
            capacity=capacity,
            mask_token_id=MASK,
            vocab_size=VOCAB,
            prefill_chunk=chunk,
            trees=True,
        )
        kept = (slots - batch) * capacity if kept is None else kept
        self.scheduler = Scheduler(self.pair)
        self.scheduler.slots = Slots(self.pair, kept * 2 * ROW_BYTES, page=8)

    @property
    def prefixes(self) -> Prefixes:
        assert self.scheduler.slots.prefixes is not None
        return self.scheduler.slots.prefixes

    def check(self) -> None:
        s = self.scheduler
        assert not self.target.nan.any()
        assert not self.drafter.nan.any()
        live = [*s.active, *([s.filling] if s.filling else [])]
        assert len(s.active) <= s.max_batch_size
        taken = [each.slot for each in live]
        assert len(set(taken)) == len(live)
        assert s.filling is None or s.filling.slot >= len(s.active), "in the way of a round"
        for slot, each in zip(taken, live, strict=True):
            history = rows_of([*each.prompt, *each.output][: each.committed])
            assert self.target.holds(slot, history)
            behind = self.pair.drafter.unread[slot]
            if each.takes_drafter:
                unread = self.pair.arrays.unread_features_of(slot, 0, behind)[0, :, 0].astype(int).tolist()
                seen = each.committed - behind
                assert self.drafter.cache[slot, :seen].tolist() + unread == history
                assert behind <= self.pair.arrays.most_unread
            else:
                assert behind == 0
        for each in s.active:
            assert each.committed == len(each.prompt) + len(each.output) - 1
        assert set(s.slots.left) <= set(range(self.pair.slots)) - set(taken)
        for slot, left in s.slots.left.items():
            history = rows_of([*left.prompt, *left.answer][: left.count])
            assert self.target.holds(slot, history)
            drafted, seen = max(left.drafter, default=0), self.pair.drafter.seen[slot]
            waiting = self.pair.arrays.unread_features_of(slot, 0, max(drafted - seen, 0))[0, :, 0].astype(
                int
            )
            assert [*self.drafter.cache[slot, : min(seen, drafted)], *waiting] == history[:drafted]
        if s.slots.prefixes is not None:
            self.check_prefixes()

    def check_prefixes(self) -> None:
        tokens, memory, prefixes = 0, 0, self.prefixes
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
                    own: Any = page.kept.data[1].data
                    if not (rows := isinstance(own, np.ndarray)):
                        assert rows_before or own.rows is None, "rows after features"
                        own = np.append([] if own.rows is None else own.rows.data, own.features)
                    assert own.tolist() == history[len(before) :]
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
        assert memory <= counts.limit_bytes
