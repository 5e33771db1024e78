"""A chat's answer in parts: reasoning, content and calls of tools, from a stream of text and tokens.

The chat template says what a model writes. It has the markers that its family was trained with:

    <think>                       reasoning in tags (Qwen3, DeepSeek); others: written.py
    <|channel|>                   channels of gpt-oss
    <tool_call>                   one call in tags, as JSON (Qwen, Hermes) or as tags again (Qwen3-Coder)
    "parameters"                  calls as bare JSON objects (Llama 3)
"""

from __future__ import annotations

import contextlib
import json
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Call:
    """A call of a tool. `arguments`: a JSON object as text."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")


@dataclass(frozen=True)
class Part:
    """Some text of one kind, or a call."""

    kind: Literal["content", "reasoning", "call"]
    text: str = ""
    call: Call | None = None


# Parameters of each tool by its name: a JSON schema.
Schemas = Mapping[str, Mapping[str, Any]]


class Stage(ABC):
    """Text in, parts out. `push` takes text as it comes, `finish` gives the rest.

    cut: the answer was ended before its end. A call that has begun is then given as far as its arguments go, and
    nothing of it is content.
    """

    @abstractmethod
    def push(self, text: str) -> Iterator[Part]: ...

    @abstractmethod
    def finish(self, *, cut: bool = False) -> Iterator[Part]: ...


class Plain(Stage):
    """All text is content."""

    def push(self, text: str) -> Iterator[Part]:
        if text:
            yield Part("content", text)

    def finish(self, *, cut: bool = False) -> Iterator[Part]:
        return iter(())


class Think(Stage):
    """Reasoning between the marks `begin` and `end` at the beginning of an answer. The rest is content.

    inside: whether the prompt ends with `begin`.
    """

    def __init__(self, inside: bool, begin: str = "<think>", end: str = "</think>") -> None:
        self._begin, self._end = begin, end
        self._state: Literal["before", "inside", "trim", "behind"] = "inside" if inside else "before"
        self._held, self.thought = "", inside

    @property
    def over(self) -> bool:
        """Whether there is no more reasoning. `thought`: whether there was any."""
        return self._state in ("trim", "behind")

    def push(self, text: str) -> Iterator[Part]:
        self._held += text
        if self._state == "before":
            start = self._held.lstrip()
            size = len(self._begin)
            if self._begin.startswith(start[:size]) and len(start) < size:
                return
            self._state = "inside" if start.startswith(self._begin) else "behind"
            if self._state == "inside":
                self._held, self.thought = start[size:], True
        if self._state == "inside":
            yield from self._reason()
        if self._state == "trim":  # the line breaks after the tag are no content
            self._held = self._held.lstrip("\n")
            if self._held:
                self._state = "behind"
        if self._state == "behind" and self._held:
            yield Part("content", self._held)
            self._held = ""

    def _reason(self) -> Iterator[Part]:
        before, tag, rest = self._held.partition(self._end)
        if tag:
            self._state, self._held = "trim", rest
        else:
            keep = overlap(before, self._end)
            before, self._held = before[: len(before) - keep], before[len(before) - keep :]
        if before:
            yield Part("reasoning", before)

    def finish(self, *, cut: bool = False) -> Iterator[Part]:
        if self._held and self._state != "trim":
            yield Part("reasoning" if self._state == "inside" else "content", self._held)
        self._held = ""


class TaggedCalls(Stage):
    """Calls between `<tool_call>` and `</tool_call>`. A block that is no call stays content, with its tags."""

    def __init__(self, schemas: Schemas) -> None:
        self._schemas, self._held, self._inside, self._behind = schemas, "", False, False

    def push(self, text: str) -> Iterator[Part]:
        self._held += text
        while True:
            tag = "</tool_call>" if self._inside else "<tool_call>"
            before, ends, rest = self._held.partition(tag)
            if self._inside:
                if not ends:
                    return
                yield from self._block(before, tag)
            else:
                # Blanks around calls are no content. So those at the end wait for what follows them.
                sure = before if ends else before[: len(before) - overlap(before, tag)]
                shown = sure.rstrip()
                if shown and self._behind:
                    shown = shown.lstrip()
                if shown:
                    self._behind = False
                    yield Part("content", shown)
                rest = rest if ends else before[len(sure.rstrip()) :]
            self._held = rest
            if not ends:
                return
            self._inside = not self._inside

    def _block(self, text: str, tag: str) -> Iterator[Part]:
        call = _xml_call(text, self._schemas) or json_call(parsed(text))
        self._behind = call is not None
        yield Part("call", call=call) if call else Part("content", f"<tool_call>{text}{tag}")

    def finish(self, *, cut: bool = False) -> Iterator[Part]:
        if self._inside and cut:
            text = self._held[: len(self._held) - overlap(self._held, "</tool_call>")]
            if call := _cut_xml_call(text, self._schemas) or _cut_json_call(text):
                yield Part("call", call=call)
        elif self._inside:  # the end tag alone is missing
            yield from self._block(self._held, "")
        elif self._held and not self._behind:
            # Of a cut answer, but a single < is rarely the beginning of a tag.
            size = overlap(self._held, "<tool_call>") if cut else 0
            if shown := self._held[: len(self._held) - size] if size > 1 else self._held:
                yield Part("content", shown)
        self._held, self._inside = "", False


class BareCalls(Stage):
    """An answer that is nothing but JSON objects with a name and parameters, perhaps separated by semicolons.

    known: names of the tools, if a call must have one of them.
    """

    def __init__(self, known: Iterable[str] | None = None) -> None:
        self._held, self._content = "", False
        self._known = None if known is None else frozenset(known)

    def push(self, text: str) -> Iterator[Part]:
        self._held += text
        start = self._held.lstrip().removeprefix("<|python_tag|>").lstrip()
        self._content = self._content or not (
            not start or start[0] in "{[" or "<|python_tag|>".startswith(start)
        )
        if self._content and self._held:
            yield Part("content", self._held)
            self._held = ""

    def finish(self, *, cut: bool = False) -> Iterator[Part]:
        values, rest = _objects(self._held.strip().removeprefix("<|python_tag|>"))
        rest = rest.removeprefix("[") if cut else rest
        calls = [call for value in values if (call := self._known_call(value))]
        begun = bool(rest) and cut and _begins_call(rest, self._known)
        if len(calls) == len(values) and (begun if rest else calls):
            if begun and (last := _cut_json_call(rest)):
                calls.append(last)
            for call in calls:
                yield Part("call", call=call)
        elif self._held:
            yield Part("content", self._held)
        self._held = ""

    def _known_call(self, value: Any) -> Call | None:
        call = json_call(value)
        return call if call and (self._known is None or call.name in self._known) else None


@dataclass
class AnswerParser:
    """Parts of an answer in two stages: reasoning first, where the family has any, then calls in its content.

    end_of_thought: the token that ends the reasoning, if it is one. reasoning_tokens: those of the reasoning so far,
    with its tags.
    """

    think: Think | None
    calls: Stage
    end_of_thought: int | None = None
    reasoning_tokens: int = 0

    def push(self, text: str, token_ids: list[int]) -> list[Part]:
        think, end = self.think, self.end_of_thought
        if think is None:
            return list(self.calls.push(text))
        before = think.over
        parts = list(self._content(think.push(text)))
        if think.thought and not before:
            if think.over and end is not None and end in token_ids:
                token_ids = token_ids[: token_ids.index(end) + 1]
            self.reasoning_tokens += len(token_ids)
        return parts

    def finish(self, *, cut: bool = False) -> list[Part]:
        rest = self.think.finish(cut=cut) if self.think else ()
        return [*self._content(rest), *self.calls.finish(cut=cut)]

    def _content(self, parts: Iterable[Part]) -> Iterator[Part]:
        for part in parts:
            if part.kind == "content":
                yield from self.calls.push(part.text)
            else:
                yield part


def overlap(text: str, tag: str) -> int:
    """Length of the longest end of `text` that a tag begins with."""
    for size in range(min(len(text), len(tag) - 1), 0, -1):
        if text.endswith(tag[:size]):
            return size
    return 0


def parsed(text: str) -> Any:
    """The value of a text in JSON; None for any other text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _objects(text: str) -> tuple[list[Any], str]:
    """JSON values one after the other, between them blanks and semicolons, and what is behind them and no value."""
    values: list[Any] = []
    decoder, at = json.JSONDecoder(), 0
    while at < len(text):
        if text[at] in " \n\r\t;,":
            at += 1
            continue
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return values, text[at:]
        values += value if isinstance(value, list) else [value]
    return values, ""


