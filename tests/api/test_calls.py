"""Calls of `LLM`: what ends a text, what is refused, and what a call returns."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dflash_trt import LLM, SamplingParams
from dflash_trt.building.build import build
from dflash_trt.errors import DFlashError, RequestError
from dflash_trt.runtime import thinking_warning
from tests.api.pairs import MAX_SEQ_LEN, SAMPLING, Pair, chooser, make
from tests.doubles.checkpoints import ENDOFTEXT, IM_END, SPECIAL_TOKENS, VOCAB
from tests.doubles.reference import Drafter, decode, decode_drafting, load_target


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
    directories = make(tmp_path, {"favourites": 6, "eos": (24, 32)}, {})
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
    """Substrings of one and three characters of the text: it is cut at the first place, and they are never shown."""
    prompt = pair.prompt(21, seed=3)
    params = replace(SAMPLING[sampling], max_tokens=30, ignore_eos=True)
    whole = pair.plain(prompt, params)
    found = {
        whole.text[i : i + n] for i in range(len(whole.text)) for n in (1, 3) if i + n <= len(whole.text)
    }
    stops = sorted(s for s in found if "\ufffd" not in s)
    for stop in stops[:: -(-len(stops) // 7)]:
        stopping = replace(params, stop=stop)
        drafted, plain = pair.llm.generate(prompt, stopping), pair.plain(prompt, stopping)
        assert drafted.text == plain.text == whole.text[: whole.text.index(stop)]
        assert drafted.finish_reason == plain.finish_reason == "stop"
        assert drafted.token_ids == plain.token_ids == whole.token_ids[: len(plain.token_ids)]
        assert stop in pair.llm.tokenizer.decode(plain.token_ids)
        assert stop not in pair.llm.tokenizer.decode(plain.token_ids[:-1])
        assert "".join(chunk.text for chunk in pair.llm.stream(prompt, stopping)) == plain.text


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
    with pytest.raises(RequestError, match=r"100 tokens .* max_tokens is 61.*160"):
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
def test_a_stream_is_the_completion_in_runs(lucky: Pair, speculate: bool) -> None:
    params = SamplingParams(temperature=0.8, max_tokens=40, seed=1)
    whole = lucky.llm.generate("def add(a, b):", params)
    chunks = list(lucky.llm.stream("def add(a, b):", params, speculate=speculate))
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


def test_the_tools_of_a_chat_are_in_its_prompt_as_transformers_puts_them_there(oracle, monkeypatch) -> None:
    llm = oracle[0].llm
    template = "{{ messages[0].content }}{% for tool in tools or [] %} {{ tool.function.name }}{% endfor %}"
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    messages = [{"role": "user", "content": "Hi"}]
    monkeypatch.setitem(llm.tokenizer.templates.sources, "default", template)
    prompt = llm.chat(messages, SamplingParams(max_tokens=2), tools=tools).prompt_token_ids
    assert llm.tokenizer.decode(prompt) == "Hi weather"
    assert llm.tokenizer.decode(llm.chat_prompt(messages)) == "Hi"
    for wrong in ("weather", ["weather"]):
        with pytest.raises(RequestError, match=r"tools is .*weather"):
            llm.chat(messages, tools=wrong)
    with pytest.raises(RequestError, match="tools are given twice"):
        llm.chat_prompt(messages, {"tools": tools}, tools)


def test_chat_in_a_mode_that_the_drafter_was_not_trained_for_is_warned_about(
    pairs, monkeypatch, caplog
) -> None:
    llm = pairs["tiny"].llm
    messages = [{"role": "user", "content": "What is 17 + 25?"}]
    plain = llm.chat_prompt(messages)
    monkeypatch.setattr(llm, "_thinking_warning", thinking_warning("Qwen/Qwen3-4B"))
    llm.chat_prompt(messages, {"enable_thinking": False})
    assert caplog.text == ""
    assert llm.chat_prompt(messages) == plain
    llm.chat_prompt(messages)  # said once
    assert caplog.text.count("qwen3-4b: the drafter was trained on answers without thinking") == 1
