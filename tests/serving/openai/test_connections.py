"""A connection is closed if a request's headers are too long, or do not arrive."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvicorn

from dflash_trt.serving.openai import connections
from dflash_trt.serving.openai.connections import Connection

HEAD = b"GET / HTTP/1.1\r\nHost: x\r\n"
Client = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Answers after a second."""
    await asyncio.sleep(1)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


def visit(client: Client, monkeypatch: pytest.MonkeyPatch, *, seconds: float) -> None:
    monkeypatch.setattr(connections, "_HEADERS_SECONDS", seconds)

    async def run() -> None:
        server = uvicorn.Server(
            uvicorn.Config(app, port=0, http=Connection, lifespan="off", log_level="error")
        )
        serving = asyncio.create_task(server._serve())
        while not server.started:
            await asyncio.sleep(0.01)
        address = server.servers[0].sockets[0].getsockname()
        reader, writer = await asyncio.open_connection(*address[:2])
        async with asyncio.timeout(60):
            await client(reader, writer)
        writer.close()
        server.should_exit = True
        await serving

    asyncio.run(run())


def test_long_headers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD)
        answer = asyncio.create_task(reader.read())
        while not answer.done():
            writer.write(b"x: " + b"y" * 8000 + b"\r\n")
            await asyncio.sleep(0.01)
        assert (await answer).endswith(b"the headers have over 65536 bytes")

    visit(client, monkeypatch, seconds=60)


def test_headers_that_do_not_arrive_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD)
        assert (await reader.read()).endswith(b"the headers have not arrived within 0.2 s")

    visit(client, monkeypatch, seconds=0.2)


def test_a_connection_that_asks_for_nothing_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert await reader.read() == b""

    visit(client, monkeypatch, seconds=0.2)


def test_half_a_request_behind_another_does_not_cut_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"\r\n" + HEAD)
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 200 OK")
        assert answer.endswith(b"\r\n\r\nok")

    visit(client, monkeypatch, seconds=0.2)


def test_an_answer_may_take_longer_than_the_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(2):
            writer.write(HEAD + b"\r\n")
            assert (await reader.readuntil(b"\r\n\r\nok")).startswith(b"HTTP/1.1 200 OK")

    visit(client, monkeypatch, seconds=0.2)
