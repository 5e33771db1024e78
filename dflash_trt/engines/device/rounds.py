"""The small numbers of a round, next to each other: one copy to the device before it, one copy to the host after it.

Plans read their inputs from this memory, and write their results into it. Decoding passes have few sizes
(`batch_sizes`, `pass_sizes`), so that all of them can be prepared at load. A pass over fewer sequences also runs over
the idle slots after them, and writes there only rows that belong to no token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from math import prod
from typing import Any

import numpy as np
import torch
from dflash_plugins.launch import SAMPLING, Run, end_round, fill_tokens, sampling_numbers

from dflash_trt.decoding.draft import chain_rows
from dflash_trt.decoding.params import MOST_LOGPROBS
from dflash_trt.decoding.request import Request
from dflash_trt.engines.device.following import NEXT, go_on, next_round, scratch
from dflash_trt.engines.device.runner import DeviceRunner
from dflash_trt.engines.device.sizes import ALIGNMENT, DECODE, batch_sizes, fitting, pass_sizes
from dflash_trt.engines.device.stream import Landing, on

Array = np.ndarray[Any, Any]
Sizes = dict[str, tuple[int, torch.dtype]]


class RoundMemory:
    """Named parts of one buffer on the device, and of pinned memory: for inputs, and for the results of two rounds.

    run: launches the kernels between passes. None for torch's operators.
    capacity: the positions of a slot.
    """

    def __init__(
        self,
        target: DeviceRunner,
        drafter: DeviceRunner | None,
        *,
        slots: int,
        block_size: int,
        capacity: int,
        tree_width: int,
        run: Run | None,
    ) -> None:
        self.run, self._most, self._capacity = run, block_size, capacity
        self.batches, self.widths = batch_sizes(slots), pass_sizes(block_size)
        self._runners = {"target": target} | ({"drafter": drafter} if drafter else {})
        self._stream, self._target, self._drafter = target.stream, target, drafter
        self._tree_width = tree_width
        self._allocate(self._inputs(slots, block_size), self._outputs(slots, block_size))
        self._bind()
        device = target.device
        self._device_parts |= scratch(slots, block_size, device)
        self._counters = torch.zeros(slots * block_size, dtype=torch.int32, device=device)
        self._device_parts["chosen"] = torch.zeros(slots * block_size, dtype=torch.int64, device=device)
        self._nodes = torch.arange(block_size, device=device)
        self._spare = torch.zeros(slots * block_size, dtype=torch.int64, device=device)
        self._starts: dict[tuple[str, int], dict[str, torch.Tensor]] = {}  # of `_begin`, by role and batch
        self._unread: dict[int, torch.Tensor] = {}  # the features of so many slots
        self._mask, self._copies = 0, False  # of this round's blocks, and whether texts go on in it
        self._wider: dict[Any, torch.Tensor] = {}  # places of the tokens of one shape in those of another
        self._sent: tuple[slice, bytes] = slice(0), b""  # the inputs that are on the device
        self._rows: tuple[int, ...] | None = None  # the shape for which the target's rows are filled
        self._asked = (0, 0)  # sequences and nodes of this round's block
        self._block = (0, 0)  # its shape in memory, with idle slots and copies of the last node
        self._given: Array | None = None  # the target's tokens [n, N] of this round, if the host has them
        self.landing: Landing | None = None  # what this round's passes gave, once the host asked for it
        self.sampling = {name: self._device_parts[name] for name in SAMPLING}

    def _inputs(self, slots: int, block_size: int) -> Sizes:
        """What a round sends that follows another, from `texts` or from `known` on; and from `block` on, what others
        send, which end with `NEXT`.
        """
        rows = slots * block_size
        sizes: Sizes = {"texts": (2 * rows, torch.int64)}
        given = "known", *(f"given_{name}" for name in NEXT), "limits", "reads"
        sizes |= dict.fromkeys(given, (slots, torch.int64))
        sizes |= dict.fromkeys(("block", "committed", "waiting"), (rows, torch.int64))
        bases = [
            f"{role}_{name}" for role, runner in self._runners.items() for name in runner.caches.bases([])
        ]
        sizes |= dict.fromkeys(bases, (slots, torch.int64))
        sizes |= {name: (slots, dtype) for name, dtype in SAMPLING.items()}
        if self._tree_width > 1:
            sizes |= {"depths": (rows, torch.int64), "visible": (rows * block_size, torch.bool)}
        return sizes | dict.fromkeys(NEXT, (slots, torch.int64))

    def _outputs(self, slots: int, block_size: int) -> Sizes:
        return {
            "tokens": (slots * block_size, torch.int64),
            "accepted": (slots, torch.int64),
            "next_token": (slots, torch.int64),
            "logprobs": (slots * block_size * self._tree_width, torch.float32),
            "finite": (slots * block_size, torch.int32),
            "draft_tokens": (slots * block_size * self._tree_width, torch.int64),
            "sampled": (slots * block_size if self._tree_width > 1 else 0, torch.int64),
            "row_logprobs": (slots * block_size, torch.float32),  # from here on only where asked for
            "top_tokens": (slots * block_size * MOST_LOGPROBS, torch.int64),
            "top_logprobs": (slots * block_size * MOST_LOGPROBS, torch.float32),
        }

    def _allocate(self, inputs: Sizes, outputs: Sizes) -> None:
        """The parts by name: tensors on the device, and the numbers in pinned memory."""
        sizes, offsets, end = inputs | outputs, dict[str, int](), 0
        for name, (count, dtype) in sizes.items():
            offsets[name] = end
            end += -(-count * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        device = self._target.device
        self._memory = memory = torch.zeros(end, dtype=torch.uint8, device=device)
        first, after = offsets["tokens"], offsets["accepted"]

        def pinned(count: int) -> torch.Tensor:
            return torch.zeros(count, dtype=torch.uint8, pin_memory=device.type == "cuda")

        def parts(memory: torch.Tensor, names: Iterable[str], begin: int = 0) -> dict[str, torch.Tensor]:
            of = {name: (offsets[name] - begin, *sizes[name]) for name in names}
            return {n: memory[at : at + size * t.itemsize].view(t) for n, (at, size, t) in of.items()}

        host = torch.zeros(after, dtype=torch.uint8)
        self._host = host.numpy()
        # What a round sends: its inputs, perhaps with tokens; and what the host gives of one that follows another,
        # without texts or with them.
        begin = offsets["block"]
        self._upload, self._upload_tokens = slice(begin, first), slice(begin, after)
        self._given_parts = [slice(offsets[name], offsets[NEXT[0]]) for name in ("known", "texts")]
        self._results = memory[first : offsets["row_logprobs"]], memory[first:]
        landings = [pinned(end - first) for _ in range(2)]
        self._device_parts = parts(memory, sizes)
        self._host_parts = {n: part.numpy() for n, part in parts(host, [*inputs, "tokens"]).items()}
        # A round sends three times at most, and the next one once, before the host has waited for it.
        sending = [pinned(after) for _ in range(4)]
        self._sending = cycle((held, parts(held, ["tokens"])["tokens"]) for held in sending)
        given = offsets[f"given_{NEXT[0]}"]
        self._known = memory[offsets["known"] : given].view(torch.int64)
        self._given_next, self._next = (
            memory[part].view(torch.int64).view(len(NEXT), -1)
            for part in (slice(given, offsets["limits"]), slice(offsets[NEXT[0]], first))
        )
        self._landings = cycle(
            Landing(
                landing, {n: part.numpy() for n, part in parts(landing, outputs, first).items()}, self._stream
            )
            for landing in landings
        )
        self._views: dict[Any, torch.Tensor] = {}  # `part`

    def _bind(self) -> None:
        parts, target, drafter = self._device_parts, self._target, self._drafter
        if drafter is not None:
            for name in ("n_features", "block", "draft_tokens"):
                drafter.bind(DECODE, name, parts[name])
            drafter.bind(DECODE, "draft_logprobs", parts["logprobs"])
        for name in ("tokens", "accepted", "next_token", "depths", "visible"):
            if name in parts:
                target.bind(DECODE, name, parts[name])
        parts["rows"] = target.whole_buffer(DECODE, "rows")
        for role, runner in self._runners.items():
            for name in ("start", *runner.caches.bases([])):
                runner.bind(DECODE, name, parts[f"{role}_{name}"])

    def part(self, name: str, *shape: int) -> torch.Tensor:
        """A part on the device, or the target's rows, as a tensor of this shape. There are few shapes."""
        if (view := self._views.get((name, shape))) is None:
            view = self._views[name, shape] = self._device_parts[name][: prod(shape)].view(shape)
        return view

    def _corner(self, name: str, shape: tuple[int, ...], n: int, length: int) -> torch.Tensor:
        """The first `length` columns of the first n rows of a part. To cut a tensor takes longer than to look it up."""
        if (view := self._views.get((name, shape, n, length))) is None:
            view = self._views[name, shape, n, length] = self.part(name, *shape)[:n, :length]
        return view

    def sample(self, active: Sequence[Request]) -> None:
        """Give the parameters of these requests to the device, with the next pass."""
        numbers = sampling_numbers(
            [request.params for request in active], [request.seed for request in active]
        )
        for name, values in numbers.items():
            self._host_parts[name][: len(values)] = values

    def place(self, places: Sequence[int]) -> Sequence[int]:
        """Where the features of this round's chains shall wait. It reaches the device with the next pass."""
        self._write("places", places)
        return places

    def rows(self, committed: Sequence[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of the target's features, and the rows that shall wait. They reach the device with the next pass."""
        rows, places = zip(*committed, strict=True)
        return self._put("committed", rows), self._put("waiting", places)

    def blocks(self, anchors: Sequence[int], length: int, mask: int) -> torch.Tensor:
        """Anchors with mask tokens, [n, length]. They reach the device with the drafter's pass."""
        n, self._given, self._mask = len(anchors), None, mask
        self._asked, self._block = (n, length), (fitting(n, self.batches), fitting(length, self.widths))
        batch, width = self._block
        block = self._host_parts["block"][: batch * width]
        block[:] = mask
        block[::width] = [*anchors, *[anchors[-1]] * (batch - n)]
        return self._corner("block", self._block, n, length)

    def chains(self, tokens: Array) -> torch.Tensor:
        """Tokens [n, N] of the host, which reach the device with the target's pass."""
        self._given = tokens
        return self.part("tokens", *tokens.shape)

    def drafter_feeds(self, feeds: Mapping[str, Any], unread: torch.Tensor) -> dict[str, Any]:
        """The feeds of a pass, for the idle slots too. `unread`: the features of all slots.

        The target's pass of the same round starts after the drafter's features, and verifies their chains, if it
        verifies no trees.
        """
        start, count, block = feeds["start"], feeds["n_features"], feeds["block"]
        batch = fitting(len(start), self.batches)
        if isinstance(block, np.ndarray):  # not of a round
            shape = batch, fitting(block.shape[1], self.widths)
            self._put("block", _repeated(block, *shape))
        else:
            shape = self._block
            self._begin("target", start + count)
            self._put_chains(*shape)
        self._begin("drafter", start)
        self._write("n_features", [*count.tolist(), *[0] * (batch - len(count))])
        self._send(self._upload)
        return self.drafter_inputs(unread, shape)

    def drafter_inputs(self, unread: torch.Tensor, shape: tuple[int, int] | None = None) -> dict[str, Any]:
        """The feeds of a pass over blocks that are in this memory, of this shape or that of this round."""
        shape = shape or self._block
        batch = shape[0]
        if (features := self._unread.get(batch)) is None:
            features = self._unread[batch] = unread[:batch]
        counts, block = self.part("n_features", batch), self.part("block", *shape)
        return {**self._places("drafter", batch), "n_features": counts, "block": block, "features": features}

    def target_feeds(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """The feeds of a pass, for the idle slots too. Its rows [n, N] may be more than its tokens."""
        start, tokens = feeds["start"], feeds["tokens"]
        shape = fitting(len(start), self.batches), feeds["rows"].shape[1]
        self._begin("target", start)
        for name in feeds.keys() & {"depths", "visible"}:
            self._put(name, _repeated(feeds[name], shape[0]))
        numbers = tokens if isinstance(tokens, np.ndarray) else self._given
        if numbers is None:
            self._send(self._upload)
            if (tokens.shape, self._block) != (self._asked, shape):
                self._widen(tokens, shape)
        else:
            n, length = tokens.shape
            memory = self._host_parts["tokens"][: prod(shape)].reshape(shape)
            memory[:n, :length] = numbers[:, :length]
            memory[:n, length:] = memory[:n, length - 1 : length]
            memory[n:] = memory[n - 1]
            self._send(self._upload_tokens)
        return self._target_inputs(shape)

    def _target_inputs(self, shape: tuple[int, int]) -> dict[str, Any]:
        """The feeds of a pass over nodes [n, N] that are in this memory."""
        inputs = {**self._places("target", shape[0]), "tokens": self.part("tokens", *shape)}
        if self._tree_width > 1:
            inputs |= {
                "depths": self.part("depths", *shape),
                "visible": self.part("visible", *shape, shape[1]),
            }
        return {**inputs, "rows": self._filled_rows(shape)}

    def _put_chains(self, batch: int, width: int) -> None:
        for name, numbers in chain_rows(batch, width).items() if self._tree_width > 1 else ():
            self._put(name, numbers)

    def tokens(self) -> torch.Tensor:
        """The target's tokens [n, length], from this round's block and the drafter's output.

        In memory they have the shape of the drafter's pass, with copies of the last column. Fills the rows too.
        """
        (n, length), (batch, width) = self._asked, self._block
        block, tokens, rows = (self.part(name, batch, width) for name in ("block", "tokens", "rows"))
        drafts = self.part("draft_tokens", batch, width - 1, self._tree_width)
        outputs = {"tokens": tokens, "rows": rows}
        fill_tokens(block, drafts, **outputs, drafted=length, most=self._most, run=self.run)
        self._rows = batch, width
        return self._corner("tokens", (batch, width), n, length)

    def replace(self, chains: Mapping[int, Sequence[int]]) -> None:
        """Put drafts of the host into this round's tokens, in place of the drafter's, with copies of the last one."""
        size, device, (_, host) = self._block[1], self._device_parts["tokens"], next(self._sending)
        numbers = host.numpy()
        for slot, chain in chains.items():
            row = slice(slot * size + 1, (slot + 1) * size)
            numbers[row] = [*chain, *[chain[-1]] * size][: size - 1]
            device[row].copy_(host[row], non_blocking=True)

    def _widen(self, tokens: torch.Tensor, shape: tuple[int, int]) -> None:
        """Put tokens [n, N] into the target's input with copies of the last sequence and of the last column."""
        key = tokens.shape, tokens.stride(), shape
        if (places := self._wider.get(key)) is None:
            at = (
                np.minimum(np.arange(most), size - 1) for most, size in zip(shape, tokens.shape, strict=True)
            )
            offsets = sum(index * step for index, step in zip(np.ix_(*at), tokens.stride(), strict=True))
            places = self._wider[key] = torch.from_numpy(offsets).to(self._target.device)
        memory, wide = self._device_parts["tokens"], self.part("tokens", *shape)
        spare = self._spare[: wide.numel()].view(shape)
        wide.copy_(torch.take(memory, places, out=spare))  # the memory is the same

    def _filled_rows(self, shape: tuple[int, int]) -> torch.Tensor:
        rows = self.part("rows", *shape)
        if self._rows != shape:
            rows.copy_(self._nodes[: shape[1]].expand(shape))
            self._rows = shape
        return rows

    def end(
        self, logits: torch.Tensor, features: torch.Tensor, unread: torch.Tensor, *, chains: bool
    ) -> None:
        """Find the finite rows of logits [n, N, V]. Copies features of chains to where they will wait for a drafter."""
        n, length = logits.shape[:2]
        places = self.part("places", n) if chains and self._drafter is not None else None
        finite = self.part("finite", n, length)
        memory = {"finite": finite, "unread": unread, "counters": self._counters}
        end_round(logits, features, places, **memory, run=self.run)

    def drafted_tokens(self) -> Array:
        """What `tokens` gave, on the host."""
        n, length = self._asked
        return self.drafted("tokens", *self._block)[:n, :length]

    def drafted(self, name: str, *shape: int) -> Array:
        """A part of what the drafter gave. The first one that is asked for waits for all."""
        with on(self._stream):
            landing = self.landing or self.download()
        landing.wait()
        return landing.read(name, *shape).copy()

    def download(self, *, whole: bool = False) -> Landing:
        """Start to read what the passes so far gave. whole: with log-probabilities."""
        self.landing = next(self._landings)
        self.landing.fill(self._results[whole])
        return self.landing

    def told(
        self, landing: Landing, slots: Sequence[int], n: int, width: int, top: int
    ) -> dict[int, tuple[Array, Array, Array]]:
        """The log-probabilities of slots, as `Verified` has them."""
        if not slots:
            return {}

        logprobs = landing.read("row_logprobs", n, width)
        tokens, best = (landing.read(name, n, width, top) for name in ("top_tokens", "top_logprobs"))
        return {slot: (logprobs[slot], tokens[slot], best[slot]) for slot in slots}

    def follow(
        self,
        nodes: int,
        width: int,
        known: Sequence[tuple[int, bool]],
        given: Mapping[int, Sequence[int]],
        texts: Mapping[int, Sequence[int]],
    ) -> None:
        """Make the inputs of the round after one of so many nodes, which had `width` rows.

        known: by slot, how many nodes of that round count, and whether the drafter reads those that are committed; 0 if
        its request was not in that round. given: by slot, `NEXT` of one that begins here. texts: as of `Following`.
        The host tells where rows lie now, and where passes begin in slots without a request: prompts may go on there.
        """
        n, limits, reads = len(known), *zip(*known, strict=True)
        batch = fitting(n, self.batches)
        idle = [slot for slot in range(batch) if slot not in given and not (slot < n and limits[slot])]
        starts = [dict(zip(idle, self._idle(role, idle), strict=True)) for role in ("target", "drafter")]
        nothing = (0,) * len(NEXT)
        rows = [
            given.get(slot) or ((starts[0][slot], starts[1][slot], 0, 0, 0) if slot in starts[0] else nothing)
            for slot in range(batch)
        ]
        self._write("limits", limits)
        self._write("reads", reads)
        self._host_parts["known"][:batch] = [*map(bool, limits), *[False] * (batch - n)]
        self._copies = len(texts) > 0
        if texts:
            size = 2 * nodes - 1
            self._host_parts["texts"][: n * size] = -1
            for slot, text in texts.items():
                self._host_parts["texts"][slot * size : (slot + 1) * size] = text
        for name, numbers in zip(NEXT, zip(*rows, strict=True), strict=True):
            self._write(f"given_{name}", numbers)
        for role, runner in self._runners.items():
            for name, bases in runner.caches.bases([], batch).items():
                self._write(f"{role}_{name}", bases)
        if nodes > 1 and (batch, self._block[1]) != self._block:
            self._host_parts["block"][: batch * self._block[1]] = self._mask
        if (n, nodes) != self._asked:
            self._put_chains(batch, width)
        self._asked, self._block, self.landing = (n, nodes), (batch, self._block[1]), None
        sent = self._send(self._given_parts[self._copies])
        next_round(self.part, n, nodes, width)
        if sent or not all(limits):
            torch.addcmul(self._given_next, self._next, self._known, out=self._next)
        anchors = self.part("anchors", n, 1)
        if nodes == 1:
            self.part("tokens", n, width).copy_(anchors.expand(n, width))
        else:
            self._corner("block", self._block, n, 1).copy_(anchors)

    def again(self, width: int) -> dict[str, Any]:
        """The feeds of the target's pass of a round that follows, with `width` rows of a slot."""
        (n, nodes), shape = self._asked, (self._block[0], width)
        if self._copies:
            go_on(self.part, n, nodes, self._block[1], self._nodes[:nodes])
        if nodes > 1 and self._block != shape:
            self._widen(self._corner("tokens", self._block, n, nodes), shape)
        return self._target_inputs(shape)

    def anchors(self, n: int, width: int) -> torch.Tensor:
        """The tokens of chains of one node, [n, 1], which have `width` columns in memory."""
        return self._corner("tokens", (n, width), n, 1)

    def _begin(self, role: str, start: Array) -> None:
        """Write the inputs about where a pass begins, of a round that follows none."""
        rows, starts, n = self._runners[role].caches, start.tolist(), len(start)
        idle = self._idle(role, range(n, fitting(n, self.batches)))
        for name, values in {"start": starts + idle, **rows.bases(starts, len(idle))}.items():
            self._write(f"{role}_{name}", values)

    def _places(self, role: str, batch: int) -> dict[str, torch.Tensor]:
        """These inputs, in this memory."""
        if (places := self._starts.get((role, batch))) is None:
            names = ("start", *self._runners[role].caches.bases([]))
            places = self._starts[role, batch] = {n: self.part(f"{role}_{n}", batch) for n in names}
        return places

    def _idle(self, role: str, slots: Iterable[int]) -> list[int]:
        """Where a pass begins in slots without a request: after the rows of tokens."""
        if role not in self._runners:
            return [0 for _ in slots]
        rows = self._runners[role].caches
        # A drafter's pass writes a block of features and one of nodes. A row for attention's sink follows.
        written = 1 + self._most * (2 if role == "drafter" else 1)
        return [min(rows.last(slot), min(self._capacity, rows.room(slot)) - written) for slot in slots]

    def _write(self, name: str, numbers: Array | Sequence[int]) -> None:
        """The first numbers of a part, which reach the device when the inputs are sent."""
        self._host_parts[name][: len(numbers)] = numbers

    def _put(self, name: str, values: Array | Sequence[int]) -> torch.Tensor:
        """A part with these numbers, which reach the device when the inputs are sent."""
        numbers = np.asarray(values)
        self._write(name, numbers.ravel())
        return self.part(name, *numbers.shape)

    def _send(self, part: slice) -> bool:
        """Copy inputs to the device, unless they are there. Returns whether they were not."""
        inputs = part, self._host[part].tobytes()
        if inputs == self._sent:
            return False
        self._sent, (pinned, _) = inputs, next(self._sending)
        pinned.numpy()[part] = self._host[part]
        self._memory[part].copy_(pinned[part], non_blocking=True)
        return True


def _repeated(numbers: Array, batch: int, width: int | None = None) -> Array:
    """Numbers [n, N, ...] of a pass with copies of the last sequence and, with a width, of the last column."""
    more = [(0, batch - len(numbers))] + [(0, 0)] * (numbers.ndim - 1)
    if width is not None:
        more[1] = (0, width - numbers.shape[1])
    return np.pad(numbers, more, mode="edge")
