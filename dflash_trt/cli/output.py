"""Output of the commands: aligned columns, byte counts, JSON."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO


def print_table(rows: Iterable[Sequence[str]], *, heading: bool = False) -> None:
    """Print rows of equal length as left-aligned columns. The last column is wrapped to the terminal.

    With `heading` the first row is bold, on a terminal with colours.
    """
    rows = list(rows)
    *widths, _ = (max(map(len, column)) for column in zip(*rows, strict=True))
    room = max(line_width() - sum(width + 2 for width in widths), 20)
    bold = heading and colours(sys.stdout)
    for number, (*cells, last) in enumerate(rows):
        start = "".join(f"{cell:<{width}}  " for cell, width in zip(cells, widths, strict=True))
        parts = textwrap.wrap(last, room, break_long_words=False, break_on_hyphens=False) or [""]
        for part in parts:
            line = (start + part).rstrip()
            print(f"\033[1m{line}\033[0m" if bold and number == 0 else line)
            start = " " * len(start)


def print_figures(rows: Sequence[Sequence[str]], *, headings: int = 1, left: int = 0) -> None:
    """Print rows of equal length, right-aligned but for the column `left`. The first `headings` rows are bold."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    bold = colours(sys.stdout)
    for number, cells in enumerate(rows):
        aligned = (
            f"{cell:<{width}}" if place == left else f"{cell:>{width}}"
            for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        line = "  ".join(aligned).rstrip()
        print(f"\033[1m{line}\033[0m" if bold and number < headings else line)


def print_text(line: str) -> None:
    """Print a line. On a terminal it is wrapped between words, and what follows is indented."""
    room = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    options = {"subsequent_indent": "  ", "break_long_words": False, "break_on_hyphens": False}
    print(textwrap.fill(line, room, **options) if room else line)  # type: ignore[arg-type]


class Words:
    """Text that appears in pieces, wrapped between words on a terminal: a word without room is taken back.

    `emit` prints a piece, with a style that only it knows. Elsewhere than on a terminal nothing is wrapped.
    """

    def __init__(self, emit: Callable[[str, str], None]) -> None:
        self._emit, self._column = emit, 0
        self._word: list[tuple[str, str]] = []  # the pieces of the word at the end
        self._wraps = sys.stdout.isatty() and os.environ.get("TERM") != "dumb" and os.name != "nt"

    def write(self, text: str, style: str = "") -> None:
        """Add a piece."""
        if not self._wraps:
            self._emit(text, style)
            return
        from rich.cells import cell_len

        width = shutil.get_terminal_size().columns - 1  # a full line would leave the place of the cursor open
        line = ""
        for part in re.findall(r"\n|[^\S\n]+|\S+", text):
            # Earlier pieces of this word stand at the end of the line. Then nothing of this text precedes it.
            size, begun = cell_len(part), sum(cell_len(piece) for piece, _ in self._word)
            if part == "\n":
                self._column = size = 0
            elif self._column + size > width and self._column > begun and begun + size <= width:
                if part.isspace():
                    part, size = "\n", 0
                elif begun:
                    sys.stdout.write(f"\033[{begun}D\033[K\n")
                    for piece in self._word:
                        self._emit(*piece)
                else:
                    line += "\n"
                self._column = 0 if part == "\n" else begun
            line += part
            self._word = [] if part.isspace() else [*self._word, (part, style)]
            self._column = (self._column + size) % (width + 1)
        self._emit(line, style)


def line_width() -> int:
    """Columns of the terminal; 100 elsewhere, so that what is written to a file can be read."""
    given = os.environ.get("COLUMNS", "").isdecimal() or sys.stdout.isatty()
    return shutil.get_terminal_size().columns if given else 100


@contextmanager
def loading(place: object) -> Iterator[None]:
    """A line on standard error while a bundle is loaded, on a terminal. It disappears afterwards."""
    shown = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    if shown:
        line = f"loading {place} ..."[: shutil.get_terminal_size().columns - 1]
        print(line, end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        if shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def colours(stream: TextIO) -> bool:
    """Whether a stream shows bold text and colours (no-color.org)."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or os.name == "nt"
    return stream.isatty() and not plain


def print_json(document: object) -> None:
    """Print a document as indented JSON."""
    print(json.dumps(document, indent=2, ensure_ascii=False))


def byte_count(count: float) -> str:
    """A byte count with a decimal unit: 18.4 MB."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
