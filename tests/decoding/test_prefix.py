"""Reuse of prefixes: the same tokens from fewer passes for requests that may share them, and a complete context."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trt.decoding.caches import Snapshot
from dflash_trt.decoding.pair import Pair
from dflash_trt.decoding.params import SamplingParams
from dflash_trt.decoding.prefixes import Children, Page
from dflash_trt.decoding.prefixes import common as shared
from dflash_trt.decoding.request import Request
from tests.doubles.fake_engines import BLOCK, VOCAB, FakeTarget, expected
from tests.doubles.fake_states_and_windows import LongStrideTarget, StateTarget, WindowTarget
from tests.doubles.pool import Pool, request
from tests.doubles.schedules import AnyLengths, Lengths, finish, prompt


def hits(
    pool: Pool, tokens: list[int], *, draft: bool = True, max_tokens: int = 20, salt: str = ""
) -> Request:
    made = request(tokens, SamplingParams(max_tokens=max_tokens), draft=draft, cache_salt=salt)
    assert finish(pool, Lengths(5), made)[made] == expected(tokens, made.params, 0)
    return made


@given(
    st.integers(0, 90).map(lambda n: list(range(n))),
    st.integers(0, 99),
    st.integers(0, 99),
    st.integers(-1, 99),
)
def test_common_beginnings_are_counted_up_to_the_limit(
    a: list[int], differs: int, size: int, limit: int
) -> None:
    b = [-1 if i == differs else i for i in range(size)]
    assert shared(a, b, min(limit, len(a), size)) == max(0, min(limit, len(a), size, differs))


def test_a_prefix_of_a_request_that_has_ended_is_reused_by_target_and_drafter() -> None:
    base = prompt(30)
    cold = hits(Pool(1, 2), base + prompt(9, 1))
    assert cold.statistics.num_cached_tokens == 0
    pool = Pool(1, 2)
    hits(pool, base)
    for length, cached in ((9, 30), (9, 38)):  # the second time, all but the last token are cached
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
    pool = Pool(2, 2, kept=8)  # no space for it elsewhere
    live = request(base, SamplingParams(max_tokens=60))
    pool.scheduler.submit(live)
    for _ in range(6):
        pool.scheduler.step(Lengths(5))
    warm = request(base + prompt(5, 1), SamplingParams(max_tokens=20))
    assert finish(pool, Lengths(5), warm)[warm] == cold.output[:20]
    assert warm.statistics.num_cached_tokens == 30
    # Its last block may be longer than alone, where space is left only for its own tokens.
    rounds = [sum(r.statistics.block_length_histogram) for r in (warm, cold)]
    assert rounds[0] == rounds[1]
    assert live.output[:60] == expected(base, live.params, 0)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of every prefill."""
    rows: list[int] = []
    prefill = Pair.prefill

    def counted(self: Pair, chunk: Any, *args: Any, **options: Any) -> Any:
        rows.append(len(chunk))
        return prefill(self, chunk, *args, **options)

    monkeypatch.setattr(Pair, "prefill", counted)
    return rows


@pytest.mark.parametrize("kept", [8, 200])  # 8: no pages of it, so that only slots hold it
def test_requests_of_another_salt_read_the_whole_prompt(kept: int, read: list[int]) -> None:
    pool, base = Pool(1, 3, kept=kept), prompt(30)
    for salt, cached in (("a", 0), ("b", 0), ("", 0), ("a", 29), ("b", 29), ("", 29)):
        read.clear()
        found = hits(pool, base, salt=salt, max_tokens=2)
        if kept == 200 or not cached:
            assert (found.statistics.num_cached_tokens, sum(read)) == (cached, 30 - cached)
    for _ in range(2):
        found = hits(pool, base, salt="c", max_tokens=2)
    assert found.statistics.num_cached_tokens == 29  # from its slot, if no page has room


def test_a_live_request_of_another_salt_is_no_source(read: list[int]) -> None:
    pool, base = Pool(3, 3, kept=8), prompt(30)
    live = request(base, SamplingParams(max_tokens=60), cache_salt="a")
    pool.scheduler.submit(live)
    for _ in range(6):
        pool.scheduler.step(Lengths(5))
    read.clear()
    few = SamplingParams(max_tokens=4)
    others = [request(base + prompt(5, 1), few, cache_salt=salt) for salt in ("a", "")]
    finish(pool, Lengths(5), *others)
    assert [each.statistics.num_cached_tokens for each in others] == [30, 0]
    assert sum(read) == 5 + 35


def test_rows_without_the_drafter_s_are_of_use_only_without_drafting() -> None:
    pool, base = Pool(1, 3), prompt(30)
    hits(pool, base, draft=False)
    assert hits(pool, base + prompt(5, 1), draft=False).statistics.num_cached_tokens == 30
    cold = hits(pool, base + prompt(5, 2))
    assert cold.statistics.num_cached_tokens == 0
    assert cold.statistics.mean_acceptance_length > 2
    assert hits(pool, base + prompt(5, 3)).statistics.num_cached_tokens == 30
    assert hits(pool, base + prompt(5, 3), draft=False).statistics.num_cached_tokens == 34


