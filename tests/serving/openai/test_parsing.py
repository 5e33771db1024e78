"""Reasoning and calls are found in what each family writes, however the text is cut into pieces."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from sys import float_info
from typing import Any

import pytest

from dflash_trt.serving.openai.calls import muse_calls
from dflash_trt.serving.openai.channels import Channels
from dflash_trt.serving.openai.parsing import BARE, AnswerParser, AnswerPart, BareCalls, Stage, Think
from dflash_trt.serving.openai.written import GEMMA, MISTRAL, TAG, written_by
from dflash_trt.text.tokenizer import Tokenizer

GPT_OSS = Path(__file__).parents[3] / "dflash_trt" / "shipped" / "tiny-gpt-oss" / "target"
SCHEMAS = {
    "get": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "at": {"type": "array"}}}
}


def read(make: object, text: str, begun: bool = False) -> tuple[str, str, list[tuple[str, object]]]:
    """Content, reasoning and calls: the same for pieces of every size."""
    parts_of = None
    for size in (1, 2, 3, 7, len(text) or 1):
        parser = make()
        parts = [part for at in range(0, len(text), size) for part in parser.push(text[at : at + size], [])]
        parts += parser.finish(begun)
        content = "".join(part.text for part in parts if part.kind == "content")
        reasoning = "".join(part.text for part in parts if part.kind == "reasoning")
        calls = [
            (part.call.name, json.loads(part.call.arguments) if part.call.whole else part.call.arguments)
            for part in parts
            if part.call
        ]
        assert parts_of in (None, (content, reasoning, calls)), size
        parts_of = content, reasoning, calls
    assert parts_of is not None
    return parts_of


def parser(notation: str = "", inside: bool = False) -> AnswerParser:
    calls = written_by(notation).calls(SCHEMAS)
    return AnswerParser(Think(inside, notation=getattr(calls, "notation", None)), calls)


@pytest.mark.parametrize(
    ("text", "inside", "content", "reasoning"),
    [
        ("<think>\nHm.\n</think>\n\nYes.", False, "Yes.", "\nHm.\n"), ("Hm.</think>\n\nYes.", True, "Yes.", "Hm."),
        ("Hm. 3 < 4 </thin", True, "", "Hm. 3 < 4 </thin"),
        ("<thinking> is a word", False, "<thinking> is a word", ""),
        ("No tags <think> here", False, "No tags <think> here", ""), ("<th", False, "<th", ""), ("", False, "", ""),
    ],
)  # fmt: skip
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
        ("The tag <tool_call> begins it, 1 < 2", "The tag <tool_call> begins it, 1 < 2", []),
        ("A <tool_call>\n\nof <tool_call>", "A <tool_call>\n\nof <tool_call>", []),
        ('See <tool_call> {"name": "b"}</tool_call> <tool_call>', "See<tool_call>", [("b", {})]),
        ('<tool_call>{"name": "get", "arguments": {"city": "a</tool_call>\\"</tool_call>b"}}</tool_call>',
         "", [("get", {"city": 'a</tool_call>"</tool_call>b'})]),
        ('<tool_call>{"name": "get\n</tool_call>on', '<tool_call>{"name": "get\n</tool_call>on', []),
        ("<tool_call><function=get><parameter=city>a</parameter> b</tool_call>\n</parameter></function></tool_call>!",
         "!", [("get", {"city": "a</parameter> b</tool_call>"})]),
        ("<tool_call><function=get><parameter=city>a<parameter=x>b</parameter><parameter=days>3</function></tool_call>",
         "", [("get", {"city": "a<parameter=x>b", "days": 3})]),
        ("<tool_call><function=get><parameter=city>a\n<parameter=days>\n3\n</parameter></function></tool_call>",
         "", [("get", {"city": "a", "days": 3})]),
        ('<tool_call><function=get><parameter=at>["</parameter> <parameter=city>x"]</parameter></function></tool_call>',
         "", [("get", {"at": ["</parameter> <parameter=city>x"]})]),
    ],
)  # fmt: skip
def test_calls_in_tags(text: str, content: str, calls: object) -> None:
    assert read(lambda: parser(TAG.begin), text) == (content, "", calls)


TYPES: dict[str, Any] = {
    "properties": {
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "kinds": {"type": ["string", "null"]},
        "enum": {"enum": ["1", 2]},
        "ref": {"$ref": "#/$defs/Name"},
        "all": {"allOf": [{"$ref": "#/$defs/Name"}]},
        "free": {},
        "number": {"type": "number"},
        "flag": {"type": "boolean"},
        "list": {"items": {"type": "string"}},
        "object": {"$ref": "#/$defs/Thing"},
        "loop": {"$ref": "#/$defs/Loop"},
    },
    "$defs": {
        "Name": {"type": "string"}, "Thing": {"properties": {}}, "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}] * 50},
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        *((name, "123", "123") for name in ("maybe", "kinds", "ref", "all", "free", "unknown")),
        *((name, "null", None) for name in ("maybe", "kinds")),
        *((name, "null", "null") for name in ("ref", "unknown")),
        ("enum", "1", "1"), ("enum", "2", 2), ("number", "1.5", 1.5), ("number", "many", "many"),
        ("flag", "True", True), ("flag", "false", False), ("list", '["1"]', ["1"]), ("object", '{"a": 1}', {"a": 1}),
        ("loop", "1", 1), ("number", "-1e400", -float_info.max), ("list", "[NaN]", "[NaN]"),
    ],
)  # fmt: skip
def test_a_value_in_tags_is_json_only_where_it_cannot_be_a_text(name: str, text: str, value: object) -> None:
    stage = written_by(TAG.begin).calls({"f": TYPES})
    call = f"<tool_call><function=f><parameter={name}>\n{text}\n</parameter></function></tool_call>"
    (part,) = [*stage.push(call), *stage.finish()]
    assert part.call is not None
    assert json.loads(part.call.arguments) == {name: value}


def in_bits(make: Callable[[], Any], text: str) -> float:
    """Seconds of CPU time to read a text four characters at a time."""
    made = make()
    begun = time.thread_time()
    for at in range(0, len(text), 4):
        [*made.push(text[at : at + 4])]
    [*made.finish()]
    return time.thread_time() - begun


HOSTILE = {
    "blanks": " ", "quotes": '"', "escapes": "\\", "braces": "{", "marks": "<tool_call>", "ends": "</tool_call>",
    "parameters": "<parameter=", "named": "<parameter=a>", "values": "</parameter>", "functions": "<function=",
    "muse": "</atem:invoke>", "invoked": '<atem:invoke name="get"><atem:parameter name="city">x</atem:parameter>',
    "words": "a ", "arrays": '<parameter=at>[",","',
    "gemma": '<|"|>a', "literals": "1 ", "lists": "[", "commas": ",", "turns": "<tool_call> x ",
}  # fmt: skip


class Muse(Stage):
    """Reads the calls of a whole message of Muse Glimmer's."""

    def __init__(self) -> None:
        self.text = list[str]()

    def push(self, text: str) -> Any:
        self.text.append(text)
        return ()

    def finish(self) -> Any:
        return muse_calls("".join(self.text), SCHEMAS)


