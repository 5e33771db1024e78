"""The grammar of a call whose arguments are not written as JSON, from the function's schema, in Lark's syntax.

What it admits, `calls.py` reads back as arguments that fit the schema. A text has no mark of the notation within it,
and `format` says nothing about it. Arguments that are not declared are free where `additionalProperties` allows them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from dflash_trt.serving.openai.calls import QUOTE, Tags, reference
from dflash_trt.serving.openai.reading import Json

# As Python writes JSON, which chat templates show. A model that may write blanks sometimes writes no end.
BLANKS = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}
_TEXT = frozenset(("type", "minLength", "maxLength", "pattern"))
_SAYS_NOTHING = frozenset(
    ("title", "description", "default", "example", "examples", "deprecated", "readOnly", "writeOnly", "format",
     "nullable", "$comment", "$defs", "definitions", "$schema", "$id")
)  # fmt: skip
_OBJECT = frozenset(("type", "properties", "required", "additionalProperties"))
_ARRAY = frozenset(("type", "items", "minItems", "maxItems"))
_SCALARS = ("number", "integer", "boolean", "null")
_DEEPEST = 50


class NoFormError(ValueError):
    """A schema, by one of its keywords, has no form in the notation."""


class _Grammar:
    """Rules for the schema of one function's arguments.

    prefix: of the rules' names. marks: what no text has. shared: names of rules by their bodies, for all functions.
    """

    def __init__(self, prefix: str, root: Json, marks: Sequence[str], shared: dict[str, str]) -> None:
        self.root, self.rules, self._prefix = root, list[str](), prefix
        self.names = dict(shared)
        self._marks = marks
        self._clean = f"~/(?s:.*)({'|'.join(map(_slashed, map(re.escape, marks)))})(?s:.*)/"

    def rule(self, body: str, terminal: bool = False) -> str:
        """The name of a rule with this body."""
        if body in self.names:
            return self.names[body]
        name = f"{self._prefix}_{len(self.rules)}"
        name = name.upper() if terminal else name
        self.rules.append(f"{name}: {body}")
        self.names[body] = name
        return name

    def json(self, schema: Json) -> str:
        """A value in JSON."""
        shared = {key: self.root[key] for key in ("$defs", "definitions") if key in self.root}
        places = re.findall(r'"\$ref": "([^"]*)"', json.dumps(schema))
        if not all(place.startswith(("#/$defs/", "#/definitions/")) for place in places):
            raise NoFormError("$ref")
        return self.rule(f"%json {json.dumps((shared if places else {}) | schema | BLANKS)}")

    def text(self, schema: Json) -> str:
        """The terminal of a text."""
        least, most, pattern = schema.get("minLength", 0), schema.get("maxLength", ""), schema.get("pattern")
        if (
            not isinstance(least, int)
            or not isinstance(most, int | str)
            or not isinstance(pattern, str | None)
        ):
            raise NoFormError("minLength, maxLength or pattern")
        parts = [f"/(?s:.{{{least},{most}}})/" if least or most != "" else "/(?s:.*)/", self._clean]
        if pattern:
            inner = pattern.removeprefix("^")
            ended = inner.endswith("$") and not inner.endswith("\\$")
            begin, end = ("" if inner != pattern else "(?s:.*)"), ("" if ended else "(?s:.*)")
            parts.append(f"/{begin}({_slashed(inner[:-1] if ended else inner)}){end}/")
        return f"({' & '.join(parts)})"

    def literal(self, text: str) -> str:
        """The terminal of one text."""
        if any(mark in text for mark in self._marks):
            raise NoFormError("enum")
        return json.dumps(text)

    def other(self, names: Sequence[str]) -> str:
        """The terminal of a name that is none of these."""
        known = "|".join(map(_slashed, map(re.escape, names)))
        return r"/[\w.-]{1,64}/" + (f" & ~/({known})/" if known else "")

    def branches(self, schema: Any, depth: int = 0) -> Iterator[Json]:
        """The alternatives of a schema: lists of values, and schemas with one type or none."""
        if schema is True:
            schema = {}
        if not isinstance(schema, dict) or depth > _DEEPEST:
            raise NoFormError("false" if schema is False else "$ref")
        says = {key: value for key, value in schema.items() if key not in _SAYS_NOTHING}
        several = [key for key in ("$ref", "anyOf", "oneOf", "allOf") if key in says]
        if several:
            (key, value), alone = next(iter(says.items())), len(says) == 1
            inner = [reference(self.root, value)] if key == "$ref" else value
            if not alone or not isinstance(inner, list) or (key == "allOf" and len(inner) != 1):
                raise NoFormError(several[0])
            for branch in inner:
                yield from self.branches(branch, depth + 1)
            return
        kinds = says.get("type")
        kinds = kinds if isinstance(kinds, list) else [kinds]
        if "enum" in says or "const" in says:
            values = says.get("enum", [says.get("const")])
            if not isinstance(values, list) or len(says) > 1 + ("type" in says):
                raise NoFormError("enum")
            yield {
                "enum": [one for one in values if kinds == [None] or any(_is(one, kind) for kind in kinds)]
            }
            return
        for kind in kinds:
            yield says | ({"type": kind} if kind is not None else {})

    def properties(self, schema: Json) -> tuple[dict[str, Any], frozenset[str], Any]:
        """The declared properties of an object, the required ones among them, and the schema of others or False."""
        says = schema.keys() - _SAYS_NOTHING - _OBJECT
        declared, required = schema.get("properties", {}), schema.get("required", [])
        if says or not isinstance(declared, dict) or not isinstance(required, list):
            raise NoFormError(min(says, default="properties"))
        if not all(isinstance(name, str) for name in required):
            raise NoFormError("required")
        more = schema.get("additionalProperties", not declared)
        declared = declared | {name: more or {} for name in required if name not in declared}
        allowed = {name: value for name, value in declared.items() if value is not False}
        return allowed, frozenset(required), more


def _is(value: Any, kind: Any) -> bool:
    """Whether a value of a list is of a type of JSON Schema's."""
    if isinstance(value, bool) or value is None:
        return bool(kind == ("null" if value is None else "boolean"))
    names = {
        str: ("string",),
        int: ("integer", "number"),
        float: ("number",),
        list: ("array",),
        dict: ("object",),
    }
    return kind in names[type(value)]


