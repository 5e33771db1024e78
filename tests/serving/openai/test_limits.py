"""One request takes its share of the server: of its memory, of its event loops, and of its connections."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from build_scripts.harness import resident_of
from dflash_trt.bundle.manifest import Bundle
from dflash_trt.errors import RequestError
from dflash_trt.serving.openai.engine import QueueFullError
from dflash_trt.serving.openai.errors import from_validation
from dflash_trt.serving.openai.generation import prepare
from dflash_trt.serving.openai.model import Model
from dflash_trt.serving.openai.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Message,
)
from dflash_trt.serving.openai.responses_request import ResponsesRequest
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


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionRequest, {"prompt": [None] * 10_000}),
        (CompletionRequest, {"prompt": [{}] * 10_000}),
        (CompletionRequest, {"prompt": [[None]] * 10_000}),
        (CompletionRequest, {"prompt": [5] * 10_000 + [None]}),
        (CompletionRequest, {"prompt": "x", "stop": [None] * 10_000}),
        (ChatRequest, {"messages": [None] * 10_000}),
        (ChatRequest, {"messages": [{}] * 10_000}),
        (ChatRequest, {"messages": [{"role": "user", "content": [{}] * 10_000}]}),
        (ChatRequest, {"messages": [{"role": "user", "content": "x"}], "tools": [{}] * 10_000}),
        (ResponsesRequest, {"input": [None] * 10_000}),
        (DetokenizeRequest, {"tokens": [None] * 10_000}),
    ],
)
def test_a_list_is_refused_at_its_first_wrong_item(kind: type[BaseModel], body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as error:
        kind.model_validate_json(json.dumps(body))
    assert error.value.error_count() < 20


def test_tools_are_counted() -> None:
    function = {"type": "function", "name": "f"}
    for kind, one, more in (
        (ChatRequest, {"type": "function", "function": {"name": "f"}}, {"messages": [{"role": "user"}]}),
        (ResponsesRequest, function, {"input": "x"}),
    ):
        kind.model_validate_json(json.dumps({"tools": [one] * 1024, **more}))
        with pytest.raises(ValidationError) as error:
            kind.model_validate_json(json.dumps({"tools": [one] * 1025, **more}))
        assert from_validation(error.value).message == "tools has too many items, expected at most 1024"


def test_samples_of_a_prompt_are_one_message_for_the_engine(model: Model) -> None:
    body = CompletionRequest(prompt="x", n=128, logit_bias={"5": 1.0}, seed=7)
    prepared = prepare(model, body, [[5], [6]], max_tokens=1, more={}, most_seconds=None)
    assert [(message["prompt"], message["n"]) for message in prepared.messages] == [([5], 128), ([6], 128)]
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
            async for index, update in engine.updates([MESSAGE | message]):
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
        ids, text = [5] * 10_000, model.token_text(5)
        monkeypatch.setattr(model.tokenizer, "decode", noting(model.tokenizer.decode))
        assert await model.decode(ids) == text * 10_000
        with pytest.raises(RequestError, match="tokens contains 99999, expected 0"):
            await model.decode([*ids, 99999])
        monkeypatch.setattr(model, "token_text", noting(model.token_text))
        assert len(await model.token_texts(ids)) == 10_000
        monkeypatch.setattr(model, "_message", noting(model._message))
        with pytest.raises(RequestError):
            await model.chat([Message(role="user", content="x")] * 10_000, None, {})

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
        ({}, {"127.0.0.1"}),
        ({"keys": ["x"]}, {"127.0.0.1"}),
        ({"host": "::1", "hosts": ["A.example"], "keys": ["x"]}, {"::1", "a.example"}),
        ({"host": "LocalHost"}, {"localhost"}),
        ({"host": "0.0.0.0"}, {"0.0.0.0"}),
        ({"host": "0.0.0.0", "hosts": ["box."]}, {"0.0.0.0", "box"}),
        ({"host": "0.0.0.0", "keys": ["x"]}, None),
        ({"host": "box.example", "keys": ["x"], "hosts": ["b"]}, None),
        ({"hosts": ["*"]}, None),
    ],
)
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
