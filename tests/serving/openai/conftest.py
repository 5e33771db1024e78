from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from openai import OpenAI

from dflash_trt import LLM
from dflash_trt.building.build import build

OPTIONS = ("--block-length=8", "--max-batch-size=4", "--threads=1", "--stream-interval=0", "--grace=2")


class Server:
    """A `dflash-trt serve` in its own process. `log` is its output so far."""

    def __init__(self, bundle: Path, log: Path, *options: str, **environment: str) -> None:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = s.getsockname()[1]
        self.log_file = log
        command = [
            sys.executable,
            "-m",
            "dflash_trt",
            "serve",
            str(bundle),
            f"--http-port={self.port}",
            *options,
        ]
        with log.open("wb") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out, env=os.environ | environment)
        self.url = f"http{'s' if any('--tls' in o for o in options) else ''}://127.0.0.1:{self.port}"
        self.until(lambda: "serving " in self.log or self.process.poll() is not None)
        assert self.process.poll() is None, self.log
        self.http = httpx.Client(base_url=self.url, verify=False, timeout=60)
        self.openai = OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def until(self, condition: Callable[[], Any]) -> None:
        end = time.monotonic() + 600
        while not condition():
            assert time.monotonic() < end, f"waited in vain\n{self.log}"
            time.sleep(0.02)

    def post(self, path: str, body: Any, **headers: str) -> Any:
        return self.http.post(path, json=body, headers=headers)

    def metric(self, name: str) -> float:
        """A sample of /metrics by its full name."""
        for line in self.http.get("/metrics").text.splitlines():
            if line.startswith(f"{name} "):
                return float(line.rpartition(" ")[2])
        raise AssertionError(name)

    def engine(self) -> int:
        """Process id of the engine."""
        from dflash_trt.serving.processes import descendants

        tree = descendants(self.process.pid)
        (pid,) = (p for p, (_, state, words) in tree.items() if "serving.worker" in words and state != "Z")
        return pid

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("tiny", None, tmp_path_factory.mktemp("bundles") / "tiny", max_seq_len=512).path


@pytest.fixture(scope="session")
def llm(tiny: Path) -> Iterator[LLM]:
    with LLM(tiny, threads=1) as opened:
        yield opened


@pytest.fixture(scope="session")
def server(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(tiny, tmp_path_factory.mktemp("log") / "log", *OPTIONS)
    yield made
    assert made.stop() == 0
    assert "Traceback" not in made.log, made.log


@pytest.fixture
def start(tiny: Path, tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Start another server with options of its own."""
    made: list[Server] = []

    def start(*options: str, **environment: str) -> Server:
        made.append(Server(tiny, tmp_path / f"log{len(made)}", *options, **environment))
        return made[-1]

    yield start
    for each in made:
        each.stop()
