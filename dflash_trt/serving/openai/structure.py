"""The form that an answer must have: `response_format`, `structured_outputs`, and calls that are required."""

from __future__ import annotations

import json
from typing import Any

from dflash_trt.serving.openai.errors import ApiError
from dflash_trt.serving.openai.parsing import BareCalls, Stage, TaggedCalls
from dflash_trt.serving.openai.protocol import ChatRequest, NamedTool, Tool


def of_format(body: ChatRequest) -> dict[str, Any] | None:
    """`StructuredOutputs`' fields for a chat's format; None for free text. Raises ApiError."""
    form = body.response_format
    if body.structured_outputs is not None:
        if form is not None and form.type != "text":
            raise ApiError(
                400, "response_format and structured_outputs are given, expected one", "response_format"
            )
        return body.structured_outputs.model_dump(exclude_none=True, by_alias=True)
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return {"json_object": True}
    assert form.json_schema is not None
    return {"json": form.json_schema.schema_ or {}}


def of_calls(body: ChatRequest, tools: list[Tool], calls: Stage) -> dict[str, Any] | None:
    """The grammar of an answer that must be a call; None where it need not be. Raises ApiError."""
    choice = body.tool_choice
    if choice is None or (isinstance(choice, str) and choice != "required"):
        return None
    functions = [tool.function for tool in tools]
    if isinstance(choice, NamedTool):
        functions = [each for each in functions if each.name == choice.function.name]
        if not functions:
            raise ApiError(
                400, f"tool_choice names {choice.function.name}, which is not in tools", "tool_choice"
            )
    if isinstance(calls, TaggedCalls):
        key, frame = "arguments", ('"<tool_call>\\n" ', ' "\\n</tool_call>"')
    elif isinstance(calls, BareCalls):
        key, frame = "parameters", ("", "")
    else:
        raise ApiError(
            400, "tool_choice: this model's chat template has no form for required calls", "tool_choice"
        )
    rules = [
        f"start: {frame[0]}call{frame[1]}",
        f"call: {' | '.join(f'call{i}' for i in range(len(functions)))}",
    ]
    for i, function in enumerate(functions):
        # The arguments are a rule of their own, so that the references of their schema begin at its root.
        before = f'{{"name": {json.dumps(function.name)}, "{key}": '
        rules.append(f'call{i}: {json.dumps(before)} arguments{i} "}}"')
        rules.append(f"arguments{i}: %json {json.dumps(_object(function.parameters) | _BLANKS)}")
    return {"grammar": "\n".join(rules) + "\n"}


# As Python writes JSON, which chat templates show. A model that may write blanks sometimes writes no end.
_BLANKS = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}


def _object(schema: dict[str, Any] | None) -> dict[str, Any]:
    """The schema of arguments, which are an object. Without one there are none."""
    if schema is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    kinds = schema.get("type", "object")
    if kinds == "object" or (isinstance(kinds, list) and "object" in kinds):
        return schema if "$ref" in schema else schema | {"type": "object"}
    return {"type": "object"}
