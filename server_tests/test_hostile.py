"""Clients that want more than answers: what would run their code, read memory or write files is closed to them."""

from __future__ import annotations

import base64
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc as grpcclient

from dflash_trt.bundle.manifest import Bundle
from dflash_trt.serving.deploy import bare_command, deploy
from dflash_trt.serving.launch import find_server
from server_tests.serving import Serving, fetch, free_ports, refused

EVIL = """
import pathlib
class TritonPythonModel:
    def initialize(self, args):
        pathlib.Path({!r}).touch()
"""
CONFIG = {"name": "evil", "backend": "python", "max_batch_size": 0}
CLOSED = [
    *(("POST", f"/v2/repository/{path}") for path in ("index", "models/evil/load", "models/dflash/unload")),
    *(("POST", f"/v2/repository/any/{path}") for path in ("index", "models/evil/load", "models/dflash/unload")),
    *(("GET", f"/v2/{kind}sharedmemory/status") for kind in ("system", "cuda")),
    *(("POST", f"/v2/{kind}sharedmemory/region/a/register") for kind in ("system", "cuda")),
    *(("POST", f"/v2/{kind}sharedmemory/unregister") for kind in ("system", "cuda")),
    *((method, path) for method in ("GET", "POST") for path in ("/v2/logging", "/v2/trace/setting")),
    *((method, "/v2/models/dflash/trace/setting") for method in ("GET", "POST")),
]  # fmt: skip


def evil(marker: Path) -> dict[str, object]:
    """The parameters of a load request that contains its own model."""
    code = base64.b64encode(EVIL.format(str(marker)).encode()).decode()
    return {"config": json.dumps(CONFIG), "file:1/model.py": code}


