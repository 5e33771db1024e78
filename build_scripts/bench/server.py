"""What the server of OpenAI's API adds to the engine's time: the same streams to it and to AsyncLLM, in turn.

    python -m build_scripts.bench.server BUNDLE [--concurrency 1,8,32] [--pass-ms 10] [--pause 400]

Each number of streams goes to both, several rounds long, each a closed loop of so many clients. With --pass-ms, passes
sleep, as those of a GPU leave the cores to the server: a pass of the target so many milliseconds, one of the drafter a
fifth of it. Nothing is computed then, and all tokens are 0. --pause is the longest wait of a client before a request.
The table has the server's throughput relative to AsyncLLM's and milliseconds to the first token, the median of both.
The last line is one JSON document. Exit code 1 if texts differ.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import runpy
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from statistics import median
from time import perf_counter
from typing import Any

from build_scripts import harness
from dflash_trt import AsyncLLM, SamplingParams
from dflash_trt.cli.options import at_least, list_of
from dflash_trt.hardware import processor
from dflash_trt.prompts import read_prompts
from dflash_trt.serving.processes import run_loop

Ask = Callable[[list[int]], AsyncIterator[str]]  # the pieces of an answer


class _Sleep:
    """In place of a session of ONNX Runtime: takes its bindings, and sleeps."""

    def __init__(self, session: Any, seconds: float) -> None:
        self._session, self._seconds = session, seconds

    def run_with_iobinding(self, binding: Any, options: Any = None) -> None:
        time.sleep(self._seconds)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


def let_passes_sleep(milliseconds: float) -> None:
    """Of every engine of ONNX Runtime that this process loads from now on."""
    from dflash_trt.engines.onnxruntime.runner import OnnxRuntimeRunner

    patched: Any = OnnxRuntimeRunner
    load = patched._load

    def load_and_sleep(engine: Any) -> None:
        load(engine)
        share = 0.2 if "drafter" in engine._path.name else 1.0
        engine._session = _Sleep(engine._session, share * milliseconds / 1e3)

    patched._load = load_and_sleep


def serve(role: str, arguments: list[str]) -> int:
    """`dflash-trt serve`, or the engine's process of it, with passes that sleep."""
    let_passes_sleep(float(os.environ["PASS_MS"]))
    if role == "worker":
        sys.argv = [sys.argv[0], *arguments]
        runpy.run_module("dflash_trt.serving.worker", run_name="__main__")
        return 0
    from dflash_trt.cli import main as dflash_trt
    from dflash_trt.serving import wire

    wire.WORKER = (__file__, "worker")
    return dflash_trt([role, *arguments])


async def closed_loop(ask: Ask, prompts: list[list[int]], load: int, pause: float) -> Any:
    """Seconds of the whole, seconds to each first token, and the answers in the order of the prompts."""
    waiting, rng = iter(enumerate(prompts)), random.Random(0)
    firsts, texts = list[float](), [""] * len(prompts)

    async def client() -> None:
        for number, ids in waiting:
            await asyncio.sleep(rng.uniform(0, pause))
            begin, first = perf_counter(), 0.0
            async for piece in ask(ids):
                first = first or perf_counter() - begin
                texts[number] += piece
            firsts.append(first)

    begin = perf_counter()
    await asyncio.gather(*(client() for _ in range(load)))
    return perf_counter() - begin, firsts, texts


async def bench(args: argparse.Namespace, port: int) -> list[dict[str, Any]]:
    """Both ways in turn, for each number of streams."""
    import httpx2

    settings = {"block_length": args.block_length, "threads": args.threads}
    async with AsyncLLM(args.bundle, max_batch_size=max(args.concurrency), **settings) as llm:
        shipped = [
            llm.chat_prompt(p.content) for p in read_prompts(None, 0) if not isinstance(p.content, str)
        ]
        prompts = [shipped[n % len(shipped)] for n in range(args.requests)]
        session = httpx2.AsyncClient(timeout=None, limits=httpx2.Limits())

        async def process(ids: list[int]) -> AsyncIterator[str]:
            params = SamplingParams(max_tokens=args.max_tokens, ignore_eos=True)
            async for chunk in llm.stream(ids, params):
                yield chunk.text

        async def server(ids: list[int]) -> AsyncIterator[str]:
            body = {"prompt": ids, "max_tokens": args.max_tokens, "temperature": 0, "ignore_eos": True}
            url = f"http://127.0.0.1:{port}/v1/completions"
            async with session.stream("POST", url, json=body | {"stream": True}) as answer:
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        yield json.loads(line[6:])["choices"][0]["text"]

        rows = []
        async with session:
            for load in args.concurrency:
                some = prompts if load > 1 else prompts[: max(8, args.requests // 4)]
                rows.append(await compare({"process": process, "server": server}, some, load, args))
                print(json.dumps(rows[-1]), flush=True)
        return rows


async def compare(
    ways: dict[str, Ask], prompts: list[list[int]], load: int, args: argparse.Namespace
) -> dict[str, Any]:
    """The figures of one number of streams."""
    seconds, firsts = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    texts: dict[str, list[str]] = {}
    for turn in range(args.rounds + 1):  # the first turn warms up
        for name in harness.rotated(list(ways), turn):
            took, first, texts[name] = await closed_loop(ways[name], prompts, load, args.pause / 1e3)
            if turn:
                seconds[name].append(took)
                firsts[name] += first
    ratios = [p / s for p, s in zip(seconds["process"], seconds["server"], strict=True)]
    return {
        "concurrency": load,
        "same_texts": texts["process"] == texts["server"],
        "throughput_ratio": median(ratios),
        "ttft_ms": {name: 1e3 * median(values) for name, values in firsts.items()},
    }


def main() -> int:
    """Start the server, and compare."""
    if sys.argv[1:2] in (["serve"], ["worker"]):
        return serve(sys.argv[1], sys.argv[2:])
    parser = harness.parser(__doc__)
    parser.add_argument("bundle")
    parser.add_argument("--concurrency", type=list_of(at_least(1)), default=[1, 8, 32])
    for name, default in (("requests", 64), ("rounds", 3), ("max-tokens", 64), ("block-length", 8)):
        parser.add_argument(f"--{name}", type=at_least(1), default=default)
    parser.add_argument("--stream-interval", type=at_least(0), default=50, metavar="MS", help="of the server")
    parser.add_argument("--pause", type=at_least(0), default=0, metavar="MS")
    parser.add_argument("--pass-ms", type=float, metavar="MS")
    parser.add_argument("--threads", type=at_least(1))
    args = parser.parse_args()
    options = [f"--block-length={args.block_length}", f"--max-batch-size={max(args.concurrency)}"]
    options += [f"--stream-interval={args.stream_interval}"]
    options += [f"--threads={args.threads}"] if args.threads else []
    more: dict[str, Any] = {}
    if args.pass_ms is not None:
        let_passes_sleep(args.pass_ms)
        more = {"program": [__file__], "PASS_MS": str(args.pass_ms)}
    with harness.openai_server(args.bundle, *options, **more) as server:
        rows = run_loop(bench(args, server.port))
    cells = [
        [row["concurrency"], f"{row['throughput_ratio']:.2f}"]
        + [f"{row['ttft_ms'][name]:.1f}" for name in ("process", "server")]
        for row in rows
    ]
    print(harness.markdown(["streams", "throughput", "AsyncLLM, ms", "server, ms"], cells))
    print(json.dumps({"processor": processor(), "max_tokens": args.max_tokens, "rows": rows}))
    return 0 if all(row["same_texts"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
