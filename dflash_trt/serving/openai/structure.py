"""The form that an answer must have: `response_format`, `structured_outputs`, and calls that are required."""

from __future__ import annotations

import json
from typing import Any

from dflash_trt.decoding.sampling.structure import MOST_CHARACTERS, WHITESPACE
from dflash_trt.serving.openai.errors import ApiError, Names
from dflash_trt.serving.openai.frames import Frame
from dflash_trt.serving.openai.gemma_arguments import check_keywords, schema_at
from dflash_trt.serving.openai.protocol import ChatRequest, NamedTool, SamplingFields, Tool

_GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")


def asked(body: SamplingFields) -> dict[str, Any] | None:
    """`StructuredOutputs`' fields of `structured_outputs` and `guided_json` and the others; None without them.

    Raises ApiError.
    """
    guided = {name: getattr(body, name) for name in _GUIDED if getattr(body, name) is not None}
    if guided and (len(guided) > 1 or body.structured_outputs is not None):
        given = [*guided, *(["structured_outputs"] if body.structured_outputs is not None else [])]
        raise ApiError(400, f"{' and '.join(given)} are given, expected one", given[0])
    if body.structured_outputs is not None:
        return body.structured_outputs.model_dump(exclude_none=True, by_alias=True)
    return {name.removeprefix("guided_"): value for name, value in guided.items()} or None


def names(body: SamplingFields, source: str = "") -> Names:
    """The client's names for the fields of the form that it asked for. `source`: the field that has no such fields."""
    fields = "json|json_object|regex|choice|grammar"
    if source:
        return [(rf"^(?:structured_outputs|{fields})\b", source)]
    if body.structured_outputs is not None:
        return [(rf"^({fields})\b", r"structured_outputs.\1")]
    return [(rf"^({fields})\b", r"guided_\1")]


def of_format(body: ChatRequest) -> dict[str, Any] | None:
    """`StructuredOutputs`' fields for a chat's format; None for free text. Raises ApiError."""
    form = body.response_format
    if (structure := asked(body)) is not None:
        if form is not None and form.type != "text":
            raise ApiError(
                400, "response_format and structured_outputs are given, expected one", "response_format"
            )
        return structure
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return {"json_object": True}
    assert form.json_schema is not None
    return {"json": form.json_schema.schema_ or {}}


def of_calls(
    body: ChatRequest, tools: list[Tool], frame: Frame | None, form: dict[str, Any] | None
) -> dict[str, Any] | None:
    """The grammar of an answer that has calls, or may have them instead of a `response_format`; None where any text
    will do, or only the format. Raises ApiError.

    form: what `of_format` gave.
    """
    choice = body.tool_choice
    required = not (choice is None or (isinstance(choice, str) and choice != "required"))
    optional = bool(tools) and form is not None and not required and body.response_format is not None
    if not (required or optional):
        return None
    functions = [tool.function for tool in tools]
    if isinstance(choice, NamedTool):
        functions = [each for each in functions if each.name == choice.function.name]
        if not functions:
            raise ApiError(
                400, f"tool_choice names {choice.function.name}, which is not in tools", "tool_choice"
            )
    if frame is None:
        if optional:
            return None
        raise ApiError(
            400, "tool_choice: this model's chat template has no form for required calls", "tool_choice"
        )
    alone = frame.between is None or body.parallel_tool_calls is False or isinstance(choice, NamedTool)
    rules = [
        f"start: {frame.begin} {'(calls | format)' if optional else 'calls'}",
        "calls: call " + ("" if alone else f"({frame.between} call)* ") + frame.after,
        f"call: {' | '.join(f'call{i}' for i in range(len(functions)))}",
    ]
    closing = Closing()
    for i, function in enumerate(functions):
        rules.append(f"call{i}: {frame.call(function.name, f'arguments{i}')}")
        rules += frame.arguments(f"arguments{i}", _object(function.parameters, closing))
    if optional:
        assert form is not None
        schema = form.get("json", {"type": "object"})
        spaces = {"x-guidance": {"whitespace_pattern": WHITESPACE}}
        rules += [f"format: {frame.content} text", f"text: %json {json.dumps(schema | spaces)}"]
    return {"grammar": "\n".join(rules) + "\n"}


def _object(schema: dict[str, Any] | None, closing: Closing) -> dict[str, Any]:
    """The schema of arguments, which are an object. Without one there are none."""
    if schema is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    kinds = schema.get("type", "object")
    if kinds == "object" or (isinstance(kinds, list) and "object" in kinds):
        return closing.closed(schema) | ({} if "$ref" in schema else {"type": "object"})
    return {"type": "object"}


