"""The form that an answer must have: `response_format`, `structured_outputs`, and calls that are required.

Calls are enforced by a grammar in Lark's syntax, as the family writes them. Marks that are special tokens stand in it
as ids, because no text of a grammar matches such a token. A schema holds as it is given: an object without
`additionalProperties` may have others.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from dflash_trt.decoding.sampling.structure import WHITESPACE
from dflash_trt.serving.openai.call_grammar import BLANKS, NoFormError, gemmas, tagged
from dflash_trt.serving.openai.calls import ARGUMENTS, MUSE_TAGS, QUOTE, QWEN_TAGS
from dflash_trt.serving.openai.errors import ApiError, Names
from dflash_trt.serving.openai.parsing import BARE
from dflash_trt.serving.openai.protocol import SamplingFields
from dflash_trt.serving.openai.reading import Json, ToolChoice, refuse
from dflash_trt.serving.openai.written import GEMMA, MISTRAL, TAG, Written

_FIELDS = ("json", "json_object", "regex", "choice", "grammar", "disable_any_whitespace")


def form_of(body: SamplingFields) -> Json | None:
    """`StructuredOutputs`' fields for the form that a request asks for; None for free text. Raises ApiError."""
    form = None if body.response_format is None else _of_format(body.response_format)
    if body.structured_outputs is None:
        return form
    if form is not None:
        text = "response_format and structured_outputs are given, expected one"
        raise ApiError(400, text, "response_format")
    return _of_fields(body.structured_outputs)


def _of_fields(form: Any) -> Json:
    if not isinstance(form, dict):
        refuse("structured_outputs", form, "an object")
    asked = {name: value for name, value in form.items() if value is not None and value is not False}
    if unknown := [name for name in asked if name not in _FIELDS]:
        place = f"structured_outputs.{unknown[0]}"
        raise ApiError(400, f"{place} is not a field that this server knows; leave it out", place)
    return asked


def _of_format(form: Any) -> Json | None:
    """`response_format`, or `text.format` of a response, whose schema is not nested."""
    kind = form.get("type") if isinstance(form, dict) else refuse("response_format", form, "an object")
    if kind == "text":
        return None
    if kind == "json_object":
        schema = form.get("schema")
        if schema is None:
            return {"json_object": True}
    elif kind == "json_schema":
        inner = form.get("json_schema", form)
        if not isinstance(inner, dict):
            refuse("response_format.json_schema", inner, "an object with a schema")
        schema = inner.get("schema")
    else:
        refuse("response_format.type", kind, "text, json_object or json_schema")
    if not isinstance(schema, dict | None):
        refuse("response_format.json_schema.schema", schema, "a JSON schema")
    return {"json": schema or {}}


def names_of(body: SamplingFields, *, calls: bool = False) -> Names:
    """The client's names for the fields of the form that it asked for. calls: the form is that of calls."""
    fields = "|".join(_FIELDS[:-1])
    if calls or body.response_format is not None:
        return [(rf"^(?:structured_outputs|{fields})\b", "tools" if calls else "response_format")]
    return [(rf"^({fields})\b", r"structured_outputs.\1")]


# From the name of a rule, that of a function and the schema of its arguments to the rules of a call, that one first.
Rules = Callable[[str, str, Json], list[str]]


@dataclass(frozen=True)
class Frame:
    """What stands around calls.

    call: the grammar of one call. Raises NoFormError.
    between: what separates calls; None where an answer has one call.
    begin, content: how an answer begins, and how one that is no call goes on.
    """

    call: Rules
    between: str | None = ""
    begin: str = ""
    content: str = ""


def frame_of(written: Written, token_id: Callable[[str], int | None], header: str) -> Frame | None:
    """The frame of a family, None where calls cannot be enforced.

    token_id: the id of a mark; None where the tokenizer has no such token. header: the prompt from its last
    `<|start|>` on.
    """

    def mark(text: str) -> str:
        return json.dumps(text) if (number := token_id(text)) is None else f"<[{number}]>"

    if written.channels and not written.recipients:
        return _channels(mark, token_id("<|constrain|>") is not None, header)
    shared = dict[str, str]()  # rules of all functions
    if written.recipients:
        return _recipients(mark, header, shared)
    if written.notation == GEMMA and token_id(QUOTE) is not None:
        return Frame(lambda rule, name, schema: gemmas(rule, name, schema, mark, shared))
    if written.notation == MISTRAL:
        begin, arguments = mark(MISTRAL.begin), mark(ARGUMENTS)
        return Frame(_in_json(lambda name, inner: f"{begin} {json.dumps(name)} {arguments} {inner}"))
    if written.notation == TAG:
        return Frame(partial(_in_tags, shared) if written.tags else _in_tagged_json, between='"\\n"')
    if written.notation == BARE:
        return Frame(_in_json(lambda name, inner: _call_object(name, "parameters", inner)), between='"; "')
    return None


