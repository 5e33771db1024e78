"""Required calls in a family's own notation: what the grammar lets a model write is read as arguments that fit."""

from __future__ import annotations

import contextlib
import json
import random
from functools import cache, partial
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from dflash_trt.decoding.output import Detokenizer
from dflash_trt.decoding.sampling.structure import Structure, StructuredOutputs, Structures
from dflash_trt.serving.openai.chat import Chat
from dflash_trt.serving.openai.errors import ApiError
from dflash_trt.serving.openai.model import Model
from tests.serving.openai.conftest import chat_of, model_of, tool

MARKS = [
    "<|start|>", "<|message|>", "<|eom|>", "<|tool_call>", "<tool_call|>", '<|"|>', "<|channel|>", "<|constrain|>",
    "<|end|>", "<|call|>", "[TOOL_CALLS]", "[ARGS]",
]  # fmt: skip
# What templates show that decides the notation, and how a value ends.
FAMILIES = {
    "qwen3-coder": ("<tool_call>\n<function=example>\n<parameter=one>", "\n</parameter>\n"),
    "muse": ("<atem:function_calls> <|start|>", "</atem:parameter>\n"),
    "gemma": ("<|channel>thought <|tool_call>call:", '<|"|>'),
    "gpt-oss": ("<|channel|>", '"'),
    "mistral": ("[TOOL_CALLS]", '"'),
}
PLACE = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 1}, "in": {"$ref": "#/$defs/Place"}},
}
SCHEMAS: list[dict[str, Any]] = [
    {"properties": {"city": {"type": "string", "description": "which"}, "days": {"type": "integer", "minimum": 2}},
     "required": ["days"]},
    {"properties": {"a": {"type": "string", "minLength": 2, "maxLength": 4},
                    "b": {"type": "string", "pattern": "^[a-c/]+$"}}, "required": ["a", "b"]},
    {"properties": {"kind": {"enum": ["a", "b c", 1, None, True]}, "one": {"const": "x"}, "flag": {"type": "boolean"}},
     "required": ["kind", "one", "flag"]},
    {"properties": {"maybe": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]},
                    "auto": {"anyOf": [{"const": "auto"}, {"type": "integer"}]}}, "required": ["maybe", "auto"]},
    {"properties": {"list": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 3},
                    "at": {"$ref": "#/$defs/Place"}}, "required": ["list", "at"], "$defs": {"Place": PLACE}},
    {"properties": {}, "additionalProperties": {"type": "integer"}}, {},
    {"properties": {"a": {"type": ["integer", "null"]}}, "additionalProperties": {"type": "boolean"}},
    {"properties": {"any": {}, "thing": {"type": "object", "additionalProperties": False, "required": ["k"],
                                         "properties": {"k": {"enum": ["k", "l"]}, "B": {}}}},
     "required": ["thing"]},
]  # fmt: skip


class NotACall(Exception):
    pass


@cache
def family(tiny: Path, name: str) -> tuple[Model, Structures]:
    model = model_of(tiny, FAMILIES[name][0], "<|start|>assistant", MARKS)
    tokenizer = model.tokenizer.backend
    return model, Structures(model.tokenizer, tokenizer.get_vocab_size(), [2])


def beginning(asked: Chat, structures: Structures) -> Structure:
    return structures.compile(StructuredOutputs(**asked.request["params"]["structured_outputs"]))


def read(asked: Chat, model: Model, ids: list[int], begun: bool = False) -> list[tuple[str, str]]:
    """The calls of an answer, which has nothing else."""
    words = Detokenizer(model.tokenizer.backend, asked.request["params"].get("skip_special_tokens", True))
    parser = asked.choices[0].parser
    parts = [part for token in ids for part in parser.push(words.push([token]), [token])] + parser.finish(
        begun
    )
    if not parts or not all(part.call for part in parts):
        raise NotACall(model.tokenizer.decode(ids, skip_special_tokens=False), parts)
    return [(part.call.name, part.call.arguments) for part in parts if part.call]


