"""Required calls, and calls beside a format: what the grammar lets a model write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.serving.openai.errors import ApiError
from tests.serving.openai.conftest import CHATS, HI, RESPONSES, Server, chat_of, model_of, tool

LETTER = {"type": "object", "properties": {"a": {"enum": ["x"]}}, "additionalProperties": False}


def ask(server: Server, **fields: Any) -> Any:
    (choice,) = server.made(CHATS, **{"messages": HI, "max_tokens": 60, **fields})["choices"]
    return choice


@pytest.mark.parametrize(
    "schema", [{"properties": [1]}, {"required": [["a"]]}, {"properties": {"a": {"type": 5}}}]
)
def test_a_malformed_schema_is_refused(server: Server, schema: Any) -> None:
    answer = server.post(CHATS, {"messages": HI, "tools": [tool(schema)], "tool_choice": "required"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tool_choice": "required"}, "requires a call, but tools has no function"),
        ({"tool_choice": "required", "tools": [{"type": "web_search"}]}, "requires a call"),
        ({"tool_choice": {"type": "function", "function": {"name": "no"}}, "tools": [tool(LETTER)]}, "names no"),
    ],
)  # fmt: skip
def test_a_call_of_no_function_cannot_be_required(tiny: Path, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ApiError, match=said) as error:
        chat_of(model_of(tiny, '<tool_call>{"name"'), **fields)
    assert (error.value.status, error.value.param) == (400, "tool_choice")


def test_calls_cannot_be_required_without_a_notation(tiny: Path) -> None:
    model = model_of(tiny, "no calls")
    with pytest.raises(ApiError, match="cannot be required in the notation"):
        chat_of(model, tools=[tool(LETTER)], tool_choice="required")
    chat_of(model, tools=[tool(LETTER)])


def test_required_calls_may_be_several_unless_one_is_asked_for(server: Server) -> None:
    tools = [tool(LETTER), tool(LETTER, "other")]
    # The end is made improbable, so that there is one call after the other.
    (end,) = server.post("/tokenize", {"prompt": "<|im_end|>", "add_special_tokens": False}).json()["tokens"]
    more = {"tools": tools, "tool_choice": "required", "logit_bias": {str(end): -100}, "max_tokens": 200}
    several = ask(server, **more, parallel_tool_calls=True)
    assert len(several["message"]["tool_calls"]) > 1
    assert len(ask(server, **more, parallel_tool_calls=False)["message"]["tool_calls"]) == 1
    named = {"type": "function", "function": {"name": "other"}}
    (one,) = ask(server, **more | {"tool_choice": named})["message"]["tool_calls"]
    assert one["function"]["name"] == "other"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "order"}}])
def test_of_a_call_that_is_required_max_tokens_leaves_a_part(server: Server, choice: Any) -> None:
    """As OpenAI's API has it, whole or as a stream: the arguments are the beginning of those without a limit."""
    long = {"type": "object", "properties": {"a": {"type": "string", "minLength": 60}}, "required": ["a"]}
    asked = {"messages": HI, "tools": [tool(long)], "tool_choice": choice, "temperature": 0}
    asked |= {"parallel_tool_calls": False}
    (call,) = ask(server, **asked, max_tokens=300)["message"]["tool_calls"]
    whole = call["function"]["arguments"]
    made = ask(server, **asked, max_tokens=40)
    assert (made["finish_reason"], made["message"]["content"]) == ("length", None)
    (part,) = [call["function"] for call in made["message"]["tool_calls"]]
    assert part["name"] == "order"
    assert 9 < len(part["arguments"]) < len(whole)
    assert whole.startswith(part["arguments"])
    chunks = [each["choices"][0] for each in server.events(CHATS, **asked, max_tokens=40)]
    (streamed,) = [call for chunk in chunks for call in chunk["delta"].get("tool_calls", ())]
    assert (streamed["index"], streamed["function"], chunks[-1]["finish_reason"]) == (0, part, "length")
    assert "".join(chunk["delta"].get("content") or "" for chunk in chunks) == ""
    flat = [{"type": "function", **tool(long)["function"]}]
    response = server.made(
        RESPONSES,
        input=HI,
        **asked | {"messages": None, "tools": flat, "tool_choice": "required"},
        max_output_tokens=40,
    )
    (item,) = response["output"]
    assert (item["status"], response["status"], item["arguments"]) == (
        "incomplete",
        "incomplete",
        part["arguments"],
    )


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
