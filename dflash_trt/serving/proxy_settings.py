"""What `serve`, tritonserver's arguments and the proxy agree on: the proxy's settings, and tritonserver's sockets."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from dflash_trt.errors import DFlashError
from dflash_trt.extras import install

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
