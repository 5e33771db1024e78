"""The text of one call of a tool, as each family spells it.

{"name": "get", "arguments": {...}}, or with "parameters"          Qwen, Hermes, Llama 3
<function=get><parameter=key>text</parameter></function>           Qwen3-Coder
<atem:invoke name="get"><atem:parameter name="key">text ...        Muse Glimmer
call:get{key:<|"|>text<|"|>,other:1}                               Gemma 4
get[ARGS]{"key": "text"}                                           Mistral
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from sys import float_info
from typing import Any, NamedTuple

# Parameters of each tool by its name: a JSON schema.
Schemas = Mapping[str, Mapping[str, Any]]
ARGUMENTS = "[ARGS]"  # Mistral's mark between a name and its arguments
QUOTE = '<|"|>'  # Gemma's mark around a text


@dataclass(frozen=True)
class Call:
    """A call of a tool. `arguments`: a JSON object as text. `whole`: whether that has its end."""

    name: str
    arguments: str
    whole: bool = True
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")

    def to_dict(self) -> dict[str, Any]:
        """The call as an answer of a chat has it."""
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


def overlap(text: str, tag: str) -> int:
    """Length of the longest end of `text` that a tag begins with."""
    for size in range(min(len(text), len(tag) - 1), 0, -1):
        if text.endswith(tag[:size]):
            return size
    return 0


def _finite(text: str) -> float:
    """The nearest number that can be written again in JSON, which has neither infinity nor NaN. Raises ValueError."""
    if not text[-1].isdigit():  # Infinity or NaN
        raise ValueError(text)
    return min(max(float(text), -float_info.max), float_info.max)


_JSON = json.JSONDecoder(parse_float=_finite, parse_constant=_finite)


def parsed(text: str) -> Any:
    """The value of a text in JSON; None for any other text."""
    try:
        return _JSON.decode(text)
    except (ValueError, RecursionError):
        return None


def _call(name: str, arguments: str, whole: bool = True) -> Call:
    """A call of texts from JSON. Its escapes may name halves of surrogate pairs, which UTF-8 does not have."""
    name, arguments = (text.encode(errors="replace").decode() for text in (name, arguments))
    return Call(name, arguments, whole)


def json_call(value: Any) -> Call | None:
    """The call that an object with a name and arguments or parameters is; None for any other value."""
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str) or not name:
        return None
    if not {"arguments", "parameters"} & value.keys() and len(value) > 1:  # some other object with a name
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str) and isinstance(parsed(arguments), dict):
        return _call(name, arguments)
    return _call(name, json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None


_BEGUN = re.compile(r'\s*\{"name": ("(?:[^"\\]|\\.)*"), "(?:arguments|parameters)":(.*)', re.DOTALL)


def json_begun(text: str) -> list[Call]:
    """The call that a text in JSON begins, with the part of its arguments that there is; none before them."""
    found = _BEGUN.match(text)
    return [_call(parsed(found[1]), found[2].strip(), whole=False)] if found else []


def json_values(text: str) -> tuple[list[Any], str]:
    """JSON values one after the other, between them blanks and semicolons, and the rest, which is no value."""
    values: list[Any] = []
    at = 0
    while at < len(text):
        if text[at] in " \n\r\t;,":
            at += 1
            continue
        try:
            value, at = _JSON.raw_decode(text, at)
        except (ValueError, RecursionError):
            return values, text[at:]
        values += value if isinstance(value, list) else [value]
    return values, ""


class Tags(NamedTuple):
    """The tags of a call and of its parameters. `opened`: what ends an opening tag."""

    call: str
    call_end: str
    parameter: str
    parameter_end: str
    opened: str


def _before(text: str, end: str, at: int, following: str) -> int:
    """Where the next `end` stands that only blanks part from `following` or from the end of the text; -1: nowhere."""
    stop = text.find(end, at)
    while stop >= 0:
        rest = _blanks_end(text, stop + len(end))
        if rest == len(text) or text.startswith(following, rest):
            break
        stop = text.find(end, stop + 1)
    return stop


_BLANK = re.compile(r"\s*")


def _blanks_end(text: str, at: int) -> int:
    found = _BLANK.match(text, at)
    return at if found is None else found.end()


QWEN_TAGS = Tags("<function=", "</function>", "<parameter=", "</parameter>", ">")
MUSE_TAGS = Tags('<atem:invoke name="', "</atem:invoke>", '<atem:parameter name="', "</atem:parameter>", '">')
_BLOCK, _BLOCK_END = "<atem:function_calls>", "</atem:function_calls>"


def _xml_call(text: str, schemas: Schemas, tags: Tags = QWEN_TAGS, begun: bool = False) -> Call | None:
    """A call in tags. A value is JSON unless the tool's schema takes it as a text. begun: it may be cut."""
    text = text.strip()
    name, closed, body = text.removeprefix(tags.call).partition(tags.opened)
    if not text.startswith(tags.call) or not closed or not name or "\n" in name:
        return None
    root = schemas.get(name, {})
    properties = root.get("properties") if isinstance(root.get("properties"), dict) else {}
    assert isinstance(properties, dict)
    other = root.get("additionalProperties", True)
    arguments: dict[str, Any] = {}
    part, body = "", body.removesuffix(tags.call_end)
    for mark in (tags.call_end, tags.parameter, tags.parameter_end) if begun else ():
        body = body[: len(body) - overlap(body, mark)]
    texts = {key for key, schema in properties.items() if _admits(schema, root, "string", "")}
    for key, value, ended in _values(body, properties.keys(), tags, properties.keys() - texts):
        schema, value = properties.get(key, other), value.removeprefix("\n").removesuffix("\n")
        value_of = _typed(value, schema, root)
        cut = not ended or (isinstance(value_of, str) and not _admits(schema, root, "string", value))
        if begun and cut:
            part = f"{json.dumps(key, ensure_ascii=False)}: {_begun_value(value, schema, root)}"
            break
        arguments[key] = value_of
    whole = json.dumps(arguments, ensure_ascii=False)
    if not begun:
        return _call(name, whole)
    return _call(name, whole[:-1] + (", " if arguments and part else "") + part, whole=False)


