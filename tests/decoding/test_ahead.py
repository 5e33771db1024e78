"""Rounds that start before the host has read the results of the ones before, over the arrays of a GPU. `test_faults`
has any schedules.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from dflash_trt.decoding.acceptance import judge
from dflash_trt.decoding.draft import Draft, Verified
from dflash_trt.decoding.params import SamplingParams
from dflash_trt.decoding.request import NOBODY
from dflash_trt.engines.device.following import go_on, next_round, scratch
from dflash_trt.engines.device.sizes import DECODE
from dflash_trt.engines.device.stream import Landing
from tests.doubles.device_pool import DevicePool
from tests.doubles.fake_engines import BLOCK, VOCAB, FakeTarget, expected
from tests.doubles.fake_states_and_windows import LongStrideTarget, WindowTarget
from tests.doubles.pool import Pool, request
from tests.doubles.schedules import Lengths, drive, finish, prompt

PLAIN = SamplingParams(max_tokens=60)


def passes(pool: DevicePool) -> int:
    return sum(pool.scheduler.metrics._block_lengths)


@pytest.mark.parametrize("length", [1, 2, 5])  # 5 is padded to 6
@pytest.mark.parametrize("target", [FakeTarget, WindowTarget, LongStrideTarget])
def test_most_rounds_start_ahead_and_tokens_are_the_same(length: int, target: type[FakeTarget]) -> None:
    """Also where the rows of a window move every few tokens. Eight requests, greedy or sampled, of which some draft at
    most 3 tokens or none, with ends at different times.
    """
    pool = DevicePool(8, target=target)
    params = [SamplingParams(max_tokens=30 + i, temperature=0.8 * (i % 2), seed=i) for i in range(8)]
    asked = [
        request(prompt(5 + i, i), each, draft=i % 3 < 2, block_length=[None, 3][i % 2])
        for i, each in enumerate(params)
    ]
    tokens = finish(pool, Lengths(length), *asked)
    for each in asked:
        assert tokens[each] == expected(each.prompt, each.params, each.seed)
        assert len(each.statistics.acceptance_histogram) <= (each.block_length or length)
    assert pool.followed > passes(pool) / 3


def test_a_round_starts_before_the_host_waits_for_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, order, wait = DevicePool(2), list[str](), Landing.wait
    run: Any = pool.pair.target.run

    def noted(name: str, work: Any) -> Any:
        return lambda *given, **named: order.append(name) or work(*given, **named)

    monkeypatch.setattr(Landing, "wait", noted("wait", wait))
    for i in range(2):
        pool.scheduler.submit(request(prompt(4, i), PLAIN))
    steps = drive(pool, Lengths(3))
    for _ in range(4):
        next(steps)
    monkeypatch.setattr(pool.pair.target, "run", noted("pass", run))
    order.clear()
    for _ in range(3):
        next(steps)
    assert order == ["pass", "wait"] * 3


def test_a_policy_learns_of_no_round_of_another_length_than_it_asked_for() -> None:
    """A trial of another length runs in a round that did not start ahead."""

    class Trials(Lengths):
        asked, length = list[int](), 0

        def draft(self, active: Any) -> int:
            self.length = 5 if len(self.rounds) % 4 == 3 else 3
            return self.length

        def observe(self, done: Any) -> None:
            super().observe(done)
            self.asked.append(self.length)

    pool, lengths = DevicePool(2), Trials(3)
    for i in range(2):
        pool.scheduler.submit(request(prompt(4, i), PLAIN))
    for _ in drive(pool, lengths):
        if not pool.scheduler.active or min(r.stop.remaining for r in pool.scheduler.active) < 2 * BLOCK:
            break
    assert [done.proposed.nodes for done in lengths.rounds] == lengths.asked
    assert {3, 5} == set(lengths.asked)
    assert pool.followed


def test_a_request_is_its_own_beside_any_samplings() -> None:
    """Penalties do not need the host, and neither do log-probabilities, unless logits are adjusted for them."""
    pool = DevicePool(10)
    follow, beside = pool.pair.follow, list[tuple[bool, list[bool]]]()

    def noted(active: Any, *given: Any) -> Any:
        told = [r.params.adjusted for r in active if r.params.logprobs]
        beside.append((any(r.params.adjusted for r in active), told))
        return follow(active, *given)

    pool.pair.follow = noted  # type: ignore[method-assign]
    different = [{}, {"temperature": 0.8}, {"repetition_penalty": 1.3}, {"logprobs": True, "top_logprobs": 5}]
    different += [{"temperature": 1.2, "top_k": 4}, {"temperature": 0.5, "top_p": 0.7, "min_p": 0.1}]
    different += [
        {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "presence_penalty": 1.5}
    ]  # advised for Qwen3
    different += [{"allowed_token_ids": range(0, VOCAB, 3), "frequency_penalty": 0.5, "logit_bias": {3: 1.0}}]
    different += [{"logprobs": True, "top_logprobs": 2, "temperature": 0.9}]
    different += [{"logprobs": True, "max_tokens": 9, "presence_penalty": 0.5}]
    params = [SamplingParams(**{"max_tokens": 40, "seed": 3, **each}) for each in different]  # type: ignore
    asked = [request(prompt(7, 1), each) for each in params]
    tokens = finish(pool, Lengths(BLOCK), *asked)
    for each in asked:
        assert tokens[each] == expected(each.prompt, each.params, 3)
    by_host = [request(prompt(7, 1), each) for each in params]
    finish(Pool(10, 10), Lengths(BLOCK), *by_host)
    for each, other in zip(asked, by_host, strict=True):
        assert each.logprobs == pytest.approx(other.logprobs, abs=1e-5)
        for top, theirs in zip(each.top_logprobs, other.top_logprobs, strict=True):
            assert dict(top) == pytest.approx(dict(theirs), abs=1e-5)
    assert len(asked[3].logprobs) == len(asked[3].top_logprobs) == 40
    assert sum(adjusted and bool(told) for adjusted, told in beside) > 3
    assert not any(any(told) for _, told in beside)


@pytest.mark.parametrize("seed", range(8))
def test_rows_that_are_not_finite_now_and_then_change_no_token(seed: int) -> None:
    """In rounds with drafts, from any row on. The round that was started ahead is lost for such a request alone, also
    where an ended one left such rows to a request that has joined since.
    """
    pool, rng = DevicePool(3), random.Random(seed)
    runner: Any = pool.pair.target
    run = runner.run

    def spoilt(profile: int, feeds: Any, **named: Any) -> Any:
        outputs = run(profile, feeds, **named)
        width = outputs["features"].shape[1]
        for slot in range(runner.active()) if profile == DECODE and width > 1 else ():
            if rng.random() < 0.15:
                first, start = rng.randrange(width), int(feeds["start"][slot])
                for name in ("logits", "features"):
                    outputs[name][slot, first:] = torch.nan
                runner.fake.nan[slot, start + first : start + width] = True
        return outputs

    runner.run = spoilt
    asked = [
        request(
            prompt(5, i),
            SamplingParams(
                max_tokens=60 if i < 3 else 4 + i,
                temperature=0.4 * (i % 3),
                seed=i,
                presence_penalty=seed % 2,
            ),
        )
        for i in range(12)
    ]
    tokens = finish(pool, Lengths(4), *asked)
    for each in asked:
        assert tokens[each] == expected(each.prompt, each.params, each.seed)
    assert pool.followed


def test_the_device_decides_as_the_host() -> None:
    """How many nodes are committed, and the new anchor, for any result of a pass."""
    rng, slots, width = np.random.default_rng(1), 4, 6
    asked = request([1], PLAIN)
    for nodes in (*range(1, width + 1),) * 20:
        asked.block_length = int(rng.integers(1, width + 1))
        tokens, accepted = rng.integers(0, 9, (slots, width)), rng.integers(0, width, slots)
        tokens[:, nodes:] = tokens[:, nodes - 1 : nodes]
        finite, following = rng.random((slots, width)) > 0.1, rng.integers(0, 9, slots)
        following[rng.random(slots) < 0.1] = -1
        given = {
            "accepted": accepted,
            "next_token": following,
            "tokens": tokens,
            "finite": finite.astype(np.int32),
        }
        given |= {"limits": np.full(slots, asked.block_length), "reads": np.array([1, 1, 0, 1])}
        given |= {
            name: np.full(slots, 50) for name in ("target_start", "places", "n_features", "drafter_start")
        }
        memory = {name: torch.tensor(each).flatten() for name, each in given.items()}
        memory |= scratch(slots, width, torch.device("cpu"))
        memory["anchors"] = torch.zeros(slots, dtype=torch.int64)
        next_round(lambda name, *shape: memory[name].view(shape), slots, nodes, width)  # noqa: B023
        anchors = memory["anchors"]
        draft = Draft(tokens[:, :nodes], None, None)
        verified = Verified(accepted, following, [True] * slots, finite, {}, [True] * slots)
        for slot in range(slots):
            verdict = judge(asked, tokens[slot].tolist(), draft, verified, slot)
            path = [0, *verdict.path]
            count = len(path) if verdict.ok else len(path) - 1
            assert memory["target_start"][slot] == 50 + count
            assert anchors[slot] == (verdict.token if verdict.ok else tokens[slot, path[-1]])
            read = count * given["reads"][slot]
            if nodes == 1:
                assert memory["places"][slot] == 50 + read
            else:
                assert memory["n_features"][slot] == read
                assert memory["drafter_start"][slot] == 50 + count - read


def test_texts_go_on_where_the_new_anchor_is_theirs() -> None:
    """After any number of committed nodes. Other chains, and those of slots without a text, stay as they are."""
    rng, n, nodes, width = np.random.default_rng(2), 40, 4, 6
    count, anchors = rng.integers(0, nodes + 1, n), rng.integers(0, 4, n)
    texts, tokens = rng.integers(0, 4, (n, 2 * nodes - 1)), rng.integers(10, 19, (n, width))
    texts[::5] = -1
    tokens[:, nodes:] = tokens[:, nodes - 1 : nodes]
    given = {"count": count, "anchors": anchors, "texts": texts, "tokens": tokens}
    memory = scratch(n, width, torch.device("cpu"))
    memory |= {name: torch.tensor(each).flatten() for name, each in given.items()}
    go_on(
        lambda name, *shape: memory[name][: np.prod(shape)].view(shape), n, nodes, width, torch.arange(nodes)
    )
    found, went_on = memory["tokens"].view(n, width).numpy(), 0
    for slot in range(n):
        wanted, at = tokens[slot].copy(), max(count[slot], 1)
        if texts[slot, at - 1] == anchors[slot]:
            wanted[1:nodes] = texts[slot, at : at + nodes - 1]
            wanted[nodes:] = wanted[nodes - 1]
            went_on += 1
        assert found[slot].tolist() == wanted.tolist()
    assert 3 < went_on < n / 2


def test_several_short_prompts_share_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same kind, in slots side by side, as many as fit into a chunk with their padding; some begin with rows of
    an earlier prompt. Rounds of others are started ahead again in the next step.
    """
    pool, read = DevicePool(8, chunk=64, kept=400), list[list[int]]()
    together = pool.pair.prefill_together
    asked = [
        request(prompt(20, 0)[: 10 + i], PLAIN) if i % 2 else request(prompt(5 + i, i), PLAIN, draft=i < 4)
        for i in range(6)
    ]

    def noted(prompts: Any, *given: Any, **named: Any) -> Any:
        read.append([len(each) for each in prompts])
        return together(prompts, *given, **named)

    monkeypatch.setattr(pool.pair, "prefill_together", noted)
    first = request(prompt(20, 0), PLAIN)
    pool.scheduler.submit(first)
    pool.scheduler.step(Lengths(3))
    tokens = finish(pool, Lengths(3), *asked)
    for each in asked:
        assert tokens[each] == expected(each.prompt, PLAIN, 0)
    assert read
    assert pool.followed
    pool.pair.most_together = 1
    assert finish(pool, Lengths(3), *[request(each.prompt, PLAIN) for each in asked])
    assert len(read) == 1


