"""A JSON schema as a grammar of the notation in which Gemma 4 writes a call's arguments.

    {city:<|"|>Borvik<|"|>,days:3,tags:[<|"|>a<|"|>],exact:true}

It has bare keys and no blanks, and texts stand as they are between marks that are a token.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from dflash_trt.errors import quoted
from dflash_trt.serving.openai.errors import ApiError

# Keywords that refuse no value, or that describe only.
_NO_MATTER = frozenset(
    ("title", "description", "default", "examples", "format", "deprecated", "readOnly", "writeOnly", "strict")
) | {"$schema", "$id", "$comment", "$defs", "definitions", "nullable"}
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_OF_TYPE = {
    "object": ("properties", "required", "additionalProperties"),
    "array": ("items", "minItems", "maxItems"),
    "string": ("pattern", "minLength", "maxLength"),
    "number": _NUMBERS,
    "integer": _NUMBERS,
    "boolean": (),
    "null": (),
}
_CHOICES = ("enum", "const", "anyOf", "oneOf", "allOf", "$ref")
_KNOWN = _NO_MATTER.union(["type", *_CHOICES], *_OF_TYPE.values())
# The types of keywords' values.
_TYPES: dict[str, tuple[Any, str]] = {
    **dict.fromkeys(("properties", "patternProperties", "$defs", "definitions"), (dict, "an object")),
    **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems", "enum"), (list, "a list")),
    **dict.fromkeys(("minItems", "maxItems", "minLength", "maxLength"), ((int, float), "a number")),
    **dict.fromkeys(("$ref", "pattern"), (str, "a text")),
    "required": (list, "a list of texts"),
    "type": ((str, list), "a text or a list of texts"),
}
_KEY = r"/[^{}\[\],:<\s]+/"


def schema_at(root: dict[str, Any], place: str) -> Any:
    """What a reference such as #/$defs/NAME refers to in a schema; None if there is nothing."""
    schema: Any = root
    for name in place.removeprefix("#").split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        schema = schema.get(name) if isinstance(schema, dict) else None
    return schema if place.startswith("#") else None


def check_keywords(schema: dict[str, Any]) -> None:
    """Raise ApiError for a keyword whose value has a type that no schema has there."""
    for key in schema.keys() & _TYPES.keys():
        value, (types, named) = schema[key], _TYPES[key]
        texts = value if key in ("type", "required") and isinstance(value, list) else ()
        if (
            not isinstance(value, types)
            or isinstance(value, bool)
            or not all(isinstance(t, str) for t in texts)
        ):
            said = f"tools: {key} of a function's schema is {quoted(value)}, expected {named}"
            raise ApiError(400, said, "tools")


