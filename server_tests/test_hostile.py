"""Hostile clients of a real tritonserver: requests that end a bare server do not reach it through `serve`."""

from __future__ import annotations

import asyncio
import base64
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import tritonclient.grpc as grpcclient

from build_scripts.soak import attack_server
from dflash_trt.bundle.manifest import Bundle
from dflash_trt.serving.deploy import bare_command, deploy
from dflash_trt.serving.launch import Sockets, find_server, server_arguments
from dflash_trt.serving.processes import Process, descendants, is_same, send_signal
from server_tests.serving import Serving, UnixConnection, fetch, free_ports, kill, refused

GENERATE = b"POST /v2/models/dflash/generate HTTP/1.1\r\nHost: x\r\n"
# CVE-2025-23310: Triton reserves stack memory for every chunk of a body.
CHUNKED = GENERATE + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\nA\r\n" * 600_000 + b"0\r\n\r\n"
DEEP = b'{"text_input":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
NESTED = GENERATE + b"Content-Length: %d\r\n\r\n" % len(DEEP) + DEEP
FATAL = {"chunked": CHUNKED, "nested": NESTED}
# One request's body is enough for a bare server: it makes a model of this text and runs it.
EVIL = """
import pathlib
class TritonPythonModel:
    def initialize(self, args):
        pathlib.Path({!r}).touch()
"""
CONFIG = {"name": "evil", "backend": "python", "max_batch_size": 0}


class Bare:
    """A tritonserver without `serve`, on Unix sockets or with the given arguments."""

    def __init__(self, bundle: Path, directory: Path) -> None:
        directory.mkdir()
        self.sockets = Sockets(directory)
        self.repository = deploy(Bundle.open(bundle), directory / "repository", python=sys.executable)
        server = find_server(directory)
        assert server is not None
        self.server, self.environment = server, {**os.environ, **server.environment}
        self.process: subprocess.Popen[bytes] | None = None
        self.tree: dict[int, Process] = {}

    def start(self) -> None:
        command = [*self.server.command, *server_arguments(self.repository, self.sockets, "error")]
        self.process = subprocess.Popen(command, env=self.environment)
        wait(lambda: self.sockets.http.exists() and self.status("GET", "/v2/models/dflash/ready") == 200)
        self.tree = descendants(self.process.pid)  # a signal that ends the server may leave these behind

    def status(self, method: str, path: str, body: bytes | None = None) -> int:
        connection = UnixConnection(self.sockets.http, 60)
        try:
            connection.request(method, path, body)
            return connection.getresponse().status
        except (OSError, http.client.HTTPException):
            return 0
        finally:
            connection.close()

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        for pid, process in self.tree.items():
            if is_same(pid, process):
                send_signal(pid, signal.SIGKILL)
        self.sockets.remove()


@pytest.fixture
def bare(bundles: dict[str, Path], tmp_path: Path) -> Iterator[Bare]:
    server = Bare(bundles["tiny"], tmp_path / "bare")
    yield server
    server.stop()


def wait(condition: object, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.05)


def send(connection: socket.socket, data: bytes) -> bytes:
    """The answer until the connection ends or enough has arrived; empty if it is cut off."""
    connection.settimeout(60)
    try:
        connection.sendall(data)
        return connection.recv(1 << 16)
    except OSError:
        return b""


@pytest.mark.parametrize("kind", FATAL)
def test_one_request_ends_a_bare_server(bare: Bare, kind: str) -> None:
    """If this fails, the bundled server was fixed, and the docs must be updated."""
    bare.start()
    assert bare.process is not None
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(bare.sockets.http))
        send(connection, FATAL[kind])
    assert bare.process.wait(60) < 0  # ended by a signal


@pytest.mark.parametrize("kind", FATAL)
def test_the_same_request_does_nothing_to_serve(tiny: Serving, kind: str) -> None:
    (server,) = tiny.processes("bin/tritonserver")
    for port in (tiny.http_port, tiny.metrics_port, tiny.grpc_port):
        with socket.create_connection(("127.0.0.1", port)) as connection:
            send(connection, FATAL[kind])
    assert tiny.generate(text_input="a", max_tokens=2)[0] == 200
    assert tiny.processes("bin/tritonserver") == [server]


