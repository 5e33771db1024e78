"""The process that clients talk to: it reads HTTP and gRPC, and passes on to tritonserver what it has checked.

    python -m dflash_trt.serving.proxy FD SETTINGS

tritonserver listens on Unix sockets in a directory that only its user may enter. Its HTTP server must not read what
strangers send: version 24.10 ends at one chunked request (CVE-2025-23310) and at one deeply nested JSON body. On FD,
a socket, this process says {"ready": true} or {"fatal": why}; it ends when the other end is closed.
"""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from dflash_trt.errors import DFlashError

_LONGEST_PATH = 107  # of a Unix socket, on Linux


@dataclass(frozen=True)
class Settings:
    """host: the address to listen on.  upstream: the directory of tritonserver's sockets.

    max_bytes: the longest body or gRPC message that is taken from a client.
    """

    host: str
    http_port: int
    grpc_port: int
    metrics_port: int
    upstream: str
    max_bytes: int

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def max_request_bytes(max_seq_len: int) -> int:
    """What the longest prompt of a bundle may take: 64 bytes a token, as JSON or protobuf, and 1 MiB of the rest."""
    return (1 << 20) + 64 * max_seq_len


@dataclass(frozen=True)
class Sockets:
    """tritonserver's sockets in a directory. Raises DFlashError where its path is too long for them."""

    directory: Path

    def __post_init__(self) -> None:
        if len(bytes(self.metrics)) > _LONGEST_PATH:
            raise DFlashError(
                f"{self.directory}: too long for Unix sockets, whose paths have {_LONGEST_PATH} bytes at most; name a "
                "shorter directory in TMPDIR"
            )

    @property
    def http(self) -> Path:
        return self.directory / "http"

    @property
    def metrics(self) -> Path:
        return self.directory / "metrics"

    @property
    def grpc(self) -> Path:
        return self.directory / "grpc:1"  # tritonserver puts the port behind the address

    def arguments(self) -> dict[str, str | int]:
        """What tritonserver is told, to listen there and nowhere else."""
        return {
            "http-address": f"unix:{self.http}",
            "http-port": 1,  # wanted, and without effect
            "grpc-address": f"unix:{self.directory / 'grpc'}",
            "grpc-port": 1,
            "metrics-address": f"unix:{self.metrics}",
            "metrics-port": 1,
            "allow-sagemaker": "false",
            "allow-vertex-ai": "false",  # else a variable of the environment opens one more port
        }

    def remove(self) -> None:
        """Of a server that has ended: the next one could not listen."""
        for path in (self.http, self.metrics, self.grpc):
            path.unlink(missing_ok=True)


def check_installed() -> None:
    """Raises DFlashError where a package of the extra `serve` is missing."""
    try:
        import aiohttp  # noqa: F401
        import grpc  # noqa: F401
    except ImportError as error:
        raise DFlashError(
            f"{error.name} is not installed; install it with: pip install 'dflash-trt[serve]'"
        ) from None


def main(arguments: Sequence[str]) -> int:
    connection = socket.socket(fileno=int(arguments[0]))
    settings = Settings(**json.loads(arguments[1]))
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return asyncio.run(serve(connection, settings))


async def serve(connection: socket.socket, settings: Settings) -> int:
    """Until the other end of the connection is closed; the exit code."""
    from dflash_trt.serving.proxy_grpc import serve_grpc
    from dflash_trt.serving.proxy_http import serve_http

    reader, writer = await asyncio.open_connection(sock=connection)
    async with AsyncExitStack() as stack:
        try:
            await stack.enter_async_context(serve_http(settings))
            await stack.enter_async_context(serve_grpc(settings))
        except DFlashError as error:
            writer.write(json.dumps({"fatal": str(error)}).encode() + b"\n")
            await writer.drain()
            return 1
        writer.write(b'{"ready": true}\n')
        await reader.read()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
