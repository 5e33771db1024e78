"""The overhead of the server of OpenAI's API: the same load on it and on `AsyncLLM` in this process, in one run.

    python -m build_scripts.bench.openai_server BUNDLE [--concurrency 1,8,32] [--requests 64] [--repeat 3]
        [--pause MS] [--pass-ms MS]

Needs the extra `serve`. Closed loops of greedy streams at a fixed block length take turns. The client runs on the same
cores as the server, and is part of the measurement. It goes before the engine's threads where the system lets it, so
its own wait for a core does not count. A stream keeps its connection for its next request.

`beyond_engine_ms` is the mean time to the first token less the engine's own, which /metrics has. It is the way there
and back, with the rest of the engine's step. A request that misses the begin of a round waits for the next one. With
--pause a stream waits a random time, up to MS, before each request, so requests do not follow the rounds.

With --pass-ms the passes sleep instead of computing (sleeping_passes.py). Then server and client have the cores, as
beside a GPU. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import socket
import statistics
import subprocess
import sys
from collections.abc import Awaitable, Callable
from time import perf_counter
from typing import Any
from urllib.request import urlopen

from build_scripts.bench import sleeping_passes
from dflash_trt import AsyncLLM, SamplingParams
from dflash_trt.cli.options import at_least, each
from dflash_trt.hardware import processor
from dflash_trt.prompts import read_prompts
from dflash_trt.serving.processes import run_loop

# Seconds to the first token, and the answer, which is read when the clock has stopped.
Ask = Callable[[list[int]], Awaitable[tuple[float, list[Any]]]]


async def in_process(llm: AsyncLLM, ids: list[int], tokens: int) -> tuple[float, list[Any]]:
    """A stream of `AsyncLLM`."""
    begin, first, chunks = perf_counter(), 0.0, []
    async for chunk in llm.stream(ids, SamplingParams(max_tokens=tokens, ignore_eos=True)):
        first = first or perf_counter() - begin
        chunks.append(chunk)
    return first, chunks


def text_of_chunks(chunks: list[Any]) -> str:
    """The answer of `in_process`."""
    return "".join(chunk.text for chunk in chunks)


class OverHttp:
    """Streams of /v1/completions. Connections are kept for later requests."""

    def __init__(self, port: int, tokens: int) -> None:
        self._port, self._tokens = port, tokens
        self._kept: list[_EventReader] = []

    async def __call__(self, ids: list[int]) -> tuple[float, list[Any]]:
        body = {
            "prompt": ids,
            "max_tokens": self._tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        data = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(data)}\r\n"
        begin = perf_counter()
        if self._kept:
            connection = self._kept.pop()
        else:
            loop = asyncio.get_running_loop()
            _, connection = await loop.create_connection(_EventReader, "127.0.0.1", self._port)
        parts, first = await connection.ask(head.encode() + b"Content-Type: application/json\r\n\r\n" + data)
        self._kept.append(connection)
        return first - begin, parts


class _EventReader(asyncio.Protocol):
    """One request after the other. It keeps the bytes, so that the client takes little of the cores."""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    async def ask(self, request: bytes) -> tuple[list[bytes], float]:
        """The pieces of the answer, and the time (perf_counter) of the first event."""
        self._parts, self._first = list[bytes](), 0.0
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        await self._ended
        return self._parts, self._first

    def data_received(self, data: bytes) -> None:
        self._parts.append(data)
        if not self._first and b"data: {" in data:
            self._first = perf_counter()
        if data.endswith(b"0\r\n\r\n"):  # the last chunk
            self._ended.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self._ended.done():
            self._ended.set_exception(ConnectionError("the server has closed a connection"))


def text_of_events(parts: list[Any]) -> str:
    """The answer of `OverHttp`."""
    lines = b"".join(parts).splitlines()
    return "".join(
        json.loads(line[6:])["choices"][0]["text"] for line in lines if line.startswith(b"data: {")
    )


async def closed_loop(
    ask: Ask, prompts: list[list[int]], load: int, pause: float
) -> tuple[float, list[float], list[list[Any]]]:
    """Seconds of the whole, seconds to each first token, and the answers in the order of the prompts."""
    waiting = iter(enumerate(prompts))
    firsts, answers, rng = list[float](), list[list[Any]]([[]] * len(prompts)), random.Random(0)

    async def one() -> None:
        for number, ids in waiting:
            await asyncio.sleep(rng.uniform(0, pause))
            first, answers[number] = await ask(ids)
            firsts.append(first)

    begin = perf_counter()
    await asyncio.gather(*(one() for _ in range(load)))
    return perf_counter() - begin, firsts, answers


def first_tokens(metrics: str) -> tuple[float, float]:
    """Number and sum of the seconds to the first token in the engine, in Prometheus' text format."""
    name = "dflash_time_to_first_token_seconds"
    values = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if line.startswith(name))
    return float(values[f"{name}_count"]), float(values[f"{name}_sum"])


