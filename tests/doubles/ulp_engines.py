"""Engines whose numbers depend on the shape of a pass by a last bit, as those of GPUs do.

A row of the cache is a number of a few bits, computed from the mean of the rows that it sees, its token and its
position. It and its logits are rounded. A kernel decides how what lies near the middle of two numbers is rounded, and
the kernel follows from the number of rows in the pass, in groups as they were measured on a GPU (llama.cpp, issue
27407). Every choice is also that of some engine: rows of all sequences counted together, the place among them, the
partners' content, and the order of an accepted path in a tree.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from dflash_trt.decoding.pair import FREE, PassRule
from dflash_trt.decoding.scheduler import Scheduler
from tests.doubles.fake_engines import VOCAB, FakeDrafter, FakeEngine, FakeTarget, decided
from tests.doubles.pool import scheduler_over

Array = np.ndarray[Any, Any]

BLOCK, CHUNK = 8, 12
GROUPS = {1: 1, 2: 2, 3: 3, 4: 3, 5: 5, 6: 5, 7: 7, 8: 5}  # width: its kernel
ROW_STEP, LOGIT_STEP = 64, 12  # numbers are multiples of 1/64 and 1/12
_random = np.random.default_rng(5)
WAVES = _random.normal(0, 4, (3, VOCAB))
ROUNDING = _random.uniform(-0.25, 0.25, (101, VOCAB + 1))  # by kernel, and number of a row


@dataclass(frozen=True)
class Lies:
    """What a row's kernel depends on, beside the width of its pass.

    sequences: the sequences of the pass, as their rows are counted together. place: the place among them. partners:
    their tokens. paths: the places of its ancestors in a tree. cuts: the width, also of passes with more rows than a
    block. groups: the kernel of each width. chunks: whether a whole chunk of a prompt has a kernel of its own.
    """

    sequences: bool = False
    place: bool = False
    partners: bool = False
    paths: bool = True
    cuts: bool = True
    groups: tuple[tuple[int, int], ...] = tuple(GROUPS.items())


@cache
def _rounding(kernel: str) -> Array:
    return ROUNDING[zlib.crc32(kernel.encode()) % len(ROUNDING)]


def rounding(*kernel: object) -> Array:
    """How a kernel rounds the number of a row, and its logits: shares of a step."""
    return _rounding(repr(kernel))


def number(mean: float, token: int, position: int, up: float) -> float:
    exact = math.sin(1.3 * token + 0.7 * position + 9 * mean)
    return math.floor(exact * ROW_STEP + 0.5 + up) / ROW_STEP


def logits_of(numbers: Array, tokens: Array, ups: Array) -> Array:
    """Logits [n, V] of rows: their numbers and tokens [n], and how their kernels round [n, V]."""
    exact = 3 * np.sin(WAVES[0] * numbers[:, None] + WAVES[1] * tokens[:, None] + WAVES[2])
    return (np.floor(exact * LOGIT_STEP + 0.5 + ups) / LOGIT_STEP).astype(np.float32)


class UlpTarget(FakeTarget):
    def __init__(self, slots: int, capacity: int, lies: Lies) -> None:
        super().__init__(slots, capacity)
        self.cache, self.lies = np.full((slots, capacity), np.nan), lies
        self.groups = dict(lies.groups)
        self.widths = list[tuple[int, int]]()  # sequences and rows of every pass

    def run(self, feeds: Mapping[str, Array], *, first_slot: int = 0) -> dict[str, Array]:
        tokens, starts = feeds["tokens"], feeds["start"]
        n, width = tokens.shape
        self.room(first_slot, starts, width)
        self.widths.append((n, width))
        features, logits = np.zeros((n, width, 1), np.float32), np.zeros((n, width, VOCAB), np.float32)
        for i in range(n):
            cache, start = self.cache[first_slot + i], int(starts[i])
            kernel = self._kernel(tokens, i, width)
            before = math.fsum(cache[:start])
            assert not math.isnan(before), "rows that nothing wrote"
            numbers, ups = list[float](), list[Array]()
            seen_rows = feeds["visible"][i].sum(1).tolist()
            for j in range(width):
                whole = seen_rows[j] == j + 1  # as in a chain
                seen = range(j) if whole else np.flatnonzero(feeds["visible"][i, j, :j]).tolist()
                gaps = list(seen) if self.lies.paths and not whole else []
                ups.append(rounding(kernel, gaps))
                total = before + math.fsum(numbers[k] for k in seen)
                mean = total / max(start + len(seen), 1)
                position = start + int(feeds["depths"][i, j])
                numbers.append(number(mean, int(tokens[i, j]), position, ups[-1][0]))
            cache[start:] = np.nan
            cache[start : start + width] = numbers
            features[i, :, 0] = numbers
            logits[i] = logits_of(np.array(numbers), tokens[i], np.stack(ups)[:, 1:])
        return decided(feeds, logits, features)

    def read(self, slot: int, start: int, stop: int) -> dict[str, Array]:
        """The rows of a slot by the name of their cache."""
        return {"k_cache.0": self.cache[slot, start:stop, None]}

    def _kernel(self, tokens: Array, place: int, width: int) -> tuple[object, ...]:
        n, lies = len(tokens), self.lies
        rows = n * width if lies.sequences else width
        kernel: list[object] = [self.groups.get(rows, -(-rows // 4) if lies.cuts else self.groups[BLOCK])]
        if lies.place:
            kernel.append(place)
        if lies.partners:
            kernel.append(np.delete(tokens, place, axis=0).tolist())
        return tuple(kernel)


class UlpDrafter(FakeDrafter):
    """Guesses with kernels of its own. So its drafts are often right, and wrong where the last bit decides."""

    width = 2

    def __init__(self, slots: int, capacity: int) -> None:
        FakeEngine.__init__(self, slots, capacity)
        self.cache = np.zeros((slots, capacity))

    def run(self, feeds: Mapping[str, Array], *, first_slot: int = 0) -> dict[str, Array]:
        features, valid, starts, block = (feeds[k] for k in ("features", "n_features", "start", "block"))
        n, width = block.shape
        self.room(first_slot, starts, features.shape[1] + width)
        tokens, up = np.zeros((n, width - 1, self.width), int), rounding("drafter")
        for i, (start, count) in enumerate(zip(starts, valid, strict=True)):
            cache, at = self.cache[first_slot + i], int(start + count)
            cache[start:] = 0
            cache[start:at] = features[i, :count, 0]
            total, token = math.fsum(cache[:at]), int(block[i, 0])
            for j in range(width - 1):
                row = number(total / max(at + j, 1), token, at + j, up[0])
                total += row
                best = logits_of(np.array([row]), np.array([token]), up[None, 1:])[0].argsort()[::-1]
                tokens[i, j] = best[: self.width]
                token = int(best[0])
        said = np.array([-0.2, -2.0], np.float32)
        return {"draft_tokens": tokens, "draft_logprobs": np.broadcast_to(said, tokens.shape).copy()}


def ulp_scheduler(lies: Lies, rule: PassRule = FREE, *, batch: int = 4, kept: int = 200) -> Scheduler:
    """A scheduler over these engines, for texts of up to 64 tokens, with memory for the rows of `kept` tokens."""
    capacity = 64 + 2 * BLOCK + 1
    engines = UlpTarget(batch, capacity, lies), UlpDrafter(batch, capacity)
    scheduler = scheduler_over(*engines, chunk=CHUNK, kept=kept)
    scheduler.pair.rule = rule
    return scheduler
