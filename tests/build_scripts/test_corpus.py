"""The training text is the same on every run, split without overlap, and correct."""

from __future__ import annotations

import json
import re
from itertools import islice
from typing import Any

import pytest

from build_scripts.corpus.corpus import CATEGORIES, Example, example, training_examples
from build_scripts.corpus.tool_calls import TOOLS, signature
from dflash_trt.checkpoint.catalogue import SHIPPED
from dflash_trt.prompts import read_prompts
from dflash_trt.text.tokenizer import Tokenizer

COUNT = 400


def made(category: str) -> list[Example]:
    return [example(category, index) for index in range(COUNT)]


@pytest.mark.parametrize("category", CATEGORIES)
def test_deterministic_and_varied(category: str) -> None:
    first = made(category)
    assert first == made(category)
    assert len({item.messages[-1]["content"] for item in first}) > 0.85 * COUNT


@pytest.mark.parametrize("category", CATEGORIES)
def test_shipped_prompts_never_train(category: str) -> None:
    shipped = [prompt for prompt in read_prompts(None, 0) if prompt.category == category]
    assert len(shipped) == 32
    for prompt in shipped:
        assert not isinstance(prompt.content, str)
        assert Example(category, tuple(prompt.content), "").held_out
    trained = list(islice(training_examples(category), 1000))
    assert 0 < sum(example(category, index).held_out for index in range(1000)) < 100
    assert not any(made.held_out for made in trained)


def test_arithmetic_is_right() -> None:
    equations = 0
    for item in made("math"):
        for line in item.answer.splitlines():
            for chain in re.findall(r"[\d+\-*/ ]+(?:= [\d+\-*/ ]+)+", line.partition(". ")[2]):
                values = {eval(side) for side in chain.split("=")}
                assert len(values) == 1, line
                equations += 1
        last_number = re.findall(r"\d+", item.answer.splitlines()[-2].replace("Check:", ""))
        assert last_number, item.answer
    assert equations > 3 * COUNT


def test_stated_result_ends_the_steps() -> None:
    for item in made("math"):
        *steps, answer = item.answer.splitlines()
        stated = re.findall(r"\d+", answer)[0]
        assert stated in re.findall(r"\d+", "\n".join(steps[-2:])), item.answer


def test_code_defines_what_was_asked_and_does_what_it_says() -> None:
    expected, tested = {"sum_squares_even": 20, "sum_values_odd": 4, "count_even": 2}, 0
    for item in made("code"):
        source = re.findall(r"```python\n(.*?)```", item.answer, re.S)[0]
        defined: dict[str, Any] = {}
        exec(compile(source, "answer", "exec"), defined)
        name = re.findall(r"def (\w+)", source)[0]
        assert callable(defined[name])
        assert name in item.messages[-1]["content"]
        if name in expected:
            assert defined[name]([1, 2, 3, 4]) == expected[name]
            tested += 1
    assert tested


def test_tool_calls_parse_and_fit_their_signature() -> None:
    for item in made("tools"):
        calls = re.findall(r"<tool_call>\n(.*?)\n</tool_call>", item.answer)
        assert calls
        for text in calls:
            call = json.loads(text)
            assert set(call) == {"name", "arguments"}
            assert list(call["arguments"]) == list(TOOLS[call["name"]][1])
            assert signature(call["name"]) in item.messages[0]["content"]


def test_chat_template_of_the_shipped_pair_renders_what_is_trained_on() -> None:
    tokenizer = Tokenizer(SHIPPED / "tiny" / "target")
    for category in CATEGORIES:
        for item in made(category)[:50]:
            assert tokenizer.apply_chat_template(list(item.messages)) == item.prompt
    item = made("tools")[0]
    tools = [json.loads(line) for line in item.messages[0]["content"].splitlines() if line.startswith("{")]
    assert tokenizer.apply_chat_template(list(item.messages[1:]), tools=tools) == item.prompt
