"""The progress of a build, a benchmark or a training, shown on standard error."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from importlib.util import find_spec
from time import monotonic
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import ProgressColumn, TaskID

    from dflash_trt.bundle.workspace import Progress

_LINE_SECONDS = 30.0  # between lines where there is no bar


@contextmanager
def progress_display() -> Iterator[Progress]:
    """A progress bar per step in a terminal or a notebook, one line per step elsewhere; all on standard error.

    A notebook without ipywidgets has no bars either.
    """
    if not _bars_are_shown():
        finished: set[str] = set()

        def line(step: str, done: int, total: int) -> None:
            if done == total and step not in finished:
                finished.add(step)
                print(f"{step}: done", file=sys.stderr)

        yield line
        return

    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

    with ExitStack() as shown:
        bars: Bars | None = None
        tasks: dict[str, TaskID] = {}

        def bar(step: str, done: int, total: int) -> None:
            nonlocal bars
            if bars is None:  # nothing appears where nothing takes long
                columns = (TextColumn("{task.description:<18}"), BarColumn(), TaskProgressColumn())
                bars = shown.enter_context(_bars(*columns, TimeElapsedColumn()))
            if step not in tasks:
                tasks[step] = bars.add_task(step)
            bars.update(tasks[step], completed=done, total=total)

        yield bar


class Counted:
    """The progress of counted work: how much is done, at which rate, what time remains, and a note."""

    def __init__(self, label: str, unit: str, bars: Bars | None) -> None:
        self._label, self._unit, self._bars = label, unit, bars
        self._task: TaskID | None = None
        self._start: tuple[int, float] | None = None  # what was done when, in the first call
        self._said = monotonic()

    def update(self, done: int, total: int, note: str = "") -> None:
        """Show `done` of `total`. The rate is counted from the first call on, which may be a resumed run's."""
        now = monotonic()
        first, began = self._start = self._start or (done, now)
        text = f"{done}/{total} {self._unit}"
        if done > first and now > began:
            rate = (done - first) / (now - began)
            left = timedelta(seconds=round((total - done) / rate))
            text += f", {rate:.3g}/s" if rate >= 1 else f", {1 / rate:.3g} s each"
            text += f", {left} left" if done < total else ""
        text += f", {note}" if note else ""
        if self._bars is None:
            if now - self._said >= _LINE_SECONDS or done == total:
                self._said = now
                print(f"{self._label}: {text}", file=sys.stderr)
            return
        if self._task is None:
            self._bars.start()
            self._task = self._bars.add_task(self._label, text=text)
        self._bars.update(self._task, completed=done, total=total, text=text)

    def say(self, line: str) -> None:
        """A line of its own, above the bar."""
        if self._bars is None or self._task is None:
            print(line, file=sys.stderr)
        else:
            self._bars.console.print(line, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def counted_display(label: str, unit: str) -> Iterator[Counted]:
    """A bar in a terminal or a notebook; elsewhere a line every half minute, and one at the end."""
    if not _bars_are_shown():
        yield Counted(label, unit, None)
        return
    from rich.progress import BarColumn, TextColumn
    from rich.table import Column

    text = TextColumn("{task.fields[text]}", table_column=Column(no_wrap=True))
    bars = _bars(TextColumn("{task.description}"), BarColumn(12), text)
    try:
        yield Counted(label, unit, bars)
    finally:
        bars.stop()


def _bars_are_shown() -> bool:
    notebook = "ipykernel" in sys.modules and find_spec("ipywidgets") is not None
    return sys.stderr.isatty() or notebook


def _bars(*columns: ProgressColumn) -> Bars:
    from rich.console import Console
    from rich.control import Control
    from rich.progress import Progress as Bars
    from rich.segment import ControlType

    console = Console(stderr=True)
    if console.is_terminal:  # `loading` may have begun this line
        console.control(Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2)))
    return Bars(*columns, console=console)
