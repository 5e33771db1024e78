"""Output of the commands: aligned columns, byte counts, JSON."""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO


def print_table(rows: Iterable[Sequence[str]], *, headings: int = 0, right: Collection[int] = ()) -> None:
    """Print rows of equal length as columns. The last one is wrapped to the terminal.

    headings: so many rows at the top are bold, on a terminal with colours. right: the columns that are aligned there.
    """
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    # A file has 100 columns, so that what is written to it can be read.
    terminal = os.environ.get("COLUMNS", "").isdecimal() or sys.stdout.isatty()
    line_width = shutil.get_terminal_size().columns if terminal else 100
    room = max(line_width - sum(width + 2 for width in widths[:-1]), 20)
    bold = colours(sys.stdout)
    for number, row in enumerate(rows):
        *cells, last = (
            cell.rjust(width) if i in right else cell
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        start = "".join(f"{cell:<{width}}  " for cell, width in zip(cells, widths, strict=False))
        parts = textwrap.wrap(last, room, break_long_words=False, break_on_hyphens=False) or [""]
        for part in parts:
            line = (start + part).rstrip()
            print(f"\033[1m{line}\033[0m" if bold and number < headings else line)
            start = " " * len(start)


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
    print(json.dumps(document, indent=2, ensure_ascii=False))


def byte_count(count: int) -> str:
    """A byte count with a decimal unit: 18.4 MB."""
    from rich.filesize import decimal

    return decimal(count)
