"""Run the API: the engine process, the gate in front of the routes, and uvicorn."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ipaddress
import math
import os
import signal
import socket
import ssl
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_trt.bundle.manifest import Bundle
from dflash_trt.errors import DFlashError
from dflash_trt.extras import install
from dflash_trt.serving.openai.settings import ServerSettings
from dflash_trt.serving.processes import allow_open_files, run_loop

if TYPE_CHECKING:
    from dflash_trt.serving.openai.engine import EngineProcess

# Longer than clients and load balancers keep idle connections: 5 s for the openai client, 60 s for most balancers. A
# connection that both ends close at once loses a request.
_IDLE_SECONDS = 75
# For a client to confirm the end of a TLS connection, when the server stops. Clients with idle connections do not.
_CONFIRM_SECONDS = 2.0
_END_SECONDS = 5.0  # for requests to be told, after `grace`


def check_installed() -> None:
    """Raise DFlashError if a package of the extra `serve` is missing."""
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise DFlashError(f"{error.name} is not installed; install it with: {install('serve')}") from None


def serve(
    bundle: Bundle, settings: ServerSettings, ready: Callable[[int], None], say: Callable[[str], None]
) -> int:
    """Serve until SIGINT or SIGTERM. Returns the exit code. Raises DFlashError if it cannot start.

    ready: takes the port, when clients may come. `say`: takes lines about the engine and the end.
    """
    _open_standard_files()
    allow_open_files()
    listening = _listen(settings.host, settings.port)
    with contextlib.closing(listening):
        return run_loop(_serve(bundle, settings, listening, ready, say))


def application(
    bundle: Bundle, settings: ServerSettings, say: Callable[[str], None]
) -> tuple[Any, EngineProcess]:
    """The gate and its routes, for ASGI, and the engine, which has to be started."""
    from starlette.middleware.cors import CORSMiddleware

    from dflash_trt.serving.openai.app import Api, PromptLog, ServerMetrics
    from dflash_trt.serving.openai.engine import EngineProcess
    from dflash_trt.serving.openai.gate import Gate
    from dflash_trt.serving.openai.model import Model
    from dflash_trt.serving.wire import max_request_bytes

    model = Model(bundle, settings.name)
    engine = EngineProcess(
        {"bundle": str(bundle.path), **settings.engine},
        key=bundle.manifest["key"], limit=settings.limit, say=say,
    )  # fmt: skip
    metrics = ServerMetrics(engine)
    prompts = None if settings.log_prompts is None else PromptLog(settings.log_prompts, say)
    app = Api(model, engine, metrics, settings, prompts)
    most = settings.max_body or max_request_bytes(model.max_seq_len)
    gate: Any = Gate(
        app, keys=settings.keys, most=most, observe=metrics.observe, hosts=allowed_hosts(settings)
    )
    if settings.origins:  # around the gate: browsers ask for permission without the key
        gate = CORSMiddleware(
            gate, allow_origins=settings.origins, allow_methods=["GET", "POST"], allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )  # fmt: skip
    return gate, engine


def allowed_hosts(settings: ServerSettings) -> set[str] | None:
    """The names that `Host` may have; None: any.

    DNS rebinding gives a page of the web another site's name for this machine, but no key. So names matter where there
    are no keys, and on loopback, where only this machine should be served.
    """
    if "*" in settings.hosts or (settings.keys and not is_loopback(settings.host)):
        return None
    return {name.lower().removesuffix(".") for name in (settings.host, *settings.hosts)}


def is_loopback(host: str) -> bool:
    """Whether a server on this address can be reached from its own machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


async def _serve(
    bundle: Bundle,
    settings: ServerSettings,
    listening: socket.socket,
    ready: Callable[[int], None],
    say: Callable[[str], None],
) -> int:
    gate, engine = application(bundle, settings, say)
    background: list[asyncio.Task[None]] = []
    port = listening.getsockname()[1]
    server = _uvicorn(gate, engine, settings, partial(ready, port), say, background)
    await engine.start()
    gc.freeze()  # what exists now stays, so the collector need not look at it again
    # uvicorn raises a signal again when it has ended. By then it has done its work.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    try:
        await server.serve(sockets=[listening])
    finally:
        for task in background:
            task.cancel()
        await engine.close()
    return 0


