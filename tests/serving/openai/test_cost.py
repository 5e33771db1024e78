"""What a request may cost: no field at its largest makes a step of an event loop long, or takes much memory.

The server and its engine process run in one event loop here, so that the steps of both are seen.
"""

from __future__ import annotations

import asyncio
import gc
import json
import resource
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from dflash_trt.async_llm import AsyncLLM
from dflash_trt.bundle.manifest import Bundle
from dflash_trt.decoding.params import MOST_ALLOWED, SamplingParams
from dflash_trt.serving import wire
from dflash_trt.serving.openai import engine as engines
from dflash_trt.serving.openai import protocol, reading
from dflash_trt.serving.openai.completions import Completions
from dflash_trt.serving.openai.errors import ApiError
from dflash_trt.serving.openai.generation import MOST_LOGPROBS, MOST_OF_A_PROMPT
from dflash_trt.serving.openai.server import application
from dflash_trt.serving.openai.settings import ServerSettings
from dflash_trt.serving.worker import Worker
from tests.serving.openai.conftest import CHATS, COMPLETIONS, HI, RESPONSES, chat_of, model_of, tool

# The law is 20 ms of CPU time. Machines are slower than ours, and a collection of garbage may fall into a step.
LONGEST = 0.1
MOST_MB = 600.0  # for all requests together
LIMIT = 40  # answers at a time


