"""Continuous batching: requests join and leave between steps.

A step is a round, then passes over waiting prompts for as long as `prompt_delay`, by which the others wait longer for
their next round. A round drafts a block for every active request, verifies it and commits tokens.

Where passes run beside the host, a step ends with the start of the next round, so that a GPU need not wait while the
results are taken. And where nothing needs the host between two rounds, the next one is started before the results of
this one are read. It is a round too many for requests that end with this one: nothing of it is committed to them. The
round after leaves them out, and has those that have read their prompts meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import numpy as np

from dflash_trt.decoding.acceptance import Verdict, decide, fail, first_token, leave, non_finite, read_prompt
from dflash_trt.decoding.draft import Draft, Verified, couple
from dflash_trt.decoding.length.policy import Lengths, RoundDone
from dflash_trt.decoding.metrics import Metrics
from dflash_trt.decoding.pair import Pair
from dflash_trt.decoding.params import RequestOptions, SamplingParams
from dflash_trt.decoding.request import NOBODY, Emission, Queue, Request
from dflash_trt.decoding.slots import Reuse, Slots
from dflash_trt.errors import DecodingError

Array = np.ndarray[Any, Any]


@dataclass(slots=True)
class _Launched:
    """A round whose passes were started.

    begin: a time of perf_counter. active: its requests by slot, and `NOBODY`.
    seconds: those of its passes, once it has ended.
    read: the most features of a request that the drafter read.
    planned: whether `Lengths` was asked about it. steady: whether it is as `Lengths` wants it, and as long as the round
    before. lost: the slots whose rows it wrote after others than those that were committed.
    texts: by slot, what may come after its anchors, for drafts of the round after it.
    """

    begin: float
    active: list[Request]
    proposed: Draft
    draft: Draft
    outputs: Any
    seconds: Callable[[], tuple[float, float]]
    read: int = 0
    planned: bool = True
    steady: bool = False
    lost: set[int] = field(default_factory=set)
    texts: dict[int, list[int]] = field(default_factory=dict)


class Scheduler:
    """Requests enter by `submit`, and `step` returns their results. `DecodingLoop` documents the methods.

    In a round that follows no other one, the n active requests have the slots 0 .. n-1, in order. Ended requests leave
    gaps. The next request is prefilled in a gap, or `_close_up` moves active requests into the gaps, but not while a
    round runs.
    """

    def __init__(self, pair: Pair, prefix_cache_bytes: int = 0, prompt_delay: float = 0.0) -> None:
        """prompt_delay: seconds of a step for prompts. At least one chunk of `prefill_chunk` tokens is read."""
        self.pair, self.prompt_delay = pair, prompt_delay
        self.slots = Slots(pair, prefix_cache_bytes)
        self.waiting = Queue()
        self.active: list[Request] = []
        self.filling: list[Request] = []  # their prompts are being read
        self.metrics = Metrics(pair.tokens)
        self.cut_short = False
        self._full = False  # the next request waits for memory
        # The round that the next step ends, or why there is none.
        self._begun: _Launched | Exception | None = None
        self._beside: _Launched | None = None  # the round that runs while prompts are read
        self._apart = False  # the next prompt waits for active requests to move together
        self._nodes = 0  # of the last draft
        self._decided_at = 0.0

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
        self.slots.make_room(0, len(ids))
        whole, most = True, self.pair.prefill_chunk
        with self.pair.arrays.stream():
            for at in range(0, len(ids), most):
                logits, sound, _ = self.pair.prefill(ids[at : at + most], at, 0, draft=False)
                whole = whole and sound and _finite(logits)
        last = np.array(logits[-1])
        if whole:
            self.pair.release(0)
        else:
            self.pair.clear(0)
        self.cut_short = False
        return last

    def forget(self) -> None:
        self.slots.forget()

    def clear(self) -> None:
        """Drop every request. After an interrupted step also drop all rows, because they may be anything."""
        begun, self._begun, self._beside = self._begun, None, None
        if self.cut_short:
            self.waiting, self.active, self.filling, self._full = Queue(), [], [], False
            self.forget()
            for slot in range(self.max_batch_size):
                self.pair.clear(slot)
        else:
            self.cut_short = True
            for request in [*self.waiting, *self._running]:
                self.cancel(request)
            self._leave_early()
            if isinstance(begun, _Launched):
                verified = self.pair.verified(begun.active, begun.draft, begun.outputs)
                for slot, request in enumerate(begun.active):
                    self._leave_out(request, slot, verified, set())
        self.cut_short = False

    def close(self) -> None:
        self.pair.close()

    def step(self, lengths: Lengths) -> list[Emission]:
        """The results of one round for the active requests, and of passes over waiting prompts.

        An error of one request ends that request. This raises only an engine's failure or an interruption. Then
        `clear` drops every request and repairs the scheduler.
        """
        with self.pair.arrays.stream():
            return [emission for part in self.parts(lengths) for emission in part]

    def parts(self, lengths: Lengths) -> Iterator[list[Emission]]:
        """Do one `step`, and give the results as they come: those of the round, then each first token.

        A consumer that does not take all parts leaves the step cut short.
        """
        return self._ahead(lengths) if self.pair.arrays.asynchronous else self._in_turn(lengths)

    def _in_turn(self, lengths: Lengths) -> Iterator[list[Emission]]:
        """A step that starts a round and ends it."""
        self.cut_short = True
        emissions = self._leave_early()
        self._keep_room()
        if (launched := self._launch(lengths, emissions)) is not None:
            emissions += self._decide(launched, lengths)
        yield from self._read_prompts(emissions)
        yield self._counted(emissions)
        self.cut_short = False

    def _ahead(self, lengths: Lengths) -> Iterator[list[Emission]]:
        """A step that ends the round that was started by the last step, and starts the next one, before if it can.

        If that fails, the results come first, and the next step raises the error.
        """
        self.cut_short = True
        begun, self._begun = self._begun, None
        if isinstance(begun, Exception):
            raise begun
        emissions, after = self._leave_early(), None
        if begun is not None:
            with self.pair.arrays.stream():
                after = _attempt(lambda: self._follow(begun))
                emissions += self._decide(begun, lengths, None if isinstance(after, Exception) else after)
        if not isinstance(after, Exception):
            self._beside = after
            yield from self._read_prompts(emissions)
            self._beside = None
        if after is None:
            self._keep_room()
            after = _attempt(lambda: self._launch(lengths, emissions))
        yield self._counted(emissions)
        self._begun = after
        self.cut_short = isinstance(self._begun, Exception)

    def _launch(self, lengths: Lengths, emissions: list[Emission]) -> _Launched | None:
        """Draft for every active request, and start the target's pass over the drafts. Where memory for it is missing,
        the newest request ends.
        """
        self._apart = False
        while self.active:
            self._close_up()
            begin, active = perf_counter(), list(self.active)
            try:
                with self.pair.arrays.stream():
                    proposed, draft = self._draft(active, lengths)
                    outputs, seconds = self.pair.start(active, draft), self.pair.clock()
            except MemoryError as error:
                work = f"a round of {len(active)} requests"
                emissions.append(self._end(self._newest, work, error, "max_batch_size"))
                self.pair.arrays.wait()
                continue
            steady, self._nodes = proposed.nodes == self._nodes, proposed.nodes
            steady = steady and draft is proposed
            read = self.pair.drafter.most_read
            launched = _Launched(begin, active, proposed, draft, outputs, seconds, read, steady=steady)
            return self._look_up(launched, draft)
        return None

    def _end(self, request: Request, work: str, error: MemoryError, less: str) -> Emission:
        """End a request for whose work memory is missing. less: the option that may be lowered."""
        advice = f"lower {less}, or cache_tokens (caches have memory for {self.pair.tokens} tokens)"
        request.sound = False
        emission = fail(request, DecodingError(f"no memory for {work} ({error}); {advice}"))
        self._release(request)
        return emission

    def _follow(self, begun: _Launched) -> _Launched | None:
        """Start the round after one that has not ended, of the same length, if nothing needs the host before."""
        draft, active = begun.draft, [NOBODY] * (1 + max([r.slot for r in self.active], default=-1))
        for request in self.active:
            active[request.slot] = request
        before = begun.active + [NOBODY] * len(active)
        goes_on = any(
            r is not before[slot] or r.stop.remaining > draft.length_of(slot, r)
            for slot, r in enumerate(active)
            if r is not NOBODY
        )
        if self._apart or not (begun.steady and goes_on) or any(r.in_doubt for r in active):
            return None
        if not self.pair.can_follow(active, draft.nodes):
            return None
        if self.pair.scarce and not all(self._fits(r, r.committed + 2 * draft.nodes) for r in self.active):
            return None
        begin = perf_counter()
        texts = {
            slot: text
            for slot, text in begun.texts.items()
            if active[slot : slot + 1] == before[slot : slot + 1]
        }
        try:
            with self.pair.arrays.stream():
                draft, outputs = self.pair.follow(active, draft, texts)
        except MemoryError:  # also for a round of its own, perhaps
            return None
        draft.lengths |= {slot: 1 for slot, r in enumerate(active) if r.takes_drafts and not r.takes_drafter}
        return _Launched(begin, active, draft, draft, outputs, self.pair.clock(), planned=False)

    def _decide(
        self, launched: _Launched, lengths: Lengths, after: _Launched | None = None
    ) -> list[Emission]:
        """Commit the tokens that the target decides. after: the round that follows, if it was started."""
        active, proposed, draft = launched.active, launched.proposed, launched.draft
        verified = self.pair.verified(active, draft, launched.outputs)
        verdicts, emissions = dict[int, Verdict](), list[Emission]()
        for slot, request in enumerate(active):
            if slot in launched.lost or request.ended:
                self._leave_out(request, slot, verified, set() if after is None else after.lost)
                continue
            verdicts[slot], emission = self._commit(request, draft, verified, after)
            text, count = launched.texts.get(slot), len(verdicts[slot].path)
            if text and after is not None and text[count] == request.anchor:  # as the device found
                after.draft.copied[slot] = set(range(1, draft.nodes))
                after.draft.lengths.pop(slot, None)
            if emission.token_ids or emission.finish_reason is not None:
                emissions.append(emission)
        live = [active[slot] for slot in verdicts]
        judged = [slot for slot in verdicts if active[slot].takes_drafts and verdicts[slot].ok]
        decided = [active[slot].output[-len(verdicts[slot].path) - 1 :] for slot in judged]
        self.metrics.observe_round(draft.nodes)
        draft_time, verify_time = launched.seconds()
        begin, self._decided_at = max(launched.begin, self._decided_at), perf_counter()
        host_time = max(self._decided_at - begin - draft_time - verify_time, 0.0)
        ended = sum(request.ended for request in live)
        times = draft_time, verify_time, host_time
        if launched.planned:
            lengths.observe(
                RoundDone(active, proposed, draft.nodes, judged, decided, *times, ended, launched.read)
            )
        for request in live:
            request.statistics.draft_time += draft_time
            request.statistics.verify_time += verify_time
            request.statistics.host_time += host_time
        if after is not None and not after.lost:
            self._plan(after, lengths)
        return emissions

    def _plan(self, after: _Launched, lengths: Lengths) -> None:
        """Ask the policy about a round that was started as long as the one before, now that it could have chosen."""
        active = [NOBODY if request.ended else request for request in after.active]
        nodes = after.draft.nodes
        drafting, room, length = self._room(active, lengths)
        asked = replace(after.proposed, copied={}, replaced={}, lengths={})
        if nodes == 1:
            anchors = np.zeros((len(active), 1), np.int64)
            asked = Draft(anchors, None, after.proposed.logprobs)
        wanted = lengths.select(asked, active, drafting, self._most_nodes) if room > 1 else asked
        after.planned = length == nodes  # else it is no round of what was asked for, such as a trial
        after.steady = length == wanted.nodes == nodes and wanted.parents is None
        self._look_up(after, wanted)

    def _look_up(self, launched: _Launched, wanted: Draft) -> _Launched:
        """Let the texts that were wanted in the place of drafts go on, after a round that has not ended."""
        launched.steady &= wanted.copied.keys() == wanted.replaced.keys()
        most = 2 * launched.draft.nodes - 1
        texts = {s: launched.active[s].copied(most)[0] for s in wanted.replaced if launched.steady}
        launched.texts = {slot: text for slot, text in texts.items() if len(text) == most}
        return launched

    def _room(self, active: Sequence[Request], lengths: Lengths) -> tuple[list[int], int, int]:
        """The slots that draft, the most tokens that a request can take in a round, and the length of the drafts."""
        drafting = [slot for slot, request in enumerate(active) if request.takes_drafts]
        most = [min(r.stop.remaining, r.block_length or r.stop.remaining) for r in active if not r.ended]
        room = max(most, default=1)
        if any(request.in_doubt for request in active):
            room = 1
        return drafting, room, min(lengths.draft(active), room) if drafting else 1

    def _draft(self, active: Sequence[Request], lengths: Lengths) -> tuple[Draft, Draft]:
        """What the drafter proposes, and what is verified of it: cut to a structure, or grown to a tree."""
        drafting, room, length = self._room(active, lengths)
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
            rooms = [
                most - drafter.unread[slot] for slot, request in enumerate(active) if request.takes_drafter
            ]
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
        limits = [self.most_tree_nodes, *(r.options.tree_nodes for r in self.active if r.takes_drafts)]
        room = self.pair.capacity - 1 - max(r.committed for r in self.active)
        return min([room, *(nodes for nodes in limits if nodes is not None)])

    def _commit(
        self, request: Request, draft: Draft, verified: Verified, after: _Launched | None
    ) -> tuple[Verdict, Emission]:
        """Decide a request's tokens. Its slot then holds them, and only finite numbers after them."""
        slot, sound = request.slot, _sound(verified, request.slot)
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
            if after is not None:
                drafts = draft.nodes > 1
                after.read = max(after.read, self.pair.settle(slot, request.committed, drafts=drafts))
            if not sound:
                self.pair.clear(slot, request.committed)
        if after is not None and not (sound and verdict.ok and verified.drafts_finite[slot]):
            after.lost.add(slot)
        if emission.finish_reason is not None:
            self._release(request)
        return verdict, emission

    def _leave_out(self, request: Request, slot: int, verified: Verified, lost: set[int]) -> None:
        """Leave only finite numbers in a slot of a round of which nothing is committed there. Adds to `lost` the slots
        of which rows are cleared that a later round may have written.
        """
        sound, drafts_sound = _sound(verified, slot), verified.drafts_finite[slot]
        if request is NOBODY:
            return
        if not request.ended:
            if not drafts_sound:
                self.pair.drafter.give_up(request)
            if not sound:
                self.pair.clear(slot, request.committed)
        elif not (sound and drafts_sound):
            self.slots.drop(request.slot)
            if all(other.slot != request.slot for other in self._running):
                self.pair.clear(request.slot)
            for other in self._running:  # they may have got this memory since
                if other.slot == slot or self.pair.scarce:
                    self.pair.clear(other.slot, other.committed)
                    lost.add(other.slot)

    def _read_prompts(self, emissions: list[Emission]) -> Iterator[list[Emission]]:
        """Read prompts, `prefill_chunk` tokens and then as many again, until the next ones would take too long. Gives
        what there is before each of them.
        """
        begin, beside = perf_counter(), self._beside
        now = begin
        while self._reads_on(self.pair.prefill_chunk):
            before, budget = now, self.pair.prefill_chunk
            while budget > 0 and self._reads_on(budget):
                if emissions:
                    yield self._counted(emissions[:])
                    emissions.clear()
                if not (spent := self._prefill(budget, emissions)):
                    return
                budget -= spent
            now = max(perf_counter() - (0.0 if beside is None else sum(beside.seconds())), before)
            if (now - begin) + (now - before) >= self.prompt_delay:
                return

    def _reads_on(self, budget: int) -> bool:
        """Whether this step reads more of the prompts, with so many tokens left."""
        exact = not self.pair.rule.any_cut
        for request in self.filling:
            return not exact or self._chunk_end(request, budget) - request.committed <= budget
        if not self.waiting or self._full or len(self.active) >= self.max_batch_size:
            return False
        return not exact or budget == self.pair.prefill_chunk or len(self.waiting.first.text) <= budget

    def _chunk_end(self, request: Request, budget: int) -> int:
        """Where the next chunk of a prompt ends. If rows depend on the cut, that is a multiple of the longest chunk, as
        the end of a reused prefix is, whatever else the step reads.
        """
        start, most = request.committed, self.pair.prefill_chunk
        if request.params.prompt_logprobs:
            most = min(most, self.pair.arrays.most_prompt_rows)
        return min(start + (min(budget, most) if self.pair.rule.any_cut else most), len(request.text))

    def _prefill(self, budget: int, emissions: list[Emission]) -> int:
        """Run one chunk of the request in prefill, or of the next one, or the prompts of several. Returns the tokens
        spent; 0 if the next one must wait for the round that runs.
        """
        begin = perf_counter()
        if not self.filling:
            self._gather(budget)
            if self._apart and self._beside is not None:
                return 0
        if len(self.filling) > 1:
            together = list(self.filling)
            chunks = [request.text[request.committed :] for request in together]
            starts, draft = [request.committed for request in together], together[0].takes_drafter
            try:
                with self.pair.arrays.stream():
                    read = self.pair.prefill_together(chunks, starts, together[0].slot, draft=draft)
            except MemoryError:
                return sum([self._read(request, budget, begin, emissions) for request in together])
            for request, chunk, results in zip(together, chunks, read, strict=True):
                self._take(request, len(chunk), *results, begin, emissions)
            return len(together) * max(map(len, chunks))
        if not self.filling:
            request = self.waiting.first
            if (source := self._place(request, budget)) is None:
                return 0
            if not self._fits(request, self._wanted(request)):
                if self.active:
                    self._full = True
                else:
                    self.waiting.pop()
                    room = f"caches have memory for {self.pair.tokens} tokens; raise cache_tokens"
                    error = DecodingError(
                        f"no memory for the {len(request.text)} tokens of this request: {room}"
                    )
                    emissions.append(fail(request, error))
                return budget
            if self.pair.scarce:  # what was found may have been dropped
                source = self._place(request, budget)
            assert source is not None
            self._admit(request, source)
        (request,) = self.filling
        return self._read(request, budget, begin, emissions)

    def _read(self, request: Request, budget: int, begin: float, emissions: list[Emission]) -> int:
        """Run a chunk of one prompt. Returns its tokens. Without memory for the pass, only this request ends."""
        chunk = request.text[request.committed : self._chunk_end(request, budget)]
        every_row = request.params.prompt_logprobs and not request.output
        options = {"draft": request.takes_drafter, "every_row": every_row}
        try:
            with self.pair.arrays.stream():
                results = self.pair.prefill(chunk, request.committed, request.slot, **options)
        except MemoryError as error:
            work = f"a pass over {len(chunk)} of the {len(request.text)} tokens of this request"
            emissions.append(self._end(request, work, error, "prefill_chunk"))
        else:
            self._take(request, len(chunk), *results, begin, emissions)
        return len(chunk)

    def _take(
        self,
        request: Request,
        count: int,
        logits: Any,
        sound: bool,
        drafts_sound: bool,
        begin: float,
        emissions: list[Emission],
    ) -> None:
        """Commit `count` tokens of a prompt that were read since `begin`; after the last one comes the first token."""
        start = request.committed
        request.read_text(count)
        request.committed += count
        request.sound = sound and _finite(logits)
        if not request.sound and self._beside is not None:
            # Perhaps by what one has left there that ended meanwhile. It is read again when no round runs.
            self._apart, request.sound, request.committed = True, True, 0
            self.filling.remove(request)
            self.pair.clear(request.slot)
            self.waiting.add(request)
            return
        if not drafts_sound:
            self.pair.drafter.give_up(request)
        if request.sound:
            if request.params.prompt_logprobs and not request.output:
                read_prompt(request, np.asarray(logits), start)
            self.slots.keep_boundary(request)
        if request.sound and request.output and request.committed == len(request.text):  # it goes on
            self.filling.remove(request)
            self.active.append(request)
        elif not request.sound or request.committed == len(request.text):
            if request.sound:
                emission = first_token(request, np.asarray(logits)[-1])
            else:
                emission = fail(request, non_finite(request.committed))
            emissions.append(emission)
            if emission.finish_reason is None:
                self.filling.remove(request)
                self.active.append(request)
            else:
                self._release(request)
        request.statistics.prefill_time += perf_counter() - begin

    def _gather(self, budget: int) -> None:
        """Admit the next requests whose prompts one pass can read to their ends, in slots side by side."""
        if self.pair.most_together < 2 or min(len(self.waiting), self.max_batch_size - len(self.active)) < 2:
            return
        if self._beside is None:
            self._close_up()
        free, counts, starts = self._free, list[int](), list[int]()
        first = min([slot for slot in free if slot + 1 in free], default=None)
        if first is None:
            self._apart |= len(free) > 1  # two passes take longer than a round that waits
            return
        while self.waiting and (slot := first + len(self.filling)) in free:
            request = self.waiting.first
            source = self.slots.find(request, self._running, (slot,))
            counts.append(len(request.text) - source.length)
            starts.append(source.length)
            alike = all(other.takes_drafter == request.takes_drafter for other in self.filling)
            one_by_one = not alike or request.params.prompt_logprobs
            if one_by_one or not self.pair.fits_together(counts, starts, budget):
                return
            width = self.pair.arrays.prompt_width(max(counts))  # each is padded to the longest one
            together = zip([*self.filling, request], starts, strict=True)
            if not all(self._fits(other, max(self._wanted(other), at + width)) for other, at in together):
                return
            if self.pair.scarce:
                source = self.slots.find(request, self._running, (slot,))
            self._admit(request, source)

    @property
    def _free(self) -> set[int]:
        """The slots that a prompt can be read into. What a round still writes there comes before."""
        return set(range(self.max_batch_size)) - {request.slot for request in self._running}

    def _place(self, request: Request, budget: int) -> Reuse | None:
        """Find a slot for the next request to be prefilled, and its reusable tokens. None: not while a round runs."""
        if self._beside is not None:
            if not (free := self._free):
                return None
            source = self.slots.find(request, self._running, free)
            most = self.pair.arrays.most_prompt_rows if request.params.prompt_logprobs else budget
            reused = 0 if self.pair.scarce else source.length  # which may have to give way
            if len(request.text) - reused <= min(most, budget):
                return source
            # It is read for some steps, in which active requests may have to move together, but not over it.
            self._apart = not (beyond := {slot for slot in free if slot >= len(self.active)})
            return self.slots.find(request, self._running, beyond) if beyond else None
        if self.pair.scarce:  # what is reused may give way to the request, whose slot then stays
            self._close_up()
        source = self.slots.find(request, self.active)
        if len(request.text) - source.length > budget:  # rounds continue meanwhile and need the first slots
            self._close_up()
            source = self.slots.find(request, self.active)
        return source

    def _wanted(self, request: Request) -> int:
        """The tokens for which a request must have room to begin: in exact mode all of them, as it must not be read
        again in other passes than before.
        """
        exact = not self.pair.rule.any_cut
        whole = len(request.prompt) + request.params.max_tokens
        return (whole if exact else len(request.text)) + self.pair.most_written

    def _fits(self, request: Request, length: int) -> bool:
        """Whether a request's slot has room for so many tokens."""
        return self.slots.make_room(request.slot, length)

    def _keep_room(self) -> None:
        """Let every active request have room for a round. Where there is none, the newest one waits again."""
        if not self.pair.scarce:
            return
        for request in sorted(self.active, key=lambda request: request.arrived):
            while request in self.active and not self._fits(
                request, request.committed + self.pair.most_written
            ):
                newest = self._newest
                self.active.remove(newest)
                self.pair.release(newest.slot)
                newest.committed, self._full = 0, True
                self.waiting.add(newest)

    def _admit(self, request: Request, source: Reuse) -> None:
        """Let the next request have the slot that was found for it, with its reusable tokens."""
        self.waiting.pop()
        self.filling.append(request)
        if not request.output:
            request.statistics.queue_time = perf_counter() - request.arrived
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
        (self.filling if ended in self.filling else self.active).remove(ended)
        self._full = False
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
        return [*self.active, *self.filling]

    @property
    def _newest(self) -> Request:
        return max(self.active, key=lambda request: request.arrived)

    def _counted(self, emissions: list[Emission]) -> list[Emission]:
        """The emissions, after the metrics have seen them."""
        running = self._running
        used = sum(request.committed for request in running) / self.metrics.cache_tokens
        self.metrics.observe_step(
            emissions, len(running), len(self.waiting), self.slots.prefixes.counts, used
        )
        return emissions


def _attempt(start: Callable[[], _Launched | None]) -> _Launched | Exception | None:
    """What was started, or the error."""
    try:
        return start()
    except Exception as error:
        return error


def _sound(verified: Verified, slot: int) -> bool:
    """Whether all logits of a slot have a finite largest value."""
    return verified.finite is None or bool(verified.finite[slot].all())


def _finite(logits: Any) -> bool:
    """Whether the largest value of every row is finite and there is no NaN."""
    return bool(np.isfinite(np.asarray(logits).max(axis=-1)).all())