BEGINNINGS = {
    TAG: (
        "", "<tool_call>", '<tool_call>{"name": "', "<tool_call><function=get>",
        "<tool_call><function=get><parameter=city>",
    ),
    GEMMA: ("", "<|tool_call>", "<|tool_call>call:get{", '<|tool_call>call:get{city:<|"|>'),
    MISTRAL: ("", "[TOOL_CALLS]", '[TOOL_CALLS]get[ARGS]{"city": "'),
}  # fmt: skip


@pytest.mark.parametrize("piece", HOSTILE)
def test_the_time_grows_as_the_text(piece: str) -> None:
    """Four times the text, less than six times the time; measured again where something else took time."""
    makes = [
        *(
            (partial(written_by(each.begin).calls, SCHEMAS), start)
            for each, starts in BEGINNINGS.items() for start in starts
        ),
        *((partial(BareCalls, SCHEMAS), start) for start in ("", '{"name": "')),
        (partial(Think, False), ""), (partial(Think, True), ""),
        *((partial(Think, True, notation=each), start) for each in BEGINNINGS for start in ("", each.begin)),
        (Muse, ""), (Muse, '<atem:invoke name="get">'),
    ]  # fmt: skip
    for make, start in makes:
        for _ in range(6):
            size = 3_000 // len(HOSTILE[piece])
            short, long = (in_bits(make, start + HOSTILE[piece] * size * factor) for factor in (1, 4))
            if long < 6 * short + 0.002:
                break
        else:
            raise AssertionError((make, start, short, long))


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('{"name": "get", "parameters": {"city": "B"}}', "", [("get", {"city": "B"})]),
        ('<|python_tag|>{"name": "get", "parameters": {}}; {"name": "get"}', "", [("get", {}), ("get", {})]),
        ('{"city": "B"}', '{"city": "B"}', []),
        ('{"name": "Alice", "parameters": {}}', '{"name": "Alice", "parameters": {}}', []),
        ("{ is a brace", "{ is a brace", []), ("Hello {you}", "Hello {you}", []),
    ],
)  # fmt: skip
def test_calls_as_bare_objects(text: str, content: str, calls: object) -> None:
    assert read(lambda: parser("python_tag"), text) == (content, "", calls)


