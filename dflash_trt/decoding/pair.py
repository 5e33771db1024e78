"""A target and its drafter over one pool of cache slots: the steps of a round, whatever the engines.

A pass over n sequences works on consecutive slots, as a view of the pool. Position j of a slot belongs to its j-th
token. What lies at or beyond a sequence's `committed` positions is garbage, which the next pass overwrites. Attention
multiplies it by 0, so it must be finite: NaN x 0 is NaN. Caches begin as zeros, and NaN is cleared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dflash_trt.decoding.arrays import Arrays, Engine
from dflash_trt.decoding.caches import Caches, Kept
from dflash_trt.decoding.draft import Draft, Verified
from dflash_trt.decoding.drafter import Drafter
from dflash_trt.decoding.request import Request

# Tokens in the caches when passes are rehearsed.
USUAL_CONTEXT = 128


class Pair:
    """Runs passes; knows slots, positions and features, and nothing of sampling, stopping or scheduling.

    slots, capacity: how many sequences there is room for, and how many positions in each.
    prefill_chunk: most tokens of a prompt in one pass.
    """

    def __init__(
        self,
        target: Engine,
        drafter: Engine,
        arrays: Arrays,
        *,
        slots: int,
        capacity: int,
        mask_token_id: int,
        vocab_size: int,
        prefill_chunk: int,
    ) -> None:
        self.target, self.arrays, self.slots, self.capacity = target, arrays, slots, capacity
        self.vocab_size, self.prefill_chunk = vocab_size, prefill_chunk
        self.drafter = Drafter(
            drafter,
            arrays,
            slots=slots,
            capacity=capacity,
            mask_token_id=mask_token_id,
            prefill_chunk=prefill_chunk,
        )
        self._features: Any = None  # of the last `verify`
        self._verified: tuple[Any, Any] = (0.0, 0.0)  # when its pass began and ended

    @property
    def draft_time(self) -> float:
        """Seconds that the engine took in the last `propose`, once `verify` has returned."""
        return self.drafter.seconds

    @property
    def verify_time(self) -> float:
        """Seconds that the engine took in the last `verify`."""
        return self.arrays.seconds(*self._verified)

    def prefill(self, tokens: Sequence[int], start: int, slot: int, *, draft: bool) -> tuple[Any, bool]:
        """Write the rows of `tokens`, which stand at positions start, start+1, ...; at most `prefill_chunk` of them.

        With `draft`, the drafter takes them in as well. Returns the logits [V] of the last row, a view, and whether the
        drafter's numbers are finite.
        """
        self.drafter.behind[slot] = 0  # of the request that had this slot before
        chunk, last = np.array(tokens, np.int64)[None], np.array([[len(tokens) - 1]])
        feeds = {"tokens": chunk, "start": np.array([start]), "rows": last}
        out = self.arrays.prefill(self.target, feeds, slot)
        sound = True
        if draft:
            sound = self.arrays.finite(self.drafter.take_in(out["features"], start, slot))
        return self.arrays.readable(out["logits"][0, 0]), sound

    def propose(self, active: Sequence[Request], length: int) -> Draft:
        """Drafts of `length` nodes for the requests of slots 0 .. n-1."""
        return self.drafter.propose(active, length)

    def verify(self, active: Sequence[Request], draft: Draft) -> Verified:
        """One target pass over the nodes of slots 0 .. n-1. Trees need an engine that takes their `parents`."""
        feeds = {
            "tokens": draft.tokens,
            "start": np.array([request.committed for request in active]),
            "rows": self.arrays.nodes(len(active), draft.nodes),
        }
        if draft.parents is not None:
            feeds["parents"] = draft.parents
        begin = self.arrays.now()
        out = self.arrays.decode(self.target, feeds)
        self._verified = begin, self.arrays.now()
        self._features = out["features"]
        return self.arrays.verified(active, draft, out)

    def commit(self, request: Request, slot: int, nodes: Sequence[int]) -> None:
        """These nodes of `slot`, which were verified last, are right: the anchor, and each the child of the one before.

        They become the positions behind the committed ones. The nodes of a chain lie there already.
        """
        if nodes[-1] >= len(nodes):
            self.target.caches.compact(slot, request.committed, nodes)
        if request.draft:
            self.drafter.commit(slot, self._features[slot], nodes)

    def stop_drafting(self, slot: int) -> None:
        """Nothing of the drafter's is left in a slot, and nothing waits there for it."""
        self.drafter.clear(slot)

    def lengths(self, slot: int, committed: int, *, draft: bool) -> tuple[Sequence[int], Sequence[int]]:
        """The lengths that a slot can be cut to, of the target's caches and of the drafter's; none without `draft`."""
        behind = self.drafter.behind[slot]
        drafted = self.drafter.caches.lengths(slot, committed - behind) if draft else ()
        return self.target.caches.lengths(slot, committed), drafted

    def move(self, source: int, target: int, length: int) -> None:
        """Copy a request's `length` tokens from one slot over another's, with those that wait for the drafter."""
        self.target.caches.copy(source, target, length)
        self.drafter.move(source, target, length)

    def copy(self, source: int, target: int, length: int, *, draft: bool) -> None:
        """Give a slot the first `length` tokens of another one: one of its `lengths`, with `draft` of both models."""
        for caches in self._caches(draft):
            caches.copy(source, target, length)

    def kept_bytes(self, length: int, *, draft: bool) -> int:
        """Memory that a copy of so many tokens takes; with `draft`, the drafter's as well."""
        return sum(caches.kept_bytes(length) for caches in self._caches(draft))

    def keep(self, slot: int, start: int, stop: int, *, draft: bool) -> Kept:
        """Copy positions start .. stop-1 out of a slot. Raises MemoryError where there is no room."""
        copies = [caches.keep(slot, start, stop) for caches in self._caches(draft)]
        lengths = copies[0].lengths
        if any(each.lengths != lengths for each in copies):
            lengths = [n for n in lengths if all(n in each.lengths for each in copies)]
        return Kept(start, stop, lengths, copies)

    def restore(self, slot: int, kept: Sequence[Kept], length: int, *, draft: bool) -> None:
        """Give a slot the first `length` tokens of copies that follow each other from position 0 on.

        `length` is one of the last copy's `lengths`.
        """
        for i, caches in enumerate(self._caches(draft)):
            caches.restore(slot, [each.data[i] for each in kept], length)

    def clear(self, slot: int, first: int = 0, last: int | None = None) -> None:
        """Make positions first .. last-1 of a slot 0, in both models' caches."""
        self.target.caches.clear(slot, first, last)
        self.drafter.clear(slot, first, last)

    def rehearse_draft(self, batch: int, length: int) -> None:
        """A drafter pass as `propose` runs it, over no request's tokens. Overwrites rows of slots 0 .. batch-1."""
        self.drafter.rehearse(batch, length, USUAL_CONTEXT)

    def rehearse_verify(self, batch: int, length: int) -> None:
        """A target pass as `verify` runs it. Its tokens differ, so that they choose as many experts as others would."""
        tokens = np.random.default_rng(length).integers(self.vocab_size, size=(batch, length))
        start = np.full(batch, min(USUAL_CONTEXT, self.capacity - length))
        rows = self.arrays.nodes(batch, length)
        self.arrays.decode(self.target, {"tokens": tokens, "start": start, "rows": rows})
        self.arrays.wait()

    def close(self) -> None:
        self.target.close()
        self.drafter.engine.close()

    def _caches(self, draft: bool) -> list[Caches]:
        return [self.target.caches, self.drafter.caches] if draft else [self.target.caches]
