"""The decode loop: draft a block, verify it, keep what the target agrees with (arXiv 2602.06036, section 4)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

from dflash_trt.decoding.acceptance import accept
from dflash_trt.decoding.pair import EnginePair, InFlight
from dflash_trt.decoding.request import FinishReason
from dflash_trt.decoding.sampling import sample

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Emission:
    """What one round gave one request: the tokens kept, the text that is certain now, and whether it ended."""

    request: InFlight
    token_ids: list[int]
    text: str
    finish_reason: FinishReason | None


def decode(pair: EnginePair, requests: Iterable[InFlight], block_length: int) -> Iterator[Emission]:
    """Decode every request, at most `pair.slots` at a time; yields as rounds commit tokens.

    `block_length` is the number of tokens verified per round, the anchor included; 1 means no drafting.
    """
    waiting, active = deque(requests), list[InFlight]()
    while waiting or active:
        while waiting and len(active) < pair.slots:
            emission = _admit(pair, waiting.popleft(), slot=len(active), draft=block_length > 1)
            if emission.finish_reason is None:
                active.append(emission.request)
            yield emission
        if not active:
            return
        begin = perf_counter()
        block = pair.propose(active, min(block_length, max(request.stop.remaining for request in active)))
        out = pair.verify(active, block)
        emissions = [_commit(request, block[slot], out, slot) for slot, request in enumerate(active)]
        for slot in reversed(range(len(active))):
            if emissions[slot].finish_reason is not None:
                pair.retire(active, slot)
        host = perf_counter() - begin - pair.draft_time - pair.verify_time
        for emission in emissions:
            statistics = emission.request.statistics
            statistics.draft_time += pair.draft_time
            statistics.verify_time += pair.verify_time
            statistics.host_time += host
        yield from emissions


def _admit(pair: EnginePair, request: InFlight, slot: int, *, draft: bool) -> Emission:
    """Prefill, and the first token."""
    begin = perf_counter()
    logits = pair.prefill(request.prompt, slot, draft=draft)
    request.statistics.prefill_time = perf_counter() - begin
    request.committed = len(request.prompt)
    token = sample(logits, request.params, request.seed, request.committed, request.counts)
    if request.counts is not None:
        request.counts.add(token)
    emission = _emit(request, [token])
    request.first_token_at = perf_counter()
    request.statistics.time_to_first_token = request.first_token_at - request.started
    return emission


def _commit(request: InFlight, block: Array, out: dict[str, Array], slot: int) -> Emission:
    """The tokens of one verified block that are the target's own: the accepted drafts, and the one after them."""
    if request.params.greedy:
        accepted, token = int(out["accepted"][slot]), int(out["next_token"][slot])
    else:
        position = request.committed + 1
        accepted, token = accept(
            block.tolist(), out["logits"][slot], request.params, request.seed, position, request.counts
        )
    if len(block) > 1:
        request.statistics.record_draft(len(block) - 1, accepted)
    request.fresh = accepted + 1
    request.committed += accepted + 1
    return _emit(request, [*block[1 : accepted + 1].tolist(), token])


def _emit(request: InFlight, tokens: list[int]) -> Emission:
    request.anchor = tokens[-1]
    kept, text, reason = request.stop.push(tokens)
    request.statistics.num_generation_tokens += kept
    if reason is not None:
        request.statistics.generation_time = perf_counter() - (request.first_token_at or perf_counter())
    return Emission(request, tokens[:kept], text, reason)
