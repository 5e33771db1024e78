"""Reasoning and calls are found in what each family writes, however the text is cut into pieces."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash_trt.serving.openai.channels import Channels
from dflash_trt.serving.openai.parsing import (
    BareCalls,
    Parser,
    Part,
    Plain,
    Stage,
    TaggedCalls,
    Think,
    calls_of,
)
from dflash_trt.text.tokenizer import Tokenizer

GPT_OSS = Path(__file__).parents[3] / "dflash_trt" / "shipped" / "tiny-gpt-oss" / "target"
SCHEMAS = {"get": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}}


def read(make: object, text: str) -> tuple[str, str, list[tuple[str, object]]]:
    """Content, reasoning and calls: the same for pieces of every size."""
    found = None
    for size in (1, 2, 3, 7, len(text) or 1):
        parser = make()  # type: ignore[operator]
        parts = [part for at in range(0, len(text), size) for part in parser.push(text[at : at + size], [])]
        parts += parser.finish()
        content = "".join(part.text for part in parts if part.kind == "content")
        reasoning = "".join(part.text for part in parts if part.kind == "reasoning")
        calls = [(part.call.name, json.loads(part.call.arguments)) for part in parts if part.call]
        assert found in (None, (content, reasoning, calls)), size
        found = content, reasoning, calls
    assert found is not None
    return found


def parser(calls: type[Stage] | None = None, inside: bool = False) -> object:
    made = TaggedCalls(SCHEMAS) if calls is TaggedCalls else calls() if calls else Plain()
    return Parser(Think(inside), made)


@pytest.mark.parametrize(
    ("text", "inside", "content", "reasoning"),
    [
        ("<think>\nHm.\n</think>\n\nYes.", False, "Yes.", "\nHm.\n"),
        ("Hm.</think>\n\nYes.", True, "Yes.", "Hm."),
        ("Hm. 3 < 4 </thin", True, "", "Hm. 3 < 4 </thin"),
        ("<thinking> is a word", False, "<thinking> is a word", ""),
        ("No tags <think> here", False, "No tags <think> here", ""),
        ("<th", False, "<th", ""),
        ("", False, "", ""),
    ],
)
def test_reasoning_is_apart(text: str, inside: bool, content: str, reasoning: str) -> None:
    assert read(lambda: parser(inside=inside), text) == (content, reasoning, [])


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('<tool_call>\n{"name": "get", "arguments": {"city": "B"}}\n</tool_call>', "", [("get", {"city": "B"})]),
        (
            'Let me see.\n<tool_call>{"name": "a", "arguments": {}}</tool_call>\n<tool_call>{"name": "b"}</tool_call>',
            "Let me see.", [("a", {}), ("b", {})],
        ),
        ("<tool_call>\n<function=get>\n<parameter=city>\n7\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
         "</function>\n</tool_call>", "", [("get", {"city": "7", "days": 3})]),
        ('<tool_call>{"name": "get", "arguments": "{\\"city\\": 1}"}', "", [("get", {"city": 1})]),
        ("<tool_call>{broken</tool_call> and on", "<tool_call>{broken</tool_call> and on", []),
        ('<tool_call>{"name": "get", "argum', '<tool_call>{"name": "get", "argum', []),
        ("a <tool_", "a <tool_", []),
    ],
)  # fmt: skip
def test_calls_in_tags(text: str, content: str, calls: object) -> None:
    assert read(lambda: parser(TaggedCalls), text) == (content, "", calls)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('{"name": "get", "parameters": {"city": "B"}}', "", [("get", {"city": "B"})]),
        ('<|python_tag|>{"name": "a", "parameters": {}}; {"name": "b", "parameters": {}}', "", [("a", {}), ("b", {})]),
        ('{"city": "B"}', '{"city": "B"}', []),
        ("{ is a brace", "{ is a brace", []),
        ("Hello {you}", "Hello {you}", []),
    ],
)  # fmt: skip
def test_calls_as_bare_objects(text: str, content: str, calls: object) -> None:
    assert read(lambda: parser(BareCalls), text) == (content, "", calls)


@pytest.mark.parametrize(
    "text",
    [
        r'{"name": "a\ud800", "arguments": {"city": "\udfff"}}',
        r'{"name": "a\ud800", "arguments": "{\"city\": \"\udfff\"}"}',
    ],
)
def test_calls_are_utf8_though_escapes_name_half_characters(text: str) -> None:
    stage = BareCalls()
    (part,) = [*stage.push(text), *stage.finish()]
    assert part.call is not None
    assert part.call.name == "a?"
    assert json.loads(part.call.arguments.encode()) == {"city": "?"}


def test_the_template_says_how_a_family_calls() -> None:
    assert isinstance(calls_of("... <tool_call> ...", SCHEMAS), TaggedCalls)
    assert isinstance(calls_of("<|python_tag|>", SCHEMAS), BareCalls)
    assert isinstance(calls_of("<tool_call>", None), Plain)
    assert isinstance(calls_of("", SCHEMAS), Plain)


@pytest.fixture(scope="module")
def gpt_oss() -> Tokenizer:
    return Tokenizer(GPT_OSS)


def by_tokens(tokenizer: Tokenizer, prompt: str, text: str, shown: str | None = None) -> list[Part]:
    """Parts of an answer whose text for clients is `shown`: without special tokens, perhaps cut by a stop string."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    made = Channels(tokenizer, prompt, Plain())
    whole = tokenizer.decode(ids)
    left, parts = whole if shown is None else shown, []
    for token in ids:
        piece = tokenizer.decode([token])
        parts += made.push(left[: len(piece)], [token])
        left = left[len(piece) :]
    return [*parts, *made.finish()]


def joined(parts: list[Part], kind: str) -> str:
    return "".join(part.text for part in parts if part.kind == kind)


def test_channels_of_gpt_oss_are_reasoning_and_content(gpt_oss: Tokenizer) -> None:
    text = "<|channel|>analysis<|message|>We add.<|end|><|start|>assistant<|channel|>final<|message|>It is 42.<|end|>"
    parts = by_tokens(gpt_oss, "<|start|>assistant", text)
    assert (joined(parts, "reasoning"), joined(parts, "content")) == ("We add.", "It is 42.")
    parts = by_tokens(gpt_oss, "<|start|>assistant<|channel|>final<|message|>", "It is 42.")
    assert (joined(parts, "reasoning"), joined(parts, "content")) == ("", "It is 42.")


def test_a_commentary_to_a_function_is_its_call(gpt_oss: Tokenizer) -> None:
    text = '<|channel|>commentary to=functions.get_weather json<|message|>{"city": "B"}<|end|>'
    parts = by_tokens(gpt_oss, "<|start|>assistant", text)
    (call,) = (part.call for part in parts if part.call)
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "B"})
    assert joined(parts, "content") == ""


def test_a_stop_string_cuts_channels_where_it_cuts_the_text(gpt_oss: Tokenizer) -> None:
    text = "<|channel|>final<|message|>one two three"
    parts = by_tokens(gpt_oss, "<|start|>assistant", text, shown="finalone ")
    assert joined(parts, "content") == "one "
