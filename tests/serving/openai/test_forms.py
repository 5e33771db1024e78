"""What real clients send beside what a server needs: it is taken, and answered as if it were not there."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.chat import ChatCompletion
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming as ChatParams
from openai.types.responses import Response
from pydantic import TypeAdapter

from dflash_trt.serving.openai import reading
from tests.serving.openai.conftest import CHATS, COMPLETIONS, HI, RESPONSES, Server, tool

EMPTY = {"type": "object", "properties": {}}
TOOL, FLAT = tool(EMPTY, "get"), {"type": "function", "name": "get", "parameters": EMPTY}
CALL = {"id": "c1", "type": "function", "function": {"name": "get", "arguments": "{}"}}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "7"}
FORM = {
    "type": "json_schema",
    "json_schema": {"name": "x", "schema": {"enum": [1]}, "strict": None, "description": None},
}

# Fields of a chat that change nothing, or mean what is the default.
NEUTRAL: list[dict[str, Any]] = [
    {"length_penalty": 1.0}, {"use_beam_search": False}, {"spaces_between_special_tokens": True},
    {"spaces_between_special_tokens": False}, {"documents": None}, {"documents": []}, {"early_stopping": False},
    {"max_tokens": 2.0}, {"max_completion_tokens": 2}, {"max_tokens": 2, "max_completion_tokens": 2.0}, {"n": 1.0},
    {"stop": None}, {"stop": []}, {"stop": ""}, {"stop": ["", "\0"]}, {"logit_bias": {}}, {"logit_bias": None},
    {"presence_penalty": 0}, {"frequency_penalty": None}, {"repetition_penalty": 1}, {"top_p": 1}, {"top_k": -1.0},
    {"min_p": 0}, {"seed": None}, {"logprobs": False}, {"logprobs": None, "top_logprobs": None}, {"top_logprobs": 0},
    {"stream": False, "stream_options": None}, {"stream_options": {}}, {"stream_options": {"include_usage": None}},
    {"stream_options": {"include_usage": True, "include_obfuscation": True, "x": 1}}, {"response_format": None},
    {"response_format": {"type": "text"}}, {"tools": None, "tool_choice": None}, {"tools": []},
    {"tools": [], "tool_choice": "auto"}, {"tool_choice": "none"}, {"parallel_tool_calls": True},
    {"parallel_tool_calls": None}, {"tools": [{"type": "web_search"}]},
    {"tools": [{"type": "custom", "custom": {"name": "x"}}, {"type": "code_interpreter", "container": {}}]},
    {"functions": None, "function_call": None}, {"functions": [], "function_call": "auto"}, {"user": None},
    {"user": "me"}, {"metadata": {}}, {"metadata": {"a": "b"}}, {"store": False}, {"store": True},
    {"service_tier": "auto"}, {"service_tier": "new"}, {"safety_identifier": "x"}, {"prompt_cache_key": "x"},
    {"prompt_cache_retention": "24h"},
    {"verbosity": "low"}, {"prediction": None},
    {"prediction": {"type": "content", "content": "x"}}, {"modalities": ["text"]}, {"modalities": None},
    {"audio": None},
    {"web_search_options": None}, {"reasoning_effort": None}, {"chat_template": None}, {"chat_template_kwargs": {}},
    {"mm_processor_kwargs": None}, {"guided_json": None}, {"structured_outputs": None}, {"logits_processors": None},
    {"kv_transfer_params": None}, {"return_tokens_as_token_ids": False}, {"prompt_logprobs": None}, {"best_of": 1},
    {"add_special_tokens": False}, {"add_special_tokens": None}, {"skip_special_tokens": None}, {"detokenize": True},
    {"include_reasoning": None}, {"priority": 0}, {"cache_salt": None}, {"allowed_token_ids": None},
    {"bad_words": []},
    {"vllm_xargs": None}, {"extra_body": {}}, {"model": None}, {"echo": False}, {"min_tokens": 0.0},
    {"structural_tag": None}, {"x_unknown": None},
]  # fmt: skip


def turn(**assistant: Any) -> list[dict[str, Any]]:
    """A loop of one call, whose assistant's message has other fields."""
    return [*HI, {"role": "assistant", "content": None, "tool_calls": [CALL]} | assistant, RESULT]


