"""Find tritonserver, and set its arguments and sockets, and those of the proxy in front of it."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from dflash_trt.errors import DFlashError, UsageError
from dflash_trt.extras import install
from dflash_trt.serving.processes import Process

LogLevel = Literal["error", "warning", "info", "verbose"]
STUB = "triton_python_backend_stub"
_LONGEST_PATH = 107  # bytes of a Unix socket's path on Linux


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
        """For the models."""
        return self.directory / "http"

    @property
    def metrics(self) -> Path:
        """For /metrics."""
        return self.directory / "metrics"

    @property
    def grpc(self) -> Path:
        """For gRPC."""
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


@dataclass(frozen=True)
class ProxySettings:
    """The proxy's settings.

    host: the address to listen on.
    sockets: those of tritonserver.
    max_bytes: the longest body or gRPC message that a client may send.
    fields: the fields that a body over HTTP may have, with Triton's data types. None accepts all.
    """

    host: str
    http_port: int
    grpc_port: int
    metrics_port: int
    sockets: Sockets
    max_bytes: int
    fields: dict[str, str] | None = None


@dataclass
class TritonServer:
    """A tritonserver: its command, and its additional environment variables."""

    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)


def find_server(directory: Path) -> TritonServer | None:
    """The tritonserver on the PATH, else the one of nvidia-pytriton's wheel, else None.

    The wheel's backend has to be combined with the stub for this Python. That is done in `directory`, with links.

    Raises DFlashError if the wheel has no stub for this Python, or libpython is missing.
    """
    if program := shutil.which("tritonserver"):
        return TritonServer([program])
    spec = importlib.util.find_spec("pytriton")
    if spec is None or not spec.submodule_search_locations:
        return None
    root = Path(spec.submodule_search_locations[0]) / "tritonserver"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = root / "python_backend_stubs" / version / STUB
    if not stub.is_file():
        known = ", ".join(sorted(path.parent.name for path in root.glob(f"python_backend_stubs/*/{STUB}")))
        raise DFlashError(f"nvidia-pytriton has no Python backend for Python {version}; use one of: {known}")
    backend = directory / "backends" / "python"
    backend.mkdir(parents=True)
    for file in (stub, *(path for path in (root / "backends" / "python").iterdir() if path.is_file())):
        if not (backend / file.name).exists():
            (backend / file.name).symlink_to(file)
    libraries = [str(_libpython(version).parent), os.environ.get("LD_LIBRARY_PATH", "")]
    # The stub embeds the first python3 that it finds. This interpreter comes first, so that its packages are
    # available.
    path = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    command = [str(root / "bin" / "tritonserver"), "--backend-directory", str(backend.parent)]
    environment = {"LD_LIBRARY_PATH": ":".join(filter(None, libraries)), "PATH": ":".join(path)}
    return TritonServer(command, environment)


def has_backend(processes: Iterable[Process]) -> bool:
    """Whether a backend process is alive. A dead one stays as a zombie before Triton 26.01, and is collected since."""
    return any(name == STUB[:15] and state != "Z" for name, state, _ in processes)


def _libpython(version: str) -> Path:
    name = f"libpython{version}.so.1.0"
    variables = (sysconfig.get_config_var(key) for key in ("LIBDIR", "LIBPL"))
    places = [Path(place) for place in variables if place]
    places += [
        Path(sys.base_prefix) / "lib",
        Path("/usr/lib") / (sysconfig.get_config_var("MULTIARCH") or ""),
    ]
    for place in places:
        if (place / name).is_file():
            return place / name
    raise DFlashError(
        f"{name} is missing (in {', '.join(map(str, places))}), which Triton's Python backend needs: install it "
        f"(Debian and Ubuntu: libpython{version}), or use a Python that was built with --enable-shared"
    )


def server_arguments(
    repository: Path, sockets: Sockets, log_level: LogLevel, others: Sequence[str] = ()
) -> list[str]:
    """tritonserver's arguments. Models are loaded on request, so that a failed one can be loaded again.

    others: more of them, as given by the user. Raises DFlashError if one is set here already.
    """
    shown = get_args(LogLevel).index(log_level)
    arguments = {
        "model-repository": repository,
        "model-control-mode": "explicit",
        "load-model": "*",
        **sockets.arguments(),
        "log-verbose": int(shown >= 3),
        "log-info": "true" if shown >= 2 else "false",
        "log-warning": "true" if shown >= 1 else "false",
        "exit-timeout-secs": 3600,  # `Supervisor` limits the time instead
        **dict.fromkeys(("allow-http", "allow-grpc", "allow-metrics"), "true"),
    }
    for option in others:
        name = option.partition("=")[0].removeprefix("--")
        # tritonserver also takes the beginnings of names.
        if option.startswith("--") and any(known.startswith(name) for known in arguments):
            raise UsageError(f"--{name}: is set by `dflash-trt serve` itself; leave it out")
    return [*(f"--{name}={value}" for name, value in arguments.items()), *others]


def check_installed() -> None:
    """Raise DFlashError if a package of the extra `triton` is missing."""
    try:
        import aiohttp  # noqa: F401
        import grpc  # noqa: F401
    except ImportError as error:
        raise DFlashError(f"{error.name} is not installed; install it with: {install('triton')}") from None
