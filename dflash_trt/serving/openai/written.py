"""How a family writes reasoning and calls, by the markers in its chat template, and calls between special tokens.

<|tool_call>call:name{key:<|"|>text<|"|>,other:1}<tool_call|>    Gemma 4
[TOOL_CALLS]name[ARGS]{"key": "text"}                           Mistral
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from dflash_trt.serving.openai.parsing import (
    BareCalls,
    Call,
    Part,
    Plain,
    Schemas,
    Stage,
    TaggedCalls,
    call_of,
    json_call,
    overlap,
    parsed,
)


class Thoughts(NamedTuple):
    """The marks around reasoning. `shown`: they have a text even where special tokens have none."""

    begin: str
    end: str
    shown: bool = True

    def within(self, text: str) -> bool:
        """Whether a prompt ends within a thought that it has begun."""
        return text.rstrip().endswith(self.begin.rstrip())


_THOUGHTS = (
    Thoughts("<think>", "</think>"),
    Thoughts("<|channel>thought\n", "<channel|>", shown=False),
    Thoughts("[THINK]", "[/THINK]", shown=False),
)
_CALLS = {"<tool_call>": "</tool_call>", "<|tool_call>": "<tool_call|>"}
MISTRAL, ARGUMENTS = "[TOOL_CALLS]", "[ARGS]"
# A model that has called goes on with this token, where what the tool answers belongs.
RESPONSE = "<|tool_response>"
QUOTE = '<|"|>'
_LITERAL = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null")


def thoughts_of(template: str) -> Thoughts | None:
    """How a template's family marks reasoning; None if it has none. The channels of gpt-oss are read otherwise."""
    return next((t for t in _THOUGHTS if t.begin.rstrip() in template or t.end in template), None)


def has_special_marks(template: str) -> bool:
    """Whether marks of this template are special tokens, which must have a text to be read."""
    thoughts = thoughts_of(template)
    return "<|tool_call>" in template or MISTRAL in template or (thoughts is not None and not thoughts.shown)


def marks_of_calls(template: str) -> list[tuple[str, str]]:
    """Marks around calls, where they have both."""
    return [(begin, end) for begin, end in _CALLS.items() if begin in template]


def notation_of(template: str) -> str:
    """What marks the calls of this template's family; an empty text if it has none."""
    bare = "<|python_tag|>" if "python_tag" in template or '"parameters"' in template else ""
    return next((mark for mark in ("<|tool_call>", MISTRAL, "<tool_call>") if mark in template), bare)


def calls_of(template: str, schemas: Schemas | None, *, known: bool = False) -> Stage:
    """The stage that finds calls as this template's family writes them. Without tools there are none.

    known: bare objects with the names of other functions are content.
    """
    if schemas is None:
        return Plain()
    made: dict[str, Callable[[], Stage]] = {
        "<|tool_call>": GemmaCalls,
        MISTRAL: MistralCalls,
        "<tool_call>": lambda: TaggedCalls(schemas),
        "<|python_tag|>": lambda: BareCalls(schemas if known else None),
        "": Plain,
    }
    return made[notation_of(template)]()


class GemmaCalls(Stage):
    """Calls between `<|tool_call>` and `<tool_call|>`. A block that is no call stays content, with its marks."""

    _begin, _end = "<|tool_call>", "<tool_call|>"

    def __init__(self) -> None:
        self._held, self._inside, self._behind = "", False, False

    def push(self, text: str) -> Iterator[Part]:
        self._held += text
        while True:
            mark = self._end if self._inside else self._begin
            before, ends, rest = self._held.partition(mark)
            if self._inside and not ends:
                return
            if self._inside:
                yield from self._block(before, mark)
            else:
                size = 0 if ends else overlap(before, mark)
                shown, rest = before[: len(before) - size], rest if ends else before[len(before) - size :]
                shown = shown.lstrip() if self._behind else shown
                if shown:
                    self._behind = False
                    yield Part("content", shown)
            self._held = rest
            if not ends:
                return
            self._inside = not self._inside

    def _block(self, text: str, mark: str) -> Iterator[Part]:
        call = _gemma_call(text)
        self._behind = call is not None
        yield Part("call", call=call) if call else Part("content", f"{self._begin}{text}{mark}")

    def finish(self, *, cut: bool = False) -> Iterator[Part]:
        if self._inside and cut:
            text = self._held[: len(self._held) - overlap(self._held, self._end)]
            if call := _gemma_call(text, cut=True):
                yield Part("call", call=call)
        elif self._inside:
            yield from self._block(self._held, "")
        elif self._held:
            yield Part("content", self._held)
        self._held, self._inside = "", False