def written(structure: Structure, model: Model, end: str, chance: random.Random) -> list[int] | None:
    """Tokens that a grammar allows, by chance, yet often those that end a value; None if they are too many."""
    text, ids = "", list[int]()
    while len(ids) < 250:
        allowed = [int(token) for token in structure.allowed().nonzero()[0]]
        texts = {token: model.token_text(token) for token in allowed}
        if 2 in allowed and (len(allowed) == 1 or chance.random() < 0.5):
            return ids
        at = max(size for size in range(len(end)) if text.endswith(end[:size]))
        ends = [token for token in allowed if texts[token] and end[at:].startswith(texts[token])]
        token = (
            max(ends, key=lambda one: len(texts[one]))
            if ends and chance.random() < 0.8
            else chance.choice(allowed)
        )
        if token == 2:
            return ids
        structure.add(token)
        ids.append(token)
        text += texts[token]
    return None


def required(model: Model, schema: Any, **more: Any) -> Chat:
    return chat_of(model, tools=[tool(schema)], tool_choice="required", parallel_tool_calls=False, **more)


@pytest.mark.parametrize("name", FAMILIES)
def test_what_the_grammar_of_a_required_call_admits_is_read_as_arguments_that_fit(tiny, name) -> None:
    model, structures = family(tiny, name)
    chance, ended = random.Random(7), 0
    for schema in SCHEMAS:
        for _ in range(3):
            asked = required(model, schema)
            if (ids := written(beginning(asked, structures), model, FAMILIES[name][1], chance)) is None:
                continue
            ended += 1
            ((called, arguments),) = read(asked, model, ids)
            assert called == "order"
            jsonschema.validate(json.loads(arguments), schema)
            if "any" in schema.get("properties", ()):  # which is written in more than one way
                continue
            # A part of the call has the beginning of its arguments.
            begun, before = [], required(model, schema)
            for size in (*chance.sample(range(len(ids)), 5), len(ids) - 1):
                with contextlib.suppress(NotACall):
                    ((_, part),) = read(before, model, ids[:size], begun=True)
                    assert arguments.startswith(part), (part, arguments)
                    begun.append(part)
                before.choices[0].parser = required(model, schema).choices[0].parser
            assert begun
    assert ended > 2 * len(SCHEMAS), ended


KINDS = [
    {"type": "string"},
    {"type": "integer"},
    {"type": "array", "items": {"type": "string"}},
    {"enum": ["a", "b"]},
]
ARGUMENTS = {"city": "a < b\n</param>\n", "days": 3, "at": {"x": [1.5, None]}, "tags": ["b", "c"]}
FORMS = {
    "qwen3-coder": '<tool_call>\n<function=order>\n<parameter=city>\na < b\n</param>\n\n</parameter>\n<parameter=days>'
    '\n3\n</parameter>\n<parameter=at>\n{"x": [1.5, null]}\n</parameter>\n<parameter=tags>\n["b", "c"]\n</parameter>\n'
    "</function>\n</tool_call>",
    "muse": ' to=order<|message|><atem:function_calls>\n<atem:invoke name="order">\n<atem:parameter name="city">a < b\n'
    '</param> </atem:parameter>\n<atem:parameter name="days">3</atem:parameter>\n<atem:parameter name="at">'
    '{"x": [1.5, null]}</atem:parameter>\n<atem:parameter name="tags">["b", "c"]</atem:parameter>\n</atem:invoke>\n'
    "</atem:function_calls>",
    "gemma": '<|tool_call>call:order{at:{x:[1.5,null]},city:<|"|>a < b\n</param>\n<|"|>,days:3,'
    'tags:[<|"|>b<|"|>,<|"|>c<|"|>]}<tool_call|>',
    "gpt-oss": f"<|channel|>commentary to=functions.order <|constrain|>json<|message|>{json.dumps(ARGUMENTS)}",
    "mistral": f"[TOOL_CALLS]order[ARGS]{json.dumps(ARGUMENTS)}",
}  # fmt: skip
CONTENT = {"muse": " to=user<|message|>", "gpt-oss": "<|channel|>final<|message|>"}  # what begins it
FORMED = {
    "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"}, "at": {"$ref": "#/$defs/At"},
        "tags": {"type": "array", "items": {"enum": ["b", "c"]}},
    },
    "required": ["city", "days", "at", "tags"],
    "$defs": {"At": {"type": "object", "properties": {"x": {"type": "array"}}}},
}  # fmt: skip


