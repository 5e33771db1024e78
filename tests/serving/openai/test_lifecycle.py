"""Clients that leave, full queues, deadlines, and engines that die."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from tests.serving.openai.conftest import COMPLETIONS, LONG, Server, Streaming, waiting_behind


@pytest.fixture(scope="module")
def small(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A server for one request at a time, with one place to wait."""
    options = (
        *("--block-length=1", "--max-batch-size=1", "--max-queue=1", "--threads=1", "--stream-interval=0"),
        *("--enable-prompt-tokens-details", "--allowed-host=Box.Example"),
    )
    made = Server(tiny, tmp_path_factory.mktemp("log") / "log", *options)
    yield made
    assert made.stop() == 0


def test_the_operator_shows_cached_tokens_and_names_hosts(small: Server) -> None:
    body = {"prompt": [*range(40, 90)], "max_tokens": 1}
    usages = [small.post(COMPLETIONS, body, Host="box.example").json()["usage"] for _ in range(2)]
    assert [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages] == [0, 49]


def test_a_full_queue_is_429_and_clients_that_leave_make_room(small: Server) -> None:
    running, waiting = waiting_behind(small, LONG)
    os.kill(engine := small.engine(), signal.SIGSTOP)  # no stream ends before its client leaves
    answer = small.post(COMPLETIONS, LONG)
    assert answer.status_code == 429
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.json()["error"]["type"] == "rate_limit_error"
    # The one that waits has sent nothing to its client yet, the other one is in the middle of its stream.
    ended = 'dflash_request_success_total{finished_reason="cancelled"}'
    for each in (waiting, running):
        each.leave()
    for _ in range(2):  # the server has seen that they left
        assert small.http.get("/health").status_code == 200
    os.kill(engine, signal.SIGCONT)
    small.until(lambda: small.metric(ended) == 2)
    assert small.metric("dflash_num_requests_running") == 0
    assert small.post(COMPLETIONS, LONG | {"max_tokens": 2}).status_code == 200
    small.until(lambda: small.metric('dflash_requests_refused_total{reason="cancelled"}') == 2)


def test_a_deadline_keeps_the_tokens_before_it_and_without_any_is_504(small: Server) -> None:
    answer = small.post(COMPLETIONS, LONG | {"timeout": 1e-6})
    assert answer.status_code == 504
    assert answer.json()["error"]["type"] == "timeout_error"
    running = Streaming(small, LONG)
    small.until(running.begun)
    late = small.post(COMPLETIONS, LONG | {"timeout": 0.01})  # ends in the queue
    assert late.status_code == 504
    running.leave()


def test_an_engine_that_dies_is_replaced_and_its_requests_are_told(small: Server) -> None:
    running = Streaming(small, LONG)
    small.until(running.begun)
    deaths = small.metric("dflash_engine_deaths_total")
    refused = 'dflash_requests_refused_total{reason="engine_down"}'
    before = small.metric(refused)
    os.kill(small.engine(), signal.SIGKILL)
    *_, error, done = running.events()
    assert json.loads(error)["error"]["type"] == "server_error"
    assert done == "[DONE]"
    small.until(lambda: small.metric(refused) == before + 1)  # also a stream, which began with status 200
    statuses = set()

    def serves_again() -> bool:
        statuses.add(small.http.get("/ready").status_code)
        answer = small.post(COMPLETIONS, LONG | {"max_tokens": 2})
        assert answer.status_code in (200, 503), answer.text
        assert answer.status_code == 200 or "retry-after" in answer.headers
        assert small.http.get("/health").status_code == 200
        return answer.status_code == 200

    small.until(serves_again)
    assert 503 in statuses
    assert small.http.get("/ready").status_code == 200
    assert small.metric("dflash_engine_deaths_total") == deaths + 1
    assert small.metric("dflash_engine_restarts_total") == deaths + 1


def test_priorities_are_the_operators_to_allow(small: Server, server: Server) -> None:
    body = {"prompt": "x", "max_tokens": 1}
    for path, more in ((COMPLETIONS, body), ("/v1/responses", {"input": "x", "max_output_tokens": 1})):
        answer = small.post(path, more | {"priority": -1})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "priority"
        assert "--allow-priority" in answer.json()["error"]["message"]
        assert small.post(path, more | {"priority": 0}).status_code == 200
        assert server.post(path, more | {"priority": -100}).status_code == 200
        assert server.post(path, more | {"priority": -101}).json()["error"]["param"] == "priority"


def test_requests_are_taken_after_a_signal_until_there_is_a_second_one(start: Callable[..., Server]) -> None:
    server = start("--threads=1", "--drain=600", "--grace=5")
    assert server.http.get("/ready").status_code == 200
    server.process.send_signal(signal.SIGTERM)
    server.until(lambda: server.http.get("/ready").status_code == 503)

    def closing() -> bool:
        """Whether an answer on a new connection ends it, so that clients go elsewhere."""
        with httpx.Client(base_url=server.url, timeout=60) as another:
            answer = another.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 1})
        assert answer.status_code == 200
        return answer.headers.get("connection") == "close"

    server.until(closing)
    assert server.http.get("/health").status_code == 200
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 0
    assert "stopping in 600 s" in server.log


def test_the_port_of_the_systems_choice_is_shown_and_an_interrupt_waits_for_no_drain(tiny: Path) -> None:
    options = ["--port=0", "--threads=1", "--drain=600"]
    command = [sys.executable, "-m", "dflash_trt", "serve", str(tiny), *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    shown = {line.split()[0]: line.split()[1] for line in (process.stdout.readline() for _ in range(4))}
    assert httpx.get(shown["metrics"], timeout=60).status_code == 200
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0


def test_an_operator_limits_deadlines_and_logs(start: Callable[..., Server]) -> None:
    server = start("--max-deadline=0.2", "--block-length=1", "--threads=1", "--quiet")
    for _ in range(40):  # until the machine reaches the first token in time
        answer = server.post(COMPLETIONS, LONG | {"timeout": 60})
        if answer.status_code != 504:
            break
    made = answer.json()
    assert made["choices"][0]["finish_reason"] == "timeout"
    assert made["choices"][0]["text"]
    assert made["usage"]["completion_tokens"] < 480
    assert server.stop() == 0
    assert server.log == "dflash-trt serve: stopping\n"


def test_a_signal_lets_requests_finish(start: Callable[..., Server]) -> None:
    server = start("--block-length=1", "--threads=1", "--stream-interval=0", "--log-level=info")
    running = Streaming(server, LONG | {"max_tokens": 100})
    server.until(running.begun)
    assert server.stop() == 0
    for logged in ("stopping; 1 requests in flight", f"POST {COMPLETIONS} HTTP/1.1", "info runtime: opened "):
        assert logged in server.log  # the last one by the engine's own process
    *_, last, done = running.events()
    assert json.loads(last)["choices"][0]["finish_reason"] == "length"
    assert done == "[DONE]"


def test_a_taken_port_is_named(server: Server, tiny: Any, capfd: pytest.CaptureFixture[str]) -> None:
    from dflash_trt.cli import main

    assert main(["serve", str(tiny), f"--port={server.port}"]) == 1
    out, err = capfd.readouterr()
    assert f"--port {server.port}: cannot listen" in err
    assert out == ""