@pytest.mark.parametrize("overwritten", [False, True])
def test_a_prefix_that_the_drafter_has_not_read_waits_in_its_copy(overwritten: bool) -> None:
    """The first request that drafts reads it, and then has the whole context. Its copy has rows from then on."""
    base, tail, other = prompt(13), prompt(5, 1), [(prompt(13)[0] + 1) % VOCAB]
    cold = hits(Pool(1, 1), base + tail)
    pool = Pool(1, 1, kept=200)

    def off(tokens: list[int]) -> Request:
        made = request(tokens, SamplingParams(max_tokens=2))
        finish(pool, Lengths(1), made)
        return made

    off(base)
    if overwritten:
        off(other)
    again = off([*base, 3])
    assert (again.statistics.num_cached_tokens, pool.drafter.passes) == (13, 0)
    for _ in range(2):
        if overwritten:
            off(other)
        warm = hits(pool, base + tail)
        assert warm.statistics.num_cached_tokens >= 13
        assert warm.statistics.acceptance_histogram == cold.statistics.acceptance_histogram
    assert pool.pair.drafter.seen[0] > 17
    pages = pool.prefixes.find([*base, *tail], draft=True)[0]
    assert all(isinstance(page.kept.data[1].data, np.ndarray) for page in pages)


def test_while_others_wait_a_request_that_ends_moves_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next request takes its slot. When nobody waits, one move fills each gap."""
    pool, moved = Pool(4, 4), list[tuple[int, int]]()
    copy = pool.pair.copy

    def counted(source: int, target: int, rows: int, *, draft: bool) -> None:
        moved.append((source, target))
        copy(source, target, rows, draft=draft)

    monkeypatch.setattr(pool.pair, "copy", counted)
    asked = [request(prompt(4, i), SamplingParams(max_tokens=5 + 7 * i % 11)) for i in range(24)]
    for each in asked:
        pool.scheduler.submit(each)
    while pool.scheduler.waiting:
        pool.scheduler.step(Lengths(3))
        pool.check()
    assert len(moved) == 0
    finish(pool, Lengths(3))
    assert 0 < len(moved) <= 3
    assert all(
        each.output[: each.params.max_tokens] == expected(each.prompt, each.params, 0) for each in asked
    )


def test_forgotten_rows_are_not_reused() -> None:
    pool, base = Pool(2, 4), prompt(30)
    hits(pool, base)
    pool.scheduler.forget()
    pool.check()
    assert (pool.prefixes.counts.tokens, pool.prefixes.counts.dropped_tokens) == (0, 0)
    assert hits(pool, base).statistics.num_cached_tokens == 0


requests = st.lists(
    st.fixed_dictionaries(
        {
            "prefix": st.sampled_from([0, 3, 8, 20, 24, 45]),
            "turn": st.booleans(),
            "length": st.integers(1, 12),
            "seed": st.integers(0, 2),
            "max_tokens": st.integers(1, 12),
            "draft": st.sampled_from([True, True, False]),
            "salt": st.sampled_from(["", "", "a"]),
            "steps": st.integers(0, 6),
        }
    ),
    min_size=2,
    max_size=16,
)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    asked=requests,
    batch=st.integers(1, 3),
    kept=st.integers(4, 90),
    seed=st.integers(0, 1000),
    target=st.sampled_from([FakeTarget, StateTarget, WindowTarget, LongStrideTarget]),
    waits=st.booleans(),
)
def test_any_traffic_over_little_memory_gives_each_request_its_own_tokens(
    asked, batch, kept, seed, target, waits
) -> None:
    """Prompts with common beginnings, next turns of chats, with and without drafts. Pages come and go all the time."""
    pool, lengths = Pool(batch, batch, kept=kept, target=target), AnyLengths(seed)
    pool.pair.arrays.prompts_wait = waits
    common = prompt(45, 9)
    made: list[Request] = []
    for a in asked:
        ended = [r for r in made if r.stop.finish_reason]
        if a["turn"] and ended and len(ended[-1].prompt) < 70:
            before = [*ended[-1].prompt, *ended[-1].output[: ended[-1].params.max_tokens]]
        else:
            before = common[: a["prefix"]]
        params = SamplingParams(max_tokens=a["max_tokens"])
        ids = [*before, *prompt(a["length"], a["seed"])]
        made.append(request(ids, params, draft=a["draft"], cache_salt=a["salt"]))
        pool.scheduler.submit(made[-1])
        for _ in range(a["steps"]):
            pool.scheduler.step(lengths)
            pool.check()
    finish(pool, lengths)
    for each in made:
        assert each.output[: each.params.max_tokens] == expected(each.prompt, each.params, 0)
        others = [o for o in made if o is not each and o.options.cache_salt == each.options.cache_salt]
        same = [[*o.prompt, *o.output] for o in others]
        most = max((shared(each.prompt, tokens, len(tokens)) for tokens in same), default=0)
        assert each.statistics.num_cached_tokens <= most
    counts = pool.prefixes.counts
    assert counts.kept_tokens >= counts.dropped_tokens + counts.tokens


@given(st.data())
def test_the_page_with_the_most_tokens_is_found(data: st.DataObject) -> None:
    """Also where pages give only some lengths, and after renewals and removals."""
    tokens = st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple)
    pages = Children()

    def copy(part: tuple[int, ...]) -> Snapshot:
        lengths = sorted(data.draw(st.sets(st.integers(65, 64 + len(part)))))
        return Snapshot(64, 64 + len(part), lengths, None, 0)

    for part in data.draw(st.lists(tokens, unique=True, max_size=12)):
        pages.index(Page(part, 64, copy(part), pages))
    for page in list(pages.values()):
        match data.draw(st.sampled_from(("leave", "renew", "remove"))):
            case "renew":
                pages.forget(page)
                page.kept = copy(page.tokens)
                pages.index(page)
            case "remove":
                pages.forget(page)
    for wanted in data.draw(st.lists(tokens, min_size=1, max_size=4)):
        found = pages.nearest(wanted)
        most = max((page.usable(wanted) for page in pages.values()), default=0)
        assert (found.usable(wanted) if found else 0) == most
