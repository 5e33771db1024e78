"""Natural prompts: enough are held out, and no training prompt resembles them."""

from __future__ import annotations

from collections import Counter
from typing import Any

from build_scripts.corpus.natural import MOST_ALIKE, Index, alike, held_out, prompts, shingles
from build_scripts.corpus.natural_forms import FORMS
from dflash_trt.prompts import natural_prompts

HELD_OUT: list[Any] = list(held_out())


def test_every_category_holds_out_enough_prompts() -> None:
    counts = Counter(prompt["category"] for prompt in HELD_OUT)
    categories = sorted([*FORMS, "copying"])  # no drafter is trained to copy: that is what lookup is for
    assert counts == dict.fromkeys(categories, 32)
    assert len({prompt["id"] for prompt in HELD_OUT}) == len(HELD_OUT)
    assert [prompt.category for prompt in natural_prompts(None, 18)] == categories * 2


def test_held_out_prompts_differ_from_each_other() -> None:
    entries = [shingles(prompt["messages"]) for prompt in HELD_OUT]
    assert max(alike(a, b) for i, a in enumerate(entries) for b in entries[:i]) < MOST_ALIKE


def test_no_training_prompt_resembles_a_held_out_one() -> None:
    excluded = [shingles(prompt["messages"]) for prompt in HELD_OUT]
    made: list[Any] = list(prompts(800, excluded))
    assert len({str(prompt["messages"]) for prompt in made}) == 800
    entries, index = [shingles(prompt["messages"]) for prompt in made], Index(excluded)
    assert max(index.closest(one) for one in entries) <= MOST_ALIKE
    for one in entries[:80]:  # the index misses no similar prompt
        assert index.closest(one) == max(alike(one, other) for other in excluded)
    # A held-out prompt with a small change would be refused.
    words = HELD_OUT[0]["messages"][0]["content"] + " Please!"
    assert index.closest(shingles([{"role": "user", "content": words}])) > MOST_ALIKE
    assert not {p["id"] for p in prompts(16, [shingles(made[0]["messages"])])} & {made[0]["id"]}


def test_training_prompts_are_varied_and_the_same_each_time() -> None:
    made: list[Any] = list(prompts(800, []))
    assert made[:40] == list(prompts(40, []))
    counts = Counter(prompt["category"] for prompt in made)
    assert max(counts.values()) - min(counts.values()) < 40
    for category in FORMS:
        begins = Counter(
            " ".join(p["messages"][-1]["content"].split()[:4]) for p in made if p["category"] == category
        )
        assert max(begins.values()) <= 0.15 * counts[category], (category, begins.most_common(2))
