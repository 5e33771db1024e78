"""Output of the commands: aligned columns, byte counts, JSON, progress."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dflash_trt.bundle.workspace import Progress


def print_table(rows: Iterable[Sequence[str]]) -> None:
    """Print rows of equal length as left-aligned columns."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def print_json(document: object) -> None:
    print(json.dumps(document, indent=2, ensure_ascii=False))


def byte_count(count: float) -> str:
    """A byte count with a decimal unit: 18.4 MB."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


@contextmanager
def progress_display() -> Iterator[Progress]:
    """A progress bar per step on a terminal, one line per step elsewhere; both on standard error."""
    if not sys.stderr.isatty():

        def line(step: str, done: int, total: int) -> None:
            if done == total:
                print(f"{step}: done", file=sys.stderr)

        yield line
        return

    from rich.console import Console
    from rich.progress import BarColumn, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description:<18}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Bars(*columns, console=Console(stderr=True)) as bars:
        tasks: dict[str, TaskID] = {}

        def bar(step: str, done: int, total: int) -> None:
            if step not in tasks:
                tasks[step] = bars.add_task(step)
            bars.update(tasks[step], completed=done, total=total)

        yield bar