@pytest.mark.parametrize(
    "text",
    [
        r'{"name": "a\ud800", "arguments": {"city": "\udfff"}}',
        r'{"name": "a\ud800", "arguments": "{\"city\": \"\udfff\"}"}',
    ],
)
def test_calls_are_utf8_though_escapes_name_half_characters(text: str) -> None:
    stage = BareCalls(["a?"])
    (part,) = [*stage.push(text), *stage.finish()]
    assert part.call is not None
    assert part.call.name == "a?"
    assert json.loads(part.call.arguments.encode()) == {"city": "?"}


CITY, DAYS = "a</function> b", 3
JSON = f'"city": "{CITY}", "days": {DAYS}}}'
TAGS = f"<parameter=city>\n{CITY}\n</parameter>\n<parameter=days>\n{DAYS}\n</parameter>\n</function>"
WHOLE_CALLS = {  # and what may follow the end of a call, or its beginning
    TAG.begin: (f"<tool_call>\n<function=get>\n{TAGS}", "\n</tool_call>"),
    "<tool_call> JSON": (f'<tool_call>\n{{"name": "get", "arguments": {{{JSON}}}', "\n</tool_call>"),
    BARE: (f'{{"name": "get", "parameters": {{{JSON}}}', ""),
    GEMMA.begin: (f'<|tool_call>call:get{{city:<|"|>{CITY}<|"|>,days:{DAYS}}}', "<tool_call|>"),
    MISTRAL.begin: (f"[TOOL_CALLS]get[ARGS]{{{JSON}", ""),
}  # fmt: skip


@pytest.mark.parametrize("notation", WHOLE_CALLS)
def test_a_call_that_is_cut_is_content_until_its_last_value_has_ended(notation: str) -> None:
    call, end = WHOLE_CALLS[notation]
    for size in range(1, len(call + end) + 1):
        text = (call + end)[:size]
        calls = [("get", {"city": CITY, "days": DAYS})] if size >= len(call) else []
        assert read(lambda: parser(notation), text) == ("" if calls else text, "", calls), text


@pytest.mark.parametrize("notation", ["<tool_call> JSON", BARE, MISTRAL.begin])
def test_a_part_of_a_call_that_is_required_is_one_from_its_arguments_on(notation: str) -> None:
    call, end = WHOLE_CALLS[notation]
    before = {BARE: "; ", MISTRAL.begin: ""}.get(notation, "\n")
    first = ("get", {"city": CITY, "days": DAYS})
    least = call.index(f"{{{JSON}") - (notation != MISTRAL.begin)
    for size in range(1, len(call)):
        text = call[:size]
        calls = [("get", text[least:].strip())] if size >= least else []
        assert read(lambda: parser(notation), text, begun=True) == ("" if calls else text, "", calls), text
        if calls:
            second = read(lambda: parser(notation), call + end + before + text, begun=True)
            assert second == ("", "", [first, *calls])


@pytest.mark.parametrize("notation", [TAG.begin, "<tool_call> JSON", GEMMA.begin, MISTRAL.begin])
def test_a_call_ends_a_thought_that_is_open(notation: str) -> None:
    """A mark that no call follows is a part of the thought."""
    call, end = WHOLE_CALLS[notation]
    mark = notation.removesuffix(" JSON")
    thought, called = f"I use {mark} now, {mark}\n\n", ("get", {"city": CITY, "days": DAYS})
    after = "" if mark == MISTRAL.begin else " Yes."
    found = read(lambda: parser(notation, inside=True), thought + call + end + after)
    assert found == (after.strip(), thought, [called])
    closed = read(lambda: parser(notation), f"<think>{thought}</think>\n{call}")
    assert closed == ("", thought, [called])
    for cut in (mark, mark[:-1], mark + "\n"):
        assert read(lambda: parser(notation, inside=True), thought + cut) == ("", thought + cut, [])
    plain = read(lambda: AnswerParser(Think(True), Stage()), thought + call + end)  # without tools
    assert plain == ("", thought + call + end, [])


@pytest.mark.parametrize("size", [1, 2, 3, 9])
def test_tokens_of_a_thought_that_a_call_ends_are_those_before_its_mark(size: int) -> None:
    pieces = [("I use ", 1), ("<tool_call>", 7), (" or ", 2), ("<tool_call>", 7), ("\n", 3), ("{", 4)]
    pieces += [('"name": "b"}', 5), ("</tool_call>", 8), ("<tool_call>", 7), ('{"name": "c"}', 6)]
    made = AnswerParser(Think(True, notation=TAG), written_by(TAG.begin).calls(SCHEMAS), 9, 7)
    for at in range(0, len(pieces), size):
        part = pieces[at : at + size]
        made.push("".join(text for text, _ in part), [token for _, token in part])
    assert made.reasoning_tokens == 3


