"""Continuous batching: requests join and leave between steps.

A step is a round, then chunks of waiting prompts, at most `prefill_chunk` tokens together, so a long prompt delays the
others by that many tokens per step. A round drafts a block for every active request, verifies it and commits tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import numpy as np

from dflash_trt.decoding.acceptance import Verdict, decide, fail, first_token, leave, non_finite, read_prompt
from dflash_trt.decoding.draft import Draft, Verified, couple
from dflash_trt.decoding.length.policy import Lengths, RoundDone
from dflash_trt.decoding.metrics import Metrics
from dflash_trt.decoding.pair import Pair
from dflash_trt.decoding.params import RequestOptions, SamplingParams
from dflash_trt.decoding.request import Emission, Queue, Request
from dflash_trt.decoding.slots import Reuse, Slots

Array = np.ndarray[Any, Any]


@dataclass(slots=True)
class _Launched:
    """A round whose passes were started. begin: a time of perf_counter."""

    begin: float
    active: list[Request]
    proposed: Draft
    draft: Draft
    outputs: Any


class Scheduler:
    """Requests enter by `submit`, and `step` returns their results. `DecodingLoop` documents the methods.

    In a round the n active requests have the slots 0 .. n-1, in order. Between rounds, ended requests may leave gaps.
    The next request is prefilled in a gap, or `_close_up` moves active requests into the gaps.
    """

    def __init__(self, pair: Pair, prefix_cache_bytes: int = 0) -> None:
        self.pair = pair
        self.slots = Slots(pair, prefix_cache_bytes)
        self.waiting = Queue()
        self.active: list[Request] = []
        self.filling: Request | None = None  # its prompt has been read in part
        self.metrics = Metrics()
        self.cut_short = False
        self._held: list[Emission] = []  # of the last round, for `parts`

    @property
    def max_batch_size(self) -> int:
        return self.pair.slots if self.pair.rule.any_batch else 1

    @property
    def most_tree_nodes(self) -> int:
        pair, rule = self.pair, self.pair.rule
        if not pair.trees or not rule.any_tree:
            return 0
        return min([pair.arrays.most_nodes, pair.capacity // 2, *rule.widths[-1:]])

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.active or self.filling)

    def check(self, options: RequestOptions, params: SamplingParams) -> None:
        """Every option and parameter is supported."""

    def submit(self, request: Request) -> None:
        request.takes_drafter = request.takes_drafter and self.pair.drafter.present
        self.waiting.add(request)

    def cancel(self, request: Request) -> None:
        self.waiting.cancel(request)

    def logits(self, ids: list[int]) -> Array:
        self.cut_short = True
        self.slots.occupy(0, Reuse(0, 0), draft=False)
        whole, most = True, self.pair.prefill_chunk
        for at in range(0, len(ids), most):
            logits, sound, _ = self.pair.prefill(ids[at : at + most], at, 0, draft=False)
            whole = whole and sound and _finite(logits)
        last = np.array(logits[-1])
        if not whole:
            self.pair.clear(0)
        self.cut_short = False
        return last

    def forget(self) -> None:
        self.slots.forget()

    def clear(self) -> None:
        """Drop every request. After an interrupted step also drop all rows, because they may be anything."""
        self._held = []
        if self.cut_short:
            self.waiting, self.active, self.filling = Queue(), [], None
            self.forget()
            for slot in range(self.max_batch_size):
                self.pair.clear(slot)
        else:
            self.cut_short = True
            for request in [*self.waiting, *self._running]:
                self.cancel(request)
            self._leave_early()
        self.cut_short = False

    def close(self) -> None:
        self.pair.close()

    def step(self, lengths: Lengths) -> list[Emission]:
        """The results of one round for the active requests, and of at most `prefill_chunk` tokens of waiting prompts.

        An error of one request ends that request. This raises only an engine's failure or an interruption. Then
        `clear` drops every request and repairs the scheduler.
        """
        with self.pair.arrays.stream():
            return [emission for part in self._parts(lengths, hold=False) for emission in part]

    def parts(self, lengths: Lengths) -> Iterator[list[Emission]]:
        """Do one `step`, and give the results as they come: those of the round, then each first token.

        A GPU would wait while a consumer takes the results of a round. So these come in the next step instead, once its
        passes are under way, unless prompts are read before or no request is left.

        A consumer that does not take all parts leaves the step cut short.
        """
        return self._parts(lengths, hold=self.pair.arrays.asynchronous)

    def _parts(self, lengths: Lengths, *, hold: bool) -> Iterator[list[Emission]]:
        self.cut_short = True
        emissions, self._held = self._held + self._leave_early(), []
        budget = self.pair.prefill_chunk
        if self.active:
            self._close_up()
            try:
                with self.pair.arrays.stream():
                    launched = self._launch(lengths)
            finally:  # a failure comes after the results before it
                if hold and emissions:
                    yield self._counted(emissions)
                    emissions = []
            with self.pair.arrays.stream():
                emissions += self._decide(launched, lengths)
            if hold and self.active and not self._reads_on(budget):
                self._held, self.cut_short = emissions, False
                return
        while budget > 0 and self._reads_on(budget):
            if emissions:
                yield self._counted(emissions)
                emissions = []
            budget -= self._prefill(budget, emissions)
        yield self._counted(emissions)
        self.cut_short = False

    def _launch(self, lengths: Lengths) -> _Launched:
        """Draft for every active request, and start the target's pass over the drafts."""
        begin, active = perf_counter(), list(self.active)
        proposed, draft = self._draft(active, lengths)
        return _Launched(begin, active, proposed, draft, self.pair.start(active, draft))

    def _decide(self, launched: _Launched, lengths: Lengths) -> list[Emission]:
        """Commit the tokens that the target decides."""
        active, proposed, draft = launched.active, launched.proposed, launched.draft
        verified = self.pair.verified(active, draft, launched.outputs)
        verdicts, emissions = list[Verdict](), list[Emission]()
        for request in active:
            verdict, emission = self._commit(request, draft, verified)
            verdicts.append(verdict)
            if emission.token_ids or emission.finish_reason is not None:
                emissions.append(emission)
        judged = [slot for slot, request in enumerate(active) if request.takes_drafts and verdicts[slot].ok]
        decided = [active[slot].output[-len(verdicts[slot].path) - 1 :] for slot in judged]
        self.metrics.observe_round(draft.nodes)
        draft_time, verify_time = self.pair.drafter.seconds, self.pair.verify_time
        host_time = perf_counter() - launched.begin - draft_time - verify_time
        ended = sum(request.stop.finish_reason is not None for request in active)
        times = draft_time, verify_time, host_time
        read = self.pair.drafter.most_read
        lengths.observe(RoundDone(active, proposed, draft.nodes, judged, decided, *times, ended, read))
        for request in active:
            request.statistics.draft_time += draft_time
            request.statistics.verify_time += verify_time
            request.statistics.host_time += host_time
        return emissions

    def _draft(self, active: Sequence[Request], lengths: Lengths) -> tuple[Draft, Draft]:
        """What the drafter proposes, and what is verified of it: cut to a structure, or grown to a tree."""
        drafting = [slot for slot, request in enumerate(active) if request.takes_drafts]
        room = max([min(r.stop.remaining, r.block_length or r.stop.remaining) for r in active])
        if any(request.in_doubt for request in active):
            room = 1
        length = min(lengths.draft(active), room) if drafting else 1
        proposed = couple(self.pair.drafter.propose(active, length), active)
        structured = any(request.structured for request in active)
        draft = proposed
        if room > 1:
            draft = lengths.select(proposed, active, drafting, 1 if structured else self._most_nodes)
        for slot in drafting:  # without the drafter, no draft of its counts
            if not active[slot].takes_drafter and slot not in draft.copied:
                draft.lengths[slot] = 1
        if draft.replaced:
            self.pair.arrays.replace(draft)
        if draft.nodes > proposed.nodes == 1:
            # All accepted nodes must find room after the features that wait.
            drafter, most = self.pair.drafter, self.pair.arrays.most_unread
            rooms = [most - drafter.unread[slot] for slot, each in enumerate(active) if each.takes_drafter]
            draft = draft.first(min([room, *rooms]))
        if structured:
            draft = self.pair.drafter.fit(active, draft, min(lengths.most, room))
        elif draft.copied and not draft.replaced and draft.parents is None:
            chains = self.pair.arrays.chains(draft.tokens, draft.logprobs)
            draft = replace(chains, copied=draft.copied, lengths=draft.lengths)
        return proposed, draft

    @property
    def _most_nodes(self) -> int:
        """The most nodes that a round may verify: rows for them follow the committed ones, and one for a sink.

        The requests that draft have limits of their own.
        """
        if not self.most_tree_nodes:
            return 1
        own = [self.most_tree_nodes, *(r.options.tree_nodes for r in self.active if r.takes_drafts)]
        room = self.pair.capacity - 1 - max(r.committed for r in self.active)
        return min([room, *(nodes for nodes in own if nodes is not None)])

    def _commit(self, request: Request, draft: Draft, verified: Verified) -> tuple[Verdict, Emission]:
        """Decide a request's tokens. Its slot then holds them, and only finite numbers after them."""
        slot = request.slot
        verdict, emission = decide(request, draft, verified, slot)
        request.in_doubt = not verdict.ok
        if emission.error is not None and not verdict.ok:
            request.sound = False
        else:
            if not verified.drafts_finite[slot]:
                self.pair.drafter.give_up(request)
            nodes = [0, *verdict.path]  # of all decided tokens but the new anchor
            if not verdict.ok:
                nodes.pop()
            if nodes:
                self.pair.commit(request, slot, nodes)
            request.committed += len(nodes)
            if verified.finite is not None and not verified.finite[slot].all():
                self.pair.clear(slot, request.committed)
        if emission.finish_reason is not None:
            self._release(request)
        return verdict, emission

    def _reads_on(self, budget: int) -> bool:
        """Whether this step reads more of the prompts, with so many tokens left."""
        exact, request = not self.pair.rule.any_cut, self.filling
        if request is not None:
            return not exact or self._chunk_end(request, budget) - request.committed <= budget
        if not self.waiting or len(self.active) >= self.max_batch_size:
            return False
        return not exact or budget == self.pair.prefill_chunk or len(self.waiting.first.prompt) <= budget

    def _chunk_end(self, request: Request, budget: int) -> int:
        """Where the next chunk of a prompt ends. If rows depend on the cut, that is a multiple of the longest chunk, as
        the end of a reused prefix is, whatever else the step reads.
        """
        start, most = request.committed, self.pair.prefill_chunk
        if request.params.prompt_logprobs:
            most = min(most, self.pair.arrays.most_prompt_rows)
        return min(start + (min(budget, most) if self.pair.rule.any_cut else most), len(request.prompt))

    def _prefill(self, budget: int, emissions: list[Emission]) -> int:
        """Run one chunk of the request in prefill, or of the next one. Returns the tokens spent."""
        begin, request = perf_counter(), self.filling
        if request is None:
            request = self.filling = self.waiting.pop()
            request.statistics.queue_time = begin - request.arrived
            self._occupy(request, budget)
        start, every_row = request.committed, request.params.prompt_logprobs
        chunk = request.prompt[start : self._chunk_end(request, budget)]
        logits, sound, drafts_sound = self.pair.prefill(
            chunk, start, request.slot, draft=request.takes_drafter, every_row=every_row
        )
        request.read_text(len(chunk))
        request.committed += len(chunk)
        request.sound = sound and _finite(logits)
        if not drafts_sound:
            self.pair.drafter.give_up(request)
        if request.sound:
            if every_row:
                read_prompt(request, np.asarray(logits), start)
            self.slots.keep_boundary(request)
        if not request.sound or request.committed == len(request.prompt):
            if request.sound:
                emission = first_token(request, np.asarray(logits)[-1])
            else:
                emission = fail(request, non_finite(request.committed))
            emissions.append(emission)
            if emission.finish_reason is None:
                self.filling = None
                self.active.append(request)
            else:
                self._release(request)
        request.statistics.prefill_time += perf_counter() - begin
        return len(chunk)

    def _occupy(self, request: Request, budget: int) -> None:
        """Find a slot for the next request to be prefilled, and put its reusable tokens there."""
        source = self.slots.find(request, self.active)
        if len(request.prompt) - source.length > budget:  # rounds continue meanwhile and need the first slots
            self._close_up()
            source = self.slots.find(request, self.active)
        self.slots.occupy(request.slot, source, draft=request.takes_drafter)
        request.committed = request.statistics.num_cached_tokens = source.length

    def _leave_early(self) -> list[Emission]:
        """Remove the requests that were cancelled or are out of time."""
        emissions = list[Emission]()
        for request in self.waiting.leaving(perf_counter()):
            if request in self._running:
                self._release(request)
            elif not self.waiting.remove(request):  # not submitted yet
                continue
            emissions.append(leave(request, "cancelled" if request.cancelled else "timeout"))
        return emissions

    def _release(self, ended: Request) -> None:
        """Free the slot of an ended request. Its rows are kept for others, if they are finite."""
        if ended is self.filling:
            self.filling = None
        else:
            self.active.remove(ended)
        ended.lookup = None
        if ended.sound:
            self.slots.keep(ended)
        else:
            self.pair.clear(ended.slot)

    def _close_up(self) -> None:
        """Move active requests to the first slots, with one copy per gap."""
        if all(request.slot == slot for slot, request in enumerate(self.active)):
            return
        taken = {request.slot for request in self.active}
        gaps = [slot for slot in range(len(self.active)) if slot not in taken]
        beyond = [request for request in self.active if request.slot >= len(self.active)]
        for slot, request in zip(gaps, beyond, strict=True):
            self.slots.move(request, slot)
        self.active.sort(key=lambda request: request.slot)

    @property
    def _running(self) -> list[Request]:
        return [*self.active, *([self.filling] if self.filling else [])]

    def _counted(self, emissions: list[Emission]) -> list[Emission]:
        """The emissions, after the metrics have seen them."""
        running = self._running
        used = sum(request.committed for request in running) / (self.max_batch_size * self.pair.capacity)
        self.metrics.observe_step(
            emissions, len(running), len(self.waiting), self.slots.prefixes.counts, used
        )
        return emissions


def _finite(logits: Any) -> bool:
    """Whether the largest value of every row is finite and there is no NaN."""
    return bool(np.isfinite(np.asarray(logits).max(axis=-1)).all())
