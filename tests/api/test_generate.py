"""Generation through the public interface gives the oracle's tokens, with and without drafting."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dflash_trt
from dflash_trt import LLM, Completion, SamplingParams
from dflash_trt.building.build import build
from dflash_trt.decoding.sampling.history import History
from dflash_trt.decoding.sampling.sampler import sample
from dflash_trt.errors import DFlashError, RequestError
from tests.doubles.checkpoints import ENDOFTEXT, IM_END, SPECIAL_TOKENS, VOCAB, make_drafter, make_target
from tests.doubles.reference import Choose, Drafter, decode, decode_drafting, load_target

CHUNK, SLOTS, MAX_SEQ_LEN = 16, 3, 160
SLIDING, FULL = "sliding_attention", "full_attention"

# name: (target, drafter). The drafts of the first two are sometimes right, those of the third almost never.
RANDOM: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "lucky": ({"favourites": 6}, {}),
    "windows": (
        {"favourites": 4, "sliding_window": 20, "attention_bias": True, "seed": 2},
        {"layer_types": (SLIDING, FULL), "sliding_window": 9, "attention_bias": True},
    ),
    "unlucky": ({"tie": True}, {}),
}
TEXT = "Tom has 12 apples and buys 7 more. How many apples does Tom have now?\n\ndef add(a, b):\n    return a + b\n"
SHIPPED = {name: Path(dflash_trt.__file__).parent / "shipped" / name for name in ("tiny", "tiny-gpt-oss")}
PAIRS = [*RANDOM, *SHIPPED]

SAMPLING = {
    "greedy": SamplingParams(),
    "0.7": SamplingParams(temperature=0.7, top_p=0.95, seed=11),
    "1.0": SamplingParams(temperature=1.0, top_p=0.95, seed=2**63 + 12),
    "everything": SamplingParams(
        temperature=0.9,
        top_k=40,
        top_p=0.9,
        min_p=0.01,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.1,
        seed=13,
    ),
    "penalized greedy": SamplingParams(repetition_penalty=1.3, frequency_penalty=0.2),
}


@dataclass
class Pair:
    name: str
    target: Path
    drafter: Path
    llm: LLM

    def prompt(self, length: int, seed: int = 0) -> list[int]:
        if self.name in SHIPPED:
            return (self.llm.tokenizer.encode(TEXT) * 9)[seed : seed + length]
        vocab = self.llm.bundle.manifest["vocab_size"]
        return np.random.default_rng(seed).integers(0, vocab, length).tolist()

    def plain(self, prompt: list[int], params: SamplingParams) -> Completion:
        return self.llm.generate(prompt, params, speculate=False)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Pair]]:
    pairs = {}
    for name in PAIRS:
        directory = tmp_path_factory.mktemp("pair")
        target, drafter = (
            (SHIPPED[name] / "target", SHIPPED[name] / "drafter")
            if name in SHIPPED
            else _make(directory, *RANDOM[name])
        )
        bundle = build(str(target), str(drafter), directory / "bundle", max_seq_len=MAX_SEQ_LEN)
        llm = LLM(bundle.path, max_batch_size=SLOTS, prefill_chunk=CHUNK, threads=1)
        pairs[name] = Pair(name, target, drafter, llm)
    yield pairs
    for pair in pairs.values():
        pair.llm.close()


def _make(directory: Path, target: dict[str, Any], drafter: dict[str, Any]) -> tuple[Path, Path]:
    make_target(directory / "target", **target)
    return directory / "target", make_drafter(directory / "drafter", directory / "target", **drafter)


@pytest.fixture(params=PAIRS)
def pair(request: pytest.FixtureRequest, pairs: dict[str, Pair]) -> Pair:
    return pairs[request.param]


@pytest.fixture
def lucky(pairs: dict[str, Pair]) -> Pair:
    return pairs["lucky"]


@pytest.fixture(scope="module", params=RANDOM)
def oracle(request: pytest.FixtureRequest, pairs: dict[str, Pair]) -> tuple[Pair, Any, Drafter]:
    pair = pairs[request.param]
    return pair, load_target(pair.target), Drafter(pair.drafter)


def chooser(params: SamplingParams, prompt: list[int]) -> Choose:
    """The product's own sampling on the oracle's logits."""

    def choose(logits: Any, position: int, tokens: list[int]) -> int:
        history = None
        if params.adjusted:
            history = History(params, prompt)
            for token in tokens[len(prompt) :]:
                history.add(token)
        return sample(logits.numpy(), params, params.seed or 0, position, history)

    return choose


def watch_drafts(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> dict[int, list[list[int]]]:
    """Collects the drafts of each request during generation, by the request's index in the call."""
    drafts: dict[int, list[list[int]]] = defaultdict(list)
    runtime, numbers = pair.llm._runtime, dict[Any, int]()
    propose, make = runtime.pair.propose, runtime.request

    def numbered(*args: Any, **kwargs: Any) -> Any:
        request = make(*args, **kwargs)
        numbers[request] = len(numbers)
        return request

    def watched(active: Any, length: int) -> Any:
        draft = propose(active, length)
        for slot, request in enumerate(active):
            if draft.nodes > 1:
                drafts[numbers[request]].append(draft.tokens_of(slot)[1:])
        return draft

    monkeypatch.setattr(runtime, "request", numbered)
    monkeypatch.setattr(runtime.pair, "propose", watched)
    return drafts


