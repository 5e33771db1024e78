"""The engine process as the API sees it: requests in, updates out, and a new process after one has died.

The process is `dflash_trt.serving.worker`, which also serves Triton. They speak by dflash_trt/serving/wire.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import sys
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from time import monotonic
from typing import Any, cast

from dflash_trt.errors import DFlashError, RequestError
from dflash_trt.serving import wire
from dflash_trt.serving.wire import EngineRequest, Ready, Update

_ASK_SECONDS = 5.0
_UNANSWERED = 6  # questions in a row, after which an engine is killed
_LATE_SECONDS = 10.0  # after a request's deadline, which the engine should have answered
_STOP_SECONDS = 10.0
_LONGEST_TIMER = 1e8  # seconds


class EngineDownError(DFlashError):
    """There is no engine now. A new one is being started."""


class QueueFullError(DFlashError):
    """As many requests are in flight as the server takes."""


class _RunningEngine(asyncio.Protocol):
    """One engine process, what it says, and the requests that it works on."""

    transport: asyncio.Transport
    longest_line = 0

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        loop = asyncio.get_running_loop()
        self.process, self.born = process, monotonic()  # born: when it was ready
        self.first: asyncio.Future[Ready] = loop.create_future()  # what it says first; {} if it ends before
        self.ended: asyncio.Future[None] = loop.create_future()
        # Where updates go, by the number of a message: prompts of one request share a queue.
        self.pending: dict[int, asyncio.Queue[tuple[int, Update]]] = {}
        self.in_flight = 0  # choices of the pending requests
        self._lines, self._arrived = wire.Lines(), deque[Any]()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        for line in self._lines.push(data):
            if not isinstance(line, dict):
                self._deliver(line)
            elif not self.first.done():
                self.first.set_result(cast(Ready, line))

    def connection_lost(self, error: Exception | None) -> None:
        if not self.first.done():
            self.first.set_result({})
        if not self.ended.done():
            self.ended.set_result(None)

    def tell(self, message: dict[str, Any]) -> None:
        """Send a message, if the engine has not ended."""
        self.transport.write(wire.line(message))

    async def ask(self, request: EngineRequest, prompts: dict[int, list[int]]) -> None:
        """Send a request for prompts by their keys, a line at a time. Raises RequestError if one is too long."""
        first, *others = prompts
        message: EngineRequest = {**request, "id": first, "prompt": prompts[first], "others": len(others)}
        self._say(message)
        try:
            for key in others:
                await asyncio.sleep(0)  # each line takes its time
                self._say({"id": key, "like": first, "prompt": prompts[key]})
        except BaseException:
            self.tell({"cancel": first})  # so that the engine does not wait for the others
            raise

    def _say(self, message: EngineRequest) -> None:
        line = wire.line(message)
        if (size := len(line)) > self.longest_line:
            raise RequestError(f"the request has {size} bytes in JSON, expected at most {self.longest_line}")
        self.transport.write(line)

    def _deliver(self, updates: list[Any]) -> None:
        """Give the updates to the requests, one per turn of the loop.

        A round may have one for each of many streams. New requests are read between the turns.
        """
        begun = bool(self._arrived)
        self._arrived.extend(updates)
        if not begun:
            self._deliver_next()

    def refuse(self, why: str) -> None:
        """End all requests, after the updates that have arrived."""
        while self._arrived:
            self._deliver_one()
        for key, queue in self.pending.items():
            queue.put_nowait((key, wire.refusal("UNAVAILABLE", why)))

    def _deliver_next(self) -> None:
        if self._arrived:
            self._deliver_one()
        if self._arrived:
            asyncio.get_running_loop().call_soon(self._deliver_next)

    def _deliver_one(self) -> None:
        key, update = self._arrived.popleft()
        if (queue := self.pending.get(key)) is not None:
            queue.put_nowait((key, update))


class EngineProcess:
    """The engine process of one bundle. It is started again when it dies, until `close`.

    settings: `AsyncLLM`'s arguments. `key`: of the bundle's manifest.
    limit: requests in flight at most. `say`: takes a line about a death or a restart.
    """

    def __init__(self, settings: dict[str, Any], *, key: str, limit: int, say: Callable[[str], None]) -> None:
        self._settings, self._key, self.limit, self._say = settings, key, limit, say
        self._numbers = itertools.count(1)
        self._connection: _RunningEngine | None = None
        self._watch: asyncio.Task[None] | None = None
        self._closing = False
        self._closed: asyncio.Task[None] | None = None
        self.deaths = self.restarts = 0  # of the engine since the server started
        self.silence = ""  # why the engine is taken to hang, since it was last asked
        self.draining = False  # whether the server is stopping, and takes requests for a while yet
        self.replaced = False  # whether another bundle has taken the place of this one

    @property
    def serves(self) -> bool:
        """Whether there is an engine that takes requests."""
        return self._connection is not None and not self._closing

    @property
    def in_flight(self) -> int:
        """Choices of the requests that the engine works on."""
        return self._connection.in_flight if self._connection else 0

    async def start(self) -> None:
        """Load the bundle. Raises DFlashError with the engine's reason if it cannot be loaded."""
        self._connection = await self._open()
        self._watch = asyncio.create_task(self._keep_running(self._connection))

    async def close(self) -> None:
        """Cancel all requests and end the process."""
        if self._closed is None:
            self._closed = asyncio.create_task(self._close())
        await asyncio.shield(self._closed)

    async def _close(self) -> None:
        self._closing = True
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        if self._connection is not None:
            connection, self._connection = self._connection, None
            connection.transport.close()  # the end of its input ends the worker
            connection.refuse("the server is stopping")
            await _end(connection.process)

    async def updates(
        self, request: EngineRequest, prompts: Sequence[list[int]]
    ) -> AsyncGenerator[tuple[int, Update], None]:
        """Index and update of each choice, until each has a finish_reason, or one has an error.

        request: what the prompts share. Each has its `n` choices, which are counted on from prompt to prompt. A
        consumer that leaves cancels the request.

        Raises:
            EngineDownError: there is no engine.
            QueueFullError: too many requests are in flight.
            RequestError: the request has more bytes than the engine reads.
        """
        connection = self._connection
        if connection is None or self._closing:
            raise EngineDownError("the engine is being started; try again in some seconds")
        n = request.get("n", 1)
        left = {next(self._numbers): n for _ in prompts}  # choices by message
        firsts = {key: n * number for number, key in enumerate(left)}
        choices = n * len(prompts)
        if connection.in_flight + choices > self.limit:
            raise QueueFullError(
                f"{connection.in_flight} requests are in flight, and the limit is {self.limit}; try again later"
            )
        queue: asyncio.Queue[tuple[int, Update]] = asyncio.Queue()
        connection.pending |= dict.fromkeys(left, queue)
        connection.in_flight += choices
        late = self._late(request.get("timeout"), queue)
        try:
            await connection.ask(request, dict(zip(left, prompts, strict=True)))
            while left:
                key, update = await queue.get()
                if "error" in update:
                    if update["error"]["code"] != "DEADLINE":
                        left.pop(key, None)  # the engine knows that it has ended
                    yield 0, update
                    return
                left[key] -= "finish_reason" in update
                if not left[key]:
                    del left[key]
                yield firsts[key] + update.get("index", 0), update
        finally:
            for key in firsts:
                del connection.pending[key]
            connection.in_flight -= choices
            if late is not None:
                late.cancel()
            for key in left:
                connection.tell({"cancel": key})

    @staticmethod
    def _late(seconds: float | None, queue: asyncio.Queue[tuple[int, Update]]) -> asyncio.TimerHandle | None:
        """End a request whose deadline the engine should have answered."""
        if seconds is None or not 0 <= seconds < _LONGEST_TIMER:
            return None
        silent = wire.refusal("DEADLINE", "the deadline passed, and the engine does not answer")
        return asyncio.get_running_loop().call_later(seconds + _LATE_SECONDS, queue.put_nowait, (0, silent))

    async def metrics(self) -> str:
        """The engine's metrics in Prometheus' text format. Raises EngineDownError if it does not answer, or hangs."""
        connection = self._connection
        if connection is None:
            raise EngineDownError("there is no engine")
        key = next(self._numbers)
        queue = connection.pending[key] = asyncio.Queue()
        connection.tell({"id": key, "ask": "metrics"})
        try:
            async with asyncio.timeout(_ASK_SECONDS):
                _, update = await queue.get()
        except TimeoutError:
            raise EngineDownError(f"the engine has not answered for {_ASK_SECONDS:g} s") from None
        finally:
            del connection.pending[key]
        if "metrics" not in update:
            raise EngineDownError(update["error"]["text"])
        return update["metrics"]

    async def _open(self) -> _RunningEngine:
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *wire.command(sys.executable, theirs, self._settings),
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,  # otherwise Ctrl-C in a terminal reaches it
            )
        connection = _RunningEngine(process)
        try:
            await asyncio.get_running_loop().create_unix_connection(lambda: connection, sock=ours)
            first = await connection.first
            if "ready" not in first:
                raise DFlashError(first.get("fatal") or f"while loading, {_how(await process.wait())}")
            if first["key"] != self._key:
                self.replaced = True
                raise DFlashError("the bundle was replaced; start the server again")
        except BaseException:
            ours.close()
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            raise
        connection.longest_line, connection.born = first["longest_line"], monotonic()
        return connection

    async def _keep_running(self, connection: _RunningEngine) -> None:
        """Notice the death of the engine, answer its requests, and start another one."""
        pause = wire.FIRST_PAUSE
        while True:
            await self._until_end(connection)
            self._connection = None
            self.deaths += 1
            connection.transport.close()
            how = _how(await _end(connection.process))
            self.silence = ""
            refused = connection.in_flight
            connection.refuse(how)
            self._say(f"{how}; {refused} requests are refused; starting another one")
            pause = wire.next_pause(pause, monotonic() - connection.born)
            while self._connection is None:
                await asyncio.sleep(pause)
                try:
                    connection = self._connection = await self._open()
                except (DFlashError, OSError) as error:
                    self._say(f"the engine cannot be started: {error}")
                    pause = wire.next_pause(pause)
            self.restarts += 1
            self._say("the engine serves again")

    async def _until_end(self, connection: _RunningEngine) -> None:
        """Wait for the end of the engine. One that answers nothing, or says that it hangs in a step, is killed."""
        unanswered = 0
        while not (await asyncio.wait([connection.ended], timeout=_ASK_SECONDS))[0]:
            try:
                await self.metrics()
                unanswered, self.silence = 0, ""
            except EngineDownError as error:
                unanswered, self.silence = unanswered + 1, str(error)
            if unanswered == _UNANSWERED:
                self._say(f"{self.silence}, asked {_UNANSWERED} times; it is killed")
                with contextlib.suppress(ProcessLookupError):
                    connection.process.kill()


async def _end(process: asyncio.subprocess.Process) -> int:
    """Wait for the end of a process, and kill it if it does not end. Returns its code."""
    try:
        async with asyncio.timeout(_STOP_SECONDS):
            return await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        return await process.wait()


def _how(code: int) -> str:
    return f"the engine ended ({wire.how_it_ended(code)})"
