"""The array operations of a pair on one GPU. Drafts and features pass between the models without going through the
host.

The host uploads positions, anchors and prompt tokens. It waits once per round, for the target's decisions. Sampled
requests also read their rows of logits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from dflash_plugins.launch import Accepted, accept_block, sample_rows, sampling_memory, sampling_tensors

from dflash_trt.decoding.draft import Candidates, Draft, Verified, chain_rows
from dflash_trt.decoding.request import Request
from dflash_trt.engines.device.engine import DeviceEngine
from dflash_trt.engines.device.kernels import compiles_here
from dflash_trt.engines.device.rounds import RoundMemory
from dflash_trt.engines.device.sizes import DECODE, PREFILL, fitting, prefill_lengths
from dflash_trt.engines.device.stream import DeviceArray, now, on, seconds

if TYPE_CHECKING:
    from dflash_plugins.launch import Run, Sampling

Array = np.ndarray[Any, Any]


class DeviceArrays:
    """Tensors on the engines' stream. `dflash_trt.decoding.arrays.Arrays` documents the methods.

    Waiting features are in the drafter's input buffer of the DECODE profile. Its input of the PREFILL profile is the
    target's output. A round's numbers go to the device in one copy and come back in one (rounds.py).

    run: launches kernels between passes. Without it torch's operators take their place, and the host samples.
    """

    most_prompt_rows = 1  # the PREFILL profile has one row of logits
    prompts_wait = False  # a slot has room for a block

    def __init__(
        self,
        target: DeviceEngine,
        drafter: DeviceEngine | None,
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
        self._capacity = capacity
        self._prompt_lengths = prefill_lengths(prefill_chunk)
        device, self._stream = target.device, target.stream
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
        # Where features of this round's chains wait, by slot, and which of them the end of the round put there [n, N].
        self._places: Sequence[int] = ()
        self._kept: Array = np.zeros((0, 0), bool)
        # Other rows of the target's last pass that the drafter shall read: slot, place, nodes.
        self._committed: list[tuple[int, int, Sequence[int]]] = []
        self._features: torch.Tensor | None = None  # of that pass
        self._drafted = 0  # places of the drafter's pass of this round, with those of padding
        self.run, self.samples = run, run is not None  # kernels decide for sampled requests, else the host
        if run is not None and tree_width > 1:
            for kind in target.caches.kinds:
                kind.pool.compact_by(run, block_size)
        self._sampling: tuple[Sequence[Request], Sampling | None] = ((), None)
        self._slots = slots
        self._rooms: dict[str, torch.Tensor] = {}  # pinned memory, of the largest tensor that was read

    @cached_property
    def _sampled(self) -> dict[str, torch.Tensor]:
        """The memory of the kernels that sample, once one does."""
        device, most = self._target.device, self._slots * self.most_nodes
        positions = torch.empty(most, dtype=torch.int64, device=device)
        following = torch.arange(1, self.most_nodes + 1, device=device)
        own = sampling_memory([most], self._vocab, device)
        return own | {"positions": positions, "following": following}

    def kernel_problems(self) -> dict[str, str]:
        """The kernels against their references on this GPU: a problem for each operator, or none. Those that plans hold
        are compiled again, which needs Triton; without it they are left out.
        """
        from dflash_trt.engines.torch.checks import problems

        assert self.run is not None
        with on(self._stream):
            return problems(
                self._target.device,
                self.run,
                vocab=self._vocab,
                features=self._unread.shape[2],
                dtype=self._unread.dtype,
                block_size=self.most_nodes,
                of_layers=compiles_here(),
            )

    def prefill(
        self, engine: DeviceEngine, feeds: Mapping[str, Any], slot: int
    ) -> Mapping[str, torch.Tensor]:
        """A pass of one of a few lengths. Rows after the prompt's are garbage, as those after committed ones."""
        name = "tokens" if engine is self._target else "features"
        length, start = feeds[name].shape[1], int(feeds["start"][0])
        filled = fitting(length, self._prompt_lengths)
        if start + filled > self._capacity - self.most_unread - 1:  # at the end of the cache
            filled = length
        feeds = {**feeds, name: self._filled(engine, name, feeds[name], filled)}
        feeds |= chain_rows(1, filled) if "depths" in feeds else {}
        engine.caches.advance(slot, [start], [length])
        bases = {name: np.array(numbers) for name, numbers in engine.caches.bases([start]).items()}
        with on(self._stream):
            outputs = engine.run(PREFILL, feeds | bases, first_slot=slot)
        if engine is not self._target:
            return outputs
        if engine.caches.states is not None:
            engine.caches.states.passed(slot, feeds["start"], int(feeds["rows"][0, 0]))
        return {**outputs, "features": outputs["features"][:, :length]}

    def _filled(self, engine: DeviceEngine, name: str, given: Any, length: int) -> Any:
        """Tokens [1, n] or features [1, n, F] with further rows. Those must be finite: tokens of the prompt, or 0."""
        if isinstance(given, np.ndarray):
            return np.pad(given, ((0, 0), (0, length - given.shape[1])), mode="edge")
        buffer = engine.buffer(PREFILL, name, 1, length, given.shape[2])
        if given.data_ptr() != buffer.data_ptr():  # else they are the target's own, with its further rows
            with on(self._stream):
                buffer[:, : given.shape[1]].copy_(given)
                buffer[:, given.shape[1] :].zero_()
        return buffer

    def decode(self, engine: DeviceEngine, feeds: Mapping[str, Any]) -> Mapping[str, torch.Tensor]:
        tensors = {n: each.tensor if isinstance(each, DeviceArray) else each for n, each in feeds.items()}
        starts, drafting = feeds["start"].tolist(), engine is self._drafter
        written = feeds["n_features"].tolist() if drafting else [feeds["rows"].shape[1]] * len(starts)
        engine.caches.advance(0, starts, written)
        with on(self._stream):
            if drafting:
                tensors = self._round.drafter_feeds(tensors, self._unread)
            else:
                self._flush()  # the pass overwrites the features
                tensors = self._round.target_feeds(tensors)
            outputs = engine.run(DECODE, tensors)
            if engine.caches.states is not None:
                engine.caches.states.passed(0, feeds["start"], 0)  # every row has logits, so none is certain
        n = len(starts)
        return {name: numbers if numbers.shape[0] == n else numbers[:n] for name, numbers in outputs.items()}

    def width(self, nodes: int) -> int:
        return fitting(nodes, self._round.widths)

    def now(self) -> Any:
        return now(self._stream)

    def seconds(self, begin: Any, end: Any) -> float:
        return seconds(begin, end)

    def wait(self) -> None:
        self._stream.synchronize()

    def readable(self, outputs: torch.Tensor) -> DeviceArray:
        return DeviceArray(outputs, self._stream, self._round.on_host(outputs))

    def _read_in(self, name: str, outputs: torch.Tensor) -> DeviceArray:
        """Numbers of a round, for which the host has pinned memory of this name."""

        def room(tensor: torch.Tensor) -> torch.Tensor:
            held, size = self._rooms.get(name), tensor.numel()
            if held is None or held.numel() < size:
                pinned = self._target.device.type == "cuda"
                held = self._rooms[name] = torch.empty(size, dtype=tensor.dtype, pin_memory=pinned)
            return held[:size].view(tensor.shape)

        return DeviceArray(outputs, self._stream, self._round.on_host(outputs), room)

    def nodes(self, count: int, nodes: int) -> torch.Tensor:
        return self._round.part("rows", count, nodes)  # filled with the other feeds of the pass

    def blocks(self, anchors: Sequence[int], length: int, mask: int, places: Sequence[int]) -> torch.Tensor:
        self._places = list(places)
        return self._round.blocks(anchors, length, mask, places)

    def start_round(self, count: int) -> None:
        self._drafted = 0
        self._round.start()

    def check(self, numbers: torch.Tensor, slot: int | None = None) -> None:
        """Those of a pass for one slot. `verified` reads the log-probabilities of a draft."""
        assert slot is not None
        with on(self._stream):
            self._round.note(slot, numbers)

    def finite(self, numbers: torch.Tensor) -> bool:
        with on(self._stream):
            return bool(torch.isfinite(numbers).all())

    def drafts(self, blocks: torch.Tensor, tokens: torch.Tensor, logprobs: torch.Tensor) -> Draft:
        with on(self._stream):
            drafted = self._round.tokens()
        places, self._drafted = blocks.shape[1] - 1, logprobs.shape[1]
        best, candidates = self._read_in("best", logprobs[:, :places, 0]), None
        if tokens.shape[2] > 1:
            given = {"candidates": tokens, "logprobs": logprobs}
            candidates = Candidates(*(self._read_in(n, each[:, :places]) for n, each in given.items()))
        return Draft(self._read_in("tokens", drafted), None, best, candidates)

    def chains(self, tokens: Array, logprobs: Array) -> Draft:
        return Draft(self.readable(self._round.chains(tokens)), None, logprobs)

    def replace(self, draft: Draft) -> None:
        with on(self._stream):
            self._round.replace(draft.replaced)

    def verified(self, active: Sequence[Request], draft: Draft, outputs: Mapping[str, Any]) -> Verified:
        """The graph decides for greedy requests. If the kernels sample, they decide for all requests except adjusted
        ones. The host decides over trees.

        Also reads the tokens of the draft.
        """
        n, length = draft.tokens.shape
        logits, chains = outputs["logits"], draft.parents is None
        width = logits.shape[1]  # with the copies of the last node
        self._features = outputs["features"]
        with on(self._stream):
            sampled = chains and self._decide(active, logits)
            self._round.end(logits, self._features, self._unread, chains=chains)
            results = self._round.results(n, width, self._drafted)
        if isinstance(draft.tokens, DeviceArray):
            draft.tokens.read(results.tokens[:, :length])
        self._kept = results.finite if chains else results.finite[:, :0]
        return Verified(
            results.accepted,
            results.next_token,
            decided=[chains and (r.history is None if sampled else r.params.greedy) for r in active],
            finite=None if results.finite.all() else results.finite,
            logits=self._read_in("logits", logits),
            drafts_finite=results.drafts_finite.tolist(),
        )

    def add_unread(self, slot: int, at: int, features: torch.Tensor, nodes: Sequence[int]) -> None:
        count = len(nodes)
        chain = nodes[-1] < count <= self._kept.shape[1] and at + count <= self.most_unread
        if not chain or self._places[slot : slot + 1] != [at] or not self._kept[slot, :count].all():
            self._committed.append((slot, at, nodes))

    def unread_features(self, counts: Sequence[int]) -> torch.Tensor:
        self._flush()
        return self._unread[: len(counts)]

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
        """Copy the committed rows that the end of the round left: those of trees, for which the host decides."""
        features, committed = self._features, self._committed
        if features is None or not committed:
            return
        self._committed = []
        with on(self._stream):
            for slot, at, nodes in committed:
                for place, node in enumerate(nodes, at):
                    self._unread[slot, place].copy_(features[slot, node])

    def _decide(self, active: Sequence[Request], logits: torch.Tensor) -> bool:
        """Sample and accept on the pass's stream. Returns whether it did, as it need not if all requests are greedy or
        adjusted.
        """
        plain = all(request.params.greedy or request.history is not None for request in active)
        if self.run is None or not self.samples or plain:
            return False
        n, length = logits.shape[:2]
        requests, params = self._sampling
        if params is None or requests != active:
            params = sampling_tensors([r.params for r in active], [r.seed for r in active], logits.device)
            self._sampling = (list(active), params)
        part, memory = self._round.part, self._sampled
        start, *made = (part(name, n) for name in ("target_start", "accepted", "next_token"))
        tokens, rows = (part(name, n, length) for name in ("tokens", "rows"))
        positions = memory["positions"][: n * length].view(n, length)
        torch.add(start[:, None], memory["following"][:length], out=positions)
        sampled, _ = sample_rows(logits, params, positions, memory=memory, run=self.run)
        accept_block(tokens, rows, sampled, made=Accepted(*made), run=self.run)
        return True
