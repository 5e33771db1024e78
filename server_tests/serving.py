"""A `dflash-trt serve` in its own process, and clients of it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from dflash_trt.serving.deploy import MODEL, template
from dflash_trt.serving.processes import descendants

# The inputs of the model with the data types that clients name.
CONFIG = (template() / MODEL / "config.pbtxt").read_text().partition("\noutput [")[0]
TYPES = {
    name: kind.replace("STRING", "BYTES")
    for name, kind in re.findall(r'name: "(\w+)" data_type: TYPE_(\w+)', CONFIG)
}
NUMPY = {
    "BYTES": object, "INT32": np.int32, "FP32": np.float32, "FP16": np.float16, "UINT64": np.uint64, "BOOL": bool
}  # fmt: skip
STUB = "backends/python/triton_python_backend_stub"


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


class Serving:
    """A running server. `log` is its output so far, from stdout and stderr."""

    def __init__(self, bundle: Path, log: Path, *options: str) -> None:
        self.http_port, self.grpc_port, self.metrics_port = free_ports(3)
        self.grpc = f"127.0.0.1:{self.grpc_port}"
        self.log_file = log
        ports = (
            f"--port={self.http_port}",
            f"--grpc-port={self.grpc_port}",
            f"--metrics-port={self.metrics_port}",
        )
        command = [sys.executable, "-m", "dflash_trt", "serve", str(bundle), "--api=triton", *ports, *options]
        with log.open("wb") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        self.until(lambda: "serving " in self.log or self.process.poll() is not None)
        assert self.process.poll() is None, self.log

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def until(self, condition: Callable[[], Any]) -> None:
        """Wait for the condition, long enough for a busy machine. Counters are shown once a second."""
        end = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < end, f"waited in vain\n{self.log}"
            time.sleep(0.05)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(120)

    def processes(self, what: str) -> list[int]:
        """The server's processes whose command line contains `what`: tritonserver, stub, worker."""
        tree = descendants(self.process.pid)
        return [pid for pid, (_, state, arguments) in tree.items() if what in arguments and state != "Z"]

    def get(self, path: str, port: int | None = None) -> tuple[int, str]:
        return fetch(f"http://127.0.0.1:{port or self.http_port}{path}")

    def ready(self) -> bool:
        return self.get("/v2/models/dflash/ready")[0] == 200

    def metric(self, name: str, **labels: str) -> float:
        """A sample of the metrics port."""
        return self.metrics()(name, **labels)

    def metrics(self) -> Callable[..., float]:
        """The samples at one moment."""
        lines = self.get("/metrics", self.metrics_port)[1].splitlines()
        return partial(sample, lines)

    def generate(self, *, model: str = "dflash", **fields: Any) -> tuple[int, dict[str, Any]]:
        """POST generate: the status and the answer."""
        url = f"http://127.0.0.1:{self.http_port}/v2/models/{model}/generate"
        status, text = fetch(url, fields)
        return status, json.loads(text)

    def generate_stream(self, *, model: str = "dflash", **fields: Any) -> Iterator[dict[str, Any]]:
        url = f"http://127.0.0.1:{self.http_port}/v2/models/{model}/generate_stream"
        body = json.dumps({"stream": True, **fields}).encode()
        with urllib.request.urlopen(urllib.request.Request(url, body), timeout=120) as answer:
            for line in answer:
                if line.startswith(b"data: "):
                    yield json.loads(line[6:])


def idle(server: Serving) -> bool:
    return server.metric("dflash_num_requests_running") + server.metric("dflash_num_requests_waiting") == 0


def sample(lines: list[str], name: str, **labels: str) -> float:
    for line in lines:
        if line.startswith(name + "{") and all(f'{k}="{v}"' in line for k, v in labels.items()):
            return float(line.rsplit(" ", 1)[1])
    return 0.0


def fetch(url: str, body: Any = None) -> tuple[int, str]:
    data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data), timeout=120) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)


def tensors(**fields: Any) -> list[Any]:
    """Inputs with the batch dimension, as the clients of TensorRT-LLM's models send them: [1,1], [1,n]."""
    inputs = []
    for name, value in fields.items():
        values = [value] if isinstance(value, str | bytes) or not isinstance(value, list) else value
        array = np.array(
            [[v.encode() if isinstance(v, str) else v for v in values]], dtype=NUMPY[TYPES[name]]
        )
        inputs.append(grpcclient.InferInput(name, list(array.shape), TYPES[name]))
        inputs[-1].set_data_from_numpy(array)
    return inputs


class Client:
    """A gRPC stream. Answers are matched to requests; `ask` and `wait` may overlap."""

    def __init__(self, address: str) -> None:
        self._client = grpcclient.InferenceServerClient(address)
        self._answers: Queue[tuple[Any, Any]] = Queue()
        self._client.start_stream(lambda result, error: self._answers.put((result, error)))

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def leave(self, *, cancel: bool = False) -> None:
        self._client.stop_stream(cancel_requests=cancel)
        self._client.close()

    def ask(
        self, inputs: list[Any], *, key: str = "", model: str = "dflash", timeout: int | None = None
    ) -> None:
        self._client.async_stream_infer(
            model, inputs, request_id=key, timeout=timeout, enable_empty_final_response=True
        )

    def wait(self) -> tuple[str, dict[str, Any], bool]:
        """The next answer: its request, its outputs, whether it is the last. Raises the server's error."""
        result, error = self._answers.get(timeout=120)
        if error is not None:
            raise error
        response = result.get_response()
        outputs = {output.name: result.as_numpy(output.name) for output in response.outputs}
        return response.id, outputs, response.parameters["triton_final_response"].bool_param

    def all(
        self, *, model: str = "dflash", timeout: int | None = None, **fields: Any
    ) -> list[dict[str, Any]]:
        """All answers to one request."""
        self.ask(tensors(**fields), model=model, timeout=timeout)
        return self.rest()

    def rest(self) -> list[dict[str, Any]]:
        """The answers to the one request that was asked, until its last."""
        answers, last = [], False
        while not last:
            _, outputs, last = self.wait()
            answers.append(outputs)
        return answers


def text_of(answers: list[dict[str, Any]]) -> str:
    return b"".join(answer["text_output"][0, 0] for answer in answers).decode()


def ids_of(answers: list[dict[str, Any]]) -> list[int]:
    return [int(token) for answer in answers for token in answer["output_ids"][0]]


def refused(call: Callable[[], Any]) -> str:
    """The server's error for a request over gRPC that it refuses."""
    try:
        call()
    except InferenceServerException as error:
        return str(error.message())
    raise AssertionError("the request was taken")


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
