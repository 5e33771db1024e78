"""Exact mode on engines that change a last bit with the shape of a pass: the tokens of plain decoding, always."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import asdict

import pytest

from dflash_trt.decoding.length.policy import FixedLength
from dflash_trt.decoding.length.trees import FixedTrees
from dflash_trt.decoding.pair import FREE, PassRule
from dflash_trt.decoding.params import SamplingParams
from dflash_trt.decoding.request import Request
from dflash_trt.decoding.scheduler import Scheduler
from dflash_trt.decoding.widths import find_rule, measure
from dflash_trt.errors import DFlashError
from tests.doubles.fake_engines import VOCAB
from tests.doubles.pool import request
from tests.doubles.ulp_engines import BLOCK, CHUNK, Lies, UlpTarget, ulp_scheduler

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
    wrong, scheduler = changed(lies, rule, 1000)
    assert wrong == 0
    target = scheduler.pair.target
    assert isinstance(target, UlpTarget)
    assert {width for _, width in target.widths if width <= BLOCK} == set(rule.widths)
    assert max(batch for batch, _ in target.widths) == (4 if rule.any_batch else 1)
    assert scheduler.slots.prefixes.counts.reused_tokens > 1000


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
