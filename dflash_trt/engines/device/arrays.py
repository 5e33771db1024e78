"""The array operations of a pair on one GPU. Drafts and features pass between the models without going through the
host.

The host uploads positions, anchors and prompt tokens. It waits once per round, for the target's decisions, and for the
drafts before, if it makes trees of them or fits them to a structure. A round that follows another one needs no upload
(following.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from dflash_plugins.launch import Accepted, accept_block, sample_rows, sampling_memory

from dflash_trt.decoding.arrays import Following
from dflash_trt.decoding.draft import Candidates, Draft, Verified, chain_rows
from dflash_trt.decoding.request import NOBODY, Request
from dflash_trt.engines.device.adjusting import Adjusting, takes
from dflash_trt.engines.device.logprobs import LogProbabilities
from dflash_trt.engines.device.memory import memory_errors
from dflash_trt.engines.device.rounds import RoundMemory
from dflash_trt.engines.device.runner import DeviceRunner
from dflash_trt.engines.device.sizes import DECODE, PREFILL, fitting, prefill_lengths
from dflash_trt.engines.device.stream import Clock, DeviceArray, HostStream, on

if TYPE_CHECKING:
    from dflash_plugins.launch import Run

Array = np.ndarray[Any, Any]


class DeviceArrays:
    """Tensors on the runners' stream. `dflash_trt.decoding.arrays.Arrays` documents the methods.

    Waiting features are in the drafter's input buffer of the DECODE profile. Its input of the PREFILL profile is the
    target's output. A round's numbers go to the device in one copy and come back in one (rounds.py).

    run: launches kernels between passes. Without it torch's operators take their place, and the host samples.
    """

    most_prompt_rows = 1  # the PREFILL profile has one row of logits
    prompts_wait = False  # a slot has room for a block

    def __init__(
        self,
        target: DeviceRunner,
        drafter: DeviceRunner | None,
        *,
        slots: int,
        capacity: int,
        prefill_chunk: int,
        block_size: int,
        feature_size: int,
        vocab_size: int,
        tree_width: int = 1,
        run: Run | None = None,
    ) -> None:
        self._vocab = vocab_size
        self.most_unread = self.most_nodes = block_size
        self.most_together = target.most_together
        self._capacity = capacity
        self._prompt_lengths = prefill_lengths(prefill_chunk)
        device, self._stream = target.device, target.stream
        self.asynchronous = not isinstance(self._stream, HostStream)
        # Of two rounds: a drafter's pass for each slot, one for all, and the target's.
        self._clock = Clock(self._stream, 2 * (2 * slots + 4))
        self._target, self._drafter = target, drafter
        dtype = (drafter or target).dtypes["features"]
        self._unread = torch.zeros((slots, block_size, feature_size), dtype=dtype, device=device)
        self.feature_bytes = feature_size * self._unread.element_size()
        if drafter is not None:
            drafter.bind(DECODE, "features", self._unread)
            drafter.bind(PREFILL, "features", target.whole_buffer(PREFILL, "features"))
        self._round = RoundMemory(
            *(target, drafter),
            slots=slots,
            block_size=block_size,
            capacity=capacity,
            tree_width=tree_width,
            run=run,
        )
        # Where features of this round's chains wait, by slot; None: after those of the round before. Of the round that
        # the host read last, the same, and which of them its end put there [n, N].
        self._places: Sequence[int] | None = ()
        self._read_places: Sequence[int] | None = ()
        self._kept: Array = np.zeros((0, 0), bool)
        self._kept_all = False
        # Other rows of the target's last pass that the drafter shall read, and the waiting rows that they shall be, as
        # rows of all slots.
        self._committed: list[tuple[int, int]] = []
        self._features = self._unread  # of that pass
        self._between = target.whole_buffer(PREFILL, "features").view(
            -1, feature_size
        )  # memory that rounds can use
        free = self._between.view(-1).view(torch.uint8)
        self._logprobs = LogProbabilities(free, self.most_nodes, vocab_size)
        self._drafted = 0  # places of the drafter's pass of this round, with those of padding
        self.run, self.samples = run, run is not None
        self._tree_width = tree_width
        if run is not None and tree_width > 1:
            for kind in target.caches.kinds:
                kind.pool.compact_by(run, block_size)
        # The requests whose parameters the device has; for which of them kernels can decide, and do in this round; and
        # whether the graph or the host decides for all of them.
        self._active: list[Request] = []
        self._takes: list[bool] = []
        self._by_kernels: list[bool] = []
        self._width = 1  # the target's rows of a slot in it
        self._plain = True
        self._slots = slots
        if run is not None:  # all memory of kernels, while opening can still say what is missing
            self._sampled, self._adjusting  # noqa: B018
        self._room = torch.empty(0)  # pinned memory, of the most logits that were read

    @cached_property
    def _sampled(self) -> dict[str, torch.Tensor]:
        """The memory of the kernels that sample."""
        device, most = self._target.device, self._slots * self.most_nodes
        positions = torch.empty(most, dtype=torch.int64, device=device)
        following = torch.arange(1, self.most_nodes + 1, device=device)
        memory = sampling_memory(most, self._vocab, device)
        if self._tree_width > 1:
            memory["sampled"] = self._round.part("sampled", most)
        return memory | {"positions": positions, "following": following}

    @cached_property
    def _adjusting(self) -> Adjusting:
        """What the kernels know of adjusted requests."""
        return Adjusting(self._slots, self._capacity, self._vocab, self.most_nodes, self._target.device)

    def prefill(
        self, runner: DeviceRunner, feeds: Mapping[str, Any], slot: int
    ) -> Mapping[str, torch.Tensor]:
        """A pass of one of a few lengths. Rows after the prompt's are garbage, as those after committed ones."""
        name = "tokens" if runner is self._target else "features"
        (n, length), starts = feeds[name].shape[:2], feeds["start"].tolist()
        filled = self.prompt_width(length)
        if max(starts) + filled > self._capacity - self.most_unread - 1:  # at the end of the cache
            filled = length
        feeds = {**feeds, name: self._filled(runner, name, feeds[name], filled)}
        feeds |= chain_rows(n, filled) if "depths" in feeds else {}
        runner.caches.advance(slot, starts, [length] * n)
        bases = {name: np.array(numbers) for name, numbers in runner.caches.bases(starts).items()}
        with on(self._stream):
            outputs = runner.run(PREFILL, feeds | bases, first_slot=slot)
        if runner is not self._target:
            return outputs
        if runner.caches.states is not None:
            runner.caches.states.passed(slot, feeds["start"], int(feeds["rows"][0, 0]))
        return {**outputs, "features": outputs["features"][:, :length]}

    def _filled(self, runner: DeviceRunner, name: str, numbers: Any, length: int) -> Any:
        """Tokens [n, S] or features [n, S, F] with further rows. Those must be finite: tokens of the prompt, or 0."""
        if isinstance(numbers, np.ndarray):
            return np.pad(numbers, ((0, 0), (0, length - numbers.shape[1])), mode="edge")
        buffer = runner.buffer(PREFILL, name, len(numbers), length, numbers.shape[2])
        if numbers.data_ptr() != buffer.data_ptr():  # else they are the target's own, with its further rows
            with on(self._stream):
                buffer[:, : numbers.shape[1]].copy_(numbers)
                buffer[:, numbers.shape[1] :].zero_()
        return buffer

    def decode(self, runner: DeviceRunner, feeds: Mapping[str, Any]) -> Mapping[str, torch.Tensor]:
        tensors = {n: array.tensor if isinstance(array, DeviceArray) else array for n, array in feeds.items()}
        starts, drafting = feeds["start"].tolist(), runner is self._drafter
        written = feeds["n_features"].tolist() if drafting else [feeds["rows"].shape[1]] * len(starts)
        runner.caches.advance(0, starts, written)
        with on(self._stream):
            # What the end of the round left: rows of trees, for which the host decides.
            committed, self._committed = self._committed, []
            rows = self._round.rows(committed) if committed else ()
            if drafting:
                tensors = self._round.drafter_feeds(tensors, self._unread)
            else:
                self._width = feeds["rows"].shape[1]
                tensors = self._round.target_feeds(tensors)
            if rows:
                self._copy_rows(*rows)  # a pass of the target overwrites the features
            outputs = runner.run(DECODE, tensors)
            if runner.caches.states is not None:
                runner.caches.states.passed(0, feeds["start"], 0)  # every row has logits, so none is certain
        n = len(starts)
        return {name: numbers if numbers.shape[0] == n else numbers[:n] for name, numbers in outputs.items()}

    def width(self, nodes: int) -> int:
        return fitting(nodes, self._round.widths)

    def prompt_width(self, tokens: int) -> int:
        return fitting(tokens, self._prompt_lengths)

    def now(self) -> Any:
        return self._clock.now()

    def seconds(self, begin: Any, end: Any) -> float:
        return self._clock.seconds(begin, end)

    @contextmanager
    def stream(self) -> Iterator[None]:
        with memory_errors(), on(self._stream):
            yield

    def wait(self) -> None:
        self._stream.synchronize()

    def readable(self, *outputs: torch.Tensor) -> Sequence[Array]:
        with on(self._stream):
            copies = [tensor.to("cpu", non_blocking=True) for tensor in outputs]  # in pinned memory
            self._stream.synchronize()
        return [tensor.numpy() for tensor in copies]

    def nodes(self, count: int, nodes: int) -> torch.Tensor:
        return self._round.part("rows", count, nodes)  # filled with the other feeds of the pass

    def alone(self, anchors: Sequence[int], places: Sequence[int]) -> Draft:
        self._places = self._round.place(places)
        return self.chains(np.array(anchors)[:, None], np.zeros((len(anchors), 0), np.float32))

    def blocks(self, anchors: Sequence[int], length: int, mask: int) -> torch.Tensor:
        self._places = self._round.place([0] * len(anchors))
        return self._round.blocks(anchors, length, mask)

    def start_round(self, active: Sequence[Request]) -> None:
        self._drafted, self._round.landing = 0, None
        self._seat(active)
        # Where the kernels found no token, the host looks.
        doubts = [r.in_doubt and r.history is not None for r in active]
        self._by_kernels = [taken and not doubt for taken, doubt in zip(self._takes, doubts, strict=True)]
        self._adjust()

    def _seat(self, active: Sequence[Request]) -> bool:
        """Give the device what it must know of these requests, with the numbers that are sent next. Returns whether
        they are others than those of the round before.
        """
        if active == self._active:
            return False
        self._active = list(active)
        self._takes, self._plain = self._kinds(active)
        self._by_kernels = self._takes
        if not self._plain:
            self._round.sample(active)
        return True

    def _kinds(self, active: Sequence[Request]) -> tuple[list[bool], bool]:
        """For which requests kernels can decide, and whether the graph or the host decides for all of them."""
        trees = self._tree_width > 1
        taken = [r.history is None or takes(r.history, trees=trees) for r in active]
        return taken, all(r.params.greedy or not here for r, here in zip(active, taken, strict=True))

    def _adjust(self) -> None:
        if self._samples_all and any(r.history is not None for r in self._active):
            with on(self._stream):
                self._adjusting.start(self._active, self._by_kernels)

    def finite(self, numbers: torch.Tensor) -> torch.Tensor:
        with on(self._stream):  # one pass over the numbers; a NaN is the largest
            largest: torch.Tensor = torch.linalg.vector_norm(numbers, torch.inf)
            return largest < torch.inf

    def drafts(self, blocks: torch.Tensor, tokens: torch.Tensor, logprobs: torch.Tensor) -> Draft:
        with on(self._stream):
            drafted = self._round.tokens()
        places, self._drafted = blocks.shape[1] - 1, logprobs.shape[1]
        odds = DeviceArray(lambda: self._round.drafted("logprobs", *logprobs.shape)[:, :places])
        best, candidates = DeviceArray(lambda: odds.host()[:, :, 0]), None
        if self._tree_width > 1:
            wide = DeviceArray(lambda: self._round.drafted("draft_tokens", *tokens.shape)[:, :places])
            candidates = Candidates(wide, odds)
        return Draft(DeviceArray(self._round.drafted_tokens, drafted), None, best, candidates)

    def chains(self, tokens: Array, logprobs: Array) -> Draft:
        kept = tokens.copy()
        return Draft(DeviceArray(lambda: kept, self._round.chains(kept)), None, logprobs)

    def replace(self, draft: Draft) -> None:
        with on(self._stream):
            self._round.replace(draft.replaced)

    def verified(
        self, active: Sequence[Request], draft: Draft, outputs: Mapping[str, Any]
    ) -> Callable[[], Verified]:
        """The graph decides for greedy requests with chains. If the kernels sample, they decide for all requests that
        `takes` allows, in trees too.

        Also reads the tokens of the draft, and the logits that the host needs.
        """
        n, length = draft.tokens.shape
        logits, chains = outputs["logits"], draft.parents is None
        width = logits.shape[1]  # with the copies of the last node
        self._features = outputs["features"]
        sampled = self._samples_all and active == self._active
        if sampled:
            decided = self._by_kernels
        else:
            decided = [
                r.history is None if self._plain and not chains else chains and r.params.greedy
                for r in active
            ]
        with on(self._stream):
            self._round.end(logits, self._features, self._unread, chains=chains)
            told = [slot for slot, r in enumerate(active) if decided[slot] and self._tells(r)]
            read = [
                slot
                for slot, r in enumerate(active)
                if not decided[slot] or (r.params.logprobs and slot not in told)
            ]
            rows = self._copied(logits, read)  # before they are adjusted
            if sampled:
                self._sample(active, logits, chains=chains)
            elif self._plain and not chains:
                torch.argmax(logits, -1, out=self._round.part("sampled", n, width))
            if told:
                self._tell(logits, told, chains=chains)
            landing = self._round.download(whole=bool(told))
        places, drafted = self._places, self._drafted * self._tree_width

        def result() -> Verified:
            landing.wait()
            finite = landing.read("finite", n, width)  # 0 or 1
            drafts = np.isfinite(landing.read("logprobs", n, drafted))
            if isinstance(draft.tokens, DeviceArray):
                draft.tokens.read(landing.read("tokens", n, width)[:, :length])
            self._read_places, self._kept = places, finite if chains else finite[:, :0]
            self._kept_all = sound = _all(finite)
            return Verified(
                landing.read("accepted", n),
                landing.read("next_token", n),
                decided=decided,
                finite=None if sound else finite != 0,
                logits=rows,
                drafts_finite=[True] * n if _all(drafts) else [bool(row.all()) for row in drafts],
                logprobs=self._round.told(landing, told, n, width, self._logprobs.top),
                sampled=None if chains else np.where(finite, landing.read("sampled", n, width), -1),
            )

        return result

    @property
    def following(self) -> Following | None:
        """Rounds can be started ahead where the stream goes on by itself."""
        return self if self.asynchronous else None

    def possible(self, active: Sequence[Request], nodes: int) -> bool:
        """Windows of caches have room for the round where their rows lie, and no state belongs to one position."""
        live = {slot: request for slot, request in enumerate(active) if request is not NOBODY}
        longest, both = max(request.committed for request in live.values()) + nodes, 2 * self.most_unread
        written = [(self._target, self._width), *([(self._drafter, both)] if self._drafter else [])]
        taken, plain = (self._by_kernels, self._plain) if active == self._active else self._kinds(active)
        by_kernels = self.run is not None and self.samples and not plain
        sizes = self._round.batches
        return (
            all(taken if by_kernels else (r.params.greedy for r in live.values()))
            and all(self._tells(r) or not r.params.logprobs for r in live.values())
            and fitting(len(live), sizes) == fitting(len(active), sizes)  # else fewer slots do
            and (self._drafted > 0) == (nodes > 1)
            and longest + max(both, self._width) < self._capacity
            and all(
                runner.caches.holds(slot, r.committed + nodes + rows + 1)  # one for a sink
                for runner, rows in written
                for slot, r in live.items()
            )
        )

    def prepare(
        self,
        active: Sequence[Request],
        begun: Draft,
        texts: Mapping[int, Sequence[int]],
        unread: Sequence[int],
    ) -> list[int]:
        nodes, given = begun.nodes, dict[int, tuple[int, ...]]()
        self._places = None if nodes == 1 else [0] * len(active)
        before = self._active + [NOBODY] * len(active)
        known = [
            (begun.length_of(slot, r) if r is before[slot] is not NOBODY else 0, r.takes_drafter)
            for slot, r in enumerate(active)
        ]
        with on(self._stream):
            for slot, request in enumerate(active):
                if known[slot][0] or request is NOBODY:
                    continue
                start, count = request.committed, unread[slot]
                self._target.caches.advance(slot, [start], [self._width])
                place = count if nodes == 1 else 0
                given[slot] = start, start - count, count - place, place, request.anchor
                if self._drafter is not None and nodes > 1:
                    self._drafter.caches.advance(slot, [start - count], [count])
            if self._seat(active):
                self._adjust()
            self._round.follow(nodes, self._width, known, given, texts)
        return list(given)

    def run_again(self, runner: DeviceRunner) -> Mapping[str, torch.Tensor]:
        with on(self._stream):
            again = self._round.again(self._width) if runner is self._target else None
            outputs = runner.run(DECODE, again or self._round.drafter_inputs(self._unread))
        return {name: numbers[: len(self._active)] for name, numbers in outputs.items()}

    def anchors(self) -> Draft:
        n, memory = len(self._active), self._round
        tokens = DeviceArray(
            lambda: memory.drafted("tokens", n, self._width)[:, :1], memory.anchors(n, self._width)
        )
        return Draft(tokens, None, np.zeros((n, 0), np.float32))

    def settle(self, slot: int, start: int, read: int | None) -> None:
        passes = [(self._target, start, self._width)]
        if self._drafter is not None and read is not None:
            passes.append((self._drafter, start - read, read))
        with on(self._stream):
            for runner, begin, count in passes:
                runner.caches.advance(slot, [begin], [count], begun=True)

    def _tells(self, request: Request) -> bool:
        """Whether log-probabilities come from the device: those of logits that nothing adjusts there."""
        return request.params.logprobs and request.history is None and self._logprobs.rows > 0

    def _tell(self, logits: torch.Tensor, slots: Sequence[int], *, chains: bool) -> None:
        """Find the log-probabilities of these slots, once the tokens after all nodes are known."""
        (n, length), part = logits.shape[:2], self._round.part
        chosen, logprobs = part("chosen", n, length), part("row_logprobs", n, length)
        tokens, best = (part(name, n, length, self._logprobs.top) for name in ("top_tokens", "top_logprobs"))
        if chains:
            accepted, following = (part(name, n, 1) for name in ("accepted", "next_token"))
            chosen[:, :-1].copy_(part("tokens", n, length)[:, 1:])
            chosen.scatter_(1, accepted, following)
        else:
            chosen.copy_(part("sampled", n, length))
        chosen.clamp_(min=0)  # -1: without usable logits
        for slot in slots:
            self._logprobs.fill(logits[slot], chosen[slot], logprobs[slot], tokens[slot], best[slot])

    def _copied(self, logits: torch.Tensor, slots: Sequence[int]) -> dict[int, Array]:
        """Where the logits of these slots will be on the host."""
        if not slots:
            return {}
        if (size := len(slots) * logits[0].numel()) > self._room.numel():
            self._room = torch.empty(size, pin_memory=logits.device.type == "cuda")
        room = self._room[:size].view(-1, *logits.shape[1:])
        for held, slot in zip(room, slots, strict=True):
            held.copy_(logits[slot], non_blocking=True)
        return dict(zip(slots, room.numpy(), strict=True))

    def add_unread(self, slot: int, at: int, features: torch.Tensor, nodes: Sequence[int]) -> None:
        count = len(nodes)
        chain = nodes[-1] < count <= self._kept.shape[1] and at + count <= self.most_unread
        there = self._read_places is None or (slot < len(self._read_places) and self._read_places[slot] == at)
        if not chain or not there or not (self._kept_all or _all(self._kept[slot, :count])):
            first, place = slot * self._features.shape[1], slot * self.most_unread + at
            self._committed += [(first + node, place + i) for i, node in enumerate(nodes)]

    def unread_features(self, counts: Sequence[int]) -> torch.Tensor:
        return self._unread if len(counts) == self._slots else self._unread[: len(counts)]

    def unread_features_of(self, slot: int, first: int, stop: int) -> torch.Tensor:
        self._flush()
        return self._unread[slot : slot + 1, first:stop]

    def copy_unread(self, source: int, target: int, count: int) -> None:
        self._flush()
        with on(self._stream):
            self._unread[target, :count].copy_(self._unread[source, :count])

    def clear_unread(self, slot: int) -> None:
        self._flush()
        with on(self._stream):
            self._unread[slot].zero_()

    def _flush(self) -> None:
        """Copy the committed rows that the end of the round left, if no pass comes before they are needed."""
        committed, self._committed = self._committed, []
        if committed:
            features, unread = self._features.flatten(0, 1), self._unread.flatten(0, 1)
            with on(self._stream):  # row by row, as a slot is cleared where memory is missing, too
                for row, place in committed:
                    unread[place].copy_(features[row])

    def _copy_rows(self, rows: torch.Tensor, places: torch.Tensor) -> None:
        features, unread, most = self._features.flatten(0, 1), self._unread.flatten(0, 1), len(self._between)
        for row, place in zip(rows.split(most), places.split(most), strict=True):
            if len(row):
                copied = torch.index_select(features, 0, row, out=self._between[: len(row)])
                unread.index_copy_(0, place, copied)

    @property
    def _samples_all(self) -> bool:
        """Whether kernels decide in this round, for greedy requests too."""
        return self.run is not None and self.samples and not self._plain

    def _sample(self, active: Sequence[Request], logits: torch.Tensor, *, chains: bool) -> None:
        """Choose the token after each row, and accept chains, on the pass's stream."""
        (n, length), part = logits.shape[:2], self._round.part
        memory, run = self._sampled, self.run
        assert run is not None
        start, *results = (part(name, n) for name in ("target_start", "accepted", "next_token"))
        positions = memory["positions"][: n * length].view(n, length)
        if chains:
            torch.add(start[:, None], memory["following"][:length], out=positions)
        else:
            torch.add(part("depths", n, length), start[:, None], out=positions).add_(1)
        tokens, rows = (part(name, n, length) for name in ("tokens", "rows"))
        if any(r.history is not None for r in active):
            visible = None if chains else part("visible", n, length, length)
            self._adjusting.apply(logits, tokens, start, positions, visible, run)
        sampled, _ = sample_rows(logits, self._round.sampling, positions, memory=memory, run=run)
        if chains:
            accept_block(tokens, rows, sampled, results=Accepted(*results), run=run)


def _all(truths: Array) -> bool:
    """As `truths.all()`, in a tenth of its time where there are few."""
    return bool(np.count_nonzero(truths) == truths.size)
