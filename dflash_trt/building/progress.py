"""The progress of a build, a benchmark or a training, shown on standard error by rich."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cached_property
from importlib.util import find_spec
from time import monotonic
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

_LINE_SECONDS = 30.0  # between lines where there is no bar


def on_terminal() -> bool:
    """Whether standard error is a terminal. A program without a console has none."""
    return sys.stderr is not None and sys.stderr.isatty()


def say(line: str) -> None:
    """A line on standard error. On a terminal it takes the place of the one that `loading` began."""
    print("\r\033[K" * on_terminal() + line, file=sys.stderr)


class Display:
    """Steps of work by name: a bar each in a terminal or a notebook, elsewhere lines."""

    def __init__(self) -> None:
        self._said = monotonic()
        self._tasks: dict[str, TaskID] = {}

    @cached_property
    def _bars(self) -> Bars:
        """Made for the first step, since rich is slow to import. A notebook without ipywidgets has lines, too."""
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

        notebook = "ipykernel" in sys.modules and find_spec("ipywidgets") is not None
        return Progress(
            *(TextColumn("{task.description:<18}"), BarColumn(20), TaskProgressColumn()),
            *(TimeRemainingColumn(elapsed_when_finished=True), TextColumn("{task.fields[note]}")),
            console=Console(stderr=True),
            disable=not (on_terminal() or notebook),
        )

    def __call__(self, step: str, done: int, total: int, note: str = "") -> None:
        """Show that `done` of `total` units of the step are done. Without a terminal, a line says that it begins, and
        further ones, every half minute, how far it is.
        """
        bars = self._bars
        if step not in self._tasks:
            if bars.disable:
                print(f"{step} ...", file=sys.stderr)
            elif not self._tasks:  # nothing appears where nothing takes long
                print(
                    "\r\033[K" * bars.console.is_terminal, end="", file=sys.stderr
                )  # `loading` began this line
                bars.start()
            self._said = monotonic()
            self._tasks[step] = bars.add_task(step, note="")
        bars.update(self._tasks[step], completed=done, total=total, note=note)
        if bars.disable and monotonic() - self._said >= _LINE_SECONDS and done < total:
            self._said = monotonic()
            task = bars.tasks[self._tasks[step]]
            left = "" if task.time_remaining is None else f", {timedelta(seconds=task.time_remaining)} left"
            print(f"{step}: {task.percentage:.0f}%{left}{', ' * bool(note)}{note}", file=sys.stderr)

    def say(self, line: str) -> None:
        """A line of its own, above the bars."""
        if not self._tasks or self._bars.disable:
            print(line, file=sys.stderr)
        else:
            self._bars.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def stop(self) -> None:
        """End the bars that were shown."""
        if self._tasks:
            self._bars.stop()


@contextmanager
def progress_display() -> Iterator[Display]:
    """The display of a command."""
    display = Display()
    try:
        yield display
    finally:
        display.stop()
