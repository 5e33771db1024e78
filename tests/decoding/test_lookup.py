"""Drafts from a request's own text."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trt.decoding.draft import Draft
from dflash_trt.decoding.length.adaptive import AdaptiveLength
from dflash_trt.decoding.length.policy import FixedLength, RoundDone
from dflash_trt.decoding.length.rates import Rates
from dflash_trt.decoding.length.times import PassTimes
from dflash_trt.decoding.length.trees import FixedCopies, Tree
from dflash_trt.decoding.lookup import Lookup
from dflash_trt.decoding.params import SamplingParams
from dflash_trt.decoding.request import Request
from tests.doubles.fake_engines import BLOCK, expected
from tests.doubles.fake_states_and_windows import StateTarget, WindowTarget
from tests.doubles.pool import Pool, request
from tests.doubles.schedules import finish, prompt
from tests.doubles.simulated_pairs import done


def longest(text: list[int]) -> tuple[int, set[tuple[int, ...]]]:
    """The length of the longest suffix that occurred before, and what followed it each time, by trying all."""
    for length in range(len(text) - 1, 0, -1):
        suffix = text[-length:]
        after = {
            tuple(text[i + length :]) for i in range(len(text) - length) if text[i : i + length] == suffix
        }
        if after:
            return length, after
    return 0, set()


@given(st.lists(st.integers(0, 3), max_size=60), st.lists(st.integers(0, 2), max_size=60), st.integers(1, 9))
@settings(max_examples=300, deadline=None)
def test_the_longest_suffix_that_occurred_before(prompt: list[int], answer: list[int], most: int) -> None:
    """After every token, compared with a search of the whole text."""
    lookup, text = Lookup(prompt), list(prompt)
    for token in [*answer, None]:
        found, match = lookup.find(most)
        length, after = longest(text)
        assert match == length
        assert len(found) == (most if match else 0)
        # A continuation that reaches the end of the text goes on as if the found tokens were there.
        assert not match or any(tuple(found) == ((*each, *found) * 2)[:most] for each in after)
        if token is not None:
            lookup.extend([token])
            text.append(token)


def test_memory_is_linear_in_the_text() -> None:
    for text in ([1] * 3000, list(range(3000)), [1, 2] * 1500):
        lookup = Lookup(text)
        assert len(lookup._next) <= 2 * len(text)
        assert sum(map(len, lookup._next)) <= 3 * len(text)


def test_the_latest_occurrence_counts() -> None:
    lookup = Lookup([7, 8, 1, 7, 8, 2, 7, 8])
    assert lookup.find(1) == ([2], 2)


@pytest.mark.parametrize("target", [None, StateTarget, WindowTarget])
@pytest.mark.parametrize("seed", range(3))
def test_any_mix_of_sources_gives_the_tokens_of_plain_decoding(target: Any, seed: int) -> None:
    """Batches of requests with the drafter, the text, both and none; chains and trees; greedy, sampled and penalized.

    Texts repeat themselves, and passes take times by turns that make one source or the other, or neither, the best.
    """
    rng = random.Random(seed)
    pool = Pool(3, 5, **({} if target is None else {"target": target}))
    trees = target is None and seed % 2 == 0
    pool.drafter.width = 3 if trees else 1
    policies: list[Any] = [FixedCopies(BLOCK), FixedLength(BLOCK)]
    for drafter, row in ((0.01, 0.001), (3.0, 0.001), (0.1, 0.2)):
        draft, verify = {1: {2: drafter, BLOCK: drafter}}, {1: {1: 1.0, BLOCK: 1.0 + row * BLOCK}}
        times = PassTimes(BLOCK + 2, draft), PassTimes(BLOCK + 2, verify)
        policies.append(AdaptiveLength(BLOCK, *times, BLOCK + 2 if trees else 0))
    copied = 0
    for policy in policies:
        asked = list[Request]()
        for i in range(6):
            temperature, penalty = rng.choice([(0.0, 0.0), (0.0, 0.0), (0.8, 0.0), (0.0, 0.7)])
            params = SamplingParams(
                max_tokens=rng.randint(15, 60), temperature=temperature, presence_penalty=penalty, seed=i
            )
            source = rng.choice(["drafter", "lookup", "drafter,lookup", "drafter,lookup"])
            ids = prompt(rng.randint(1, 8), i) * rng.randint(1, 6)
            asked.append(request(ids, params, draft=rng.random() < 0.9, draft_source=source))
        tokens = finish(pool, policy, *asked)
        for each in asked:
            assert tokens[each] == expected(each.prompt, each.params, each.seed)
            if not (each.takes_drafts and each.options.takes_lookup):
                assert each.statistics.num_lookup_draft_tokens == 0
            if not each.takes_drafter:  # no draft counts that the drafter made without its tokens
                assert each.statistics.num_draft_tokens == each.statistics.num_lookup_draft_tokens
            copied += each.statistics.num_lookup_accepted_tokens
            assert each.statistics.num_lookup_accepted_tokens <= each.statistics.num_accepted_tokens
            assert each.lookup is None  # its memory is that of a text
    assert copied > 0


def test_a_request_sees_its_own_text_only() -> None:
    """Two requests with the same beginning, of which one has the continuation in its prompt."""
    beside = request([1, 2, 3, 4, 5, 6, 1, 2, 3], SamplingParams())
    alone = request([1, 2, 3], SamplingParams())
    refusing = [
        request(beside.prompt, SamplingParams(), draft=False),
        request(beside.prompt, SamplingParams(), draft_source="drafter"),
    ]
    assert beside.copied(2) == ([4, 5], 3)
    assert [each.copied(2) for each in (alone, *refusing)] == [([], 0)] * 3
    for tokens in ([4], [5, 1, 2], [3, 4]):  # of rounds, however many they gave
        alone.output += tokens
        alone.copied(2)
        assert alone.lookup is not None
        assert alone.lookup.text == [*alone.prompt, *alone.output]


def test_the_rates_follow_the_length_of_a_match() -> None:
    """Long matches are mostly right here and short ones are not. The first of them are known from the start."""
    rates, rng = Rates(3), random.Random(0)
    rates.seat([request([1], SamplingParams())])

    def right(match: int) -> float:
        return float(rates.copies([0], [match], 3)[0, 0])

    assert right(1) < right(3) < right(12)
    chances = {2: 0.05, 4: 0.6, 16: 0.97}
    for _ in range(300):
        for match, chance in chances.items():
            right(match)
            rates.learn_copies([0], [int(rng.random() < chance)], [1])
    for match, chance in chances.items():
        assert right(match) == pytest.approx(chance, abs=0.15)


def test_a_tree_of_both_sources_has_no_node_twice() -> None:
    """They agree at first. Then the text goes on where the drafter has its second choice, and where it has none."""
    tokens, rights = [[1, 2], [3, 4], [5, 6]], [[[0.67, 0.22]] * 3] * 2
    for copied in ([1, 4, 9], [2, 3, 5], [8, 8, 8], [1, 3, 5, 7, 7]):
        tree = Tree(0, tokens, rights, copied, [0.6**n for n in range(1, 1 + len(copied))])
        tree.grow(40)
        children = list(zip(tree.parents, tree.tokens, strict=True))
        assert len(set(children)) == len(children)
        assert all(0 <= parent < node for node, parent in enumerate(tree.parents) if node)
        node = 0
        for token in copied:
            node = children.index((node, token))
        assert len(children) >= 15


def test_repetitions_that_say_nothing_cost_a_request_little() -> None:
    """Random texts of 20 words, whose drafts are right by chance. A row costs 0.17 passes."""
    rng, times = random.Random(2), PassTimes(8, {1: {1: 1.0, 8: 2.2}})
    policy, none = AdaptiveLength(8, PassTimes(8), times), np.zeros((1, 0), np.float32)
    for _ in range(12):
        made = request([rng.randrange(20) for _ in range(30)], SamplingParams(), draft_source="lookup")
        made.takes_drafter, made.output, seconds = False, [0], 0.0
        while len(made.output) < 65:
            anchor = Draft(np.array([made.output[-1:]]), None, none)
            policy.draft([made])
            draft = policy.select(anchor, [made], [0], 1)
            decided = [rng.randrange(20)]
            for drafted in draft.tokens_of(0)[1:]:
                if drafted != decided[-1]:
                    break
                decided.append(rng.randrange(20))
            made.output += decided
            passed = 1 + 1.2 / 7 * (draft.nodes - 1)
            seconds += passed
            policy.observe(RoundDone([made], anchor, draft.nodes, [0], [decided], 0.0, passed))
        assert (len(made.output) - 1) / seconds > 0.975


def test_what_replaces_a_chain_on_a_device_counts_as_copied() -> None:
    """There the drafter's numbers are not at hand."""
    policy = AdaptiveLength(BLOCK, PassTimes(BLOCK), PassTimes(BLOCK))
    active = [request([1, 2, 3, 1], SamplingParams(), draft_source="lookup")]
    policy.draft(active)
    draft = Draft(np.zeros((1, 4), np.int64), None, logprobs=None)
    chosen = policy.select(draft, active, [0], 1)
    assert (chosen.replaced, chosen.copied) == ({0: [2, 3, 1]}, {0: {1, 2, 3}})


