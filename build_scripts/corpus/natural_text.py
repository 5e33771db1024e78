"""Texts inside prompts: paragraphs of Python's documentation (PSF licence), and short reports of our own."""

from __future__ import annotations

import ast
import random
import re
import sysconfig
from functools import cache
from pathlib import Path

from build_scripts.corpus.natural_topics import NAMES, OBJECTS, PLACES

LIBRARY = Path(sysconfig.get_paths()["stdlib"])
_LEAST, _MOST = 40, 160  # words of a paragraph


@cache
def _trees() -> list[ast.Module]:
    """Every single-file module of the standard library."""
    files = sorted(LIBRARY.glob("*.py"))
    return [ast.parse(file.read_text(encoding="utf-8")) for file in files]


@cache
def _docstrings() -> list[tuple[ast.AST, str]]:
    """Everything with a docstring: modules, classes and functions."""
    nodes = (node for tree in _trees() for node in ast.walk(tree))
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef
    found = ((node, ast.get_docstring(node) or "") for node in nodes if isinstance(node, kinds))
    return [(node, text) for node, text in found if text]


@cache
def paragraphs() -> list[str]:
    """Prose of the language reference and of docstrings, one paragraph each."""
    from pydoc_data.topics import topics

    found = []
    for text in [*topics.values(), *(text for _, text in _docstrings())]:
        for paragraph in re.split(r"\n\s*\n", text):
            words = paragraph.split()
            prose = sum(word.strip(".,;:()'\"").isalpha() for word in words)
            plain = words[-1:] and words[-1].endswith(".") and ":`" not in paragraph
            if _LEAST <= len(words) <= _MOST and prose > 0.8 * len(words) and plain:
                found.append(re.sub(r"[*\"]", "", " ".join(words)))
    return sorted(set(found))


@cache
def functions() -> list[str]:
    """Source of short functions of the standard library, without their docstrings."""
    found = []
    for tree in _trees():
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and 4 <= (node.end_lineno or 0) - node.lineno <= 22:
                if ast.get_docstring(node):
                    node.body = node.body[1:] or [ast.Pass()]
                code = ast.unparse(node)
                if 120 < len(code) < 900:
                    found.append(code)
    return sorted(set(found))


@cache
def purposes() -> list[str]:
    """The purposes of functions in the standard library: first sentences of docstrings."""
    found = []
    for node, text in _docstrings():
        first = text.split("\n\n")[0].replace("\n", " ")
        short = 5 <= len(first.split()) <= 16 and first.endswith(".")
        if isinstance(node, ast.FunctionDef) and short and re.match(r"[A-Z][a-z]+ ", first):
            found.append(first[0].lower() + first[1:-1])
    return sorted(set(found))


_OPENINGS = (
    "{place} will get a new {thing} next year, the city council decided on {day}.",
    "A {thing} in {place} had to close on {day} after {trouble}.",
    "{name} from {place} has been repairing old {objects} for more than {n} years.",
    "More than {n} people came to the {thing} in {place} on {day}, although it rained all morning.",
    "Since {day}, visitors of the {thing} in {place} no longer pay for a ticket.",
    "When {name} opened a small {thing} in {place}, nobody expected it to last a year.",
    "The {thing} of {place} is looking for volunteers.",
    "After {trouble}, the {thing} in {place} opens again on {day}.",
)
_MIDDLES = (
    "The work will cost about {m} thousand euros, and half of it is paid by private donors.",
    '"We did not see that coming," said {other}, who has worked there for {k} years.',
    "Neighbours had complained about the noise for months.",
    "Experts had warned of this in a report that was published {k} years ago.",
    "About {n} visitors come every week, most of them families with small children.",
    "The idea came from {other}, a teacher, who had seen something like it on a journey to {town}.",
    "In the first week alone, {n} {objects} were sold.",
    "Critics say that the money would be better spent on schools and buses.",
    "Pupils of a nearby school helped and planted {k} trees around the building.",
    "Nobody was hurt, but the damage is larger than it first seemed.",
    "A similar project in {town} failed because too few people knew about it.",
    "The building is more than {n} years old and its roof has to be replaced.",
    "{other} now leads a team of {k}, and two of them work at night.",
    "For many old people, it is the only place where they meet others.",
)
_ENDINGS = (
    "A decision is expected before the end of the month.",
    "{name} hopes that others will follow the example.",
    "Whoever wants to help can call the office or come by in the afternoon.",
    "If all goes well, the doors open in spring.",
    "For now, the plan is to wait and see.",
    "The next meeting is on {day} at seven in the evening.",
    "What happens with the rest of the {objects} is still open.",
)
_VENUES = (
    "library", "market", "museum", "swimming pool", "bakery", "railway station", "zoo", "theatre", "bridge", "park",
    "hospital", "bookshop", "harbour", "cinema", "playground", "concert hall", "school", "bicycle workshop", "café",
    "community garden", "observatory", "youth club", "ferry", "farm", "repair shop",
)  # fmt: skip
_TROUBLES = (
    "a water pipe burst", "a storm tore off part of the roof", "two owners fell out", "inspectors found mice",
    "a fire in the kitchen", "the heating failed", "rents doubled", "a long strike", "a flood in the cellar",
    "the last baker retired", "thieves stole the copper pipes",
)  # fmt: skip
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


def report(rng: random.Random) -> str:
    """A short local news report."""
    name, other = rng.sample(NAMES, 2)
    place, town = rng.sample(PLACES, 2)
    words = {
        "name": name,
        "other": other,
        "place": place,
        "town": town,
        "day": rng.choice(_DAYS),
        "thing": rng.choice(_VENUES),
        "trouble": rng.choice(_TROUBLES),
        "objects": rng.choice(OBJECTS),
        "n": str(rng.randrange(30, 900)),
        "m": str(rng.randrange(20, 950)),
        "k": str(rng.randrange(3, 29)),
    }
    lines = [rng.choice(_OPENINGS), *rng.sample(_MIDDLES, rng.randint(2, 5)), rng.choice(_ENDINGS)]
    return " ".join(line.format_map(words) for line in lines)
