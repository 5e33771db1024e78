"""The engine process on its socket, and the lines of JSON that pass there."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_trt import LLM, AsyncLLM, SamplingParams
from dflash_trt.bundle.manifest import Bundle
from dflash_trt.serving import wire
from dflash_trt.serving.worker import Worker
from tests.decoding.test_faults import Panic
from tests.doubles.bundles import prompt


def request(key: int, prompt: list[int], **params: Any) -> bytes:
    return wire.line(wire.EngineRequest(id=key, prompt=prompt, params=params, stream=True))


class Engine:
    """The worker, started as the Triton model does."""

    ready: dict[str, Any]

    def __init__(self, bundle: Path, **settings: Any) -> None:
        self.socket, theirs = socket.socketpair()
        arguments = {"bundle": str(bundle), "threads": 1, **settings}
        command = wire.command(sys.executable, theirs, arguments)
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        theirs.close()
        self.file = self.socket.makefile("rb")

    def ask(self, key: int, prompt: Any, **params: Any) -> None:
        self.socket.sendall(request(key, prompt, **params))

    def updates(self) -> Iterator[tuple[Any, dict[str, Any]]]:
        for line in self.file:
            yield from ((key, update) for key, update in json.loads(line) if key != "metrics")

    def end(self) -> int:
        self.socket.shutdown(socket.SHUT_WR)
        return self.process.wait(60)


@pytest.fixture(scope="module")
def engine(bundle: Path) -> Iterator[Engine]:
    """One that is ready and gives a response per round. It ends with its socket."""
    made = Engine(bundle, stream_interval=0)
    made.ready = json.loads(made.file.readline())
    yield made
    assert made.end() == 0


def test_the_engine_process_answers(bundle: Path, engine: Engine) -> None:
    with LLM(bundle, threads=1) as llm:
        expected = llm.generate(prompt(9), SamplingParams(max_tokens=30, temperature=1.0, seed=3))
    assert engine.ready.keys() == {"ready", "key", "longest_line"}
    assert engine.ready["longest_line"] > 1 << 20
    assert engine.ready["key"] == Bundle.open(bundle).manifest["key"]
    engine.ask(1, prompt(9), max_tokens=30, temperature=1.0, seed=3)
    engine.ask(2, [10**6], max_tokens=3)
    engine.ask(3, prompt(5), max_tokens=200, ignore_eos=True)
    engine.socket.sendall(b'{"cancel": 3}\n{"cancel": 77}\n')
    tokens: list[int] = []
    ends: dict[int, Any] = {}
    for key, update in engine.updates():
        if key == 1:
            tokens += update["token_ids"]
        if "error" in update or "finish_reason" in update:
            ends[key] = update.get("error") or update["finish_reason"]
        if len(ends) == 3:
            break
    assert tokens == expected.token_ids
    assert ends[1] == expected.finish_reason
    assert (ends[2]["code"], ends[2]["field"]) == ("INVALID_ARG", "prompt")
    assert ends[2]["text"].startswith("the prompt has token id 1000000")
    assert ends[3]["code"] == "CANCELLED"


def test_a_text_that_cannot_fit_is_refused_and_one_that_fits_is_told_its_tokens(bundle, engine) -> None:
    longest = engine.ready["longest_line"]
    text = "\x01" * ((longest - 1000) // 6)
    assert len(request(1, text)) <= longest
    engine.ask(1, text)
    engine.ask(2, "hello", max_tokens=3, ignore_eos=True)
    got: dict[int, list[dict[str, Any]]] = {1: [], 2: []}
    for key, update in engine.updates():
        got[key].append(update)
        if got[1] and got[2] and "finish_reason" in got[2][-1]:
            break
    assert got[1][0]["error"]["text"].startswith(f"the prompt has {len(text)} bytes")
    with LLM(bundle, threads=1) as llm:
        assert got[2][0]["num_input_tokens"] == len(llm.tokenizer.encode("hello"))
    assert all("num_input_tokens" not in update for update in got[2][1:])


def test_a_stream_gets_a_response_per_round_or_one_per_interval(bundle: Path, engine: Engine) -> None:
    def streamed(by: Engine) -> list[dict[str, Any]]:
        by.ask(1, prompt(9), max_tokens=60, ignore_eos=True, logprobs=True)
        got = list[dict[str, Any]]()
        for _, update in by.updates():
            got.append(update)
            if "finish_reason" in update:
                return got
        raise AssertionError(got)

    rare = Engine(bundle, stream_interval=10**9)
    rare.file.readline()
    often, few = streamed(engine), streamed(rare)
    assert rare.end() == 0
    assert len(few) == 2 < len(often)
    for key in ("token_ids", "text"):
        assert [x for u in often for x in u[key]] == [x for u in few for x in u[key]]
    assert [len(u["logprobs"]) for u in few] == [len(u["token_ids"]) for u in few] == [1, 59]


def test_updates_that_waited_for_each_other_lose_nothing() -> None:
    whole: wire.Update = {
        "index": 0, "text": "a", "token_ids": [1], "rounds": [(1, 0, 3)], "num_input_tokens": 4,
    }  # fmt: skip
    wire.merge(
        whole, {"index": 0, "text": "bc", "token_ids": [2, 3], "rounds": [(2, 1, 3)], "logprobs": [-1.0]}
    )
    wire.merge(
        whole, {"index": 0, "text": "", "rounds": [(1, 0, 3)], "logprobs": [-2.0], "finish_reason": "stop"}
    )
    assert whole == {
        "index": 0, "text": "abc", "token_ids": [1, 2, 3], "rounds": [(1, 0, 3), (2, 1, 3), (1, 0, 3)],
        "num_input_tokens": 4, "logprobs": [-1.0, -2.0], "finish_reason": "stop",
    }  # fmt: skip


def test_the_engine_process_says_why_it_cannot_start(bundle: Path, tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    assert "manifest.json" in json.loads(engine.file.readline())["fatal"]
    assert engine.process.wait(60) == 1
    for options, expected in (({"max_queue": -1}, "max_queue is -1"), ({"max_que": 4}, "max_que")):
        engine = Engine(bundle, **options)
        assert expected in json.loads(engine.file.readline())["fatal"]
        assert engine.process.wait(60) == 1


def test_sigterm_cancels_what_is_in_flight_and_takes_nothing_more(bundle: Path) -> None:
    engine = Engine(bundle)
    engine.file.readline()
    engine.ask(1, prompt(5), max_tokens=220, ignore_eos=True)
    updates = engine.updates()
    next(updates)
    engine.process.terminate()
    key, update = next((k, u) for k, u in updates if "finish_reason" in u)
    assert (key, update["finish_reason"]) == (1, "cancelled")
    engine.ask(2, prompt(5), max_tokens=2)
    assert next(updates) == (2, wire.refusal("UNAVAILABLE", "the server is stopping"))
    assert engine.end() == 0


async def started(worker: Worker) -> tuple[asyncio.Task[int], asyncio.StreamReader, asyncio.StreamWriter]:
    """A worker that has said that it is ready, and the server's end of its socket."""
    ours, theirs = socket.socketpair()
    serving = asyncio.create_task(worker.serve(theirs))
    reader, writer = await asyncio.open_connection(sock=ours)
    await reader.readline()
    return serving, reader, writer


