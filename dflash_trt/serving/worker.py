"""The engine process of a server: an `AsyncLLM` that answers lines of JSON on a socket.

    python -m dflash_trt.serving.worker FD SETTINGS

FD: the socket. dflash_trt/serving/wire.py says what the lines are. SETTINGS: `AsyncLLM`'s arguments as a JSON object,
`server`, Triton's process, which ends with this one, and `max_step`, seconds after which a step is taken for one that
never ends (0: never).
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from dflash_trt.async_llm import AsyncLLM
from dflash_trt.decoding.params import SamplingParams
from dflash_trt.decoding.results import Chunk, Completion
from dflash_trt.decoding.sampling.structure import StructuredOutputs
from dflash_trt.errors import BusyError, DecodingError, DFlashError, RequestError, quoted
from dflash_trt.logs import to_stderr
from dflash_trt.runtime import Prompt
from dflash_trt.serving import wire
from dflash_trt.serving.processes import is_running, run_loop, send_signal

METRICS_SECONDS = 1.0
_LAST_SECONDS = 2.0
_LOOK_SECONDS = 1.0
# Options of `AsyncLLM` that a request may have.
_OPTIONS = ("speculate", "block_length", "tree_nodes", "timeout", "priority", "cache_salt")
# The fields of an update that are those of a Chunk or Completion, and of the statistics of its end.
_PARTS = (*wire.GROWING, "finish_reason")
_LONG = 1 << 16  # bytes of a request whose parameters a thread checks
_COUNTS = ("num_draft_tokens", "num_accepted_tokens", "num_cached_tokens", "acceptance_histogram")


def main(arguments: Sequence[str]) -> int:
    """Run the process. Returns its exit code."""
    connection = socket.socket(fileno=int(arguments[0]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    loaded = threading.Event()
    threading.Thread(target=_end_while_loading, args=(connection, loaded), daemon=True).start()
    settings = json.loads(arguments[1])
    to_stderr(settings.pop("log_level", "warning"))
    bundle, max_step = settings.pop("bundle"), settings.pop("max_step", wire.MAX_STEP)
    server, backend = settings.pop("server", 0), os.getppid()
    if server and is_running(server):  # else it cannot be seen
        threading.Thread(target=_end_after, args=(server, backend), daemon=True).start()
    try:
        llm = AsyncLLM(bundle, **settings)
        llm.metrics.collect()  # also says so if prometheus_client is missing
    except (DFlashError, OSError, TypeError) as error:  # also for an option that there is not
        connection.sendall(wire.line(wire.Ready(fatal=str(error))))
        return 1
    loaded.set()
    gc.freeze()  # what exists now stays, so the collector need not look at it again
    worker = Worker(llm, max_step)
    code = run_loop(worker.serve(connection))
    if server and not worker.told and code == 0:
        _end_server(server)
    return code


def _end_while_loading(connection: socket.socket, loaded: threading.Event) -> None:
    """End this process if the server ends before the bundle is loaded. Later `Worker.serve` does it."""
    try:
        more = bool(connection.recv(1, socket.MSG_PEEK))
    except OSError:
        more = False
    if not more and not loaded.is_set():
        os._exit(1)


def _end_after(server: int, backend: int) -> None:
    """End this process and Triton's backend, its parent, when the server has ended.

    A backend that was sending an answer then waits for the server forever, in C, where no thread of it can end it.
    """
    while is_running(server):
        time.sleep(_LOOK_SECONDS)
    if os.getppid() == backend:
        os.kill(backend, signal.SIGKILL)
    os._exit(1)


def _end_server(server: int) -> None:
    """End the server after its backend died: it would start no other one, and leave requests unanswered forever."""
    # The second signal is for a server that is the first process of a container: that one no other can kill.
    for number in (signal.SIGKILL, signal.SIGTERM):
        send_signal(server, number)


@dataclass
class _Shared:
    """What requests have in common: the fields of the first one, its parameters, and how many others there will be."""

    request: wire.EngineRequest
    params: asyncio.Task[SamplingParams]
    others: int


class Worker:
    """The requests of one socket."""

    def __init__(self, llm: AsyncLLM, max_step: float = 0.0) -> None:
        self._llm, self._max_step = llm, max_step
        # JSON writes a byte of UTF-8 as at most 6 bytes. The rest is for stop words and parameters.
        self._longest_line = 6 * llm.tokenizer.most_bytes(llm.max_seq_len) + (1 << 20)
        self._updates: list[str] = []  # to be sent, in JSON
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._shared: dict[int, _Shared] = {}  # what later requests will take from earlier ones, by id
        self._failed = False
        self.told = False  # whether the other side has said that it ends
        self._closing: asyncio.Task[None] | None = None

    async def serve(self, connection: socket.socket) -> int:
        """Serve until the end of input. Returns the exit code."""
        self._reader, self._writer = await asyncio.open_connection(sock=connection, limit=self._longest_line)
        key = self._llm.bundle.manifest["key"]
        ready = wire.Ready(ready=True, longest_line=self._longest_line, key=key)
        self._writer.write(wire.line(ready))
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._close)
        shown = list[asyncio.Task[None]]()
        while not self._failed and (line := await self._next_line()):
            message = json.loads(line)
            if "cancel" in message:
                self._shared.pop(message["cancel"], None)
                if task := self._tasks.get(message["cancel"]):
                    task.cancel()
            elif "ask" in message:
                if stalled := self._stalled():
                    self._refuse(message["id"], "UNAVAILABLE", stalled)
                else:
                    self._send(message["id"], {"metrics": self._llm.metrics.prometheus()})
            elif "end" in message:
                self.told = True
            elif "watch" in message:
                shown.append(asyncio.create_task(self._show_metrics()))
            else:
                key = message["id"]
                shared = self._share(key, message, len(line))
                self._tasks[key] = asyncio.create_task(self._answer(key, shared.request | message, shared))
                self._tasks[key].add_done_callback(partial(self._ended, key))
        for task in shown:
            task.cancel()
        if self._failed:  # the requests in flight have already reported it
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)
            self._flush()
            await self._writer.drain()
            return 1
        await self._llm.close(finish=False)
        return 0

    async def _next_line(self) -> bytes:
        try:
            return await self._reader.readline()
        except OSError:  # the model's process has died
            return b""

    def _close(self) -> None:
        self._closing = asyncio.create_task(self._stop())

    async def _stop(self) -> None:
        """Cancel all requests. Then end, unless the server ends this process: a signal may have come from elsewhere."""
        await self._llm.close(finish=False)
        await asyncio.sleep(_LAST_SECONDS)
        self._fail()

    def _share(self, key: int, message: wire.EngineRequest, size: int) -> _Shared:
        """What a request has in common with others, which is read once. size: bytes of its line."""
        if (like := message.get("like")) is not None:
            shared = self._shared[like]
            shared.others -= 1
            if shared.others == 0:
                del self._shared[like]
            return shared
        params = self._params(message) if size < _LONG else asyncio.to_thread(self._checked, message)
        shared = _Shared(message, asyncio.create_task(params), message.get("others", 0))
        shared.params.add_done_callback(lambda task: task.cancelled() or task.exception())  # if all have left
        if shared.others:
            self._shared[key] = shared
        return shared

    async def _answer(self, key: int, message: wire.EngineRequest, shared: _Shared) -> None:
        arrived = time.time_ns()
        try:
            prompt: Prompt
            if "prompt" in message:
                prompt = message["prompt"]
            else:
                kwargs = message.get("chat_template_kwargs")
                prompt = await asyncio.to_thread(self._llm.chat_prompt, message["messages"], kwargs)
            params = await asyncio.shield(shared.params)
            if (n := message.get("n", 1)) == 1:
                await self._generate(key, message, prompt, params, arrived)
                return
            samples = [
                asyncio.create_task(self._generate(key, message, prompt, drawn, arrived, i))
                for i, drawn in enumerate(params.samples(n))
            ]
            try:
                await asyncio.gather(*samples)
            finally:
                for sample in samples:  # if one has failed
                    sample.cancel()
        except BusyError as error:
            self._refuse(key, "BUSY", str(error))
        except DecodingError as error:
            self._refuse(key, "INTERNAL", str(error))
        except RequestError as error:
            self._refuse(key, "INVALID_ARG", str(error), error.field)
        except DFlashError as error:
            if self._closing is None:
                self._fail()
            text = str(error) if self._closing is None else "the server is stopping"
            self._refuse(key, "UNAVAILABLE", text)

    async def _params(self, message: wire.EngineRequest) -> SamplingParams:
        return self._checked(message)

    def _checked(self, message: wire.EngineRequest) -> SamplingParams:
        fields = dict(message["params"])
        end_id, vocab = message.get("end_id", -1), self._llm.bundle.manifest["vocab_size"]
        if not -1 <= end_id < vocab:
            raise RequestError(f"end_id is {end_id}, expected a token id, 0..{vocab - 1}, or -1 for none")
        ends = [*fields.pop("stop_token_ids", ()), *([] if end_id == -1 else [end_id])]
        bias = dict(message.get("logit_bias", ()))
        for word, weight in message.get("bias_words", ()):
            ids = self._llm.tokenizer.encode(word, add_special_tokens=False)
            if len(ids) != 1:
                raise RequestError(
                    f"logit_bias contains {quoted(word)}, which is {len(ids)} tokens, expected 1"
                )
            bias[ids[0]] = weight
        if form := fields.pop("structured_outputs", None):
            fields["structured_outputs"] = StructuredOutputs(**form)
        return SamplingParams(**fields, stop_token_ids=ends, logit_bias=bias)

    async def _generate(
        self,
        key: int,
        message: wire.EngineRequest,
        prompt: Prompt,
        params: SamplingParams,
        arrived: int,
        index: int | None = None,
    ) -> None:
        """Send the updates of one sequence."""

        def send(part: Chunk | Completion) -> None:
            update = _update(part, arrived)
            if message.get("echo") and part.prompt_token_ids is not None:
                update["echo"] = self._echo(part.prompt_token_ids)
            if index is not None:
                update["index"] = index
            self._send(key, update)

        options: dict[str, Any] = {name: value for name, value in message.items() if name in _OPTIONS}
        options["count_prompt"] = not index  # by one of its sequences: the first
        if message.get("stream"):
            await self._llm.deliver(prompt, params, send, **options)
        else:
            send(await self._llm.generate(prompt, params, **options))

    def _ended(self, key: int, task: asyncio.Task[None]) -> None:
        """Answer the request, whatever ended its task."""
        del self._tasks[key]
        if task.cancelled():  # perhaps before it started
            self._refuse(key, "CANCELLED", "the client has left")
        elif error := task.exception():  # an unexpected error, or a library's panic
            traceback.print_exception(error)
            self._refuse(key, "INTERNAL", f"{type(error).__name__}: {error}")

    def _refuse(self, key: int, code: wire.Code, text: str, field: str | None = None) -> None:
        """Answer a request with an error. Clients learn nothing of the server's folders."""
        folder = str(self._llm.bundle.path)
        text = text.replace(f"{folder}/", "").replace(folder, "the bundle")
        self._send(key, wire.refusal(code, text, field))

    def _echo(self, ids: list[int]) -> tuple[str, list[int]]:
        return self._llm.tokenizer.decode(ids), ids

    def _send(self, key: int | str, update: Any) -> None:
        """Send soon: usually all updates of a round, in one line."""
        text = json.dumps([key, update])
        if not self._updates:
            asyncio.get_running_loop().call_soon(self._flush)
        self._updates.append(text)

    def _flush(self) -> None:
        updates, self._updates = self._updates, []
        if updates and not self._writer.is_closing():  # else the server has ended
            self._writer.write(f"[{','.join(updates)}]\n".encode())

    def _stalled(self) -> str:
        """That a step takes too long, or ""."""
        if not self._max_step or (age := self._llm.step_seconds) <= self._max_step:
            return ""
        return f"the engine has been in one step for {age:.0f} s, expected at most {self._max_step:g} (--max-step)"

    async def _show_metrics(self) -> None:
        """Show Triton's model the metrics. It does not ask, so a step without end ends this process here."""
        while True:
            if stalled := self._stalled():
                print(f"dflash-trt: {stalled}; it is ended", file=sys.stderr, flush=True)
                os._exit(1)  # nothing can stop the engine's thread
            self._send("metrics", self._llm.metrics.samples())
            await asyncio.sleep(METRICS_SECONDS)

    def _fail(self) -> None:
        """End this process after an engine failure, so that the model becomes unready."""
        self._failed = True
        self._reader.feed_eof()


def _update(part: Chunk | Completion, arrived: int) -> wire.Update:
    update = {name: value for name in _PARTS if (value := getattr(part, name, None)) is not None}
    if part.prompt_token_ids is not None:
        update["num_input_tokens"] = len(part.prompt_token_ids)
    if (s := part.statistics) is not None:
        update |= {name: getattr(s, name) for name in _COUNTS}
        ends = (0.0, s.queue_time, s.time_to_first_token, s.time_to_first_token + s.generation_time)
        update["times"] = [arrived + round(seconds * 1e9) for seconds in ends]
    return cast(wire.Update, update)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