def _slashed(pattern: str) -> str:
    """A pattern between slashes."""
    return re.sub(
        r"(\\.)|/|\n", lambda found: found[1] or {"/": r"\/", "\n": r"\n"}[found[0]], pattern, flags=re.DOTALL
    )


def tagged(rule: str, name: str, schema: Json, tags: Tags, blank: str, shared: dict[str, str]) -> list[str]:
    """The rules of a call in tags, of which `rule` is the first. blank: what stands around a value.

    Raises NoFormError.
    """
    grammar = _Grammar(f"{rule}_a", schema, (tags.parameter, tags.parameter_end, tags.call_end), shared)
    declared, required, more = grammar.properties(schema)
    end = json.dumps(f"{blank}{tags.parameter_end}\n")

    def value(schema: Any) -> str:
        texts, others = list[str](), list[Json]()
        free = False
        for branch in grammar.branches(schema):
            if "enum" in branch:
                texts += [
                    grammar.literal(one if isinstance(one, str) else json.dumps(one))
                    for one in branch["enum"]
                ]
            elif branch.get("type") == "null":
                texts.append('"null"')
            elif (
                branch.get("type", "object" if branch.keys() & {"properties", "items"} else "string")
                != "string"
            ):
                others.append(branch)
            elif branch.keys() <= _TEXT:
                free = True
                texts.append(grammar.text(branch) + ("" if blank else " & ~/\\n(?s:.*)|(?s:.*)\\n/"))
            else:
                raise NoFormError(min(branch.keys() - _TEXT))
        ways = (
            [grammar.rule(f"({' | '.join(f'({text})' for text in texts)}) {end}", terminal=True)]
            if texts
            else []
        )
        if others and not free:  # a value that may be a text is read as one
            ways.append(f"{grammar.json(others[0] if len(others) == 1 else {'anyOf': others})} {end}")
        if not ways:
            raise NoFormError("enum")
        return f"({' | '.join(ways)})"

    parts = []
    for key, declaration in declared.items():
        if tags.opened in key or "\n" in key:
            raise NoFormError("properties")
        begin = json.dumps(f"{tags.parameter}{key}{tags.opened}{blank}")
        parts.append(f"({begin} {value(declaration)})" + ("" if key in required else "?"))
    if more is not False:
        begin = f"{json.dumps(tags.parameter)} ({grammar.other(list(declared))}) {json.dumps(tags.opened + blank)}"
        parts.append(f"({grammar.rule(begin, terminal=True)} {value(more)})*")
    shared.update(grammar.names)
    head = json.dumps(f"{tags.call}{name}{tags.opened}\n")
    return [f"{rule}: {head} {' '.join(parts)} {json.dumps(tags.call_end)}", *grammar.rules]