def evil(marker: Path) -> dict[str, object]:
    """The parameters of a load request that contains its own model."""
    code = base64.b64encode(EVIL.format(str(marker)).encode()).decode()
    return {"config": json.dumps(CONFIG), "file:1/model.py": code}


def test_a_bare_server_executes_what_it_is_sent(bare: Bare, tmp_path: Path) -> None:
    """Shows that the attack of the next tests works on a bare server."""
    bare.start()
    body = json.dumps({"parameters": evil(tmp_path / "executed")}).encode()
    bare.status("POST", "/v2/repository/models/evil/load", body)
    assert (tmp_path / "executed").exists()


def test_clients_cannot_load_code_nor_unload_the_model(tiny: Serving, tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    url = f"http://127.0.0.1:{tiny.http_port}/v2/repository"
    assert fetch(f"{url}/models/evil/load", {"parameters": evil(marker)})[0] == 403
    assert fetch(f"{url}/models/dflash/unload", {})[0] == 403
    assert fetch(f"{url}/index", {})[0] == 403
    client = grpcclient.InferenceServerClient(tiny.grpc)
    files = {"file:1/model.py": EVIL.format(str(marker)).encode()}
    for call in (
        lambda: client.load_model("evil", config=json.dumps(CONFIG), files=files),
        lambda: client.unload_model("dflash"),
        client.get_model_repository_index,
        lambda: client.register_system_shared_memory("a", "/a", 8),
        lambda: client.update_trace_settings("dflash", {"trace_file": [str(marker)]}),
        lambda: client.update_log_settings({"log_file": str(marker)}),
    ):
        assert "Method not found" in refused(call)
    assert client.get_model_config("dflash").config.name == "dflash"
    assert client.is_model_ready("dflash")
    client.close()
    assert tiny.ready()
    assert not marker.exists()


def test_the_printed_command_of_a_bare_server_keeps_clients_out_too(bare: Bare, tmp_path: Path) -> None:
    """The command as printed, on other ports. The secret opens the restricted APIs, so the restriction is real."""
    http_port, grpc_port, metrics_port = free_ports(3)
    program, *backend = bare.server.command
    secret, _, command = bare_command(bare.repository).partition("\n")
    assert secret.startswith("secret=$(")
    command = command.replace("tritonserver ", "exec " + " ".join([program, *backend]) + " ", 1)
    command += (
        f" --http-port {http_port} --grpc-port {grpc_port} --metrics-port {metrics_port} --log-info false"
    )
    bare.process = subprocess.Popen(["bash", "-ec", "secret=open-sesame\n" + command], env=bare.environment)
    url, marker = f"http://127.0.0.1:{http_port}", tmp_path / "executed"
    wait(lambda: fetch(f"{url}/v2/models/dflash/ready")[0] == 200)
    load = json.dumps({"parameters": evil(marker)})
    assert ask(http_port, "/v2/repository/models/evil/load", load) == 403
    assert ask(http_port, "/v2/repository/index", "{}", dflash_secret="wrong") == 403
    assert ask(http_port, "/v2/repository/index", "{}", dflash_secret="open-sesame") == 200
    client = grpcclient.InferenceServerClient(f"127.0.0.1:{grpc_port}")
    assert "restricted" in refused(client.get_model_repository_index)
    headers = {"triton-grpc-protocol-dflash-secret": "open-sesame"}
    assert len(client.get_model_repository_index(headers=headers).models) == 2
    client.close()
    assert not marker.exists()


def ask(port: int, path: str, body: str, **headers: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", path, body, {k.replace("_", "-"): v for k, v in headers.items()})
    status = connection.getresponse().status
    connection.close()
    return status


def test_tritonserver_listens_to_nobody_else(tiny: Serving) -> None:
    """No TCP port of its own, sockets that only its user may enter, and no readable secret."""
    (pid,) = tiny.processes("bin/tritonserver")
    inodes = {link.readlink().name for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()}
    listening = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
        if line.split()[3] == "0A"
    ]
    assert not [fields for fields in listening if f"socket:[{fields[9]}]" in inodes]
    arguments = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    (address,) = (a.partition("unix:")[2] for a in arguments if a.startswith("--http-address"))
    assert Path(address).parent.stat().st_mode & 0o077 == 0
    assert not any("secret" in argument for argument in arguments)


def test_a_killed_tritonserver_is_started_again(tiny: Serving) -> None:
    restarts, begun = "tritonserver ended with SIGKILL: restarting it", tiny.log.count("serving /")
    before, again = tiny.log.count(restarts), tiny.log.count("tritonserver serves again")
    for times in (1, 2):
        (server,) = tiny.processes("bin/tritonserver")
        workers = tiny.processes("serving.worker")
        kill(server)
        tiny.until(lambda times=times: tiny.log.count("tritonserver serves again") == again + times)
        assert not {*workers} & {*tiny.processes("serving.worker")}
        tiny.until(lambda workers=workers: not [pid for pid in workers if Path(f"/proc/{pid}").exists()])
    assert tiny.log.count(restarts) == before + 2
    assert tiny.log.count("serving /") == begun
    assert tiny.generate(text_input="a", max_tokens=2)[0] == 200


@pytest.mark.parametrize("name", ["http", "grpc", "metrics"])
def test_a_second_server_on_taken_ports_does_not_say_that_it_serves(
    tiny: Serving, bundles: dict[str, Path], name: str
) -> None:
    ports = dict(zip(("http", "grpc", "metrics"), free_ports(3), strict=True))
    ports[name] = getattr(tiny, f"{name}_port")
    flags = {"http": "--port", "grpc": "--grpc-port", "metrics": "--metrics-port"}
    options = [f"{flags[which]}={port}" for which, port in ports.items()]
    command = [sys.executable, "-m", "dflash_trt", "serve", str(bundles["tiny"]), "--api=triton", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    assert f"cannot listen on 127.0.0.1:{ports[name]}" in done.stderr
    assert flags[name] in done.stderr
    assert tiny.ready()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_running(bundles: dict[str, Path], tmp_path: Path, number: signal.Signals) -> None:
    server = Serving(bundles["tiny"], tmp_path / "log", "--grace=2", "--stream-interval=0")
    fields = {"text_input": "x = [", "max_tokens": 500, "ignore_eos": True, "speculate": False}
    stream = server.generate_stream(**fields)
    next(stream)  # a request that runs
    processes = server.processes("")
    assert len(processes) >= 3  # tritonserver, backend, engine
    server.process.send_signal(number)
    server.process.wait(60)
    wait(lambda: not [pid for pid in processes if Path(f"/proc/{pid}").exists()])
    for port in (server.http_port, server.grpc_port, server.metrics_port):
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", port))


def test_other_addresses_are_announced_as_open_to_everyone(bundles: dict[str, Path], tmp_path: Path) -> None:
    server = Serving(bundles["tiny"], tmp_path / "log", "--host=127.0.0.2")
    try:
        assert "anyone who reaches 127.0.0.2 may use the model" in server.log
        assert fetch(f"http://127.0.0.2:{server.http_port}/v2/health/ready")[0] == 200
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", server.http_port))
    finally:
        assert server.stop() == 0


def test_honest_clients_lose_nothing_beside_hostile_ones(bundles: dict[str, Path], tmp_path: Path) -> None:
    """A short version of build_scripts/soak/attack_server.py, which runs ten minutes and measures times."""
    server = Serving(bundles["tiny"], tmp_path / "log", "--threads=1")
    try:
        known = attack_server.questions(bundles["tiny"])
        result = asyncio.run(attack_server.run(server, known, 15, 4, tmp_path / "executed"))
    finally:
        assert server.stop() == 0
    assert attack_server.failures(result) == []
