"""The grammar of a family's calls, in Lark's syntax, for answers that must have calls or may have them.

Marks that are special tokens stand in it as ids, because no text of a grammar matches such a token.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dflash_trt.serving.openai.calls import ARGUMENTS, QUOTE
from dflash_trt.serving.openai.gemma_arguments import GemmaArguments
from dflash_trt.serving.openai.written import GEMMA, MISTRAL, RESPONSE, TAG, notation_of

# As Python writes JSON, which chat templates show. A model that may write blanks sometimes writes no end.
_BLANKS = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}


def _json_rules(rule: str, schema: dict[str, Any]) -> list[str]:
    # A rule of its own, so that the references of the schema begin at its root.
    return [f"{rule}: %json {json.dumps(schema | _BLANKS)}"]


@dataclass(frozen=True)
class Frame:
    """What stands around calls.

    call: the grammar of one call, from the function's name and the name of the rule of its arguments.
    between: what separates calls; None where an answer has one call. after: what may follow the last one.
    begin, content: how an answer begins, and how one that is no call goes on.
    arguments: the rules of a function's arguments, from the first one's name and the schema. Raises ApiError.
    """

    call: Callable[[str, str], str]
    between: str | None = ""
    after: str = ""
    begin: str = ""
    content: str = ""
    arguments: Callable[[str, dict[str, Any]], list[str]] = _json_rules


def frame_of(template: str, token_id: Callable[[str], int | None], header: str) -> Frame | None:
    """The frame of this template's family, None where there is none.

    token_id: the id of a mark; None where the tokenizer has no such token. header: the prompt from its last
    `<|start|>` on.
    """

    def mark(text: str) -> str:
        return json.dumps(text) if (number := token_id(text)) is None else f"<[{number}]>"

    if "<|channel|>" in template:
        return _channels(mark, token_id("<|constrain|>") is not None, header)
    notation = notation_of(template)
    if notation == GEMMA:
        begin, end, quote = (mark(each) for each in (GEMMA, "<tool_call|>", QUOTE))
        return Frame(
            lambda name, rule: f"{begin} {json.dumps(f'call:{name}')} {rule} {end}",
            # Where a tool's answer belongs the model goes on with this token, at which its own answer ends.
            after=f"({mark(RESPONSE)})?",
            arguments=lambda rule, schema: GemmaArguments(quote, "dictsort" in template).rules(rule, schema),
        )
    if notation == MISTRAL:
        return Frame(lambda name, rule: f"{mark(MISTRAL)} {json.dumps(name)} {mark(ARGUMENTS)} {rule}")
    if notation == TAG:
        return Frame(
            lambda name, rule: f'"<tool_call>\\n" {_object(name, "arguments", rule)} "\\n</tool_call>"',
            between='"\\n"',
        )
    if notation:
        return Frame(lambda name, rule: _object(name, "parameters", rule), between='"; "')
    return None


def _object(name: str, key: str, rule: str) -> str:
    start = f'{{"name": {json.dumps(name)}, "{key}": '
    return f'{json.dumps(start)} {rule} "}}"'


def _channels(mark: Callable[[str], str], constrain: bool, header: str) -> Frame:
    """gpt-oss: a message to the function. Its end token ends the answer, so there is one call."""
    channel, message = mark("<|channel|>"), mark("<|message|>")
    kind = f'" " {mark("<|constrain|>")} "json"' if constrain else '" json"'
    return Frame(
        lambda name, rule: f"{json.dumps(f'commentary to=functions.{name}')} {kind} {message} {rule}",
        between=None,
        # A message that the prompt has begun ends first.
        begin=(f'{mark("<|end|>")} {mark("<|start|>")} "assistant" ' if "<|message|>" in header else "")
        + channel,
        content=f'"final" {message}',
    )
