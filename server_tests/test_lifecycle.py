"""Cancellation, deadlines, a full queue, the end of the engine, of the backend and of the server."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tritonclient.utils import InferenceServerException

from dflash_trt.bundle.manifest import Bundle
from dflash_trt.serving.deploy import deploy
from dflash_trt.serving.launch import Addresses, find_server, server_arguments
from server_tests.serving import (
    STUB,
    Client,
    Serving,
    fetch,
    free_ports,
    idle,
    ids_of,
    kill,
    refused,
    tensors,
)

LONG: dict[str, Any] = {
    "text_input": "def add(a, b):", "max_tokens": 450, "ignore_eos": True, "speculate": False,
}  # fmt: skip


def cancelled(server: Serving) -> float:
    return server.metric("dflash_request_success_total", finished_reason="cancelled")


Answers = list[tuple[str, dict[str, Any], bool]]


@contextmanager
def busy(server: Serving) -> Iterator[tuple[Client, Answers]]:
    """Start as many long requests as the server takes, all but the last one streaming; gives their answers so far.

    One more request over the same stream is refused, which shows that all of them have arrived. Any may end from then
    on. Nothing of them is left behind.
    """
    with Client(server.grpc) as client:
        answers = Answers()
        for key in "abc":
            client.ask(tensors(**LONG, stream=True), key=key)
        client.ask(tensors(**LONG), key="d")
        client.ask(tensors(text_input="a", max_tokens=4), key="e")
        refusals = refused(lambda: [answers.append(client.wait()) for _ in iter(int, 1)])
        assert "4 requests are in flight" in refusals
        yield client, answers


def test_leaving_a_grpc_stream_frees_the_slots(tiny: Serving) -> None:
    before = cancelled(tiny)
    with busy(tiny) as (client, _):
        client.leave(cancel=True)
    tiny.until(lambda: cancelled(tiny) > before and idle(tiny))
    assert tiny.generate(text_input="a", max_tokens=2)[0] == 200


def test_closing_an_http_stream_frees_the_slot(tiny: Serving) -> None:
    """For `generate`, Triton 24.10 notices only when it answers."""
    before = cancelled(tiny)
    body = json.dumps({**LONG, "stream": True}).encode()
    with socket.create_connection(("127.0.0.1", tiny.http_port)) as connection:
        head = f"POST /v2/models/dflash/generate_stream HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        assert connection.recv(1)
    tiny.until(lambda: cancelled(tiny) >= before + 1)
    tiny.until(lambda: idle(tiny))


def test_a_deadline_ends_a_request_with_what_it_has(tiny: Serving) -> None:
    with Client(tiny.grpc) as client:
        for doubled in range(8):  # until the machine reaches the first token in time
            (late,) = client.all(**LONG, timeout=50_000 << doubled)
            assert late["finish_reason"].tolist() == [[b"timeout"]]
            if late["output_ids"].shape[1]:
                break
        assert 0 < late["output_ids"].shape[1] < 450
        for more in ({}, {"num_top_log_probs": 2}):
            (early,) = client.all(**LONG, **more, timeout=1)
            assert (early["output_ids"].shape, early["text_output"].tolist()) == ((1, 0), [[b""]])
            assert early["finish_reason"].tolist() == [[b"timeout"]]
    status, answer = tiny.generate(**LONG, parameters={"timeout": 50_000})
    assert (status, answer["finish_reason"]) == (200, "timeout")
    status, answer = tiny.generate(text_input="a", max_tokens=4, parameters={"timeout": 60_000_000})
    assert (status, answer["finish_reason"]) == (200, "length")
    status, answer = tiny.generate(text_input="a", max_tokens=4, parameters={"timeout": -1})
    assert status == 400
    assert "timeout is -1" in answer["error"]


def test_a_full_queue_refuses_at_once_and_loses_nothing(tiny: Serving) -> None:
    statuses = list[int]()
    while not statuses or statuses[-1] == 200:  # until it comes while all four are in flight
        assert len(statuses) < 20
        with busy(tiny) as (client, answers):
            status, answer = tiny.generate(text_input="a", max_tokens=4)
            while sum(last for _, _, last in answers) < 4:
                answers.append(client.wait())
        statuses.append(status)
        got = {key: [outputs for of, outputs, _ in answers if of == key] for key in "abcd"}
        ends = {key: ids_of(answers)[-20:] for key, answers in got.items()}
        assert ends["a"] == ends["b"] == ends["c"] == ends["d"]
        assert len(ids_of(got["d"])) == 450
    assert statuses[-1] == 400  # Triton's status for every error of generate
    assert "4 requests are in flight" in answer["error"]
    assert tiny.generate(text_input="a", max_tokens=4)[0] == 200


def errors(client: Client, answers: Answers) -> list[str]:
    """What each request that has not ended is told."""
    messages: list[str] = []
    while sum(last for _, _, last in answers) + len(messages) < 4:
        try:
            answers.append(client.wait())
        except InferenceServerException as error:
            messages.append(str(error.message()))
    return messages


def test_the_death_of_the_engine_is_reported_and_another_one_is_started(tiny: Serving) -> None:
    (engine,) = tiny.processes("dflash_trt.serving.worker")
    (server,) = tiny.processes("bin/tritonserver")
    deaths = tiny.metric("dflash_engine_deaths_total")
    with busy(tiny) as (client, answers):
        kill(engine)
        messages = errors(client, answers)
    assert messages  # those in the queue at least
    assert all(
        "the engine process ended (SIGKILL); it is being started again" in message for message in messages
    )
    assert f"started again; {len(messages)} requests are refused" in tiny.log
    for name in ("deaths", "restarts"):
        tiny.until(lambda name=name: tiny.metric(f"dflash_engine_{name}_total") == deaths + 1)
    tokens = tiny.metric("dflash_generation_tokens_total")
    for model in ("dflash", "ensemble"):
        assert tiny.generate(model=model, text_input="a", max_tokens=4)[0] == 200
    assert tiny.processes("bin/tritonserver") == [server]
    assert tiny.processes("dflash_trt.serving.worker") not in ([], [engine])
    tiny.until(lambda: tiny.metric("dflash_engine_up") == 1)
    tiny.until(lambda: idle(tiny) and tiny.metric("dflash_kv_cache_usage_perc") == 0)
    tiny.until(lambda: tiny.metric("dflash_generation_tokens_total") == tokens + 8)  # counters go on


def test_an_engine_that_is_told_to_end_is_started_again(tiny: Serving) -> None:
    (engine,) = tiny.processes("dflash_trt.serving.worker")
    os.kill(engine, signal.SIGTERM)
    statuses = set()

    def serves() -> bool:
        statuses.add(tiny.generate(text_input="a", max_tokens=2)[0])
        return tiny.processes("dflash_trt.serving.worker") not in ([], [engine]) and tiny.ready()

    tiny.until(serves)
    assert statuses <= {200, 400}  # 400: Triton's status for every error of generate
    tiny.until(lambda: tiny.generate(text_input="a", max_tokens=2)[0] == 200)


def test_the_death_of_the_backend_or_the_server_ends_everything(
    bundles: dict[str, Path], tmp_path: Path
) -> None:
    """So a container starts it again. Triton would leave the backend's requests unanswered forever."""
    for victim in (STUB, "bin/tritonserver"):
        server = Serving(bundles["tiny"], tmp_path / "log", "--max-batch-size=2", "--max-queue=2")
        processes = server.processes("")
        (pid,) = server.processes(victim)
        with busy(server) as (client, answers):
            kill(pid)
            refused(
                lambda c=client, got=answers: [got.append(c.wait()) for _ in iter(int, 1)]
            )  # nobody waits forever
        assert server.process.wait(60) == 1
        assert "tritonserver ended with SIGKILL" in server.log
        server.until(lambda alive=processes: not [pid for pid in alive if Path(f"/proc/{pid}").exists()])


