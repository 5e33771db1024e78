"""Answers that OpenAI's clients expect in less common cases."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from openai.types.responses import Response
from pydantic import BaseModel

from dflash_trt.bundle.manifest import Bundle
from dflash_trt.decoding.output.detokenizer import Detokenizer
from dflash_trt.serving.openai.chat import Chat
from dflash_trt.serving.openai.errors import ApiError
from dflash_trt.serving.openai.model import Model
from dflash_trt.serving.openai.protocol import ChatRequest
from dflash_trt.serving.openai.responses_request import ResponsesRequest, as_chat
from tests.serving.openai.conftest import COMPLETIONS, Server

CHATS = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


class Inner(BaseModel, extra="forbid"):
    v: bool


class Order(BaseModel, extra="forbid"):
    a: bool
    inner: Inner


def tool(parameters: Any, name: str = "order") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def called(server: Server, parameters: Any) -> Any:
    """The arguments of a required call."""
    body = {"messages": HI, "tools": [tool(parameters)], "tool_choice": "required", "max_tokens": 200}
    answer = server.post(CHATS, body | {"parallel_tool_calls": False})
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "order"
    return json.loads(call["function"]["arguments"])


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
    given = called(server, schema)
    assert given == arguments if arguments is not None else Order.model_validate(given)


def test_an_answer_in_a_structure_is_no_call(server: Server) -> None:
    text = {"structured_outputs": {"choice": ['<tool_call>{"name":"a"}</tool_call>']}}
    body = {"messages": HI, "tools": [tool({"type": "object"})], "max_tokens": 100, **text}
    (made,) = server.post(CHATS, body).json()["choices"]
    assert made["finish_reason"] == "stop"
    assert '"name"' in made["message"]["content"]
    assert "tool_calls" not in made["message"]


def test_a_structured_answer_after_an_opened_thought_is_content(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model(Bundle.open(tiny), None)
    model.template += "<think>"

    async def chat(*_: Any, **__: Any) -> tuple[list[int], str]:
        text = "hi<think>\n"
        return await model.encode(text, special=False), text

    monkeypatch.setattr(model, "chat", chat)

    async def run() -> None:
        free = await Chat.of(model, ChatRequest(messages=HI), "x", None)
        assert [part.kind for part in free.choices[0].parser.push("a thought", [])] == ["reasoning"]
        form = {"choice": ["ab", "c"]}
        bound = await Chat.of(model, ChatRequest(messages=HI, structured_outputs=form), "x", None)
        assert model.tokenizer.decode(bound.prepared.prompts[0]).endswith("</think>\n\n")
        assert [(part.kind, part.text) for part in bound.choices[0].parser.push("ab", [])] == [
            ("content", "ab")
        ]

    asyncio.run(run())


def test_marks_that_are_special_tokens_are_read(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 4's: they have a text, and the token at which a tool answers ends an answer with tools."""
    model = Model(Bundle.open(tiny), None)
    marks = ["<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", '<|"|>']
    model.tokenizer.backend.add_special_tokens(marks)
    model.template = "<|channel>thought <channel|> <|tool_call>call:"
    text = '<|channel>thought\nHm.<channel|>Now.<|tool_call>call:get{city:<|"|>B<|"|>}<tool_call|>'

    async def chat(*_: Any, **__: Any) -> tuple[list[int], str]:
        return await model.encode("hi", special=False), "hi"

    monkeypatch.setattr(model, "chat", chat)

    async def run() -> None:
        tools = [{"type": "function", "function": {"name": "get"}}]
        asked = await Chat.of(model, ChatRequest(messages=HI, tools=tools, stop_token_ids=[3]), "x", None)
        params = asked.prepared.messages[0]["params"]
        response = model.tokenizer.backend.token_to_id("<|tool_response>")
        assert (params["skip_special_tokens"], params["stop_token_ids"]) == (False, [3, response])
        words = Detokenizer(model.tokenizer.backend, params["skip_special_tokens"])
        ids = await model.encode(text, special=False)
        parser = asked.choices[0].parser
        parts = [
            part for token in ids for part in parser.push(words.push([token]), [token])
        ] + parser.finish()
        found = {kind: "".join(p.text for p in parts if p.kind == kind) for kind in ("reasoning", "content")}
        assert found == {"reasoning": "Hm.", "content": "Now."}
        assert [(p.call.name, p.call.arguments) for p in parts if p.call] == [("get", '{"city": "B"}')]

    asyncio.run(run())


