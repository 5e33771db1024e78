"""The body of POST /v1/responses, and the chat that it stands for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from dflash_trt.serving.openai.errors import ApiError, Names
from dflash_trt.serving.openai.protocol import (
    MOST_MESSAGES,
    MOST_TOOLS,
    Body,
    ChatRequest,
    CommonFields,
    Function,
    NamedFunction,
    TextPart,
    Verbosity,
)

Json = dict[str, Any]
# The names of a chat's fields in a response.
NAMES: Names = (
    (r"\b(?:max_tokens|max_completion_tokens)\b", "max_output_tokens"),
    (r"^messages\b(?:[\w.\[\]]*)", "input"),
    (r"^(tools\[\d+\])\.function\b", r"\1"),
    (r"^tool_choice\.function\b", "tool_choice"),
    (r"^response_format(?:\.json_schema)?\b", "text.format"),
    (r"^reasoning_effort\b", "reasoning.effort"),
)


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


class FlatTool(Function):
    """A function that the model may call."""

    type: Literal["function"]


class FlatNamedTool(NamedFunction):
    """A function by its name."""

    type: Literal["function"]


class Reasoning(Body):
    """How much to reason."""

    effort: str | None = None
    summary: str | None = None


class Text(Body):
    """The form of the text."""

    format: Json | None = None
    verbosity: Verbosity | None = None  # without effect


class ResponsesRequest(CommonFields):
    """POST /v1/responses."""

    input: str | Annotated[list[InputMessage], Field(min_length=1, max_length=MOST_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: Annotated[list[FlatTool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FlatNamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: Text | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    include: list[str] | None = None
    # Without effect here. Nothing is stored, and functions are the only tools.
    max_tool_calls: int | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    def chat(self) -> ChatRequest:
        """The same request as a chat. Raises ApiError, or pydantic's ValidationError."""
        made: Json = {
            name: getattr(self, name) for name in (*CommonFields.model_fields, "parallel_tool_calls")
        }
        instructions = [{"role": "system", "content": self.instructions}] if self.instructions else []
        made["messages"] = [*instructions, *self._messages()]
        made["max_completion_tokens"] = self.max_output_tokens
        if self.tools:
            tools = [tool.model_dump(exclude={"type"}, exclude_none=True) for tool in self.tools]
            made["tools"] = [{"type": "function", "function": tool} for tool in tools]
        choice = self.tool_choice
        if isinstance(choice, FlatNamedTool):
            made["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
        else:
            made["tool_choice"] = choice
        made["reasoning_effort"] = self.reasoning.effort if self.reasoning else None
        form = dict(self.text.format or {}) if self.text else {}
        if form.get("type") == "json_schema":  # flat here, nested in a chat
            form = {"type": "json_schema", "json_schema": {k: v for k, v in form.items() if k != "type"}}
        made["response_format"] = form or None
        return ChatRequest.model_validate({name: value for name, value in made.items() if value is not None})

    def _messages(self) -> Iterator[Json]:
        if isinstance(self.input, str):
            yield {"role": "user", "content": self.input}
            return
        # One message of a chat has the reasoning, the text and the calls of the assistant's turn.
        turn: Json = {}
        for at, item in enumerate(self.input):
            if item.type == "reasoning":
                thought = _text(item.content or item.summary, at)
                turn.setdefault("reasoning_content", []).append(thought)
                continue
            if item.type == "function_call":
                call = {"name": item.name or "", "arguments": item.arguments or "{}"}
                called = {"id": item.call_id, "type": "function", "function": call}
                turn.setdefault("tool_calls", []).append(called)
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
        if thoughts := turn.pop("reasoning_content", None):
            turn["reasoning_content"] = "".join(thoughts)
        yield {"role": "assistant", "content": None} | turn


def _text(content: Any, at: int) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = [part.text if isinstance(part, TextPart) else part.get("text") for part in content]
    if not all(isinstance(text, str) for text in texts):
        raise ApiError(400, f"input[{at}].content has a part that is no text", f"input[{at}].content")
    return "".join(texts)