SHOWN = [*HI, {"role": "assistant", "content": "a"}, *HI]
# Messages, and the same ones as they may be said most simply.
MESSAGES: list[tuple[list[Any], list[Any]]] = [
    (turn(provider_specific_fields=None), turn()),
    (turn(provider_specific_fields={"refusal": None}, function_call=None, audio=None, refusal=None), turn()),
    (turn(annotations=[], reasoning=None, reasoning_content=None, reasoning_details=[], thinking_blocks=None), turn()),
    (turn(id="m", type="message", status="completed", phase=None, weight=1, metadata={}, timestamp=1.5), turn()),
    (turn(tool_calls=[CALL | {"index": 0, "provider_specific_fields": {}, "extra_content": None}]), turn()),
    (turn(tool_calls=[CALL | {"type": None, "custom": None}]), turn()),
    (turn(tool_calls=[CALL | {"function": {"name": "get", "arguments": {}, "parsed_arguments": None}}]), turn()),
    (turn(tool_calls=[CALL | {"function": {"name": "get", "arguments": ""}}]), turn()),
    (turn(content=""), turn()),
    (turn(content=[]), turn()),
    (turn(content=[{"type": "text", "text": "", "cache_control": {"type": "ephemeral"}}]), turn()),
    ([HI[0] | {"name": None, "tool_calls": None, "cache_control": {}}, *turn()[1:]], turn()),
    ([*turn()[:2], RESULT | {"content": [{"type": "text", "text": "7"}], "is_error": False}], turn()),
    ([*HI, {"role": "assistant", "content": "a", "tool_calls": [], "name": None}, *HI], SHOWN),
    ([*HI, {"role": "assistant", "content": None, "refusal": "a"}, *HI], [*SHOWN[:1], {"role": "assistant"}, *HI]),
    ([*HI, {"role": "assistant", "content": [{"type": "refusal", "refusal": "a"}]}, *HI], SHOWN),
    ([*HI, {"role": "assistant", "content": [{"type": "output_text", "text": "a", "annotations": []}]}, *HI], SHOWN),
    ([*HI, {"role": "assistant", "content": ["a"]}, *HI], SHOWN),
    ([*HI, {"role": "assistant", "content": [{"text": "a"}]}, *HI], SHOWN),
    ([{"role": "developer", "content": "x"}, *HI], [{"role": "system", "content": "x"}, *HI]),
    (
        [*HI, {"role": "assistant", "content": None, "function_call": {"name": "get", "arguments": "{}"}},
         {"role": "function", "name": "get", "content": "7"}],
        [*HI, {"role": "assistant", "tool_calls": [{"function": {"name": "get"}}]},
         {"role": "tool", "name": "get", "content": "7"}],
    ),
    (
        turn(content=[{"type": "thinking", "thinking": "hm", "signature": "x"}, {"type": "text", "text": "a"}]),
        turn(content="a", reasoning_content="hm"),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("sent", "meant"), MESSAGES)
def test_messages_of_other_clients_are_read(server: Server, sent: list[Any], meant: list[Any]) -> None:
    answers = [server.made(CHATS, messages=each, max_tokens=2, tools=[TOOL]) for each in (sent, meant)]
    assert answers[0]["choices"] == answers[1]["choices"]
    assert answers[0]["usage"]["prompt_tokens"] == answers[1]["usage"]["prompt_tokens"]


ITEMS: list[list[Any]] = [
    [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}], "id": None}],
    [*HI, {"id": "r", "type": "reasoning", "summary": [], "content": None, "encrypted_content": None, "status": None}],
    [{"role": "user", "content": [{"type": "input_text", "text": "hi", "prompt_cache_breakpoint": None}]}],
    [*HI, {"type": "web_search_call", "id": "w", "status": "completed", "action": {"type": "search", "query": "x"}}],
]  # fmt: skip
NEUTRAL_OF_RESPONSES: list[dict[str, Any]] = [
    *({"input": items} for items in ITEMS),
    {"previous_response_id": None}, {"conversation": None}, {"prompt": None}, {"background": False},
    {"background": None}, {"truncation": "auto"}, {"truncation": "disabled"}, {"truncation": None},
    {"stream_options": None}, {"stream_options": {"include_obfuscation": False}}, {"include": None},
    {"include": ["reasoning.encrypted_content"]}, {"max_tool_calls": None}, {"store": True}, {"user": None},
    {"text": None}, {"text": {"format": None, "verbosity": None}}, {"text": {"format": {"type": "text"}}},
    {"reasoning": None}, {"reasoning": {"effort": None, "summary": "auto", "generate_summary": None}},
    {"tools": [{"type": "web_search", "external_web_access": False}]}, {"tools": [{"type": "local_shell"}]},
    {"tools": [{"type": "custom", "name": "apply_patch", "format": {"type": "text"}}]},
    {"tool_choice": "auto", "parallel_tool_calls": False}, {"metadata": {}}, {"client_metadata": {"a": "b"}},
    {"prompt_cache_key": "x", "prompt_cache_retention": None, "service_tier": None, "safety_identifier": None},
    {"text": {"verbosity": "high"}}, {"store": True, "service_tier": "flex", "max_tool_calls": 3, "top_logprobs": 2},
    {"max_output_tokens": 2.0}, {"top_logprobs": None}, {"instructions": None}, {"context_management": None},
]  # fmt: skip