def test_the_block_length_of_the_server_is_the_most_that_a_round_verifies(tiny: Serving) -> None:
    assert tiny.generate(text_input="What is 17 + 25?", max_tokens=40, ignore_eos=True)[0] == 200
    tiny.until(lambda: tiny.metric("dflash_block_length_rounds_total", length="4") > 0)
    assert tiny.metric("dflash_block_length_rounds_total", length="5") == 0


def test_a_signal_lets_requests_finish_then_cancels_them(bundles: dict[str, Path], tmp_path: Path) -> None:
    for grace, number, reason in ((60, signal.SIGINT, b"length"), (0, signal.SIGTERM, b"cancelled")):
        options = ("--max-batch-size=2", "--max-queue=2", f"--grace={grace}", "--log-level=info")
        server = Serving(bundles["tiny"], tmp_path / f"log{grace}", *options)
        with busy(server) as (client, answers):
            server.process.send_signal(number)
            server.until(lambda server=server: "Waiting for in-flight requests" in server.log)
            url = f"http://127.0.0.1:{server.http_port}/v2/models/dflash/generate"
            assert fetch(url, {"text_input": "a", "max_tokens": 2})[0] != 200  # new requests are refused
            while sum(last for _, _, last in answers) < 4:
                answers.append(client.wait())
        reasons = {outputs["finish_reason"][0, 0] for _, outputs, last in answers if last}
        assert reason in reasons  # those in the queue at least
        assert reasons <= {b"length", reason}
        assert server.process.wait(120) == 0
        assert server.processes("") == []
        assert f"requests have {grace} s to finish" in server.log
        assert not re.search(r"Signal \(11\)|Traceback", server.log), server.log


def test_an_engine_that_does_not_start_ends_the_server_with_the_reason(
    bundles: dict[str, Path], tmp_path: Path
) -> None:
    """The bundle is damaged after the repository was made, and a plain tritonserver reports it."""
    repository = deploy(Bundle.open(bundles["tiny"]), tmp_path / "repository", copy=True)
    (repository / "dflash" / "1" / "bundle" / "tokenizer.json").write_text("{}")
    server = find_server(tmp_path)
    assert server is not None
    addresses = Addresses("127.0.0.1", dict(zip(("http", "grpc", "metrics"), free_ports(3), strict=True)))
    done = subprocess.run(
        [*server.command, *server_arguments(repository, addresses, "error", 0)],
        env={**os.environ, **server.environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert "tokenizer.json: 2 bytes, the manifest says" in done.stderr