class GemmaArguments:
    """The rules for one function's arguments.

    quote: the mark around a text, as the grammar writes it. ordered: whether the chat template sorts keys; otherwise
    they have the schema's order.
    """

    def __init__(self, quote: str, ordered: bool) -> None:
        self._quote, self._ordered = quote, ordered
        self._rules: list[str] = []
        self._references: dict[str, str] = {}  # rules of `$ref`, by its text
        self._any = ""

    def rules(self, rule: str, schema: dict[str, Any]) -> list[str]:
        """Rules in Lark's syntax, the first of which is `rule`. Raises ApiError for what no rule can say."""
        self._name, self._root = rule, schema
        first = f"{rule}: {self._value(schema)}"
        return [first, *self._rules]

    def _rule(self, text: str) -> str:
        name = f"{self._name}_{len(self._rules)}"
        self._rules.append(f"{name}: {text}")
        return name

    def _value(self, schema: Any) -> str:
        """The grammar of a value."""
        if schema is True or schema == {}:
            return self._any_value()
        if not isinstance(schema, dict):
            raise _refused(f"the schema {json.dumps(schema)}")
        check_keywords(schema)
        if unknown := [key for key in schema if key not in _KNOWN and not key.startswith("x-")]:
            raise _refused(f"the keyword {unknown[0]}")
        if chosen := [key for key in _CHOICES if key in schema]:
            beside = [key for key in schema if key not in _NO_MATTER | {"type", chosen[0]}]
            if beside:
                raise _refused(f"the keyword {chosen[0]} beside {beside[0]}")
            return self._choice(chosen[0], schema[chosen[0]])
        implied = [kind for kind, keys in _OF_TYPE.items() if any(key in schema for key in keys)]
        kinds = schema.get("type", implied)
        if isinstance(kinds, str):
            kinds = [kinds]
        else:
            kinds = [kind for kind in kinds if kind != "integer" or "number" not in kinds]
        kinds += ["null"] if schema.get("nullable") is True and "null" not in kinds else []
        if unknown := [kind for kind in kinds if kind not in _OF_TYPE]:
            raise _refused(f"the type {json.dumps(unknown[0])}")
        return _either(self._typed(kind, schema) for kind in kinds) if kinds else self._any_value()

    def _choice(self, keyword: str, value: Any) -> str:
        if keyword == "$ref":
            return self._reference(value)
        if keyword == "const":
            return self._literal(value)
        if not isinstance(value, list) or not value or (keyword == "allOf" and len(value) > 1):
            raise _refused(f"the keyword {keyword} with {json.dumps(value)[:100]}")
        return _either(self._literal(each) if keyword == "enum" else self._value(each) for each in value)

    def _reference(self, place: Any) -> str:
        if place not in self._references:
            schema = schema_at(self._root, str(place))
            if schema is None:
                raise _refused(f"the reference {json.dumps(place)}")
            # The name stands before the rule is made, for schemas that refer to themselves.
            name = self._references[place] = f"{self._name}_ref{len(self._references)}"
            self._rules.append(f"{name}: {self._value(schema)}")
        return self._references[place]

    def _typed(self, kind: str, schema: dict[str, Any]) -> str:
        if kind == "object":
            return self._object(schema)
        if kind == "array":
            return self._array(self._value(schema.get("items", True)), schema)
        if kind == "string":
            return self._string(schema)
        limits = {key: schema[key] for key in _OF_TYPE[kind] if key in schema}
        return self._rule(f"%json {json.dumps({'type': kind} | limits)}")

    def _string(self, schema: dict[str, Any]) -> str:
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        text = f"(?s:.){{{least},{'' if most is None else most}}}"
        if "pattern" in schema:
            if least or most is not None:
                raise _refused("the keyword pattern beside a length")
            pattern, free = str(schema["pattern"]), "(?s:.*)"
            before, after = "" if pattern.startswith("^") else free, "" if pattern.endswith("$") else free
            text = f"{before}({pattern.removeprefix('^').removesuffix('$')}){after}"
        text = text.replace("/", r"\/")
        return f"{self._quote} /{text}/ {self._quote}"

    def _array(self, item: str, schema: dict[str, Any]) -> str:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if most == 0:
            return '"[" "]"'
        more = f'("," {item}){{{max(least - 1, 0)},{"" if most is None else most - 1}}}'
        return self._rule(f'"[" {item} {more} "]"' + ("" if least else ' | "[" "]"'))

    def _object(self, schema: dict[str, Any]) -> str:
        properties = schema.get("properties", {})
        names = sorted(properties, key=str.lower) if self._ordered else list(properties)
        required = set(schema.get("required", ()))
        others = schema.get("additionalProperties", True)
        pair = "" if others is False else f'{_KEY} ":" {self._value(others)}'
        # From the last to the first: what may follow where properties stand before, and where none does.
        later = self._rule(f'("," {pair})*') if pair else '""'
        first = self._rule(f'({pair} ("," {pair})*)?') if pair else '""'
        for name in reversed([*names, *sorted(required.difference(names))]):
            member = f"{json.dumps(f'{name}:')} {self._value(properties.get(name, True))}"
            absent = (f" | {first}", f" | {later}") if name not in required else ("", "")
            first = self._rule(f"{member} {later}{absent[0]}")
            later = self._rule(f'"," {member} {later}{absent[1]}')
        return self._rule(f'"{{" {first} "}}"')

    def _literal(self, value: Any) -> str:
        """The grammar of one value."""
        if isinstance(value, str):
            return " ".join((self._quote, *([json.dumps(value)] if value else ()), self._quote))
        if isinstance(value, list):
            return " ".join(('"["', *_joined(self._literal(each) for each in value), '"]"'))
        if isinstance(value, dict):
            members = (f"{json.dumps(f'{name}:')} {self._literal(each)}" for name, each in value.items())
            return " ".join(('"{"', *_joined(members), '"}"'))
        return json.dumps(json.dumps(value))

    def _any_value(self) -> str:
        if not self._any:
            self._any = f"{self._name}_any"
            scalar = '%json {"type": ["number", "boolean", "null"]}'
            text = f"{self._quote} /(?s:.)*/ {self._quote}"
            items = f'"[" ({self._any} ("," {self._any})*)? "]"'
            pair = f'{_KEY} ":" {self._any}'
            members = f'"{{" ({pair} ("," {pair})*)? "}}"'
            number = self._rule(scalar)
            self._rules.append(f"{self._any}: {number} | {text} | {items} | {members}")
        return self._any


def _either(grammars: Iterable[str]) -> str:
    given = list(grammars)
    return given[0] if len(given) == 1 else f"({' | '.join(given)})"


def _joined(grammars: Iterable[str]) -> list[str]:
    return [word for each in grammars for word in ('","', each)][1:]


def _refused(what: str) -> ApiError:
    text = f"tools: {what} in a function's parameters cannot be enforced in this model's notation of calls"
    return ApiError(400, f"{text}; leave it out of the schema, or take tool_choice auto", "tools")