class Steps:
    """The CPU time of this thread's longest step, and what it was."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.longest, self.what = 0.0, ""
        run = asyncio.Handle._run

        def timed(handle: Any) -> None:
            begun = time.thread_time()
            run(handle)
            if (took := time.thread_time() - begun) > self.longest:
                self.longest, self.what = took, repr(handle)

        monkeypatch.setattr(asyncio.Handle, "_run", timed)


@asynccontextmanager
async def serving(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    """The application, with the engine process in this one."""
    llm = AsyncLLM(bundle, threads=1, block_length=4, max_batch_size=4, max_queue=LIMIT)
    ended: list[asyncio.Task[int]] = []

    async def in_here(*command: str, pass_fds: list[int], **_: Any) -> Any:
        ended.append(asyncio.create_task(Worker(llm).serve(socket.socket(fileno=socket.dup(pass_fds[0])))))
        return SimpleNamespace(pid=0, wait=lambda: ended[0], kill=lambda: None)

    monkeypatch.setattr(engines.asyncio, "create_subprocess_exec", in_here)
    app, engine = application(Bundle.open(bundle), ServerSettings(limit=LIMIT, priorities=True), print)
    await engine.start()
    try:
        yield app
    finally:
        await engine.close()


async def post(app: Any, path: str, body: bytes) -> tuple[int, bytes]:
    """Status and beginning of the answer to a request, whose pieces are not kept."""
    left, status, begin = asyncio.Event(), 0, b""
    given = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        if given:
            return given.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        nonlocal status, begin
        status = message.get("status", status)
        begin = begin or message.get("body", b"")[:300]

    headers = [(b"content-type", b"application/json"), (b"host", b"localhost")]
    await app(
        {"type": "http", "path": path, "method": "POST", "headers": headers, "query_string": b""},
        receive,
        send,
    )
    left.set()
    return status, begin


LONG, WORDS = "word " * 190_000, ["w" * 8] * 1024
MANY = [1] * 260_000  # what a body may hold
CLOSED = {"type": "object", "additionalProperties": False}
SCHEMA = CLOSED | {"properties": {f"p{i}": {"enum": ["x" * 99]} for i in range(400)}}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
# Longer than the context at their largest.
PROMPTS = ("messages", "tools", "tool_choice", "input", "instructions")
SAMPLED = {"temperature": 1.0, "max_tokens": 2}
COMMON: dict[str, Any] = {
    "model": "tiny", "temperature": 100.0, "top_p": 1.0, "seed": 2**64 - 1, "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True}, "speculate": True, "block_length": 8,
    "tree_nodes": 0, "timeout": 1e9, "priority": 100, "cache_salt": "x" * 1024, "metadata": {"k": "v" * 16_000},
}  # fmt: skip
SAMPLING: dict[str, Any] = COMMON | {
    "top_k": 2**31 - 1, "min_p": 1.0, "repetition_penalty": 100.0, "presence_penalty": 100.0,
    "frequency_penalty": 100.0, "stop": WORDS, "stop_token_ids": [5] * 1024, "ignore_eos": True, "bad_words": WORDS,
    "min_tokens": 2, "include_stop_str_in_output": True, "skip_special_tokens": True,
    "allowed_token_ids": [*range(2000)] * 65, "max_tokens": 400,
    "logit_bias": {str(i): 1 for i in range(1024)}, "response_format": FORM,
    "structured_outputs": {"regex": "x" * 65_000},
    "n": LIMIT, "add_special_tokens": True, "return_token_ids": True, "return_rounds": True, "prompt_logprobs": 20,
}  # fmt: skip
TOOLS = [tool(CLOSED | {"properties": {"a": {"description": "x" * 850}}}, f"f{i}") for i in range(1024)]
CHAT: dict[str, Any] = SAMPLING | {
    "messages": [{"role": "user", "content": "x"}] * (1 << 14), "max_completion_tokens": 400, "logprobs": True,
    "top_logprobs": 20, "tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f0"}},
    "parallel_tool_calls": True, "reasoning_effort": LONG, "include_reasoning": True,
    "documents": [{"text": "x"}] * (1 << 14),
    "chat_template_kwargs": {"x": MANY}, "add_generation_prompt": True, "continue_final_message": False,
}  # fmt: skip
COMPLETION: dict[str, Any] = SAMPLING | {"prompt": [[5] * 500] * LIMIT, "echo": True, "logprobs": 20}
RESPONSE: dict[str, Any] = COMMON | {
    "input": [{"role": "user", "content": "x"}] * (1 << 14), "instructions": LONG, "max_output_tokens": 400,
    "tools": [each["function"] | {"type": "function"} for each in TOOLS],
    "tool_choice": "auto", "parallel_tool_calls": True, "reasoning": {"effort": LONG}, "text": {"x": MANY},
    "truncation": "auto", "include": ["x" * 100] * 1024, "top_logprobs": 20,
}  # fmt: skip
TOKENIZE = {
    "model": "tiny", "prompt": "x" * 1000, "messages": [{"role": "user", "content": "x"}] * 50, "tools": TOOLS[:1],
    "chat_template_kwargs": {"x": MANY}, "add_special_tokens": True, "add_generation_prompt": True,
}  # fmt: skip
# The largest of what the prompts of a completion share.
SHARED = "stop", "stop_token_ids", "bad_words", "allowed_token_ids", "logit_bias", "structured_outputs"
# By path: the body, the fields at their largest, and what else a field needs to be taken.
WALKS: dict[str, tuple[type[protocol.Body], dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    CHATS: (
        protocol.ChatRequest, {"messages": HI} | SAMPLED, CHAT,
        {
            "tool_choice": {"tools": [tool(SCHEMA, "f0")]},
            "top_logprobs": {"logprobs": True, "n": LIMIT}, "max_completion_tokens": {"max_tokens": None},
            "n": {"logprobs": True, "top_logprobs": 20, "max_tokens": 12, "ignore_eos": True},
        },
    ),
    COMPLETIONS: (
        protocol.CompletionRequest, {"prompt": "x"} | SAMPLED, COMPLETION,
        {
            **{name: {"prompt": [[5]] * LIMIT} for name in SHARED},
            "echo": {"logprobs": 20, "prompt": [[5] * 500] * 40},
            "prompt": {"echo": True},
        },
    ),
    RESPONSES: (
        protocol.ResponsesRequest, {"input": "x", "temperature": 1.0, "max_output_tokens": 2}, RESPONSE,
        {},
    ),
    "/tokenize": (
        protocol.TokenizeRequest, {"prompt": "x"}, TOKENIZE,
        {name: {"prompt": None, "messages": HI} for name in ("messages", "tools", "chat_template_kwargs")},
    ),
    "/detokenize": (protocol.DetokenizeRequest, {"tokens": [5]}, {"model": "tiny", "tokens": [5] * 512}, {}),
}  # fmt: skip


@pytest.mark.parametrize("path", WALKS)
def test_no_field_at_its_largest_makes_a_long_step(tiny, path, monkeypatch) -> None:
    kind, base, largest, beside = WALKS[path]
    assert largest.keys() == kind.model_fields.keys()  # of a new field, too
    unknown = {"user": LONG, "extra": None, "service_tier": MANY}

    bodies = {
        name: json.dumps(base | beside.get(name, {}) | {name: value}, separators=(",", ":")).encode()
        for name, value in (largest | unknown).items()
    }

    async def walk() -> list[tuple[float, str, str]]:
        found, refused = [], []
        async with serving(tiny, monkeypatch) as app:
            await post(app, path, json.dumps(base).encode())  # the first one loads what is needed
            gc.freeze()
            steps = Steps(monkeypatch)
            for name, body in bodies.items():
                gc.collect()  # what the request before left is no part of this one
                steps.longest = 0.0
                status, begin = await post(app, path, body)
                too_long = name in PROMPTS and b" tokens" in begin
                if (status != 200 or b'"error":{' in begin) and not too_long:
                    refused.append((name, len(body), begin))
                found.append((steps.longest, name, steps.what))
        assert refused == []
        return found

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        found = asyncio.run(walk())
    finally:
        gc.unfreeze()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(
        *(f"{seconds * 1e3:6.1f} ms  {name}" for seconds, name, _ in sorted(found)[-6:]),
        sep="\n",
        file=sys.stderr,
    )
    print(f"{grown:.0f} MB", file=sys.stderr)
    assert max(found)[0] < LONGEST, max(found)
    assert grown < MOST_MB


def without_length(part: Any, place: str) -> list[str]:
    """The lists of a JSON schema without a length, and the objects whose values have a type."""
    inner = part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list) else ()
    found = [each for name, value in inner for each in without_length(value, f"{place}.{name}")]
    if not isinstance(part, dict) or {"maxItems", "maxProperties"} & part.keys():
        return found
    counted = part.get("type") == "array" or isinstance(part.get("additionalProperties"), dict)
    return [*found, place] if counted else found


def errors(kind: type[protocol.Body], body: dict[str, Any]) -> int:
    """How many errors are collected."""
    try:
        kind.model_validate_json(json.dumps(body))
    except ValidationError as error:
        return error.error_count()
    except ApiError:
        return 1
    return 0


@pytest.mark.parametrize("path", WALKS)
def test_every_list_has_a_length_and_reading_stops_at_its_first_error(path: str) -> None:
    kind, base, *_ = WALKS[path]
    assert without_length(kind.model_json_schema(), path) == []
    for item in ({}, [], "x", None, True, 1, {"a": [{}]}, [[{}]]):
        many: list[Any] = [[item] * 500, {str(i): item for i in range(500)}]
        for wrong in [*many, *([each] for each in many), *({"x": each} for each in many)]:
            counts = {name: errors(kind, base | {name: wrong}) for name in kind.model_fields}
            assert max(counts.values()) == 1, (counts, item)


@pytest.mark.parametrize(
    ("body", "taken"),
    [
        ("[" + "1," * 262_000 + "1]", True), ("[" + "1," * 263_000 + "1]", False),
        ("[" + "[]," * 66_000 + "1]", False), ("[" + "[" * 66_000, False),
        ('{"x": "' + "[,:{" * 100_000 + '"}', True), ('{"x": "' + '[\\",:{' * 100_000 + '\\\\"}', True),
        ('{"x": "\\\\", "y": [' + "1," * 263_000 + '1, "\\\\"]}', False), ('"",' * 200_000, True),
        ('""' * 600_000 + "," * 263_000, False),
    ],
)  # fmt: skip
def test_the_values_of_a_body_are_counted_outside_of_its_texts(body: str, taken: bool) -> None:
    with nullcontext() if taken else pytest.raises(ApiError, match="over 262144 values"):
        reading.check_values(body.encode())


def updates(tokens: int, tops: int) -> list[wire.Update]:
    """The updates of an answer, eight tokens at a time."""
    top = [(5 + i, -0.123456789) for i in range(tops)]
    made: list[wire.Update] = [
        {"text": "a", "token_ids": [5] * 8, "logprobs": [-0.123456789] * 8, "top_logprobs": [top] * 8}
        for _ in range(tokens // 8)
    ]
    ended = {
        "num_draft_tokens": 0, "num_accepted_tokens": 0, "num_cached_tokens": 0, "acceptance_histogram": [],
    }  # fmt: skip
    made[-1] |= {"finish_reason": "length", **ended}
    made[0] |= {"num_input_tokens": 1}
    return made


def test_the_log_probabilities_of_a_whole_answer_leave_in_pieces(tiny, monkeypatch) -> None:
    """As many as there may be, from a double of the engine."""
    model = model_of(tiny, "")
    monkeypatch.setattr(model, "max_seq_len", 1 << 20)
    chat = chat_of(model, logprobs=True, top_logprobs=20)
    most = MOST_LOGPROBS // 21
    assert chat.request["params"]["max_tokens"] == most
    assert chat.request["stream"]  # so that they come by rounds

    async def given(*_: Any) -> AsyncIterator[tuple[int, wire.Update]]:
        for update in updates(most, 20):
            yield 0, update

    async def run() -> list[bytes]:
        gc.freeze()
        steps = Steps(monkeypatch)
        pieces = await chat.whole(SimpleNamespace(updates=given))
        assert steps.longest < LONGEST, steps.what
        return pieces

    try:
        pieces = asyncio.run(run())
    finally:
        gc.unfreeze()
    assert max(map(len, pieces)) < 100_000
    (choice,) = json.loads(b"".join(pieces))["choices"]
    content = choice["logprobs"]["content"]
    assert len(content) == most // 8 * 8
    assert len(content[-1]["top_logprobs"]) == 20
    assert choice["logprobs"]["refusal"] is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": True, "top_logprobs": 20, "max_tokens": MOST_LOGPROBS // 21 + 1}, "max_tokens"),
        ({"logprobs": True, "n": 128, "max_completion_tokens": MOST_LOGPROBS // 128 + 1}, "max_completion_tokens"),
    ],
)  # fmt: skip
def test_more_log_probabilities_are_refused(tiny, fields, param, monkeypatch) -> None:
    model = model_of(tiny, "")
    monkeypatch.setattr(model, "max_seq_len", 1 << 20)
    with pytest.raises(ApiError, match="524288 log-probabilities") as error:
        chat_of(model, **fields)
    assert error.value.param == param
    most = fields.get("max_tokens") or fields["max_completion_tokens"]
    chat_of(model, **{**fields, param: most - 1})


def test_a_prompt_has_as_many_log_probabilities_as_can_come_at_once(tiny, monkeypatch) -> None:
    model = model_of(tiny, "")
    monkeypatch.setattr(model, "max_seq_len", 1 << 20)

    def ask(tokens: int, **fields: Any) -> Any:
        body = protocol.CompletionRequest(model="tiny", prompt=[[5], [5] * tokens], **fields)
        return asyncio.run(Completions.of(model, body, "id", None))

    for fields in (
        {"logprobs": 20, "echo": True},
        {"prompt_logprobs": 20},
        {"logprobs": 20, "prompt_logprobs": 0},
    ):
        ask(MOST_OF_A_PROMPT // 21, **fields)
        with pytest.raises(
            ApiError, match=f"{[*fields][-1] if 'echo' not in fields else 'logprobs'}: the prompt would"
        ):
            ask(MOST_OF_A_PROMPT // 21 + 1, **fields)
    ask(MOST_OF_A_PROMPT, logprobs=20)
    with pytest.raises(ApiError, match="answers have 524288 at most"):
        ask(MOST_OF_A_PROMPT // 21, prompt_logprobs=20, n=9)


def test_what_prompts_share_is_sent_and_read_once(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, sent = list[int](), list[int]()
    check, line = SamplingParams.__post_init__, wire.line

    def checked(params: SamplingParams) -> None:
        made.append(len(params.allowed_token_ids or ()))
        check(params)

    def said(message: Any) -> bytes:
        sent.append(len(line(message)))
        return line(message)

    async def run() -> None:
        async with serving(tiny, monkeypatch) as app:
            monkeypatch.setattr(SamplingParams, "__post_init__", checked)
            monkeypatch.setattr(wire, "line", said)
            body = {"prompt": [[5]] * 8, "n": 5, "allowed_token_ids": [1] * MOST_ALLOWED, "max_tokens": 1}
            assert (await post(app, COMPLETIONS, json.dumps(body).encode()))[0] == 200

    asyncio.run(run())
    assert made.count(MOST_ALLOWED) == 1
    assert sum(size > 1000 for size in sent) == 1
    assert len(sent) >= 8
