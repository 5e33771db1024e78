"""POST /v1/responses: OpenAI's newer form of a chat, without stored state.

A request becomes a chat. The answer's parts become output items: reasoning, a message, and calls of functions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import to_json

from dflash_trt.serving.openai.calls import Call
from dflash_trt.serving.openai.chat import Chat
from dflash_trt.serving.openai.engine import EngineProcess
from dflash_trt.serving.openai.errors import ApiError, Names
from dflash_trt.serving.openai.generation import event as event_text
from dflash_trt.serving.openai.model import Model
from dflash_trt.serving.openai.protocol import ResponsesRequest
from dflash_trt.serving.openai.reading import Json
from dflash_trt.serving.wire import Update

# The names of a chat's fields in a response.
NAMES: Names = (
    (r"\b(?:max_tokens|max_completion_tokens)\b", "max_output_tokens"),
    (r"^messages\b(?:[\w.\[\]]*)", "input"),
    (r"^response_format(?:\.json_schema)?\b", "text.format"),
    (r"^reasoning_effort\b", "reasoning.effort"),
)
_TYPES = {"content": "message", "reasoning": "reasoning", "call": "function_call"}  # of items


@dataclass(kw_only=True)
class Responses(Chat):
    """A response that is ready to be decoded: a chat, whose answer has another form."""

    asked: ResponsesRequest
    _number: int = 0
    _items: list[Json] = field(default_factory=list)
    _open: Json | None = None  # the item whose text goes on
    _texts: list[str] = field(default_factory=list)  # of that

    @classmethod
    async def respond(
        cls, model: Model, body: ResponsesRequest, request_id: str, most_seconds: float | None
    ) -> Responses:
        """Render and tokenize. Raises ApiError."""
        try:
            chat = await Chat.of(model, body.chat(), request_id, most_seconds)
        except ApiError as error:
            raise error.renamed(NAMES) from None
        names = [*chat.names, *NAMES]
        return cls(**vars(chat) | {"asked": body, "id": f"resp_{request_id}", "names": names})

    async def whole(self, engine: EngineProcess) -> list[bytes]:
        async with aclosing(self.chunks(engine)) as events:
            async for event in events:
                last = event
        return [to_json(last["response"])]

    def deltas(self, index: int, update: Update) -> Iterator[Json]:
        if not self._number:
            for kind in ("response.created", "response.in_progress"):
                yield self._event(kind, response=self._response("in_progress"))
        for part in self.parts(index, update):
            if self._open is None or self._open["type"] != _TYPES[part.kind]:
                yield from self._closed()
                if part.call is not None:
                    yield from self._called(part.call)
                    continue
                yield from self._opened(part.kind)
            assert self._open is not None
            self._texts.append(part.text)
            yield self._text_event("delta", self._open, delta=part.text)

    def ending(self) -> Iterator[Json]:
        """The last event has the whole response."""
        yield from self._closed(self._status())
        whole = self._response(self._status())
        yield self._event(f"response.{whole['status']}", response=whole)

    def _status(self) -> str:
        """Whether the answer was cut, so far."""
        whole = self.choices[0].finish_reason in (None, "stop", "tool_calls")
        return "completed" if whole else "incomplete"

    def _place(self, item: Json) -> Json:
        return {"item_id": item["id"], "output_index": len(self._items) - 1}

    def _text_event(self, name: str, item: Json, **fields: Any) -> Json:
        """An event about the text of a message or of reasoning."""
        kind = item["content"][0]["type"]
        logprobs: Json = {"logprobs": []} if kind == "output_text" else {}
        return self._event(
            f"response.{kind}.{name}", **self._place(item), content_index=0, **fields, **logprobs
        )

    def _opened(self, kind: str) -> Iterator[Json]:
        index = len(self._items)
        if kind == "content":
            part: Json = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item: Json = {"id": f"msg_{self.id}_{index}", "type": "message", "role": "assistant"}
        else:
            part = {"type": "reasoning_text", "text": ""}
            item = {"id": f"rs_{self.id}_{index}", "type": "reasoning", "summary": []}
        self._open = item | {"content": [part], "status": "in_progress"}
        self._items.append(self._open)
        self._texts.clear()
        yield self._event("response.output_item.added", output_index=index, item=self._open | {"content": []})
        place = self._place(self._open)
        yield self._event("response.content_part.added", **place, content_index=0, part=dict(part))

    def _closed(self, status: str = "completed") -> Iterator[Json]:
        if (item := self._open) is None:
            return
        self._open = None
        item["status"] = status
        item["content"][0]["text"] = "".join(self._texts)
        place, part = self._place(item), dict(item["content"][0])
        yield self._text_event("done", item, text=part["text"])
        yield self._event("response.content_part.done", **place, content_index=0, part=part)
        yield self._event("response.output_item.done", output_index=place["output_index"], item=item)

    def _called(self, call: Call) -> Iterator[Json]:
        index = len(self._items)
        item = {"id": f"fc_{self.id}_{index}", "type": "function_call", "call_id": call.id, "name": call.name}
        opened = item | {"arguments": "", "status": "in_progress"}
        item |= {"arguments": call.arguments, "status": "completed" if call.whole else "incomplete"}
        self._items.append(item)
        place, done = self._place(item), {"arguments": call.arguments, "name": call.name}
        yield self._event("response.output_item.added", output_index=index, item=opened)
        yield self._event("response.function_call_arguments.delta", **place, delta=call.arguments)
        yield self._event("response.function_call_arguments.done", **place, **done)
        yield self._event("response.output_item.done", output_index=index, item=item)

    def last_event(self, error: ApiError | None) -> bytes:
        """What ends a stream: nothing, or an error in the middle of it."""
        if error is None:
            return b""
        body = error.body()
        fields = {name: body["error"][name] for name in ("code", "message", "param")}
        return event_text(self._event("error", **fields) | body)

    def _event(self, kind: str, **fields: Any) -> Json:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}

    def _response(self, status: str) -> Json:
        usage, body = self.usage, self.asked
        cached = usage.cached if usage.details else 0
        counts = {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": usage.completion,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning},
            "total_tokens": usage.prompt + usage.completion,
        }
        reason = str(self.choices[0].finish_reason)
        why = {"reason": {"length": "max_output_tokens"}.get(reason, reason)}
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "model": self.model.name,
            "output": [dict(item) for item in self._items],
            "error": None,
            "incomplete_details": why if status == "incomplete" else None,
            "instructions": body.instructions,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "max_output_tokens": body.max_output_tokens,
            "text": {"format": (body.text and body.text.format) or {"type": "text"}},
            "store": False,
            "usage": None if status == "in_progress" else counts,
        }