@pytest.mark.parametrize("fields", NEUTRAL_OF_RESPONSES, ids=str)
def test_a_responses_field_that_asks_for_nothing_changes_nothing(server, fields) -> None:
    plain = server.made(RESPONSES, input=HI, max_output_tokens=2)
    answer = server.made(RESPONSES, **{"input": HI, "max_output_tokens": 2} | fields)
    assert [part["content"] for part in answer["output"]] == [part["content"] for part in plain["output"]]
    assert answer["usage"] == plain["usage"]
    Response.model_validate(answer)


COMPLETION: list[dict[str, Any]] = [
    {"suffix": None}, {"suffix": ""}, {"best_of": 1}, {"best_of": None}, {"logprobs": None}, {"logprobs": False},
    {"echo": None}, {"max_tokens": 2.0}, {"use_beam_search": False}, {"length_penalty": 1}, {"prompt_embeds": None},
    {"add_special_tokens": None}, {"add_special_tokens": True}, {"response_format": None}, {"n": None}, {"user": "x"},
    {"response_format": {"type": "text"}}, {"stream_options": None}, {"truncate_prompt_tokens": None},
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "fields"),
    [*((CHATS, each) for each in NEUTRAL), *((COMPLETIONS, each) for each in COMPLETION)],
    ids=str,
)
def test_a_field_that_asks_for_nothing_changes_nothing(server: Server, path: str, fields: Any) -> None:
    base: dict[str, Any] = {"messages": HI} if path == CHATS else {"prompt": "x = ["}
    plain = server.made(path, **base, max_tokens=2)
    answer = server.made(path, **base | {"max_tokens": 2} | fields)
    for part in ("choices", "usage"):
        assert answer[part] == plain[part]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHATS, {"temperature": 0.001, "seed": -1}),
        (CHATS, {"temperature": 1, "seed": -5}),
        (CHATS, {"top_p": 0, "temperature": 1}),
        (CHATS, {"response_format": {"type": "json_object"}, "max_tokens": 20}),
        (CHATS, {"response_format": {"type": "json_object", "schema": {"enum": [{"a": 1}]}}}),
        (CHATS, {"response_format": FORM}),
        (CHATS, {"add_special_tokens": True}),
        (CHATS, {"documents": [{"title": "a", "text": "b"}]}),
        (CHATS, {"tools": [TOOL | {"cache_control": {}}, {"type": "web_search"}], "tool_choice": "auto"}),
        (CHATS, {"tools": [{"type": "function", "function": {"name": "a", "parameters": None, "strict": None}}]}),
        (CHATS, {"tools": [FLAT], "tool_choice": "any", "max_tokens": 90, "parallel_tool_calls": False}),
        (CHATS, {"tools": [TOOL], "tool_choice": {"type": "function", "name": "get"},
                 "max_tokens": 90, "parallel_tool_calls": False}),
        (
            CHATS,
            {"tools": [TOOL, tool(EMPTY, "b")], "max_tokens": 90, "parallel_tool_calls": False, "tool_choice": {
                "type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [TOOL]}}},
        ),
        (COMPLETIONS, {"response_format": FORM, "max_tokens": 4}),
        (RESPONSES, {"tools": [FLAT | {"strict": True, "defer_loading": None}, {"type": "web_search"}]}),
        (RESPONSES, {"input": [*HI, {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "x"},
                               {"type": "custom_tool_call_output", "call_id": "c", "output": "ok"}]}),
        (RESPONSES, {"input": [*HI, {"type": "local_shell_call", "call_id": "c", "action": {"command": ["ls"]}},
                               {"type": "local_shell_call_output", "id": "c", "output": "{}"}]}),
        (RESPONSES, {"input": [*HI, {"type": "function_call", "call_id": "c", "name": "get", "arguments": "{}"},
                               {"type": "function_call_output", "call_id": "c", "output": [
                                   {"type": "input_text", "text": "7"}]}]}),
        (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"enum": [1]}}}}),
    ],
)  # fmt: skip
def test_other_forms_are_taken(server: Server, path: str, fields: dict[str, Any]) -> None:
    base = {CHATS: {"messages": HI, "max_tokens": 9}, COMPLETIONS: {"prompt": "x"}, RESPONSES: {"input": HI}}[
        path
    ]
    answer = server.made(path, **base | fields)
    if path == CHATS:
        ChatCompletion.model_validate(answer)
        if isinstance(fields.get("tool_choice"), dict) or fields.get("tool_choice") == "any":
            assert {call["function"]["name"] for call in answer["choices"][0]["message"]["tool_calls"]} == {
                "get"
            }
    if path == RESPONSES:
        Response.model_validate(answer)


