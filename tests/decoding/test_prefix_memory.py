"""Prefixes in little memory: each is kept once, those in use the longest, and beginnings longer than ends."""

from __future__ import annotations

import pytest

from dflash_trt.decoding.params import SamplingParams
from tests.decoding.test_prefix import hits
from tests.doubles.fake_engines import ROW_BYTES, VOCAB
from tests.doubles.pool import Pool, request
from tests.doubles.schedules import Lengths, finish, prompt


def test_the_pages_of_many_salts_come_and_go() -> None:
    pool, base = Pool(1, 1, kept=60), prompt(30)
    for i in range(20):
        assert hits(pool, base, salt=f"{i}", max_tokens=1).statistics.num_cached_tokens == 0
    assert len(pool.prefixes._trees) <= 2
    assert hits(pool, base, salt="19", max_tokens=1).statistics.num_cached_tokens == 29


def test_a_prefix_stays_when_others_took_its_slot() -> None:
    """A prefix that takes less memory than a slot, in a pair of published size, is still kept."""
    pool, base = Pool(1, 1, kept=40), prompt(30)  # a slot has 133 rows
    first = hits(pool, base, max_tokens=2)
    assert first.statistics.num_cached_tokens == 0
    hits(pool, [(base[0] + 1) % VOCAB], max_tokens=2)
    again = [*base, first.output[0], 4]  # also what it answered, whose features waited
    assert hits(pool, again, max_tokens=2).statistics.num_cached_tokens == 31
    assert pool.prefixes.counts.bytes <= 40 * 2 * ROW_BYTES


def test_of_a_prefix_that_does_not_fit_the_beginning_is_kept() -> None:
    pool, base = Pool(1, 1, kept=20), prompt(50)
    hits(pool, base, max_tokens=4)
    counts = pool.prefixes.counts
    assert (counts.kept_tokens, counts.dropped_tokens) == (16, 0)
    hits(pool, [(base[0] + 1) % VOCAB], max_tokens=1)
    assert counts.refused_tokens >= 34
    assert hits(pool, base, max_tokens=4).statistics.num_cached_tokens == 16


def test_prefixes_share_what_they_have_in_common() -> None:
    pool, system = Pool(1, 1, kept=400), prompt(64)
    for i in range(6):
        hits(pool, [*system, i, *prompt(7, i)], max_tokens=1)
    assert pool.prefixes.counts.kept_tokens == 64 + 6 * 8
    for i in range(5):
        assert hits(pool, [*system, i, *prompt(7, i), 1], max_tokens=1).statistics.num_cached_tokens == 72


def test_the_least_recently_used_rows_make_room() -> None:
    pool = Pool(1, 1, kept=96)
    a, b, c, d = (prompt(31, i) for i in range(4))
    for each in (a, b, c):
        hits(pool, each, max_tokens=1)
    assert (
        hits(pool, a, max_tokens=1).statistics.num_cached_tokens == 30
    )  # used again, so b is the oldest now
    hits(pool, d, max_tokens=1)
    counts = pool.prefixes.counts
    assert counts.dropped_tokens == 31
    for each, cached in ((a, 30), (c, 30), (b, 0)):
        assert pool.prefixes.find(each[:-1], draft=True)[1] == cached


def test_the_last_page_of_a_prefix_goes_before_those_that_it_needs() -> None:
    """A shorter beginning is still useful; a page without its predecessors is not."""
    pool, long = Pool(1, 1, kept=64), prompt(48)
    hits(pool, long, max_tokens=1)
    hits(pool, prompt(31, 1), max_tokens=1)
    assert pool.prefixes.counts.dropped_tokens == 16
    assert pool.prefixes.find(long, draft=True)[1] == 32


def test_the_same_prompt_again_and_again_is_kept_once() -> None:
    pool, other = Pool(1, 4), prompt(12, 1)
    hits(pool, other, max_tokens=1)
    for _ in range(8):
        hits(pool, prompt(12))
    kept = pool.prefixes.counts.kept_tokens
    hits(pool, prompt(12))
    assert pool.prefixes.counts.kept_tokens == kept < 12 + 32
    assert hits(pool, other, max_tokens=1).statistics.num_cached_tokens == 11


def test_a_conversation_copies_only_what_is_new() -> None:
    """The next turn continues in its slot. An ended turn is kept once, except for the last page."""
    pool, talk = Pool(1, 1, kept=400), prompt(5)
    for turn in range(6):
        made = hits(pool, talk, max_tokens=7)
        assert made.statistics.num_cached_tokens >= (len(talk) - 3 - 7 if turn else 0)
        talk += made.output[:7] + prompt(3, turn)
    counts = pool.prefixes.counts
    assert counts.reused_tokens == counts.dropped_tokens == 0
    assert counts.kept_tokens <= len(talk) + 6 * 8
    assert counts.tokens <= len(talk)


def test_bytes_are_those_of_the_tokens_that_are_counted() -> None:
    """A prefix comes back from its copy, and one that is too long drops it and is refused in part."""
    pool, base = Pool(1, 1, kept=64), prompt(24)
    for tokens in (base, prompt(8, 3), [*base, 1], prompt(100, 2)):
        hits(pool, tokens, max_tokens=1)
    counts = vars(pool.prefixes.counts)
    events = {name.removesuffix("_tokens"): n for name, n in counts.items() if name.endswith("_tokens")}
    assert events == {"kept": 97, "reused": 24, "dropped": 33, "refused": 36}
    assert {name: counts[f"{name}_bytes"] for name in events} == {
        n: 2 * ROW_BYTES * k for n, k in events.items()
    }


def test_with_no_memory_for_prefixes_nothing_is_reused() -> None:
    pool, base = Pool(2, 2), prompt(20)
    hits(pool, base)
    assert hits(pool, base).statistics.num_cached_tokens == 0
    live, again = (request(base, SamplingParams(max_tokens=30)) for _ in range(2))
    finish(pool, Lengths(5), live, again)
    assert again.statistics.num_cached_tokens == 0
    assert not pool.scheduler.slots.left


def test_too_little_memory_for_a_page_is_said_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_trt.logs._warned", set())
    Pool(1, 1, kept=8)  # for a page
    assert not caplog.text
    Pool(1, 1, kept=3)
    pool = Pool(1, 1, kept=3)
    assert caplog.text.count("prefix_cache_bytes is 24, but 8 tokens of this pair take 64 bytes") == 1
    base = prompt(20)
    hits(pool, base, max_tokens=1)
    assert hits(pool, [*base, 3], max_tokens=1).statistics.num_cached_tokens == 20  # its rows are in its slot
    assert pool.prefixes.counts.tokens == 0


def test_rows_for_which_the_machine_has_no_memory_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, base = Pool(1, 4), prompt(30)

    def full(slot: int, start: int, stop: int, shortest: int) -> None:
        raise MemoryError

    monkeypatch.setattr(pool.drafter, "keep", full)
    hits(pool, base)
    counts = pool.prefixes.counts
    assert (counts.tokens, counts.kept_tokens) == (0, 0)
    assert counts.refused_tokens > 30
