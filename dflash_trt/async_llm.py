"""`AsyncLLM`: concurrent requests from asyncio. One thread runs the engine; requests come and go between rounds."""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import inf
from operator import itemgetter
from pathlib import Path
from time import monotonic, perf_counter
from typing import Self, Unpack

from dflash_trt.decoding.params import RequestOptions, SamplingParams, ServingOptions, integer
from dflash_trt.decoding.request import Emission, Request, completion, items
from dflash_trt.decoding.results import Chunk, Completion
from dflash_trt.decoding.sampling.structure import MOST_MEMORY, SANDBOX
from dflash_trt.errors import BusyError, DFlashError, EngineError
from dflash_trt.runtime import Opened, OpeningOptions, Prompt, asked
from dflash_trt.text.tokenizer import LONG, TextThread

# An item from the engine thread to a stream: a chunk, or the error that ends the stream.
_Item = Chunk | DFlashError


@dataclass(slots=True)
class _Stream:
    """The destination of a request's chunks. Before the time `due` (perf_counter), only the last chunk is delivered."""

    loop: asyncio.AbstractEventLoop
    give: Callable[[_Item], None]  # called in the loop
    due: float
    begun: bool = False  # whether it has got a chunk


class AsyncLLM(Opened):
    """A bundle that serves many requests at a time. Arguments as for `LLM`, and:

    max_queue: requests that may wait beyond the `max_batch_size` being decoded. Further ones get BusyError at once.
    block_length, tree_nodes: of all rounds, see `RequestOptions`. A request may have less.
    draft_source: of requests that do not say otherwise.
    stream_interval: the least number of seconds between chunks of a stream. Tokens in between are held back and
        delivered as one chunk, in the first round after the interval. The end is never held back (default 0: a chunk
        per round).

    A request's tokens do not depend on the other requests. An error of one request ends only that request. Use it as
    an async context manager, or `await close()`. Requests that run when the interpreter exits are cancelled.
    """

    def __init__(
        self,
        bundle: str | Path,
        *,
        max_queue: int = 256,
        block_length: int | None = None,
        tree_nodes: int | None = None,
        draft_source: str = "drafter,lookup",
        stream_interval: float = 0.0,
        **options: Unpack[OpeningOptions],
    ) -> None:
        max_queue = integer("max_queue", max_queue, 0)
        if not stream_interval >= 0:
            raise DFlashError(f"stream_interval is {stream_interval}, expected 0 or more seconds")
        super().__init__(bundle, **options)
        request_options = RequestOptions(
            block_length=block_length, tree_nodes=tree_nodes, draft_source=draft_source
        )
        self._draft_source = draft_source
        self._lengths = self.runtime.lengths(request_options)
        self._limit = self.runtime.max_batch_size + max_queue
        self.runtime.structures.most_memory = MOST_MEMORY
        self._stream_interval = stream_interval
        self._streams: dict[Request, _Stream] = {}
        # Tokens that are held back from streams. Only the engine thread uses them.
        self._held: dict[Request, list[Emission]] = {}
        self._arrivals: list[Request] = []
        self._texts, self._forms, self._preparing = TextThread(), TextThread(SANDBOX.processes), 0
        self._departures: list[Request] = []  # streams that ended early
        self._wake = threading.Condition()
        self._closing = self._cancelling = False
        self._failure: EngineError | None = None
        self._begun: float | None = None  # when what the engine thread does now began, a time of monotonic
        self._thread = threading.Thread(target=self._serve, name="dflash-trt engine", daemon=True)
        # A thread that computes while the interpreter shuts down aborts the process.
        atexit.register(self._exit)
        self._thread.start()

    @property
    def in_flight(self) -> int:
        """Requests that are tokenized, waiting or decoded."""
        return len(self._streams) + self._preparing

    @property
    def step_seconds(self) -> float:
        """For how long the engine has worked at a round, or at a chunk of a prompt; 0 while it has nothing to do.

        A pass that never ends, as of a GPU that hangs, shows here alone.
        """
        begun = self._begun
        return 0.0 if begun is None else monotonic() - begun

    def _asked(self, options: ServingOptions) -> RequestOptions:
        return asked(ServingOptions, {"draft_source": self._draft_source} | options)

    async def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        **options: Unpack[ServingOptions],
    ) -> AsyncGenerator[Chunk, None]:
        """Complete one prompt in chunks: the tokens that rounds commit (see `stream_interval`).

        `RequestOptions` describes the options. A consumer that leaves (`aclose`, a cancelled task) frees the slot
        before the next round.

        Raises:
            RequestError: the request is impossible.
            BusyError: too many requests are waiting.
            DecodingError: decoding this request failed; the others continue.
            EngineError: the engine failed and accepts no more requests.
            DFlashError: this object is closed.
        """
        queue: asyncio.Queue[_Item] = asyncio.Queue()
        request = await self._admit(prompt, sampling_params, self._asked(options), queue.put_nowait)
        try:
            while True:
                item = await queue.get()
                if isinstance(item, DFlashError):
                    raise item
                yield item
                if item.finish_reason is not None:
                    return
        finally:
            self._leave(request)

    async def deliver(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None,
        give: Callable[[Chunk], None],
        **options: Unpack[ServingOptions],
    ) -> None:
        """Call `give` with each chunk of `stream`, in this event loop, until the last one.

        This takes less of the loop's time than `stream`, for a server with many streams.
        """
        await self._whole(prompt, sampling_params, self._asked(options), give)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        **options: Unpack[ServingOptions],
    ) -> Completion:
        """Complete one prompt. See `stream`."""
        texts: list[str] = []

        def give(chunk: Chunk) -> None:
            texts.append(chunk.text)

        request = await self._whole(prompt, sampling_params, self._asked(options), give, due=inf)
        return completion(request, "".join(texts))

    async def _whole(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None,
        options: RequestOptions,
        give: Callable[[Chunk], None],
        due: float = 0.0,
    ) -> Request:
        """An ended request, whose chunks went to `give`, the first of them not before the time `due`."""
        # The error that ended it, if any, as a result: a future takes no StopIteration, which `give` may raise.
        ended: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()

        def take(item: _Item) -> None:
            if ended.done():  # the caller has left
                return
            if isinstance(item, DFlashError):
                ended.set_result(item)
                return
            try:
                give(item)
            except BaseException as error:
                ended.set_result(error)
                return
            if item.finish_reason is not None:
                ended.set_result(None)

        request = await self._admit(prompt, sampling_params, options, take, due)
        try:
            error = await ended
        finally:
            self._leave(request)
        if error is not None:
            raise error
        return request

    async def close(self, *, finish: bool = True) -> None:
        """Accept no more requests, finish or cancel those in flight, then free the engines."""
        self._stop(finish=finish)
        await asyncio.to_thread(self._thread.join)
        atexit.unregister(self._exit)

    def _stop(self, *, finish: bool) -> None:
        with self._wake:
            self._closing = True
            if not finish:
                self._cancelling = True
                self._departures += self._streams
            self._wake.notify()

    def _exit(self) -> None:
        self._stop(finish=False)
        self._thread.join()

    def __repr__(self) -> str:
        state = "failed" if self._failure else "closed" if self._closing else f"{self.in_flight} requests"
        return f"AsyncLLM({self.runtime.describe()}, {state})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close(finish=error[0] is None)

    async def _admit(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None,
        options: RequestOptions,
        give: Callable[[_Item], None],
        due: float = 0.0,
    ) -> Request:
        """A place for a request, whose items go to `give`. A thread tokenizes long texts.

        A caller that leaves meanwhile gives its place back.
        """
        params, timeout = sampling_params or SamplingParams(), options.timeout
        deadline = None if timeout is None else perf_counter() + timeout
        with self._wake:
            if self._failure is not None or self._closing:
                raise self._failure or DFlashError("this AsyncLLM is closed; open the bundle again")
            if self.in_flight >= self._limit:
                raise BusyError(
                    f"{self.in_flight} requests are in flight, which is the limit; try again later"
                )
            self._preparing += 1
        try:
            make = partial(self.runtime.request, prompt, params, options=options, deadline=deadline)
            try:
                waits = self.runtime.waits_for_form(params, options.cache_salt)
                threads = self._forms if waits else self._texts
                request = await threads.run(make, size=_size(prompt, params), timeout=timeout)
            except TimeoutError:
                request = self.runtime.late_request(params, perf_counter())
            with self._wake:
                if self._failure is not None or self._cancelling:
                    raise self._failure or DFlashError("this AsyncLLM is closed; open the bundle again")
                self._streams[request] = _Stream(asyncio.get_running_loop(), give, due)
                self._arrivals.append(request)
            return request
        finally:
            with self._wake:
                self._preparing -= 1
                self._wake.notify()

    def _leave(self, request: Request) -> None:
        """Nobody waits for the request any more. It is cancelled if it has not ended."""
        with self._wake:
            self._streams.pop(request, None)
            if request.stop.finish_reason is None:
                self._departures.append(request)
            self._wake.notify()

    def _serve(self) -> None:
        """The engine thread. It also frees the engines, so that no pass is running then."""
        try:
            self._serve_requests()
        except BaseException as error:
            self._fail(error)
        finally:
            self._texts.close()
            self._forms.close()
            self.runtime.close()

    def _serve_requests(self) -> None:
        scheduler = self.runtime.scheduler
        while True:
            with self._wake:
                self._begun = None
                while scheduler.idle and not self._arrivals:
                    if self._closing and (self._cancelling or not self._preparing):
                        return
                    self._wake.wait()
                arrivals, self._arrivals = self._arrivals, []
                departures, self._departures = self._departures, []
            self._begun = monotonic()
            for request in arrivals:
                scheduler.submit(request)
            for request in departures:
                scheduler.cancel(request)
            for emissions in scheduler.parts(self._lengths):
                self._deliver(emissions)
                self._begun = monotonic()

    def _deliver(self, emissions: list[Emission]) -> None:
        """Deliver the chunks that are due, with one wake-up per event loop.

        First chunks and ends go before the others, which a server with many streams would otherwise write first.
        """
        for emission in emissions:
            self._held.setdefault(emission.request, []).append(emission)
        now = perf_counter()
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[bool, Callable[[_Item], None], _Item]]] = {}
        for request, held in list(self._held.items()):
            stream = self._streams.get(request)
            if stream is not None:
                if held[-1].finish_reason is None and now < stream.due:
                    continue
                stream.due = now + self._stream_interval
                ended = held[-1].finish_reason is not None
                first, stream.begun = not stream.begun, True
                due = by_loop.setdefault(stream.loop, [])
                can_wait = not (first or ended)
                due.extend((can_wait, stream.give, item) for item in items(held, first=first))
                if ended:  # its place is free, even if nobody reads the end
                    self._streams.pop(request, None)
            del self._held[request]
        for loop, due in by_loop.items():
            try:
                due.sort(key=itemgetter(0))  # stable: a stream's items stay in order
                loop.call_soon_threadsafe(_put, due)
            except RuntimeError:  # the loop is closed, and can no longer run its streams
                with self._wake:
                    for request in [r for r, stream in self._streams.items() if stream.loop is loop]:
                        self._departures.append(request)
                        del self._streams[request]

    def _fail(self, error: BaseException) -> None:
        """End every stream with the error and accept no more requests. The engine's state is unknown."""
        with self._wake:
            self._failure = EngineError(f"the engine failed: {type(error).__name__}: {error}")
            self._failure.__cause__ = error
            streams, self._streams, self._arrivals = self._streams, {}, []
        for request, stream in streams.items():
            held = self._held.pop(request, [])
            last: list[_Item] = [*items(held, first=not stream.begun), self._failure]
            with suppress(RuntimeError):  # the loop is closed
                stream.loop.call_soon_threadsafe(_put, [(False, stream.give, item) for item in last])


def _size(prompt: Prompt, params: SamplingParams) -> int:
    """The length of a request's prompt and texts, in characters or tokens."""
    try:
        form = params.structured_outputs  # to compile it may take as long as to tokenize a long text
        words = sum(map(len, (*params.stop, *params.bad_words))) + len(params.allowed_token_ids or ())
        return len(prompt) + words + (LONG if form else 0)
    except (AttributeError, TypeError):  # the request will be refused for it
        return 0


def _put(due: list[tuple[bool, Callable[[_Item], None], _Item]]) -> None:
    for _, give, item in due:
        give(item)
