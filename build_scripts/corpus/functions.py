"""Requests for short Python functions, with the function and one sentence on how it works."""

from __future__ import annotations

import random
from dataclasses import dataclass

ITEM_NAMES = (
    ("numbers", "number"),
    ("values", "value"),
    ("items", "item"),
    ("scores", "score"),
    ("prices", "price"),
)
WORD_NAMES = (
    ("words", "word"),
    ("names", "name"),
    ("lines", "line"),
    ("titles", "title"),
    ("labels", "label"),
)


@dataclass(frozen=True, slots=True)
class Choice:
    """A part of a function: `words` in prose, `code` with {x} for the element, and `short` for the function's name."""

    short: str
    words: str
    code: str


def number_filters(rng: random.Random) -> Choice:
    n, low = rng.randint(2, 20), rng.randint(1, 9)
    high = low + rng.randint(5, 40)
    return rng.choice(
        (
            Choice("even", "even", "{x} % 2 == 0"),
            Choice("odd", "odd", "{x} % 2 == 1"),
            Choice("positive", "positive", "{x} > 0"),
            Choice("negative", "negative", "{x} < 0"),
            Choice(f"above_{n}", f"greater than {n}", f"{{x}} > {n}"),
            Choice(f"below_{n}", f"smaller than {n}", f"{{x}} < {n}"),
            Choice(f"multiple_of_{n}", f"divisible by {n}", f"{{x}} % {n} == 0"),
            Choice(f"between_{low}_and_{high}", f"between {low} and {high}", f"{low} <= {{x}} <= {high}"),
            Choice(f"not_{n}", f"not equal to {n}", f"{{x}} != {n}"),
        )
    )


def number_maps(rng: random.Random) -> Choice:
    n = rng.randint(2, 12)
    return rng.choice(
        (
            Choice("values", "the numbers", "{x}"),
            Choice("squares", "the squares of the numbers", "{x} * {x}"),
            Choice("cubes", "the cubes of the numbers", "{x} ** 3"),
            Choice("doubles", "the doubles of the numbers", "2 * {x}"),
            Choice(f"times_{n}", f"{n} times the numbers", f"{n} * {{x}}"),
            Choice(f"plus_{n}", f"the numbers plus {n}", f"{{x}} + {n}"),
            Choice(f"minus_{n}", f"the numbers minus {n}", f"{{x}} - {n}"),
            Choice("absolute", "the absolute values of the numbers", "abs({x})"),
        )
    )


def word_filters(rng: random.Random) -> Choice:
    n, letter = rng.randint(2, 12), rng.choice("abcdefghklmnoprstw")
    return rng.choice(
        (
            Choice(f"longer_than_{n}", f"longer than {n} characters", f"len({{x}}) > {n}"),
            Choice(f"shorter_than_{n}", f"shorter than {n} characters", f"len({{x}}) < {n}"),
            Choice(f"of_length_{n}", f"exactly {n} characters long", f"len({{x}}) == {n}"),
            Choice(f"starting_with_{letter}", f"starting with '{letter}'", f'{{x}}.startswith("{letter}")'),
            Choice(f"ending_with_{letter}", f"ending with '{letter}'", f'{{x}}.endswith("{letter}")'),
            Choice(f"containing_{letter}", f"containing '{letter}'", f'"{letter}" in {{x}}'),
            Choice("upper", "in upper case", "{x}.isupper()"),
            Choice("palindrome", "that are palindromes", "{x} == {x}[::-1]"),
        )
    )


def word_maps(rng: random.Random) -> Choice:
    return rng.choice(
        (
            Choice("kept", "unchanged", "{x}"),
            Choice("upper_case", "in upper case", "{x}.upper()"),
            Choice("lower_case", "in lower case", "{x}.lower()"),
            Choice("reversed", "reversed", "{x}[::-1]"),
            Choice("stripped", "without surrounding spaces", "{x}.strip()"),
            Choice("capitalized", "with a capital first letter", "{x}.capitalize()"),
        )
    )


def answer(signature: str, doc: str, body: list[str], how: str) -> str:
    code = "\n".join([f"def {signature}:", f'    """{doc}"""', *(f"    {line}" for line in body)])
    return f"Here is the function:\n\n```python\n{code}\n```\n\n{how}"


def ask(rng: random.Random, name: str, takes: str, does: str) -> str:
    return rng.choice(
        (
            f"Write a Python function `{name}` that takes {takes} and returns {does}.",
            f"I need a function called {name} in Python. It gets {takes} and gives back {does}.",
            f"Please implement `{name}`: given {takes}, return {does}.",
            f"Define {name} in Python. Input: {takes}. Output: {does}.",
        )
    )


