"""POST /v1/responses: OpenAI's newer form of a chat, without stored state.

A request becomes a chat. The answer's parts become output items: reasoning, a message, and calls of functions.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from dflash_trt.serving.openai.chat import Chat
from dflash_trt.serving.openai.engine import EngineProcess
from dflash_trt.serving.openai.errors import ApiError, Names
from dflash_trt.serving.openai.generation import Prepared, Usage
from dflash_trt.serving.openai.protocol import (
    MOST_MESSAGES,
    Body,
    ChatRequest,
    CommonFields,
    TextPart,
    Verbosity,
)

Json = dict[str, Any]


class InputMessage(Body):
    """A message of the input, or an item of an earlier answer."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[TextPart | Json] | None = None
    id: str | None = None
    status: str | None = None
    phase: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[TextPart] | None = None
    summary: list[Json] | None = None
    encrypted_content: str | None = None


class FlatTool(Body):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None


class Named(Body):
    type: Literal["function"]
    name: str


class Reasoning(Body):
    effort: str | None = None
    summary: str | None = None


class Text(Body):
    format: Json | None = None
    verbosity: Verbosity | None = None  # without effect


class ResponsesRequest(CommonFields):
    """POST /v1/responses."""

    input: str | Annotated[list[InputMessage], Field(min_length=1, max_length=MOST_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: list[FlatTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | Named | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: Text | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    include: list[str] | None = None
    # Without effect here. Nothing is stored, and functions are the only tools.
    max_tool_calls: int | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    def chat(self) -> Json:
        """The same request as a chat."""
        made: Json = {
            name: getattr(self, name) for name in (*CommonFields.model_fields, "parallel_tool_calls")
        }
        made["messages"] = [*self._instructions(), *self._messages()]
        made["max_completion_tokens"] = self.max_output_tokens
        if self.tools:
            made["tools"] = [
                {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
                for tool in self.tools
            ]
        choice = self.tool_choice
        made["tool_choice"] = (
            {"type": "function", "function": {"name": choice.name}} if isinstance(choice, Named) else choice
        )
        made["reasoning_effort"] = self.reasoning.effort if self.reasoning else None
        form = dict(self.text.format or {}) if self.text else {}
        if form.get("type") == "json_schema":  # flat here, nested in a chat
            form = {"type": "json_schema", "json_schema": {k: v for k, v in form.items() if k != "type"}}
        made["response_format"] = form or None
        return {name: value for name, value in made.items() if value is not None}

    def _instructions(self) -> list[Json]:
        return [{"role": "system", "content": self.instructions}] if self.instructions else []

    def _messages(self) -> Iterator[Json]:
        if isinstance(self.input, str):
            yield {"role": "user", "content": self.input}
            return
        # One message of a chat has the reasoning, the text and the calls of the assistant's turn.
        turn: Json = {}
        for at, item in enumerate(self.input):
            if item.type == "reasoning":
                turn["reasoning_content"] = turn.get("reasoning_content", "") + _reasoning(item, at)
                continue
            if item.type == "function_call":
                call = {"name": item.name or "", "arguments": item.arguments or "{}"}
                called = {"id": item.call_id, "type": "function", "function": call}
                turn["tool_calls"] = [*turn.get("tool_calls", []), called]
                continue
            if item.role == "assistant" and not {"content", "tool_calls"} & turn.keys():
                turn["content"] = _text(item.content, at)
                continue
            yield from _turn(turn)
            turn = {}
            if item.role == "assistant":
                turn["content"] = _text(item.content, at)
            elif item.type == "function_call_output":
                yield {"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output, at)}
            elif item.role is None:
                raise ApiError(400, f"input[{at}].role is missing", f"input[{at}].role")
            else:
                yield {"role": item.role, "content": _text(item.content, at)}
        yield from _turn(turn)


def _turn(turn: Json) -> Iterator[Json]:
    """The assistant's message, unless there is nothing but reasoning."""
    if {"content", "tool_calls"} & turn.keys():
        yield {"role": "assistant", "content": None} | turn


def _reasoning(item: InputMessage, at: int) -> str:
    """The text of a reasoning item, or its summary."""
    return _text(item.content or item.summary, at)


def _text(content: Any, at: int) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = [part.text if isinstance(part, TextPart) else part.get("text") for part in content]
    if not all(isinstance(text, str) for text in texts):
        raise ApiError(400, f"input[{at}].content has a part that is no text", f"input[{at}].content")
    return "".join(texts)


@dataclass
class Responses:
    """A response that is ready to be decoded: a chat, and the form of its answer."""

    chat: Chat
    body: ResponsesRequest
    id: str
    _number: int = 0
    _items: list[Json] = field(default_factory=list)

    @property
    def usage(self) -> Usage:
        return self.chat.usage

    @property
    def prepared(self) -> Prepared:
        return self.chat.prepared

    def reasons(self) -> list[str | None]:
        """The finish reasons of the choices so far."""
        return self.chat.reasons()

    @property
    def ended(self) -> bool:
        """Whether all choices have ended."""
        return self.chat.ended

    async def whole(self, engine: EngineProcess) -> Json:
        """The response at once."""
        async with aclosing(self.chunks(engine)) as events:
            async for event in events:
                last = event
        whole: Json = last["response"]
        return whole

    async def chunks(self, engine: EngineProcess) -> AsyncGenerator[Json, None]:
        """The events of a stream. The last one has the whole response."""
        try:
            open_item: Json | None = None
            begun = False
            async with aclosing(self.chat.run(engine)) as given:
                async for _, _, deltas in given:
                    if not begun:
                        begun = True
                        for kind in ("response.created", "response.in_progress"):
                            yield self._event(kind, response=self._response("in_progress"))
                    for delta in deltas:
                        kind, value = next(iter(delta.items()))
                        if kind == "tool_calls":
                            for event in self._closed(open_item):
                                yield event
                            open_item = None
                            for event in self._call(value[0], "completed" if self._whole() else "incomplete"):
                                yield event
                            continue
                        if open_item is None or open_item["type"] != _TYPES[kind]:
                            for event in self._closed(open_item):
                                yield event
                            open_item = self._new(kind)
                            for event in self._opened(open_item):
                                yield event
                        open_item["content"][0]["text"] += value
                        place = self._place(open_item)
                        name = "output_text" if kind == "content" else "reasoning_text"
                        logprobs: Json = {"logprobs": []} if kind == "content" else {}
                        yield self._event(f"response.{name}.delta", **place, delta=value, **logprobs)
            for event in self._closed(open_item, "completed" if self._whole() else "incomplete"):
                yield event
            whole = self._final()
            yield self._event(f"response.{whole['status']}", response=whole)
        except ApiError as error:
            raise error.renamed(NAMES) from None

    def _whole(self) -> bool:
        """Whether the answer was not cut, so far."""
        return self.chat.answers[0].finish_reason in (None, "stop", "tool_calls")

    def _final(self) -> Json:
        reason = self.chat.answers[0].finish_reason
        if self._whole():
            return self._response("completed")
        why = {"length": "max_output_tokens"}.get(str(reason), str(reason))
        return self._response("incomplete") | {"incomplete_details": {"reason": why}}

    def _new(self, kind: str) -> Json:
        number = len(self._items)
        if kind == "content":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item: Json = {
                "id": f"msg_{self.id}_{number}",
                "type": "message",
                "role": "assistant",
                "content": [part],
            }
        else:
            part = {"type": "reasoning_text", "text": ""}
            item = {"id": f"rs_{self.id}_{number}", "type": "reasoning", "summary": [], "content": [part]}
        item["status"] = "in_progress"
        self._items.append(item)
        return item

    def _place(self, item: Json) -> Json:
        return {"item_id": item["id"], "output_index": self._items.index(item), "content_index": 0}

    def _opened(self, item: Json) -> Iterator[Json]:
        index = self._items.index(item)
        yield self._event("response.output_item.added", output_index=index, item=item | {"content": []})
        yield self._event("response.content_part.added", **self._place(item), part=dict(item["content"][0]))

    def _closed(self, item: Json | None, status: str = "completed") -> Iterator[Json]:
        if item is None:
            return
        item["status"] = status
        place, part = self._place(item), item["content"][0]
        name = part["type"]
        logprobs: Json = {"logprobs": []} if name == "output_text" else {}
        yield self._event(f"response.{name}.done", **place, text=part["text"], **logprobs)
        yield self._event("response.content_part.done", **place, part=dict(part))
        yield self._event("response.output_item.done", output_index=place["output_index"], item=item)

    def _call(self, call: Json, status: str) -> Iterator[Json]:
        index = len(self._items)
        item = {
            "id": f"fc_{self.id}_{index}",
            "type": "function_call",
            "call_id": call["id"],
            "name": call["function"]["name"],
            "arguments": call["function"]["arguments"],
            "status": status,
        }
        self._items.append(item)
        place = {"item_id": item["id"], "output_index": index}
        opened = item | {"arguments": "", "status": "in_progress"}
        yield self._event("response.output_item.added", output_index=index, item=opened)
        yield self._event("response.function_call_arguments.delta", **place, delta=item["arguments"])
        yield self._event(
            "response.function_call_arguments.done", **place, arguments=item["arguments"], name=item["name"]
        )
        yield self._event("response.output_item.done", output_index=index, item=item)

    def error(self, error: ApiError) -> Json:
        """The event of an error in the middle of a stream."""
        body = error.body()
        return (
            self._event("error", **{name: body["error"][name] for name in ("code", "message", "param")})
            | body
        )

    def _event(self, kind: str, **fields: Any) -> Json:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}

    def _response(self, status: str) -> Json:
        usage, body = self.chat.usage, self.body
        counts = {
            "input_tokens": usage.prompt,
            "input_tokens_details": {
                "cached_tokens": usage.cached if usage.details else 0,
                "cache_write_tokens": 0,
            },
            "output_tokens": usage.completion,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning},
            "total_tokens": usage.prompt + usage.completion,
        }
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.chat.created,
            "status": status,
            "model": self.chat.model.name,
            "output": [dict(item) for item in self._items],
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "tool_choice": body.model_dump()["tool_choice"] or "auto",
            "tools": [tool.model_dump() for tool in body.tools or []],
            "max_output_tokens": body.max_output_tokens,
            "text": {"format": (body.text.format if body.text else None) or {"type": "text"}},
            "store": False,
            "usage": None if status == "in_progress" else counts,
        }


# The names of a chat's fields in a response.
NAMES: Names = (
    (r"\b(?:max_tokens|max_completion_tokens)\b", "max_output_tokens"),
    (r"^messages\b(?:[\w.\[\]]*)", "input"),
    (r"^(tools\[\d+\])\.function\b", r"\1"),
    (r"^tool_choice\.function\b", "tool_choice"),
    (r"^response_format(?:\.json_schema)?\b", "text.format"),
    (r"^reasoning_effort\b", "reasoning.effort"),
)
_TYPES = {"content": "message", "reasoning_content": "reasoning"}


def as_chat(body: ResponsesRequest) -> ChatRequest:
    """The chat of a response. Raises pydantic's ValidationError."""
    return ChatRequest.model_validate(body.chat())
