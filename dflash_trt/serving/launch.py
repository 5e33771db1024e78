"""Starts tritonserver on a repository, and looks after it until it is told to stop."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Literal, get_args

from dflash_trt.errors import DFlashError
from dflash_trt.serving.deploy import MODEL

LogLevel = Literal["error", "warning", "info", "verbose"]
_STUB = "triton_python_backend_stub"
_WORKER = "dflash_trt.serving.worker"
_LOOK_SECONDS = 0.5
_DEAD_SECONDS = 1.0
Process = tuple[str, str, str]  # name, state, arguments


@dataclass
class Server:
    """A tritonserver: how to start it, and what its environment needs beyond this process's."""

    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)


def find_server(directory: Path) -> Server | None:
    """The tritonserver on the PATH, else the one of nvidia-pytriton's wheel, else None.

    The wheel's needs its backend put together with the stub for this Python: done in `directory`, with links.
    Raises DFlashError if the wheel has none for this Python, or libpython is missing.
    """
    if found := shutil.which("tritonserver"):
        return Server([found])
    spec = importlib.util.find_spec("pytriton")
    if spec is None or not spec.submodule_search_locations:
        return None
    root = Path(spec.submodule_search_locations[0]) / "tritonserver"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = root / "python_backend_stubs" / version / _STUB
    if not stub.is_file():
        known = ", ".join(sorted(path.parent.name for path in root.glob(f"python_backend_stubs/*/{_STUB}")))
        raise DFlashError(
            f"nvidia-pytriton has no Python backend for Python {version}, only for {known}: use one of these"
        )
    backend = directory / "backends" / "python"
    backend.mkdir(parents=True)
    for file in (stub, *(path for path in (root / "backends" / "python").iterdir() if path.is_file())):
        if not (backend / file.name).exists():
            (backend / file.name).symlink_to(file)
    libraries = [str(_libpython(version).parent), os.environ.get("LD_LIBRARY_PATH", "")]
    # The stub embeds the interpreter whose python3 it finds first: this one, so that it has its packages.
    path = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    command = [str(root / "bin" / "tritonserver"), "--backend-directory", str(backend.parent)]
    environment = {"LD_LIBRARY_PATH": ":".join(filter(None, libraries)), "PATH": ":".join(path)}
    return Server(command, environment)


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
        f"{name} not found (in {', '.join(map(str, places))}), which Triton's Python backend needs: install it "
        f"(Debian and Ubuntu: libpython{version}), or use a Python that was built with --enable-shared"
    )


def server_arguments(
    repository: Path, *, host: str, http_port: int, grpc_port: int, metrics_port: int, log_level: LogLevel
) -> list[str]:
    """tritonserver's arguments. Models are loaded on request, so that one that has failed can be loaded again."""
    shown = get_args(LogLevel).index(log_level)
    arguments = {
        "model-repository": repository,
        "model-control-mode": "explicit",
        "load-model": "*",
        "http-address": host,
        "http-port": http_port,
        "grpc-address": host,
        "grpc-port": grpc_port,
        "metrics-address": host,
        "metrics-port": metrics_port,
        "log-verbose": int(shown >= 3),
        "log-info": "true" if shown >= 2 else "false",
        "log-warning": "true" if shown >= 1 else "false",
        "exit-timeout-secs": 3600,  # `Supervisor` has the patience
    }
    return [f"--{name}={value}" for name, value in arguments.items()]


