"""Required calls, and calls beside a format: what the grammar lets a model write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.decoding.output import Detokenizer
from dflash_trt.decoding.sampling.structure import StructuredOutputs, Structures
from dflash_trt.serving.openai.chat import Chat
from dflash_trt.serving.openai.errors import ApiError
from dflash_trt.serving.openai.structure import Closing
from tests.serving.openai.conftest import CHATS, HI, Server, chat_of, model_of, tool

LETTER = {"type": "object", "properties": {"a": {"enum": ["x"]}}}

TREE = {"$ref": "#/$defs/T"}
NESTED = {"properties": {"n": {"anyOf": [{"$ref": "#/$defs/N"}, {"type": "null"}]}}}


def ask(server: Server, **fields: Any) -> Any:
    (choice,) = server.made(CHATS, **{"messages": HI, "max_tokens": 60, **fields})["choices"]
    return choice


@pytest.mark.parametrize(
    ("schema", "takes", "refuses"),
    [
        (LETTER, [{"a": "x"}, {}], [{"day": 1}, {"a": "x", "day": 1}]),
        (
            {"properties": {"o": LETTER, "l": {"items": LETTER}, "m": {"additionalProperties": LETTER}}},
            [{"o": {"a": "x"}, "l": [{}], "m": {"k": {}}}],
            [{"o": {"b": 1}}, {"l": [{"b": 1}]}, {"m": {"k": {"b": 1}}}],
        ),
        (
            {"$ref": "#/$defs/N", "$defs": {"N": NESTED}},
            [{"n": {"n": None}}],
            [{"n": {"q": 1}}, {"q": 1}],
        ),
        (
            {"allOf": [{"$ref": "#/$defs/A"}, {"properties": {"b": {"type": "integer"}}}], "$defs": {"A": LETTER}},
            [{"a": "x", "b": 2}],
            [{"a": "x", "c": 2}],
        ),
        (
            {
                "properties": {"k": {"type": "integer"}},
                "anyOf": [LETTER, {"properties": {"b": {"type": "integer"}}, "required": ["b"]}],
            },
            [{"k": 1, "a": "x"}, {"k": 1, "b": 2}],
            [{"k": 1, "b": 2, "c": 3}],
        ),
        (
            {
                "properties": {"x": {"allOf": [TREE, {"properties": {"k": {}}}]}},
                "$defs": {"T": {"properties": {"c": {"allOf": [TREE, {}]}}}},
            },
            [{"x": {"c": {"c": {}}, "k": 1}}],
            [{"x": {"q": 1}}],
        ),
        ({"properties": {"a": {"type": "integer"}}, "additionalProperties": True}, [{"a": 1, "b": 2}], []),
        ({"properties": {"a": {}}, "additionalProperties": {"type": "integer"}}, [{"b": 2}], [{"b": "x"}]),
        ({"properties": {"free": {"type": "object"}}}, [{"free": {"any": 1}}], [{"other": 1}]),
        ({"type": "object"}, [{"any": 1}], []),
    ],
)  # fmt: skip
def test_objects_have_the_properties_that_they_declare(
    schema: dict[str, Any], takes: list[Any], refuses: list[Any]
) -> None:
    llguidance = pytest.importorskip("llguidance")
    before = json.dumps(schema)
    grammar = llguidance.LLMatcher.grammar_from_json_schema(
        json.dumps({"type": "object"} | Closing().closed(schema))
    )
    assert json.dumps(schema) == before
    tokenizer = llguidance.LLTokenizer("byte")
    for values, expected in ((takes, True), (refuses, False)):
        for value in values:
            matcher = llguidance.LLMatcher(tokenizer, grammar)
            taken = matcher.try_consume_tokens(tokenizer.tokenize_str(json.dumps(value)))
            assert (taken == len(json.dumps(value)) and matcher.is_accepting()) is expected, value


def twice(levels: int) -> dict[str, Any]:
    """A schema that refers to parts, each of which refers twice to the next one."""
    parts = {f"{i}": {"allOf": [{"$ref": f"#/$defs/{i + 1}"}] * 2} for i in range(levels)}
    return {"allOf": [{"$ref": "#/$defs/0"}, {}], "$defs": parts | {f"{levels}": LETTER}}


@pytest.mark.parametrize("schemas", [[twice(40)], [twice(9)] * 1000])
def test_references_cannot_multiply_a_schema(tiny: Path, schemas: list[Any]) -> None:
    """The refusal comes before all that the references lead to is copied, which would never end."""
    tools = [tool(schema, f"f{i}") for i, schema in enumerate(schemas)]
    with pytest.raises(ApiError, match="tools has schemas with over 65536 characters"):
        chat_of(model_of(tiny, '<tool_call>{"name"'), tools=tools, tool_choice="required")


@pytest.mark.parametrize("template", ['<tool_call>{"name"', "<|channel><|tool_call>"])
@pytest.mark.parametrize(
    ("schema", "said"),
    [
        (
            {"allOf": 5, "anyOf": [{}, {}], "properties": {}},
            "allOf of a function's schema is 5, expected a list",
        ),
        (
            {"allOf": [{}, {"properties": [1]}]},
            "properties of a function's schema is [1], expected an object",
        ),
        ({"required": [["a"]]}, "required of a function's schema is [['a']], expected a list of texts"),
        ({"properties": {"a": {"type": 5}}}, "type of a function's schema is 5, expected a text or a list"),
    ],
)
def test_a_malformed_schema_is_refused(tiny: Path, template: str, schema: Any, said: str) -> None:
    with pytest.raises(ApiError) as error:
        chat_of(model_of(tiny, template), tools=[tool(schema)], tool_choice="required")
    assert said in error.value.message
    assert (error.value.status, error.value.param) == (400, "tools")


def test_required_calls_may_be_several_unless_one_is_asked_for(server: Server) -> None:
    tools = [tool(LETTER), tool(LETTER, "other")]
    # The end is made improbable, so that there is one call after the other.
    (end,) = server.post("/tokenize", {"prompt": "<|im_end|>", "add_special_tokens": False}).json()["tokens"]
    more = {"tools": tools, "tool_choice": "required", "logit_bias": {str(end): -100}, "max_tokens": 200}
    several = ask(server, **more, parallel_tool_calls=True)
    assert len(several["message"]["tool_calls"]) > 1
    assert "<" not in (several["message"]["content"] or "")
    assert len(ask(server, **more, parallel_tool_calls=False)["message"]["tool_calls"]) == 1
    named = {"type": "function", "function": {"name": "other"}}
    (one,) = ask(server, **more | {"tool_choice": named})["message"]["tool_calls"]
    assert one["function"]["name"] == "other"


def test_a_call_that_max_tokens_cuts_is_no_content(server: Server) -> None:
    long = {"type": "object", "properties": {"a": {"type": "string", "minLength": 400}}, "required": ["a"]}
    for most in range(1, 24, 2):
        for stream in (False, True):
            body = {"messages": HI, "tools": [tool(long)], "tool_choice": "required", "max_tokens": most}
            text = server.post(CHATS, body | {"stream": stream}).text
            assert "tool_call>" not in text
            assert '{\\"name' not in text
            assert '"finish_reason":"length"' in text
    made = ask(server, tools=[tool(long)], tool_choice="required", max_tokens=40)
    assert made["finish_reason"] == "length"
    (call,) = made["message"]["tool_calls"]
    assert call["function"]["name"] == "order"
    assert call["function"]["arguments"].startswith('{"a": "')
    with pytest.raises(ValueError, match="Unterminated"):
        json.loads(call["function"]["arguments"])


def test_an_answer_with_tools_and_a_format_is_either(server: Server) -> None:
    schema = {"type": "object", "properties": {"city": {"enum": ["Borvik"]}}, "required": ["city"]}
    named = {"name": "x", "schema": schema | {"additionalProperties": False}}
    form = {"type": "json_schema", "json_schema": named}
    asked = {"tools": [tool(LETTER)], "response_format": form}
    first = {
        text: server.post("/tokenize", {"prompt": text}).json()["tokens"][0] for text in ("<tool_call>", "{")
    }
    call = ask(server, **asked, logit_bias={str(first["<tool_call>"]): 100})
    assert call["finish_reason"] == "tool_calls"
    assert call["message"]["tool_calls"][0]["function"]["name"] == "order"
    text = ask(server, **asked, logit_bias={str(first["{"]): 20})
    assert text["finish_reason"] == "stop"
    assert json.loads(text["message"]["content"]) == {"city": "Borvik"}
    free = ask(
        server, **asked | {"response_format": {"type": "json_object"}}, logit_bias={str(first["{"]): 20}
    )
    assert free["message"]["content"].startswith("{")
    none = ask(server, **asked, tool_choice="none")
    assert json.loads(none["message"]["content"]) == {"city": "Borvik"}


HARMONY = ["<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>"]
GEMMA = ["<|tool_call>", "<tool_call|>", "<|tool_response>", '<|"|>']
MISTRAL = ["[TOOL_CALLS]", "[ARGS]"]
ANY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 9},
        "days": {"type": "integer", "minimum": 2, "description": "how long"},
        "tags": {"type": "array", "items": {"enum": ["a", 1, None]}, "maxItems": 2},
        "at": {"anyOf": [{"$ref": "#/$defs/Place"}, {"type": "null"}]},
    },
    "required": ["days"],
    "$defs": {
        "Place": {"properties": {"in": {"$ref": "#/$defs/Place"}, "x": {"type": ["number", "boolean"]}}}
    },
}
Q = '<|"|>'


@pytest.mark.parametrize(
    ("marks", "template", "before", "takes", "refuses"),
    [
        (
            HARMONY, "<|channel|>", "<|channel|>commentary to=functions.order <|constrain|>json<|message|>",
            {'{"city": "B", "days": 2}': {"city": "B", "days": 2}, '{"days": 30}': {"days": 30}},
            ['{"days": 1}', '{"days": 2, "more": 1}'],
        ),
        (
            MISTRAL, "[TOOL_CALLS]", "[TOOL_CALLS]order[ARGS]",
            {'{"days": 2, "tags": ["a"]}': {"days": 2, "tags": ["a"]}}, ['{"city": "B"}', '{"days": "2"}'],
        ),
        (
            GEMMA, "<|tool_call> dictsort", "<|tool_call>call:order",
            {
                "{days:2}": {"days": 2},
                f"{{city:{Q}B, {{x}}{Q},days:12}}": {"city": "B, {x}", "days": 12},
                f"{{city:{Q}{Q},days:2,tags:[{Q}a{Q},null]}}": {"city": "", "days": 2, "tags": ["a", None]},
                "{at:{in:{x:true},x:-1.5e3},days:3,tags:[]}": {
                    "at": {"in": {"x": True}, "x": -1500.0}, "days": 3, "tags": [],
                },
                "{at:null,days:2}": {"at": None, "days": 2},
            },
            [
                "{}", "{days:1}", "{days:2,city:<|\"|>B<|\"|>}", f"{{city:{Q}0123456789{Q},days:2}}", "{days:2,more:1}",
                "{days:2,tags:[1,1,1]}", "{days:2,tags:[2]}", "{at:{y:1},days:2}", "{days: 2}", f"{{days:{Q}2{Q}}}",
            ],
        ),
    ],
    ids=["gpt-oss", "mistral", "gemma"],
)  # fmt: skip
def test_required_calls_are_written_as_the_family_writes_them(
    tiny: Path, marks: list[str], template: str, before: str, takes: dict[str, Any], refuses: list[str]
) -> None:
    model = model_of(tiny, template, "<|start|>assistant", marks)
    tokenizer = model.tokenizer.backend

    def made(**fields: Any) -> Chat:
        return chat_of(model, tools=[tool(ANY), tool(LETTER, "other")], **fields)

    structures = Structures(tokenizer, tokenizer.get_vocab_size(), [2])

    def accepted(asked: Chat, text: str) -> bool:
        form = StructuredOutputs(**asked.prepared.messages[0]["params"]["structured_outputs"])
        structure = structures.compile(form)
        ids = [*tokenizer.encode(text, add_special_tokens=False).ids, 2]
        return len(structure.follow(ids, len(ids))[0]) == len(ids) and not any(
            structure.follow(ids, len(ids))[1]
        )

    end = "<tool_call|>" if marks is GEMMA else ""
    for text, arguments in takes.items():
        asked = made(tool_choice="required")
        assert accepted(asked, before + text + end), text
        parser = asked.choices[0].parser
        words = Detokenizer(tokenizer, marks is HARMONY)
        parts = []
        for token in tokenizer.encode(before + text + end, add_special_tokens=False).ids:
            parts += parser.push(words.push([token]), [token])
        found = [part.call for part in [*parts, *parser.finish()] if part.call is not None]
        assert [(call.name, json.loads(call.arguments)) for call in found] == [("order", arguments)]
    for text in refuses:
        assert not accepted(asked, before + text + end), text
    two = (before + next(iter(takes)) + end) * 2
    assert accepted(asked, two) == (marks is not HARMONY)
    assert not accepted(made(tool_choice="required", parallel_tool_calls=False), two)
    named = {"type": "function", "function": {"name": "other"}}
    assert not accepted(made(tool_choice=named), before + text + end)
    # With a format the answer is either, and may not be free text.
    either = made(response_format={"type": "json_object"})
    assert accepted(either, before + next(iter(takes)) + end)
    content = "<|channel|>final<|message|>" if marks is HARMONY else ""
    assert accepted(either, content + '{"x": 1}')
    assert not accepted(either, content + "hi")
    if marks is GEMMA:
        assert accepted(asked, before + "{days:2}" + end + "<|tool_response>")
        unsaid: list[dict[str, Any]] = [{"not": {}}, {"$ref": "#/$defs/B"}]
        for part in unsaid:
            with pytest.raises(ApiError, match="cannot be enforced in this model's notation"):
                chat_of(model, tools=[tool({"properties": {"a": part}})], tool_choice="required")
