"""Text on a terminal: lines and answers are broken between words."""

from __future__ import annotations

import io
import re

import pytest

from dflash_trt.building import progress
from dflash_trt.building.progress import progress_display
from dflash_trt.cli.output import loading


class Screen(io.StringIO):
    """A terminal of 20 columns. It shows what the characters and the controls that were written leave."""

    def isatty(self) -> bool:
        return True

    def lines(self) -> list[str]:
        return [self.getvalue().rpartition("\r\033[K")[2]]


def shown(monkeypatch: pytest.MonkeyPatch) -> Screen:
    """The screen instead of standard output and error. Not a fixture: pytest sets both again before a test."""
    made = Screen()
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(f"sys.{name}", made)
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("TERM", "xterm")
    return made


def test_what_is_loaded_is_shown_until_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = shown(monkeypatch)
    with loading("bundles/a-long-name"):
        assert screen.lines() == ["loading bundles/a-l"]
    assert screen.lines() == [""]


def test_counted_work_has_a_bar_with_the_remaining_time(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = shown(monkeypatch)
    monkeypatch.setenv("COLUMNS", "80")
    with progress_display() as display:
        display("train", 40, 100, "loss 3.100")  # a run that goes on
        display("train", 44, 100, "loss 2.900")
        display.say("step 44: 1.500 tokens per pass")
    found = re.sub(r"\033\[[0-9;?]*[A-Za-z]", "", screen.getvalue())
    assert "━" in found
    assert re.search(r"train .*44% \d:\d\d:\d\d loss 2\.900", found)
    assert "step 44: 1.500 tokens per pass\n" in found.replace("\r", "")


def test_without_a_terminal_a_step_is_announced_and_a_long_one_has_a_line_every_half_minute(
    monkeypatch, capsys
) -> None:
    now = iter(range(0, 999, 20))
    monkeypatch.setattr(progress, "monotonic", lambda: next(now))
    with progress_display() as display:
        display("export", 0, 1)
        display("export", 1, 1)
        for done in range(1, 6):
            display("answer", done, 5, "loss 2")
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["export ...", "answer ..."]
    assert [re.sub(r", \d:\d\d:\d\d left", "", line) for line in lines[2:]] == [
        "answer: 40%, loss 2",
        "answer: 80%, loss 2",
    ]
