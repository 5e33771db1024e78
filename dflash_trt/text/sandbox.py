"""Work that others hand in, in processes that can be killed: chat templates, and the forms of structured outputs.

The time and memory of a stranger's template, grammar or regular expression cannot be told beforehand, and no thread can
be stopped. So processes do it, one piece at a time, within limits; one that exceeds them is ended, and another takes
its place. sandbox_process.py is the program.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from typing import IO, Any

from dflash_trt.errors import DFlashError

# Wall time, for a system without CPU limits, or one whose CPUs are busy.
_WALL_SECONDS = 60


class LimitError(DFlashError):
    """The work took more than its limits. The text says which, and follows "it takes"."""


class Sandbox:
    """Processes for one kind of work, which start when first needed. Thread-safe.

    module: the file beside this one whose `answer` does the work.
    processes: pieces of work at a time. Others wait.
    seconds, memory, stack: what a piece may take, of CPU time, and in bytes (stack 0: what the system allows).
    """

    def __init__(self, module: str, *, processes: int, seconds: int, memory: int, stack: int = 0) -> None:
        self._module, self.processes = module, processes
        self._limits = self._seconds, self._memory, _ = seconds, memory, stack
        self._forget()
        atexit.register(self._leave)

    def _forget(self) -> None:
        self._owner, self._places = os.getpid(), threading.BoundedSemaphore(self.processes)
        self._idle: list[subprocess.Popen[bytes]] = []

    def run(self, task: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a task of JSON values. Raises LimitError; TypeError, ValueError or RecursionError for what is
        no JSON.
        """
        line = json.dumps(task).encode() + b"\n"
        if self._owner != os.getpid():  # a forked process shares its parent's pipes, and must not use them
            self._forget()
        with self._places:
            process = self._ready()
            try:
                answer = _ask(process, line)
            except EOFError:
                raise LimitError(self._exceeded(process.wait())) from None
            except TimeoutError:
                raise LimitError(f"more than {_WALL_SECONDS} s") from None
            finally:  # also after an interrupt: what is left in the pipe would be the next answer
                if sys.exception() is not None:
                    _stop(process)
            self._idle.append(process)
            return answer

    def start(self) -> None:
        """Start a process before there is work, which then need not wait for it."""
        with self._places:
            self._idle.append(self._ready())

    def _ready(self) -> subprocess.Popen[bytes]:
        with suppress(IndexError):
            while (process := self._idle.pop()).poll() is not None:  # it was ended while idle
                _stop(process)
            return process
        return self._start()

    def _exceeded(self, code: int) -> str:
        """Which limit a process exceeded that ended with this exit code."""
        ended = signal.Signals(-code).name if code < 0 else ""
        if ended == "SIGXCPU":
            return f"more than {self._seconds} s of CPU time"
        if ended in ("SIGSEGV", "SIGBUS"):
            return "more stack than it may: nest it less"
        return f"more than {self._memory >> 20} MiB of memory"

    def _start(self) -> subprocess.Popen[bytes]:
        script = str(Path(__file__).with_name("sandbox_process.py"))
        # -P: this package's modules must not shadow those of the standard library.
        command = [sys.executable, "-P", script, self._module, *map(str, self._limits)]
        try:
            return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        except OSError as error:
            text = f"{sys.executable}: cannot be started for chats and forms ({error.strerror})"
            raise DFlashError(text) from None

    def _leave(self) -> None:
        while self._idle and self._owner == os.getpid():
            _stop(self._idle.pop())


def _ask(process: subprocess.Popen[bytes], line: bytes) -> dict[str, Any]:
    """Answer one line. Raises EOFError if the process ends first, and TimeoutError if it takes too long."""
    assert process.stdin is not None
    assert process.stdout is not None
    deadline = time.monotonic() + _WALL_SECONDS
    with suppress(OSError):  # it has ended, and so will the answer
        process.stdin.write(line)  # the process reads the whole line first
        process.stdin.flush()
    size = int.from_bytes(_read(process.stdout, 8, deadline), "little")
    answer: dict[str, Any] = json.loads(_read(process.stdout, size, deadline))
    return answer


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with suppress(OSError):  # unsent data is lost
            if pipe is not None:
                pipe.close()


def _read(pipe: IO[bytes], count: int, deadline: float) -> bytes:
    data = bytearray()
    with DefaultSelector() as selector:
        selector.register(pipe, EVENT_READ)
        while len(data) < count:
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise TimeoutError
            part = os.read(pipe.fileno(), count - len(data))
            if not part:
                raise EOFError
            data += part
    return bytes(data)
