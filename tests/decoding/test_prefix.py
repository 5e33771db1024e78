"""Reuse of prefixes: the same tokens from fewer passes, at the lengths that caches can give, in little memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trt.decoding.caches import Snapshot
from dflash_trt.decoding.pair import Pair, _joined
from dflash_trt.decoding.params import SamplingParams
from dflash_trt.decoding.prefixes import Children, Page
from dflash_trt.decoding.prefixes import common as shared
from dflash_trt.decoding.request import Request
from tests.doubles.fake_engines import BLOCK, ROW_BYTES, VOCAB, FakeTarget, expected
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
    move = pool.pair.move

    def counted(source: int, target: int, rows: int, *, draft: bool) -> None:
        moved.append((source, target))
        move(source, target, rows, draft=draft)

    monkeypatch.setattr(pool.pair, "move", counted)
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
    further=st.sampled_from([0, 3, 40]),
)
def test_any_traffic_over_little_memory_gives_each_request_its_own_tokens(
    asked, batch, kept, seed, target, waits, further
) -> None:
    """Prompts with common beginnings, next turns of chats, with and without drafts. Pages come and go all the time, or
    rows of ended requests where these have slots.
    """
    further = 0 if target is StateTarget else further
    pool, lengths = Pool(batch, batch, kept=kept, target=target, further=further), AnyLengths(seed)
    for engine in (pool.target, pool.drafter):
        engine.memory = (batch * pool.pair.capacity + 2 * kept) if further else None
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


def test_the_longest_length_that_a_state_was_kept_at_is_reused() -> None:
    """States are kept where a pass over a prompt ends: at multiples of 8, and at the end of a prompt."""
    pool, base = Pool(1, 1, kept=400, target=StateTarget), prompt(60)
    assert hits(pool, base[:44], max_tokens=1).statistics.num_cached_tokens == 0
    for length, cached in ((60, 44), (44, 40), (40, 32), (31, 24)):
        again = Pool(1, 1, kept=400, target=StateTarget)
        hits(again, base[:44], max_tokens=1)
        again.scheduler.slots.left.clear()
        assert hits(again, base[:length], max_tokens=1).statistics.num_cached_tokens == cached
    for length, cached in ((17, 16), (16, 8), (30, 24), (17, 16)):
        pool.scheduler.slots.left.clear()
        assert hits(pool, base[:length], max_tokens=1).statistics.num_cached_tokens == cached


def test_a_shorter_page_with_a_state_is_reused_before_a_full_one_without() -> None:
    """The first answer went on through the page of the tokens 8 to 16, and the second prompt ended at 14."""
    pool, base = Pool(1, 1, kept=400, target=StateTarget), prompt(12)
    output = hits(pool, base, max_tokens=20, draft=False).output
    for more, cached in ((2, 12), (6, 14)):
        pool.scheduler.slots.left.clear()
        talk = [*base, *output[:more]]
        assert hits(pool, talk, max_tokens=1, draft=False).statistics.num_cached_tokens == cached


def test_copies_of_two_models_restore_what_both_can() -> None:
    both = _joined([Snapshot(0, 8, range(1, 9), None, 5), Snapshot(0, 8, (4, 8), None, 7)])
    assert (list(both.lengths), both.size) == ([4, 8], 12)


def test_a_conversation_goes_on_from_its_state() -> None:
    """In its slot, where the state is, and by the copy of it."""
    for overwritten in (False, True):
        pool, talk = Pool(1, 1, kept=400, target=StateTarget), prompt(12)
        for turn in range(5):
            made = hits(pool, talk, max_tokens=7, draft=False)
            assert made.statistics.num_cached_tokens == (len(talk) - 4 if turn else 0)
            talk += made.output[:7] + prompt(3, turn)
            if overwritten:
                pool.scheduler.slots.left.clear()


def test_a_prefix_is_reused_where_the_window_before_its_end_was_kept() -> None:
    """Windows are kept where a pass over a prompt ends, and where a request ends: at any length of the last page."""
    base = prompt(60)
    for length, cached in ((60, 44), (44, 43), (42, 41), (40, 39), (30, 29), (26, 25), (25, 24)):
        again = Pool(1, 1, kept=400, target=WindowTarget)
        hits(again, base[:44], max_tokens=1)
        again.scheduler.slots.left.clear()
        assert hits(again, base[:length], max_tokens=1).statistics.num_cached_tokens == cached

    class LongPasses(WindowTarget):
        most = 32

    pool = Pool(1, 1, kept=400, target=LongPasses, chunk=32)
    hits(pool, base[:60], max_tokens=1)
    pool.scheduler.slots.left.clear()
    for length, cached in ((24, 0), (31, 30), (50, 32), (60, 59)):  # the cuts are at 32 and 60, in pages of 8
        pool.scheduler.slots.left.clear()
        found = pool.prefixes.find(base[: length - 1], draft=True)[1]
        assert found == cached


def test_a_slot_filled_from_a_copy_without_its_first_rows_is_cut_no_further_than_they_are_there() -> None:
    pool, base = Pool(1, 1, kept=400, target=LongStrideTarget), prompt(60)
    hits(pool, [*base[:45], 1], max_tokens=3)
    hits(pool, prompt(60, 5), max_tokens=3)
    assert hits(pool, [*base[:45], 2], max_tokens=3).statistics.num_cached_tokens == 45
    hits(pool, [*base[:10], 3], max_tokens=3)


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


def test_too_little_memory_for_a_page_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
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
