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
from dflash_trt.decoding.leaving import Leaving
from dflash_trt.decoding.length.policy import Lengths
from dflash_trt.decoding.metrics import Metrics
from dflash_trt.decoding.pair import Pair, Verified
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
        with self.whole():
            return self._step(lengths)

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
        room = max(min(r.stop.remaining, r.block_length or r.stop.remaining) for r in active)
        if any(request.in_doubt for request in active):
            room = 1
        drafting = [slot for slot, request in enumerate(active) if request.draft]
        draft = pair.propose(active, min(lengths.draft(len(active)), room) if drafting else 1)
        drafted, logprobs = draft.nodes, None
        if drafted > 1:
            logprobs = draft.logprobs_of(drafting)
            draft = draft.first(lengths.verify(draft, drafting))
        found = pair.verify(active, draft)
        verdicts, emissions = [], []
        for slot, request in enumerate(active):
            verdict, emission = commit(request, draft, found, slot)
            verdicts.append(verdict)
            emissions.append(emission)
        # The policy learns of the drafts that were judged.
        judged = [i for i, slot in enumerate(drafting) if verdicts[slot].ok and found.drafts_finite[slot]]
        if len(judged) < len(drafting):
            drafting = [drafting[i] for i in judged]
            logprobs = None if logprobs is None else logprobs[judged]
        offered = [min(active[slot].block_length or drafted, draft.nodes) - 1 for slot in drafting]
        for slot, (verdict, emission) in enumerate(zip(verdicts, emissions, strict=True)):
            self._settle(slot, verdict, emission, found)
        for request, emission in zip(active, emissions, strict=True):
            if emission.finish_reason is not None:
                self._retire(request)
        emissions = [each for each in emissions if each.token_ids or each.finish_reason is not None]
        lengths.observe(
            batch=len(active),
            drafted=drafted,
            verified=draft.nodes,
            accepted=[len(verdicts[slot].path) for slot in drafting],
            offered=offered,
            logprobs=logprobs,
            draft_seconds=pair.draft_time,
            verify_seconds=pair.verify_time,
        )
        self.metrics.observe_round(draft.nodes)
        host = perf_counter() - begin - pair.draft_time - pair.verify_time
        for request in active:
            request.statistics.draft_time += pair.draft_time
            request.statistics.verify_time += pair.verify_time
            request.statistics.host_time += host
        return emissions

    def _settle(self, slot: int, verdict: Verdict, emission: Emission, found: Verified) -> None:
        """Make a slot hold what was decided for its request, and behind that nothing that is not finite."""
        request = self.active[slot]
        request.in_doubt = not verdict.ok
        if emission.error is not None and not verdict.ok:
            request.sound = False
            return
        if not found.drafts_finite[slot]:
            self.pair.stop_drafting(request, slot)
        nodes = [0, *verdict.path][
            : len(verdict.path) + verdict.ok
        ]  # all that was decided but the new anchor's
        if request.draft and nodes:
            self.pair.commit(request, slot, found, nodes)
        request.committed += len(nodes)
        if not found.finite[slot].all():
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
            self.pair.stop_drafting(request, slot)
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

    def _occupy(self, request: Request, budget: int) -> None:
        """Find a slot for the next request to be prefilled, and in it the rows that it can take over."""
        source = self._source(request)
        if (
            len(request.prompt) - source.length > budget
        ):  # rounds go on meanwhile, which need the slots in front
            self._close_up()
            source = self._source(request)
        self.slots.occupy(request.slot, source, draft=request.draft)
        request.committed = request.statistics.num_cached_tokens = source.length

    def _source(self, request: Request) -> Source:
        live = {each.slot: each.contents() for each in self.active}
        request.slot = min(set(range(self.max_batch_size)) - set(live))
        return self.slots.find(request.slot, request.prompt, live, draft=request.draft)

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
            self.slots.keep(ended.slot, ended.contents())
        else:
            self.pair.clear(ended.slot)

    def _close_up(self) -> None:
        """Let the active requests have the first slots, with as few copies as there are gaps."""
        taken = {request.slot for request in self.active}
        gaps = [slot for slot in range(len(self.active)) if slot not in taken]
        behind = [request for request in self.active if request.slot >= len(self.active)]
        for slot, request in zip(gaps, behind, strict=True):
            self.slots.move(request.slot, slot, request.committed)
            request.slot = slot
        self.active.sort(key=lambda request: request.slot)


def _finite(logits: Any) -> bool:
    """Whether there is a finite largest value, and no NaN."""
    return bool(np.isfinite(np.asarray(logits).max()))
