"""The process that clients talk to. It reads HTTP and gRPC, checks requests, and passes them on to tritonserver.

    python -m dflash_trt.serving.proxy FD SETTINGS

FD is a socket. This process writes a `Ready` of dflash_trt/serving/wire.py to it, and ends when the other side closes
it. tritonserver listens on Unix sockets in a directory that only its user may enter.

Every version needs the proxy for the closed APIs, the limits of sizes, times and connections, and the answers while the
server starts again. Versions before 25.07 also must not read what strangers send: one chunked request (CVE-2025-23310)
or one deeply nested JSON body ends 24.10. Further defects of versions up to 26.05 are known (docs/serving.md).
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from dflash_trt.errors import DFlashError
from dflash_trt.extras import install
from dflash_trt.serving import wire
from dflash_trt.serving.processes import allow_open_files

_LONGEST_PATH = 107  # characters of a Unix socket's path on Linux


@dataclass(frozen=True)
class ProxySettings:
    """The proxy's settings.

    host: the address to listen on.
    upstream: the directory of tritonserver's sockets.
    max_bytes: the longest body or gRPC message that a client may send.
    fields: the fields that a body over HTTP may have, with Triton's data types. None accepts all.
    """

    host: str
    http_port: int
    grpc_port: int
    metrics_port: int
    upstream: str
    max_bytes: int
    fields: dict[str, str] | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Sockets:
    """tritonserver's sockets in a directory. Raises DFlashError if its path is too long for them."""

    directory: Path

    def __post_init__(self) -> None:
        if len(bytes(self.metrics)) > _LONGEST_PATH:
            raise DFlashError(
                f"{self.directory}: too long for Unix sockets, whose paths have at most {_LONGEST_PATH} bytes; "
                "set TMPDIR to a shorter directory"
            )

    @property
    def http(self) -> Path:
        return self.directory / "http"

    @property
    def metrics(self) -> Path:
        return self.directory / "metrics"

    @property
    def grpc(self) -> Path:
        return self.directory / "grpc:1"  # tritonserver appends the port to the address

    def arguments(self) -> dict[str, str | int]:
        """tritonserver's arguments for listening on these sockets only."""
        return {
            "http-address": f"unix:{self.http}",
            "http-port": 1,  # required, without effect
            "grpc-address": f"unix:{self.directory / 'grpc'}",
            "grpc-port": 1,
            "metrics-address": f"unix:{self.metrics}",
            "metrics-port": 1,
            "allow-sagemaker": "false",
            "allow-vertex-ai": "false",  # otherwise an environment variable could open one more port
        }

    def remove(self) -> None:
        """Remove the sockets of a server that has ended. Otherwise the next one could not listen."""
        for path in (self.http, self.metrics, self.grpc):
            path.unlink(missing_ok=True)


def check_installed() -> None:
    """Raise DFlashError if a package of the extra `triton` is missing."""
    try:
        import aiohttp  # noqa: F401
        import grpc  # noqa: F401
    except ImportError as error:
        raise DFlashError(f"{error.name} is not installed; install it with: {install('triton')}") from None


def main(arguments: Sequence[str]) -> int:
    connection = socket.socket(fileno=int(arguments[0]))
    settings = ProxySettings(**json.loads(arguments[1]))
    allow_open_files()
    return asyncio.run(serve(connection, settings))


async def serve(connection: socket.socket, settings: ProxySettings) -> int:
    """Serve until the other side closes the connection. Returns the exit code."""
    from dflash_trt.serving.proxy_grpc import serve_grpc
    from dflash_trt.serving.proxy_http import serve_http

    reader, writer = await asyncio.open_connection(sock=connection)
    async with AsyncExitStack() as stack:
        try:
            await stack.enter_async_context(serve_http(settings))
            await stack.enter_async_context(serve_grpc(settings))
        except DFlashError as error:
            writer.write(wire.line(wire.Ready(fatal=str(error))))
            await writer.drain()
            return 1
        writer.write(wire.line(wire.Ready(ready=True)))
        await reader.read()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
