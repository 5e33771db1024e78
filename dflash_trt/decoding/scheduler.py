"""Continuous batching: requests join and leave between rounds. A round drafts a block, verifies it, and commits
tokens.

Each step decodes one round for every active request. Then it spends at most one chunk of prompt tokens on the waiting
requests, in the order of their priority and arrival. So a long prompt delays the others by one chunk per round.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import numpy as np

from dflash_trt.decoding.acceptance import Verdict
from dflash_trt.decoding.commit import commit, fail, first_token, leave, non_finite, read_prompt
from dflash_trt.decoding.coupling import couple
from dflash_trt.decoding.draft import Draft, Verified
from dflash_trt.decoding.exact import Rule
from dflash_trt.decoding.fitting import fit
from dflash_trt.decoding.leaving import Leaving
from dflash_trt.decoding.length.adaptive import AdaptiveLength
from dflash_trt.decoding.length.pass_times import measure
from dflash_trt.decoding.length.policy import FixedLength, Lengths, round_done
from dflash_trt.decoding.length.trees import MOST_NODES, TreeLengths
from dflash_trt.decoding.metrics import Metrics
from dflash_trt.decoding.options import RequestOptions
from dflash_trt.decoding.pair import USUAL_CONTEXT, Pair
from dflash_trt.decoding.params import SamplingParams
from dflash_trt.decoding.request import Emission, Request
from dflash_trt.decoding.slots import Reuse, Slots
from dflash_trt.decoding.waiting import Waiting

Array = np.ndarray[Any, Any]


class Scheduler:
    """Requests enter by `submit`, and `step` returns their results. Not thread-safe.

    In a round the n active requests have the slots 0 .. n-1, in order. Between rounds, ended requests may leave gaps.
    The next request is prefilled in a gap, or `_close_up` moves active requests into the gaps.
    """

    def __init__(self, pair: Pair, block_size: int, max_batch_size: int, prefix_cache_bytes: int = 0) -> None:
        self.pair, self.block_size, self.max_batch_size = pair, block_size, max_batch_size
        self.slots = Slots(pair, prefix_cache_bytes)
        self.waiting = Waiting()
        self.active: list[Request] = []
        self.filling: Request | None = None
        self.metrics = Metrics()
        self._leaving = Leaving()
        self.cut_short = False  # whether work that must be `whole` was interrupted
        self._adaptive: AdaptiveLength | None = None  # made when first asked for, with its trees
        self._trees: TreeLengths | None = None

    @property
    def most_tree_nodes(self) -> int:
        pair, rule = self.pair, self.pair.rule
        if not pair.trees or not rule.trees:
            return 0
        return min([pair.arrays.most_nodes, pair.capacity // 2, *rule.widths[-1:]])

    def follow(self, rule: Rule) -> None:
        self.pair.rule = rule
        if not rule.batches:
            self.max_batch_size = 1

    def check(self, options: RequestOptions, params: SamplingParams) -> None:
        """Every option and parameter is supported."""

    def lengths(self, options: RequestOptions) -> Lengths:
        length, nodes = options.block_length, options.tree_nodes
        if not options.speculate:
            return FixedLength(1)
        if nodes:
            return TreeLengths(FixedLength(length or self.block_size), self.block_size - 1, nodes)
        if length is not None:
            return FixedLength(length)
        if self._adaptive is None:
            self.slots.overwritten()
            with self.whole():
                most = min(MOST_NODES, self.most_tree_nodes)
                self._adaptive = new_adaptive(self.block_size, self.pair, self.max_batch_size, most)
                for slot in range(self.max_batch_size):  # the numbers of these passes may not be finite
                    self.pair.clear(slot, last=USUAL_CONTEXT + 2 * max(most, self.block_size))
            if most:
                self._trees = TreeLengths(self._adaptive, self.block_size - 1)
        return self._adaptive if self._trees is None or nodes == 0 else self._trees

    def close(self) -> None:
        self.pair.close()

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.active or self.filling)

    def submit(self, request: Request) -> None:
        self.waiting.add(request)
        self._leaving.watch(request)

    def cancel(self, request: Request) -> None:
        """End a submitted request in the next step. No effect on an ended request."""
        self._leaving.cancel(request)

    def logits(self, ids: list[int]) -> Array:
        """The target's logits after these tokens, float32 [V]. Only when idle."""
        with self.whole():
            self.slots.occupy(0, Reuse(0, 0), draft=False)
            sound = True
            for at in range(0, len(ids), self.pair.prefill_chunk):
                logits, _ = self.pair.prefill(ids[at : at + self.pair.prefill_chunk], at, 0, draft=False)
                sound = sound and _finite(logits)
            found = np.array(logits[-1])
            if not sound:
                self.pair.clear(0)
        return found

    def forget(self) -> None:
        """Drop the kept rows of ended requests."""
        self.slots.forget()

    def clear(self) -> None:
        """Drop every request. After an interrupted step also drop all rows, because they may be anything."""
        if self.cut_short:
            self._start_afresh()
            return
        with self.whole():
            for request in [*self.waiting, *self.active, *([self.filling] if self.filling else [])]:
                self.cancel(request)
            self._give_up()

    def step(self, lengths: Lengths) -> list[Emission]:
        """Run one round for the active requests and one chunk of prompt tokens. Returns each request's result.

        An error of one request ends that request. This raises only an engine's failure or an interruption. Then
        `clear` drops every request and repairs the scheduler.
        """
        return [emission for part in self.parts(lengths) for emission in part]

    def parts(self, lengths: Lengths) -> Iterator[list[Emission]]:
        """Do one `step`, and give the results as they come: those of the round, then each first token.

        A consumer that does not take all parts leaves the step cut short.
        """
        self.cut_short = True
        emissions = self._give_up()
        if self.active:
            self._close_up()
            emissions += self._round(lengths)
        budget = self.pair.prefill_chunk
        while budget > 0 and self._reads_on(budget):
            if emissions:
                yield self._counted(emissions)
                emissions = []
            budget -= self._prefill(budget, emissions)
        yield self._counted(emissions)
        self.cut_short = False

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Mark work whose interruption would leave slots and requests inconsistent."""
        self.cut_short = True
        yield
        self.cut_short = False

    def _start_afresh(self) -> None:
        self.waiting, self.active, self.filling = Waiting(), [], None
        self._leaving = Leaving()
        self.forget()
        for slot in range(self.max_batch_size):
            self.pair.clear(slot)
        self.cut_short = False

    def _counted(self, emissions: list[Emission]) -> list[Emission]:
        """The emissions, after the metrics have seen them."""
        running = [*self.active, *([self.filling] if self.filling else [])]
        used = sum(request.committed for request in running) / (self.max_batch_size * self.pair.capacity)
        self.metrics.observe_step(emissions, len(running), len(self.waiting), self.slots.counts, used)
        return emissions

    def _round(self, lengths: Lengths) -> list[Emission]:
        """Run one decode round for every active request."""
        begin, active, pair = perf_counter(), list(self.active), self.pair
        drafting = [slot for slot, request in enumerate(active) if request.draft]
        proposed, draft, own = self._draft(active, drafting, lengths)
        found = pair.verify(active, draft)
        draft_time, verify_time = pair.draft_time, pair.verify_time
        verdicts, emissions = list[Verdict](), list[Emission]()
        for slot, request in enumerate(active):
            verdict, emission = commit(request, draft, found, slot)
            request.fitting = None
            self._settle(request, verdict, emission, found)
            verdicts.append(verdict)
            if emission.finish_reason is not None:
                self._retire(request)
            if emission.token_ids or emission.finish_reason is not None:
                emissions.append(emission)
        judged = [slot for slot in drafting if verdicts[slot].ok and found.drafts_finite[slot]]
        lengths.observe(round_done(active, judged, proposed, draft, own, verdicts, draft_time, verify_time))
        self.metrics.observe_round(draft.nodes)
        host = perf_counter() - begin - draft_time - verify_time
        for request in active:
            statistics = request.statistics
            statistics.draft_time += draft_time
            statistics.verify_time += verify_time
            statistics.host_time += host
        return emissions

    def _draft(
        self, active: Sequence[Request], drafting: Sequence[int], lengths: Lengths
    ) -> tuple[Draft, Draft, dict[int, int]]:
        """What the drafter proposes, what is verified of it, and the `own` drafts of `fit`."""
        room = max([min(r.stop.remaining, r.block_length or r.stop.remaining) for r in active])
        if any(request.in_doubt for request in active):
            room = 1
        pair, own = self.pair, dict[int, int]()
        proposed = pair.propose(active, min(lengths.draft(len(active)), room) if drafting else 1)
        draft = proposed = couple(proposed, active)
        if any(request.structured for request in active):
            draft, own = fit(active, proposed, min(lengths.most, room), pair.arrays, pair.drafter.pending)
        elif proposed.candidates is not None and (most_nodes := self._most_nodes) > 1:
            draft = lengths.grow(proposed, drafting, most_nodes)
        return proposed, draft, own

    @property
    def _most_nodes(self) -> int:
        """The most nodes that a round may verify: rows for them follow the committed ones, and one for a sink.

        The requests that draft have limits of their own.
        """
        own = [self.most_tree_nodes or 1, *(r.options.tree_nodes for r in self.active if r.draft)]
        room = self.pair.capacity - 1 - max(r.committed for r in self.active)
        return min([room, *(nodes for nodes in own if nodes is not None)])

    def _settle(self, request: Request, verdict: Verdict, emission: Emission, found: Verified) -> None:
        """Make a request's slot hold the tokens of its decision, and only finite numbers after them."""
        slot = request.slot
        request.in_doubt = not verdict.ok
        if emission.error is not None and not verdict.ok:
            request.sound = False
            return
        if not found.drafts_finite[slot]:
            self._stop_drafting(request)
        # All decided tokens except the new anchor.
        nodes = [0, *verdict.path][: len(verdict.path) + verdict.ok]
        if nodes:
            self.pair.commit(request, slot, nodes)
        request.committed += len(nodes)
        if found.finite is not None and not found.finite[slot].all():
            self.pair.clear(slot, request.committed)

    def _reads_on(self, budget: int) -> bool:
        """Whether this step reads more of the prompts, with so many tokens left."""
        exact, request = not self.pair.rule.cuts, self.filling
        if request is not None:
            return not exact or self._chunk_end(request, budget) - request.committed <= budget
        if not self.waiting or len(self.active) >= self.max_batch_size:
            return False
        return not exact or budget == self.pair.prefill_chunk or len(self.waiting.first.prompt) <= budget

    def _chunk_end(self, request: Request, budget: int) -> int:
        """Where the next chunk of a prompt ends. If rows depend on the cut, that is a multiple of the longest chunk,
        wherever a reused prefix ends and whatever else the step reads.
        """
        start, most = request.committed, self.pair.prefill_chunk
        if request.params.prompt_logprobs:
            most = min(most, self.pair.arrays.most_prompt_rows)
        end = start + min(budget, most) if self.pair.rule.cuts else start - start % most + most
        return min(end, len(request.prompt))

    def _prefill(self, budget: int, emissions: list[Emission]) -> int:
        """Run one chunk of the request in prefill, or of the next one. Returns the tokens spent."""
        begin, request = perf_counter(), self.filling
        if request is None:
            request = self.filling = self.waiting.pop()
            request.statistics.queue_time = begin - request.arrived
            self._occupy(request, budget)
        slot, start, every_row = request.slot, request.committed, request.params.prompt_logprobs
        chunk = request.prompt[start : self._chunk_end(request, budget)]
        logits, drafts_finite = self.pair.prefill(
            chunk, start, slot, draft=request.draft, every_row=every_row
        )
        request.committed += len(chunk)
        request.sound = _finite(logits)
        if every_row and request.sound:
            read_prompt(request, np.asarray(logits), start)
        if not drafts_finite:
            self._stop_drafting(request)
        if request.sound:
            self.slots.keep_boundary(request)
        if not request.sound or request.committed == len(request.prompt):
            self.filling = None
            emission = (
                first_token(request, np.asarray(logits)[-1])
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
        """Stop drafting for this request."""
        request.draft = False
        self.pair.stop_drafting(request.slot)

    def _occupy(self, request: Request, budget: int) -> None:
        """Find a slot for the next request to be prefilled, and put its reusable tokens there."""
        source = self._source(request)
        if len(request.prompt) - source.length > budget:  # rounds continue meanwhile and need the first slots
            self._close_up()
            source = self._source(request)
        self.slots.occupy(request.slot, source, draft=request.draft)
        request.committed = request.statistics.num_cached_tokens = source.length

    def _source(self, request: Request) -> Reuse:
        taken = {each.slot for each in self.active}
        request.slot = min(set(range(self.max_batch_size)) - taken)
        if request.params.prompt_logprobs:  # every row has to be computed
            return Reuse(0, 0)
        return self.slots.find(request, self.active)

    def _give_up(self) -> list[Emission]:
        """Remove the requests that were cancelled or are out of time."""
        now, emissions = perf_counter(), []
        for request in self._leaving.take(now):
            if request in self.active:
                self._retire(request)
            elif request is self.filling:
                self.filling = None
                self._keep(request)
            elif request in self.waiting:
                self.waiting.remove(request)
            else:  # not submitted yet
                continue
            emissions.append(leave(request, "cancelled" if request.cancelled else "timeout"))
        return emissions

    def _retire(self, ended: Request) -> None:
        self.active.remove(ended)
        self._keep(ended)

    def _keep(self, ended: Request) -> None:
        """Keep the rows of an ended request for others, if they are finite."""
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
        behind = [request for request in self.active if request.slot >= len(self.active)]
        for slot, request in zip(gaps, behind, strict=True):
            self.slots.move(request, slot)
        self.active.sort(key=lambda request: request.slot)


def _finite(logits: Any) -> bool:
    """Whether the largest value of every row is finite and there is no NaN."""
    return bool(np.isfinite(np.asarray(logits).max(axis=-1)).all())


def new_adaptive(block_size: int, pair: Pair, max_batch_size: int, most_nodes: int = 0) -> AdaptiveLength:
    """The adaptive length of a pair. Times the pair's passes, which overwrites rows of slots 0 .. max_batch_size-1.

    most_nodes: the most nodes of a tree, whose times are followed too.
    """
    batches = [*(2**i for i in range(max_batch_size.bit_length()) if 2**i < max_batch_size), max_batch_size]
    lengths = sorted({n for n in (1, 2, 4, 8, 16, block_size) if n <= block_size})
    nodes = sorted({n for n in (16, most_nodes) if block_size < n <= most_nodes})
    return AdaptiveLength(
        block_size,
        measure(pair.dummy_draft, batches, lengths[1:], pair.arrays.most_timed),
        measure(pair.dummy_verify, batches, lengths + nodes, pair.arrays.most_timed),
    )
