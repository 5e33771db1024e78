"""A target and its drafter over one pool of cache slots.

A pass over n sequences works on consecutive slots, as a view of the pool. Slot row j holds position j; what lies at or
beyond a sequence's `committed` rows is garbage and is overwritten by the next pass. Attention multiplies it by 0, so it
must be finite: NaN x 0 is NaN. Caches begin as zeros, and what holds other numbers is cleared.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

import numpy as np

from dflash_trt.decoding.draft import Draft
from dflash_trt.decoding.request import Request

Array = np.ndarray[Any, Any]

# Rows in the caches when passes are rehearsed.
USUAL_CONTEXT = 128


class CacheSlots(Protocol):
    """The caches of one engine. `row_bytes`: of one row, over all of them."""

    row_bytes: int

    def move_slot(self, source: int, target: int, rows: int) -> None: ...
    def clear_slot(self, slot: int, first: int = 0, last: int | None = None) -> None: ...
    def keep_rows(self, slot: int, start: int, stop: int) -> Any: ...
    def restore_rows(self, kept: Any, slot: int, start: int, rows: int) -> None: ...
    def close(self) -> None: ...


class Engine(CacheSlots, Protocol):
    """Named buffers in, named buffers out. Outputs are views that the next pass overwrites."""

    def run(self, feeds: Mapping[str, Array], *, first_slot: int = 0) -> dict[str, Array]: ...


@dataclass(frozen=True, slots=True)
class KeptRows:
    """Rows start .. stop-1 of a slot, copied out of its caches; freed when nobody holds this any more.

    `lengths`: how many rows a slot may have once these are put back behind those before them, ascending. Attention's
    rows can be cut anywhere.
    """

    start: int
    stop: int
    lengths: Sequence[int]
    target: Any
    drafter: Any  # None: without them


@dataclass(slots=True)
class Verified:
    """What a pass over a `Draft` of n requests, S nodes each, found. The next pass overwrites its arrays.

    accepted, next_token: int [n], how many drafts are right and the token after them, for the requests that the engine
        has `decided` [n]; the host decides for the others, by their logits. Of a greedy request the engine looks at the
        whole block, whatever the request's own length.
    finite: bool [n, S], whether a row of logits has a finite largest value. NaN anywhere and +infinity are not finite;
        -infinity says that a token cannot be.
    logits: float32 [n, S, V].  features: [n, S, F], None where they stay with the pair.
    drafts_finite: bool [n], whether the drafter's numbers for this round were finite.
    """

    accepted: Array
    next_token: Array
    decided: Sequence[bool]
    finite: Array
    logits: Any
    drafts_finite: Array
    features: Any = None


class Pair(Protocol):
    """What the scheduler asks of a target and its drafter; `EnginePair` says what each method does.

    Drafts and logits may lie elsewhere than on the host, until their numbers are looked at.
    """

    slots: int
    capacity: int
    prefill_chunk: int
    draft_time: float
    verify_time: float

    def prefill(self, tokens: Sequence[int], start: int, slot: int, *, draft: bool) -> tuple[Any, bool]: ...
    def propose(self, active: Sequence[Request], length: int) -> Draft: ...
    def verify(self, active: Sequence[Request], draft: Draft) -> Verified: ...
    def commit(self, request: Request, slot: int, found: Verified, nodes: Sequence[int]) -> None: ...
    def stop_drafting(self, request: Request, slot: int) -> None: ...
    def rehearse_draft(self, batch: int, length: int) -> None: ...
    def rehearse_verify(self, batch: int, length: int) -> None: ...
    def move(self, source: int, target: int, rows: int) -> None: ...
    def kept_bytes(self, rows: int, *, draft: bool) -> int: ...
    def keep(self, slot: int, start: int, stop: int, *, draft: bool) -> KeptRows: ...
    def restore(self, slot: int, kept: Sequence[KeptRows], length: int, *, draft: bool) -> None: ...
    def clear(self, slot: int, first: int = 0, last: int | None = None) -> None: ...
    def close(self) -> None: ...


def chains(draft: Draft) -> Any:
    """The tokens [n, N] of a draft that has chains. Raises ValueError for trees: no graph masks by parents."""
    if draft.parents is not None:
        raise ValueError(
            "the draft has parents, but these graphs verify chains: every node after the one before it"
        )
    return draft.tokens


class Caches(ABC):
    """The slots of a target and its drafter: their caches side by side, and what waits there for the drafter."""

    target: CacheSlots
    drafter: CacheSlots

    @abstractmethod
    def _move_waiting(self, source: int, target: int) -> None:
        """Copy what waits in one slot for the drafter over another's."""

    @abstractmethod
    def _clear_waiting(self, slot: int) -> None:
        """Nothing waits in a slot any more."""

    def move(self, source: int, target: int, rows: int) -> None:
        """Copy the first `rows` rows of one slot over another's, in both models' caches, and what waits there."""
        for engine in (self.target, self.drafter):
            engine.move_slot(source, target, rows)
        self._move_waiting(source, target)

    def clear(self, slot: int, first: int = 0, last: int | None = None) -> None:
        """Make rows first .. last-1 of a slot 0, in both models' caches; what waits there too, if that is all rows."""
        for engine in (self.target, self.drafter):
            engine.clear_slot(slot, first, last)
        if first == 0:
            self._clear_waiting(slot)

    def stop_drafting(self, request: Request, slot: int) -> None:
        """From now on this request takes no drafts, and its slot holds nothing of the drafter's."""
        request.draft, request.behind = False, 0
        self.drafter.clear_slot(slot)
        self._clear_waiting(slot)

    def kept_bytes(self, rows: int, *, draft: bool) -> int:
        """Memory that so many rows take once they are kept; with `draft`, the drafter's as well."""
        return rows * (self.target.row_bytes + (self.drafter.row_bytes if draft else 0))

    def keep(self, slot: int, start: int, stop: int, *, draft: bool) -> KeptRows:
        """Copy rows start .. stop-1 out of a slot. Raises MemoryError where there is no room."""
        target = self.target.keep_rows(slot, start, stop)
        drafter = self.drafter.keep_rows(slot, start, stop) if draft else None
        return KeptRows(start, stop, range(start + 1, stop + 1), target, drafter)

    def restore(self, slot: int, kept: Sequence[KeptRows], length: int, *, draft: bool) -> None:
        """Copy kept rows, which follow each other from row 0 on, into a slot: `length` of them, one of the last one's
        `lengths`.
        """
        for each in kept:
            rows = min(each.stop, length) - each.start
            self.target.restore_rows(each.target, slot, each.start, rows)
            if draft:
                self.drafter.restore_rows(each.drafter, slot, each.start, rows)

    def close(self) -> None:
        self.target.close()
        self.drafter.close()