def test_padding_leaves_the_rows_of_a_slot_that_has_ended() -> None:
    """Three requests run as four, and the next one goes on from what the fourth left."""
    pool = DevicePool(4, kept=200)
    asked = [request(prompt(5, i), PLAIN) for i in range(3)] + [
        request(prompt(30), SamplingParams(max_tokens=2))
    ]
    for each in asked:
        pool.scheduler.submit(each)
    steps = drive(pool, Lengths(3))
    while asked[3].stop.finish_reason is None or len(asked[0].output) < 20:
        next(steps)
    again = request(prompt(30), PLAIN)
    tokens = finish(pool, Lengths(3), again)
    assert tokens[again] == expected(again.prompt, PLAIN, 0)
    assert again.statistics.num_cached_tokens == 29


@pytest.mark.parametrize("target", [FakeTarget, WindowTarget, LongStrideTarget])
def test_rounds_start_ahead_between_the_chunks_of_a_prompt(target: type[FakeTarget]) -> None:
    """But for the last one, after which its request is in the next round; and others wait for memory or for a slot."""
    pool, lengths = DevicePool(4, max_seq_len=160, target=target), Lengths(3)
    scheduler, few = pool.scheduler, [request(prompt(4, i), PLAIN, draft=i < 2) for i in range(3)]
    later = [request(prompt(90, i), SamplingParams(max_tokens=20)) for i in range(3)]
    for each in [*few, *later]:
        scheduler.submit(each)
    steps, followed, reading, before = 0, 0, list[Any](), 0
    for _ in drive(pool, lengths):
        if reading and scheduler.filling == reading and len(scheduler.active) == 3:
            steps, followed = steps + 1, followed + pool.followed - before
        reading, before = scheduler.filling[:], pool.followed
    assert steps > 6
    assert followed > steps * 2 / 3
    for each in [*few, *later]:
        assert each.output[: each.params.max_tokens] == expected(each.prompt, each.params, each.seed)


