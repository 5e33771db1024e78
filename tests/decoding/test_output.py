"""Text and stops do not depend on how tokens are grouped, and cost the same with many patterns."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from dflash_trt.decoding.output import Automaton, Detokenizer, StopChecker
from dflash_trt.decoding.params import SamplingParams
from dflash_trt.decoding.sampling.history import History
from tests.doubles.pool import Letters

SAMPLE = "stop the spot, 你好世界 naïve été 😀😃 </s> hello world"


@cache
def byte_level() -> tokenizers.Tokenizer:
    """A byte-level tokenizer of 300 tokens. Many characters take several tokens, and any bytes can be formed."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|end|>", "<|start|>"]
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=special)
    tokenizer.train_from_iterator([SAMPLE] * 4, trainer)
    tokenizer.add_tokens(["<think>", "漢é"])
    return tokenizer


@cache
def byte_fallback() -> tokenizers.Tokenizer:
    """The decoder of Llama 2 and Gemma: words begin with a mark, unknown characters are byte tokens."""
    pieces = [
        "<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁hello", "world", "▁é", "a", "é",
    ]  # fmt: skip
    vocabulary = {piece: token for token, piece in enumerate(pieces)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    space = decoders.Replace("▁", " ")
    tokenizer.decoder = decoders.Sequence(
        [space, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


TOKENS = st.lists(st.integers(0, byte_level().get_vocab_size() - 1), max_size=40)
TEXTS = st.text("stop 你好é😀</>ab�", max_size=12).map(lambda text: byte_level().encode(text).ids)
OUTPUTS = st.lists(st.one_of(TOKENS, TEXTS), max_size=4).map(
    lambda parts: [t for part in parts for t in part]
)
CUTS = st.lists(st.integers(0, 60), max_size=8)


def runs(tokens: list[int], cuts: list[int]) -> list[list[int]]:
    bounds = sorted({0, len(tokens), *(cut for cut in cuts if cut < len(tokens))})
    return [tokens[a:b] for a, b in pairwise(bounds)]


def test_whole_characters_come_out_at_once() -> None:
    detokenizer = Detokenizer(byte_level())
    text = "a界é"
    spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)[0][0]
    singles = [byte_level().token_to_id(byte) for byte in spelled]
    assert [detokenizer.push([token]) for token in singles] == ["a", "", "", "界", "", "é"]


@given(
    st.lists(st.sampled_from(["▁hello", "world", "▁", "a", "é", "▁é", "<s>", "😀", "漢"]), max_size=20), CUTS
)
@settings(deadline=None)
def test_byte_fallback_text_adds_up(pieces: list[str], cuts: list[int]) -> None:
    tokenizer = byte_fallback()
    tokens: list[int] = []
    for piece in pieces:
        known = tokenizer.token_to_id(piece)
        spelled = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in piece.encode()]
        tokens += spelled if known is None else [known]
    detokenizer = Detokenizer(tokenizer)
    text = "".join(detokenizer.push(run) for run in runs(tokens, cuts))
    assert text + detokenizer.flush() == tokenizer.decode(tokens)


@given(st.lists(st.integers(0, 263), max_size=20))
@settings(deadline=None)
def test_byte_fallback_takes_any_bytes(tokens: list[int]) -> None:
    detokenizer = Detokenizer(byte_fallback())
    for token in tokens:
        detokenizer.push([token])
    detokenizer.flush()


@cache
def any_bytes() -> tokenizers.Tokenizer:
    """A byte-level tokenizer whose tokens may begin and end within a character, with two special tokens."""
    plain = sorted(pre_tokenizers.ByteLevel.alphabet(), key=lambda c: (ord(c) > 0xFF, ord(c)))
    runs = ["©Ã", "ðŁĺ", "Ģ", "½łä", "  ", "Ĺ" * 9]
    vocabulary = {piece: token for token, piece in enumerate(dict.fromkeys([*plain, *runs]))}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>", "<|start|>"])
    return tokenizer


UNFINISHED = st.lists(
    st.tuples(st.integers(0, any_bytes().get_vocab_size() + 3), st.sampled_from([1, 1, 2, 3, 7, 40, 90])),
    min_size=1,
    max_size=12,
).map(lambda parts: [token for token, times in parts for _ in range(times)])


@given(UNFINISHED, st.lists(st.integers(0, 400), max_size=8))
@settings(deadline=None, max_examples=400)
def test_any_bytes_for_long_add_up_to_the_whole_decode(tokens: list[int], cuts: list[int]) -> None:
    detokenizer = Detokenizer(any_bytes())
    pieces = [detokenizer.push(run) for run in runs(tokens, cuts)]
    assert "".join(pieces) + detokenizer.flush() == any_bytes().decode(tokens)


class Counting:
    """A tokenizer that counts the tokens it decodes."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self.tokenizer, self.decoded = tokenizer, 0
        self.id_to_token = tokenizer.id_to_token

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        self.decoded += len(tokens)
        return self.tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize("run", [1, 8])
@pytest.mark.parametrize(
    "pieces", [["Ģ"], ["ä"], ["<|end|>"], ["©Ã"], ["ä", *["<|start|>"] * 50, "½"], ["<0xFF>"], ["▁"]]
)
def test_the_time_to_detokenize_grows_with_the_tokens_only(pieces: list[str], run: int) -> None:
    tokenizer = byte_fallback() if pieces[0] in ("<0xFF>", "▁") else any_bytes()
    tokens = [tokenizer.token_to_id(piece) for piece in pieces] * (4000 // len(pieces))
    assert None not in tokens
    counting = Counting(tokenizer)
    detokenizer = Detokenizer(counting)  # type: ignore[arg-type]
    text = "".join([detokenizer.push(tokens[at : at + run]) for at in range(0, len(tokens), run)])
    assert text + detokenizer.flush() == tokenizer.decode(tokens)
    assert counting.decoded < 100 * len(tokens)


Result = tuple[list[int], str, str | None]


def feed(params: SamplingParams, tokens: list[int], cuts: list[int], eos: tuple[int, ...] = (0,)) -> Result:
    checker = StopChecker(params, eos, Detokenizer(byte_level()))
    kept, text = [], ""
    for run in runs(tokens, cuts):
        emission = checker.push(run)
        kept += run[: emission.kept]
        text += emission.text
        assert emission.finish_reason == checker.finish_reason
    return kept, text, checker.finish_reason


def reference(params: SamplingParams, tokens: list[int]) -> Result:
    """Decode the whole text after each token, and search each stop string at each character."""
    stop_ids = set(params.stop_token_ids) | (set() if params.ignore_eos else {0})
    early = 0  # characters that come too early to end the text
    for count, token in enumerate(tokens, 1):
        ended = token in stop_ids
        last = ended or count == params.max_tokens
        text = byte_level().decode(tokens[: count - 1] if ended else tokens[:count])
        sure = text if last else text.rstrip("\ufffd")
        if count - ended <= params.min_tokens:
            early = len(sure)
        for end in range(early + 1, len(sure) + 1):
            found = [stop for stop in params.stop if sure[:end].endswith(stop)]
            if found:
                return tokens[:count], sure[: end - max(map(len, found))], "stop"
        if last:
            return tokens[:count], text, "stop" if ended else "length"
    return tokens, text if tokens else "", None


COMMON_STOPS = st.sampled_from(["stop", "op 你", "é", "</s>", "sto", "\ufffd"])
STOPS = st.lists(st.one_of(COMMON_STOPS, st.text("stop 你", min_size=1, max_size=3)), max_size=3)


@given(
    OUTPUTS,
    CUTS,
    STOPS,
    st.integers(1, 50),
    st.lists(st.integers(0, 300), max_size=2),
    st.booleans(),
    st.sampled_from([0, 0, 1, 3, 10]),
)
@settings(deadline=None, max_examples=250)
def test_any_runs_stop_where_the_plain_reference_stops(
    tokens: list[int],
    cuts: list[int],
    stop: list[str],
    max_tokens: int,
    stop_ids: list[int],
    ignore_eos: bool,
    min_tokens: int,
) -> None:
    params = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min(min_tokens, max_tokens),
        stop=stop,
        stop_token_ids=stop_ids,
        ignore_eos=ignore_eos,
    )
    kept, text, reason = feed(params, tokens, cuts)
    expected_kept, expected_text, expected_reason = reference(params, tokens)
    assert (kept, reason) == (expected_kept, expected_reason)
    if reason is None:  # held back: an incomplete character, or a possible start of a stop string
        assert expected_text.startswith(text)
        held = expected_text[len(text) :].rstrip("\ufffd")
        assert not held or any(s.startswith(held) for s in stop)
    else:
        assert text == expected_text


def stopped(tokens: list[int], **fields: object) -> list[tuple[str, int]]:
    """Text and number of tokens, for pieces of every size."""
    found = []
    for size in (1, 2, 3, len(tokens)):
        checker = StopChecker(SamplingParams(max_tokens=99, **fields), (), Detokenizer(byte_level()))  # type: ignore[arg-type]
        made = [checker.push(tokens[at : at + size]) for at in range(0, len(tokens), size)]
        found.append(("".join(each.text for each in made), sum(each.kept for each in made)))
    assert len(set(found)) == 1, found
    return found[:1]


def test_a_stop_string_may_be_part_of_the_text() -> None:
    tokens = byte_level().encode("a stop, b").ids
    ((text, kept),) = stopped(tokens, stop="stop")
    assert text == "a "
    assert stopped(tokens, stop="stop", include_stop_str_in_output=True) == [("a stop", kept)]


def test_the_text_of_a_stop_token_may_be_part_of_the_text() -> None:
    ends = byte_level().encode(",").ids
    tokens = byte_level().encode("a stop, b").ids
    assert stopped(tokens, stop_token_ids=ends)[0][0] == "a stop"
    assert stopped(tokens, stop_token_ids=ends, include_stop_str_in_output=True)[0][0] == "a stop,"


def test_special_tokens_may_have_text() -> None:
    tokens = byte_level().encode("a<|start|>b<|end|>").ids
    for skip, text in ((True, "ab"), (False, "a<|start|>b<|end|>")):
        detokenizer = Detokenizer(byte_level(), skip)
        assert "".join([detokenizer.push((token,)) for token in tokens]) + detokenizer.flush() == text


@pytest.mark.parametrize(
    ("pairs", "text", "shown"),
    [
        ([("(", ")")], "(stop) stop", "(stop) "),
        ([("(", ")")], "st(op)op stop", "st(op)op "),
        ([("", ")")], "stop ) stop", "stop ) "),
        ([("", ")")], "stop", "stop"),
        ([("<|start|>", "<|end|>")], "<|start|>stop<|end|>stop", "stop"),
        ([("<|start|>", ":"), ("<|start|>o", "<|end|>")], "<|start|>stop:<|start|>o stop<|end|>stop", "stop:o stop"),
        ([("<stop>", ")")], "<stop> stop ) stop", "<stop> stop ) "),
        ([("<stopped>", ")")], "<stop the stopped", "<"),
        ([("<stopped>", ")")], "<stopp", "<"),
        ([("(", ")"), ("[", "]")], "(stop [ stop ) stop ] stop", "(stop [ stop ) stop ] "),
        ([("|", "|")], "|stop| stop", "|stop| "),
        ([], "(stop)", "("),
    ],
)  # fmt: skip
def test_stop_strings_do_not_count_between_marks(pairs: list[tuple[str, str]], text: str, shown: str) -> None:
    assert stopped(byte_level().encode(text).ids, stop="stop", stop_outside=pairs)[0][0] == shown


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
