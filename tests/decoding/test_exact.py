"""Exact mode on engines that change a last bit with the shape of a pass: the tokens of plain decoding, always."""

from __future__ import annotations

import json
import math
import random
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest

from dflash_trt.decoding.length.policy import FixedLength
from dflash_trt.decoding.length.trees import FixedTrees
from dflash_trt.decoding.pair import FREE, PassRule
from dflash_trt.decoding.params import SamplingParams
from dflash_trt.decoding.request import Request
from dflash_trt.decoding.scheduler import Scheduler
from dflash_trt.decoding.widths import find_rule, measure
from dflash_trt.errors import DFlashError
from tests.doubles.fake_engines import VOCAB, FakeDrafter, FakeEngine, FakeTarget, decided
from tests.doubles.pool import request, scheduler_over

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


TOKENS = 12
CLASS = (5, 6, 8)
# What an engine does, and the rule under which it is exact.
ENGINES = {
    "widths": (Lies(), PassRule(CLASS, any_cut=False, any_tree=False)),
    "batches": (
        Lies(sequences=True, place=True, partners=True),
        PassRule(CLASS, any_batch=False, any_cut=False, any_tree=False),
    ),
    "trees": (Lies(paths=False), PassRule(CLASS, any_cut=False)),
    "one row": (
        Lies(paths=False, cuts=False, groups=tuple((n, 1 if n == 1 else 5) for n in range(1, 9))),
        PassRule((2, 3, 4, 5, 6, 7, 8)),
    ),
}
Job = tuple[tuple[int, ...], float]  # prompt, temperature


def jobs(count: int) -> list[Job]:
    """Prompts, many with a common beginning, and temperatures."""
    draw = random.Random(7)
    stems = [[draw.randrange(VOCAB) for _ in range(n)] for n in (0, 13, 30)]
    return [
        (
            (*draw.choice(stems), *(draw.randrange(VOCAB) for _ in range(draw.randint(1, 18)))),
            draw.choice([0.0, 0.0, 0.7]),
        )
        for _ in range(count)
    ]


def asked(job: Job, tokens: int, *, draft: bool = True, **options: int | None) -> Request:
    prompt, temperature = job
    return request(
        prompt, SamplingParams(max_tokens=tokens, temperature=temperature, seed=3), draft=draft, **options
    )


def plain(lies: Lies, rule: PassRule, kinds: list[Job]) -> list[list[int]]:
    """The tokens of plain decoding, one request at a time, without reused rows."""
    scheduler, found = ulp_scheduler(lies, rule, batch=1, kept=0), []
    for job in kinds:
        scheduler.submit(one := asked(job, TOKENS, draft=False))
        while not scheduler.idle:
            scheduler.step(FixedLength(1))
        scheduler.forget()
        found.append(one.output)
    return found


def traffic(scheduler: Scheduler, kinds: list[Job], count: int) -> Iterator[tuple[int, Request]]:
    """Run so many jobs that come, draft and leave at random. Yields each with the number of its kind."""
    draw, live = random.Random(1), dict[Request, int]()
    trees = [FixedTrees(BLOCK, BLOCK - 1, nodes) for nodes in (3, 6, 8)]
    trees = trees if scheduler.most_tree_nodes else []
    left = count
    while left or not scheduler.idle:
        while left and len(live) < 6 and draw.random() < 0.7:
            left -= 1
            kind = draw.randrange(len(kinds))
            each = asked(
                kinds[kind],
                draw.randint(1, TOKENS),
                draft=draw.random() < 0.8,
                block_length=draw.choice([None, None, 1, 3, 7]),
            )
            live[each] = kind
            scheduler.submit(each)
        if live and draw.random() < 0.05:
            scheduler.cancel(draw.choice(list(live)))
        lengths = [FixedLength(draw.randint(1, BLOCK)), *trees]
        for emission in scheduler.step(draw.choice(lengths)):
            assert emission.error is None
            if emission.finish_reason is not None:
                yield live.pop(emission.request), emission.request


def changed(lies: Lies, rule: PassRule, count: int) -> tuple[int, Scheduler]:
    """Of so many jobs, those whose tokens are not a beginning of plain decoding's."""
    kinds = jobs(count // 10)
    right = plain(lies, rule, kinds)
    scheduler = ulp_scheduler(lies, rule)
    wrong = []
    for kind, job in traffic(scheduler, kinds, count):
        given = job.output[: job.statistics.num_generation_tokens]
        wrong.append(given != right[kind][: len(given)])
    assert len(wrong) == count
    return sum(wrong), scheduler


@pytest.mark.parametrize("engine", ENGINES)
def test_every_job_has_the_tokens_of_plain_decoding(engine: str) -> None:
    lies, rule = ENGINES[engine]
    wrong, scheduler = changed(lies, rule, 500)
    assert wrong == 0
    target = scheduler.pair.target
    assert isinstance(target, UlpTarget)
    assert {width for _, width in target.widths if width <= BLOCK} == set(rule.widths)
    assert max(batch for batch, _ in target.widths) == (4 if rule.any_batch else 1)
    assert scheduler.slots.prefixes.counts.reused_tokens > 500


@pytest.mark.parametrize(
    ("engine", "rule"),
    [
        *((engine, FREE) for engine in ENGINES),
        ("widths", PassRule((3, 4, 5, 6, 8), any_cut=False, any_tree=False)),  # two kernels
        ("widths", PassRule(CLASS, any_tree=False)),  # any reused row
        ("batches", PassRule(CLASS, any_cut=False, any_tree=False)),  # several sequences
        ("widths", PassRule(CLASS, any_cut=False)),  # trees
    ],
)
def test_each_part_of_the_rule_is_needed(engine: str, rule: PassRule) -> None:
    assert changed(ENGINES[engine][0], rule, 400)[0] > 0


@pytest.mark.parametrize("engine", ENGINES)
def test_the_rule_is_measured(engine: str) -> None:
    lies, rule = ENGINES[engine]
    pair = ulp_scheduler(lies).pair
    manifest = {"block_size": BLOCK, "max_seq_len": 64, "eos_token_ids": []}
    prompts = [list(tokens) for tokens, _ in jobs(200) if len(tokens) > 2 * CHUNK][:3]
    raw = list(measure(pair, prompts, range(1, BLOCK + 1), 24, manifest))
    assert sum(each.flips for each in raw) > 0
    assert find_rule(pair, prompts, raw, manifest, 24) == rule
    assert pair.rule == FREE


def test_an_engine_without_a_rule() -> None:
    """Its kernels follow from a number that no pass repeats, as with sums in the order of arrival."""
    pair = ulp_scheduler(Lies()).pair
    target, manifest = pair.target, {"block_size": BLOCK, "max_seq_len": 64, "eos_token_ids": []}
    assert isinstance(target, UlpTarget)
    known = target._kernel
    target._kernel = lambda *given: (*known(*given), target.passes % 5)  # type: ignore[method-assign]
    raw = list(measure(pair, [[1] * 20], range(1, BLOCK + 1), 24, manifest))
    assert find_rule(pair, [[1] * 20], raw, manifest, 24) is None


def test_a_rule_is_read_as_it_was_written() -> None:
    rule = PassRule((5, 8), any_cut=False)
    assert PassRule.read(json.loads(json.dumps(asdict(rule)))) == rule
    for wrong in ({}, asdict(rule) | {"widths": [8, 5]}, asdict(rule) | {"any_tree": 1}, [1]):
        with pytest.raises(DFlashError):
            PassRule.read(wrong)
