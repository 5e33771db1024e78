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


HARMONY = ["<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>"]
MISTRAL = ["[TOOL_CALLS]", "[ARGS]"]
ANY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 9},
        "days": {"type": "integer", "minimum": 2, "description": "how long"},
        "tags": {"type": "array", "items": {"enum": ["a", 1, None]}, "maxItems": 2},
        "at": {"anyOf": [{"$ref": "#/$defs/Place"}, {"type": "null"}]},
    },
    "required": ["days"], "additionalProperties": False,
    "$defs": {"Place": {"properties": {"in": {"$ref": "#/$defs/Place"}, "x": {"type": ["number", "boolean"]}}}},
}  # fmt: skip


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
    ],
    ids=["gpt-oss", "mistral"],
)  # fmt: skip
def test_required_calls_are_written_as_the_family_writes_them(
    tiny: Path, marks: list[str], template: str, before: str, takes: dict[str, Any], refuses: list[str]
) -> None:
    model = model_of(tiny, template, "<|start|>assistant", marks)
    tokenizer = model.tokenizer.backend

    def made(**fields: Any) -> Chat:
        return chat_of(model, tools=[tool(ANY), tool(LETTER, "other")], **fields)

    structures = Structures(model.tokenizer, tokenizer.get_vocab_size(), [2])

    def accepted(asked: Chat, text: str) -> bool:
        form = StructuredOutputs(**asked.request["params"]["structured_outputs"])
        structure = structures.compile(form)
        ids = [*tokenizer.encode(text, add_special_tokens=False).ids, 2]
        return len(structure.follow(ids, len(ids))[0]) == len(ids) and not any(
            structure.follow(ids, len(ids))[1]
        )

    for text, arguments in takes.items():
        asked = made(tool_choice="required")
        assert accepted(asked, before + text), text
        parser = asked.choices[0].parser
        words = Detokenizer(tokenizer, marks is HARMONY)
        parts = []
        for token in tokenizer.encode(before + text, add_special_tokens=False).ids:
            parts += parser.push(words.push([token]), [token])
        found = [part.call for part in [*parts, *parser.finish()] if part.call is not None]
        assert [(call.name, json.loads(call.arguments)) for call in found] == [("order", arguments)]
    for text in refuses:
        assert not accepted(asked, before + text), text
    two = (before + next(iter(takes))) * 2
    assert accepted(asked, two) == (marks is not HARMONY)
    assert not accepted(made(tool_choice="required", parallel_tool_calls=False), two)
    named = {"type": "function", "function": {"name": "other"}}
    assert not accepted(made(tool_choice=named), before + text)
    # With a format the answer is either, and may not be free text.
    either = made(response_format={"type": "json_object"})
    assert accepted(either, before + next(iter(takes)))
    content = "<|channel|>final<|message|>" if marks is HARMONY else ""
    assert accepted(either, content + '{"x": 1}')
    assert not accepted(either, content + "hi")