def ask(port: int, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    sent = None if body is None else json.dumps(body)
    connection.request(method, path, sent, {key.replace("_", "-"): value for key, value in headers.items()})
    answer = connection.getresponse()
    response = answer.status, answer.read().decode()
    connection.close()
    return response


def grpc_calls(client: grpcclient.InferenceServerClient, marker: Path) -> Iterator[Any]:
    """Every call of the client that asks for more than an answer."""
    files = {"file:1/model.py": EVIL.format(str(marker)).encode()}
    yield lambda: client.load_model("evil", config=json.dumps(CONFIG), files=files)
    yield lambda: client.unload_model("dflash")
    yield client.get_model_repository_index
    yield lambda: client.register_system_shared_memory("a", "/a", 8)
    yield lambda: client.register_cuda_shared_memory("a", base64.b64encode(bytes(64)), 0, 8)
    for kind in ("system", "cuda"):
        yield getattr(client, f"get_{kind}_shared_memory_status")
        yield getattr(client, f"unregister_{kind}_shared_memory")
    yield client.get_trace_settings
    yield lambda: client.update_trace_settings("dflash", {"trace_file": [str(marker)]})
    yield client.get_log_settings
    yield lambda: client.update_log_settings({"log_file": str(marker)})


def test_clients_cannot_load_code_nor_change_the_server(tiny: Serving, tmp_path: Path) -> None:
    marker = tmp_path / "made"
    bodies = {"load": {"parameters": evil(marker)}, "logging": {"log_file": str(marker)}}
    bodies["setting"] = {"trace_file": str(marker)}
    for method, path in CLOSED:
        body = bodies.get(path.rpartition("/")[2], {}) if method == "POST" else None
        for spelling in (path, f"{path}?a=b", f"{path}/"):
            status, body_ = ask(tiny.http_port, method, spelling, body)
            assert status == 403 or (spelling != path and status in (400, 404)), (method, spelling, body_)
    with grpcclient.InferenceServerClient(tiny.grpc) as client:
        for call in grpc_calls(client, marker):
            assert "restricted" in refused(call)
        assert client.get_model_config("dflash").config.name == "dflash"
        assert client.is_model_ready("dflash")
    assert tiny.generate(text_input="a", max_tokens=2)[0] == 200
    assert not marker.exists()


def test_nobody_can_send_the_key_that_other_users_of_the_machine_may_read(tiny: Serving) -> None:
    (pid,) = tiny.processes("bin/tritonserver")
    arguments = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    (key,) = {a.partition("dflash-key=")[2] for a in arguments if "restricted" in a}
    assert re.fullmatch("[0-9a-f]{32}\n[0-9a-f]{32}", key)
    first, _, second = key.partition("\n")
    path = "/v2/repository/index"
    for value in (key, f"{first}\r\n {second}", f"{first}\n {second}", f"{first}%0A{second}", first, second):
        with socket.create_connection(("127.0.0.1", tiny.http_port)) as connection:
            head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\ndflash-key: {value}\r\n"
            connection.sendall(f"{head}Content-Length: 2\r\n\r\n{{}}".encode())
            response = connection.makefile("rb").read()
        assert b"dflash" not in response.partition(b"\r\n\r\n")[2] or b" 403 " in response, (value, response)
    with grpcclient.InferenceServerClient(tiny.grpc) as client:
        for value in (first, second, f"{first} {second}"):
            headers = {"triton-grpc-protocol-dflash-key": value}
            assert "restricted" in refused(lambda h=headers: client.get_model_repository_index(headers=h))


def test_the_operator_s_own_restrictions_join_those_of_serve(
    bundles: dict[str, Path], tmp_path: Path
) -> None:
    """A key for inference: Triton's means against strangers, and against pages in a browser."""
    closed = "inference:team-key=sesame"
    options = ("--", f"--http-restricted-api={closed}", f"--grpc-restricted-protocol={closed}")
    server = Serving(bundles["tiny"], tmp_path / "log", *options)
    path, asked = "/v2/models/dflash/generate", {"text_input": "a", "max_tokens": 2}
    assert ask(server.http_port, "POST", path, asked)[0] == 403
    assert ask(server.http_port, "POST", path, asked, team_key="sesame")[0] == 200
    assert ask(server.http_port, "POST", "/v2/repository/index", {}, team_key="sesame")[0] == 403
    assert server.stop() == 0


def test_the_printed_command_keeps_clients_out_too(bundles: dict[str, Path], tmp_path: Path) -> None:
    """The command of `deploy` as printed, on other ports. The key opens what it closes, so that is really closed."""
    repository = deploy(Bundle.open(bundles["tiny"]), tmp_path / "repository", python=sys.executable)
    server = find_server(tmp_path)
    assert server is not None
    http_port, grpc_port, metrics_port = free_ports(3)
    title, _, command = bare_command(repository).partition("\n")
    assert title == "key=$(openssl rand -hex 32)"
    command = command.replace("tritonserver ", f"exec {' '.join(server.command)} ", 1)
    command += f" --http-port {http_port} --grpc-port {grpc_port} --metrics-port {metrics_port}"
    environment = {**os.environ, **server.environment}
    process = subprocess.Popen(["bash", "-ec", f"key=open-sesame\n{command}"], env=environment)
    try:
        url, marker = f"http://127.0.0.1:{http_port}", tmp_path / "made"
        while fetch(f"{url}/v2/models/dflash/ready")[0] != 200:
            assert process.poll() is None
        load = {"parameters": evil(marker)}
        assert ask(http_port, "POST", "/v2/repository/models/evil/load", load)[0] == 403
        assert ask(http_port, "POST", "/v2/repository/index", {}, dflash_key="wrong")[0] == 403
        with grpcclient.InferenceServerClient(f"127.0.0.1:{grpc_port}") as client:
            assert "restricted" in refused(client.get_model_repository_index)
            headers = {"triton-grpc-protocol-dflash-key": "open-sesame"}
            assert len(client.get_model_repository_index(headers=headers).models) == 2
        assert not marker.exists()
        ask(http_port, "POST", "/v2/repository/models/evil/load", load, dflash_key="open-sesame")
        assert marker.exists()
    finally:
        process.terminate()
        process.wait(60)


def test_it_listens_where_it_was_told_and_nowhere_else(bundles: dict[str, Path], tmp_path: Path) -> None:
    server = Serving(bundles["tiny"], tmp_path / "log", "--host=127.0.0.2")
    assert "anyone who reaches" not in server.log  # that is this machine alone
    listening = set()
    for pid in server.processes(""):
        inodes = {link.readlink().name for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()}
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                    address, _, port = fields[1].partition(":")
                    listening.add((address.removeprefix("0000000000000000FFFF0000"), int(port, 16)))
    assert listening == {("0200007F", p) for p in (server.http_port, server.grpc_port, server.metrics_port)}
    assert server.stop() == 0


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
    assert (done.returncode, done.stdout) == (1, "")
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
    server.until(lambda: not [pid for pid in processes if Path(f"/proc/{pid}").exists()])
    for port in (server.http_port, server.grpc_port, server.metrics_port):
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", port))
