"""Keep tritonserver and the proxy in front of it running until told to stop.

The model is loaded again after its engine has died, because it can only unload itself, and tritonserver is restarted
after its backend process has died, because no version starts another one (docs/serving.md#versions).
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from time import monotonic

from dflash_trt.errors import DFlashError
from dflash_trt.serving import wire
from dflash_trt.serving.deploy import MODEL
from dflash_trt.serving.launch import STUB, ProxySettings, Sockets, TritonServer
from dflash_trt.serving.processes import Process, descendants, has_ended, is_same, send_signal

_TIED = Path(__file__).with_name("tied.py")
_PROXY = "dflash_trt.serving.proxy"
_LOOK_SECONDS = 0.5
_DEAD_SECONDS = 1.0
_PROXY_SECONDS = 60.0

Say = Callable[[str], None]


class Supervisor:
    """Run tritonserver and the proxy, and restart whichever of them ends.

    The model is loaded again after its engine ended, and not after somebody unloaded it. The server is restarted after
    its backend process ended, because the model's requests then hang. A server that has never served is not restarted,
    because it would fail again.

    repository: the model repository. An engine that ends leaves a file there.
    sockets: in a directory that only this user may enter.
    grace: seconds for requests to finish after SIGINT or SIGTERM. Then they are cancelled, and their clients are
    told.
    """

    def __init__(
        self,
        server: TritonServer,
        arguments: list[str],
        repository: Path,
        sockets: Sockets,
        proxy: ProxySettings,
        grace: float,
    ) -> None:
        self._engine_ended = repository / MODEL / "1" / "engine-ended"
        region = f"dflash_trt_{os.getpid()}_"  # prefix of the backend's shared memory
        self._command = [
            *server.command,
            *arguments,
            f"--backend-config=python,shm-region-prefix-name={region}",
        ]
        self._environment = {**os.environ, **server.environment}
        self._regions = f"{region}*"
        self._sockets, self._settings, self._grace = sockets, proxy, grace
        self._stop = threading.Event()
        self._served = False

    def run(self, ready: Callable[[], None], say: Say) -> int:
        """Run until a signal, or until the server is known to be unable to serve. Returns the exit code.

        Calls `ready` when clients can first be answered. Raises DFlashError if an address is not available.
        """
        before = {n: signal.signal(n, lambda *_: self._stop.set()) for n in (signal.SIGINT, signal.SIGTERM)}
        try:
            with Proxy(self._settings) as self._proxy:
                return self._run(ready, say)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _run(self, ready: Callable[[], None], say: Say) -> int:
        pause = wire.FIRST_PAUSE
        while not self._stop.is_set():
            self._sockets.remove()
            self._tree: dict[int, Process] = {}
            process = subprocess.Popen(
                [sys.executable, str(_TIED), str(os.getpid()), *self._command],
                env=self._environment,
                # Its own session: otherwise Ctrl-C in a terminal reaches it and ends requests at once.
                start_new_session=True,
            )
            began = monotonic()
            try:
                code = self._watch(process, ready, say)
            finally:
                self._end(process, say)
            if not self._served:
                return code
            pause = wire.next_pause(pause, monotonic() - began)
            self._stop.wait(pause)
        return 0

    def _watch(self, process: subprocess.Popen[bytes], ready: Callable[[], None], say: Say) -> int:
        """Watch until a stop or a restart is due. Returns the exit code; 0 if the server is still running."""
        serves = False
        broken_since: float | None = None
        reload = Reload(lambda: self._ask("POST", f"/v2/repository/models/{MODEL}/load", timeout=600))
        while not self._stop.wait(_LOOK_SECONDS if serves else 0.1):
            if (code := process.poll()) is not None:
                again = ": restarting it" if self._served else ""
                say(f"tritonserver ended with {wire.how_it_ended(code)}{again}")
                return code or 1
            self._tree = descendants(process.pid)
            if has_backend(self._tree.values()) or not self._is_loaded():
                broken_since = None
            elif monotonic() - (broken_since := broken_since or monotonic()) >= _DEAD_SECONDS:
                say("the model's backend process has died: restarting the server")
                return 1
            self._proxy.start_again_if_ended(say)
            if self._ask("GET", f"/v2/models/{MODEL}/ready") is not None:
                if not self._served:
                    ready()
                elif not serves:
                    say("tritonserver serves again")
                self._served = serves = True
                reload.is_done()
            elif self._engine_ended.exists() and reload.is_due() and self._is_live():
                say("the model is not ready: reloading it")
                reload.start()
        return 0

    def _end(self, process: subprocess.Popen[bytes], say: Say) -> None:
        """Stop the server: requests finish or are cancelled, then everything is killed."""
        tree = self._tree | descendants(process.pid)  # /proc does not show the children of a killed server
        if self._stop.is_set() and process.poll() is None:
            say(f"stopping: requests have {self._grace:g} s to finish")
            self._proxy.refuse_requests()
            process.terminate()
            if not has_ended(process, self._grace):
                say("cancelling unfinished requests")
                tree |= descendants(process.pid)
                for pid, (_, _, arguments) in tree.items():
                    if wire.WORKER[-1] in arguments:
                        send_signal(pid, signal.SIGTERM)
                has_ended(process, 10)
        tree |= descendants(process.pid)
        process.kill()
        process.wait()
        for pid in tree:
            if is_same(pid, tree[pid]):
                send_signal(pid, signal.SIGKILL)
        for region in Path("/dev/shm").glob(self._regions):
            region.unlink(missing_ok=True)

    def _is_live(self) -> bool:
        return self._ask("GET", "/v2/health/live") is not None

    def _is_loaded(self) -> bool:
        """Whether tritonserver lists the model as loaded. It also does so after the backend process has died."""
        index = self._ask("POST", "/v2/repository/index") or b"[]"
        return any(model["name"] == MODEL and model.get("state") == "READY" for model in json.loads(index))

    def _ask(self, method: str, path: str, timeout: float = 5) -> bytes | None:
        """The server's answer on its own socket, which clients cannot reach; None if it is no success."""
        with suppress(OSError, http.client.HTTPException):
            connection = UnixConnection(self._sockets.http, timeout)
            try:
                connection.request(method, path, body=b"{}" if method == "POST" else None)
                answer = connection.getresponse()
                return answer.read() if answer.status == 200 else None
            finally:
                connection.close()
        return None