def test_a_drafter_that_is_right_is_asked_though_the_text_repeats_itself() -> None:
    policy, lengths = AdaptiveLength(BLOCK, PassTimes(BLOCK), PassTimes(BLOCK)), list[int]()
    active = [request([1, 2, 3, 1], SamplingParams())]  # a match of one token
    for _ in range(200):
        lengths.append(length := policy.draft(active))
        policy.observe(done(active, length, np.ones((1, length - 1), int), [0.1 * (length > 1), 1.0]))
    assert np.mean(np.array(lengths[100:]) > 1) > 0.9


def test_times_of_a_busy_machine_do_not_end_drafts_from_the_text_for_good() -> None:
    """Kept times of several rows are 17 and 600 times too long, and no drafter means no trials."""
    times, none = PassTimes(8, {1: {1: 0.01, 2: 0.012, 3: 0.17, 8: 6.5}}), np.zeros((1, 0), np.float32)
    policy, passes = AdaptiveLength(8, PassTimes(8), times), list[int]()
    for _ in range(24):
        made = request(list(range(60)) * 3, SamplingParams(), draft_source="lookup")
        made.takes_drafter, made.output = False, [0]
        passes.append(0)
        while len(made.output) < 64:
            anchor = Draft(np.array([made.output[-1:]]), None, none)
            policy.draft([made])
            nodes = policy.select(anchor, [made], [0], 1).nodes
            decided = [(made.output[-1] + 1 + i) % 60 for i in range(nodes)]
            made.output += decided
            passes[-1] += 1
            policy.observe(RoundDone([made], anchor, nodes, [0], [decided], 0.0, 0.008 + 0.002 * nodes))
    assert passes[0] < 16
    assert passes[-1] == 8


