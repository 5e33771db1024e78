"""gRPC in front of tritonserver. grpc core reads the messages; those of open methods are passed on unread.

Methods that load models, map shared memory, trace or log are closed. Messages have a size limit, which tritonserver's
own gRPC server does not have.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
from grpc import aio

from dflash_trt.errors import DFlashError
from dflash_trt.serving.launch import ProxySettings

MAX_CALLS = 4096
_SERVICE = "/inference.GRPCInferenceService/"
_METHODS = {
    "/grpc.health.v1.Health/Check",
    *(
        _SERVICE + name
        for name in ("ServerLive", "ServerReady", "ServerMetadata", "ModelReady", "ModelMetadata")
    ),
    *(_SERVICE + name for name in ("ModelConfig", "ModelStatistics", "ModelInfer")),
}
_STREAM = _SERVICE + "ModelStreamInfer"
_HEADERS = ("triton_grpc_error",)  # headers of a client that Triton interprets


class GrpcProxy(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Methods with messages as bytes. Each calls the same method of the channel."""

    def __init__(self, channel: aio.Channel) -> None:
        self._channel = channel

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        """What handles a call; None for a method that is closed."""
        if details.method == _STREAM:
            return grpc.stream_stream_rpc_method_handler(self._stream)
        if details.method in _METHODS:
            call = self._channel.unary_unary(details.method)

            async def unary(message: bytes, context: aio.ServicerContext) -> Any:
                try:
                    return await call(message, metadata=_metadata(context), timeout=context.time_remaining())
                except aio.AioRpcError as error:
                    await _fail(context, error)

            return grpc.unary_unary_rpc_method_handler(unary)
        return None  # UNIMPLEMENTED

    async def _stream(
        self, messages: AsyncIterator[bytes], context: aio.ServicerContext
    ) -> AsyncIterator[bytes]:
        ask = self._channel.stream_stream(_STREAM)
        call = ask(messages, metadata=_metadata(context), timeout=context.time_remaining())
        try:
            async for answer in call:
                yield answer
        except aio.AioRpcError as error:
            await _fail(context, error)
        finally:
            call.cancel()  # the client has left; no effect on a finished call


def _metadata(context: aio.ServicerContext) -> list[tuple[str, str | bytes]]:
    return [(key, value) for key, value in context.invocation_metadata() or () if key in _HEADERS]


async def _fail(context: aio.ServicerContext, error: aio.AioRpcError) -> None:
    """End a call with the server's status."""
    await context.abort(error.code(), error.details() or "", error.trailing_metadata() or ())


@asynccontextmanager
async def serve_grpc(settings: ProxySettings) -> AsyncIterator[None]:
    """Serve gRPC. Raises DFlashError if the address is not available."""
    upstream = [
        ("grpc.max_receive_message_length", -1),
        ("grpc.max_send_message_length", -1),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 500),
        ("grpc.enable_http_proxy", 0),
    ]
    ours = [
        ("grpc.max_receive_message_length", settings.max_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.so_reuseport", 0),  # a second server on the port is an error
        ("grpc.server_handshake_timeout_ms", 10_000),
    ]
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    async with aio.insecure_channel(f"unix:{settings.sockets.grpc}", options=upstream) as channel:
        server = aio.server(options=ours, maximum_concurrent_rpcs=MAX_CALLS)
        server.add_generic_rpc_handlers((GrpcProxy(channel),))
        try:
            server.add_insecure_port(f"{host}:{settings.grpc_port}")
        except RuntimeError:  # the exception gives no reason
            raise DFlashError(
                f"cannot listen on {host}:{settings.grpc_port} for gRPC; give another --grpc-port or --host"
            ) from None
        await server.start()
        try:
            yield
        finally:
            await server.stop(3)