def _in_json(around: Callable[[str, str], str]) -> Rules:
    """Of a call whose arguments are JSON. around: what stands around the rule of a function's arguments.

    That is a rule of its own, so that the references of the schema begin at its root.
    """
    return lambda rule, name, schema: [
        f"{rule}: {around(name, f'{rule}_arguments')}",
        f"{rule}_arguments: %json {json.dumps(schema | BLANKS)}",
    ]


_in_tagged_json = _in_json(
    lambda name, inner: f'"<tool_call>\\n" {_call_object(name, "arguments", inner)} "\\n</tool_call>"'
)


def _in_tags(shared: dict[str, str], rule: str, name: str, schema: Json) -> list[str]:
    """Where a schema has no form in tags, they are JSON, which is read as well."""
    try:
        inner = tagged(f"{rule}_in", name, schema, QWEN_TAGS, "\n", shared)
    except NoFormError:
        return _in_tagged_json(rule, name, schema)
    return [f'{rule}: "<tool_call>\\n" {rule}_in "\\n</tool_call>"', *inner]


def _call_object(name: str, key: str, rule: str) -> str:
    start = f'{{"name": {json.dumps(name)}, "{key}": '
    return f'{json.dumps(start)} {rule} "}}"'


def _channels(mark: Callable[[str], str], constrain: bool, header: str) -> Frame:
    """gpt-oss: a message to the function. Its end token ends the answer, so there is one call."""
    channel, message = mark("<|channel|>"), mark("<|message|>")
    kind = f'" " {mark("<|constrain|>")} "json"' if constrain else '" json"'
    return Frame(
        _in_json(
            lambda name, inner: f"{json.dumps(f'commentary to=functions.{name}')} {kind} {message} {inner}"
        ),
        between=None,
        # A message that the prompt has begun ends first.
        begin=(f'{mark("<|end|>")} {mark("<|start|>")} "assistant" ' if "<|message|>" in header else "")
        + channel,
        content=f'"final" {message}',
    )


def _recipients(mark: Callable[[str], str], header: str, shared: dict[str, str]) -> Frame:
    """Muse Glimmer: a message to the function, which ends the answer."""
    message = mark("<|message|>")

    def call(rule: str, name: str, schema: Json) -> list[str]:
        head, inner = json.dumps(f" to={name}"), tagged(f"{rule}_in", name, schema, MUSE_TAGS, "", shared)
        block = f'"<atem:function_calls>\\n" {rule}_in "\\n</atem:function_calls>"'
        return [f"{rule}: {head} {message} {block}", *inner]

    begun = "<|message|>" in header
    begin = f'{mark("<|eom|>")} {mark("<|start|>")} "assistant"' if begun else ""
    return Frame(call, between=None, begin=begin, content=f'" to=user" {message}')


def calls_form(
    choice: ToolChoice, tools: Sequence[Json], frame: Frame | None, *, single: bool, beside: Json | None
) -> Json | None:
    """The grammar of an answer that has calls, or may have them instead of the form `beside`; None where any text will
    do, or only that form. Raises ApiError.

    single: no more than one call.
    """
    required = choice.mode == "required"
    if not required and (beside is None or not tools):
        return None
    functions = [tool["function"] for tool in tools]
    if frame is None:
        if not required:
            return None
        raise ApiError(
            400,
            "tool_choice: calls cannot be required in the notation of this model's chat template",
            "tool_choice",
        )
    alone = frame.between is None or single
    rules = [
        f"start: {frame.begin} {'calls' if required else '(calls | format)'}",
        "calls: call " + ("" if alone else f"({frame.between} call)*"),
        f"call: {' | '.join(f'call{i}' for i in range(len(functions)))}",
    ]
    for i, function in enumerate(functions):
        try:
            rules += frame.call(f"call{i}", function["name"], _arguments(function.get("parameters")))
        except NoFormError as error:
            if not required:
                return None
            text = f"tools: {function['name']} has {error}, for which calls of this model have no form"
            raise ApiError(400, text, "tools") from None
    if not required:
        assert beside is not None
        schema = json.dumps(
            beside.get("json", {"type": "object"}) | {"x-guidance": {"whitespace_pattern": WHITESPACE}}
        )
        rules += [f"format: {frame.content} text", f"text: %json {schema}"]
    return {"grammar": "\n".join(rules) + "\n"}


def _arguments(schema: Json | None) -> Json:
    """The schema of arguments, which are an object. Without one there are none."""
    if schema is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    kinds = schema.get("type", "object")
    if kinds == "object" or (isinstance(kinds, list) and "object" in kinds):
        return schema | ({} if "$ref" in schema else {"type": "object"})
    return {"type": "object"}