@pytest.mark.parametrize("block_length", [1, 2, 5, 8])
@pytest.mark.parametrize("sampling", SAMPLING)
def test_every_round_is_the_oracle_s(oracle, sampling, block_length, monkeypatch) -> None:
    """The same tokens from the same drafts, with the same number accepted in each round."""
    pair, target, drafter = oracle
    prompt = pair.prompt(21)
    params = replace(SAMPLING[sampling], max_tokens=40, ignore_eos=True)
    expected = decode_drafting(
        target, drafter, prompt, 40, chooser(params, prompt), block_length=block_length
    )
    drafts = watch_drafts(pair, monkeypatch)
    chunks = list(pair.llm.stream(prompt, params, block_length=block_length))
    assert [token for chunk in chunks for token in chunk.token_ids] == expected.tokens
    assert drafts.get(0, []) == expected.drafts
    accepted = [len(chunk.token_ids) - 1 for chunk in chunks[1:]]
    assert accepted[: len(expected.accepted)] == expected.accepted
    statistics = chunks[-1].statistics
    assert statistics.num_drafts == len(expected.drafts)
    assert statistics.num_draft_tokens == sum(map(len, expected.drafts))
    assert statistics.num_accepted_tokens == sum(expected.accepted)
    assert statistics.num_generation_tokens == 40


@pytest.mark.parametrize(
    "length", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 1, 5 * CHUNK - 1]
)
def test_prompt_lengths_around_chunk_boundaries(oracle, length) -> None:
    pair, target, drafter = oracle
    prompt = pair.prompt(length, seed=length)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    expected = decode_drafting(target, drafter, prompt, 12)
    completion = pair.llm.generate(prompt, params, block_length=8)
    assert completion.token_ids == expected.tokens == pair.plain(prompt, params).token_ids
    assert completion.statistics.num_accepted_tokens == sum(expected.accepted)
    assert completion.prompt_token_ids == prompt


@pytest.mark.parametrize("sampling", SAMPLING)
def test_drafting_and_batches_change_no_token(pair: Pair, sampling: str) -> None:
    """Seven requests of different lengths in three slots, compared with each alone without drafting."""
    lengths = [3, 40, 17, 1, 16, 60, 9]
    prompts = [pair.prompt(n, seed=n) for n in lengths]
    params = [
        replace(SAMPLING[sampling], max_tokens=budget, seed=seed)
        for seed, budget in enumerate([30, 5, 18, 1, 24, 2, 11])
    ]
    plain = [pair.plain(prompt, p) for prompt, p in zip(prompts, params, strict=True)]
    for block_length in (8, 5, 2, 1):
        drafted = pair.llm.generate(prompts, params, block_length=block_length)
        assert [c.token_ids for c in drafted] == [c.token_ids for c in plain]
        assert [(c.text, c.finish_reason) for c in drafted] == [(c.text, c.finish_reason) for c in plain]
    together = pair.llm.generate(prompts, params, speculate=False)
    assert [c.token_ids for c in together] == [c.token_ids for c in plain]
    assert all(c.statistics.num_drafts == 0 for c in together)


