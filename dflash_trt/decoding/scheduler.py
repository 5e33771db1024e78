"""Continuous batching: requests come and go between rounds. A round drafts a block, verifies it, keeps what is right.

Policy: each step decodes one round for every active request, then spends at most one chunk of prompt tokens on those
that wait, first come first served. So a long prompt holds the others up for one chunk a round, and no longer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import numpy as np

from dflash_trt.decoding.acceptance import Verdict
from dflash_trt.decoding.commit import commit, fail, first_token, leave, non_finite
from dflash_trt.decoding.draft import Verified
from dflash_trt.decoding.leaving import Leaving
from dflash_trt.decoding.length.policy import Lengths
from dflash_trt.decoding.metrics import Metrics
from dflash_trt.decoding.pair import Pair
from dflash_trt.decoding.request import Emission, Request
from dflash_trt.decoding.slots import Slots, Source

Array = np.ndarray[Any, Any]


class Scheduler:
    """Requests go in by `submit`, what they get comes out of `step`. Not thread-safe.

    In a round the n active requests have the slots 0 .. n-1, in order. Between rounds there may be gaps, where requests
    have ended: the next one to come is prefilled there, or else `_close_up` moves others in.
    """

    def __init__(self, pair: Pair, max_batch_size: int, prefix_cache_bytes: int = 0) -> None:
        self.pair, self.max_batch_size = pair, max_batch_size
        self.slots = Slots(pair, prefix_cache_bytes)
        self.waiting: OrderedDict[Request, None] = OrderedDict()  # in the order they came
        self.active: list[Request] = []
        self.filling: Request | None = None
        self.metrics = Metrics()
        self._leaving = Leaving()
        self.cut_short = False  # whether something began, and did not end, that must be `whole`

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.active or self.filling)

    def submit(self, request: Request) -> None:
        self.waiting[request] = None
        self._leaving.watch(request)

    def cancel(self, request: Request) -> None:
        """End a request that was submitted, in the next step; no effect on one that has ended."""
        self._leaving.cancel(request)

    def logits(self, ids: list[int]) -> Array:
        """The target's logits after these tokens, float32 [V]. Only when idle."""
        with self.whole():
            self.slots.occupy(0, Source(0, 0), draft=False)
            sound = True
            for at in range(0, len(ids), self.pair.prefill_chunk):
                logits, _ = self.pair.prefill(ids[at : at + self.pair.prefill_chunk], at, 0, draft=False)
                sound = sound and _finite(logits)
            found = np.array(logits)
            if not sound:
                self.pair.clear(0)
        return found

    def forget(self) -> None:
        """Drop the rows kept of requests that have ended."""
        self.slots.forget()

    def clear(self) -> None:
        """Drop every request, wherever it is; after a step that was cut short also all rows, which may be anything."""
        if self.cut_short:
            self._start_afresh()
            return
        with self.whole():
            for request in [*self.waiting, *self.active, *([self.filling] if self.filling else [])]:
                self.cancel(request)
            self._give_up()

    def step(self, lengths: Lengths) -> list[Emission]:
        """One round for the active requests, and a chunk of prompt tokens; what each request got.

        An error of one request ends that request. What this raises is an engine's failure, or an interruption: `clear`
        then drops every request and makes the scheduler whole.
        """
        self.cut_short = True
        emissions = self._step(lengths)
        self.cut_short = False
        return emissions

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Around what would leave slots and requests in disorder, were it cut short."""
        self.cut_short = True
        yield
        self.cut_short = False

    def _start_afresh(self) -> None:
        self.waiting, self.active, self.filling = OrderedDict(), [], None
        self._leaving = Leaving()
        self.forget()
        for slot in range(self.max_batch_size):
            self.pair.clear(slot)
        self.cut_short = False

    def _step(self, lengths: Lengths) -> list[Emission]:
        emissions = self._give_up()
        if self.active:
            self._close_up()
            emissions += self._round(lengths)
        budget = self.pair.prefill_chunk
        while budget > 0 and (self.filling or (self.waiting and len(self.active) < self.max_batch_size)):
            budget -= self._prefill(budget, emissions)
        running = len(self.active) + (self.filling is not None)
        self.metrics.observe_step(emissions, running, len(self.waiting), self.slots.counts)
        return emissions

    def _round(self, lengths: Lengths) -> list[Emission]:
        """One decode round for every active request."""
        begin, active, pair = perf_counter(), list(self.active), self.pair
        room = max([min(r.stop.remaining, r.block_length or r.stop.remaining) for r in active])
        if any(request.in_doubt for request in active):
            room = 1
        drafting = [slot for slot, request in enumerate(active) if request.draft]
        proposed = pair.propose(active, min(lengths.draft(len(active)), room) if drafting else 1)
        drafted = proposed.nodes
        draft = proposed.first(lengths.verify(proposed, drafting)) if drafted > 1 else proposed
        found, verified = pair.verify(active, draft), draft.nodes
        draft_time, verify_time = pair.draft_time, pair.verify_time
        emissions = list[Emission]()
        # The policy learns of the drafts that were judged.
        judged, accepted, offered = list[int](), list[int](), list[int]()
        for slot, request in enumerate(active):
            drafts = request.draft
            verdict, emission = commit(request, draft, found, slot)
            self._settle(request, verdict, emission, found)
            if drafts and verdict.ok and found.drafts_finite[slot]:
                judged.append(slot)
                accepted.append(len(verdict.path))
                offered.append(min(request.block_length or drafted, verified) - 1)
            if emission.finish_reason is not None:
                self._retire(request)
            if emission.token_ids or emission.finish_reason is not None:
                emissions.append(emission)
        lengths.observe(
            batch=len(active),
            drafted=drafted,
            verified=verified,
            accepted=accepted,
            offered=offered,
            logprobs=proposed.logprobs_of(judged) if drafted > 1 else None,
            draft_seconds=draft_time,
            verify_seconds=verify_time,
        )
        self.metrics.observe_round(verified)
        host = perf_counter() - begin - draft_time - verify_time
        for request in active:
            statistics = request.statistics
            statistics.draft_time += draft_time
            statistics.verify_time += verify_time
            statistics.host_time += host
        return emissions

    def _settle(self, request: Request, verdict: Verdict, emission: Emission, found: Verified) -> None:
        """Make the slot of a request hold what was decided for it, and behind that nothing that is not finite."""
        slot = request.slot
        request.in_doubt = not verdict.ok
        if emission.error is not None and not verdict.ok:
            request.sound = False
            return
        if not found.drafts_finite[slot]:
            self._stop_drafting(request)
        # All that was decided, without the new anchor.
        nodes = [0, *verdict.path][: len(verdict.path) + verdict.ok]
        if nodes:
            self.pair.commit(request, slot, nodes)
        request.committed += len(nodes)
        if found.finite is not None and not found.finite[slot].all():
            self.pair.clear(slot, request.committed)

    def _prefill(self, budget: int, emissions: list[Emission]) -> int:
        """One chunk of the request being prefilled, or of the next one; returns the tokens spent."""
        begin, request = perf_counter(), self.filling
        if request is None:
            request = self.filling = self.waiting.popitem(last=False)[0]
            request.statistics.queue_time = begin - request.arrived
            self._occupy(request, budget)
        slot = request.slot
        chunk = request.prompt[request.committed : request.committed + budget]
        logits, drafts_finite = self.pair.prefill(chunk, request.committed, slot, draft=request.draft)
        request.committed += len(chunk)
        request.sound = _finite(logits)
        if not drafts_finite:
            self._stop_drafting(request)
        if not request.sound or request.committed == len(request.prompt):
            self.filling = None
            emission = (
                first_token(request, np.asarray(logits))
                if request.sound
                else fail(request, non_finite(request.committed))
            )
            if emission.finish_reason is None:
                self.active.append(request)
            else:
                self._keep(request)
            emissions.append(emission)
        request.statistics.prefill_time += perf_counter() - begin
        return len(chunk)

    def _stop_drafting(self, request: Request) -> None:
        """From now on this request takes no drafts."""
        request.draft = False
        self.pair.stop_drafting(request.slot)

    def _occupy(self, request: Request, budget: int) -> None:
        """Find a slot for the next request to be prefilled, and what it can take over."""
        source = self._source(request)
        if (
            len(request.prompt) - source.length > budget
        ):  # rounds go on meanwhile, which need the slots in front
            self._close_up()
            source = self._source(request)
        self.slots.occupy(request.slot, source, draft=request.draft)
        request.committed = request.statistics.num_cached_tokens = source.length

    def _source(self, request: Request) -> Source:
        taken = {each.slot for each in self.active}
        request.slot = min(set(range(self.max_batch_size)) - taken)
        return self.slots.find(request.slot, request.prompt, self.active, draft=request.draft)

    def _give_up(self) -> list[Emission]:
        """Take out what was cancelled or has run out of time."""
        now, emissions = perf_counter(), []
        for request in self._leaving.take(now):
            if request in self.active:
                self._retire(request)
            elif request is self.filling:
                self.filling = None
                self._keep(request)
            elif request in self.waiting:
                del self.waiting[request]
            else:  # not submitted yet
                continue
            emissions.append(leave(request, "cancelled" if request.cancelled else "timeout"))
        return emissions

    def _retire(self, ended: Request) -> None:
        self.active.remove(ended)
        self._keep(ended)

    def _keep(self, ended: Request) -> None:
        """The rows of a request that has ended stay for others, if they are sound."""
        if ended.sound:
            self.slots.keep(ended)
        else:
            self.pair.clear(ended.slot)

    def _close_up(self) -> None:
        """Let the active requests have the first slots, with as few copies as there are gaps."""
        if all(request.slot == slot for slot, request in enumerate(self.active)):
            return
        taken = {request.slot for request in self.active}
        gaps = [slot for slot in range(len(self.active)) if slot not in taken]
        behind = [request for request in self.active if request.slot >= len(self.active)]
        for slot, request in zip(gaps, behind, strict=True):
            self.slots.move(request, slot)
        self.active.sort(key=lambda request: request.slot)


def _finite(logits: Any) -> bool:
    """Whether there is a finite largest value, and no NaN."""
    return bool(np.isfinite(np.asarray(logits).max()))
