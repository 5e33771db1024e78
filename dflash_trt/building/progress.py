"""The progress of a build or a benchmark, shown on standard error."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

    from dflash_trt.bundle.workspace import Progress


@contextmanager
def progress_display() -> Iterator[Progress]:
    """A progress bar per step in a terminal or a notebook, one line per step elsewhere; all on standard error.

    A notebook without ipywidgets has no bars either.
    """
    notebook = "ipykernel" in sys.modules and find_spec("ipywidgets") is not None
    if not (sys.stderr.isatty() or notebook):
        finished: set[str] = set()

        def line(step: str, done: int, total: int) -> None:
            if done == total and step not in finished:
                finished.add(step)
                print(f"{step}: done", file=sys.stderr)

        yield line
        return

    with ExitStack() as shown:
        bars: Bars | None = None
        tasks: dict[str, TaskID] = {}

        def bar(step: str, done: int, total: int) -> None:
            nonlocal bars
            if bars is None:  # nothing appears where nothing takes long
                bars = shown.enter_context(_bars())
            if step not in tasks:
                tasks[step] = bars.add_task(step)
            bars.update(tasks[step], completed=done, total=total)

        yield bar


def _bars() -> Bars:
    from rich.console import Console
    from rich.control import Control
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars
    from rich.segment import ControlType

    columns = (TextColumn("{task.description:<18}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    if console.is_terminal:  # `loading` may have begun this line
        console.control(Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2)))
    return Bars(*columns, console=console)
