"""The cost of the proxy of `dflash-trt serve`: the same streams through it and directly to tritonserver's sockets.

    python -m build_scripts.bench.proxy BUNDLE [--concurrency 1,8,64] [--requests 192] [--max-tokens 64] [--threads N]

Needs the environment of the server tests (make .venv-server/installed). Closed loops over gRPC and HTTP (server-sent
events) take turns within each load, so that a slow moment of the machine affects all. Clients, proxy, server and
engine run on the same cores. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import aiohttp
from tritonclient.grpc import aio

from dflash_trt.bundle.manifest import Bundle
from dflash_trt.decoding.metrics import quantile
from dflash_trt.hardware import processor
from dflash_trt.serving.proxy import Sockets
from server_tests.serving import Serving, tensors

PROMPT = "def add(a, b):"
SEGMENTS = 4
Ask = Callable[[], Awaitable[tuple[float, int]]]  # seconds to the first tokens, tokens


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--concurrency", default="1,8,64")
    parser.add_argument("--requests", type=int, default=192, help="per load and way (default: 192)")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=0, help="CPU threads per pass (default: all)")
    args = parser.parse_args()
    loads = [int(n) for n in args.concurrency.split(",")]
    size = Bundle.open(args.bundle).manifest["block_size"]
    options = [f"--max-batch-size={max(loads)}", f"--block-length={size}"]
    options += [f"--threads={args.threads}"] * (args.threads > 0)
    with tempfile.TemporaryDirectory() as directory:
        server = Serving(args.bundle, Path(directory) / "log", *options)
        try:
            rows = asyncio.run(bench(server, loads, args.requests, args.max_tokens))
        finally:
            server.stop()
    print(json.dumps({"bundle": args.bundle.name, "processor": processor(), "points": rows}))
    return 0


def sockets_of(server: Serving) -> Sockets:
    """The sockets of the server's tritonserver, from its arguments."""
    (pid,) = server.processes("bin/tritonserver")
    arguments = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    (address,) = (a for a in arguments if a.startswith("--http-address="))
    return Sockets(Path(address.partition("unix:")[2]).parent)


async def bench(server: Serving, loads: list[int], requests: int, most: int) -> list[dict[str, Any]]:
    sockets = sockets_of(server)
    rows: list[dict[str, Any]] = []
    async with (
        aio.InferenceServerClient(server.grpc) as through,
        aio.InferenceServerClient(f"unix:{sockets.grpc}") as straight,
        aiohttp.ClientSession(f"http://127.0.0.1:{server.http_port}") as session,
        aiohttp.ClientSession(
            "http://localhost", connector=aiohttp.UnixConnector(str(sockets.http))
        ) as direct,
    ):
        ways: dict[str, Ask] = {
            "gRPC": lambda: over_grpc(through, most),
            "gRPC, straight": lambda: over_grpc(straight, most),
            "HTTP": lambda: over_http(session, most),
            "HTTP, straight": lambda: over_http(direct, most),
        }
        names = [*ways]
        print(f"{processor()}; {requests} requests per load and way, {most} tokens each")
        for load in loads:
            seconds, first = dict.fromkeys(names, 0.0), {name: list[float]() for name in names}
            for name in names:
                await closed_loop(ways[name], load, load)
            for segment in range(SEGMENTS):
                for name in names[segment:] + names[:segment]:
                    begin = perf_counter()
                    first[name] += await closed_loop(ways[name], load, requests // SEGMENTS)
                    seconds[name] += perf_counter() - begin
            for name in names:
                rate, base = (len(first[n]) / seconds[n] for n in (name, f"{name.split(',')[0]}, straight"))
                p50, p99 = (1e3 * quantile(first[name], p) for p in (0.5, 0.99))
                rows.append({"concurrency": load, "way": name, "requests_per_second": round(rate, 2)})
                rows[-1] |= {"ttft_ms_p50": round(p50, 2), "ttft_ms_p99": round(p99, 2)}
                print(
                    f"{load:>3}  {name:<15} {rate:>7.1f} requests/s ({rate / base:.2f}x)  TTFT {p50:.1f}/{p99:.1f} ms",
                    flush=True,
                )
    return rows


async def closed_loop(ask: Ask, load: int, requests: int) -> list[float]:
    """Send this many requests, `load` at a time. Returns each one's seconds to the first tokens."""
    left, first = iter(range(requests)), list[float]()

    async def one() -> None:
        for _ in left:
            first.append((await ask())[0])

    await asyncio.gather(*(one() for _ in range(load)))
    return first


async def over_grpc(client: Any, most: int) -> tuple[float, int]:
    inputs = tensors(text_input=PROMPT, max_tokens=most, ignore_eos=True, stream=True)

    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield {"model_name": "dflash", "inputs": inputs}

    begin, first, tokens = perf_counter(), 0.0, 0
    async for result, error in client.stream_infer(requests()):
        if error is not None:
            raise error
        first = first or perf_counter() - begin
        tokens += result.as_numpy("output_ids").shape[1]
    return first, tokens


async def over_http(session: aiohttp.ClientSession, most: int) -> tuple[float, int]:
    fields = {"text_input": PROMPT, "max_tokens": most, "ignore_eos": True, "stream": True}
    begin, first, tokens = perf_counter(), 0.0, 0
    async with session.post("/v2/models/dflash/generate_stream", json=fields) as answer:
        answer.raise_for_status()
        async for line in answer.content:
            if line.startswith(b"data: "):
                first = first or perf_counter() - begin
                ids = json.loads(line[6:])["output_ids"]
                tokens += len(ids) if isinstance(ids, list) else 1
    return first, tokens


if __name__ == "__main__":
    raise SystemExit(main())
