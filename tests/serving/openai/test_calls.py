"""Required calls, and calls beside a format: what the grammar lets a model write."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dflash_trt.serving.openai.structure import closed
from tests.serving.openai.conftest import Server

CHATS = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
LETTER = {"type": "object", "properties": {"a": {"enum": ["x"]}}}

NESTED = {"properties": {"n": {"anyOf": [{"$ref": "#/$defs/N"}, {"type": "null"}]}}}


def tool(parameters: Any, name: str = "order") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def ask(server: Server, **fields: Any) -> Any:
    answer = server.post(CHATS, {"messages": HI, "max_tokens": 60, **fields})
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
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
    grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps({"type": "object"} | closed(schema)))
    assert json.dumps(schema) == before
    tokenizer = llguidance.LLTokenizer("byte")
    for values, expected in ((takes, True), (refuses, False)):
        for value in values:
            matcher = llguidance.LLMatcher(tokenizer, grammar)
            taken = matcher.try_consume_tokens(tokenizer.tokenize_str(json.dumps(value)))
            assert (taken == len(json.dumps(value)) and matcher.is_accepting()) is expected, value


def test_a_required_call_has_no_arguments_but_those_declared(server: Server) -> None:
    choice = ask(server, tools=[tool(LETTER)], tool_choice="required", temperature=1, seed=3)
    for call in choice["message"]["tool_calls"]:
        assert set(json.loads(call["function"]["arguments"])) <= {"a"}


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
    form = {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": schema | {"additionalProperties": False}},
    }
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
