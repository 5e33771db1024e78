"""The gate cancels the work of clients that leave, or read nothing, and refuses what it must not let in."""

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
        self.gets = asyncio.Event()  # a first message
        self._asked = False

    async def receive(self) -> Message:
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.got.append(message)
        self.gets.set()
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


@pytest.mark.parametrize(
    ("reads", "leaves", "seconds", "status", "pieces"),
    [(True, False, 5.0, 200, 50), (False, False, 0.05, 499, 0), (False, True, 5.0, 499, 0)],
    ids=["reads", "reads nothing", "leaves"],
)
def test_a_client_that_leaves_or_reads_nothing_is_given_up(
    monkeypatch, reads, leaves, seconds, status, pieces
) -> None:
    monkeypatch.setattr(gate, "_WRITE_SECONDS", seconds)

    async def run() -> None:
        client = Client()
        if reads:
            client.reads.set()
        visiting = asyncio.create_task(visit(client, 50))
        await client.gets.wait()
        if leaves:
            client.left.set()
        assert await visiting == (status, pieces)
        assert len(client.got) == pieces + 1
        await asyncio.sleep(0)  # a later cancellation would end this task

    asyncio.run(run())


def test_a_request_that_the_server_cancels_as_it_stops_ends_with_503() -> None:
    """Its task ends like any other. What was sent before stays sent."""

    async def run() -> None:
        client, observed = Client(), list[tuple[int, int]]()
        client.reads.set()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await client.left.wait()

        made = Gate(app, keys=[], most=100, observe=lambda *statuses: observed.append(statuses))
        task = asyncio.create_task(made(dict(SCOPE), client.receive, client.send))
        await client.gets.wait()
        task.cancel()
        await task
        assert observed == [(200, 503)]
        assert [message["type"] for message in client.got] == ["http.response.start"]

    asyncio.run(run())


class Sender:
    """A client that goes on sending its body for `pieces` pieces, whatever it is told."""

    def __init__(self, pieces: int) -> None:
        self.left, self.got = pieces, list[Message]()

    async def receive(self) -> Message:
        await asyncio.sleep(0)
        self.left -= 1
        return {"type": "http.request", "body": b"x" * 10, "more_body": self.left > 0}

    async def send(self, message: Message) -> None:
        self.got.append(message)

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.got[0]["headers"])


async def nothing(scope: Any, receive: Any, send: Any) -> None:
    raise AssertionError("the gate let it in")


def refuse(client: Any, *headers: tuple[bytes, bytes], **options: Any) -> None:
    made = Gate(nothing, most=100, observe=lambda status, end: None, **{"keys": ["secret"], **options})
    scope = SCOPE | {"headers": list(headers)}

    async def run() -> None:
        await asyncio.wait_for(made(scope, client.receive, client.send), 30)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("key", "status"), [(b"", 401), (b"Bearer secret", 413)], ids=["without a key", "too large"]
)
def test_a_refusal_that_leaves_a_body_unread_closes_the_connection(key, status, monkeypatch) -> None:
    monkeypatch.setattr(gate, "_UNREAD_SECONDS", 0.2)
    client = Sender(10**6)
    refuse(client, (b"transfer-encoding", b"chunked"), (b"authorization", key))
    start, answer, end = client.got
    assert start["status"] == status
    assert client.headers[b"connection"] == b"close"
    # The whole refusal is sent at once, and the connection ends a little later.
    assert int(client.headers[b"content-length"]) == len(answer["body"])
    assert (answer["more_body"], end.get("more_body", False)) == (True, False)
    assert client.left > 0


def test_a_refusal_waits_for_the_end_of_a_short_body() -> None:
    client = Sender(5)
    refuse(client, (b"content-length", b"50"))
    assert (client.got[0]["status"], client.left, len(client.got)) == (401, 0, 3)


def test_a_refused_request_without_a_body_keeps_its_connection() -> None:
    client = Sender(5)
    refuse(client)
    assert (client.got[0]["status"], client.left, len(client.got)) == (401, 5, 2)
    assert b"connection" not in client.headers


@pytest.mark.parametrize(
    "host", ["", "127.0.0.1:8000", "[::1]:8000", "[::1]", "[fe80::1%25eth0]:1", "10.1.2.3", "LOCALHOST:80",
             "localhost.", "Box.Example:8000", "box.example."],
)  # fmt: skip
def test_addresses_and_own_names_are_let_in(host: str) -> None:
    for name, hosts in ((host, {"box.example"}), ("evil.example", None)):
        client = Sender(1)
        refuse(client, (b"host", name.encode()), hosts=hosts)
        assert client.got[0]["status"] == 401  # of the key, which is looked at later


@pytest.mark.parametrize(
    "host", ["evil.example", "EVIL.example:8000", "127.0.0.1.evil.example", "localhost.evil.example", "1.2.3",
             "[evil.example]:80", "box.example.evil", "sub.box.example", "\xff"],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/", "/health", "/metrics", "/v1/completions"])
def test_other_names_are_refused(host: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCOPE, "path", path)
    client = Sender(1)
    refuse(client, (b"host", host.encode("latin-1")), keys=[], hosts={"box.example"})
    assert client.got[0]["status"] == 403
    assert b"--allowed-host" in client.got[1]["body"]