class Supervisor:
    """Runs tritonserver: loads the model again after its engine has died, and starts the server again after its
    backend process has (Triton leaves such a model's requests hanging, and can neither reload it nor stop).

    url: where HTTP is served.  grace: seconds that requests have to finish after SIGINT or SIGTERM; those that have
    not are cancelled, and answered so.
    """

    def __init__(self, server: Server, arguments: list[str], url: str, grace: float) -> None:
        self._command = [*server.command, *arguments]
        self._environment = {**os.environ, **server.environment}
        self._url, self._grace = url, grace
        self._region = f"dflash_trt_{os.getpid()}_"  # of the backend's shared memory
        self._command.append(f"--backend-config=python,shm-region-prefix-name={self._region}")
        self._stop = threading.Event()

    def run(self, ready: Callable[[], None], say: Callable[[str], None]) -> int:
        """Until a signal, or until the server fails; returns the exit code. Calls `ready` when it first serves."""
        before = {n: signal.signal(n, lambda *_: self._stop.set()) for n in (signal.SIGINT, signal.SIGTERM)}
        try:
            while not self._stop.is_set():
                # A session of its own: Ctrl-C in a terminal would reach it too, and end requests at once.
                process = subprocess.Popen(self._command, env=self._environment, start_new_session=True)
                try:
                    code = self._watch(process, ready, say)
                finally:
                    self._end(process, say)
                if code is not None:
                    return code
            return 0
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _watch(
        self, process: subprocess.Popen[bytes], ready: Callable[[], None], say: Callable[[str], None]
    ) -> int | None:
        """The exit code to return; None: stop, or start again."""
        served, dead = False, dict[int, float]()
        while not self._stop.wait(_LOOK_SECONDS if served else 0.1):
            if (code := process.poll()) is not None:
                say(f"tritonserver ended with exit code {code}")
                return code or 1
            dead = dead_since(descendants(process.pid), dead, now := monotonic())
            if any(now - since >= _DEAD_SECONDS for since in dead.values()):
                say("the model's backend process has died: starting the server again")
                return None
            if self._get(f"/v2/models/{MODEL}/ready"):
                if not served:
                    ready()
                served = True
            elif served and self._get("/v2/health/live"):
                say("the model is not ready: loading it again")
                self._post(f"/v2/repository/models/{MODEL}/load")
        return None

    def _end(self, process: subprocess.Popen[bytes], say: Callable[[str], None]) -> None:
        """Stop the server: requests finish, then are cancelled; then everything is killed."""
        tree = descendants(process.pid)
        if self._stop.is_set() and process.poll() is None:
            say(f"stopping: requests have {self._grace:g} s to finish")
            process.terminate()
            if not _ended(process, self._grace):
                say("cancelling the requests that have not finished")
                tree |= descendants(process.pid)
                for pid, (_, _, arguments) in tree.items():
                    if _WORKER in arguments:
                        _signal(pid, signal.SIGTERM)
                _ended(process, 10)
        tree |= descendants(process.pid)
        process.kill()
        process.wait()
        for pid in tree:
            if _same(pid, tree[pid]):
                _signal(pid, signal.SIGKILL)
        for region in Path("/dev/shm").glob(f"{self._region}*"):
            region.unlink(missing_ok=True)

    def _get(self, path: str) -> bool:
        return self._request(urllib.request.Request(self._url + path), timeout=5)

    def _post(self, path: str) -> None:
        self._request(urllib.request.Request(self._url + path, data=b"{}", method="POST"), timeout=600)

    def _request(self, request: urllib.request.Request, timeout: float) -> bool:
        with suppress(urllib.error.URLError, OSError), _OPENER.open(request, timeout=timeout):
            return True
        return False


def dead_since(processes: Mapping[int, Process], before: Mapping[int, float], now: float) -> dict[int, float]:
    """Backend processes that have died, and when each was first seen so, of which `before` tells.

    Triton collects those that it has done with in a moment, as while it loads a model.
    """
    dead = [pid for pid, (name, state, _) in processes.items() if (name, state) == (_STUB[:15], "Z")]
    return {pid: before.get(pid, now) for pid in dead}


_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # never through a proxy


def descendants(root: int) -> dict[int, Process]:
    """The processes below one: pid to name, state (as /proc has it) and arguments."""
    found: dict[int, Process] = {}
    pending = [root]
    while pending:
        parent = pending.pop()
        with suppress(OSError):
            for task in Path(f"/proc/{parent}/task").iterdir():
                for pid in map(int, (task / "children").read_text().split()):
                    found[pid] = _process(pid)
                    pending.append(pid)
    return found


def _process(pid: int) -> Process:
    with suppress(OSError):
        stat = Path(f"/proc/{pid}/stat").read_text()
        name, _, rest = stat.partition("(")[2].rpartition(")")
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        return name, rest.split()[0], arguments
    return "", "", ""


def _same(pid: int, process: Process) -> bool:
    """Whether a process is still the one it was: numbers are used again."""
    return bool(process[2]) and _process(pid)[2] == process[2]


def _ended(process: subprocess.Popen[bytes], seconds: float) -> bool:
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    return process.poll() is not None


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
