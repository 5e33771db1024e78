"""HTTP in front of tritonserver. aiohttp reads requests; checked ones are passed on to a Unix socket.

A passed-on request is written anew: one of the paths below, a complete body with its length, none of the client's
headers.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from time import monotonic
from typing import Any

from aiohttp import ClientConnectorError, ClientError, ClientSession, ClientTimeout, UnixConnector, web
from aiohttp.http_exceptions import HttpProcessingError

from dflash_trt.errors import DFlashError
from dflash_trt.serving import wire
from dflash_trt.serving.launch import ProxySettings

# Seconds for: a connection to send the head of a request, a body to arrive, a client to read its answer.
IDLE_SECONDS, BODY_SECONDS, TAKE_SECONDS = 15.0, 30.0, 60.0
MAX_CONNECTIONS = 4096  # beyond this, the longest idle ones are closed
MAX_HELD_BYTES = 256 << 20  # bodies of all clients together
MAX_CHUNKS = 4096  # bytes per read of a body without a length: reading single bytes takes 100 times as long
MAX_NESTING = 8  # levels of lists and objects in a body. A request has two
_LIMITS = {"INT32": (-(2**31), 2**31 - 1), "UINT64": (0, 2**64 - 1)}

_MODEL = r"/v2/models/\w[\w.-]*(?:/versions/\d+)?"
_READ = re.compile(
    rf"/v2(?:/health/(?:live|ready)|/models/stats)?|{_MODEL}(?:/(?:ready|config|stats))?", re.A
)
_GENERATE = re.compile(rf"{_MODEL}/generate(?:_stream)?", re.A)
_METRICS = re.compile("/metrics")
_NOTHING = re.compile("(?!)")
_STREAM = "text/event-stream"
_UNLOADED = b"has no available versions"  # Triton's words
_LOST = "the server ended before it answered; it is being restarted"


class ProxyError(Exception):
    """A request that is not passed on, with the status and message of its answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class HttpProxy:
    """Pass on GET for the paths `read` and POST for the paths `ask` to a server at a Unix socket.

    max_bytes: the longest body that is accepted.
    fields: the fields that a body may have, with Triton's data types. None accepts all.
    """

    def __init__(
        self,
        socket: Path,
        read: re.Pattern[str],
        ask: re.Pattern[str],
        max_bytes: int,
        fields: Mapping[str, str] | None = None,
    ) -> None:
        self._socket, self._read, self._ask, self._max_bytes = socket, read, ask, max_bytes
        self._fields = fields
        self.stopping = False  # whether new requests are refused
        self._busy: set[Any] = set()  # connections with an unanswered request
        self._held = 0  # bytes of all bodies

    @asynccontextmanager
    async def serve(self, host: str, port: int, option: str) -> AsyncIterator[None]:
        """Serve HTTP. `option` sets the port on the command line. Raises DFlashError if it is not available."""
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(
            app,
            handler_cancellation=True,
            auto_decompress=False,
            access_log=None,
            logger=_logger(),
            lingering_time=2.0,
            shutdown_timeout=3.0,
        )
        # A new connection per request: tritonserver does not stop while a connection is open.
        connector = UnixConnector(str(self._socket), limit=0, force_close=True)
        timeout = ClientTimeout(total=None, sock_connect=5)
        async with ClientSession(
            connector=connector, timeout=timeout, auto_decompress=False
        ) as self._session:
            await runner.setup()
            try:
                try:
                    await web.TCPSite(runner, host, port, backlog=1024).start()
                except OSError as error:
                    raise DFlashError(
                        f"cannot listen on {host}:{port} ({error.strerror or error}); give another {option} or --host"
                    ) from None
                sweep = asyncio.create_task(self._sweep(runner))
                yield
                sweep.cancel()
            finally:
                await runner.cleanup()

    async def _sweep(self, runner: web.AppRunner) -> None:
        """Close connections that have not sent a complete head in time, and the longest idle ones if there are too
        many.
        """
        since = dict[Any, float]()
        while True:
            await asyncio.sleep(1)
            server = runner.server
            assert server is not None
            now, connections = monotonic(), server.connections
            since = {c: since.get(c, now) for c in connections if c not in self._busy}
            excess = max(len(connections) - MAX_CONNECTIONS, 0)
            for n, (connection, began) in enumerate(sorted(since.items(), key=lambda item: item[1])):
                if n < excess or now - began > IDLE_SECONDS:
                    connection.force_close()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self._busy.add(request.protocol)
        try:
            return await self._pass_on(request)
        except ProxyError as refused:
            response = _error(refused.status, str(refused))
            if not request.content.is_eof():  # nothing else of it needs to be read
                response.force_close()
            return response
        except ClientConnectorError:
            return _error(503, "the server is starting; try again")
        except ClientError:
            return _error(502, _LOST)
        finally:
            self._busy.discard(request.protocol)

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        _need(not self.stopping, 503, "the server is stopping")
        if self._ask.fullmatch(path):
            _need(request.method == "POST", 405, f"{path} is asked with POST")
            body = await self._body(request)
            try:
                return await self._exchange(request, "POST", body)
            finally:
                self._held -= len(body)
        if not self._read.fullmatch(path):
            raise ProxyError(*_unknown(path))
        _need(request.method == "GET", 405, f"{path} is asked with GET")
        return await self._exchange(request, "GET", None)

    async def _body(self, request: web.Request) -> bytes:
        """The body. It counts in `_held` until the request is answered. Raises ProxyError."""
        too_long = (
            f"the body is longer than {self._max_bytes} bytes, the most that a prompt of this model needs"
        )
        _need(
            request.headers.get("Content-Encoding", "identity") == "identity", 415, "send the body as it is"
        )
        _need((request.content_length or 0) <= self._max_bytes, 413, too_long)
        body, chunks = bytearray(), 0
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for part, ends in request.content.iter_chunks():
                    body += part
                    chunks += ends
                    if chunks > MAX_CHUNKS and request.transport is not None:
                        request.transport.abort()  # an answer would require reading the rest
                    self._held += len(part)
                    _need(len(body) <= self._max_bytes, 413, too_long)
                    _need(
                        self._held <= MAX_HELD_BYTES, 503, "too many bytes are being sent at once; try again"
                    )
            check_json(bytes(body), self._fields)
        except BaseException as error:
            self._held -= len(body)
            if isinstance(error, TimeoutError):
                raise ProxyError(408, f"the body did not arrive within {BODY_SECONDS:g} s") from None
            raise
        return bytes(body)

    async def _exchange(self, request: web.Request, method: str, body: bytes | None) -> web.StreamResponse:
        """Ask the server and pass its answer on: events one by one, everything else in one piece."""
        headers = {"Content-Type": "application/json"} if body is not None else {}
        url = f"http://localhost{request.path}"
        async with self._session.request(method, url, data=body, headers=headers) as answer:
            if answer.content_type != _STREAM:
                kind, content = answer.headers.get("Content-Type", "text/plain"), await answer.read()
                if answer.status == 404 and _UNLOADED in content:  # it may come back: not the client's fault
                    return _error(503, "the model is not loaded now; try again")
                return web.Response(status=answer.status, body=content, headers={"Content-Type": kind})
            response = web.StreamResponse(status=answer.status, headers={"Content-Type": _STREAM})
            await response.prepare(request)
            try:
                async for part in answer.content.iter_any():
                    async with asyncio.timeout(TAKE_SECONDS):
                        await response.write(part)
            except ClientError:  # the client learns it as it learns of any error inside a stream
                await response.write(b"data: " + json.dumps({"error": _LOST}).encode() + b"\n\n")
            except (TimeoutError, ConnectionError):  # the client does not read, or has left
                if request.transport is not None:
                    request.transport.abort()
                return response
            await response.write_eof()
            return response


