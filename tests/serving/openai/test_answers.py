"""Answers that OpenAI's clients expect in less common cases."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from openai.types.responses import Response
from pydantic import BaseModel

from dflash_trt.decoding.output import Detokenizer, StopChecker
from dflash_trt.decoding.params import SamplingParams
from dflash_trt.serving.openai.errors import ApiError
from dflash_trt.serving.openai.protocol import ResponsesRequest
from tests.serving.openai.conftest import CHATS, COMPLETIONS, HI, RESPONSES, Server, chat_of, model_of, tool


class Inner(BaseModel, extra="forbid"):
    v: bool


class Order(BaseModel, extra="forbid"):
    a: bool
    inner: Inner


CLOSED = {"properties": {"a": {"enum": ["x"]}}, "required": ["a"], "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "arguments"),
    [
        *((kind | CLOSED, {"a": "x"}) for kind in ({}, {"type": ["object"]}, {"type": "object"})),
        (None, {}),  # a function without parameters
        (Order.model_json_schema(), None),  # with references
    ],
)
def test_the_arguments_of_a_required_call_fit_its_schema(server: Server, schema: Any, arguments: Any) -> None:
    body = {"messages": HI, "tools": [tool(schema)], "tool_choice": "required", "max_tokens": 200}
    (choice,) = server.made(CHATS, **body, parallel_tool_calls=False)["choices"]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "order"
    given = json.loads(call["function"]["arguments"])
    assert given == arguments if arguments is not None else Order.model_validate(given)


def test_an_answer_in_a_structure_is_no_call(server: Server) -> None:
    form = {"choice": ['<tool_call>{"name":"a"}</tool_call>']}
    asked = {"messages": HI, "tools": [tool({"type": "object"})], "max_tokens": 100}
    (choice,) = server.made(CHATS, **asked, structured_outputs=form)["choices"]
    assert choice["finish_reason"] == "stop"
    assert '"name"' in choice["message"]["content"]
    assert "tool_calls" not in choice["message"]


def test_a_structured_answer_after_an_opened_thought_is_content(tiny: Path) -> None:
    model = model_of(tiny, "<think>", "hi<think>\n")
    free = chat_of(model)
    assert [part.kind for part in free.choices[0].parser.push("a thought", [])] == ["reasoning"]
    bound = chat_of(model, structured_outputs={"choice": ["ab", "c"]})
    assert model.tokenizer.decode(bound.prompts[0]).endswith("</think>\n\n")
    parts = bound.choices[0].parser.push("ab", [])
    assert [(part.kind, part.text) for part in parts] == [("content", "ab")]


def test_a_call_ends_an_opened_thought_for_stop_strings_too(tiny: Path) -> None:
    """What the parser calls content is what a stop string is about, and a mention of the mark is none."""
    model = model_of(tiny, "<think> <tool_call>", "hi<think>\n")
    call = '<tool_call>\n{"name": "get", "arguments": {"city": "stop"}}\n</tool_call>'
    for text, content in (
        (f"A <tool_call> stop. {call} One stop two", "One "),
        ("A <tool_call> stop.</think>One stop two", "One "),
        (f"A stop.</think>{call} One <tool_call> and stop two", "One <tool_call> and "),
    ):
        asked = chat_of(model, tools=[tool(None, "get")], stop="stop")
        params = SamplingParams(**asked.request["params"] | {"max_tokens": 400})
        ids = model.tokenizer.backend.encode(text, add_special_tokens=False).ids
        stopped = StopChecker(params, [], Detokenizer(model.tokenizer.backend)).push(ids)
        parser = asked.choices[0].parser
        parts = [*parser.push(stopped.text, ids[: stopped.kept]), *parser.finish()]
        assert "".join(part.text for part in parts if part.kind == "content") == content
        assert stopped.finish_reason == "stop"


def test_marks_that_are_special_tokens_are_read(tiny: Path) -> None:
    """Gemma 4's: they have a text, and the token at which a tool answers ends an answer with tools."""
    marks = ["<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", '<|"|>']
    model = model_of(tiny, "<|channel>thought <channel|> <|tool_call>call:", marks=marks)
    tokenizer = model.tokenizer.backend
    asked = chat_of(model, tools=[tool(None, "get")], stop_token_ids=[3])
    params = asked.request["params"]
    response = tokenizer.token_to_id("<|tool_response>")
    assert (params["skip_special_tokens"], params["stop_token_ids"]) == (False, [3, response])
    words, parser = Detokenizer(tokenizer, params["skip_special_tokens"]), asked.choices[0].parser
    text = '<|channel>thought\nHm.<channel|>Now.<|tool_call>call:get{city:<|"|>B<|"|>}<tool_call|>'
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    parts = [part for token in ids for part in parser.push(words.push([token]), [token])] + parser.finish()
    for kind, expected in (("reasoning", "Hm."), ("content", "Now.")):
        assert "".join(part.text for part in parts if part.kind == kind) == expected
    assert [(p.call.name, p.call.arguments) for p in parts if p.call] == [("get", '{"city": "B"}')]