def go_first() -> None:
    """Give this thread a priority above that of the threads that exist, if this process may."""
    policy = os.sched_getscheduler(0)
    with contextlib.suppress(OSError):
        if policy in (os.SCHED_RR, os.SCHED_FIFO):
            os.sched_setscheduler(0, policy, os.sched_param(os.sched_getparam(0).sched_priority + 1))
        else:
            os.nice(-5)


async def bench(args: argparse.Namespace, port: int) -> list[dict[str, Any]]:
    """Both ways in turn, for each number of streams."""
    rows = []
    settings = {"block_length": args.block_length, "threads": args.threads}
    async with AsyncLLM(args.bundle, max_batch_size=max(args.concurrency), **settings) as llm:
        go_first()  # its threads are there already
        shipped = [
            llm.tokenizer.encode(p.content) if isinstance(p.content, str) else llm.chat_prompt(p.content)
            for p in read_prompts(None, 0)
        ]
        prompts = [shipped[n % len(shipped)] for n in range(args.requests)]
        url = f"http://127.0.0.1:{port}/metrics"
        ways: dict[str, tuple[Ask, Callable[[list[Any]], str], Callable[[], str]]] = {
            "process": (
                lambda ids: in_process(llm, ids, args.max_tokens),
                text_of_chunks,
                llm.metrics.prometheus,
            ),
            "server": (
                OverHttp(port, args.max_tokens),
                text_of_events,
                lambda: urlopen(url, timeout=30).read().decode(),
            ),
        }
        for load in args.concurrency:
            some = prompts if load > 1 else prompts[: max(8, args.requests // 4)]
            seconds: dict[str, list[float]] = {name: [] for name in ways}
            firsts: dict[str, list[float]] = {name: [] for name in ways}
            beyond: dict[str, list[float]] = {name: [] for name in ways}
            texts: dict[str, list[str]] = {}
            for turn in range(args.repeat + 1):  # the first turn warms up
                for name, (ask, read, metrics) in ways.items():
                    count, total = first_tokens(metrics())
                    took, first, answers = await closed_loop(ask, some, load, args.pause / 1e3)
                    ended, sum_of_all = first_tokens(metrics())
                    texts[name] = [read(answer) for answer in answers]
                    if turn:
                        seconds[name].append(took)
                        firsts[name] += first
                        beyond[name].append(statistics.mean(first) - (sum_of_all - total) / (ended - count))
            ratios = [p / s for p, s in zip(seconds["process"], seconds["server"], strict=True)]
            row = {
                "concurrency": load,
                "same_texts": texts["process"] == texts["server"],
                "throughput_ratio": statistics.median(ratios),
                "tokens_per_second": len(some) * args.max_tokens / statistics.median(seconds["server"]),
                "ttft_ms": {name: 1e3 * statistics.median(values) for name, values in firsts.items()},
                "mean_ttft_ms": {name: 1e3 * statistics.mean(values) for name, values in firsts.items()},
                "beyond_engine_ms": {
                    name: 1e3 * statistics.median(values) for name, values in beyond.items()
                },
            }
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def main() -> int:
    """Start the server, and print a line for each number of streams."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle")
    parser.add_argument("--concurrency", type=each(at_least(1)), default=[1, 8, 32])
    parser.add_argument("--requests", type=at_least(1), default=64)
    parser.add_argument("--repeat", type=at_least(1), default=3)
    parser.add_argument("--max-tokens", type=at_least(1), default=64)
    parser.add_argument("--block-length", type=at_least(1), default=8)
    parser.add_argument("--stream-interval", type=at_least(0), default=50, metavar="MS", help="of the server")
    parser.add_argument(
        "--pause", type=at_least(0), default=0, metavar="MS", help="the longest before a request"
    )
    parser.add_argument(
        "--pass-ms", type=float, metavar="MS", help="passes sleep so long, and compute nothing"
    )
    parser.add_argument("--threads", type=at_least(1))
    args = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = [f"--block-length={args.block_length}", f"--max-batch-size={max(args.concurrency)}"]
    options += [f"--stream-interval={args.stream_interval}", f"--port={port}"]
    options += [f"--threads={args.threads}"] if args.threads else []
    program, environment = ["-m", "dflash_trt"], dict(os.environ)
    if args.pass_ms is not None:
        sleeping_passes.install(args.pass_ms)
        program, environment["PASS_MS"] = [sleeping_passes.__file__], str(args.pass_ms)
    command = [sys.executable, *program, "serve", args.bundle, *options]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as server:
        try:
            assert server.stdout is not None
            if not server.stdout.readline():
                raise SystemExit("the server has not started")
            rows = run_loop(bench(args, port))
        finally:
            server.terminate()
    print(json.dumps({"processor": processor(), "max_tokens": args.max_tokens, "rows": rows}))
    return 0 if all(row["same_texts"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