_NAME = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"]*)("?)')
_ARGUMENTS = re.compile(r'\s*,\s*"(?:arguments|parameters)"\s*:\s*')


def _begins_call(text: str, known: frozenset[str] | None) -> bool:
    """Whether a text without an end may be the beginning of a call in JSON, of one of the known tools."""
    start = _NAME.match(text)
    if start is None:
        return '{"name":"'.startswith(re.sub(r"\s", "", text))
    name, complete = start.groups()
    behind = re.sub(r"\s", "", text[start.end() :])
    if known is not None and not (name in known if complete else any(k.startswith(name) for k in known)):
        return False
    return any(key.startswith(behind[: len(key)]) for key in (',"arguments":', ',"parameters":'))


def _cut_json_call(text: str) -> Call | None:
    """A call in JSON, with the arguments as far as they go; None without a whole name."""
    if call := json_call(parsed(text)):
        return call
    start = _NAME.match(text)
    if start is None or not start[2]:
        return None
    behind = _ARGUMENTS.match(text, start.end())
    arguments = text[behind.end() :] if behind else ""
    with contextlib.suppress(ValueError, RecursionError):
        arguments = arguments[: json.JSONDecoder().raw_decode(arguments)[1]]
    return call_of(start[1], arguments if arguments.startswith("{") else "")


