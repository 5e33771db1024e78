"""The gate cancels the work of clients that leave, or read nothing."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any

import pytest

from dflash_trt.serving.openai import gate
from dflash_trt.serving.openai.gate import Gate

SCOPE = {"type": "http", "path": "/v1/completions", "method": "POST", "headers": []}
Message = MutableMapping[str, Any]


class Client:
    """Its request has one message. It leaves when `left` is set, and reads while `reads` is set."""

    def __init__(self) -> None:
        self.left, self.reads, self.got = asyncio.Event(), asyncio.Event(), list[Message]()
        self._asked = False

    async def receive(self) -> Message:
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.got.append(message)
        await self.reads.wait()


async def visit(client: Client, pieces: int) -> tuple[int, int]:
    """A stream of pieces. Returns the status that was counted, and the pieces that were sent whole."""
    statuses, sent = list[int](), 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal sent
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for piece in range(pieces):
            await send({"type": "http.response.body", "body": b"x", "more_body": piece < pieces - 1})
            sent += 1

    def observe(status: int, end: int) -> None:
        statuses.append(status)

    made = Gate(app, keys=[], most=100, observe=observe)
    await asyncio.wait_for(made(dict(SCOPE), client.receive, client.send), 30)
    (status,) = statuses
    return status, sent


def test_a_client_that_reads_gets_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "_WRITE_SECONDS", 5.0)

    async def run() -> None:
        client = Client()
        client.reads.set()
        assert await visit(client, 50) == (200, 50)
        assert len(client.got) == 51

    asyncio.run(run())


def test_a_client_that_reads_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "_WRITE_SECONDS", 0.05)

    async def run() -> None:
        client = Client()
        assert await visit(client, 50) == (499, 0)
        assert len(client.got) == 1
        await asyncio.sleep(0)  # a later cancellation would end this task

    asyncio.run(run())


def test_a_client_that_leaves_ends_its_stream() -> None:
    async def run() -> None:
        client = Client()
        asyncio.get_running_loop().call_later(0.05, client.left.set)
        assert await visit(client, 50) == (499, 0)

    asyncio.run(run())


def test_a_cancellation_from_outside_passes_through() -> None:
    async def run() -> None:
        client = Client()
        task = asyncio.create_task(visit(client, 50))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