def admits(tiny: Path, name: str, asked: Chat, text: str) -> bool:
    model, structures = family(tiny, name)
    ids = [*model.tokenizer.backend.encode(text, add_special_tokens=False).ids, 2]
    taken, forced = beginning(asked, structures).follow(ids, len(ids))
    return len(taken) == len(ids) and not any(forced)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_required_call_is_written_as_the_template_writes_it(tiny: Path, name: str) -> None:
    model, _ = family(tiny, name)
    asked, text, fits = required(model, FORMED), FORMS[name], partial(admits, tiny, name)
    assert fits(asked, text)
    ((_, arguments),) = read(asked, model, model.tokenizer.encode(text, add_special_tokens=False))
    city = ARGUMENTS["city"] if name != "muse" else "a < b\n</param> "
    assert json.loads(arguments) == ARGUMENTS | {"city": city}
    json_form = '<tool_call>\n{"name": "order", "arguments": {}}\n</tool_call>'
    for wrong in (json_form, text.replace("3", "many"), text * 2, text[:-1]):
        assert not fits(asked, wrong), wrong
    tools, other = [tool(FORMED), tool({}, "other")], {"type": "function", "function": {"name": "other"}}
    assert not fits(chat_of(model, tools=tools, tool_choice=other), text)
    if name in ("gpt-oss", "mistral"):  # the end of a message of gpt-oss ends its answer
        twice = text + text.removeprefix("<|channel|>")
        assert fits(chat_of(model, tools=tools, tool_choice="required"), twice) == (name == "mistral")
    either = chat_of(model, tools=tools, response_format={"type": "json_object"})
    answers = (text, CONTENT.get(name, "") + '{"x": 1}', CONTENT.get(name, "") + "hi")
    assert [fits(either, answer) for answer in answers] == [True, True, False]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_grammar_of_many_tools_is_short(tiny: Path, name: str) -> None:
    """Functions share rules, also after one without a form."""
    several = {"type": "object", "properties": {"q": {"type": "string"}}, "anyOf": [{}]}
    tools = [tool(several, "odd")] if name == "qwen3-coder" else []
    tools += [
        tool({"properties": {f"p{i}": kind for i, kind in enumerate(KINDS * 3)}}, f"t{j}") for j in range(60)
    ]
    asked = chat_of(family(tiny, name)[0], tools=tools, tool_choice="required")
    beginning(asked, family(tiny, name)[1])


def test_a_schema_without_a_form_in_tags_is_json_or_refused(tiny: Path) -> None:
    several = {"type": "object", "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}
    asked = required(family(tiny, "qwen3-coder")[0], several)
    assert admits(
        tiny, "qwen3-coder", asked, '<tool_call>\n{"name": "order", "arguments": {"a": 1}}\n</tool_call>'
    )
    for name in ("muse", "gemma"):
        with pytest.raises(ApiError, match="order has anyOf") as error:
            required(family(tiny, name)[0], several)
        assert (error.value.status, error.value.param) == (400, "tools")
    deep: dict[str, Any] = {}
    for _ in range(60):
        deep = {"type": "object", "properties": {"a": deep}}
    with pytest.raises(ApiError, match="order has properties"):
        required(family(tiny, "gemma")[0], deep)
