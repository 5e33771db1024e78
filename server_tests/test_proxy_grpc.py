"""gRPC through the proxy: calls that pass, messages and clients that are refused."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio

from server_tests.proxied import INFER, MOST, STREAM, Front, run


def test_grpc_passes_open_methods_with_bounded_messages(tmp_path: Path) -> None:
    async def check(front: Front) -> None:
        async with aio.insecure_channel(front.grpc) as channel:
            metadata = (("triton_grpc_error", "true"), ("triton-grpc-protocol-dflash-secret", "guess"))
            call = channel.unary_unary(INFER)
            assert await call(b"ab", metadata=metadata) == b"ababab"
            name, got = front.upstream.calls[-1]
            assert (name, got.get("triton_grpc_error")) == (INFER, "true")
            assert "triton-grpc-protocol-dflash-secret" not in got
            stream = channel.stream_stream(STREAM)()
            for message in (b"a", b"b"):
                await stream.write(message)
                assert await stream.read() == message * 2
            await stream.done_writing()
            assert await stream.read() is aio.EOF

            taken = len(front.upstream.calls)
            for name in (
                "RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload", "SystemSharedMemoryRegister",
                "SystemSharedMemoryStatus", "CudaSharedMemoryRegister", "TraceSetting", "LogSettings", "Unheard",
            ):  # fmt: skip
                assert await code_of(channel.unary_unary(f"/inference.GRPCInferenceService/{name}")(b"")) == (
                    grpc.StatusCode.UNIMPLEMENTED
                )
            for message in (b"a" * (MOST + 1), b"a" * (5 * MOST)):
                assert await code_of(call(message)) == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert len(front.upstream.calls) == taken
            stream = channel.stream_stream(STREAM)()
            await stream.write(b"fail")
            assert await code_of(stream.read()) == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert await stream.details() == "full"

    async def code_of(call: Awaitable[Any]) -> Any:
        with pytest.raises(aio.AioRpcError) as raised:
            await call
        return raised.value.code()

    run(tmp_path, check)


def test_a_cancelled_grpc_stream_is_cancelled_at_the_server(tmp_path: Path) -> None:
    async def check(front: Front) -> None:
        async with aio.insecure_channel(front.grpc) as channel:
            stream = channel.stream_stream(STREAM)()
            await stream.write(b"wait")
            assert await stream.read() == b"waitwait"
            stream.cancel()
            async with asyncio.timeout(10):
                await front.upstream.left.wait()

    run(tmp_path, check)


def test_compressed_grpc_messages_do_not_grow_without_bound(tmp_path: Path) -> None:
    async def check(front: Front) -> None:
        async with aio.insecure_channel(front.grpc, compression=grpc.Compression.Gzip) as channel:
            with pytest.raises(aio.AioRpcError) as raised:
                await channel.unary_unary(INFER)(b"a" * (200 * MOST), timeout=20)
            assert raised.value.code() in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNIMPLEMENTED)
        assert not front.upstream.calls

    run(tmp_path, check)


def test_garbage_for_grpc_ends_its_own_connection(tmp_path: Path) -> None:
    async def check(front: Front) -> None:
        preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        for data in (
            b"\x00" * 1000,
            b"GET / HTTP/1.1\r\n\r\n",
            preface + b"\xff" * 1000,
            preface + b"\x00" * 9,
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", front.settings.grpc_port)
            writer.write(data)
            writer.write_eof()
            async with asyncio.timeout(20):
                with suppress(ConnectionError):
                    await reader.read()
            writer.close()
        async with aio.insecure_channel(front.grpc) as channel:
            assert await channel.unary_unary(INFER)(b"ab") == b"ababab"

    run(tmp_path, check)
