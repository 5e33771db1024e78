"""A target and its drafter over one pool of cache slots.

Slots 0 .. n-1 belong to the n sequences being decoded, in order, so that a pass over all of them is a view of
the pool. Slot j of a cache row holds position j; what lies at or beyond a sequence's `committed` rows is
garbage and is overwritten by the next pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Protocol

import numpy as np

from dflash_trt.decoding.request import SamplingParams
from dflash_trt.decoding.sampling import TokenCounts
from dflash_trt.decoding.statistics import Statistics
from dflash_trt.decoding.stopping import StopChecker

Array = np.ndarray[Any, Any]


class Engine(Protocol):
    """Named buffers in, named buffers out. Outputs are views that the next pass overwrites."""

    def run(self, feeds: Mapping[str, Array], *, first_slot: int = 0) -> dict[str, Array]: ...
    def move_slot(self, source: int, target: int, rows: int) -> None: ...
    def close(self) -> None: ...


@dataclass
class InFlight:
    """One request in flight."""

    index: int
    prompt: Sequence[int]
    params: SamplingParams
    seed: int
    stop: StopChecker
    counts: TokenCounts | None
    started: float  # perf_counter at arrival
    statistics: Statistics = field(default_factory=Statistics)
    first_token_at: float = 0.0
    anchor: int = 0  # the newest token: decided, in no cache yet
    committed: int = 0  # rows of this sequence that the target's cache holds; the anchor's position
    fresh: int = 0  # how many of them the drafter has not seen


class EnginePair:
    """Runs passes; knows slots, positions and features, and nothing of sampling or stopping."""

    def __init__(
        self,
        target: Engine,
        drafter: Engine,
        *,
        slots: int,
        mask_token_id: int,
        feature_size: int,
        prefill_chunk: int,
    ) -> None:
        self.target, self.drafter, self.slots = target, drafter, slots
        self.mask_token_id, self.prefill_chunk = mask_token_id, prefill_chunk
        self.draft_time = self.verify_time = 0.0
        # Feature rows of the last verification, one line per slot: the drafter reads the first `fresh` of each.
        self._features: Array = np.zeros((0, 1, feature_size), np.float32)

    def prefill(self, tokens: Sequence[int], slot: int, *, draft: bool) -> Array:
        """Fill one slot from position 0 with whole chunks; returns the logits [V] of the last row.

        With `draft`, the drafter's cache takes in every chunk as well. `slot` must be the first free one.
        """
        # A copy of the others' features, since this pass reuses the memory they lie in, and an empty line for this one.
        none = np.zeros((1, *self._features.shape[1:]), np.float32)
        self._features = np.concatenate([self._features[:slot], none])
        for start in range(0, len(tokens), self.prefill_chunk):
            chunk = np.asarray(tokens[start : start + self.prefill_chunk], np.int64)[None]
            n = chunk.shape[1]
            feeds = {"tokens": chunk, "start": np.array([start]), "rows": np.array([[n - 1]])}
            out = self.target.run(feeds, first_slot=slot)
            if draft:
                feeds = {
                    "features": out["features"],
                    "n_features": np.array([n]),
                    "start": np.array([start]),
                    "block": np.full((1, 2), self.mask_token_id, np.int64),
                }
                self.drafter.run(feeds, first_slot=slot)
        logits: Array = out["logits"][0, 0]
        return logits

    def propose(self, active: Sequence[InFlight], length: int) -> Array:
        """One drafter pass: blocks [n, length] = [anchor, draft, ...] for the sequences in slots 0 .. n-1.

        The drafter also takes in what was committed since its last pass. At length 1 it does not run.
        """
        self.draft_time = 0.0
        block = np.full((len(active), length), self.mask_token_id, np.int64)
        block[:, 0] = [s.anchor for s in active]
        if length > 1:
            fresh = np.array([s.fresh for s in active])
            feeds = {
                "features": self._features[: len(active), : max(1, fresh.max())],
                "n_features": fresh,
                "start": np.array([s.committed for s in active]) - fresh,
                "block": block,
            }
            begin = perf_counter()
            block[:, 1:] = self.drafter.run(feeds)["draft_tokens"]
            self.draft_time = perf_counter() - begin
        return block

    def verify(self, active: Sequence[InFlight], block: Array) -> dict[str, Array]:
        """One target pass over the blocks: logits [n,S,V], and the graph's greedy accepted and next_token [n]."""
        rows = np.broadcast_to(np.arange(block.shape[1]), block.shape)
        feeds = {"tokens": block, "start": np.array([s.committed for s in active]), "rows": rows}
        begin = perf_counter()
        out = self.target.run(feeds)
        self.verify_time = perf_counter() - begin
        self._features = out["features"]
        return out

    def retire(self, active: list[InFlight], slot: int) -> None:
        """Take a sequence out; the last one moves into its slot."""
        last = active.pop()
        if slot < len(active):
            for engine in (self.target, self.drafter):
                engine.move_slot(len(active), slot, last.committed)
            self._features[slot] = self._features[len(active)]
            active[slot] = last
        self._features = self._features[: len(active)]