def test_the_bytes_of_tokens_are_those_of_the_text(server: Server) -> None:
    form = {"choice": ["😀ä日"]}
    (choice,) = server.made(CHATS, messages=HI, structured_outputs=form, logprobs=True, max_tokens=30)[
        "choices"
    ]
    parts = b"".join(bytes(entry["bytes"]) for entry in choice["logprobs"]["content"])
    assert parts.startswith("😀ä日".encode())


def test_an_echo_is_the_prompt_as_it_came(server: Server) -> None:
    given = "<|im_start|>a<|im_end|>b"
    ids = server.post("/tokenize", {"prompt": given}).json()["tokens"]
    for prompt in (given, ids):
        answer = server.made(COMPLETIONS, prompt=prompt, echo=True, max_tokens=1)
        assert answer["choices"][0]["text"].startswith(given)


def test_a_completion_near_the_end_of_the_context_takes_the_rest(server: Server) -> None:
    assert server.made(COMPLETIONS, prompt=[5] * 508, ignore_eos=True)["usage"]["completion_tokens"] == 4


def test_a_response_that_is_cut_has_a_message_that_is_incomplete(server: Server) -> None:
    asked = {"input": "hi", "max_output_tokens": 3}
    made = server.made(RESPONSES, **asked)
    Response.model_validate(made)
    assert (made["status"], made["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [item["status"] for item in made["output"]] == ["incomplete"]
    events = server.events(RESPONSES, **asked)
    (done,) = (event for event in events if event["type"] == "response.output_item.done")
    assert done["item"]["status"] == "incomplete"
    whole = server.made(RESPONSES, input="hi", max_output_tokens=200)
    assert (whole["status"], whole["output"][0]["status"]) == ("completed", "completed")


def test_an_assistants_turn_is_one_message() -> None:
    items = [
        {"role": "user", "content": "q"},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "why"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me see."}]},
        {"type": "function_call", "call_id": "1", "name": "a", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "b", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "x"},
        {"type": "function_call_output", "call_id": "2", "output": "y"}, {"role": "assistant", "content": "one"},
        {"role": "assistant", "content": "two"}, {"type": "reasoning", "id": "r", "summary": []},
        {"role": "user", "content": "more"},
    ]  # fmt: skip
    messages = ResponsesRequest.model_validate({"input": items}).chat().conversation()
    roles = [message["role"] for message in messages]
    assert roles == ["user", "assistant", "tool", "tool", "assistant", "assistant", "user"]
    turn = messages[1]
    assert (turn["content"], turn["reasoning_content"]) == ("Let me see.", "why")
    assert "reasoning_content" not in messages[4]  # templates ask whether there is one
    assert [call["function"]["name"] for call in turn["tool_calls"]] == ["a", "b"]


def test_an_error_within_a_response_is_an_event_of_the_clients_types() -> None:
    from openai.types.responses import ResponseErrorEvent

    from dflash_trt.serving.openai.responses import Responses

    response = Responses.__new__(Responses)
    response._number = 7
    text = response.last_event(ApiError(503, "the engine ended", code="engine_down")).decode()
    assert text.startswith("event: error\ndata: ")
    event = json.loads(text.partition("data: ")[2])
    assert ResponseErrorEvent.model_validate(event).sequence_number == 7
    assert event["error"]["message"] == event["message"] == "the engine ended"