@pytest.mark.parametrize("sampling", ["greedy", "1.0"])
def test_every_draft_in_a_batch_is_the_oracle_s(oracle, sampling, monkeypatch) -> None:
    """Wrong features would change only the drafts, not the tokens. So the drafts are compared while requests come and
    go.
    """
    pair, target, drafter = oracle
    prompts = [pair.prompt(n, seed=n) for n in (3, 40, 17, 1, 16, 60, 9)]
    params = [
        replace(SAMPLING[sampling], max_tokens=n, ignore_eos=True, seed=n) for n in (30, 9, 18, 24, 1, 12, 22)
    ]
    drafts = watch_drafts(pair, monkeypatch)
    completions = pair.llm.generate(prompts, params, block_length=5)
    for i, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
        expected = decode_drafting(target, drafter, prompt, p.max_tokens, chooser(p, prompt), block_length=5)
        assert completions[i].token_ids == expected.tokens
        # Near its end, a request alone drafts less. In a batch it drafts as much as the others need.
        whole = [draft for draft in expected.drafts if len(draft) == 4]
        assert drafts.get(i, [])[: len(whole)] == whole


requests = st.lists(
    st.builds(
        dict,
        length=st.integers(1, 40),
        seed=st.integers(0, 5),
        max_tokens=st.integers(1, 20),
        temperature=st.sampled_from([0.0, 0.7, 1.5]),
        repetition_penalty=st.sampled_from([1.0, 1.3]),
        stop_token_ids=st.sampled_from([(), (0, 8), (16, 24, 32)]),
        stop=st.sampled_from([(), "(", ("!!", "*!")]),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(requests=requests, block_length=st.integers(1, 8))
def test_any_batch_equals_its_requests_alone(pairs, requests, block_length) -> None:
    pair = pairs["lucky"]
    prompts = [pair.prompt(r["length"], r["seed"]) for r in requests]
    params = [SamplingParams(**{k: v for k, v in r.items() if k != "length"}) for r in requests]
    plain = [pair.plain(prompt, p) for prompt, p in zip(prompts, params, strict=True)]
    batch = pair.llm.generate(prompts, params, block_length=block_length)
    key = [(c.token_ids, c.text, c.finish_reason, c.seed) for c in plain]
    assert [(c.token_ids, c.text, c.finish_reason, c.seed) for c in batch] == key


def test_a_request_that_ends_with_its_first_token_leaves_the_others_alone(lucky: Pair) -> None:
    prompts = [lucky.prompt(n, seed=n) for n in (9, 30, 12)]
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (20, 20, 1)]
    alone = [lucky.llm.generate(prompt, p, block_length=8) for prompt, p in zip(prompts, params, strict=True)]
    for chosen in ([0, 1, 2], [0, 2], [2, 0, 1], [2, 2, 0]):
        batch = lucky.llm.generate([prompts[i] for i in chosen], [params[i] for i in chosen])
        assert [c.token_ids for c in batch] == [alone[i].token_ids for i in chosen]
    pair = lucky.llm.generate([prompts[0], prompts[2]], [params[0], params[2]], block_length=8)
    assert pair[0].statistics.acceptance_histogram == alone[0].statistics.acceptance_histogram


def test_no_draft_is_accepted_by_the_unlucky_pair_and_some_by_the_lucky(pairs) -> None:
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    found = {
        name: pairs[name].llm.generate(pairs[name].prompt(21), params, block_length=8).statistics
        for name in ("lucky", "unlucky")
    }
    lengths = {name: statistics.mean_acceptance_length for name, statistics in found.items()}
    assert lengths["unlucky"] < 1.3 < 1.8 < lengths["lucky"]


@pytest.mark.parametrize("speculate", [True, False])
def test_stop_ids_inside_a_block(oracle, speculate) -> None:
    pair, target, _ = oracle
    prompt = pair.prompt(21)
    whole = decode(target, prompt, 40).tokens
    for stop in set(whole):
        expected = whole[: whole.index(stop) + 1]
        params = SamplingParams(max_tokens=40, stop_token_ids=[stop], ignore_eos=True)
        completion = pair.llm.generate(prompt, params, speculate=speculate)
        assert (completion.token_ids, completion.finish_reason) == (expected, "stop")
        assert completion.text == pair.llm.tokenizer.decode(expected[:-1])


def test_end_tokens_of_the_model_end_the_text_unless_ignored(tmp_path: Path) -> None:
    directories = _make(tmp_path, {"favourites": 6, "eos": (24, 32)}, {})
    with LLM(build(*map(str, directories), tmp_path / "bundle", max_seq_len=64).path, threads=1) as llm:
        prompt = np.random.default_rng(0).integers(0, VOCAB, 21).tolist()
        whole = llm.generate(prompt, SamplingParams(max_tokens=30, ignore_eos=True))
        end = next(i for i, token in enumerate(whole.token_ids) if token in (24, 32))
        for speculate in (True, False):
            stopped = llm.generate(prompt, SamplingParams(max_tokens=30), speculate=speculate)
            assert (stopped.token_ids, stopped.finish_reason) == (whole.token_ids[: end + 1], "stop")
        assert (len(whole.token_ids), whole.finish_reason) == (30, "length")


@pytest.mark.parametrize("sampling", ["greedy", "1.0"])
def test_stop_strings_inside_and_across_blocks(pair: Pair, sampling: str) -> None:
    """Every substring of one to three characters of the text: the text is cut at its first place, and it is never
    shown.
    """
    prompt = pair.prompt(21, seed=3)
    params = replace(SAMPLING[sampling], max_tokens=30, ignore_eos=True)
    whole = pair.plain(prompt, params)
    found = {
        whole.text[i : i + n] for i in range(len(whole.text)) for n in (1, 3) if i + n <= len(whole.text)
    }
    for stop in sorted(s for s in found if "\ufffd" not in s)[:25]:
        stopping = replace(params, stop=stop)
        drafted, plain = pair.llm.generate(prompt, stopping), pair.plain(prompt, stopping)
        assert drafted.text == plain.text == whole.text[: whole.text.index(stop)]
        assert drafted.finish_reason == plain.finish_reason == "stop"
        assert drafted.token_ids == plain.token_ids == whole.token_ids[: len(plain.token_ids)]
        assert stop in pair.llm.tokenizer.decode(plain.token_ids)
        assert stop not in pair.llm.tokenizer.decode(plain.token_ids[:-1])
        assert "".join(chunk.text for chunk in pair.llm.stream(prompt, stopping)) == plain.text


@pytest.mark.parametrize("speculate", [True, False])
def test_max_tokens_is_exact(lucky: Pair, speculate: bool) -> None:
    prompt = lucky.prompt(21)
    whole = lucky.plain(prompt, SamplingParams(max_tokens=40, ignore_eos=True)).token_ids
    for n in range(1, 41):
        completion = lucky.llm.generate(
            prompt, SamplingParams(max_tokens=n, ignore_eos=True), speculate=speculate
        )
        assert (completion.token_ids, completion.finish_reason) == (whole[:n], "length")
        assert completion.statistics.num_generation_tokens == n


@pytest.mark.parametrize("sampling", ["greedy", "1.0"])
def test_the_context_may_be_filled_to_the_last_token(oracle, sampling) -> None:
    """In all slots at once: rows written past the last token must not affect any request."""
    pair, target, _ = oracle
    prompts = [
        pair.prompt(n, seed=n) for n in (MAX_SEQ_LEN - 1, MAX_SEQ_LEN - 25, MAX_SEQ_LEN - 9, MAX_SEQ_LEN - 40)
    ]
    params = [
        replace(SAMPLING[sampling], max_tokens=MAX_SEQ_LEN - len(prompt), ignore_eos=True, seed=5)
        for prompt in prompts
    ]
    expected = [
        decode(target, prompt, p.max_tokens, chooser(p, prompt)).tokens
        for prompt, p in zip(prompts, params, strict=True)
    ]
    for speculate in (True, False):
        assert [c.token_ids for c in pair.llm.generate(prompts, params, speculate=speculate)] == expected


def test_what_does_not_fit_the_context_is_refused(lucky: Pair) -> None:
    with pytest.raises(RequestError, match=r"prompt has 100 tokens .* max_tokens is 61.* holds 160"):
        lucky.llm.generate(lucky.prompt(100), SamplingParams(max_tokens=61))
    with pytest.raises(RequestError, match=r"161 tokens.*160"):
        lucky.llm.generate(lucky.prompt(161), SamplingParams(max_tokens=1))
    with pytest.raises(RequestError, match="empty"):
        lucky.llm.generate([lucky.prompt(3), []], SamplingParams(max_tokens=1))
    with pytest.raises(RequestError, match=f"token id {VOCAB}"):
        lucky.llm.generate([1, VOCAB], SamplingParams(max_tokens=1))
    for block_length in (0, 9):
        with pytest.raises(RequestError, match=f"block_length is {block_length}, expected 1..8"):
            lucky.llm.generate([1], SamplingParams(max_tokens=1), block_length=block_length)
    with pytest.raises(RequestError, match="1 sampling_params for 2 prompts"):
        lucky.llm.generate([[1], [2]], [SamplingParams(max_tokens=1)])
    assert lucky.llm.generate([]) == []


def test_the_seed_decides(lucky: Pair) -> None:
    prompt = lucky.prompt(21)
    hot = SamplingParams(temperature=1.5, max_tokens=30, ignore_eos=True)
    first = lucky.llm.generate(prompt, hot)
    again = lucky.plain(prompt, replace(hot, seed=first.seed))
    assert (again.token_ids, again.seed) == (first.token_ids, first.seed)
    seeds = [0, 1, 2**32, 2**64 - 1]
    alone = [lucky.plain(prompt, replace(hot, seed=seed)).token_ids for seed in seeds]
    assert len({tuple(tokens) for tokens in alone}) == len(seeds)
    batch = lucky.llm.generate([prompt] * len(seeds), [replace(hot, seed=seed) for seed in seeds])
    assert [c.token_ids for c in batch] == alone
    assert lucky.llm.generate(prompt, hot).seed != first.seed


@pytest.mark.parametrize("speculate", [True, False])
def test_a_stream_is_the_completion_in_runs(pair: Pair, speculate: bool) -> None:
    params = SamplingParams(temperature=0.8, max_tokens=40, seed=1)
    whole = pair.llm.generate("def add(a, b):", params)
    chunks = list(pair.llm.stream("def add(a, b):", params, speculate=speculate))
    assert [token for chunk in chunks for token in chunk.token_ids] == whole.token_ids
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + [whole.finish_reason]
    assert [chunk.statistics is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


def test_a_prompt_is_a_text_or_its_tokens(lucky: Pair) -> None:
    text = "The answer is 19."
    params = SamplingParams(max_tokens=8)
    ids = lucky.llm.tokenizer.encode(text)
    by_text, by_ids = lucky.llm.generate([text, ids], params)
    assert by_text.token_ids == by_ids.token_ids == lucky.llm.generate(text, params).token_ids
    assert by_text.prompt_token_ids == ids
    assert by_text.text == lucky.llm.tokenizer.decode(by_text.token_ids)


def test_chat_is_the_template_s_text(lucky: Pair) -> None:
    params = SamplingParams(max_tokens=8)
    start, end = SPECIAL_TOKENS[317], SPECIAL_TOKENS[IM_END]
    rendered = f"{start}user\nHi é{end}\n{start}assistant\n"
    expected = lucky.llm.generate(rendered, params)
    messages = [{"role": "user", "content": "Hi é"}]
    assert lucky.llm.chat(messages, params).token_ids == expected.token_ids
    streamed = lucky.llm.stream_chat(messages, params)
    assert [token for chunk in streamed for token in chunk.token_ids] == expected.token_ids
    assert lucky.llm.tokenizer.encode(rendered).count(IM_END) == 1
    assert lucky.llm.bundle.manifest["eos_token_ids"] == [IM_END, ENDOFTEXT]


def test_one_call_at_a_time_and_a_stream_may_be_left_early(lucky: Pair) -> None:
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    expected = lucky.plain(lucky.prompt(21), params).token_ids
    stream = lucky.llm.stream(lucky.prompt(33), params)
    next(stream)
    with pytest.raises(RequestError, match="already generating"):
        lucky.llm.generate([1], params)
    next(stream)
    stream.close()
    assert lucky.llm.generate(lucky.prompt(21), params).token_ids == expected


def test_a_closed_model_says_so(lucky: Pair) -> None:
    with LLM(lucky.llm.bundle.path, threads=1) as llm:
        assert llm.generate([1, 2], SamplingParams(max_tokens=2)).token_ids
    with pytest.raises(DFlashError, match="closed"):
        llm.generate([1, 2], SamplingParams(max_tokens=2))
    llm.close()


def test_the_chunk_size_the_slots_and_the_threads_change_no_token(lucky: Pair) -> None:
    prompts = [lucky.prompt(n, seed=n) for n in (50, 7, 33)]
    params = [SamplingParams(max_tokens=20, temperature=t, seed=4, ignore_eos=True) for t in (0.0, 1.0, 0.5)]
    expected = [c.token_ids for c in lucky.llm.generate(prompts, params)]
    for options in ({"prefill_chunk": 1}, {"prefill_chunk": 512, "max_batch_size": 1}, {"threads": 2}):
        with LLM(lucky.llm.bundle.path, **{"threads": 1, **options}) as llm:
            assert [c.token_ids for c in llm.generate(prompts, params)] == expected


def test_a_bundle_for_smaller_blocks_drafts_smaller_blocks(lucky: Pair, tmp_path: Path) -> None:
    prompt, params = lucky.prompt(21), SamplingParams(max_tokens=30, ignore_eos=True)
    expected = decode_drafting(load_target(lucky.target), Drafter(lucky.drafter), prompt, 30, block_length=5)
    bundle = build(str(lucky.target), str(lucky.drafter), tmp_path / "bundle", max_seq_len=64, block_size=5)
    with LLM(bundle.path, threads=1) as llm:
        chunks = list(llm.stream(prompt, params, block_length=5))
    assert [token for chunk in chunks for token in chunk.token_ids] == expected.tokens
    assert [len(chunk.token_ids) - 1 for chunk in chunks[1:]][: len(expected.accepted)] == expected.accepted


def test_logits_are_the_target_s(oracle) -> None:
    pair, target, _ = oracle
    tokens = pair.prompt(37)
    expected = decode(target, tokens, 1).tokens
    assert int(pair.llm.logits(tokens).argmax()) == expected[0]


def test_chat_in_a_mode_that_the_drafter_was_not_trained_for_is_warned_about(
    pairs: dict[str, Pair], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    llm = pairs["tiny"].llm
    messages = [{"role": "user", "content": "What is 17 + 25?"}]
    plain = llm.chat_prompt(messages)
    target = llm.bundle.manifest["target"] | {"name": "Qwen/Qwen3-4B"}
    monkeypatch.setitem(llm.bundle.manifest, "target", target)
    monkeypatch.setattr("dflash_trt.logs._warned", set())
    llm.chat_prompt(messages, {"enable_thinking": False})
    assert caplog.text == ""
    assert llm.chat_prompt(messages) == plain
    llm.chat_prompt(messages)  # said once
    assert caplog.text.count("qwen3-4b: the drafter was trained on answers without thinking") == 1
