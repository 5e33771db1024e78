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
from typing import Any

import numpy as np

from dflash_trt.decoding.caches import Snapshot
from dflash_trt.decoding.params import SamplingParams
from dflash_trt.decoding.sampling.history import History
from dflash_trt.decoding.sampling.sampler import sample

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
    prompt: Sequence[int], params: SamplingParams, seed: int, not_a_number: Callable[[int], bool] = nothing
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


def decided(feeds: Mapping[str, Array], logits: Array, features: Array) -> dict[str, Array]:
    """The outputs of a target's pass with these logits [B, S, V] of all rows and features [B, S, 1]."""
    chosen = logits.argmax(-1)
    wrong = np.ones(chosen.shape, bool)
    wrong[:, :-1] = feeds["tokens"][:, 1:] != chosen[:, :-1]
    accepted = wrong.argmax(1)
    return {
        "logits": np.take_along_axis(logits, feeds["rows"][..., None], 1),
        "features": features,
        "accepted": accepted,
        "next_token": chosen[np.arange(len(chosen)), accepted],
    }


class FakeEngine:
    kept_slots = marked_bytes = 0

    def __init__(self, slots: int, capacity: int) -> None:
        self.cache = np.full((slots, capacity), POISON)
        self.nan = np.zeros((slots, capacity), bool)  # the rows that are not numbers
        self.not_a_number: Callable[[int], bool] = nothing
        self.before_pass: Callable[[], object] = lambda: None
        self.passes = 0
        self.memory: int | None = None  # rows of all slots together; None: each may have the most
        self.reserved = [0] * slots

    @property
    def caches(self) -> FakeEngine:
        return self

    @property
    def tokens(self) -> int | None:
        return self.memory

    def reserve(self, slot: int, length: int) -> bool:
        more = max(length - self.reserved[slot], 0)
        if self.memory is not None and sum(self.reserved) + more > self.memory:
            return False
        self.reserved[slot] += more
        return True

    def release(self, slot: int, length: int = 0) -> None:
        self.reserved[slot] = min(self.reserved[slot], length)
        self.clear(slot, length)

    def move(self, source: int, target: int, length: int) -> None:
        self.copy(source, target, length)
        self.reserved[target] = self.reserved[source]
        self.release(source)

    def share(self, memory: int | None, kept_slots: int) -> None:
        """Let slots share so many rows, the last of them for ended requests."""
        self.memory, self.kept_slots = memory, kept_slots

    def mark(self, slot: int, length: int, shortest: int) -> None:
        """All rows move with a slot."""

    def adopt(self, source: int, target: int) -> None:
        """As above."""

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

    def lacks(self, slot: int, kept: Snapshot, shortest: int) -> bool:
        return False

    def keep(self, slot: int, start: int, stop: int, shortest: int) -> Snapshot:
        assert POISON not in self.cache[slot, start:stop]
        assert not self.nan[slot, start:stop].any()
        return Snapshot(
            start, stop, range(start + 1, stop + 1), self.cache[slot, start:stop].copy(),
            ROW_BYTES * (stop - start),
        )  # fmt: skip

    def restore(self, slot: int, kept: Sequence[Snapshot], length: int) -> None:
        assert [part.start for part in kept] == [0, *(part.stop for part in kept[:-1])]
        assert length in kept[-1].lengths
        self.cache[slot] = POISON
        self.cache[slot, :length] = np.concatenate([part.data for part in kept])[:length]
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
        for slot, start in enumerate(() if self.memory is None else starts, first):
            assert start <= self.reserved[slot], "rows without memory"


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
        out = decided(feeds, TABLE[features[..., 0].astype(int) % len(TABLE)], features)
        for i in np.flatnonzero(self.nan[first_slot : first_slot + n, : max(starts) + width].any(axis=1)):
            out["logits"][i], out["features"][i], out["accepted"][i], out["next_token"][i] = (
                np.nan, np.nan, 0, 0,
            )  # as the graph then decides  # fmt: skip
        return out


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
        odds = np.array([-0.2, -2.0, -4.0], np.float32)[: self.width]
        logprobs = np.broadcast_to(odds, candidates.shape).copy()
        reach = max(starts) + features.shape[1] + width
        for i in np.flatnonzero(self.nan[first_slot : first_slot + n, :reach].any(axis=1)):
            candidates[i], logprobs[i] = 0, np.nan
        return {"draft_tokens": candidates, "draft_logprobs": logprobs}
