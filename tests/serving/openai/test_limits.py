"""One request takes its share of the server: of its memory, of its event loops, and of its connections."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from build_scripts.harness import resident_of
from dflash_trt.bundle.manifest import Bundle
from dflash_trt.errors import RequestError
from dflash_trt.serving.openai import reading
from dflash_trt.serving.openai.engine import QueueFullError
from dflash_trt.serving.openai.generation import prepare
from dflash_trt.serving.openai.model import Model
from dflash_trt.serving.openai.protocol import (
    CompletionRequest,
)
from dflash_trt.serving.openai.server import ServerSettings, _hosts
from tests.serving.openai.conftest import COMPLETIONS, Server
from tests.serving.openai.test_operations import MESSAGE, last, running


@pytest.fixture(scope="module")
def model(tiny: Path) -> Model:
    return Model(Bundle.open(tiny), None)


def test_trailers_without_end_after_a_refusal_take_no_memory(start: Callable[..., Server]) -> None:
    server = start("--threads=1", DFLASH_TRT_API_KEY="secret")
    before, sent = resident_of(server.process.pid), 0
    piece = b"x: " + b"y" * 8000 + b"\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n"
        )
        begin = time.monotonic()
        with contextlib.suppress(ConnectionError):
            while sent < 300 << 20:
                connection.sendall(piece)
                sent += len(piece)
    assert sent < 100 << 20
    assert time.monotonic() - begin < 30
    assert resident_of(server.process.pid) - before < 32  # MB
    server.until(lambda: " 401" in server.log)


def test_samples_of_a_prompt_are_one_message_for_the_engine(model: Model) -> None:
    body = CompletionRequest(prompt="x", n=128, logit_bias={"5": 1.0}, seed=7)
    prepared = prepare(model, body, [[5], [6]], max_tokens=1, more={}, most_seconds=None)
    assert (prepared.prompts, prepared.request["n"]) == ([[5], [6]], 128)
    assert prepared.choices == 256


def test_samples_count_as_requests_in_flight(tiny: Path) -> None:
    """The engine of `running` takes 4 at once."""

    async def run() -> None:
        async with running(tiny, []) as engine:
            params = {"max_tokens": 3, "temperature": 1.0, "seed": 5}
            message = {"params": params, "n": 3}
            three = asyncio.create_task(last(engine, **message))
            await asyncio.sleep(0)
            assert engine.in_flight == 3
            with pytest.raises(QueueFullError, match="3 requests are in flight, and the limit is 4"):
                await last(engine, n=2)
            assert (await last(engine))["finish_reason"] == "length"
            assert (await three)["finish_reason"] == "length"
            assert engine.in_flight == 0
            samples = {}
            async for index, update in engine.updates(MESSAGE | message, [[5, 6]]):
                samples[index] = update["token_ids"]
            for sample, ids in samples.items():
                alone = await last(engine, params=params | {"seed": 5 + sample})
                assert alone["token_ids"] == ids
            assert set(samples) == {0, 1, 2}

    asyncio.run(run())


def test_long_lists_are_worked_on_outside_the_event_loop(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = set[str]()

    def noting(work: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **options: Any) -> Any:
            threads.add(threading.current_thread().name)
            return work(*args, **options)

        return noted

    async def run() -> None:
        monkeypatch.setattr(model, "max_seq_len", 10_001)
        ids, text = [5] * 10_000, model.token_text(5)
        monkeypatch.setattr(model.tokenizer, "decode", noting(model.tokenizer.decode))
        assert await model.decode(ids) == text * 10_000
        with pytest.raises(RequestError, match="tokens contains 99999, expected 0"):
            await model.decode([*ids, 99999])
        monkeypatch.setattr(model, "token_text", noting(model.token_text))
        assert len(await model.token_texts(ids)) == 10_000
        read = noting(lambda: reading.messages([{"role": "user", "content": "x"}] * 100_000))
        with pytest.raises(RequestError):
            await model.chat(read, [], {})

    asyncio.run(run())
    assert threads == {"dflash-trt texts_0"}


def test_a_token_is_decoded_once(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []
    decode = model.tokenizer.decode

    def noting(ids: list[int], **options: Any) -> str:
        decoded.extend(ids)
        return decode(ids, **options)

    monkeypatch.setattr(model.tokenizer, "decode", noting)
    assert len({model.token_text(77) for _ in range(10)}) == 1
    assert decoded == [77]


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({}, {"127.0.0.1"}), ({"keys": ["x"]}, {"127.0.0.1"}),
        ({"host": "::1", "hosts": ["A.example"], "keys": ["x"]}, {"::1", "a.example"}),
        ({"host": "LocalHost"}, {"localhost"}), ({"host": "0.0.0.0"}, {"0.0.0.0"}),
        ({"host": "0.0.0.0", "hosts": ["box."]}, {"0.0.0.0", "box"}), ({"host": "0.0.0.0", "keys": ["x"]}, None),
        ({"host": "box.example", "keys": ["x"], "hosts": ["b"]}, None), ({"hosts": ["*"]}, None),
    ],
)  # fmt: skip
def test_names_matter_on_loopback_and_without_keys(settings: dict[str, Any], names: set[str] | None) -> None:
    assert _hosts(ServerSettings(bundle=Bundle(Path("x"), {}), **settings)) == names


def test_a_page_whose_name_leads_here_is_refused(server: Server) -> None:
    body = {"prompt": "x", "max_tokens": 1}
    for path in ("/", "/health", "/metrics", "/v1/models"):
        answer = server.http.get(path, headers={"Host": f"evil.example:{server.port}"})
        assert answer.status_code == 403
        assert "start it with --allowed-host evil.example" in answer.json()["error"]["message"]
    assert server.post(COMPLETIONS, body, Host="evil.example").status_code == 403
    for host in ("localhost", f"LOCALHOST:{server.port}", f"[::1]:{server.port}", "192.0.2.1"):
        assert server.post(COMPLETIONS, body, Host=host).status_code == 200
