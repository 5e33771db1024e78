"""Serve clients through the proxy, and keep tritonserver behind it running until told to stop.

The model is loaded again after its engine has died, because it can only unload itself, and tritonserver is restarted
after its backend process has died, because no version starts another one (docs/serving.md#versions).
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import monotonic

from aiohttp import ClientError, ClientSession, ClientTimeout, UnixConnector

from dflash_trt.serving import wire
from dflash_trt.serving.deploy import MODEL
from dflash_trt.serving.launch import ProxySettings, TritonServer, has_backend
from dflash_trt.serving.processes import Process, allow_open_files, descendants, is_same, send_signal
from dflash_trt.serving.proxy_grpc import serve_grpc
from dflash_trt.serving.proxy_http import serve_http

_TIED = Path(__file__).with_name("tied.py")
_LOOK_SECONDS = 0.5
_DEAD_SECONDS = 1.0

Say = Callable[[str], None]


class Supervisor:
    """Run the proxy, and tritonserver, which is restarted when it ends.

    The model is loaded again after its engine ended, and not after somebody unloaded it. The server is restarted after
    its backend process ended, because the model's requests then hang. A server that has never served is not restarted,
    because it would fail again.

    repository: the model repository. An engine that ends leaves a file there.
    grace: seconds for requests to finish after SIGINT or SIGTERM. Then they are cancelled, and their clients are
    told.
    """

    def __init__(
        self,
        server: TritonServer,
        arguments: list[str],
        repository: Path,
        settings: ProxySettings,
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
        self._settings, self._grace = settings, grace
        self._stop = asyncio.Event()
        self._served = False

    def run(self, ready: Callable[[], None], say: Say) -> int:
        """Run until a signal, or until the server is known to be unable to serve. Returns the exit code.

        Calls `ready` when clients can first be answered. Raises DFlashError if an address is not available.
        """
        allow_open_files()
        return asyncio.run(self._serve(ready, say))

    async def _serve(self, ready: Callable[[], None], say: Say) -> int:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._stop.set)
        connector = UnixConnector(str(self._settings.sockets.http), force_close=True)
        async with (
            ClientSession(connector=connector) as self._session,
            serve_http(self._settings) as self._proxy,
            serve_grpc(self._settings),
        ):
            return await self._keep_running(ready, say)

    async def _keep_running(self, ready: Callable[[], None], say: Say) -> int:
        pause = wire.FIRST_PAUSE
        while not self._stop.is_set():
            self._settings.sockets.remove()
            self._tree: dict[int, Process] = {}
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, str(_TIED), str(os.getpid()), *self._command),
                env=self._environment,
                # Its own session: otherwise Ctrl-C in a terminal reaches it and ends requests at once.
                start_new_session=True,
            )
            began = monotonic()
            try:
                code = await self._watch(process, ready, say)
            finally:
                await self._end(process, say)
            if not self._served:
                return code
            pause = wire.next_pause(pause, monotonic() - began)
            await self._stops_within(pause)
        return 0

    async def _watch(self, process: asyncio.subprocess.Process, ready: Callable[[], None], say: Say) -> int:
        """Watch until a stop or a restart is due. Returns the exit code; 0 if the server is still running."""
        serves = False
        broken_since: float | None = None
        pause, reload = wire.FIRST_PAUSE, asyncio.create_task(asyncio.sleep(0))
        while not await self._stops_within(_LOOK_SECONDS if serves else 0.1):
            if (code := process.returncode) is not None:
                again = ": restarting it" if self._served else ""
                say(f"tritonserver ended with {wire.how_it_ended(code)}{again}")
                return code or 1
            self._tree = await asyncio.to_thread(descendants, process.pid)
            if has_backend(self._tree.values()) or not await self._is_loaded():
                broken_since = None
            elif monotonic() - (broken_since := broken_since or monotonic()) >= _DEAD_SECONDS:
                say("the model's backend process has died: restarting the server")
                return 1
            if await self._ask("GET", f"/v2/models/{MODEL}/ready") is not None:
                if not self._served:
                    ready()
                elif not serves:
                    say("tritonserver serves again")
                self._served = serves = True
                pause = wire.FIRST_PAUSE
                reload.cancel()  # the next one need not wait
            elif (
                self._engine_ended.exists()
                and reload.done()
                and await self._ask("GET", "/v2/health/live") is not None
            ):
                say("the model is not ready: reloading it")
                pause = wire.next_pause(pause)
                reload = asyncio.create_task(self._reload(pause))
        reload.cancel()
        return 0

    async def _reload(self, pause: float) -> None:
        """Load the model again, which takes long, and pause: the next attempt begins after that."""
        await self._ask("POST", f"/v2/repository/models/{MODEL}/load", seconds=600)
        await asyncio.sleep(pause)

    async def _end(self, process: asyncio.subprocess.Process, say: Say) -> None:
        """Stop the server: requests finish or are cancelled, then everything is killed."""
        tree = self._tree | descendants(process.pid)  # /proc does not show the children of a killed server
        if self._stop.is_set() and process.returncode is None:
            say(f"stopping: requests have {self._grace:g} s to finish")
            self._proxy.stopping = True
            process.terminate()
            if not await _ends_within(process, self._grace):
                say("cancelling unfinished requests")
                tree |= descendants(process.pid)
                for pid, (_, _, arguments) in tree.items():
                    if wire.WORKER[-1] in arguments:
                        send_signal(pid, signal.SIGTERM)
                await _ends_within(process, 10)
        tree |= descendants(process.pid)
        if process.returncode is None:
            send_signal(process.pid, signal.SIGKILL)
        await process.wait()
        for pid in tree:
            if is_same(pid, tree[pid]):
                send_signal(pid, signal.SIGKILL)
        for region in Path("/dev/shm").glob(self._regions):
            region.unlink(missing_ok=True)

    async def _stops_within(self, seconds: float) -> bool:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._stop.wait(), seconds)
        return self._stop.is_set()

    async def _is_loaded(self) -> bool:
        """Whether tritonserver lists the model as loaded. It also does so after the backend process has died."""
        index = await self._ask("POST", "/v2/repository/index") or b"[]"
        return any(model["name"] == MODEL and model.get("state") == "READY" for model in json.loads(index))

    async def _ask(self, method: str, path: str, seconds: float = 5) -> bytes | None:
        """The server's answer on its own socket, which clients cannot reach; None if it is no success."""
        body = b"{}" if method == "POST" else None
        with suppress(OSError, ClientError):
            async with self._session.request(
                method, f"http://localhost{path}", data=body, timeout=ClientTimeout(total=seconds)
            ) as answer:
                content: bytes = await answer.read()
                return content if answer.status == 200 else None
        return None


async def _ends_within(process: asyncio.subprocess.Process, seconds: float) -> bool:
    with suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), seconds)
    return process.returncode is not None