def number_sum(rng: random.Random) -> tuple[str, str]:
    many, one = rng.choice(ITEM_NAMES)
    kept, made = number_filters(rng), number_maps(rng)
    name = f"sum_{made.short}_{kept.short}"
    does = f"the sum of {made.words} that are {kept.words}"
    body = [
        "total = 0",
        f"for {one} in {many}:",
        f"    if {kept.code.format(x=one)}:",
        f"        total += {made.code.format(x=one)}",
        "return total",
    ]
    how = f"The loop visits every {one} once, keeps those that are {kept.words}, and adds them to the total."
    doc = f"Return {does}."
    return ask(rng, name, f"a list of {many}", does), answer(
        f"{name}({many}: list[int]) -> int", doc, body, how
    )


def number_list(rng: random.Random) -> tuple[str, str]:
    many, one = rng.choice(ITEM_NAMES)
    kept, made = number_filters(rng), number_maps(rng)
    name = f"list_{made.short}_{kept.short}"
    does = f"a list of {made.words} that are {kept.words}"
    doc = f"Return {does}."
    value, test = made.code.format(x=one), kept.code.format(x=one)
    signature = f"{name}({many}: list[int]) -> list[int]"
    asked = ask(rng, name, f"a list of {many}", does)
    if rng.random() < 0.5:
        body = [f"return [{value} for {one} in {many} if {test}]"]
        how = f"The list comprehension keeps every {one} that is {kept.words} and collects the results in order."
        return f"{asked} Use a list comprehension.", answer(signature, doc, body, how)
    body = [
        "result = []",
        f"for {one} in {many}:",
        f"    if {test}:",
        f"        result.append({value})",
        "return result",
    ]
    how = f"The loop keeps every {one} that is {kept.words} and appends the results in order."
    return f"{asked} Use a loop.", answer(signature, doc, body, how)


def count(rng: random.Random) -> tuple[str, str]:
    words = rng.random() < 0.5
    many, one = rng.choice(WORD_NAMES if words else ITEM_NAMES)
    kept = word_filters(rng) if words else number_filters(rng)
    name = f"count_{kept.short}"
    does = f"how many of them are {kept.words}"
    body = [
        "count = 0",
        f"for {one} in {many}:",
        f"    if {kept.code.format(x=one)}:",
        "        count += 1",
        "return count",
    ]
    how = f"The counter starts at zero and grows by one for every {one} that is tested true."
    kind = "str" if words else "int"
    asked = ask(rng, name, f"a list of {many}", does)
    return asked, answer(f"{name}({many}: list[{kind}]) -> int", f"Return {does}.", body, how)


def word_list(rng: random.Random) -> tuple[str, str]:
    many, one = rng.choice(WORD_NAMES)
    kept, made = word_filters(rng), word_maps(rng)
    name = f"{many}_{kept.short}_{made.short}"
    does = f"the {many} {kept.words}, each one {made.words}"
    body = [
        "result = []",
        f"for {one} in {many}:",
        f"    if {kept.code.format(x=one)}:",
        f"        result.append({made.code.format(x=one)})",
        "return result",
    ]
    how = f"Every {one} is tested first, and the ones that pass are added to the result {made.words}."
    asked = ask(rng, name, f"a list of {many}", does)
    return asked, answer(f"{name}({many}: list[str]) -> list[str]", f"Return {does}.", body, how)


def search(rng: random.Random) -> tuple[str, str]:
    words = rng.random() < 0.5
    many, one = rng.choice(WORD_NAMES if words else ITEM_NAMES)
    kept = word_filters(rng) if words else number_filters(rng)
    kind = "str" if words else "int"
    test = kept.code.format(x=one)
    if rng.random() < 0.5:
        name = f"first_{kept.short}"
        does = f"the first {one} {'' if words else 'that is '}{kept.words}, or None if there is none"
        body = [f"for {one} in {many}:", f"    if {test}:", f"        return {one}", "return None"]
        how = f"The loop stops at the first {one} that passes the test, and None is returned when no {one} does."
        result = f"{kind} | None"
    else:
        name = f"positions_{kept.short}"
        does = f"the positions of the {many} {'' if words else 'that are '}{kept.words}"
        body = [
            "positions = []",
            f"for index, {one} in enumerate({many}):",
            f"    if {test}:",
            "        positions.append(index)",
            "return positions",
        ]
        how = f"The call to enumerate gives each {one} with its index, and the indexes that pass the test are kept."
        result = "list[int]"
    asked = ask(rng, name, f"a list of {many}", does)
    return asked, answer(f"{name}({many}: list[{kind}]) -> {result}", f"Return {does}.", body, how)


