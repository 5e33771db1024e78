"""The progress of a build or a benchmark, shown on standard error."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dflash_trt.bundle.workspace import Progress


@contextmanager
def progress_display() -> Iterator[Progress]:
    """A progress bar per step in a terminal or a notebook, one line per step elsewhere; all on standard error."""
    if not (sys.stderr.isatty() or "ipykernel" in sys.modules):
        finished: set[str] = set()

        def line(step: str, done: int, total: int) -> None:
            if done == total and step not in finished:
                finished.add(step)
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