def test_what_openais_types_allow_is_read() -> None:
    known = TypeAdapter(ChatParams)
    for sent, _ in MESSAGES[:14]:
        known.validate_python({"model": "x", "messages": sent})
        assert len(reading.messages(sent)) == len(sent)


def test_the_output_of_a_response_is_the_input_of_the_next_one(server: Server) -> None:
    """As OpenAI's client dumps it, with every field that is null."""
    asked = {"model": "tiny", "tools": [FLAT], "tool_choice": "required", "max_output_tokens": 40}
    first = server.openai.responses.create(input=HI, parallel_tool_calls=False, **asked)
    (call,) = first.output
    output = {
        "type": "function_call_output", "call_id": call.call_id, "output": "7", "id": None, "status": None,
    }  # fmt: skip
    turn = [*HI, *[item.model_dump() for item in first.output], output]
    second = server.openai.responses.create(model="tiny", input=turn, max_output_tokens=4)
    third = server.openai.responses.create(
        model="tiny", input=[*turn, *[item.model_dump() for item in second.output], *HI], max_output_tokens=4
    )
    assert 15 < second.usage.input_tokens < third.usage.input_tokens


def test_an_answer_says_what_stopped_it_and_has_the_names_of_reasoning(server: Server) -> None:
    text = server.made(CHATS, messages=HI, max_tokens=30)["choices"][0]["message"]["content"]
    for path, asked in ((CHATS, {"messages": HI}), (COMPLETIONS, {"prompt": "x = ["})):
        ids = server.made(path, **asked, max_tokens=9, return_token_ids=True, ignore_eos=True)["choices"][0][
            "token_ids"
        ]
        (choice,) = server.made(path, **asked, max_tokens=9, stop_token_ids=[ids[4]])["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", ids[4])
        last = server.events(path, **asked, max_tokens=9, stop_token_ids=[ids[4]])[-1]["choices"][0]
        assert (last["finish_reason"], last["stop_reason"]) == ("stop", ids[4])
    stops = [text[9:12], text[4:8], "absent"]
    (choice,) = server.made(CHATS, messages=HI, max_tokens=30, stop=stops)["choices"]
    assert (choice["message"]["content"], choice["stop_reason"]) == (text[: text.index(text[4:8])], text[4:8])
    (choice,) = server.made(CHATS, messages=HI, max_tokens=200, stop="absent")["choices"]
    assert choice["stop_reason"] is None