def _uvicorn(
    gate: Any,
    engine: EngineProcess,
    settings: ServerSettings,
    ready: Callable[[], None],
    say: Callable[[str], None],
    background: list[asyncio.Task[None]],
) -> Any:
    """uvicorn's server, which drains and ends as the settings say. ready: called when clients may come. background:
    takes the tasks of the end.
    """
    import uvicorn

    from dflash_trt.serving.openai.connections import Connection

    loop = asyncio.get_running_loop()

    async def end_requests() -> None:
        await asyncio.sleep(settings.grace)
        await engine.close()

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            loop.call_soon(ready)

        def handle_exit(self, sig: int, frame: Any) -> None:
            if sig == signal.SIGTERM and settings.drain and not (engine.draining or self.should_exit):
                engine.draining = True
                loop.call_soon_threadsafe(self._drain, sig)
                return
            if not self.should_exit:
                left = (
                    f"; {n} requests in flight, {settings.grace:g} s to finish"
                    if (n := engine.in_flight)
                    else ""
                )
                loop.call_soon_threadsafe(say, f"stopping{left}")
            super().handle_exit(sig, frame)

        def _drain(self, sig: int) -> None:
            """Take requests until those who send them have seen that this server is not ready any more."""
            say(f"stopping in {settings.drain:g} s; /ready is 503, and answers end their connections")
            self.config.encoded_headers.append((b"connection", b"close"))
            loop.call_later(settings.drain, self.handle_exit, sig, None)

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            background.append(asyncio.create_task(end_requests()))
            if settings.certificate is not None:
                background.append(asyncio.create_task(_cut_unconfirmed(self.server_state.connections)))
            await super().shutdown(sockets)

    config = uvicorn.Config(
        gate,
        http=Connection,
        ws="none",
        lifespan="off",
        server_header=False,
        log_level=settings.log_level,
        timeout_keep_alive=_IDLE_SECONDS,
        timeout_graceful_shutdown=math.ceil(settings.grace + _END_SECONDS),
        ssl_certfile=settings.certificate,
        ssl_keyfile=settings.certificate_key,
        backlog=4096,
    )
    return Server(config)


async def _cut_unconfirmed(connections: Iterable[Any]) -> None:
    """Cut those of uvicorn's connections that are closed, have sent everything, and wait for the client to confirm."""
    closed: dict[Any, float] = {}
    while True:
        now = time.monotonic()
        for connection in list(connections):
            transport = connection.transport
            sent = transport.is_closing() and transport.get_write_buffer_size() == 0
            if sent and now - closed.setdefault(connection, now) >= _CONFIRM_SECONDS:
                transport.abort()
        await asyncio.sleep(0.1)


def _open_standard_files() -> None:
    """Open what is closed of standard input, output and error. Otherwise a socket would take its number."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free


def check_certificate(certificate: Path | None, key: Path | None) -> None:
    """Raise DFlashError naming the options. To be asked before the bundle is built or loaded."""
    if certificate is None:
        return

    def no_password() -> str:
        raise ValueError("the key is encrypted, expected one without a password")

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key, no_password)
    except (OSError, ValueError) as error:
        for option, file, begins in (
            ("cert", certificate, "CERTIFICATE-----"),
            ("key", key, "PRIVATE KEY-----"),
        ):
            if file and file.is_file() and begins.encode() not in file.read_bytes():
                raise DFlashError(
                    f"--tls-{option} {file}: is not a PEM file with -----BEGIN {begins}"
                ) from None
        files = f"--tls-cert {certificate} --tls-key {key}"
        raise DFlashError(f"{files}: {error}") from None


def _listen(host: str, port: int) -> socket.socket:
    """A socket on the address. Raises DFlashError naming the options."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family[0], socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(family[4])
        listener.listen(4096)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise DFlashError(f"--host {host} --port {port}: cannot listen ({why}); give another") from None
    return listener
