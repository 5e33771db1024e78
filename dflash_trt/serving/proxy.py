"""The process that clients talk to. It reads HTTP and gRPC, checks requests, and passes them on to tritonserver.

    python -m dflash_trt.serving.proxy FD SETTINGS

FD is a socket. This process writes a `Ready` of dflash_trt/serving/wire.py to it, refuses new requests over HTTP once
the other side sends a byte, and ends when the other side closes it. tritonserver listens on Unix sockets in a directory
that only its user may enter. docs/serving.md says which parts of the proxy which versions of tritonserver need.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack

from dflash_trt.errors import DFlashError
from dflash_trt.serving import wire
from dflash_trt.serving.launch import ProxySettings
from dflash_trt.serving.processes import allow_open_files
from dflash_trt.serving.proxy_grpc import serve_grpc
from dflash_trt.serving.proxy_http import serve_http


def main(arguments: Sequence[str]) -> int:
    """Run the process. Returns its exit code."""
    connection = socket.socket(fileno=int(arguments[0]))
    settings = ProxySettings(**json.loads(arguments[1]))
    allow_open_files()
    return asyncio.run(serve(connection, settings))


async def serve(connection: socket.socket, settings: ProxySettings) -> int:
    """Serve until the other side closes the connection. Returns the exit code."""
    reader, writer = await asyncio.open_connection(sock=connection)
    async with AsyncExitStack() as stack:
        try:
            models = await stack.enter_async_context(serve_http(settings))
            await stack.enter_async_context(serve_grpc(settings))
        except DFlashError as error:
            writer.write(wire.line(wire.Ready(fatal=str(error))))
            await writer.drain()
            return 1
        writer.write(wire.line(wire.Ready(ready=True)))
        models.stopping = bool(await reader.read(1))
        await reader.read()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
