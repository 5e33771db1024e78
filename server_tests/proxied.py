"""A stand-in for tritonserver, the proxy in front of it, and its clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
from aiohttp import ClientSession, web
from grpc import aio

from dflash_trt.serving.launch import ProxySettings, Sockets
from dflash_trt.serving.proxy_grpc import serve_grpc
from dflash_trt.serving.proxy_http import serve_http
from server_tests.serving import free_ports

MOST = 100_000  # bytes of a body
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
INFER = "/inference.GRPCInferenceService/ModelInfer"
GENERATE = "/v2/models/dflash/generate"


class Upstream:
    """tritonserver's sockets, with a server that records its requests."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, dict[str, str], bytes]] = []
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.left = asyncio.Event()
        self.go_on = asyncio.Event()  # lets streams continue after their first answer
        self.dies = False

    async def http(self, request: web.Request) -> web.StreamResponse:
        headers = dict(request.headers)
        self.asked.append((request.method, request.raw_path, headers, await request.read()))
        if not request.path.endswith("_stream"):
            if self.dies:
                assert request.transport is not None
                request.transport.abort()
            return web.json_response({"answer": len(self.asked)}, status=200)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            await response.write(b"data: 1\n\n")
            await self.go_on.wait()
            if self.dies:
                assert request.transport is not None
                request.transport.abort()
            await response.write(b"data: 2\n\n")
        except asyncio.CancelledError:
            self.left.set()
            raise
        return response

    def service(self, details: Any) -> Any:
        self.calls.append((details.method, dict(details.invocation_metadata)))

        async def stream(messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            try:
                async for message in messages:
                    if message == b"fail":
                        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
                    yield message * 2
                    if message == b"wait":
                        await asyncio.sleep(60)
            except asyncio.CancelledError:
                self.left.set()
                raise

        async def unary(message: bytes, context: Any) -> bytes:
            return message * 3

        if details.method == STREAM:
            return grpc.stream_stream_rpc_method_handler(stream)
        return grpc.unary_unary_rpc_method_handler(unary)


class Front:
    """The proxy and its clients."""

    def __init__(self, upstream: Upstream, settings: ProxySettings) -> None:
        self.upstream, self.settings = upstream, settings
        self.url = f"http://127.0.0.1:{settings.http_port}"
        self.grpc = f"127.0.0.1:{settings.grpc_port}"

    async def raw(self, data: bytes, *, port: int | None = None) -> bytes:
        """All bytes that are received for some bytes sent, until the connection ends."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port or self.settings.http_port)
        try:
            writer.write(data)
            async with asyncio.timeout(20):
                return await reader.read()
        except ConnectionError:
            return b""
        finally:
            writer.close()

    async def post(self, body: bytes, path: str = GENERATE, **headers: str) -> tuple[int, dict[str, Any]]:
        async with (
            ClientSession() as session,
            session.post(self.url + path, data=body, headers=headers) as answer,
        ):
            return answer.status, await answer.json()


def run(tmp_path: Path, check: Callable[[Front], Awaitable[None]], *, up: bool = True) -> None:
    """Run a check of the proxy, with or without the server behind it."""

    async def inside() -> None:
        http, grpc_port, metrics = free_ports(3)
        settings = ProxySettings("127.0.0.1", http, grpc_port, metrics, Sockets(tmp_path), MOST)
        upstream = Upstream()
        async with asyncio.timeout(100), serve_http(settings), serve_grpc(settings):
            if not up:
                return await check(Front(upstream, settings))
            async with listening(upstream, Sockets(tmp_path)):
                await check(Front(upstream, settings))

    asyncio.run(inside())


@asynccontextmanager
async def listening(upstream: Upstream, sockets: Sockets) -> AsyncIterator[None]:
    app = web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/{path:.*}", upstream.http)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    for path in (sockets.http, sockets.metrics):
        await web.UnixSite(runner, str(path)).start()
    server = aio.server()
    server.add_generic_rpc_handlers((upstream,))
    server.add_insecure_port(f"unix:{sockets.grpc}")
    await server.start()
    yield
    await server.stop(0)
    await runner.cleanup()


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()


def re_status(said: bytes) -> int:
    return int(said.split(b" ")[1]) if said.startswith(b"HTTP/1.1 ") else 0
