"""The drafter of a pair: its passes, and the features that they have not read.

Nothing here depends on the drafter's kind. Every kind's graph has the inputs and outputs of docs/graphs.md. Inputs
are features of committed tokens and a block. Outputs are drafted tokens and their log-probabilities.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dflash_trt.decoding.arrays import Arrays, Following, Runner
from dflash_trt.decoding.caches import Caches, Snapshot
from dflash_trt.decoding.draft import Draft
from dflash_trt.decoding.request import NOBODY, Request
from dflash_trt.logs import warn_once

_log = logging.getLogger(__name__)
_NEVER = -100.0  # the log-probability of a node that no request has
# A pass with drafts may read so many features of each request: what rounds without drafts leave, but no prompts.
_FEW = 32
# Tokens in the caches during dummy passes.
USUAL_CONTEXT = 128


@dataclass(frozen=True, slots=True)
class _Waiting:
    """The content of a snapshot that the drafter had not read to its end: rows, if any, then features [n, F]."""

    rows: Snapshot | None
    features: Any


class Drafter:
    """For each slot, the drafter has read the first `seen` tokens, and `unread` more wait as features. They are read
    when drafts are asked for, or no more can wait.

    Its methods of `Caches` copy both: rows of what was read, and features of what was not.

    runner: None for a target without a drafter. Then `propose` gives anchors alone, and no request `takes_drafter`.
    """

    def __init__(
        self,
        runner: Runner | None,
        arrays: Arrays,
        *,
        slots: int,
        kept_slots: int,
        capacity: int,
        mask_token_id: int,
        prefill_chunk: int,
    ) -> None:
        """kept_slots: after the others, in which no features wait."""
        self.runner, self.arrays, self.slots = runner, arrays, slots
        self.capacity, self.mask_token_id, self.prefill_chunk = capacity, mask_token_id, prefill_chunk
        self.seen, self.unread = [0] * (slots + kept_slots), [0] * (slots + kept_slots)
        self.most_read = 0  # features of a slot that the last `propose` read
        self.passes: list[tuple[Any, Any]] = []  # start and end of each pass of the last draft
        self._blocks: Any = None  # of that pass

    @property
    def present(self) -> bool:
        """Whether there is a drafter."""
        return self.runner is not None

    @property
    def caches(self) -> Caches:
        """The runner's."""
        assert self.runner is not None
        return self.runner.caches

    def close(self) -> None:
        """Free the runner."""
        if self.runner is not None:
            self.runner.close()

    def take(self, features: Any, start: int, slot: int) -> list[Any]:
        """Take the features [1, n, F] of a prompt's positions start, start + 1, ... They wait where they may. Returns
        truth values for `readable`: whether the numbers of what was read are finite.
        """
        if not self.arrays.prompts_wait:
            return self.read(features, [features.shape[1]], [start], slot)
        count, finite = features.shape[1], list[Any]()
        if self.unread[slot] + count > self.arrays.most_unread:
            finite.append(self.catch_up(slot))
        self.add_features(slot, {slot: features[0]}, range(count))
        return finite

    def read(self, features: Any, counts: Sequence[int], starts: Sequence[int], first_slot: int) -> list[Any]:
        """Write rows of positions starts[i], starts[i] + 1, ... from the first counts[i] features of [n, S, F], in
        slots side by side. Returns, for `readable`, whether the log-probabilities of each are finite: those of two
        block rows without other use. A runner need not compute them here. What is not checked with a prompt is checked
        with the first drafts after it.
        """
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        self.seen[first_slot : first_slot + len(ends)] = ends
        feeds = {
            "features": features,
            "n_features": np.array(counts),
            "start": np.array(starts),
            "block": np.full((len(ends), 2), self.mask_token_id),
        }
        logprobs = self.arrays.prefill(self.runner, feeds, first_slot).get("draft_logprobs")
        return [] if logprobs is None else [self.arrays.finite(array) for array in logprobs]

    def propose(self, active: Sequence[Request], length: int) -> Draft:
        """Run one pass over slots 0 .. n-1: chains of `length` nodes.

        It also reads the tokens committed since the last pass. At length 1 there is no pass, unless no more features
        can wait.
        """
        n, arrays = len(active), self.arrays
        if self.runner is None:
            length = 1
        arrays.start_round(active)
        self.passes = []
        self.most_read = 0 if length == 1 else max(self.unread[:n])
        anchors, committed = [request.anchor for request in active], [request.committed for request in active]
        width, draft = max(length, 2), None
        if self._must_read(n, length):
            # A pass writes as many rows for each sequence as for the one with the most unread ones. They must fit for
            # all, and should be few.
            room = min(self.capacity - 1 - width - max(committed), max(self.prefill_chunk // n, _FEW))
            for slot in [slot for slot in range(n) if self.unread[slot] > room]:
                begin = arrays.now()
                if not self.catch_up(slot):
                    self.give_up(active[slot])
                self.passes.append((begin, arrays.now()))
            if self._must_read(n, length):
                draft = self._pass(arrays.blocks(anchors, width, self.mask_token_id), committed)
        return draft if draft is not None and length > 1 else arrays.alone(anchors, self.unread[:n])

    def can_follow(self, active: Sequence[Request], length: int) -> bool:
        """Whether `follow` can come after a draft of this length whose features are not counted yet: in a round without
        a pass, there must be room for them and for its own.
        """
        waiting = [self.unread[slot] for slot, request in enumerate(active) if request is not NOBODY]
        return length > 1 or max(waiting) + 2 <= self.arrays.most_unread

    def follow(
        self,
        following: Following,
        active: Sequence[Request],
        begun: Draft,
        texts: Mapping[int, Sequence[int]],
    ) -> Draft:
        """The draft of a round that follows one of as many nodes: its pass, if any, reads what that round commits."""
        self.passes, self.most_read = [], 0
        new = following.prepare(active, begun, texts, self.unread)
        if begun.nodes == 1:
            return following.anchors()
        for slot in new:
            self.most_read = max(self.most_read, self.settle(slot))
        begin = self.arrays.now()
        out = following.run_again(self.runner)
        self.passes.append((begin, self.arrays.now()))
        return self.arrays.drafts(self._blocks, out["draft_tokens"], out["draft_logprobs"])

    def settle(self, slot: int) -> int:
        """Count the unread features of a slot as read, by the pass of a round that follows. Returns how many."""
        count, self.unread[slot] = self.unread[slot], 0
        self.seen[slot] += count
        return count

    def _must_read(self, count: int, length: int) -> bool:
        return length > 1 or max(self.unread[:count]) >= self.arrays.most_unread

    def _pass(self, blocks: Any, committed: Sequence[int]) -> Draft:
        """Read what waits, and draft."""
        n, arrays = len(committed), self.arrays
        unread = self.unread[:n]
        feeds = {
            "features": arrays.unread_features(unread),
            "n_features": np.array(unread),
            "start": np.array([end - count for end, count in zip(committed, unread, strict=True)]),
            "block": blocks,
        }
        self._blocks, begin = blocks, arrays.now()
        out = arrays.decode(self.runner, feeds)
        self.passes.append((begin, arrays.now()))
        self.seen[:n] = [seen + count for seen, count in zip(self.seen, unread, strict=False)]
        self.unread[:n] = [0] * n
        if self.most_read > _FEW and arrays.prompts_wait:  # prompts, whose memory is given back
            for slot in range(n):
                arrays.clear_unread(slot)
        return arrays.drafts(blocks, out["draft_tokens"], out["draft_logprobs"])

    def fit(self, active: Sequence[Request], proposed: Draft, most: int) -> Draft:
        """A chain of up to `most` nodes whose tokens fit the structures of their requests.

        A structure cuts what it refuses, and what it forces is drafted for free, with probability 1.
        No token is decided here: a draft is accepted if it equals the target's own choice. A draft on a device is read
        to the host.
        """
        tokens, logprobs = np.array(proposed.tokens), np.array(proposed.logprobs)
        own_lengths = [proposed.length_of(slot, request) for slot, request in enumerate(active)]
        rows = zip(tokens, logprobs, own_lengths, strict=True)
        drafts = [(row[1:n].tolist(), odds[: n - 1].tolist()) for row, odds, n in rows]
        copied = dict(proposed.copied)
        for slot, request in enumerate(active):
            if request.takes_drafts and request.history is not None and request.history.structure is not None:
                # All accepted nodes must find room after the features that wait for the drafter.
                room = self.arrays.most_unread - self.unread[slot]
                most_own = min(request.block_length or most, most, room) - 1
                taken, forced = request.history.structure.follow(drafts[slot][0], most_own)
                odds = [0.0 if f else float(logprobs[slot, i]) for i, f in enumerate(forced)]
                drafts[slot] = taken, odds
                if slot in copied:
                    copied[slot] = {
                        node for node in copied[slot] if node <= len(taken) and not forced[node - 1]
                    }
        lengths = {slot: 1 + len(taken) for slot, (taken, _) in enumerate(drafts)}
        nodes = max(lengths.values())
        fitted = np.repeat(tokens[:, :1], nodes, axis=1)  # any token will do where no draft is
        fitted_odds = np.full((len(active), nodes - 1), _NEVER, np.float32)
        for slot, (taken, odds) in enumerate(drafts):
            fitted[slot, 1 : 1 + len(taken)] = taken
            fitted_odds[slot, : len(taken)] = odds
        return replace(self.arrays.chains(fitted, fitted_odds), copied=copied, lengths=lengths)

    def add_features(self, slot: int, features: Any, nodes: Sequence[int]) -> None:
        """Keep the features, of those [N, F] by slot, of accepted nodes. Each is the child of the previous one."""
        self.arrays.add_unread(slot, self.unread[slot], features, nodes)
        self.unread[slot] += len(nodes)

    def dummy_pass(self, batch: int, length: int, context: int = USUAL_CONTEXT) -> None:
        """Run a pass as `propose` does, without requests. Overwrites rows of slots 0 .. batch-1."""
        features = self.arrays.unread_features([length] * batch)
        feeds = {
            "features": features,
            "n_features": np.full(batch, length),
            "start": np.full(batch, min(context, self.capacity - features.shape[1] - length)),
            "block": np.full((batch, length), self.mask_token_id),
        }
        self.arrays.decode(self.runner, feeds)
        self.arrays.wait()

    def cut(self, slot: int, length: int) -> None:
        """Forget what follows the first `length` tokens of a slot."""
        self.seen[slot] = min(self.seen[slot], length)
        self.unread[slot] = min(self.unread[slot], length - self.seen[slot])

    def cut_lengths(self, slot: int) -> Sequence[int]:
        """As of `Caches`. Where prompts wait, every length."""
        if self.arrays.prompts_wait:
            return range(1, self.seen[slot] + self.unread[slot] + 1)
        return self.caches.cut_lengths(slot, self.seen[slot])

    def kept_bytes(self, length: int) -> int:
        most = self.caches.kept_bytes(length)
        return max(most, length * self.arrays.feature_bytes) if self.arrays.prompts_wait else most

    def copy(self, source: int, target: int, length: int) -> None:
        self._give(self.caches.copy, source, target, length)

    def move(self, source: int, target: int, length: int) -> None:
        self._give(self.caches.move, source, target, length)

    def _give(self, rows: Callable[[int, int, int], None], source: int, target: int, length: int) -> None:
        """Give a slot what another one has read, by `rows` of the caches, and what waits there."""
        seen = min(self.seen[source], length)
        rows(source, target, seen)
        self.seen[target], self.unread[target] = seen, 0
        if max(source, target) < self.slots:
            self.arrays.copy_unread(source, target, length - seen)
            self.unread[target] = length - seen

    def mark(self, slot: int, length: int, shortest: int) -> None:
        seen = min(self.seen[slot], length)
        self.caches.mark(slot, seen, min(shortest, seen))

    def keep(self, slot: int, start: int, stop: int, shortest: int) -> Snapshot:
        seen = self.seen[slot]
        if stop <= seen:
            return self.caches.keep(slot, start, stop, shortest)
        rows = self.caches.keep(slot, start, seen, shortest) if start < seen else None
        features = self.arrays.unread_features_of(slot, max(start - seen, 0), stop - seen)[0].copy()
        size = features.nbytes + (rows.size if rows is not None else 0)
        return Snapshot(start, stop, range(start + 1, stop + 1), _Waiting(rows, features), size)

    def lacks(self, slot: int, kept: Snapshot, shortest: int) -> bool:
        """A slot may have rows where only features were kept. So no page with rows follows one without."""
        return isinstance(kept.data, _Waiting) or self.caches.lacks(slot, kept, shortest)

    def restore(self, slot: int, kept: Sequence[Snapshot], length: int) -> None:
        parts = [
            snapshot.data if isinstance(snapshot.data, _Waiting) else _Waiting(snapshot, None)
            for snapshot in kept
        ]
        rows = [snapshot.rows for snapshot in parts if snapshot.rows is not None]
        seen = min(rows[-1].stop, length) if rows else 0
        if seen:
            self.caches.restore(slot, rows, seen)
        self.seen[slot], self.unread[slot] = seen, 0
        if seen < length:
            features = np.concatenate(
                [snapshot.features for snapshot in parts if snapshot.features is not None]
            )
            self.add_features(slot, {slot: features}, range(length - seen))

    def clear(self, slot: int, first: int = 0) -> None:
        """Set the positions of a slot from `first` on to 0. If these are all, its unread features are removed too."""
        if self.runner is None:
            return
        self.caches.clear(slot, first)
        if first == 0:
            self.cut(slot, 0)
            if slot < self.slots:
                self.arrays.clear_unread(slot)

    def give_up(self, request: Request) -> None:
        """Go on without drafts for a request, whose features or drafts were not finite. A warning says so once."""
        request.takes_drafter = False
        self.clear(request.slot)
        warn_once(
            _log,
            "drafts have numbers that are not finite (NaN, or infinite), so requests that meet them go on without "
            "them; build the drafter with a wider precision, such as --precision drafter=bf16",
        )

    def catch_up(self, slot: int) -> bool:
        """Read the unread features of a slot in chunks. Whether all numbers are finite: of the features, too, as rows
        of layers with a window need not see all of a chunk before them. Raises MemoryError, and has read nothing, if a
        pass finds no memory.
        """
        seen, unread, finite = self.seen[slot], self.unread[slot], list[Any]()
        try:
            self.unread[slot] = 0
            with self.arrays.stream():
                for at in range(0, unread, self.prefill_chunk):
                    part = self.arrays.unread_features_of(slot, at, min(at + self.prefill_chunk, unread))
                    read = self.read(part, [part.shape[1]], [self.seen[slot]], slot)
                    finite += [self.arrays.finite(part), *read]
                return all(self.arrays.readable(*finite))
        except MemoryError:
            self.seen[slot], self.unread[slot] = seen, unread
            raise