def test_tokens_of_reasoning_are_counted() -> None:
    made = AnswerParser(Think(False), Stage(), 9)
    for text, ids in (("<think>", [1]), ("a", [2, 3]), ("b</think>\n\nc", [4, 9, 5]), ("d", [6])):
        made.push(text, ids)
    assert made.reasoning_tokens == 5
    plain = AnswerParser(Think(False), Stage(), 9)
    plain.push("Hello", [1, 2])
    assert plain.reasoning_tokens == 0


@pytest.mark.parametrize(
    ("end", "begun", "content", "arguments"),
    [
        ('{"city": "B"}<|end|>', False, "", '{"city": "B"}'), ('{"city": "B', False, '{"city": "B', None),
        ('{"city": "B', True, "", '{"city": "B'), ("", False, "", None), ("", True, "", ""),
        ("<|end|>", False, "", "{}"),
    ],
)  # fmt: skip
def test_a_commentary_to_a_function_is_its_call_or_content_where_it_is_cut(
    gpt_oss, end, begun, content, arguments
) -> None:
    text = f"<|channel|>commentary to=functions.get json<|message|>{end}"
    parts = by_tokens(gpt_oss, "<|start|>assistant", text, begun=begun)
    assert joined(parts, "content") == content
    calls = [(part.call.name, part.call.arguments) for part in parts if part.call]
    assert calls == ([] if arguments is None else [("get", arguments)])


def test_the_template_says_how_a_family_calls() -> None:
    notations = {"... <tool_call> ...": TAG, "<|python_tag|>": BARE, "": "", "[TOOL_CALLS]": MISTRAL}
    notations['<|tool_call>call: "parameters"'] = GEMMA
    assert {template: written_by(template).notation for template in notations} == notations
    assert type(written_by("<tool_call>").calls(None)) is Stage
    assert [written_by(t).special for t in ("<channel|>", "[THINK]", "<think>", "<|channel|>")] == [
        True, True, False, False,
    ]  # fmt: skip


def thinking(template: str, inside: bool = False) -> object:
    """The parser of a template's family, with tools."""
    written = written_by(template)
    assert written.thoughts is not None
    calls = written.calls(SCHEMAS)
    think = Think(inside, written.thoughts.begin, written.thoughts.end, getattr(calls, "notation", None))
    return AnswerParser(think, calls)


GEMMA_TEMPLATE, MISTRAL_TEMPLATE = "<|channel>thought\n <channel|> <|tool_call>", "[THINK] [TOOL_CALLS]"
QUOTED = '<|"|>'


@pytest.mark.parametrize(
    ("template", "text", "content", "reasoning", "calls"),
    [
        (GEMMA_TEMPLATE, "<|channel>thought\nHm.\n<channel|>Yes.", "Yes.", "Hm.\n", []),
        (GEMMA_TEMPLATE, "<|channel>thought\n<channel|>Yes.", "Yes.", "", []),
        (GEMMA_TEMPLATE, "So <|chan", "So <|chan", "", []),
        (GEMMA_TEMPLATE, f"Let me see.<|tool_call>call:get{{city:{QUOTED}B, {{x}}: \"c\"{QUOTED},days:3}}<tool_call|>",
         "Let me see.", "", [("get", {"city": 'B, {x}: "c"', "days": 3})]),
        (GEMMA_TEMPLATE,
         "<|tool_call>call:a{}<tool_call|><|tool_call>call:b{x:{y:[1,-2.5e3,true,null,word]}}<tool_call|>", "", "",
         [("a", {}), ("b", {"x": {"y": [1, -2500.0, True, None, "word"]}})]),
        (GEMMA_TEMPLATE, "<|tool_call>call:get{broken<tool_call|> on",
         "<|tool_call>call:get{broken<tool_call|> on", "", []),
        (GEMMA_TEMPLATE, "<|tool_call>hello<tool_call|>", "<|tool_call>hello<tool_call|>", "", []),
        (MISTRAL_TEMPLATE, "[THINK]Hm.[/THINK]Yes.", "Yes.", "Hm.", []),
        (MISTRAL_TEMPLATE, 'Yes.[TOOL_CALLS]get[ARGS]{"city": "B"}[TOOL_CALLS]a[ARGS]{}',
         "Yes.", "", [("get", {"city": "B"}), ("a", {})]),
        (MISTRAL_TEMPLATE, "[TOOL_CALLS]nothing [TOOL", "[TOOL_CALLS]nothing [TOOL", "", []),
    ],
)  # fmt: skip
def test_special_marks(template: str, text: str, content: str, reasoning: str, calls: object) -> None:
    assert read(lambda: thinking(template), text) == (content, reasoning, calls)


