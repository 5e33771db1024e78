"""How a family writes reasoning and calls, by the marks in its chat template.

| template has | reasoning | calls |
|---|---|---|
| <think> | between <think> and </think> (Qwen3, DeepSeek) | |
| <tool_call> | | in tags, as JSON (Qwen, Hermes) or as tags again (Qwen3-Coder) |
| "parameters" | | bare JSON objects (Llama 3) |
| <|channel>, <|tool_call> | Gemma 4 | between special tokens |
| [THINK], [TOOL_CALLS] | Mistral | from a special token on |
| <|channel|> | gpt-oss: channels.py | messages |
| <atem: | Muse Glimmer: channels.py | messages |
"""

from __future__ import annotations

import re
from typing import NamedTuple

from dflash_trt.serving.openai.calls import ARGUMENTS, Schemas, gemma_call, mistral_call, tagged_call
from dflash_trt.serving.openai.channels import by_recipient
from dflash_trt.serving.openai.parsing import BARE, BareCalls, MarkedCalls, Notation, Stage


def _kind_of_tagged(start: str) -> str | None:
    if start.startswith(("{", "<function=")):
        return "json" if start[0] == "{" else "tags"
    return None if "<function=".startswith(start) else ""


def _kind_of_gemma(start: str) -> str | None:
    return "other" if start.startswith("call:") else None if "call:".startswith(start) else ""


def _kind_of_mistral(start: str) -> str | None:
    name = re.match(r"[\w.-]*\s*", start)
    rest = start[name.end() :] if name else start
    return "json" if rest.startswith(ARGUMENTS) else None if ARGUMENTS.startswith(rest) else ""


TAG = Notation("<tool_call>", "</tool_call>", _kind_of_tagged, tagged_call)
GEMMA = Notation("<|tool_call>", "<tool_call|>", _kind_of_gemma, gemma_call)
MISTRAL = Notation("[TOOL_CALLS]", "", _kind_of_mistral, mistral_call)
# A model that has called goes on with this token, where what the tool answers belongs.
RESPONSE = "<|tool_response>"


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


def thoughts_of(template: str) -> Thoughts | None:
    """How a template's family marks reasoning; None if it has none. The channels of gpt-oss are read otherwise."""
    return next((t for t in _THOUGHTS if t.begin.rstrip() in template or t.end in template), None)


def has_special_marks(template: str) -> bool:
    """Whether marks of this template are special tokens, which must have a text to be read."""
    thoughts = thoughts_of(template)
    special = thoughts is not None and not thoughts.shown
    return GEMMA.begin in template or MISTRAL.begin in template or special


def marks_of_calls(template: str) -> list[tuple[str, str]]:
    """Marks around calls, where they have both."""
    return [(each.begin, each.end) for each in (TAG, GEMMA) if each.begin in template]


def notation_of(template: str) -> Notation | str:
    """How this template's family marks calls; BARE for objects without marks, "" if it has none."""
    if by_recipient(template):
        return ""
    bare = BARE if "python_tag" in template or '"parameters"' in template else ""
    return next((each for each in (GEMMA, MISTRAL, TAG) if each.begin in template), bare)


def calls_of(template: str, schemas: Schemas | None) -> Stage:
    """The stage that reads calls as this template's family writes them. Without tools there are none."""
    notation = notation_of(template)
    if schemas is None or not notation:
        return Stage()
    if isinstance(notation, Notation):
        return MarkedCalls(notation, schemas)
    return BareCalls(schemas)
