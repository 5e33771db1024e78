"""uvicorn's connections, with limits for the headers of a request. Its parser in C has none."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_MOST_BYTES = 1 << 16  # as in uvicorn's other parser
_HEADERS_SECONDS = 30.0  # as for the body


class Connection(HttpToolsProtocol):
    """A connection that is closed if a request's line and headers are too long, or do not arrive."""

    _late: asyncio.TimerHandle | None = None
    _bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect_nothing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._late is not None:
            self._bytes += len(data)
            if self._bytes - len(data) > _MOST_BYTES:
                self._refuse(f"the headers have over {_MOST_BYTES} bytes")
                return
        super().data_received(data)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._late is None:
            self._expect_headers()

    def on_headers_complete(self) -> None:
        self._expect_nothing()
        super().on_headers_complete()

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
        """Whether an earlier request of this connection is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self, why: str) -> None:
        asked = self._bytes > 0
        self._expect_nothing()
        if asked and not self._answers() and not self.transport.is_closing():
            self.send_400_response(why)
        else:
            self.transport.close()