def test_all_tokens_may_be_asked_for_as_in_vllm(server: Server) -> None:
    body = {"prompt": "x = [", "max_tokens": 8, "temperature": 1, "seed": 5}
    answers = [server.post(COMPLETIONS, body | {"top_k": k}).json()["choices"][0]["text"] for k in (-1, 0)]
    assert answers[0] == answers[1]


def test_more_answers_than_the_server_takes_are_no_reason_to_try_again(server: Server) -> None:
    answer = server.post(COMPLETIONS, {"prompt": ["hi"] * 300})
    assert answer.status_code == 400
    assert "asks for 300 answers, but this server takes 260 at once" in answer.json()["error"]["message"]


def test_the_bytes_of_tokens_are_those_of_the_text(server: Server) -> None:
    body = {"messages": HI, "structured_outputs": {"choice": ["😀ä日"]}, "logprobs": True, "max_tokens": 30}
    (choice,) = server.post(CHATS, body).json()["choices"]
    parts = b"".join(bytes(entry["bytes"]) for entry in choice["logprobs"]["content"])
    assert parts.startswith("😀ä日".encode())


def test_an_echo_is_the_prompt_as_it_came(server: Server) -> None:
    given = "<|im_start|>a<|im_end|>b"
    ids = server.post("/tokenize", {"prompt": given}).json()["tokens"]
    for prompt in (given, ids):
        answer = server.post(COMPLETIONS, {"prompt": prompt, "echo": True, "max_tokens": 1})
        assert answer.json()["choices"][0]["text"].startswith(given)


def test_a_completion_near_the_end_of_the_context_takes_the_rest(server: Server) -> None:
    made = server.post(COMPLETIONS, {"prompt": [5] * 508, "ignore_eos": True}).json()
    assert made["usage"]["completion_tokens"] == 4


def test_a_response_that_is_cut_has_a_message_that_is_incomplete(server: Server) -> None:
    body = {"input": "hi", "max_output_tokens": 3}
    made = server.post("/v1/responses", body).json()
    Response.model_validate(made)
    assert (made["status"], made["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [item["status"] for item in made["output"]] == ["incomplete"]
    lines = server.post("/v1/responses", body | {"stream": True}).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    (done,) = (event for event in events if event["type"] == "response.output_item.done")
    assert done["item"]["status"] == "incomplete"
    whole = server.post("/v1/responses", {"input": "hi", "max_output_tokens": 200}).json()
    assert (whole["status"], whole["output"][0]["status"]) == ("completed", "completed")


def test_an_assistants_turn_is_one_message() -> None:
    items = [
        {"role": "user", "content": "q"},
        {
            "type": "reasoning",
            "id": "r",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "why"}],
        },
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me see."}]},
        {"type": "function_call", "call_id": "1", "name": "a", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "b", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "x"},
        {"type": "function_call_output", "call_id": "2", "output": "y"},
        {"role": "assistant", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"type": "reasoning", "id": "r", "summary": []},
        {"role": "user", "content": "more"},
    ]
    messages = as_chat(ResponsesRequest.model_validate({"input": items})).messages
    roles = [message.role for message in messages]
    assert roles == ["user", "assistant", "tool", "tool", "assistant", "assistant", "user"]
    turn = messages[1]
    assert (turn.content, turn.reasoning_content) == ("Let me see.", "why")
    assert [call.function.name for call in turn.tool_calls or []] == ["a", "b"]


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