def gemmas(
    rule: str, name: str, schema: Json, mark: Callable[[str], str], shared: dict[str, str]
) -> list[str]:
    """The rules of a call in Gemma 4's notation, of which `rule` is the first. mark: gives a special token.

    Raises NoFormError.
    """
    grammar = _Grammar(f"{rule}_a", schema, (QUOTE, "<tool_call|>"), shared)
    quote, known = mark(QUOTE), dict[str, str]()

    def quoted(terminal: str) -> str:
        return f"{quote} {grammar.rule(terminal, terminal=True)} {quote}"

    def member(key: str, schema: Any, depth: int) -> str:
        plain = re.fullmatch(r"[\w.-]+", key)
        begin = json.dumps(f"{key}:") if plain else f'{quoted(grammar.literal(key))} ":"'
        return f"{begin} {value(schema, depth + 1)}"

    def listed(first: str, rest: str) -> str:
        return f'({first} ("," {rest})*)?'

    def anything() -> str:
        if "" not in known:
            any_rule = known[""] = f"{rule}_any"
            scalar, pair = grammar.json({"type": list(_SCALARS)}), other(())
            grammar.rules.append(
                f'{any_rule}: {scalar} | {quoted(grammar.text({}))} | "[" {listed(any_rule, any_rule)} "]" '
                f'| "{{" {listed(pair, pair)} "}}"'
            )
        return known[""]

    def other(names: Sequence[str], schema: Any = True, depth: int = 0) -> str:
        return f'{grammar.rule(grammar.other(names), terminal=True)} ":" {value(schema, depth + 1)}'

    def value(schema: Any, depth: int) -> str:
        if depth > _DEEPEST:
            raise NoFormError("properties")
        if isinstance(schema, dict) and len(says := schema.keys() - _SAYS_NOTHING) == 1:
            several = schema.get("anyOf", schema.get("oneOf"))
            if isinstance(several, list) and several:
                return f"({' | '.join(value(branch, depth + 1) for branch in several)})"
            if says == {"$ref"} and isinstance(place := schema["$ref"], str):
                if place not in known:  # a rule of its own, which may have itself within
                    known[place] = f"{rule}_r{len(known)}"
                    grammar.rules.append(
                        f"{known[place]}: {value(reference(grammar.root, place), depth + 1)}"
                    )
                return known[place]
        ways = [way for branch in grammar.branches(schema) for way in one(branch, depth)]
        if not ways:
            raise NoFormError("enum")
        return f"({' | '.join(ways)})"

    def one(schema: Json, depth: int) -> Iterator[str]:
        kind = schema.get("type", "object" if "properties" in schema else None)
        if "enum" in schema:
            for constant in schema["enum"]:
                if isinstance(constant, list | dict):
                    raise NoFormError("enum")
                yield (
                    quoted(grammar.literal(constant))
                    if isinstance(constant, str)
                    else json.dumps(json.dumps(constant))
                )
        elif not schema:
            yield anything()
        elif kind == "string" and schema.keys() <= _TEXT:
            yield quoted(grammar.text(schema))
        elif kind in _SCALARS:
            yield grammar.json(schema)
        elif kind == "array" and schema.keys() <= _ARRAY:
            yield array(
                value(schema.get("items", True), depth + 1), schema.get("minItems", 0), schema.get("maxItems")
            )
        elif kind == "object":
            yield members(schema, depth)
        else:
            raise NoFormError(min(schema.keys() - _TEXT, default="type"))

    def array(item: str, least: Any, most: Any) -> str:
        if not isinstance(least, int) or not isinstance(most, int | None):
            raise NoFormError("minItems or maxItems")
        if most == 0:
            return '"[]"'
        more = f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        return f'"[" ({item} ("," {item}){more}){"" if least else "?"} "]"'

    def members(schema: Json, depth: int) -> str:
        declared, required, more = grammar.properties(schema)
        pair = "" if more is False else other(list(declared), more, depth)
        first, rest = (listed(pair, pair), f'("," {pair})*') if pair else ('""', '""')
        for key in sorted(declared, key=str.lower, reverse=True):  # as the template writes them
            entry = grammar.rule(member(key, declared[key], depth))
            without = ("", "") if key in required else (f" | {first}", f" | {rest}")
            first, rest = (
                grammar.rule(f"{entry} {rest}{without[0]}"),
                grammar.rule(f'"," {entry} {rest}{without[1]}'),
            )
        return f'"{{" {first} "}}"'

    body = members(schema, 0)
    shared.update(grammar.names)
    call = f"{mark('<|tool_call>')} {json.dumps(f'call:{name}')} {body} {mark('<tool_call|>')}"
    return [f"{rule}: {call}", *grammar.rules]
