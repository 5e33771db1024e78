"""Docstrings, comments, help texts, error texts and pages have short sentences that begin with their subject."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TESTS = ("tests", "server_tests", "client_tests")
FOLDERS = ("dflash_trt", "plugins", "build_scripts", "triton_repo", "examples", *TESTS)
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
# Their strings are training data, not prose of the project.
DATA = ROOT / "build_scripts" / "corpus"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
MOST_WORDS = 30
END = re.compile(r"(?<=[.!?])[)\"'*]*\s+(?=[A-Z0-9`\"'(\[*])")
LABEL = re.compile(r"\n(?=\s*(?:[-*|#>]|\d+\. |[\w`.,<>\[\]*/ ()\"-]{1,60}:(?:\s|$)|\w+ {2,}))")
COMMAND = re.compile(r"^ {2,}(?:dflash-trt|python|make|pip|curl|--).*$", re.MULTILINE)
RIDDLE = re.compile(r"^(?:Of|What|Which|Whoever|Whatever) [^?]*$")


def sentences(text: str) -> Iterator[str]:
    """Sentences of a text. A blank line, a label (`name: ...`) and a bullet begin a new one; drawings have none."""
    for part in re.split(r"\n\s*\n", COMMAND.sub("", text)):
        for item in LABEL.split(part):
            if not re.search(r"\S {3,}\S", item.strip()):
                yield from END.split(" ".join(item.split()))


def faults(text: str) -> Iterator[str]:
    for sentence in sentences(text):
        count = sum(1 for word in sentence.split() if re.search("[A-Za-z]{2}", word))
        if count > MOST_WORDS:
            yield f"{count} words: {sentence}"
        elif RIDDLE.match(sentence) and count > 4:
            yield f"begins without its subject: {sentence}"


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of every docstring, block of comments, and string that reads as a sentence."""
    source = path.read_text()
    tree = ast.parse(source)
    docstrings: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text is not None and isinstance(node.body[0], ast.Expr):
                docstrings.add(id(node.body[0].value))
                yield node.body[0].lineno, text
    if not path.is_relative_to(DATA) and path.parts[len(ROOT.parts)] not in TESTS:
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "X" for part in node.values)
                yield node.lineno, "".join(map(str, parts))
            elif (
                isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings
            ):
                yield node.lineno, "" if "{%" in node.value else node.value
    block: list[str] = []
    first = last = (0, 0)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        if token.start != (last[0] + 1, last[1]):
            yield first[0], "\n".join(block)
            block, first = [], token.start
        block.append(token.string.removeprefix("#").removeprefix(" "))
        last = token.start
    yield first[0], "\n".join(block)


@pytest.mark.parametrize("folder", FOLDERS)
def test_sentences_of_the_code_are_short_and_begin_with_their_subject(folder: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {fault}"
        for path in SOURCES
        if path.is_relative_to(ROOT / folder)
        for line, text in prose(path)
        for fault in faults(text)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_sentences_of_the_pages_are_short_and_begin_with_their_subject(page: Path) -> None:
    text = re.sub(r"```.*?```|^(?: {4}|\|).*?$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    found = list(faults(text))
    assert not found, "\n".join(found)


def test_a_long_sentence_and_a_riddle_are_found() -> None:
    assert not list(faults("A short one. " * 20))
    assert next(faults("word " * 31)).startswith("31 words")
    assert next(faults("Of experts in few bits as many go into one product as fit.")).startswith(
        "begins without"
    )
    assert not list(faults("What is a bundle? Of it."))