class Reload:
    """Loading the model again, in a thread, because it takes long. After a failure there is a growing pause."""

    def __init__(self, load: Callable[[], object]) -> None:
        self._load, self._thread = load, threading.Thread()
        self._pause, self._next = wire.FIRST_PAUSE, 0.0

    def is_due(self) -> bool:
        """Whether an attempt may start now."""
        return not self._thread.is_alive() and monotonic() >= self._next

    def start(self) -> None:
        """Begin an attempt."""
        self._pause = wire.next_pause(self._pause)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def is_done(self) -> None:
        """The model is ready, so the next attempt need not wait."""
        self._pause, self._next = wire.FIRST_PAUSE, 0.0

    def _run(self) -> None:
        self._load()
        self._next = monotonic() + self._pause


class Proxy:
    """The proxy's process. Entering starts it. Raises DFlashError if it cannot listen."""

    def __init__(self, settings: ProxySettings) -> None:
        self._settings = settings

    def __enter__(self) -> Proxy:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()  # answers in transit have a few seconds
        if not has_ended(self._process, 10):
            self._process.kill()
            self._process.wait()

    def refuse_requests(self) -> None:
        """Take no new requests over HTTP. Those that are being answered go on."""
        with suppress(OSError):
            self._socket.send(b"\n")

    def start_again_if_ended(self, say: Say) -> None:
        """Start another process if this one has ended."""
        if (code := self._process.poll()) is not None:
            say(f"the proxy ended with {wire.how_it_ended(code)}: restarting it")
            self._socket.close()
            try:
                self._start()
            except DFlashError as error:  # the next check tries again
                say(str(error))

    def _start(self) -> None:
        self._socket, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-m", _PROXY, str(theirs.fileno()), self._settings.to_json()]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], start_new_session=True)
        theirs.close()
        self._socket.settimeout(_PROXY_SECONDS)
        (said,) = next(wire.received(self._socket), [wire.Ready()])
        if "ready" not in said:
            self._process.kill()
            self._process.wait()
            how = wire.how_it_ended(self._process.returncode)
            raise DFlashError(said.get("fatal") or f"the proxy ended with {how}")


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: Path, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = str(path)

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def has_backend(processes: Iterable[Process]) -> bool:
    """Whether a backend process is alive. A dead one stays as a zombie before Triton 26.01, and is collected since."""
    return any(name == STUB[:15] and state != "Z" for name, state, _ in processes)