def _gemma_call(text: str, *, cut: bool = False) -> Call | None:
    """A call with the arguments as JSON; `cut`: as far as they go."""
    name, brace, rest = text.strip().removeprefix("call:").partition("{")
    if not text.strip().startswith("call:") or not name.strip() or not (brace or cut):
        return None
    arguments = _as_json(brace + rest)
    if cut or isinstance(parsed(arguments), dict):
        return call_of(name.strip(), arguments)
    return None


def _as_json(text: str) -> str:
    """Gemma's arguments as JSON: bare keys, and texts between `<|"|>`. A text that ends early gives as much of it."""
    made, at = list[str](), 0
    while at < len(text):
        if text.startswith(QUOTE, at):
            end = text.find(QUOTE, at + len(QUOTE))
            whole = json.dumps(text[at + len(QUOTE) : end if end >= 0 else None], ensure_ascii=False)
            made.append(whole if end >= 0 else whole[:-1])
            at = end + len(QUOTE) if end >= 0 else len(text)
        elif text[at] in "{}[],:":
            made.append({",": ", ", ":": ": "}.get(text[at], text[at]))
            at += 1
        elif text[at].isspace():
            at += 1
        else:
            end = min(
                (n for mark in (*"{}[],:", QUOTE) if (n := text.find(mark, at)) >= 0), default=len(text)
            )
            word = text[at:end].strip()
            if _LITERAL.fullmatch(word) and text[end : end + 1] != ":":
                made.append(word)
            else:
                whole = json.dumps(word, ensure_ascii=False)
                made.append(whole[:-1] if end == len(text) else whole)
            at = end
    return "".join(made)


class MistralCalls(Stage):
    """Calls that `[TOOL_CALLS]` begins: a name, `[ARGS]` and a JSON object, or in older models a list of calls."""

    def __init__(self) -> None:
        self._held, self._inside = "", False

    def push(self, text: str) -> Iterator[Part]:
        self._held += text
        while True:
            before, begins, rest = self._held.partition(MISTRAL)
            if self._inside and not begins:
                return
            if self._inside:
                yield from self._block(before)
            else:
                size = 0 if begins else overlap(before, MISTRAL)
                if shown := before[: len(before) - size]:
                    yield Part("content", shown)
                rest = rest if begins else before[len(before) - size :]
            self._held = rest
            if not begins:
                return
            self._inside = True

    def _block(self, text: str, *, cut: bool = False) -> Iterator[Part]:
        name, begins, arguments = text.strip().partition(ARGUMENTS)
        if begins and name.strip() and (cut or isinstance(parsed(arguments), dict)):
            yield Part("call", call=call_of(name.strip(), arguments.strip()))
            return
        values = parsed(text)
        calls = [json_call(value) for value in (values if isinstance(values, list) else [values])]
        if all(calls):
            for call in calls:
                yield Part("call", call=call)
        elif not cut:
            yield Part("content", f"{MISTRAL}{text}")

    def finish(self, *, cut: bool = False) -> Iterator[Part]:
        if self._inside:
            yield from self._block(self._held, cut=cut)
        elif self._held:
            yield Part("content", self._held)
        self._held, self._inside = "", False