def test_rounds_start_ahead_past_the_ends_and_arrivals_of_requests() -> None:
    """What ended leaves a slot empty in the round after the one that runs, and the next prompt is read there meanwhile.
    Rounds wait where they can do with fewer slots.
    """
    pool, rng = DevicePool(8, chunk=64), random.Random(0)
    follow, rows = pool.pair.follow, list[list[Any]]()
    pool.pair.follow = lambda active, *given: rows.append(list(active)) or follow(active, *given)  # type: ignore
    asked = [
        request(
            prompt(3 + 4 * (i % 9), i),
            SamplingParams(max_tokens=rng.randint(1, 40), temperature=0.8 * (i % 2), seed=i),
            draft=i % 5 > 0,
        )
        for i in range(60)
    ]
    tokens = finish(pool, Lengths(3), *asked)
    for each in asked:
        assert tokens[each] == expected(each.prompt, each.params, each.seed)
    pairs = [*itertools.pairwise(rows)]
    assert any(NOBODY in active for active in rows)
    assert sum(not {*active} <= {NOBODY, *before} for before, active in pairs) > 20
    assert pool.followed > 0.85 * passes(pool)


def test_a_prompt_is_read_again_where_an_ended_request_left_no_numbers() -> None:
    """The round that ran for it too long had not been read when the next prompt came into its slot."""
    pool, read, ends = DevicePool(3, chunk=64, kept=400), list[Any](), SamplingParams(max_tokens=12)
    finish(pool, Lengths(3), request(prompt(40), SamplingParams(max_tokens=1)))
    asked = [request(prompt(4, 1), params) for params in (ends, ends, PLAIN)]
    asked += [request(each, SamplingParams(max_tokens=20)) for each in (prompt(8, 3), prompt(42))]
    runner: Any = pool.pair.target
    run, prefill, together = runner.run, pool.pair.prefill, pool.pair.prefill_together

    def spoilt(profile: int, feeds: Any, **named: Any) -> Any:
        outputs, start = run(profile, feeds, **named), int(feeds["start"][0])
        if profile == DECODE and not asked[0].ended and start >= 4 + 11:
            outputs["logits"][0] = outputs["features"][0] = torch.nan
            runner.fake.nan[0, start : start + 3] = True
        return outputs

    runner.run = spoilt
    pool.pair.prefill = lambda *given, **named: read.append([given[0]]) or prefill(*given, **named)  # type: ignore
    pool.pair.prefill_together = lambda *given, **named: read.append(given[0]) or together(*given, **named)  # type: ignore
    tokens = finish(pool, Lengths(3), *asked)
    for each in asked:
        assert tokens[each] == expected(each.prompt, each.params, 0)
    assert read[1:] == [[asked[3].prompt, asked[4].prompt[40:]], [asked[3].prompt]]