def json_call(value: Any) -> Call | None:
    """The call that an object with a name and arguments or parameters is; None for any other value."""
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str) or not name:
        return None
    if not {"arguments", "parameters"} & value.keys() and len(value) > 1:  # some other object with a name
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str) and isinstance(parsed(arguments), dict):
        return call_of(name, arguments)
    return call_of(name, json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None


def call_of(name: str, arguments: str) -> Call:
    """A call of texts from JSON. Its escapes may name halves of surrogate pairs, which UTF-8 does not have."""
    return Call(*(text.encode(errors="replace").decode() for text in (name, arguments)))


_XML = re.compile(r"\s*<function=([^>\n]+)>(.*?)(?:</function>)?\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>(.*?)(?:</parameter>|(?=<parameter=)|$)", re.DOTALL)


def _xml_call(text: str, schemas: Schemas) -> Call | None:
    """A call as Qwen3-Coder writes it. A value is JSON unless the tool's schema says that it is a string."""
    call = _XML.fullmatch(text)
    if call is None:
        return None
    properties = schemas.get(call[1], {}).get("properties")
    types = properties if isinstance(properties, dict) else {}
    arguments: dict[str, Any] = {}
    for name, value in _PARAMETER.findall(call[2]):
        value = value.removeprefix("\n").removesuffix("\n")
        schema = types.get(name)
        known = isinstance(schema, dict) and schema.get("type") == "string"
        found = None if known else parsed(value)
        arguments[name] = value if found is None and value.strip() != "null" else found
    return call_of(call[1], json.dumps(arguments, ensure_ascii=False))


def _cut_xml_call(text: str, schemas: Schemas) -> Call | None:
    """A call as Qwen3-Coder writes it, without the end of its arguments where they have none."""
    call = _xml_call(text[: len(text) - overlap(text, "</parameter>")], schemas)
    return call if call is None or "</function>" in text else Call(call.name, call.arguments[:-1], call.id)
