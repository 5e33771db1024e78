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
from dataclasses import dataclass
from typing import NamedTuple

from dflash_trt.serving.openai.calls import (
    ARGUMENTS,
    QWEN_TAGS,
    Schemas,
    gemma_calls,
    mistral_calls,
    tagged_calls,
)  # fmt: skip
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


TAG = Notation("<tool_call>", "</tool_call>", _kind_of_tagged, tagged_calls)
GEMMA = Notation("<|tool_call>", "<tool_call|>", _kind_of_gemma, gemma_calls)
MISTRAL = Notation("[TOOL_CALLS]", "", _kind_of_mistral, mistral_calls)
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
_MUSE = "<atem:"  # its calls, which its template describes


@dataclass(frozen=True)
class Written:
    """How a template's family writes answers.

    channels: in messages of several channels, or, with `recipients`, in messages to recipients.
    thoughts: the marks of reasoning; None if it has none, or channels for it.
    notation: how it marks calls; BARE for objects without marks, "" if it has none.
    tags: whether it shows calls in Qwen3-Coder's tags. call_marks: marks around calls, where they have both.
    special: whether marks are special tokens, which must have a text to be read.
    developer: whether its messages may be of the role developer.
    """

    channels: bool
    recipients: bool
    thoughts: Thoughts | None
    notation: Notation | str
    tags: bool
    call_marks: list[tuple[str, str]]
    special: bool
    developer: bool

    def calls(self, schemas: Schemas | None) -> Stage:
        """The stage that reads calls. Without tools there are none."""
        if schemas is None or not self.notation:
            return Stage()
        if isinstance(self.notation, Notation):
            return MarkedCalls(self.notation, schemas)
        return BareCalls(schemas)


def _begins(notation: Notation) -> list[str]:
    """How calls begin. The mark alone may be one that a text is about."""
    if notation != TAG:
        return [notation.begin]
    return [f"{TAG.begin}{blank}{start}" for blank in ("", " ", "\n") for start in ("{", "<function=")]


def written_by(template: str) -> Written:
    """How the family of this chat template writes answers."""
    thoughts = next((t for t in _THOUGHTS if t.begin.rstrip() in template or t.end in template), None)
    recipients = _MUSE in template
    bare = BARE if "python_tag" in template or '"parameters"' in template else ""
    notation = next((marks for marks in (GEMMA, MISTRAL, TAG) if marks.begin in template), bare)
    special = GEMMA.begin in template or MISTRAL.begin in template
    return Written(
        channels=recipients or "<|channel|>" in template,
        recipients=recipients,
        thoughts=thoughts,
        notation="" if recipients else notation,
        tags=QWEN_TAGS.call in template,
        call_marks=[
            (begin, marks.end)
            for marks in (TAG, GEMMA)
            if marks.begin in template
            for begin in _begins(marks)
        ],
        special=special or (thoughts is not None and not thoughts.shown),
        developer="developer" in template,
    )
