from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import httpx2 as httpx
import pytest
from openai import OpenAI

from dflash_trt import LLM
from dflash_trt.building.build import build
from dflash_trt.bundle.manifest import Bundle
from dflash_trt.serving.openai.chat import Chat
from dflash_trt.serving.openai.model import Model
from dflash_trt.serving.openai.protocol import ChatRequest
from dflash_trt.serving.openai.written import written_by

OPTIONS = (
    "--block-length=8", "--max-batch-size=4", "--threads=1", "--stream-interval=0", "--grace=2", "--allow-priority",
)  # fmt: skip

LONG = {"prompt": "x = [", "max_tokens": 480, "ignore_eos": True}
COMPLETIONS, CHATS, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
HI = [{"role": "user", "content": "hi"}]
QUESTION = [{"role": "user", "content": "What should I eat in Borvik?"}]


def tool(parameters: Any, name: str = "order") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def model_of(bundle: Path, template: str, prompt: str = "hi", marks: Sequence[str] = ()) -> Model:
    """A bundle's model with another family's chat template, by which every chat becomes this prompt."""
    model = Model(Bundle.open(bundle), None)
    model.written = written_by(template)
    model.tokenizer.backend.add_special_tokens([*marks])

    async def chat(read: Any, *_: Any, **__: Any) -> tuple[list[int], str, Any]:
        return await model.encode(prompt, special=False), prompt, read()[-1]

    model.chat = chat
    return model


def chat_of(model: Model, **fields: Any) -> Chat:
    """A chat that is ready to be decoded."""
    body = ChatRequest.model_validate({"messages": HI} | fields)
    return asyncio.run(Chat.of(model, body, "x", None))


class Server:
    """A `dflash-trt serve` in its own process, which is ready. `log` is its output so far.

    errors: a file for what it says, in place of the log.
    """

    def __init__(
        self, bundle: Path, log: Path, *options: str, errors: IO[bytes] | None = None, **environment: str
    ) -> None:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = s.getsockname()[1]
        self.log_file = log
        command = [
            sys.executable, "-m", "dflash_trt", "serve", str(bundle), f"--port={self.port}", *options,
        ]  # fmt: skip
        with log.open("wb") as out:
            environment = os.environ | environment
            self.process = subprocess.Popen(command, stdout=out, stderr=errors or out, env=environment)
        self.url = f"http{'s' if any('--tls' in o for o in options) else ''}://127.0.0.1:{self.port}"
        self.http = httpx.Client(base_url=self.url, verify=False, timeout=60)
        self.until(self._ready)
        self.openai = OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def _ready(self) -> bool:
        assert self.process.poll() is None, self.log
        with suppress(httpx.TransportError):
            return bool(self.http.get("/ready").status_code == 200)
        return False

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

    def made(self, path: str, **fields: Any) -> Any:
        """The answer to a request that is taken."""
        answer = self.post(path, fields)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def events(self, path: str, **fields: Any) -> list[Any]:
        """The answer in events."""
        lines = self.post(path, fields | {"stream": True}).text.splitlines()
        return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]

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


class Streaming:
    """A request on a socket of its own, read by a thread. `lines`: those of its answer so far."""

    def __init__(self, server: Server, body: dict[str, Any], *, stream: bool = True) -> None:
        self.lines: list[str] = []
        text = json.dumps(body | {"stream": stream}).encode()
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: [::1]\r\nContent-Type: application/json\r\nConnection: close\r\n"
        self.socket = socket.create_connection(("127.0.0.1", server.port))
        self.socket.sendall(head.encode() + f"Content-Length: {len(text)}\r\n\r\n".encode() + text)
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        with suppress(ConnectionError), self.socket.makefile() as answer:
            for line in answer:
                self.lines.append(line.strip())

    def events(self) -> list[str]:
        """The data of all events, when the stream has ended."""
        self.thread.join(60)
        assert not self.thread.is_alive()
        return [line.removeprefix("data: ") for line in self.lines if line.startswith("data: ")]

    def begun(self) -> bool:
        return any(line.startswith("data: ") for line in self.lines)

    def leave(self) -> None:
        self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


def waiting_behind(server: Server, body: dict[str, Any]) -> tuple[Streaming, Streaming]:
    """A stream that runs and a request that waits for its slot; others if the first ends before the second waits."""
    for _ in range(20):
        running = Streaming(server, body)
        server.until(running.begun)
        waiting = Streaming(server, body, stream=False)
        server.until(
            lambda running=running: (
                server.metric("dflash_num_requests_waiting") == 1 or not running.thread.is_alive()
            )
        )
        if running.thread.is_alive():
            return running, waiting
        waiting.thread.join(60)
    raise AssertionError("no request was seen to wait")


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
