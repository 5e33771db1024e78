"""Find tritonserver, and run it on a model repository that clients cannot change."""

from __future__ import annotations

import ctypes
import http.client
import importlib.util
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from dflash_trt.errors import DFlashError, UsageError
from dflash_trt.logs import LEVELS
from dflash_trt.serving import wire
from dflash_trt.serving.deploy import MODEL, RESTRICTED, RESTRICTIONS
from dflash_trt.serving.processes import allow_open_files, descendants, send_signal

_STUB = "triton_python_backend_stub"
_OPTIONS = {"http": "--port", "grpc": "--grpc-port", "metrics": "--metrics-port"}  # of `dflash-trt serve`
_PR_SET_PDEATHSIG = 1
_LAST_SECONDS = 5.0  # from cancelling requests to ending the server


@dataclass(frozen=True)
class Addresses:
    """Where tritonserver listens. ports: by the names in tritonserver's options: http, grpc, metrics."""

    host: str
    ports: Mapping[str, int]

    def check(self) -> None:
        """Raise DFlashError for an address that is not available, naming its option of the command line."""
        for name, port in self.ports.items():
            try:
                family = socket.getaddrinfo(self.host, port, type=socket.SOCK_STREAM)[0][0]
                with socket.socket(family) as free:
                    free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    free.bind((self.host, port))
            except OSError as error:
                raise DFlashError(
                    f"cannot listen on {self.host}:{port} ({error.strerror or error}); give another {_OPTIONS[name]} "
                    "or --host"
                ) from None

    def arguments(self) -> dict[str, str | int]:
        """tritonserver's arguments for listening there only."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        forms = {"grpc": host, "http": f"ipv6:{self.host}" if ":" in self.host else host}
        values: dict[str, str | int] = {}
        for name, port in self.ports.items():
            values |= {
                f"allow-{name}": "true",
                f"{name}-address": forms.get(name, forms["http"]),
                f"{name}-port": port,
            }
        # Otherwise an environment variable could open one more port.
        return values | {"allow-sagemaker": "false", "allow-vertex-ai": "false"}


@dataclass
class TritonServer:
    """A tritonserver: its command, and its additional environment variables."""

    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)

    def check(self) -> None:
        """Raise DFlashError for a version that cannot close its APIs to clients, and one that does not start."""
        done = subprocess.run(
            [*self.command, "--help"],
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
            check=False,
        )
        printed = done.stdout + done.stderr
        for option in RESTRICTIONS:
            if f"--{option} " not in printed:
                lacks = (
                    f"has no --{option}, which closes the APIs that run code to clients: take 24.10 or newer"
                )
                failed = f"does not start: {printed.strip()[-300:]}"
                raise DFlashError(f"{self.command[0]}: {lacks if 'model-repository' in printed else failed}")


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
    stub = root / "python_backend_stubs" / version / _STUB
    if not stub.is_file():
        known = ", ".join(sorted(path.parent.name for path in root.glob(f"python_backend_stubs/*/{_STUB}")))
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
    repository: Path, addresses: Addresses, log_level: str, grace: float, others: Sequence[str] = ()
) -> list[str]:
    """tritonserver's arguments for a repository that clients can only use: no API changes, loads or traces anything.

    grace: seconds for requests to finish. others: more arguments, as given by the user. Raises UsageError if one is set
    here already.
    """
    # Nobody sends this key, and nobody can: no header holds a line break. Other users of this machine may read it.
    key = f"{secrets.token_hex(16)}\n{secrets.token_hex(16)}"
    shown = list(LEVELS).index(log_level)
    arguments = {
        "model-repository": repository,
        "model-control-mode": "none",
        **addresses.arguments(),
        "log-verbose": int(shown >= 3),
        "log-info": "true" if shown >= 2 else "false",
        "log-warning": "true" if shown >= 1 else "false",
        "exit-timeout-secs": round(grace + _LAST_SECONDS),
    }
    for option in others:
        name = option.partition("=")[0].removeprefix("--")
        # tritonserver also takes the beginnings of names.
        if option.startswith("--") and any(known.startswith(name) for known in arguments):
            raise UsageError(f"--{name}: is set by `dflash-trt serve` itself; leave it out")
    arguments |= dict.fromkeys(RESTRICTIONS, f"{RESTRICTED}:dflash-key={key}")
    return [*(f"--{name}={value}" for name, value in arguments.items()), *others]


def run(
    server: TritonServer,
    arguments: Sequence[str],
    addresses: Addresses,
    grace: float,
    ready: Callable[[], None],
    say: Callable[[str], None],
) -> int:
    """Run tritonserver until it ends or a signal comes. Returns the exit code: 0 after a signal.

    Calls `ready` when clients can first be answered. After SIGINT or SIGTERM, requests have `grace` seconds to finish.
    Then they are cancelled, and their clients are told. Nothing that was started outlives this call, nor this process.
    """
    allow_open_files()
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    region = f"dflash_trt_{os.getpid()}_"  # prefix of the backend's shared memory
    process = subprocess.Popen(
        [*server.command, *arguments, f"--backend-config=python,shm-region-prefix-name={region}"],
        env={**os.environ, **server.environment},
        # Otherwise Ctrl-C in a terminal reaches its processes, and ends requests at once.
        start_new_session=True,
        # The kernel ends it when this process has ended in any way.
        preexec_fn=lambda: ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
    )
    serves = False
    try:
        while not stop.wait(0.5 if serves else 0.1):
            if (code := process.poll()) is not None:
                say(f"tritonserver ended with {wire.how_it_ended(code)}")
                return code if code > 0 else 1
            if not serves and _is_ready(addresses):
                serves = True
                ready()
        _finish(process, grace, say)
        return 0
    finally:
        tree = descendants(process.pid)
        process.kill()
        process.wait()
        for pid in tree:
            send_signal(pid, signal.SIGKILL)
        for path in Path("/dev/shm").glob(f"{region}*"):
            path.unlink(missing_ok=True)


def _finish(process: subprocess.Popen[bytes], grace: float, say: Callable[[str], None]) -> None:
    """Stop the server: requests finish or are cancelled."""
    say(f"stopping: requests have {grace:g} s to finish")
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(grace)
        return
    say("cancelling unfinished requests")
    for pid, (_, _, arguments) in descendants(process.pid).items():
        if wire.WORKER[-1] in arguments:
            send_signal(pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_LAST_SECONDS)


def _is_ready(addresses: Addresses) -> bool:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(addresses.host, addresses.host)
    connection = http.client.HTTPConnection(host, addresses.ports["http"], timeout=5)
    try:
        connection.request("GET", f"/v2/models/{MODEL}/ready")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