# Keywords that may hold schemas for other values than the one that a schema is about: by name, in a list, or one.
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_OTHERS = ("items", "prefixItems", "additionalProperties", "contains")
_PARTS = ("allOf", "anyOf", "oneOf")  # they hold lists of schemas for the same value
_TOLD = ("additionalProperties", "unevaluatedProperties", "if", "then", "else", "not", "dependentSchemas")


class Closing:
    """Makes schemas whose objects have no properties but those that they declare.

    Without `additionalProperties` a JSON schema allows any others, and a model then invents some. Objects that have it,
    or that declare no property, stay as they are.
    """

    def __init__(self) -> None:
        # Of what is put in the place of references, which may double it each time.
        self._left = MOST_CHARACTERS
        self._parts: dict[str, tuple[Any, int]] = {}

    def closed(self, schema: dict[str, Any]) -> dict[str, Any]:
        """A closed copy of a function's schema. Raises ApiError if too much is put in the place of references."""
        self._root, self._parts = schema, {}
        try:
            made: dict[str, Any] = self._close(schema)
        except RecursionError:
            raise ApiError(
                400, "tools has a schema whose references are nested too deeply", "tools"
            ) from None
        return made

    def _part(self, place: str) -> Any:
        """What a reference refers to; None if there is nothing."""
        if place not in self._parts:
            part = schema_at(self._root, place)
            self._parts[place] = part, len(json.dumps(part))
        part, size = self._parts[place]
        self._left -= size
        if self._left < 0:
            text = f"tools has schemas with over {MOST_CHARACTERS} characters where their references are"
            raise ApiError(400, text, "tools")
        return part

    def _close(self, schema: Any, seen: tuple[str, ...] = ()) -> Any:
        """seen: the references that led here, which are not followed again."""
        if not isinstance(schema, dict):
            return schema
        parts = sum(len(schema[key]) for key in _PARTS if isinstance(schema.get(key), list))
        together = ("allOf" in schema and parts > 1) or ("$ref" in schema and parts > 0)
        if together or ("properties" in schema and (parts or "$ref" in schema)):
            # Each part would refuse the properties of the others. So the parts stay open, and the whole declares all.
            made = self._open(schema, seen)
            names = self._names(made)
            if names is not None:
                made["properties"] = dict.fromkeys(names, True) | made.get("properties", {})
                made["additionalProperties"] = False
            return made
        made = self._others(schema, seen)
        for key in _PARTS:
            if isinstance(schema.get(key), list):
                made[key] = [self._close(each, seen) for each in schema[key]]
        if isinstance(schema.get("properties"), dict) and not any(key in schema for key in _TOLD):
            made["additionalProperties"] = False
        return made

    def _others(self, schema: dict[str, Any], seen: tuple[str, ...]) -> dict[str, Any]:
        """A copy, in which the schemas for other values are closed."""
        check_keywords(schema)
        made = dict(schema)
        for key in _NAMED:
            if isinstance(schema.get(key), dict):
                made[key] = {name: self._close(each, seen) for name, each in schema[key].items()}
        for key in _OTHERS:
            if key in schema:
                value = schema[key]
                several = isinstance(value, list)
                made[key] = [self._close(e, seen) for e in value] if several else self._close(value, seen)
        return made

    def _open(self, schema: Any, seen: tuple[str, ...]) -> Any:
        """The same for a part, with the parts that it refers to."""
        if not isinstance(schema, dict):
            return schema
        made = self._others(schema, seen)
        for key in _PARTS:
            if isinstance(schema.get(key), list):
                made[key] = [self._open(each, seen) for each in schema[key]]
        place = schema.get("$ref")
        if isinstance(place, str) and place not in seen and (target := self._part(place)) is not None:
            del made["$ref"]
            made["allOf"] = [*made.get("allOf", []), self._open(target, (*seen, place))]
        return made

    def _names(self, schema: Any) -> list[str] | None:
        """The properties that a schema and its parts declare; None if one says something about all others."""
        if not isinstance(schema, dict) or any(key in schema for key in (*_TOLD, "$ref")):
            return None
        names = list(schema["properties"]) if isinstance(schema.get("properties"), dict) else []
        for part in (part for key in _PARTS for part in schema.get(key, ())):
            if (more := self._names(part)) is None:
                return None
            names += more
        return names
