"""Requests for short Python functions, with the function and one sentence on how it works."""

from __future__ import annotations

import random
from dataclasses import dataclass

# What a list holds: its name, an element, its type. Then filters and changes of an element {x}: a part of the
# function's name, words, code. {n} is a number, {c} a letter.
NUMBERS = (("numbers", "number"), ("values", "value"), ("scores", "score"), ("prices", "price"))
WORDS = (("words", "word"), ("names", "name"), ("lines", "line"), ("titles", "title"))
NUMBER_FILTERS = (
    ("even", "even", "{x} % 2 == 0"), ("odd", "odd", "{x} % 2 == 1"), ("positive", "positive", "{x} > 0"),
    ("above_{n}", "greater than {n}", "{x} > {n}"), ("below_{n}", "smaller than {n}", "{x} < {n}"),
    ("multiple_of_{n}", "divisible by {n}", "{x} % {n} == 0"), ("not_{n}", "not equal to {n}", "{x} != {n}"),
)  # fmt: skip
NUMBER_MAPS = (
    ("values", "the numbers", "{x}"),
    ("squares", "the squares of the numbers", "{x} * {x}"),
    ("times_{n}", "{n} times the numbers", "{n} * {x}"),
    ("plus_{n}", "the numbers plus {n}", "{x} + {n}"),
    ("absolute", "the absolute values of the numbers", "abs({x})"),
)
WORD_FILTERS = (
    ("longer_than_{n}", "longer than {n} characters", "len({x}) > {n}"),
    ("of_length_{n}", "exactly {n} characters long", "len({x}) == {n}"),
    ("starting_with_{c}", "starting with '{c}'", '{x}.startswith("{c}")'),
    ("ending_with_{c}", "ending with '{c}'", '{x}.endswith("{c}")'),
    ("containing_{c}", "containing '{c}'", '"{c}" in {x}'),
    ("upper", "in upper case", "{x}.isupper()"),
)
WORD_MAPS = (
    ("upper_case", "in upper case", "{x}.upper()"),
    ("lower_case", "in lower case", "{x}.lower()"),
    ("reversed", "reversed", "{x}[::-1]"),
    ("stripped", "without surrounding spaces", "{x}.strip()"),
)
REQUESTS = (
    "Write a Python function `{name}` that takes {takes} and returns {does}.",
    "I need a function called {name} in Python. It gets {takes} and gives back {does}.",
    "Please implement `{name}`: given {takes}, return {does}.",
)


@dataclass(frozen=True, slots=True)
class Shape:
    """A function, with {one} and {many} for element and list, and name, words and code of filter and change."""

    name: str
    does: str
    result: str
    body: str
    how: str


_LOOP = "for {one} in {many}:\n    if {test}:\n"
SHAPES = {
    "sum": Shape(
        "sum_{made}_{kept}",
        "the sum of {made_words} that are {kept_words}",
        "int",
        f"total = 0\n{_LOOP}        total += {{value}}\nreturn total",
        "The loop visits every {one} once, keeps those that are {kept_words}, and adds them to the total.",
    ),
    "list": Shape(
        "list_{made}_{kept}",
        "a list of {made_words} that are {kept_words}",
        "list[int]",
        "return [{value} for {one} in {many} if {test}]",
        "The list comprehension keeps every {one} that is {kept_words} and collects the results in order.",
    ),
    "count": Shape(
        "count_{kept}",
        "how many of them are {kept_words}",
        "int",
        f"count = 0\n{_LOOP}        count += 1\nreturn count",
        "The counter starts at zero and grows by one for every {one} that is tested true.",
    ),
    "words": Shape(
        "{many}_{kept}_{made}",
        "the {many} {kept_words}, each one {made_words}",
        "list[str]",
        f"result = []\n{_LOOP}        result.append({{value}})\nreturn result",
        "Every {one} is tested first, and the ones that pass are added to the result {made_words}.",
    ),
    "first": Shape(
        "first_{kept}",
        "the first {one} {kept_words}, or None if there is none",
        "str | None",
        f"{_LOOP}        return {{one}}\nreturn None",
        "The loop stops at the first {one} that passes the test, and None is returned when no {one} does.",
    ),
}


def example(rng: random.Random) -> tuple[list[dict[str, str]], str]:
    """Messages and the answer to one request."""
    kind = rng.choice(list(SHAPES))
    shape, of_words = SHAPES[kind], kind in ("words", "first") or (kind == "count" and rng.random() < 0.5)
    many, one = rng.choice(WORDS if of_words else NUMBERS)
    kept = rng.choice(WORD_FILTERS if of_words else NUMBER_FILTERS)
    made = rng.choice(WORD_MAPS if of_words else NUMBER_MAPS)
    names = dict(zip(("kept", "kept_words", "test"), kept, strict=True))
    names |= zip(("made", "made_words", "value"), made, strict=True)
    n, c = rng.randint(2, 30), rng.choice("abcdefghklmnoprstw")
    names = {key: text.format(x=one, n=n, c=c) for key, text in names.items()} | {"many": many, "one": one}
    name, does, body, how = (text.format(**names) for text in (shape.name, shape.does, shape.body, shape.how))
    signature = f"{name}({many}: list[{'str' if of_words else 'int'}]) -> {shape.result}"
    lines = [f"def {signature}:", f'    """Return {does}."""', *(f"    {line}" for line in body.split("\n"))]
    asked = rng.choice(REQUESTS).format(name=name, takes=f"a list of {many}", does=does)
    code = "\n".join(lines)
    return [{"role": "user", "content": asked}], f"Here is the function:\n\n```python\n{code}\n```\n\n{how}"
