"""Continuous batching: requests come and go between rounds. A round drafts a block, verifies it, keeps what is right.

Policy: each step decodes one round for every active request, then spends at most one chunk of prompt tokens on those
that wait, first come first served. So a long prompt holds the others up for one chunk a round, and no longer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from time import perf_counter
from typing import Any

import numpy as np

from dflash_trt.decoding.acceptance import accept
from dflash_trt.decoding.inflight import Emission, InFlight
from dflash_trt.decoding.leaving import Leaving
from dflash_trt.decoding.lengths import Lengths
from dflash_trt.decoding.metrics import Metrics
from dflash_trt.decoding.pair import Pair
from dflash_trt.decoding.request import FinishReason
from dflash_trt.decoding.sampling import log_probability, sample
from dflash_trt.decoding.slots import Slots

Array = np.ndarray[Any, Any]


class Scheduler:
    """Requests go in by `submit`, what they get comes out of `step`. Not thread-safe.

    Slots 0 .. n-1 belong to the active requests, in order, and slot n to the one being prefilled, if any.
    """

    def __init__(self, pair: Pair, max_batch_size: int, prefix_cache_bytes: int = 0) -> None:
        self.pair, self.max_batch_size = pair, max_batch_size
        self.slots = Slots(pair, prefix_cache_bytes)
        self.waiting: OrderedDict[InFlight, None] = OrderedDict()  # in the order they came
        self.active: list[InFlight] = []
        self.filling: InFlight | None = None
        self.metrics = Metrics()
        self._leaving = Leaving()

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.active or self.filling)

    def submit(self, request: InFlight) -> None:
        self.waiting[request] = None
        self._leaving.watch(request)

    def cancel(self, request: InFlight) -> None:
        """End a request that was submitted, in the next step; no effect on one that has ended."""
        self._leaving.cancel(request)

    def logits(self, ids: list[int]) -> Array:
        """The target's logits after these tokens, float32 [V]. Only when idle."""
        self.slots.occupy(0, [], {}, draft=False)
        for at in range(0, len(ids), self.pair.prefill_chunk):
            logits = self.pair.prefill(ids[at : at + self.pair.prefill_chunk], at, 0, draft=False)
        return np.array(logits)

    def forget(self) -> None:
        """Drop the rows kept of requests that have ended."""
        self.slots.forget()

    def clear(self) -> None:
        """Drop every request, wherever it is."""
        for request in [*self.waiting, *self.active, *([self.filling] if self.filling else [])]:
            self.cancel(request)
        self._give_up()

    def step(self, lengths: Lengths) -> list[Emission]:
        emissions = self._give_up()
        if self.active:
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
        drafting = [slot for slot, request in enumerate(active) if request.draft]
        block, logprobs = pair.propose(active, min(lengths.draft(len(active)), room) if drafting else 1)
        drafted = block.shape[1]
        if drafted > 1:
            if len(drafting) < len(active):
                logprobs = logprobs[drafting]
            block = block[:, : lengths.verify(logprobs)]
        out = pair.verify(active, block)
        counts, emissions = [], []
        for slot, request in enumerate(active):
            accepted, emission = _commit(pair, request, block[slot], out, slot)
            counts.append(accepted)
            emissions.append(emission)
        for slot in reversed(range(len(active))):
            if emissions[slot].finish_reason is not None:
                self._retire(slot)
        lengths.observe(
            batch=len(active),
            drafted=drafted,
            verified=block.shape[1],
            accepted=[counts[slot] for slot in drafting],
            offered=[min(active[slot].block_length or drafted, block.shape[1]) - 1 for slot in drafting],
            logprobs=logprobs if drafted > 1 else None,
            draft_seconds=pair.draft_time,
            verify_seconds=pair.verify_time,
        )
        self.metrics.observe_round(block.shape[1])
        host = perf_counter() - begin - pair.draft_time - pair.verify_time
        for request in active:
            request.statistics.draft_time += pair.draft_time
            request.statistics.verify_time += pair.verify_time
            request.statistics.host_time += host
        return emissions

    def _prefill(self, budget: int, emissions: list[Emission]) -> int:
        """One chunk of the request being prefilled, or of the next one; returns the tokens spent."""
        begin, slot = perf_counter(), len(self.active)
        request = self.filling
        if request is None:
            request = self.filling = self.waiting.popitem(last=False)[0]
            request.statistics.queue_time = begin - request.arrived
            live = {i: r.rows() for i, r in enumerate(self.active)}
            request.committed = self.slots.occupy(slot, request.prompt, live, draft=request.draft)
            request.statistics.num_cached_tokens = request.committed
        chunk = request.prompt[request.committed : request.committed + budget]
        logits = self.pair.prefill(chunk, request.committed, slot, draft=request.draft)
        request.committed += len(chunk)
        if request.committed == len(request.prompt):
            self.filling = None
            emission = _first_token(request, np.asarray(logits))
            if emission.finish_reason is None:
                self.active.append(request)
            else:
                self.slots.keep(slot, request.rows())
            emissions.append(emission)
        request.statistics.prefill_time += perf_counter() - begin
        return len(chunk)

    def _give_up(self) -> list[Emission]:
        """Take out what was cancelled or has run out of time."""
        now, emissions = perf_counter(), []
        for request in self._leaving.take(now):
            if request in self.active:
                self._retire(self.active.index(request))
            elif request is self.filling:
                self.filling = None
                self.slots.keep(len(self.active), request.rows())
            elif request in self.waiting:
                del self.waiting[request]
            else:  # not submitted yet
                continue
            reason: FinishReason = "cancelled" if request.cancelled else "timeout"
            if request.output:
                request.statistics.generation_time = now - request.first_token_at
            emissions.append(Emission(request, [], request.stop.abandon(reason), reason))
        return emissions

    def _retire(self, slot: int) -> None:
        """Take an active request out of its slot: the last active one moves there, the one in prefill closes up."""
        ended, last = self.active[slot], len(self.active) - 1
        self.slots.keep(slot, ended.rows())
        moved = self.active.pop()
        if slot != last:
            self.slots.move(last, slot, moved.committed)
            self.active[slot] = moved
        if self.filling is not None:
            self.slots.move(last + 1, last, self.filling.committed)


