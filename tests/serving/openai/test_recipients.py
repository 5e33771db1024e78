"""Messages with recipients, as Muse Glimmer writes them: reasoning, answers and calls, token by token."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import AddedToken

from dflash_trt.serving.openai.channels import Channels
from dflash_trt.serving.openai.chat import form_beginning, marks_around
from dflash_trt.serving.openai.parsing import AnswerPart, Stage
from dflash_trt.serving.openai.written import written_by
from dflash_trt.text.tokenizer import Tokenizer

TINY = Path(__file__).parents[3] / "dflash_trt" / "shipped" / "tiny" / "target"
TEMPLATE = 'tools: "parameters" <atem:function_calls> <|start|>assistant'
SCHEMAS = {
    "get": {
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "at": {"type": "object"}}
    },
    "now": {},
}
PROMPT, USER = "<|start|>user<|message|>Hi<|eot|><|start|>assistant", " to=user<|message|>"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, folder / name)
    made = Tokenizer(folder)
    marks = ("<|start|>", "<|message|>", "<|eom|>", "<|eot|>")
    made.backend.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    return made


def atem(name: str, **values: str) -> str:
    inner = "".join(f'<atem:parameter name="{k}">{v}</atem:parameter>\n' for k, v in values.items())
    return f'<atem:invoke name="{name}">\n{inner}</atem:invoke>'


def block(*calls: str) -> str:
    return "<atem:function_calls>\n" + "\n".join(calls) + "\n</atem:function_calls>"


def read(
    tokenizer: Tokenizer, text: str, *, prompt: str = PROMPT, shown: int | None = None
) -> tuple[str, str, list[tuple[str, str]]]:
    """Content, reasoning and calls: the same for pieces of one token and of all. `shown`: characters that are due."""
    found = None
    ids = tokenizer.encode(text, add_special_tokens=False)
    whole = tokenizer.decode(ids)[:shown]
    for size in (1, len(ids)):
        made, parts, left = Channels(tokenizer, prompt, Stage(), SCHEMAS), list[AnswerPart](), whole
        for at in range(0, len(ids), size):
            piece = ids[at : at + size]
            length = len(tokenizer.decode(piece))
            parts += made.push(left[:length], piece)
            left = left[length:]
        parts += made.finish()
        content, reasoning = (
            "".join(part.text for part in parts if part.kind == kind) for kind in ("content", "reasoning")
        )
        calls = [(part.call.name, part.call.arguments) for part in parts if part.call]
        assert found in (None, (content, reasoning, calls))
        found = content, reasoning, calls
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("text", "content", "reasoning", "calls"),
    [
        (" to=self<|message|>We add.<|eom|><|start|>assistant to=user<|message|>It is 4.<|eot|>",
         "It is 4.", "We add.", []),
        ("<|message|>No recipient.<|eot|>", "No recipient.", "", []),
        (f" to=get<|message|>{block(atem('get', city='Bonn', days='3'))}<|eom|>", "", "",
         [("get", {"city": "Bonn", "days": 3})]),
        (f" to=get<|message|>{block(atem('get', city='1'), atem('now'))}<|eot|>", "", "",
         [("get", {"city": "1"}), ("now", {})]),
        # What looks like an end of a call or a value is a part of the value.
        (f" to=get<|message|>{block(atem('get', city='a</atem:parameter>b</atem:invoke> c'))}<|eom|>", "", "",
         [("get", {"city": "a</atem:parameter>b</atem:invoke> c"})]),
        (f" to=get<|message|>{block(atem('get', at=json.dumps({'x': [1, None]})))}<|eom|>", "", "",
         [("get", {"at": {"x": [1, None]}})]),
        # A message to another recipient may begin without a mark.
        (f" to=self<|message|>Go to=here\nto=now<|message|>{block(atem('now'))}<|eom|>",
         "", "Go to=here\n", [("now", {})]),
        (" to=self<|message|>I want to", "", "I want to", []),
        (" to=get<|message|>no call<|eom|>", "no call", "", []),
        (" to=self<|message|>We add.<|eom|>It is 4.<|eot|>", "It is 4.", "We add.", []), (" to=us", " to=us", "", []),
        (f" to=get<|message|>{block(atem('get', city='Bo'))[:-40]}", block(atem("get", city="Bo"))[:-40], "", []),
    ],
)  # fmt: skip
def test_messages(tokenizer: Tokenizer, text: str, content: str, reasoning: str, calls: object) -> None:
    found = read(tokenizer, text)
    assert (*found[:2], [(name, json.loads(given)) for name, given in found[2]]) == (
        content,
        reasoning,
        calls,
    )


def test_a_call_that_is_cut_is_content_until_its_last_value_has_ended(tokenizer: Tokenizer) -> None:
    whole, value = block(atem("get", city="a</atem:invoke> b")), {"city": "a</atem:invoke> b"}
    least = len(whole.removesuffix("\n</atem:function_calls>"))
    for size in range(1, len(whole) + 1):
        content, _, calls = read(tokenizer, f" to=get<|message|>{whole[:size]}")
        expected = ("", [("get", value)]) if size >= least else (whole[:size], [])
        assert (content, [(name, json.loads(text)) for name, text in calls]) == expected


def test_a_stop_string_cuts_the_answer(tokenizer: Tokenizer) -> None:
    """The engine's text ends before the stop string, and its tokens do not."""
    text = " to=user<|message|>One two three<|eot|>"
    shown = len(tokenizer.decode(tokenizer.encode(" to=userOne", add_special_tokens=False)))
    assert read(tokenizer, text, shown=shown)[0] == "One"


def test_the_prompt_may_begin_the_message(tokenizer: Tokenizer) -> None:
    assert read(tokenizer, "It is 4.<|eot|>", prompt=PROMPT + USER)[:2] == ("It is 4.", "")


def test_the_template_decides() -> None:
    written = written_by(TEMPLATE)
    assert written.notation == ""  # no bare objects, although it shows parameters
    assert form_beginning(written, PROMPT, False, calls=False) == USER
    assert form_beginning(written, PROMPT + USER, False, calls=False) == ""
    assert ("", "<|message|>") in marks_around(written, PROMPT, False, True)
    assert ("", "<|message|>") not in marks_around(written, PROMPT + USER, False, True)