def check_json(body: bytes, known: Mapping[str, str] | None = None) -> None:
    """Raise ProxyError unless the body is a JSON object that all parsers read alike, within limits.

    known: its possible fields, with Triton's data types. Triton ignores other fields without a word, and keeps the low
    bits of integers that are too large.
    """
    try:
        fields = json.loads(body.decode())
    except (ValueError, RecursionError) as error:
        raise ProxyError(400, f"the body is not valid JSON: {str(error)[:200]}") from None
    _need(isinstance(fields, dict), 400, "the body is not a JSON object")
    if known is not None and (unknown := [name for name in fields if name not in known]):
        raise ProxyError(
            400, f"{unknown[0][:100]!a} is not a field of this model; see /v2/models/dflash/config"
        )
    for name, value in fields.items():
        if (limits := _LIMITS.get((known or {}).get(name, ""))) is not None:
            _check_integers(name, value, *limits)
    _need(
        not wire.is_deeper(fields, MAX_NESTING),
        400,
        f"the body has more than {MAX_NESTING} levels of lists and objects",
    )


def _check_integers(name: str, value: Any, low: int, high: int) -> None:
    pending = [value]
    while pending:
        value = pending.pop()
        if isinstance(value, list):
            pending += value
        elif isinstance(value, int | float) and not low <= value <= high:
            raise ProxyError(400, f"{name} is {str(value)[:40]}, expected an integer from {low} to {high}")


def _unknown(path: str) -> tuple[int, str]:
    shown = ascii(path[:100])
    if path.startswith("/v2/"):
        return 403, f"{shown} is not open to clients; open are health, metadata, config, stats and generate"
    return 404, f"there is no {shown}: send requests to /v2/models/NAME/generate"


def _need(holds: bool, status: int, message: str) -> None:
    if not holds:
        raise ProxyError(status, message)


def _error(status: int, message: str) -> web.Response:
    headers = {"Retry-After": "1"} if status == 503 else {}
    return web.json_response({"error": message}, status=status, headers=headers)


def _logger() -> logging.Logger:
    """A logger for errors of this program, not for bad requests."""
    logger = logging.getLogger("dflash_trt.proxy")
    logger.addFilter(
        lambda record: not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))
    )
    return logger


@asynccontextmanager
async def serve_http(settings: ProxySettings) -> AsyncIterator[HttpProxy]:
    """Serve the model's port and the metrics port; gives the first. Raises DFlashError if one is not available."""
    models = HttpProxy(settings.sockets.http, _READ, _GENERATE, settings.max_bytes, settings.fields)
    metrics = HttpProxy(settings.sockets.metrics, _METRICS, _NOTHING, 0)
    async with (
        models.serve(settings.host, settings.http_port, "--port"),
        metrics.serve(settings.host, settings.metrics_port, "--metrics-port"),
    ):
        yield models
