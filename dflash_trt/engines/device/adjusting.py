"""What the kernels that sample know of requests whose logits are adjusted: the host's `History`, by slot."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from math import inf
from typing import Any

import torch
from dflash_plugins.kernel_specs import ADJUST_BEFORE, ADJUST_PROMPT, ADJUST_WORDS, recent_tokens
from dflash_plugins.launch import Run, adjust_rows

from dflash_trt.decoding.request import Request
from dflash_trt.decoding.sampling.history import History

_NEVER = 2**62  # a position that no token has


def takes(history: History, *, trees: bool) -> bool:
    """Whether the kernels adjust as this history. trees: whether rows may be those of trees, in which the tokens before
    a row are no text.
    """
    words, before = history.words, max((len(before) for before, _, _ in history.words), default=0)
    return (
        history.structure is None
        and history.leaves_some
        and len(words) <= ADJUST_WORDS
        and before <= (0 if trees else ADJUST_BEFORE)
    )


class Adjusting:
    """memory: tensors by name, as `kernels/sampling.py` describes them, for so many slots and rounds of up to `most`
    nodes.
    """

    def __init__(self, slots: int, capacity: int, vocab: int, most: int, device: torch.device) -> None:
        sizes = {
            "facts": ((slots, 4 + recent_tokens(most)), torch.int64),
            "words": ((slots, ADJUST_WORDS, ADJUST_BEFORE + 2), torch.int64),
            "texts": ((slots, capacity), torch.int64),
            "counts": ((slots, vocab), torch.int32),
            "bias": ((slots, vocab), torch.float32),
            "factors": ((slots, 4), torch.float32),
        }
        self.memory = {n: torch.zeros(shape, dtype=t, device=device) for n, (shape, t) in sizes.items()}
        self._most, self._held = most, list[Request | None]([None] * slots)
        shape, dtype = sizes["facts"]
        self._pins = device.type == "cuda"
        # One of two may still be read for the round before.
        self._host = cycle([torch.zeros(shape, dtype=dtype, pin_memory=self._pins) for _ in range(2)])
        self._chains = torch.ones((most, most), dtype=torch.bool, device=device).tril()

    def start(self, active: Sequence[Request], adjusted: Sequence[bool]) -> None:
        """Before a round: tell the device of these requests, and which of their rows it adjusts."""
        host = next(self._host)
        facts = host.numpy()
        for slot, (request, here) in enumerate(zip(active, adjusted, strict=True)):
            facts[slot, 0] = -1
            if here and (history := request.history) is not None:
                if self._held[slot] is not request:
                    self._held[slot] = None  # if this fails
                    self._load(slot, history, request)
                    self._held[slot] = request
                recent = request.output[-1 - (facts.shape[1] - 4) : -1]
                facts[slot, :3] = len(request.prompt), len(request.output) - 1, len(history.words)
                facts[slot, facts.shape[1] - len(recent) :] = recent
        self.memory["facts"].copy_(host, non_blocking=True)

    def _load(self, slot: int, history: History, request: Request) -> None:
        memory = {name: rows[slot] for name, rows in self.memory.items()}

        def put(name: str, numbers: Any) -> None:
            memory[name][: len(numbers)].copy_(self._pinned(numbers, memory[name].dtype), non_blocking=True)

        params = request.params
        put("texts", request.output)
        put("factors", [params.repetition_penalty, params.frequency_penalty, params.presence_penalty])
        memory["counts"].zero_()
        if params.penalized:
            memory["counts"][self._ids(sorted(set(request.prompt)))] = ADJUST_PROMPT
        memory["bias"].fill_(0 if history.allowed is None else -inf)
        if history.allowed is not None:
            memory["bias"][self._ids(history.allowed)] = 0
        if params.logit_bias:
            ids = self._ids(list(params.logit_bias))
            added = self._pinned(list(params.logit_bias.values()), torch.float32)
            memory["bias"][ids] += added.to(ids.device, non_blocking=True)
        rows = [
            [
                *[-1] * (ADJUST_BEFORE - len(before)),
                *before,
                token,
                _NEVER if until is None else len(request.prompt) + until,
            ]
            for before, token, until in history.words
        ]
        if rows:
            put("words", rows)

    def _pinned(self, numbers: Any, dtype: torch.dtype) -> torch.Tensor:
        """Numbers that can go to the device while a round runs there."""
        found = torch.tensor(numbers, dtype=dtype)
        return torch.empty(found.shape, dtype=dtype, pin_memory=self._pins).copy_(found)

    def _ids(self, tokens: Sequence[int]) -> torch.Tensor:
        return self._pinned(tokens, torch.int64).to(self._chains.device, non_blocking=True)

    def apply(
        self,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        start: torch.Tensor,
        positions: torch.Tensor,
        visible: torch.Tensor | None,
        run: Run,
    ) -> None:
        """Adjust rows in place. visible: of trees."""
        chains = self._chains if visible is None else visible
        adjust_rows(logits, tokens, start, positions, chains, memory=self.memory, most=self._most, run=run)
