"""uvicorn's connections, with limits for what is not a request's body. Its parser in C has none."""

from __future__ import annotations

import asyncio
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_MOST_BYTES = 1 << 16  # as in uvicorn's other parser
_HEADERS_SECONDS = 30.0  # as for the body
_PROBE_SECONDS = 2.0
_FIRST_PROBE_SECONDS = 0.02  # for the answer of a machine whose client has left


class Connection(HttpToolsProtocol):
    """A connection that is closed if a request's line and headers are too long, or do not arrive.

    The same limit holds between the pieces of a chunked body and for its trailers, which are dropped. The application
    bounds the body itself, and the connection ends with an answer that leaves a body unread.

    An offer of another protocol, such as that of HTTP/2 by Java's client (`Upgrade: h2c`), is ignored.

    A client that closes its side after its requests gets its answers, as far as HTTP/1.1 without TLS allows it. One
    that has left looks the same until something is sent to it. So it gets "100 Continue", which every client skips.
    """

    _late: asyncio.TimerHandle | None = None
    _bytes = 0  # that have arrived since the latest message or piece of a body began
    _in_body = False  # whether headers have arrived, and not the end of their message
    _half_closed = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.renew_parser()

    def renew_parser(self) -> httptools.HttpRequestParser:
        """A parser at the beginning of a message."""
        self.parser = _Parser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's own
        return self.parser

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect_nothing()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection if there are whole requests to be answered."""
        http11 = self.cycle is not None and self.cycle.scope["http_version"] == "1.1"
        self._half_closed = http11 and self.scheme == "http" and not self._in_body and self._answers()
        if self._half_closed:
            self._expect_nothing()
            self._probe()
        return self._half_closed

    def _probe(self, seconds: float = _FIRST_PROBE_SECONDS) -> None:
        """Find out whether the client still reads: a second message fails if the first one was refused."""
        if self.transport.is_closing() or self.cycle.response_complete:
            return
        if not (self.cycle.response_started or self.pipeline):
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self.loop.call_later(seconds, self._probe, _PROBE_SECONDS)

    def data_received(self, data: bytes) -> None:
        """Pass bytes on, unless there are too many that are not of a body."""
        if self.timeout_keep_alive_task is not None and self._late is None:
            self._expect_headers()  # also of a client that sends nothing but line breaks
        if self._late is not None or self._in_body:
            self._bytes += len(data)
            if self._bytes - len(data) > _MOST_BYTES:
                self._refuse(
                    f"the {'trailers' if self._in_body else 'headers'} have over {_MOST_BYTES} bytes"
                )
                return
        super().data_received(data)

    def on_message_begin(self) -> None:
        """The headers of one more message must arrive."""
        super().on_message_begin()
        if self._late is None:
            self._expect_headers()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header, and drop a trailer, which must not pass for one."""
        if not self._in_body:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._expect_nothing()
        self._bytes, self._in_body = 0, True
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A piece of the body has come, so the count begins again."""
        self._bytes = 0
        super().on_body(body)

    def _should_upgrade(self) -> bool:
        """Whether the parser reads this request again, so that nothing answers it yet."""
        return bool(self.scope["method"] != "CONNECT")

    def head_without_offer(self) -> bytes:
        """The latest request's line and headers without `Upgrade`."""
        line = (
            f"{self.scope['method']} ".encode()
            + self.url
            + f" HTTP/{self.scope['http_version']}\r\n".encode()
        )
        kept = [name + b": " + value + b"\r\n" for name, value in self.headers if name != b"upgrade"]
        return line + b"".join(kept) + b"\r\n"

    def on_message_complete(self) -> None:
        self._in_body = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Close the connection after an answer that leaves a body unread, and the last one to a client that has closed
        its side.
        """
        is_last = self._in_body or self._half_closed
        if is_last and not self.pipeline:  # in a pipeline, an earlier request was answered
            self.transport.close()
        super().on_response_complete()

    def _expect_headers(self) -> None:
        self._bytes = 0
        self._late = self.loop.call_later(_HEADERS_SECONDS, self._give_up)

    def _expect_nothing(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _give_up(self) -> None:
        if self._answers():
            self._expect_headers()
        else:
            self._refuse(f"the headers have not arrived within {_HEADERS_SECONDS:g} s")

    def _answers(self) -> bool:
        """Whether an answer has begun that a refusal would cut, or an earlier request waits for its own."""
        if self._in_body and not self.pipeline and not self.cycle.response_started:
            return False
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self, why: str) -> None:
        asked = self._bytes > 0
        self._expect_nothing()
        if asked and not self._answers() and not self.transport.is_closing():
            self.send_400_response(why)
        else:
            self.transport.close()


class _Parser(httptools.HttpRequestParser):
    """uvicorn's parser, for which a request with `Upgrade` has no body. Another one reads such a request without that:
    after `Connection: close` this one reads nothing more.
    """

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self._connection = connection

    def feed_data(self, data: Any) -> None:
        """Parse bytes. Raises what httptools raises for the connection."""
        feed, parser, rest = httptools.HttpRequestParser.feed_data, self._connection.parser, memoryview(data)
        while True:
            try:
                feed(parser, rest)
                return
            except httptools.HttpParserUpgrade as offer:
                if not self._connection._should_upgrade():
                    raise
                rest = rest[offer.args[0] :]
            parser = self._connection.renew_parser()
            feed(parser, self._connection.head_without_offer())
