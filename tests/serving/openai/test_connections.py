"""A connection is closed if headers or trailers are too long, if headers do not arrive, or if a body is left unread."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvicorn

from dflash_trt.serving.openai import connections
from dflash_trt.serving.openai.connections import Connection
from dflash_trt.serving.processes import run_loop

HEAD = b"GET / HTTP/1.1\r\nHost: x\r\n"
Client = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Watched(Connection):
    """The latest connection to the server of a test. received: that it has read something."""

    latest: Watched | None = None
    received: asyncio.Event

    def connection_made(self, transport: Any) -> None:
        type(self).latest, self.received = self, asyncio.Event()
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self.received.set()


async def goes_on(writer: asyncio.StreamWriter, piece: bytes) -> None:
    """Send a piece, and again after it was read, until the server closes the connection."""
    writer.write(piece)
    await writer.drain()
    while not ((server := Watched.latest) and server.received.is_set()):
        await asyncio.sleep(0)
    while not server.transport.is_closing():
        server.received.clear()
        writer.write(piece)
        await server.received.wait()


async def at_once(scope: Any, receive: Any, send: Any) -> None:
    """Answers without reading the body."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


async def body(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the body."""
    read, more = b"", True
    while more:
        message = await receive()
        read, more = read + message["body"], message["more_body"]
    headers = [(b"content-length", str(len(read)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": read})


async def names(scope: Any, receive: Any, send: Any) -> None:
    """Reads the body, and answers with the names of the headers."""
    while (await receive()).get("more_body"):
        pass
    body = b" ".join(name for name, _ in scope["headers"])
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def visit(client: Client, monkeypatch: pytest.MonkeyPatch, *, seconds: float, app: Any) -> None:
    monkeypatch.setattr(connections, "_HEADERS_SECONDS", seconds)
    Watched.latest = None

    async def run() -> None:
        server = uvicorn.Server(uvicorn.Config(app, port=0, http=Watched, lifespan="off", log_level="error"))
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

    run_loop(run())


def test_long_headers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD)
        answer = asyncio.create_task(reader.read())
        await goes_on(writer, b"x: " + b"y" * 8000 + b"\r\n")
        assert (await answer).endswith(b"the headers have over 65536 bytes")

    visit(client, monkeypatch, seconds=60, app=at_once)


@pytest.mark.parametrize(
    ("sent", "begin", "end"),
    [
        (HEAD, b"HTTP/1.1 400", b"the headers have not arrived within 0.2 s"),
        (b"", b"", b""),  # a connection that asks for nothing is closed
        # Half a request after another one does not cut its answer.
        (HEAD + b"\r\n" + HEAD, b"HTTP/1.1 200 OK", b"\r\n\r\nok"),
    ],
)
def test_headers_that_do_not_arrive_end_a_connection(sent, begin, end, monkeypatch) -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(sent)
        answer = await reader.read()
        assert (answer.startswith(begin), answer.endswith(end), bool(answer)) == (True, True, bool(begin))

    late, give_up = asyncio.Event(), Connection._give_up

    def gives_up(connection: Connection) -> None:
        late.set()
        give_up(connection)

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await late.wait()
        await at_once(scope, receive, send)

    monkeypatch.setattr(Connection, "_give_up", gives_up)
    visit(client, monkeypatch, seconds=0.2, app=slow)


def test_an_answer_may_take_longer_than_the_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    """No time runs while it is made."""

    async def unhurried(scope: Any, receive: Any, send: Any) -> None:
        assert Watched.latest
        assert Watched.latest._late is None
        await at_once(scope, receive, send)

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(2):
            writer.write(HEAD + b"\r\n")
            assert (await reader.readuntil(b"\r\n\r\nok")).startswith(b"HTTP/1.1 200 OK")

    visit(client, monkeypatch, seconds=60, app=unhurried)


CHUNKED = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("first", "piece", "says"),
    [
        (b"2\r\nok\r\n0\r\nx: y", b"x: " + b"y" * 8000 + b"\r\n", b"the trailers have over 65536 bytes"),
        (b"2\r\nok\r\n0\r\nx: y", b"y" * 8000, b"the trailers have over 65536 bytes"),
        (b"2;x=", b"y" * 8000, b""),
    ],
    ids=["many trailers", "one trailer", "an extension of a chunk"],
)
def test_what_follows_a_chunk_is_bounded(first, piece, says, monkeypatch) -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED + first)
        answer = asyncio.create_task(reader.read())
        await goes_on(writer, piece)
        assert (await answer).startswith(b"HTTP/1.1 400")
        assert answer.result().endswith(says)

    visit(client, monkeypatch, seconds=60, app=names)


def test_a_long_chunked_body_in_small_pieces_with_a_trailer_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(2):  # the connection stays
            writer.write(CHUNKED + b"1\r\nx\r\n" * 100_000 + b"0\r\nAuthorization: Bearer x\r\n\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 OK")
            # A trailer is not a header.
            assert await reader.readexactly(len(b"host transfer-encoding")) == b"host transfer-encoding"

    visit(client, monkeypatch, seconds=60, app=names)


def test_an_answer_that_leaves_a_body_unread_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED)
        await reader.readuntil(b"\r\n\r\nok")
        await goes_on(writer, b"1\r\nx\r\n")

    visit(client, monkeypatch, seconds=60, app=at_once)


def test_line_breaks_after_an_answer_do_not_keep_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"\r\n")
        await reader.readuntil(b"\r\n\r\nok")
        writer.write(b"\r\n")
        assert (await reader.read()).endswith(b"the headers have not arrived within 0.2 s")

    visit(client, monkeypatch, seconds=0.2, app=at_once)


JAVA = b"POST / HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\nHost: x\r\n"


@pytest.mark.parametrize(("offer", "size"), [(b"h2c", 1), (b"websocket", 7), (b"TLS/1.0", 1 << 20)])
def test_an_offer_of_another_protocol_is_ignored(offer, size, monkeypatch) -> None:
    """However it comes in pieces, and whatever follows on the connection."""
    request = JAVA + b"Upgrade: " + offer + b"\r\n"
    sized = request + b"Content-Length: 5\r\n\r\nhello"
    chunked = request + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"
    last = sized.replace(b"Host: x\r\n", b"Host: x\r\nConnection: close\r\n")
    whole = sized * 2 + chunked * 2 + CHUNKED + b"3\r\nbye\r\n0\r\n\r\n" + last

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for start in range(0, len(whole), size):
            writer.write(whole[start : start + size])
            await asyncio.sleep(0)
        for expected in (*[b"hello"] * 4, b"bye", b"hello"):
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 OK")
            assert await reader.readexactly(len(expected)) == expected
        assert await reader.read() == b""

    visit(client, monkeypatch, seconds=60, app=body)


def test_many_offers_at_once_and_a_tunnel_do_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    offer = JAVA.replace(b"POST", b"GET") + b"Upgrade: h2c\r\n\r\n"

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(offer * 1000)
        for _ in range(1000):
            assert (await reader.readuntil(b"\r\n\r\nok")).startswith(b"HTTP/1.1 200 OK")
        writer.write(b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\n" + offer)
        assert (await reader.read()).startswith(b"HTTP/1.1 400")

    visit(client, monkeypatch, seconds=60, app=at_once)


@pytest.mark.parametrize(("requests", "begun"), [(1, False), (1, True), (2, False)])
def test_a_client_that_closes_its_side_gets_its_answers(requests, begun, monkeypatch) -> None:
    """begun: whether the answer has begun by then."""
    monkeypatch.setattr(connections, "_PROBE_SECONDS", 0.01)
    probed = asyncio.Event()
    probe = Connection._probe

    def probing(connection: Connection) -> None:
        probed.set()
        probe(connection)

    monkeypatch.setattr(Connection, "_probe", probing)

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        if begun:
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
            await send({"type": "http.response.body", "body": b"o", "more_body": True})
        if requests == 1:  # else the end is read after the first answer
            await probed.wait()
        if begun:
            await send({"type": "http.response.body", "body": b"k"})
        else:
            await at_once(scope, receive, send)

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write((HEAD + b"\r\n") * requests)
        writer.write_eof()
        answers = (await reader.read()).replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"")
        assert answers.count(b"HTTP/1.1 200 OK") == requests
        assert answers.endswith(b"\r\n\r\nok")

    visit(client, monkeypatch, seconds=60, app=slow)


def test_a_client_that_has_left_is_noticed_before_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_PROBE_SECONDS", 0.01)
    came, left = asyncio.Event(), asyncio.Event()

    async def waits(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        came.set()
        assert (await receive())["type"] == "http.disconnect"
        left.set()

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"\r\n")
        await came.wait()
        writer.close()
        await left.wait()

    visit(client, monkeypatch, seconds=60, app=waits)


@pytest.mark.parametrize(
    "sent", [HEAD, b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n1", b"GET / HTTP/1.0\r\n\r\n"]
)
def test_half_a_request_ends_with_its_client(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """So does one of HTTP/1.0, which has nothing that finds out whether its client reads."""

    async def never(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(sent)
        writer.write_eof()
        assert await reader.read() == b""

    visit(client, monkeypatch, seconds=60, app=never)
