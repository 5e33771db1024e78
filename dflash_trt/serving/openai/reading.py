"""Messages, tools and items of earlier answers, read as clients send them.

Unknown keys are left out, and null is as good as nothing: clients send back what they got, from this server or from
others, with the fields of their own types. What a model would have to see, and cannot, is refused by its place. Every
function raises ApiError. They take time for each message, so they run in a thread.

What comes out is what chat templates know: {"role", "content", ...} with contents as texts and arguments as objects.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from dflash_trt.errors import show
from dflash_trt.serving.openai.calls import parsed
from dflash_trt.serving.openai.errors import ApiError

Json = dict[str, Any]
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
# Numbers of a body, which is parsed at once: these take 8 ms. A list or object takes as long as four of them, and a key
# as two, so that no body takes much over 30 ms.
MOST_VALUES = 1 << 18


def refuse(place: str, value: Any, expected: str) -> NoReturn:
    raise ApiError(400, f"{place} is {show(value)}, expected {expected}", place)


def _object(value: Any, place: str) -> Json:
    return value if isinstance(value, dict) else refuse(place, value, "an object")


def _string(value: Any, place: str) -> str:
    return value if isinstance(value, str) else refuse(place, value, "a text")


def text_of(content: Any, place: str) -> str:
    """The text of a content: a text, a list of parts that are texts, or nothing."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        refuse(place, content, "a text, or a list of parts of type text")
    return "".join([_part(part, f"{place}[{i}]") for i, part in enumerate(content)])


def _part(part: Any, place: str) -> str:
    """The text of a part; none of a thought, which `_thoughts` reads."""
    if isinstance(part, str):
        return part
    kind = _object(part, place).get("type", "text")
    if kind in ("thinking", "redacted_thinking"):
        return ""
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        if isinstance(kind, str) and kind not in ("text", "input_text", "output_text", "refusal"):
            raise ApiError(400, f"{place}.type is {show(kind)}: this server reads text only", f"{place}.type")
        refuse(f"{place}.text", text, "a text")
    return text


def _thoughts(sent: Json) -> str:
    """The reasoning of an earlier answer, under any of its names."""
    for name in ("reasoning_content", "reasoning"):
        if isinstance(sent.get(name), str) and sent[name]:
            return str(sent[name])
    parts = sent.get("content")
    found = (
        [part.get("thinking") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
    )
    return "".join([text for text in found if isinstance(text, str)])


def message(sent: Any, place: str) -> Json:
    sent = _object(sent, place)
    role = sent.get("role")
    if role not in _ROLES:
        refuse(f"{place}.role", role, f"one of {', '.join(_ROLES)}")
    entry: Json = {
        "role": "tool" if role == "function" else role,
        "content": text_of(sent.get("content", sent.get("refusal")), f"{place}.content"),
    }
    if role == "assistant":
        if thoughts := _thoughts(sent):
            entry |= {"reasoning_content": thoughts, "thinking": thoughts}
        calls = sent.get("tool_calls")
        if calls is not None and not isinstance(calls, list):
            refuse(f"{place}.tool_calls", calls, "a list")
        listed = [_call(call, f"{place}.tool_calls[{i}]") for i, call in enumerate(calls or ())]
        if sent.get("function_call") is not None:  # the form before tools
            listed.append(_call({"function": sent["function_call"]}, f"{place}.function_call"))
        if listed:
            entry["tool_calls"] = listed
    for name in ("name", "tool_call_id"):
        if sent.get(name) is not None:
            entry[name] = _string(sent[name], f"{place}.{name}")
    return entry


def _call(call: Any, place: str) -> Json:
    """A call of an earlier answer. A custom tool's input is its only argument."""
    call = _object(call, place)
    kind = "custom" if call.get("custom") is not None else "function"
    asked = _object(call.get(kind), f"{place}.{kind}")
    name = _string(asked.get("name"), f"{place}.{kind}.name")
    arguments = {"input": asked.get("input")} if kind == "custom" else asked.get("arguments")
    return _called(call.get("id"), name, arguments, f"{place}.{kind}.arguments")


def _called(call_id: Any, name: str, arguments: Any, place: str) -> Json:
    if arguments is None or arguments == "":
        arguments = {}
    elif isinstance(arguments, str):  # the object that it spells, or the text where it spells none
        value = parsed(arguments)
        arguments = value if isinstance(value, dict) else arguments
    elif not isinstance(arguments, dict):
        refuse(place, arguments, "a JSON object as text")
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"id": call_id, **call} if isinstance(call_id, str) else call


def messages(sent: list[Any]) -> list[Json]:
    return [message(entry, f"messages[{i}]") for i, entry in enumerate(sent)]


def tools(sent: list[Any] | None) -> list[Json]:
    """The functions among the tools, nested as a chat has them or flat as a response has them. Other tools cannot be
    run here, so the model does not hear of them.
    """
    found = []
    for i, tool in enumerate(sent or ()):
        place = f"tools[{i}]"
        kind = _object(tool, place).get("type", "function")
        if kind != "function":
            _string(kind, f"{place}.type")
            continue
        nested = tool.get("function") is not None or "name" not in tool
        function = _object(tool.get("function"), f"{place}.function") if nested else tool
        place = f"{place}.function" if nested else place
        name = function.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            refuse(f"{place}.name", name, "1 to 128 letters, digits, _, . and -")
        declared: Json = {"name": name}
        if function.get("description") is not None:
            declared["description"] = _string(function["description"], f"{place}.description")
        if function.get("parameters") is not None:
            declared["parameters"] = _object(function["parameters"], f"{place}.parameters")
        if isinstance(function.get("strict"), bool):
            declared["strict"] = function["strict"]
        found.append({"type": "function", "function": declared})
    return found