@pytest.mark.parametrize("length", [2, 4, 5])  # 5 is padded to 6
@pytest.mark.parametrize("wrong", [0, 7])
def test_drafts_of_texts_go_on_in_rounds_that_start_ahead(
    length: int, wrong: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the host knows of a text is a round old then: the device finds where it goes on. Texts that are right give
    all drafts, also to a request without the drafter, and each `wrong` token in them costs drafts only.
    """

    class Copies(Lengths):
        def select(self, draft: Draft, active: Any, slots: Any, most: int) -> Draft:
            for slot in slots if draft.nodes > 1 else ():
                if tokens := active[slot].copied(draft.nodes - 1)[0]:
                    draft.replaced[slot], draft.copied[slot] = tokens, {*range(1, draft.nodes)}
            return draft

    def copied(self: Any, most: int) -> tuple[list[int], int]:
        if not self.options.takes_lookup:
            return [], 0
        done = len(self.output)
        found = enumerate(wholes[self][done : done + most], done)
        return [VOCAB - 1 - token if wrong and at % wrong == 0 else token for at, token in found], 1

    pool = DevicePool(4)
    sources = "lookup", "drafter,lookup", "drafter", "drafter,lookup"
    asked = [
        request(
            prompt(4, i), SamplingParams(max_tokens=60, seed=i, temperature=float(i % 2)), draft_source=each
        )
        for i, each in enumerate(sources)
    ]
    wholes = {each: expected(each.prompt, replace(each.params, max_tokens=99), each.seed) for each in asked}
    monkeypatch.setattr("dflash_trt.decoding.request.Request.copied", copied)
    tokens = finish(pool, Copies(length), *asked)
    for each, source in zip(asked, sources, strict=True):
        assert tokens[each] == expected(each.prompt, each.params, each.seed)
        drafts, right = (
            each.statistics.num_lookup_draft_tokens,
            each.statistics.num_lookup_accepted_tokens,
        )
        assert (drafts > 0) == (source != "drafter")
        assert right == drafts or wrong
        assert right >= drafts / 4
        if source == "lookup" and not wrong:
            assert sum(each.statistics.block_length_histogram) <= 60 / length + 3
    assert pool.followed > 0.8 * passes(pool)