class EnginePair(Caches):
    """Runs passes; knows slots, positions and features, and nothing of sampling, stopping or scheduling.

    `draft_time` and `verify_time` are the seconds that the engines took in the last `propose` and `verify`.
    """

    target: Engine
    drafter: Engine

    def __init__(
        self,
        target: Engine,
        drafter: Engine,
        *,
        slots: int,
        capacity: int,
        mask_token_id: int,
        vocab_size: int,
        feature_size: int,
        prefill_chunk: int,
    ) -> None:
        self.target, self.drafter, self.slots, self.capacity = target, drafter, slots, capacity
        self.mask_token_id, self.vocab_size = mask_token_id, vocab_size
        self.feature_size, self.prefill_chunk = feature_size, prefill_chunk
        self.draft_time = self.verify_time = 0.0
        self._drafts_finite = np.ones(0, bool)  # of the last `propose`
        # By slot: features [n, F] of committed rows that the drafter has not taken in, in order.
        self._waiting: list[list[Array]] = [[] for _ in range(slots)]

    def prefill(self, tokens: Sequence[int], start: int, slot: int, *, draft: bool) -> tuple[Array, bool]:
        """Write the rows of `tokens`, which stand at positions start, start+1, ...; at most `prefill_chunk` of them.

        With `draft`, the drafter takes them in as well. Returns the logits [V] of the last row, a view, and whether the
        drafter's numbers are finite.
        """
        n = len(tokens)
        self._clear_waiting(slot)  # of the request that had this slot before
        chunk = np.asarray(tokens, np.int64)[None]
        feeds = {"tokens": chunk, "start": np.array([start]), "rows": np.array([[n - 1]])}
        out = self.target.run(feeds, first_slot=slot)
        sound = self._take_in(out["features"], start, slot) if draft else True
        return out["logits"][0, 0], sound

    def propose(self, active: Sequence[Request], length: int) -> Draft:
        """One drafter pass over slots 0 .. n-1: chains of `length` nodes.

        The drafter also takes in what was committed since its last pass. At length 1 it does not run, unless more than
        a chunk of that has piled up.
        """
        block = np.full((len(active), length), self.mask_token_id, np.int64)
        block[:, 0] = [request.anchor for request in active]
        self.draft_time, self._drafts_finite = 0.0, np.ones(len(active), bool)
        # A pass writes as many rows for each sequence as for the one that is furthest behind: they must fit for all.
        room = self.capacity - 1 - length - max(request.committed for request in active)
        self._catch_up(active, self.prefill_chunk if length == 1 else room)
        if length == 1:
            return Draft(block, None, np.zeros((len(active), 0), np.float32))
        fresh = [request.behind for request in active]
        features = np.zeros((len(active), max(1, *fresh), self.feature_size), np.float32)
        for i, request in enumerate(active):
            at = 0
            for rows in self._waiting[i]:
                features[i, at : at + len(rows)] = rows
                at += len(rows)
            self._clear_waiting(i)
            request.behind = 0
        feeds = {
            "features": features,
            "n_features": np.array(fresh),
            "start": np.array([request.committed for request in active]) - fresh,
            "block": block,
        }
        begin = perf_counter()
        out = self.drafter.run(feeds)
        self.draft_time += perf_counter() - begin
        block[:, 1:] = out["draft_tokens"]
        self._drafts_finite &= np.isfinite(out["draft_logprobs"]).all(axis=1)
        return Draft(block, None, out["draft_logprobs"])

    def verify(self, active: Sequence[Request], draft: Draft) -> Verified:
        """One target pass over the chains of slots 0 .. n-1. The graph decides for the greedy requests."""
        block = chains(draft)
        rows = np.broadcast_to(np.arange(block.shape[1]), block.shape)
        feeds = {"tokens": block, "start": np.array([r.committed for r in active]), "rows": rows}
        begin = perf_counter()
        out = self.target.run(feeds)
        self.verify_time = perf_counter() - begin
        return Verified(
            out["accepted"],
            out["next_token"],
            decided=[request.params.greedy for request in active],
            finite=np.isfinite(out["logits"].max(axis=-1)),  # NaN, if there is any, is the largest
            logits=out["logits"],
            drafts_finite=self._drafts_finite,
            features=out["features"],
        )

    def rehearse_draft(self, batch: int, length: int) -> None:
        """A drafter pass as `propose` runs it, over no request's tokens. Overwrites rows of slots 0 .. batch-1."""
        self.drafter.run(
            {
                "features": np.zeros((batch, length, self.feature_size), np.float32),
                "n_features": np.full(batch, length),
                "start": np.full(batch, self._rehearsal_start(length)),
                "block": np.full((batch, length), self.mask_token_id, np.int64),
            }
        )

    def rehearse_verify(self, batch: int, length: int) -> None:
        """A target pass as `verify` runs it. Its tokens differ, so that they choose as many experts as others would."""
        tokens = np.random.default_rng(length).integers(self.vocab_size, size=(batch, length))
        rows = np.broadcast_to(np.arange(length), tokens.shape)
        start = np.full(batch, self._rehearsal_start(length))
        self.target.run({"tokens": tokens, "start": start, "rows": rows})

    def _rehearsal_start(self, length: int) -> int:
        return min(USUAL_CONTEXT, self.capacity - 2 * length)

    def commit(self, request: Request, slot: int, found: Verified, nodes: Sequence[int]) -> None:
        """These verified nodes of `slot` are right, each the child of the one before: their features wait for the
        drafter.
        """
        self._waiting[slot].append(found.features[slot, nodes])  # a copy: the next pass reuses the memory
        request.behind += len(nodes)

    def _move_waiting(self, source: int, target: int) -> None:
        self._waiting[target] = list(self._waiting[source])

    def _clear_waiting(self, slot: int) -> None:
        self._waiting[slot].clear()

    def _catch_up(self, active: Sequence[Request], most: int) -> None:
        """Let the drafter take in what piled up, while it was off, of requests that are behind by more than `most`."""
        begin = perf_counter()
        for slot, request in enumerate(active):
            if (behind := request.behind) > most:
                rows = np.concatenate(self._waiting[slot])
                for at in range(0, behind, self.prefill_chunk):
                    part = rows[None, at : at + self.prefill_chunk]
                    self._drafts_finite[slot] &= self._take_in(part, request.committed - behind + at, slot)
                self._clear_waiting(slot)
                request.behind = 0
                self.draft_time = perf_counter() - begin

    def _take_in(self, features: Array, start: int, slot: int) -> bool:
        """Context rows [1, n, F] into the drafter's cache; whether its numbers are finite.

        The two block rows behind them serve for nothing else.
        """
        feeds = {
            "features": features,
            "n_features": np.array([features.shape[1]]),
            "start": np.array([start]),
            "block": np.full((1, 2), self.mask_token_id, np.int64),
        }
        out = self.drafter.run(feeds, first_slot=slot)
        return bool(np.isfinite(out["draft_logprobs"]).all())
