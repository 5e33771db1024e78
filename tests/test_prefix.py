"""Prefix reuse: the same tokens from fewer passes, the drafter's context whole, and the right rows kept."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dflash_trt import LLM
from dflash_trt.decoding.inflight import InFlight, Rows
from dflash_trt.decoding.request import SamplingParams
from dflash_trt.decoding.slots import Slots
from tests.checkpoints import VOCAB as REAL_VOCAB
from tests.fake_engines import BLOCK, VOCAB, Pool, expected, request
from tests.test_scheduler import Lengths, bundle, finish, prompt

__all__ = ["bundle"]  # the fixture


def hits(pool: Pool, tokens: list[int], *, draft: bool = True, max_tokens: int = 20) -> InFlight:
    made = request(tokens, SamplingParams(max_tokens=max_tokens), draft=draft)
    assert finish(pool, Lengths(5), made)[made] == expected(tokens, made.params, 0)
    return made


def test_a_prefix_of_a_request_that_has_ended_is_reused_by_target_and_drafter() -> None:
    base = prompt(30)
    cold = hits(Pool(1, 2), base + prompt(9, 1))
    assert cold.statistics.num_cached_tokens == 0
    pool = Pool(1, 2)
    hits(pool, base)
    for length, cached in ((9, 30), (9, 38)):  # the second time all but the last token
        warm = hits(pool, base + prompt(length, 1))
        assert warm.statistics.num_cached_tokens == cached
        assert warm.statistics.acceptance_histogram == cold.statistics.acceptance_histogram
    assert hits(pool, base[:12]).statistics.num_cached_tokens == 11
    assert hits(pool, [*base[:12], (base[12] + 1) % VOCAB, 3]).statistics.num_cached_tokens == 12
    assert hits(pool, [(base[0] + 1) % VOCAB, *base]).statistics.num_cached_tokens == 0


def test_the_output_of_a_request_is_a_prefix_too() -> None:
    pool, base = Pool(1, 2), prompt(10)
    first = hits(pool, base, max_tokens=15)
    turn = [*base, *first.output[:15], *prompt(4, 2)]
    assert hits(pool, turn).statistics.num_cached_tokens >= 10 + 15 - BLOCK
    assert hits(pool, turn, draft=False).statistics.num_cached_tokens == len(turn) - 1


def test_a_live_request_is_a_source() -> None:
    base = prompt(30)
    cold = hits(Pool(1, 1), base + prompt(5, 1))
    pool = Pool(2, 2)  # no spare slot
    live = request(base, SamplingParams(max_tokens=60))
    pool.scheduler.submit(live)
    for _ in range(6):
        pool.scheduler.step(Lengths(5))
    warm = request(base + prompt(5, 1), SamplingParams(max_tokens=20))
    assert finish(pool, Lengths(5), warm)[warm] == cold.output[:20]
    assert warm.statistics.num_cached_tokens == 30
    # Its last block may be longer than alone, where there is no room for more than its own tokens.
    rounds = [sum(r.statistics.block_length_histogram) for r in (warm, cold)]
    assert rounds[0] == rounds[1]
    assert live.output[:60] == expected(base, live.params, 0)


def test_rows_without_the_drafter_s_are_of_use_only_without_drafting() -> None:
    pool, base = Pool(1, 3), prompt(30)
    hits(pool, base, draft=False)
    assert hits(pool, base + prompt(5, 1), draft=False).statistics.num_cached_tokens == 30
    cold = hits(pool, base + prompt(5, 2))
    assert cold.statistics.num_cached_tokens == 0
    assert cold.statistics.mean_acceptance_length > 2
    assert hits(pool, base + prompt(5, 3)).statistics.num_cached_tokens == 30
    assert hits(pool, base + prompt(5, 3), draft=False).statistics.num_cached_tokens == 34


def test_the_least_recently_used_rows_make_room() -> None:
    pool = Pool(1, 4)
    a, b, c, d = (prompt(12, i) for i in range(4))
    for each in (a, b, c):
        hits(pool, each)
    assert hits(pool, a).statistics.num_cached_tokens == 11  # used again: b is the oldest now
    hits(pool, d)
    hits(pool, prompt(12, 4))
    kept = [rows.tokens[:12] for rows in pool.scheduler.slots.kept.values()]
    assert b not in kept
    assert len(pool.scheduler.slots.kept) <= 4
    assert hits(pool, a).statistics.num_cached_tokens == 11


def test_rows_that_give_way_to_a_request_do_not_drive_out_newer_ones() -> None:
    """The slot that a request needs may hold the oldest rows of all: those go, not the next oldest."""
    old, new, live = (Rows(prompt(12, i), 12, last_used=i) for i in (1, 2, 3))
    for first, second, stay in ((old, new, {2: new}), (new, old, {2: new})):
        slots = Slots(Pool(2, 3).pair)
        slots.kept = {1: first, 2: second}
        assert slots.occupy(1, [VOCAB] * 9, {0: live}, draft=True) == 0
        assert slots.kept == stay


def test_the_same_prompt_again_and_again_takes_one_slot() -> None:
    pool, other = Pool(1, 4), prompt(12, 1)
    hits(pool, other)
    for _ in range(8):
        hits(pool, prompt(12))
    assert hits(pool, other).statistics.num_cached_tokens == 11


def test_a_conversation_takes_one_slot_however_long_it_grows() -> None:
    pool, other, talk = Pool(1, 4), prompt(12, 1), prompt(5)
    hits(pool, other)
    for turn in range(5):
        talk += hits(pool, talk, max_tokens=7).output[:7] + prompt(3, turn)
        assert len(pool.scheduler.slots.kept) <= 2
    assert hits(pool, other).statistics.num_cached_tokens == 11


def test_without_spare_slots_a_free_one_keeps_what_it_has() -> None:
    pool, base = Pool(1, 1), prompt(20)
    hits(pool, base)
    assert hits(pool, base + prompt(3, 1)).statistics.num_cached_tokens == 20
    other = [(base[0] + 1) % VOCAB, *base]
    assert hits(pool, other).statistics.num_cached_tokens == 0
    assert hits(pool, base).statistics.num_cached_tokens == 0


def test_a_conversation_survives_others_that_begin_like_it() -> None:
    """One at a time, as a command line would: each leaves its rows where the next one must go."""
    pool, system = Pool(1, 4), prompt(10)
    talks = [[*system, i, *prompt(20, i)] for i in range(3)]
    for each in talks:
        hits(pool, each)
    for each in talks:
        assert hits(pool, each).statistics.num_cached_tokens == 30


def test_a_hit_on_onnx_runtime_drafts_as_well_as_a_cold_request(bundle: Path) -> None:
    base = np.random.default_rng(1).integers(0, REAL_VOCAB, 50).tolist()
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    with LLM(bundle, max_batch_size=1, prefix_cache_bytes=0, threads=1) as llm:
        cold = llm.generate([*base, 7, 8, 9], params, block_length=8)
    with LLM(bundle, max_batch_size=2, threads=1, prefill_chunk=16) as llm:
        llm.generate(base, params)
        warm, again = (llm.generate([*base, 7, 8, 9], params, block_length=8) for _ in range(2))
    assert [c.statistics.num_cached_tokens for c in (cold, warm, again)] == [0, 50, 52]
    assert warm.token_ids == again.token_ids == cold.token_ids
    histograms = [c.statistics.acceptance_histogram for c in (cold, warm, again)]
    assert histograms[0] == histograms[1] == histograms[2]
    assert cold.statistics.mean_acceptance_length > 1.1