@pytest.fixture(scope="module")
def gpt_oss() -> Tokenizer:
    return Tokenizer(GPT_OSS)


def by_tokens(
    tokenizer: Tokenizer, prompt: str, text: str, shown: str | None = None, begun: bool = False
) -> list[AnswerPart]:
    """Parts of an answer whose text for clients is `shown`: without special tokens, perhaps cut by a stop string."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    made = Channels(tokenizer, prompt, Stage())
    whole = tokenizer.decode(ids)
    left, parts = whole if shown is None else shown, []
    for token in ids:
        piece = tokenizer.decode([token])
        parts += made.push(left[: len(piece)], [token])
        left = left[len(piece) :]
    return [*parts, *made.finish(begun)]


def joined(parts: list[AnswerPart], kind: str) -> str:
    return "".join(part.text for part in parts if part.kind == kind)


def test_channels_of_gpt_oss_are_reasoning_and_content(gpt_oss: Tokenizer) -> None:
    text = "<|channel|>analysis<|message|>We add.<|end|><|start|>assistant<|channel|>final<|message|>It is 42.<|end|>"
    parts = by_tokens(gpt_oss, "<|start|>assistant", text)
    assert (joined(parts, "reasoning"), joined(parts, "content")) == ("We add.", "It is 42.")
    parts = by_tokens(gpt_oss, "<|start|>assistant<|channel|>final<|message|>", "It is 42.")
    assert (joined(parts, "reasoning"), joined(parts, "content")) == ("", "It is 42.")


FINAL = "<|channel|>final<|message|>"


@pytest.mark.parametrize(
    ("text", "content", "reasoning"),
    [
        ("<|channel|>analysis<|message|>Hm.<|end|>Paris.", "Paris.", "Hm."),
        (f"{FINAL}It is <|end|>Paris.<|end|>", "It is Paris.", ""),
        (f"{FINAL}It is <|end|>Paris.<|start|>assistant{FINAL} Yes.<|end|>", "It is Paris. Yes.", ""),
        ("Paris.", "Paris.", ""), ("Paris is it.<|end|>", "Paris is it.", ""),
        (f"Paris.{FINAL} Yes.", "Paris. Yes.", ""),
        ("It is Paris.<|message|> Yes.", "It is Paris. Yes.", ""), ("<|message|>Yes.", "Yes.", ""),
        (f"{FINAL}Yes.<|end|>assistant{FINAL} No.", "Yes. No.", ""),
        ("<|channel|>analysis", "analysis", ""), ("<|channel|>analysis<|end|>", "analysis", ""),
        (f"{FINAL}Yes.<|end|><|start|>assistant<|channel|>fin", "Yes.assistantfin", ""),
        ("word " * 300, "word " * 300, ""), (f"{'word ' * 300}<|channel|>final", f"{'word ' * 300}final", ""),
    ],
)  # fmt: skip
def test_text_outside_of_a_message_is_content_unless_it_is_the_header_of_one(
    gpt_oss, text, content, reasoning
) -> None:
    parts = by_tokens(gpt_oss, "<|start|>assistant", text)
    assert (joined(parts, "content"), joined(parts, "reasoning")) == (content, reasoning)
    made = Channels(gpt_oss, "<|start|>assistant", Stage())
    ids = gpt_oss.encode(text, add_special_tokens=False)
    whole = [*made.push(gpt_oss.decode(ids), ids), *made.finish()]
    assert (joined(whole, "content"), joined(whole, "reasoning")) == (content, reasoning)


def test_the_prompts_part_of_a_header_is_no_content(gpt_oss: Tokenizer) -> None:
    prompt = "<|start|>assistant<|channel|>comm"
    assert joined(by_tokens(gpt_oss, prompt, "entary"), "content") == "entary"
    assert joined(by_tokens(gpt_oss, prompt, "entary<|message|>Yes."), "content") == "Yes."


def test_a_stop_string_cuts_channels_where_it_cuts_the_text(gpt_oss: Tokenizer) -> None:
    text = "<|channel|>final<|message|>one two three"
    parts = by_tokens(gpt_oss, "<|start|>assistant", text, shown="finalone ")
    assert joined(parts, "content") == "one "
