"""The overhead of Triton: the same load on a server and on `AsyncLLM` in this process, in one run.

    python -m build_scripts.bench.server BUNDLE [--concurrency 1,2,4,8,16,32] [--requests 96] [--threads N]

Needs the environment of the server tests (make .venv-server/installed). Closed loops: each request is followed by the
next. Both serve the shipped prompts, greedy, with the same number of tokens. They take turns within each load, so
that a slow moment of the machine affects both. There are four methods. `process` streams from AsyncLLM here. `stream`
streams over gRPC. `rounds` does too, from a server that sends a response per round. `whole` requests one response.
Rounds verify the whole block.

The server's client runs on the same cores and is part of the measurement. A busy machine stretches wall time more
than CPU time. So CPU time is given separately for the client (for `process` with the engine), tritonserver, its
backend process and the engine. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

from tritonclient.grpc import aio

from dflash_trt import AsyncLLM, SamplingParams
from dflash_trt.bundle.manifest import Bundle
from dflash_trt.decoding.metrics import quantile
from dflash_trt.hardware import processor
from dflash_trt.prompts import read_prompts
from server_tests.serving import Serving, tensors

METHODS = ("process", "stream", "rounds", "whole")
SEGMENTS = 4
Ask = Callable[
    [list[int]], Awaitable[tuple[float, float, int]]
]  # ids -> seconds to first and to last, tokens


@dataclass
class Point:
    """One method under one load; times in seconds."""

    seconds: float = 0.0
    first: list[float] = field(default_factory=list)
    per_token: list[float] = field(default_factory=list)
    tokens: int = 0
    cpu: dict[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, float]:
        figures = {
            "requests_per_second": len(self.first) / self.seconds,
            "tokens_per_second": self.tokens / self.seconds,
        }
        for name, values in (("ttft", self.first), ("tpot", self.per_token)):
            figures |= {f"{name}_ms_p{p}": 1e3 * quantile(values, p / 100) for p in (50, 99)}
        figures |= {f"{name}_cpu_ms_per_request": 1e3 * s / len(self.first) for name, s in self.cpu.items()}
        return {name: round(value, 3) for name, value in figures.items()}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--concurrency", default="1,2,4,8,16,32")
    parser.add_argument("--requests", type=int, default=96, help="per load and method (default: 96)")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=0, help="CPU threads per pass (default: all)")
    args = parser.parse_args()
    args.block_size = Bundle.open(args.bundle).manifest["block_size"]
    loads = [int(n) for n in args.concurrency.split(",")]
    with tempfile.TemporaryDirectory() as directory:
        options = [f"--max-batch-size={max(loads)}", f"--block-length={args.block_size}"]
        options += [f"--threads={args.threads}"] * (args.threads > 0)
        servers: list[Serving] = []
        try:
            for interval in ([], ["--stream-interval=0"]):
                servers.append(
                    Serving(args.bundle, Path(directory) / f"log{len(servers)}", *options, *interval)
                )
            rows = asyncio.run(bench(args, loads, *servers))
        finally:
            for server in servers:
                server.stop()
    document = {"bundle": args.bundle.name, "processor": processor(), "requests": args.requests}
    print(json.dumps(document | {"max_tokens": args.max_tokens, "points": rows}))
    return 0


async def bench(
    args: argparse.Namespace, loads: list[int], server: Serving, by_round: Serving
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    settings = {"block_length": args.block_size, "threads": args.threads or None}
    async with (
        AsyncLLM(args.bundle, max_batch_size=max(loads), **settings) as llm,
        aio.InferenceServerClient(server.grpc) as client,
        aio.InferenceServerClient(by_round.grpc) as other,
    ):
        prompts = [
            llm.tokenizer.encode(p.content) if isinstance(p.content, str) else llm.chat_prompt(p.content)
            for p in read_prompts(None, 0)
        ]
        ways: dict[str, tuple[Ask, Serving]] = {
            "process": (lambda ids: in_process(llm, ids, args.max_tokens), server),
            "stream": (lambda ids: over_grpc(client, ids, args.max_tokens, stream=True), server),
            "rounds": (lambda ids: over_grpc(other, ids, args.max_tokens, stream=True), by_round),
            "whole": (lambda ids: over_grpc(client, ids, args.max_tokens, stream=False), server),
        }
        print(f"{processor()}; {args.requests} requests per load and method, {args.max_tokens} tokens each")
        for load in loads:
            points = {name: Point() for name in METHODS}
            for name in METHODS:
                await closed_loop(*ways[name], prompts[:load], load, Point())
            segments = max(1, min(SEGMENTS, args.requests // (3 * load)))
            for segment in range(segments):
                part = range(args.requests * segment // segments, args.requests * (segment + 1) // segments)
                asked = [prompts[n % len(prompts)] for n in part]
                first = segment % len(METHODS)
                for name in METHODS[first:] + METHODS[:first]:
                    await closed_loop(*ways[name], asked, load, points[name])
            base = points["process"].to_dict()
            for name, point in points.items():
                figures = point.to_dict()
                rows.append({"concurrency": load, "method": name, **figures})
                print(
                    f"{load:>3}  {name:<8} {figures['requests_per_second']:>7.1f} requests/s "
                    f"({figures['requests_per_second'] / base['requests_per_second']:.2f}x) "
                    f"{figures['tokens_per_second']:>7.0f} tokens/s  "
                    f"TTFT {figures['ttft_ms_p50']:.1f}/{figures['ttft_ms_p99']:.1f} ms  "
                    f"TPOT {figures['tpot_ms_p50']:.2f}/{figures['tpot_ms_p99']:.2f} ms  CPU ms per request: "
                    + ", ".join(f"{k} {1e3 * s / len(point.first):.1f}" for k, s in point.cpu.items()),
                    flush=True,
                )
    return rows


async def closed_loop(ask: Ask, server: Serving, prompts: list[list[int]], load: int, point: Point) -> None:
    """Keep `load` requests in flight until each prompt has been sent."""
    waiting = iter(prompts)

    async def one() -> None:
        for ids in waiting:
            first, last, tokens = await ask(ids)
            point.first.append(first)
            point.per_token.append((last - first) / max(tokens - 1, 1))
            point.tokens += tokens

    begin, before = perf_counter(), cpu_seconds(server)
    await asyncio.gather(*(one() for _ in range(load)))
    point.seconds += perf_counter() - begin
    for name, seconds in cpu_seconds(server).items():
        point.cpu[name] = point.cpu.get(name, 0.0) + seconds - before[name]


def cpu_seconds(server: Serving) -> dict[str, float]:
    """CPU time so far of this process and of the server's processes."""
    marks = {
        "tritonserver": "bin/tritonserver",
        "backend": "backends/python/triton",
        "engine": "serving.worker",
    }
    seconds = {"client": process_time()}
    for name, mark in marks.items():
        (pid,) = server.processes(mark)
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        seconds[name] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return seconds


async def in_process(llm: AsyncLLM, ids: list[int], most: int) -> tuple[float, float, int]:
    begin, first, tokens = perf_counter(), 0.0, 0
    async for chunk in llm.stream(ids, SamplingParams(max_tokens=most, ignore_eos=True)):
        first = first or perf_counter() - begin
        tokens += len(chunk.token_ids)
    return first, perf_counter() - begin, tokens


async def over_grpc(client: Any, ids: list[int], most: int, *, stream: bool) -> tuple[float, float, int]:
    inputs = tensors(input_ids=ids, max_tokens=most, ignore_eos=True, stream=stream)

    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield {"model_name": "dflash", "inputs": inputs}

    begin, first, tokens = perf_counter(), 0.0, 0
    async for result, error in client.stream_infer(requests()):
        if error is not None:
            raise error
        first = first or perf_counter() - begin
        tokens += result.as_numpy("output_ids").shape[1]
    return first, perf_counter() - begin, tokens


if __name__ == "__main__":
    raise SystemExit(main())
