"""The small numbers of a round, next to each other: one copy to the device before it, one copy to the host after it.

Plans read their inputs from this memory, and write their results into it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dflash_trt.engines.tensorrt.engine import TensorRTEngine
from dflash_trt.engines.tensorrt.profiles import ALIGNMENT, DECODE
from dflash_trt.engines.tensorrt.round_steps import RoundSteps

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Results:
    """A round's results for n requests with N nodes, of which K - 1 or fewer were drafted. `Verified` and `Draft` have
    the fields.
    """

    accepted: Array  # int64 [n]
    next_token: Array  # int64 [n]
    tokens: Array  # int64 [n, N]
    finite: Array  # bool [n, N]
    drafts_finite: Array  # bool [n]
    logprobs: Array  # float32 [n, K-1, W]


class RoundMemory:
    """Named parts of one buffer on the device and of one in pinned memory, at the same offsets."""

    def __init__(
        self, target: TensorRTEngine, drafter: TensorRTEngine, *, slots: int, block_size: int, tree_width: int
    ) -> None:
        sizes: dict[str, tuple[int, torch.dtype]] = {
            "drafter_start": (slots, torch.int64),
            "n_features": (slots, torch.int64),
            "target_start": (slots, torch.int64),
            "places": (slots, torch.int64),
            **{
                f"{role}_{name}": (slots, torch.int64)
                for role, engine in (("target", target), ("drafter", drafter))
                for name in engine.rows.bases([])
            },
            "block": (slots * block_size, torch.int64),
            # From here on, results.
            "tokens": (slots * block_size, torch.int64),
            "accepted": (slots, torch.int64),
            "next_token": (slots, torch.int64),
            "logprobs": (slots * block_size * tree_width, torch.float32),
            "finite": (slots * block_size, torch.int32),
            "noted": (slots, torch.float32),
        }
        offsets, end = dict[str, int](), 0
        for name, (count, dtype) in sizes.items():
            offsets[name] = end
            end += -(-count * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        pinned = target.device.type == "cuda"
        self._host = torch.zeros(end, dtype=torch.uint8, pin_memory=pinned)
        self._device = torch.zeros(end, dtype=torch.uint8, device=target.device)
        self._first_result = offsets["tokens"]

        def parts(memory: torch.Tensor) -> dict[str, torch.Tensor]:
            return {
                name: memory[offsets[name] : offsets[name] + count * dtype.itemsize].view(dtype)
                for name, (count, dtype) in sizes.items()
            }

        self._there, self._here = parts(self._device), parts(self._host)
        self._numbers = {name: part.numpy() for name, part in self._here.items()}
        self._stream, self._width, self._target, self._drafter = target.stream, tree_width, target, drafter
        self.steps = RoundSteps(target.device, slots=slots, block_size=block_size)
        drafter.bind(DECODE, "start", self._there["drafter_start"])
        drafter.bind(DECODE, "n_features", self._there["n_features"])
        drafter.bind(DECODE, "block", self._there["block"])
        drafter.bind(DECODE, "draft_logprobs", self._there["logprobs"])
        target.bind(DECODE, "start", self._there["target_start"])
        for role, engine in (("target", target), ("drafter", drafter)):
            for name in engine.rows.bases([]):
                engine.bind(DECODE, name, self._there[f"{role}_{name}"])
        for name in ("tokens", "accepted", "next_token"):
            target.bind(DECODE, name, self._there[name])
        self._nodes = torch.arange(block_size, device=target.device)
        self._rows: tuple[int, ...] | None = None  # the shape for which the target's rows are filled
        self._sent = False  # whether the inputs of this round are on the device
        self._noted = False  # whether `noted` holds anything

    def start(self) -> None:
        """Begin a round."""
        self._sent = False
        if self._noted:
            with torch.cuda.stream(self._stream):
                self._there["noted"].zero_()
            self._noted = False

    def blocks(self, anchors: Sequence[int], length: int, mask: int, places: Sequence[int]) -> torch.Tensor:
        """Anchors with mask tokens, [n, length]. They and the places reach the device with the round's first pass."""
        count = len(anchors) * length
        self._numbers["places"][: len(places)] = places
        block = self._numbers["block"][:count].reshape(len(anchors), length)
        block[:] = mask
        block[:, 0] = anchors
        return self._there["block"][:count].view(len(anchors), length)

    def on_host(self, tensor: torch.Tensor) -> Array | None:
        """The numbers of `blocks`, which may not have reached the device. None for any other tensor."""
        if tensor.data_ptr() != self._there["block"].data_ptr():
            return None
        return self._numbers["block"][: tensor.numel()].reshape(tuple(tensor.shape)).copy()

    def drafter_feeds(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """The feeds in this memory. The target's pass of the same round starts after the drafter's features."""
        start, count = feeds["start"], feeds["n_features"]
        if isinstance(feeds["block"], np.ndarray):  # not of a round
            return dict(feeds)
        self._begin("target", self._target, start + count)
        own = self._begin("drafter", self._drafter, start)
        own["n_features"] = self._filled("n_features", count)
        self._send()
        return {**feeds, **own}

    def target_feeds(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        found, start, tokens = dict(feeds), feeds["start"], feeds["tokens"]
        if not isinstance(tokens, np.ndarray):  # of a round
            known = self._numbers["target_start"][: len(start)]
            sent = self._sent and np.array_equal(known, start)
            found |= self._begin("target", self._target, start)
            if not sent:
                self._send()
            if tokens.data_ptr() == self._there["block"].data_ptr():  # nothing was drafted
                found["tokens"] = self.tokens(tokens, None)
            elif not tokens.is_contiguous():
                found["tokens"] = tokens.contiguous()
        rows = found["rows"]
        if (spare := rows.shape[1] - tokens.shape[1]) > 0:
            found["tokens"] = self._padded(found["tokens"], spare)
        if self._rows != tuple(rows.shape):
            rows.copy_(self._nodes[: rows.shape[1]].expand(rows.shape))
            self._rows = tuple(rows.shape)
        return found

    def tokens(self, blocks: torch.Tensor, drafts: torch.Tensor | None) -> torch.Tensor:
        """The target's tokens [n, N] from blocks and drafts. Fills its rows too."""
        tokens, rows = (self._target.buffer(DECODE, name, *blocks.shape) for name in ("tokens", "rows"))
        self.steps.fill_tokens(blocks, drafts, tokens, rows)
        self._rows = tuple(rows.shape)
        return tokens

    def _padded(self, tokens: Any, spare: int) -> Any:
        """Tokens [n, N] and so many copies of the last one of each."""
        if isinstance(tokens, np.ndarray):
            return np.pad(tokens, ((0, 0), (0, spare)), mode="edge")
        wide = torch.cat((tokens, tokens[:, -1:].expand(-1, spare)), dim=1)  # a copy: the memory is the same
        buffer = self._target.buffer(DECODE, "tokens", *wide.shape)
        buffer.copy_(wide)
        return buffer

    def note(self, slot: int, logprobs: torch.Tensor) -> None:
        """Remember whether these are finite: their sum is not, if one of them is not."""
        self._there["noted"][slot].add_(logprobs.sum())
        self._noted = True

    def end(
        self, logits: torch.Tensor, features: torch.Tensor, waiting: torch.Tensor, *, chains: bool
    ) -> None:
        """Find the finite rows of logits [n, N, V]. Copies features of chains to where they will wait."""
        n, length = logits.shape[:2]
        finite = self._there["finite"][: n * length].view(n, length)
        places = self._there["places"][:n] if chains else None
        self.steps.end_round(logits, features, places, finite=finite, waiting=waiting)

    def results(self, n: int, length: int, drafted: int) -> Results:
        """Wait for the pass, and read its results: n requests with `length` nodes and `drafted` drafts."""
        self._host[self._first_result :].copy_(self._device[self._first_result :], non_blocking=True)
        self._stream.synchronize()

        def read(name: str, *shape: int) -> Array:
            return self._numbers[name][: int(np.prod(shape))].reshape(shape).copy()

        logprobs = read("logprobs", n, drafted, self._width)
        return Results(
            accepted=read("accepted", n),
            next_token=read("next_token", n),
            tokens=read("tokens", n, length),
            finite=read("finite", n, length) != 0,
            drafts_finite=np.isfinite(logprobs).all(axis=(1, 2)) & np.isfinite(read("noted", n)),
            logprobs=logprobs,
        )

    def _begin(self, role: str, engine: TensorRTEngine, start: Array) -> dict[str, torch.Tensor]:
        """The inputs about where a pass begins, in this memory."""
        numbers: dict[str, Any] = {"start": start, **engine.rows.bases(start.tolist())}
        return {name: self._filled(f"{role}_{name}", values) for name, values in numbers.items()}

    def _filled(self, name: str, numbers: Array | Sequence[int]) -> torch.Tensor:
        self._numbers[name][: len(numbers)] = numbers
        return self._there[name][: len(numbers)]

    def _send(self) -> None:
        """Copy the inputs of this round to the device."""
        end = self._first_result
        self._device[:end].copy_(self._host[:end], non_blocking=True)
        self._sent = True