def _first_token(request: InFlight, logits: Array) -> Emission:
    token = sample(logits, request.params, request.seed, request.committed, request.counts)
    if request.counts is not None:
        request.counts.add(token)
    request.first_token_at = perf_counter()
    request.statistics.time_to_first_token = request.first_token_at - request.arrived
    return _emit(request, [token], logits[None])


def _commit(
    pair: Pair, request: InFlight, block: Array, out: Mapping[str, Any], slot: int
) -> tuple[int, Emission]:
    """The tokens of one verified block that are the target's own: the accepted drafts, and the one after them."""
    tokens = block[: request.block_length if request.draft else 1].tolist()
    accepted, token = int(out["accepted"][slot]), int(out["next_token"][slot])
    decided = out.get(
        "decided"
    )  # where the engine samples: which requests it has decided, whatever their parameters
    final = request.params.greedy and len(tokens) == len(block) if decided is None else decided[slot]
    if not final or token < 0:  # -1: no finite logits, which `accept` says
        position, logits = request.committed + 1, out["logits"][slot]
        accepted, token = accept(tokens, logits, request.params, request.seed, position, request.counts)
    request.statistics.record_round(len(tokens) - 1, accepted)
    if request.draft:
        pair.commit(request, slot, out, accepted + 1)
    request.committed += accepted + 1
    logits = out["logits"][slot] if request.params.logprobs else None
    return accepted, _emit(request, [*tokens[1 : accepted + 1], token], logits)


def _emit(request: InFlight, tokens: list[int], logits: Array | None) -> Emission:
    """Give out tokens; `logits` [n,V], if log-probabilities are wanted, has the row that decided each of them."""
    request.output += tokens
    kept, text, reason = request.stop.push(tokens)
    request.statistics.num_generation_tokens += kept
    if reason is not None:
        request.statistics.generation_time = perf_counter() - request.first_token_at
    logprobs = None
    if request.params.logprobs and logits is not None:
        logprobs = [log_probability(row, token) for row, token in zip(logits, tokens[:kept], strict=False)]
        request.logprobs += logprobs
    return Emission(request, tokens[:kept], text, reason, logprobs)
