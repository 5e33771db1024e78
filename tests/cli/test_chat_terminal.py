"""`dflash-trt chat` in a terminal of its own: prompt, colours, Ctrl-C within an answer, and Ctrl-D."""

from __future__ import annotations

import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

pty = pytest.importorskip("pty")
ROOT = Path(__file__).parent.parent.parent
# The terminal becomes the controlling one of the new session, so Ctrl-C reaches the program.
# A shell starts background jobs with Ctrl-C ignored, which programs inherit.
START = """import fcntl, os, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.executable, [sys.executable, "-m", "dflash_trt", *sys.argv[1:]])"""
PROMPT = r"\n\S*> $"
CYAN = "\x1b[36m"  # of accepted drafts


class Terminal:
    """A program in a pseudo-terminal of 80 columns, and everything that it has written."""

    def __init__(self, *words: str) -> None:
        import fcntl
        import struct
        import termios

        self.shown = ""
        self.ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        environment = {
            **os.environ,
            "TERM": "xterm-256color",
            "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "plugins"))),
        }
        environment.pop("NO_COLOR", None)
        self.process = subprocess.Popen(
            [sys.executable, "-c", START, *words],
            stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True,
        )  # fmt: skip
        os.close(theirs)

    def type(self, text: str) -> None:
        os.write(self.ours, text.encode())

    def ask(self, line: str) -> str:
        """Type a line at the prompt. Returns the text up to the next prompt, where the editor waits again."""
        at = len(self.shown)
        self.type(f"{line}\r")
        return self.until(PROMPT, at)

    def interrupt(self, pattern: str, start: int) -> None:
        """Type Ctrl-C until the pattern is shown. A line editor may miss one that comes as it begins to wait."""
        for _ in range(20):
            self.type("\x03")
            with suppress(AssertionError):
                self.until(pattern, start, seconds=3)
                return
        raise AssertionError(self.shown)

    def until(self, pattern: str, start: int = 0, seconds: float = 120) -> str:
        """Read until the pattern is shown behind `start`; what is shown there."""
        end = time.monotonic() + seconds
        while not re.search(pattern, self.shown[start:]):
            assert time.monotonic() < end, self.shown
            if not select.select([self.ours], [], [], 1)[0]:
                continue
            try:
                self.shown += os.read(self.ours, 65536).decode(errors="replace")
            except OSError:  # the program has ended
                assert re.search(pattern, self.shown[start:]), self.shown
        return self.shown[start:]


@contextmanager
def opened(*words: str) -> Iterator[Terminal]:
    terminal = Terminal(*words)
    try:
        yield terminal
    finally:
        terminal.process.kill()
        terminal.process.wait()
        os.close(terminal.ours)


def test_a_conversation_in_a_terminal(bundle: Path) -> None:
    options = ("--max-tokens", "12", "--ignore-eos", "--block-length", "4")
    with opened("chat", str(bundle), *options) as terminal:
        terminal.until(r"Ctrl-D ends\.")
        terminal.until("> $")
        assert terminal.shown.startswith(f"loading {bundle} ..."[:79] + "\r\x1b[K")
        answer = terminal.ask("Add 1.")
        accepted = re.search(r"(\d+\.\d+) tokens per pass", answer)
        assert accepted is not None
        assert (CYAN in answer) == (float(accepted[1]) > 1)
        assert "drafts off" in terminal.ask("/draft off")
        assert "tokens/s" in terminal.ask("/stats")
        terminal.interrupt(PROMPT, len(terminal.shown))  # at the prompt it only begins a new line
        assert "new conversation" in terminal.ask("/reset")
        terminal.type("\x04")
        assert terminal.process.wait(60) == 0


def test_ctrl_c_stops_an_answer_and_the_conversation_goes_on(bundle: Path) -> None:
    with opened("chat", str(bundle), "--max-tokens", "200", "--ignore-eos", "--no-draft") as terminal:
        terminal.until("> $")
        at = len(terminal.shown)
        terminal.type("Go on.\r")
        terminal.until(r"Go on\.\r\n[\s\S]+", at)
        terminal.type("\x03")
        terminal.until(r"\[stopped\]|tokens/s", at)
        terminal.type("/quit\r")
        assert terminal.process.wait(60) == 0
        assert "Traceback" not in terminal.shown
