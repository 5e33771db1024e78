"""Many patterns at once: found where a search for each of them alone finds it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trt.decoding.output import Automaton, StopChecker
from dflash_trt.decoding.params import SamplingParams
from dflash_trt.decoding.sampling.history import History
from tests.doubles.pool import Letters

WORDS = st.lists(st.text("ab", max_size=4), max_size=8)


@given(WORDS, st.text("abc", max_size=30))
@settings(deadline=None, max_examples=300)
def test_a_pattern_is_found_wherever_it_ends(patterns: list[str], text: str) -> None:
    automaton, state = Automaton(map(ord, p) for p in patterns), 0
    for end in range(len(text) + 1):
        if end:
            state = automaton.step(state, ord(text[end - 1]))
        seen = text[:end]
        assert automaton.depth[state] == max(
            n for n in range(end + 1) if any(p.startswith(seen[end - n :]) for p in ["", *patterns])
        )
        found = list(automaton.ending(state))
        ended = {p for p in patterns if seen.endswith(p)}
        assert [automaton.depth[s] for s in found] == sorted(map(len, ended), reverse=True)
        assert set(found) == {automaton.state_of[patterns.index(p)] for p in ended}


class Steps(Automaton):
    """Counts its steps, including those to shorter states."""

    taken = 0

    def step(self, state, symbol):  # type: ignore[no-untyped-def]
        Steps.taken += 1
        return super().step(state, symbol)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> type[Steps]:
    for module in ("sampling.history", "output"):
        monkeypatch.setattr(f"dflash_trt.decoding.{module}.Automaton", Steps)
    monkeypatch.setattr(Steps, "taken", 0)
    return Steps


def test_a_token_costs_the_same_with_many_long_bad_words(steps: type[Steps]) -> None:
    words = [[1] * 50 + [2 + i] for i in range(1000)]
    history = History(SamplingParams(bad_words=["x"]), [3], words)
    logits = np.zeros(2000, np.float32)
    steps.taken = 0
    for i in range(120):
        banned = np.flatnonzero(np.isneginf(history.adjust(logits)))
        assert banned.tolist() == (list(range(2, 1002)) if i >= 50 else [])
        history.add(1)
    assert steps.taken == 120


def test_a_character_costs_the_same_with_many_long_stop_strings(steps: type[Steps]) -> None:
    stop = ["A" * 60 + chr(66 + i) for i in range(130)]
    checker = StopChecker(SamplingParams(stop=stop, max_tokens=1000), (), Letters())  # type: ignore[arg-type]
    steps.taken = 0
    text = "".join(checker.push([0]).text for _ in range(300))
    assert text == "A" * 240
    assert steps.taken == 300