def grouping(rng: random.Random) -> tuple[str, str]:
    many, one = rng.choice(WORD_NAMES)
    by, words, code = rng.choice(
        (
            ("length", "their length", "len({x})"),
            ("first_letter", "their first letter", "{x}[0]"),
            ("last_letter", "their last letter", "{x}[-1]"),
            ("lower_case", "their lower case form", "{x}.lower()"),
        )
    )
    key = code.format(x=one)
    if rng.random() < 0.5:
        name, does = f"group_{many}_by_{by}", f"a dictionary that groups the {many} by {words}"
        body = ["groups = {}", f"for {one} in {many}:", f"    groups.setdefault({key}, []).append({one})"]
        body.append("return groups")
        how = f"The method setdefault starts an empty list for a new key, and every {one} is appended to its group."
    else:
        name, does = f"count_{many}_by_{by}", f"a dictionary that counts the {many} by {words}"
        body = ["counts = {}", f"for {one} in {many}:", f"    key = {key}"]
        body += ["    counts[key] = counts.get(key, 0) + 1", "return counts"]
        how = f"The method get gives zero for a new key, so every {one} raises the count of its key by one."
    asked = ask(rng, name, f"a list of {many}", does)
    return asked, answer(f"{name}({many}: list[str]) -> dict", f"Return {does}.", body, how)


def series(rng: random.Random) -> tuple[str, str]:
    n, start, other = rng.randint(2, 12), rng.randint(1, 9), rng.randint(1, 9)
    name, does, body, how = rng.choice(
        (
            (
                f"sum_multiples_of_{n}",
                f"the sum of all multiples of {n} up to and including limit",
                [
                    "total = 0",
                    f"for number in range({n}, limit + 1, {n}):",
                    "    total += number",
                    "return total",
                ],
                f"The range starts at {n} and moves in steps of {n}, so only multiples are added.",
            ),
            (
                f"series_from_{start}_and_{other}",
                f"the first limit terms of the series that starts with {start} and {other}, "
                "where each term is the sum of the two before it",
                [
                    "terms = []",
                    f"a, b = {start}, {other}",
                    "for _ in range(limit):",
                    "    terms.append(a)",
                    "    a, b = b, a + b",
                    "return terms",
                ],
                "Two variables hold the next two terms, and each step moves both of them forward.",
            ),
            (
                f"powers_of_{n}",
                f"all powers of {n} that are not greater than limit",
                [
                    "powers = []",
                    "power = 1",
                    "while power <= limit:",
                    "    powers.append(power)",
                    f"    power *= {n}",
                    "return powers",
                ],
                f"The loop multiplies the power by {n} until it is greater than the limit.",
            ),
            (
                f"countdown_by_{n}",
                f"a list that counts down from limit to zero in steps of {n}",
                [
                    "steps = []",
                    "while limit >= 0:",
                    "    steps.append(limit)",
                    f"    limit -= {n}",
                    "return steps",
                ],
                f"The loop keeps the current value and takes {n} away until the value is negative.",
            ),
        )
    )
    result = "int" if name.startswith("sum") else "list[int]"
    return ask(rng, name, "an integer limit", does), answer(
        f"{name}(limit: int) -> {result}", f"Return {does}.", body, how
    )


def records(rng: random.Random) -> tuple[str, str]:
    what, key = (
        rng.choice(("users", "orders", "books", "cities", "games")),
        rng.choice(("age", "price", "size", "year", "score")),
    )
    one = {"cities": "city"}.get(what, what[:-1])
    n = rng.randint(2, 90)
    name, does, body, how = rng.choice(
        (
            (
                f"{what}_with_{key}_above_{n}",
                f"the {what} whose {key} is greater than {n}",
                [
                    "result = []",
                    f"for {one} in {what}:",
                    f'    if {one}["{key}"] > {n}:',
                    f"        result.append({one})",
                    "return result",
                ],
                f"Each {one} is a dictionary, and it is kept when its {key} is greater than {n}.",
            ),
            (
                f"{what}_sorted_by_{key}",
                f"the {what} sorted by {key}, the largest first",
                [f'return sorted({what}, key=lambda {one}: {one}["{key}"], reverse=True)'],
                f"The key function reads the {key} of each {one}, and reverse puts the largest first.",
            ),
            (
                f"average_{key}_of_{what}",
                f"the average {key} of the {what}, or 0 for an empty list",
                [
                    f"if not {what}:",
                    "    return 0",
                    f'total = sum({one}["{key}"] for {one} in {what})',
                    f"return total / len({what})",
                ],
                f"An empty list gives 0, and otherwise the sum of every {key} is divided by the number of {what}.",
            ),
        )
    )
    result = "float" if name.startswith("average") else "list[dict]"
    takes = f"a list of {what}, each one a dictionary"
    asked = ask(rng, name, takes, does)
    return asked, answer(f"{name}({what}: list[dict]) -> {result}", f"Return {does}.", body, how)


KINDS = (number_sum, number_list, number_list, count, word_list, word_list, search, grouping, series, records)


def example(rng: random.Random) -> tuple[list[dict[str, str]], str]:
    """Messages and the answer to one request."""
    asked, answered = rng.choice(KINDS)(rng)
    return [{"role": "user", "content": asked}], answered