@dataclass(frozen=True)
class ToolChoice:
    """What the answer may or must call. names: the only functions that it may call; None: any."""

    mode: Literal["none", "auto", "required"] = "auto"
    names: tuple[str, ...] | None = None
    one: bool = False  # a single call


def tool_choice(choice: Any) -> ToolChoice:
    if choice is None or choice in ("none", "auto", "required"):
        return ToolChoice(choice or "auto")
    if choice == "any":  # Mistral's name
        return ToolChoice("required")
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        inner = choice.get("allowed_tools", choice)
        mode, allowed = (inner.get("mode"), inner.get("tools")) if isinstance(inner, dict) else (None, None)
        if mode in ("auto", "required") and isinstance(allowed, list):
            places = [(tool, f"tool_choice.tools[{i}]") for i, tool in enumerate(allowed)]
            functions = [pair for pair in places if _object(*pair).get("type", "function") == "function"]
            return ToolChoice(mode, tuple(_named(*pair) for pair in functions))
    if isinstance(choice, dict) and choice.get("type", "function") == "function":
        return ToolChoice("required", (_named(choice, "tool_choice"),), one=True)
    refuse("tool_choice", choice, "none, auto, required, or a function by its name")


def _named(tool: Any, place: str) -> str:
    inner = _object(tool, place).get("function", tool)
    return _string(_object(inner, f"{place}.function").get("name"), f"{place}.name")


# Items of other servers whose results the texts of their messages have.
_SILENT = frozenset(
    (
        "web_search_call",
        "file_search_call",
        "code_interpreter_call",
        "image_generation_call",
        "mcp_list_tools",
    )
)


def items(inputs: str | list[Any], instructions: str | None) -> list[Json]:
    """The chat that a response's input stands for."""
    first = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(inputs, str):
        return [*first, {"role": "user", "content": inputs}]
    entries = [*first, *_turns(inputs)]
    return entries if entries else refuse("input", inputs, "a message")


def _turns(inputs: list[Any]) -> Iterator[Json]:
    """One message of a chat has the reasoning, the text and the calls of the assistant's turn."""
    turn: Json = {}
    for at, item in enumerate(inputs):
        place = f"input[{at}]"
        kind = _object(item, place).get("type") or ("message" if "role" in item else "item_reference")
        if kind == "reasoning":
            parts = item.get("content") or item.get("summary")
            turn.setdefault("thoughts", []).append(text_of(parts, f"{place}.content"))
        elif kind == "message" and item.get("role") == "assistant":
            if {"content", "tool_calls"} & turn.keys():
                yield from _turn(turn)
                turn = {}
            turn["content"] = text_of(item.get("content"), f"{place}.content")
        elif kind == "message":
            yield from _turn(turn)
            turn = {}
            yield message(item, place)
        elif isinstance(kind, str) and kind.endswith("_output"):
            yield from _turn(turn)
            turn = {}
            output = item.get("output")
            known = output is None or isinstance(output, str | list)
            text = text_of(output, f"{place}.output") if known else json.dumps(output, ensure_ascii=False)
            yield {"role": "tool", "content": text, "tool_call_id": str(item.get("call_id") or "")}
        elif isinstance(kind, str) and kind.endswith("_call") and kind not in _SILENT:
            turn.setdefault("tool_calls", []).append(_item_call(item, kind, place))
        elif kind not in _SILENT:
            refuse(
                f"{place}.type", kind, "a message, reasoning, a call or its output: nothing is stored here"
            )
    yield from _turn(turn)


def _item_call(item: Json, kind: str, place: str) -> Json:
    """A call of a function or a custom tool, or one of a tool that only other servers have, by its kind."""
    arguments = item.get("arguments", item.get("action", item.get("operation")))
    if kind == "custom_tool_call":
        arguments = {"input": item.get("input")}
    name = item.get("name") if kind in ("function_call", "custom_tool_call") else kind.removesuffix("_call")
    return _called(item.get("call_id"), _string(name, f"{place}.name"), arguments, f"{place}.arguments")


def _turn(turn: Json) -> Iterator[Json]:
    """The assistant's message, unless there is nothing but reasoning."""
    if {"content", "tool_calls"} & turn.keys():
        answer: Json = {"role": "assistant", "content": turn.get("content", "")}
        if thoughts := "".join(turn.get("thoughts", ())):
            answer |= {"reasoning_content": thoughts, "thinking": thoughts}
        if "tool_calls" in turn:
            answer["tool_calls"] = turn["tool_calls"]
        yield answer


def check_values(body: bytes) -> None:
    """Raise ApiError for a body with too many values, before it is parsed.

    Each follows a comma, a colon or a bracket. Those within texts count only if the first look finds too many.
    """
    if _marks(body) <= MOST_VALUES:
        return
    bare = body.replace(rb"\\", b"").replace(rb"\"", b"")
    if bare.count(b'"') > 4 * MOST_VALUES or _marks(b"".join(bare.split(b'"')[::2])) > MOST_VALUES:
        raise ApiError(
            400, f"the body has over {MOST_VALUES} values; send long prompts as texts, or fewer at a time"
        )


def _marks(text: bytes) -> int:
    return text.count(b",") + 2 * text.count(b":") + 4 * (text.count(b"[") + text.count(b"{"))