def copying(source: Any, on_device: bool) -> float:
    """Tokens per plain pass of 20 requests after 10 others, whose answers are pieces of their prompts with other words
    between. A row costs 0.17 passes, and two drafts of the drafter in five are right.
    """
    rng, texts, tokens, seconds = random.Random(1), random.Random(2), 0, 0.0
    policy = AdaptiveLength(8, PassTimes(8), PassTimes(8))
    for number in range(30):
        made = request([texts.randrange(3000) for _ in range(200)], SamplingParams(), draft_source=source)
        made.takes_drafter, answer = made.options.takes_drafter, list[int]()
        while len(answer) < 108:
            at = texts.randrange(180)
            answer += made.prompt[at : at + 3 + int(texts.expovariate(0.05))]
            answer += [texts.randrange(3000) for _ in range(texts.randrange(4))]
        made.output = answer[:1]
        while (known := len(made.output)) < 97:
            length = policy.draft([made])
            drafts = [t if rng.random() < 0.4 else 5000 for t in answer[known : known + length - 1]]
            said: Any = np.full((1, length - 1), np.log(0.4), np.float32)
            proposed = Draft(
                np.array([[answer[known - 1], *drafts]]),
                None,
                torch.from_numpy(said) if on_device and length > 1 else said,
            )
            draft = policy.select(proposed, [made], [0], 1)
            chain = draft.replaced.get(0, draft.tokens_of(0)[1:])
            right = 0
            while right < len(chain) and chain[right] == answer[known + right]:
                right += 1
            decided = answer[known : known + right + 1]
            made.output += decided
            times = 0.19 * (length > 1), 1 + 0.17 * (draft.nodes - 1)
            seconds += sum(times) * (number >= 10)
            ended = int(len(made.output) >= 97)
            policy.observe(RoundDone([made], proposed, draft.nodes, [0], [decided], *times, ended=ended))
        tokens += (len(made.output) - 1) * (number >= 10)
    return tokens / seconds


@pytest.mark.parametrize("on_device", [False, True])
def test_both_sources_copy_as_fast_as_the_text_alone(on_device: bool) -> None:
    assert copying("drafter,lookup", on_device) > 0.97 * copying("lookup", on_device)


def test_the_text_is_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the chunks of a prompt are, or a piece a round where it is a reused prefix; then it proposes drafts."""
    sizes, extend = list[int](), Lookup.extend

    def counted(lookup: Lookup, tokens: list[int]) -> None:
        sizes.append(len(tokens))
        extend(lookup, tokens)

    monkeypatch.setattr("dflash_trt.decoding.request._PIECE", 9)
    monkeypatch.setattr(Lookup, "extend", counted)
    pool, text = Pool(1, 2, chunk=12), [1, 2, 3, 4] * 12
    for most in (12, 9):  # read, then reused
        sizes.clear()
        asked = request(text, SamplingParams(max_tokens=40), draft_source="lookup")
        finish(pool, FixedCopies(BLOCK), asked)
        assert max(sizes) == most
        assert (asked.statistics.num_cached_tokens == len(text) - 1) == (most == 9)
        assert asked.statistics.num_lookup_draft_tokens > 0
