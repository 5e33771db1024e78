"""The ways to send a soak's requests: to AsyncLLM in this process, to the OpenAI server, and to tritonserver."""

from __future__ import annotations

import asyncio
import json
import os
import re
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from build_scripts.harness import openai_server
from dflash_trt import AsyncLLM, SamplingParams
from dflash_trt.errors import DFlashError

HANGING_SECONDS = 180
REFUSALS = {400: "wrong", 404: "wrong", 429: "queue is full", 503: "no engine", 504: "deadline"}
Pieces = AsyncGenerator[tuple[str, str | None], None]  # of a text, the last with the reason of its end


@dataclass
class Asked:
    """A request. `expected`: its whole answer, if it is known. `leave`: pieces after which the client leaves."""

    fields: dict[str, Any]
    expected: str | None = None
    timeout: float | None = None
    leave: int | None = None
    wrong: bool = False


class Refused(Exception):
    """Why a request was not answered."""


@dataclass(frozen=True)
class Way:
    """How requests are sent. processes: ids by what they do. metrics: in Prometheus' text format."""

    stream: Callable[[Asked], Pieces]  # raises Refused
    processes: Callable[[], dict[str, list[int]]]
    metrics: Callable[[], str]


@asynccontextmanager
async def python(bundle: Path) -> AsyncIterator[Way]:
    """AsyncLLM in this process."""
    async with AsyncLLM(bundle, max_batch_size=8, threads=1) as llm:

        async def stream(asked: Asked) -> Pieces:
            fields = {name: value for name, value in asked.fields.items() if name != "stream"}
            prompt, speculate = fields.pop("prompt"), fields.pop("speculate")
            try:
                params = SamplingParams(**fields)
                chunks = llm.stream(prompt, params, timeout=asked.timeout, speculate=speculate)
                async with aclosing(chunks):
                    async for chunk in chunks:
                        yield chunk.text, chunk.finish_reason
            except DFlashError as error:
                raise Refused("wrong") from error

        yield Way(stream, lambda: {"engine": [os.getpid()]}, llm.metrics.prometheus)


@asynccontextmanager
async def openai(bundle: Path) -> AsyncIterator[Way]:
    """Completions of `dflash-trt serve`, and chats that answer in JSON."""
    import openai as api

    standard = ("prompt", "model", "max_tokens", "temperature", "seed", "stream", "top_p")
    options = "--threads=1", "--served-model-name=soak", "--max-queue=8", "--stream-interval=0"
    with openai_server(bundle, *options) as server:
        url = f"http://127.0.0.1:{server.port}/v1"
        client = api.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=HANGING_SECONDS)

        async def choices(asked: Asked) -> Pieces:
            fields: dict[str, Any] = {"model": "soak"}
            fields |= {name: value for name, value in asked.fields.items() if name in standard}
            extra = {name: value for name, value in asked.fields.items() if name not in standard}
            extra |= {} if asked.timeout is None else {"timeout": asked.timeout}
            if asked.expected is None and not asked.wrong:
                messages = [{"role": "user", "content": fields.pop("prompt")}]
                fields |= {"messages": messages, "response_format": {"type": "json_object"}, "stream": False}
                (choice,) = (await client.chat.completions.create(**fields)).choices
                if choice.finish_reason != "length":
                    json.loads(choice.message.content or "")
                yield choice.message.content or "", choice.finish_reason
                return
            completion = await client.completions.create(**fields, extra_body=extra)
            if not fields["stream"]:
                yield completion.choices[0].text, completion.choices[0].finish_reason
                return
            async with completion as events:
                async for event in events:
                    yield event.choices[0].text, event.choices[0].finish_reason

        async def stream(asked: Asked) -> Pieces:
            try:
                async with aclosing(choices(asked)) as pieces:
                    async for piece in pieces:
                        yield piece
            except api.APIStatusError as error:
                raise Refused(REFUSALS.get(error.status_code, f"STATUS {error.status_code}")) from error
            except api.APIConnectionError as error:
                raise Refused("CUT OFF") from error
            except api.APIError as error:  # an error event within a stream
                raise Refused(
                    "no engine" if "engine" in error.message else f"EVENT {error.message}"
                ) from error

        yield Way(
            stream,
            lambda: {"server": [server.process.pid], "engine": server.engines()},
            lambda: server.fetch("/metrics"),
        )
    assert not server.stopped["exit_code"], server.stopped


@asynccontextmanager
async def triton(bundle: Path) -> AsyncIterator[Way]:
    """gRPC streams of tritonserver over one connection, and whole answers over HTTP."""
    from tritonclient.grpc import aio

    from server_tests.serving import Serving, tensors

    marks = {"server": "bin/tritonserver", "backend": "backends/python/triton", "engine": "serving.worker"}

    def refused(message: str) -> Refused:
        if "in flight, which is the limit" in message:
            return Refused("queue is full")
        down = re.search("engine process|no available|not healthy", message)
        return Refused("no engine" if down else "wrong")

    with tempfile.TemporaryDirectory() as directory:
        server = Serving(bundle, Path(directory) / "log", "--max-queue=8", "--threads=1")
        connection = aio.InferenceServerClient(server.grpc)

        async def stream(asked: Asked) -> Pieces:
            fields = {"text_input" if key == "prompt" else key: value for key, value in asked.fields.items()}
            if not fields["stream"] and asked.timeout is None and not isinstance(fields["text_input"], bytes):
                try:
                    _, answer = await asyncio.to_thread(server.generate, **fields)
                except ValueError as error:  # no answer
                    raise Refused("cut off") from error
                if "error" in answer:
                    raise refused(answer["error"])
                yield answer["text_output"], answer["finish_reason"]
                return
            timeout = None if asked.timeout is None else int(asked.timeout * 1e6)

            # Triton keeps several kB of a stream that is cancelled as it ends, so only those who leave cancel theirs.
            ended, why = asyncio.Event(), "cut off"

            async def requests() -> AsyncIterator[dict[str, Any]]:
                yield {"model_name": "dflash", "inputs": tensors(**fields), "timeout": timeout}
                if asked.leave is not None:  # keep the stream open until it is cancelled
                    await ended.wait()

            answers = connection.stream_infer(requests())
            try:
                async for result, failure in answers:
                    if failure is not None:
                        why = str(failure.message())
                        ended.set()
                        continue
                    end = result.as_numpy("finish_reason")
                    reason = None if end is None else end[0, 0].decode()
                    if reason is not None:
                        why = ""
                        ended.set()
                    yield result.as_numpy("text_output")[0, 0].decode(), reason
            finally:
                if not ended.is_set():
                    answers.cancel()
            if why:
                raise Refused(why) if why == "cut off" else refused(why)

        yield Way(
            stream,
            lambda: {name: server.processes(mark) for name, mark in marks.items()},
            lambda: server.get("/metrics", server.metrics_port)[1],
        )
        await connection.close()
        assert not server.stop()


WAYS = {"python": python, "openai": openai, "triton": triton}
