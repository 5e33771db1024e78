"""Prompts from the forms and topics of natural.toml, and from Python's documentation and library (PSF licence)."""

from __future__ import annotations

import ast
import random
import re
import sysconfig
import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path

from build_scripts.corpus import entries

Messages = list[dict[str, str]]
_DATA = tomllib.loads(Path(__file__).with_name("natural.toml").read_text(encoding="utf-8"))
FORMS: dict[str, list[str]] = _DATA["forms"]
_TOPICS = {name: entries(text) for name, text in _DATA["topics"].items()}
_FIELDS = {field: name for name, text in _DATA["fields"].items() for field in entries(text)}
_NUMBERS = {"a": (2, 99), "c": (2, 20), "few": (2, 10), "hundreds": (30, 900), "big": (100, 999)}
_LIBRARY = Path(sysconfig.get_paths()["stdlib"])
_LEAST, _MOST = 40, 160  # words of a paragraph


@cache
def _trees() -> list[ast.Module]:
    """Every single-file module of the standard library."""
    return [ast.parse(file.read_text(encoding="utf-8")) for file in sorted(_LIBRARY.glob("*.py"))]


@cache
def _docstrings() -> list[tuple[ast.AST, str]]:
    """Everything with a docstring: modules, classes and functions."""
    nodes = (node for tree in _trees() for node in ast.walk(tree))
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef
    return [(node, text) for node in nodes if isinstance(node, kinds) and (text := ast.get_docstring(node))]


@cache
def _paragraphs() -> list[str]:
    """Prose of the language reference and of docstrings, one paragraph each."""
    from pydoc_data.topics import topics

    made = set()
    for text in [*topics.values(), *(text for _, text in _docstrings())]:
        for paragraph in re.split(r"\n\s*\n", text):
            words = paragraph.split()
            prose = sum(word.strip(".,;:()'\"").isalpha() for word in words)
            plain = words[-1:] and words[-1].endswith(".") and ":`" not in paragraph
            if _LEAST <= len(words) <= _MOST and prose > 0.8 * len(words) and plain:
                made.add(re.sub(r"[*\"]", "", " ".join(words)))
    return sorted(made)


@cache
def _functions() -> list[str]:
    """Source of short functions of the standard library, without their docstrings."""
    made = set()
    for node in (node for tree in _trees() for node in tree.body):
        if isinstance(node, ast.FunctionDef) and 4 <= (node.end_lineno or 0) - node.lineno <= 22:
            if ast.get_docstring(node):
                node.body = node.body[1:] or [ast.Pass()]
            made.add(ast.unparse(node))
    return sorted(code for code in made if 120 < len(code) < 900)


@cache
def _purposes() -> list[str]:
    """The purposes of functions in the standard library: first sentences of docstrings."""
    made = set()
    for node, text in _docstrings():
        first = text.split("\n\n")[0].replace("\n", " ")
        short = 5 <= len(first.split()) <= 16 and first.endswith(".")
        if isinstance(node, ast.FunctionDef) and short and re.match(r"[A-Z][a-z]+ ", first):
            made.add(first[0].lower() + first[1:-1])
    return sorted(made)


_TEXTS: dict[str, Callable[[], list[str]]] = {
    "code": _functions,
    "purpose": _purposes,
    "paragraph": _paragraphs,
}


class _Values(dict[str, str]):
    """The values of a form's names, chosen when the form asks for them."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def __missing__(self, name: str) -> str:
        self[name] = value = self._choose(name.rstrip("2"), name[len(name.rstrip("2")) :])
        return value

    def _choose(self, kind: str, second: str) -> str:
        rng = self._rng
        if kind in _NUMBERS:
            return str(rng.randint(*_NUMBERS[kind]))
        if kind in ("fields", "pairs", "broken", "yaml"):
            fields = _DATA["records"][self["record" + second]].split(", ")
            if kind == "fields":
                return ", ".join(fields)
            form, separator = {
                "pairs": ("{} {}", ", "),
                "broken": ('"{}": {}', ", "),
                "yaml": ("{}: {}", "\n"),
            }[kind]
            return separator.join(form.format(field, self._value(field)) for field in fields)
        if kind == "report":
            parts = _DATA["report"]
            sentences = rng.sample(parts["middles"], rng.randint(2, 5))
            sentences = [rng.choice(parts["openings"]), *sentences, rng.choice(parts["endings"])]
            return " ".join(sentences).format_map(self)
        if kind == "text":
            return self[rng.choice(("report", "paragraph"))]
        if kind in _TEXTS:
            return rng.choice(_TEXTS[kind]())
        choices = list(_DATA["records"]) if kind == "record" else _TOPICS[kind]
        return rng.choice([choice for choice in choices if choice != self.get(kind)])

    def _value(self, field: str) -> str:
        """A made-up value of a field of a record."""
        if field in ("date", "due"):
            return f"2026-{self._rng.randint(1, 12):02}-{self._rng.randint(1, 28):02}"
        if field in _FIELDS:
            return self._rng.choice(_TOPICS[_FIELDS[field]])
        return str(self._rng.randint(1, 500))


def prompt(rng: random.Random, category: str) -> Messages:
    """The messages of a prompt of a category of FORMS; the last one is the user's."""
    turns = rng.choice(FORMS[category]).split(" | ")
    values, roles = _Values(rng), ("user", "assistant")
    return [{"role": roles[i % 2], "content": turn.format_map(values)} for i, turn in enumerate(turns)]