def test_a_failed_engine_refuses_its_requests_and_ends_the_process(bundle: Path) -> None:
    async def run() -> None:
        llm = AsyncLLM(bundle, threads=1)

        def broken(*_: Any) -> Any:
            raise RuntimeError("out of order")

        llm.runtime.pair.start = broken
        serving, reader, writer = await started(Worker(llm))
        for key in (1, 2):
            writer.write(request(key, prompt(5), max_tokens=20))
        failed: dict[int, wire.Error] = {}
        while len(failed) < 2:
            failed |= {k: u["error"] for k, u in json.loads(await reader.readline()) if "error" in u}
        assert all(
            error["code"] == "UNAVAILABLE" and "RuntimeError: out of order" in error["text"]
            for error in failed.values()
        )
        assert await serving == 1
        await llm.close()

    asyncio.run(run())


def test_a_step_without_end_ends_the_engine_of_triton_s_model(bundle: Path, hanging_on: list[int]) -> None:
    engine = Engine(bundle, max_step=0.2)
    engine.file.readline()
    engine.socket.sendall(b'{"watch": "metrics"}\n')
    engine.ask(1, hanging_on, max_tokens=20)
    assert engine.process.wait(60) == 1


def test_every_request_is_answered_whatever_happens_to_it(bundle: Path) -> None:
    """A panic, an unwritable answer, numbers that are not finite. The other requests get their tokens."""

    async def run() -> None:
        llm = AsyncLLM(bundle, threads=1, block_length=1)
        expected = await llm.generate(prompt(5), SamplingParams(max_tokens=20))
        worker, make, prefill = Worker(llm), llm.runtime.request, llm.runtime.pair.prefill

        def panicking(tokens: list[int], *given: Any, **options: Any) -> Any:
            if tokens[0] == 1:
                raise Panic("on this prompt")
            return make(tokens, *given, **options)

        def not_finite(tokens: list[int], *given: Any, **options: Any) -> Any:
            logits, *sound = prefill(tokens, *given, **options)
            return (logits * np.nan if tokens[0] == 2 else logits), *sound

        echo = worker._echo
        llm.runtime.request = panicking
        llm.runtime.pair.prefill = not_finite
        worker._echo = lambda ids: object() if ids[0] == 3 else echo(ids)
        serving, reader, writer = await started(worker)
        for key in range(1, 7):
            ids = [key, *prompt(4)] if key < 4 else prompt(5)
            params = {"max_tokens": 20}
            writer.write(
                wire.line(wire.EngineRequest(id=key, prompt=ids, params=params, stream=True, echo=True))
            )
        ends: dict[int, Any] = {}
        tokens: dict[int, list[int]] = {key: [] for key in range(1, 7)}
        while len(ends) < 6:
            for key, update in json.loads(await asyncio.wait_for(reader.readline(), 60)):
                if key != "metrics":
                    tokens[key] += update.get("token_ids", [])
                    if "error" in update or "finish_reason" in update:
                        ends[key] = update.get("error") or update["finish_reason"]
        assert [ends[key]["code"] for key in (1, 2, 3)] == ["INTERNAL"] * 3
        assert [ends[key]["text"].partition(":")[0] for key in (1, 3)] == ["Panic", "TypeError"]
        assert "no finite largest value" in ends[2]["text"]
        assert [tokens[key] for key in (4, 5, 6)] == [expected.token_ids] * 3
        writer.close()
        assert await serving == 0

    asyncio.run(run())


@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_lines_come_in_any_pieces(size: int) -> None:
    said, lines = [{"id": 1}, [], "a\nb", {"cancel": 1}], wire.Lines()
    sent = b"".join(json.dumps(each).encode() + b"\n" for each in said)
    pieces = [sent[at : at + size] for at in range(0, len(sent), size)]
    assert [value for piece in pieces for value in lines.push(piece)] == said


def test_pauses_before_a_restart_grow_until_it_has_served_for_a_while() -> None:
    pauses = [wire.FIRST_PAUSE]
    while len(pauses) < 9:
        pauses.append(wire.next_pause(pauses[-1], 59.0))
    assert pauses == [0.25, 0.5, 1, 2, 4, 8, 16, 30, 30]
    assert wire.next_pause(30.0, 61.0) == 0.25
