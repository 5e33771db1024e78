"""At which lengths a prefix of a target with a state or a window is reused."""

from __future__ import annotations

from dflash_trt.decoding.caches import Snapshot
from dflash_trt.decoding.pair import _joined
from tests.decoding.test_prefix import hits
from tests.doubles.fake_states_and_windows import LongStrideTarget, StateTarget, WindowTarget
from tests.doubles.pool import Pool
from tests.doubles.schedules import prompt


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
