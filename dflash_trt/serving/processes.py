"""Processes of this machine, from /proc, and the limits and the event loop of this one."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

Process = tuple[str, str, str]  # name, state, arguments


def allow_open_files() -> None:
    """Let this process have as many files open as the system allows. Each connection is one."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def run_loop(main: Coroutine[Any, Any, T]) -> T:
    """Run an event loop until `main` ends: uvloop's, where it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


def descendants(root: int) -> dict[int, Process]:
    """The processes below one: pid -> name, state (as in /proc) and arguments."""
    tree: dict[int, Process] = {}
    pending = [root]
    while pending:
        parent = pending.pop()
        with suppress(OSError):
            for task in Path(f"/proc/{parent}/task").iterdir():
                for pid in map(int, (task / "children").read_text().split()):
                    tree[pid] = _process(pid)
                    pending.append(pid)
    return tree


def _process(pid: int) -> Process:
    with suppress(OSError):
        stat = Path(f"/proc/{pid}/stat").read_text()
        name, _, rest = stat.partition("(")[2].rpartition(")")
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        return name, rest.split()[0], arguments
    return "", "", ""


def is_running(pid: int) -> bool:
    """Whether this process exists, and has not ended."""
    return _process(pid)[1] not in ("", "Z", "X")


def send_signal(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process that may have ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)
