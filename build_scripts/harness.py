"""What programs share: options, turns, tables, a server, memory of processes, and the last line of a soak."""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.request import urlopen

from dflash_trt.serving.processes import descendants

T = TypeVar("T")


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser whose help is the program's docstring as it stands."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def options(description: str | None, **numbers: float) -> argparse.ArgumentParser:
    """A parser of the bundle, `--seed`, and these options, which are numbers with a default."""
    flags = parser(description)
    flags.add_argument("bundle", type=Path)
    for name, default in {**numbers, "seed": 0}.items():
        flags.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    return flags


def in_turn(rounds: int, jobs: Sequence[T]) -> Iterator[tuple[int, T]]:
    """Every job in every round, with the number of who begins."""
    return ((number + place, job) for number in range(rounds) for place, job in enumerate(jobs))


def rotated(everyone: Sequence[T], first: int) -> list[T]:
    """All of them, beginning with this one, so that none is always behind the same other."""
    first %= len(everyone)
    return [*everyone[first:], *everyone[:first]]


def markdown(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table as pages have it."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in lines)


@dataclass
class OpenAIServer:
    """A running `dflash-trt serve`. exit_code, stop_seconds: known when it has ended."""

    port: int
    process: subprocess.Popen[bytes]
    stopped: dict[str, Any] = field(default_factory=dict)

    def engines(self) -> list[int]:
        """Process ids of the engine; none while it is started."""
        tree = descendants(self.process.pid)
        return [pid for pid, (_, state, words) in tree.items() if "serving.worker" in words and state != "Z"]

    def fetch(self, path: str) -> str:
        """The answer to GET. Raises OSError unless its status is 200."""
        with urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as answer:
            return str(answer.read().decode())

    def resident(self) -> dict[str, float]:
        """Resident memory of its processes, in MB."""
        engine = max(map(resident_of, self.engines()), default=0.0)
        return {"server": round(resident_of(self.process.pid), 1), "engine": round(engine, 1)}


@contextmanager
def openai_server(bundle: Path, *arguments: str, **environment: str) -> Iterator[OpenAIServer]:
    """Start a server on a free port, and stop it at the end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "dflash_trt", "serve", str(bundle), f"--port={port}", *arguments]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | environment)
        server = OpenAIServer(port, process)
        try:
            while server.process.poll() is None:
                with suppress(OSError):
                    server.fetch("/ready")
                    break
                time.sleep(0.1)
            else:
                raise SystemExit(f"the server has not started: exit code {server.process.returncode}")
            yield server
        finally:
            begun = time.monotonic()
            server.process.terminate()
            server.stopped["exit_code"] = server.process.wait(60)
            server.stopped["stop_seconds"] = round(time.monotonic() - begun, 1)


def resident_of(pid: int) -> float:
    """Resident memory of a process, in MB; 0 if it is gone."""
    with suppress(OSError):
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6
    return 0.0


def report(figures: dict[str, Any], faults: Sequence[object]) -> int:
    """Print the figures as the last line. Returns the exit code: 1 with faults."""
    print(json.dumps(figures | {"faults": list(faults)[:20]}))
    return int(bool(faults))