def _begun_value(text: str, schema: Any, root: Mapping[str, Any]) -> str:
    """The beginning in JSON of a value of which there is a part; nothing where it may be null or a text."""
    if any(word.startswith(text) for word in ("null", "None")) and _admits(schema, root, "null"):
        return ""
    if text and _admits(schema, root, "begun", text):
        return json.dumps(text, ensure_ascii=False)[:-1]
    return text.strip()


def _values(
    body: str, known: Collection[str], tags: Tags, in_json: Collection[str]
) -> Iterator[tuple[str, str, bool]]:
    """Names and values of parameters, and whether each has its end. Marks within one of those in JSON are a part of it.

    An end mark is a part of the value unless a parameter or the call's end follows. Where a value has no end mark, the
    next parameter ends it, if the tool has one of this name.
    """
    _, _, mark, value_end, opened = tags
    at = body.find(mark)
    while at >= 0:
        end = body.find(opened, at)
        if end < 0:
            return
        key, start = body[at + len(mark) : end], end + len(opened)
        inner = start
        if key in in_json:
            try:
                inner = _JSON.raw_decode(body, _blanks_end(body, start))[1]
            except (ValueError, RecursionError):
                in_json = ()  # so that a wrong one takes its time once
        stop = _before(body, value_end, inner, mark)
        limit, following = stop if stop >= 0 else len(body), body.find(mark, inner)
        while 0 <= following < limit:
            close = body.find(opened, following, following + 300)
            if close >= 0 and body[following + len(mark) : close] in known:
                limit = following
                break
            following = body.find(mark, following + 1)
        yield key, body[start:limit], stop >= 0 or limit < len(body)
        at = body.find(mark, limit)


def _typed(text: str, schema: Any, root: Mapping[str, Any]) -> Any:
    """The value of a parameter that is written as a text."""
    word = text.strip()
    if word in ("null", "None") and _admits(schema, root, "null"):
        return None
    if _admits(schema, root, "string", text):
        return text
    value = parsed(word.lower() if word in ("True", "False") else text)
    return text if value is None and word != "null" else value


def _admits(
    schema: Any, root: Mapping[str, Any], kind: str, text: str | None = None, seen: set[str] | None = None
) -> bool:
    """Whether a schema takes values of a type; with a text, this one. One that says nothing takes texts alone.

    kind: "begun" is a string that begins with the text. seen: references that were followed, each of them once.
    """
    seen = set() if seen is None else seen
    if not isinstance(schema, dict):
        return kind in ("string", "begun") and schema is True
    if isinstance(place := schema.get("$ref"), str):
        if place in seen:
            return False
        seen.add(place)
        return _admits(reference(root, place), root, kind, text, seen)
    if "enum" in schema or "const" in schema:
        listed = schema.get("enum", [schema.get("const")])
        if kind == "begun" and isinstance(listed, list):
            return any(isinstance(one, str) and one.startswith(text or "") for one in listed)
        return isinstance(listed, list) and (text if kind == "string" else None) in listed
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(key), list):
            found = (_admits(branch, root, kind, text, seen) for branch in schema[key])
            return all(found) if key == "allOf" else any(found)
    kinds = schema.get("type", "object" if schema.keys() & {"properties", "items"} else "string")
    kind = "string" if kind == "begun" else kind
    return kind in kinds if isinstance(kinds, list) else kind == kinds


