"""How a family writes reasoning and calls, by the marks in its chat template.

| template has | reasoning | calls |
|---|---|---|
| <think> | between <think> and </think> (Qwen3, DeepSeek) | |
| <tool_call> | | in tags, as JSON (Qwen, Hermes) or as tags again (Qwen3-Coder) |
| "parameters" | | bare JSON objects (Llama 3) |
| <|channel>, <|tool_call> | Gemma 4 | between special tokens |
| [THINK], [TOOL_CALLS] | Mistral | from a special token on |
| <|channel|> | gpt-oss: channels.py | messages |
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from dflash_trt.serving.openai.calls import Call, Schemas, gemma_call, mistral_calls, tagged_call
from dflash_trt.serving.openai.parsing import BareCalls, MarkedCalls, Stage


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
TAG, GEMMA, MISTRAL, BARE = "<tool_call>", "<|tool_call>", "[TOOL_CALLS]", "<|python_tag|>"
_ENDS = {TAG: "</tool_call>", GEMMA: "<tool_call|>"}
# A model that has called goes on with this token, where what the tool answers belongs.
RESPONSE = "<|tool_response>"


def thoughts_of(template: str) -> Thoughts | None:
    """How a template's family marks reasoning; None if it has none. The channels of gpt-oss are read otherwise."""
    return next((t for t in _THOUGHTS if t.begin.rstrip() in template or t.end in template), None)


def has_special_marks(template: str) -> bool:
    """Whether marks of this template are special tokens, which must have a text to be read."""
    thoughts = thoughts_of(template)
    return GEMMA in template or MISTRAL in template or (thoughts is not None and not thoughts.shown)


def marks_of_calls(template: str) -> list[tuple[str, str]]:
    """Marks around calls, where they have both."""
    return [(begin, end) for begin, end in _ENDS.items() if begin in template]


def notation_of(template: str) -> str:
    """What marks the calls of this template's family; an empty text if it has none."""
    bare = BARE if "python_tag" in template or '"parameters"' in template else ""
    return next((mark for mark in (GEMMA, MISTRAL, TAG) if mark in template), bare)


def calls_of(template: str, schemas: Schemas | None, *, known: bool = False) -> Stage:
    """The stage that reads calls as this template's family writes them. Without tools there are none.

    known: bare objects with the names of other functions are content.
    """
    notation = notation_of(template)
    if schemas is None or not notation:
        return Stage()
    if notation == BARE:
        return BareCalls(schemas if known else None)
    readers: dict[str, Callable[..., list[Call]]]
    readers = {TAG: partial(tagged_call, schemas=schemas), GEMMA: gemma_call, MISTRAL: mistral_calls}
    return MarkedCalls(notation, _ENDS.get(notation, ""), readers[notation])