def reference(root: Mapping[str, Any], place: str) -> Any:
    """What a reference such as #/$defs/NAME refers to in a schema; None if there is nothing."""
    schema: Any = root if place.startswith("#") else None
    for name in place.split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        schema = schema.get(name) if isinstance(schema, dict) else None
    return schema


def tags_end(text: str, tags: Tags = QWEN_TAGS) -> bool:
    """Whether a call in tags has its end, and its last value, too."""
    shown = text.rstrip()
    body = shown.removesuffix(tags.call_end)
    return body != shown and (tags.parameter not in body or body.rstrip().endswith(tags.parameter_end))


def tagged_calls(text: str, schemas: Schemas, begun: bool = False) -> list[Call]:
    """The call between the tags of Qwen and Hermes, in JSON or in tags as Qwen3-Coder writes it. begun: it may be cut,
    and has the part of its arguments that there is.
    """
    call = _xml_call(text, schemas, begun=begun)
    if call is None and begun:
        return json_begun(text)
    call = call or json_call(parsed(text))
    return [call] if call else []


def muse_calls(text: str, schemas: Schemas, begun: bool = False) -> list[Call]:
    """The calls of a message of Muse Glimmer's to a tool; none if it has anything else, or ends within one.

    begun: the last one may be cut.
    """
    text, calls, at = text.strip(), list[Call](), 0
    ended = text.endswith(_BLOCK_END)
    body = text[: len(text) - (len(_BLOCK_END) if ended else overlap(text, _BLOCK_END))]
    body = body.removeprefix(_BLOCK).strip()
    cut = not ended and not tags_end(body, MUSE_TAGS)
    if cut and not begun:
        return []
    while at < len(body):
        end = _before(body, MUSE_TAGS.call_end, at, MUSE_TAGS.call)
        end = -1 if cut and end + len(MUSE_TAGS.call_end) == len(body) else end
        call = (
            _xml_call(body[at:end] if end >= 0 else body[at:], schemas, MUSE_TAGS, end < 0)
            if end >= 0 or cut
            else None
        )
        if call is None:
            return []
        calls.append(call)
        at = end + len(MUSE_TAGS.call_end) if end >= 0 else len(body)
    return calls


def gemma_calls(text: str, schemas: Schemas, begun: bool = False) -> list[Call]:
    """The call between Gemma's marks, with the arguments as JSON. begun: as in `tagged_calls`."""
    head, brace, rest = text.strip().partition("{")
    name, open_text = head.removeprefix("call:").strip(), begun and rest.count(QUOTE) % 2 == 1
    if begun and not open_text:  # the end of a name or of a literal is not certain
        at = max(map(rest.rfind, "{}[],:>")) + 1
        rest = rest if rest[at - 1 : at] == ":" and _LITERAL.fullmatch(rest[at:]) else rest[:at]
    arguments = _as_json(brace + rest)
    if begun:
        return [_call(name, arguments[:-1] if open_text else arguments, whole=False)] if brace else []
    called = name and name != head.strip() and isinstance(parsed(arguments), dict)
    return [_call(name, arguments)] if called else []


_MARK = re.compile(r'[{}\[\],:]|<\|"\|>')
_LITERAL = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null")


def _as_json(text: str) -> str:
    """Gemma's arguments as JSON: bare keys, and texts between `<|"|>`."""
    parts, at = list[str](), 0
    while at < len(text):
        if text.startswith(QUOTE, at):
            end = text.find(QUOTE, at + len(QUOTE))
            end = len(text) if end < 0 else end
            parts.append(json.dumps(text[at + len(QUOTE) : end], ensure_ascii=False))
            at = end + len(QUOTE)
        elif text[at] in "{}[],:":
            parts.append({",": ", ", ":": ": "}.get(text[at], text[at]))
            at += 1
        elif text[at].isspace():
            at += 1
        else:
            found = _MARK.search(text, at)
            end = found.start() if found else len(text)
            word = text[at:end].strip()
            literal = _LITERAL.fullmatch(word) and text[end : end + 1] != ":"
            parts.append(word if literal else json.dumps(word, ensure_ascii=False))
            at = end
    return "".join(parts)


def mistral_calls(text: str, schemas: Schemas, begun: bool = False) -> list[Call]:
    """The call that a mark of Mistral's begins: a name and arguments. begun: as in `tagged_calls`."""
    name, mark, arguments = text.strip().partition(ARGUMENTS)
    whole = isinstance(parsed(arguments), dict)
    called = mark and name.strip() and (whole or begun)
    return [_call(name.strip(), arguments.strip(), whole)] if called else []
