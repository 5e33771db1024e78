"""Chats over a pair with cache rows of a published size: rows kept, reused, dropped and copied, and memory.

    python -m build_scripts.bench.prefix_cache [BUNDLE] [--mebibytes 0,256,1024] [--clients 6] [--chats 3] [--turns 4]

Without BUNDLE the pair is generated. Its rows are those of Qwen3-4B and its drafter (36 and 5 layers, 8 key-value
heads of 128, float32) at 8,192 tokens. It is narrow otherwise, so that passes are fast, and its text is noise. Each
client has one chat after the other. All chats share a system prompt. Each limit of `--mebibytes` has its own process.
A request must get the same tokens under every limit. The last line is one JSON document. Exit code 1 if tokens
differ.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from build_scripts.bench.generated import write_pair
from dflash_trt import AsyncLLM, SamplingParams
from dflash_trt.building.build import build
from dflash_trt.hardware import processor

SYSTEM, QUESTION, ANSWER, BATCH, VOCAB = 200, 60, 40, 4, 2048


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", type=Path, nargs="?")
    parser.add_argument("--mebibytes", default="0,256,1024", help="values of prefix_cache_bytes, in MiB")
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--chats", type=int, default=3, help="chats of each client, one after the other")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--dir", type=Path, help="working directory (default: a temporary directory)")
    args = parser.parse_args()
    rows, tokens = [], []
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        work = Path(folder)
        bundle = args.bundle or generated(work)
        print(
            f"{processor()}; {args.clients} clients, {args.chats} chats of {args.turns} turns each, batch {BATCH}"
        )
        print(
            f"{'MiB':>5} {'prompt':>7} {'cached':>7} {'kept':>6} {'reused':>7} {'dropped':>8} {'refused':>8} "
            f"{'MB copied/request':>18} {'rows':>6} {'TTFT ms':>8} {'seconds':>8} {'resident MB':>12}"
        )
        for mebibytes in map(int, args.mebibytes.split(",")):
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                row, got = process.submit(measure, bundle, mebibytes << 20, args).result()
            rows.append(row)
            tokens.append(got)
            print(
                "{:>5} {:>7} {:>7} {:>6} {:>7} {:>8} {:>8} {:>18} {:>6} {:>8} {:>8} {:>12}".format(
                    *row.values()
                )
            )
    same = all(got == tokens[0] for got in tokens)
    print(json.dumps({"processor": processor(), "same_tokens": same, "rows": rows}))
    return 0 if same else 1


def generated(work: Path) -> Path:
    write_pair(work, hidden=256, layers=36, intermediate=256, vocab=VOCAB, heads=(8, 8))
    return build(str(work / "target"), str(work / "drafter"), work / "bundle", max_seq_len=8192).path


def measure(
    bundle: Path, limit: int, args: argparse.Namespace
) -> tuple[dict[str, float], dict[str, list[int]]]:
    return asyncio.run(chats(bundle, limit, args))


async def chats(
    bundle: Path, limit: int, args: argparse.Namespace
) -> tuple[dict[str, float], dict[str, list[int]]]:
    got: dict[str, list[int]] = {}
    first: list[float] = []
    system = noise(0, SYSTEM)
    params = SamplingParams(max_tokens=ANSWER, ignore_eos=True)
    llm = AsyncLLM(bundle, max_batch_size=BATCH, prefix_cache_bytes=limit, block_length=4)
    copied = [0]
    pair: Any = llm._runtime.pair
    for model, size in zip((pair.target, pair.drafter), row_bytes(llm), strict=True):
        count_copies(model.caches, size, copied)

    async def client(number: int) -> None:
        for chat in range(args.chats):
            talk = system
            for turn in range(args.turns):
                name = f"{number}.{chat}.{turn}"
                talk = [*talk, *noise(1 + len(talk) + 10_000 * (number + 100 * chat), QUESTION)]
                answer = await llm.generate(talk, params)
                first.append(answer.statistics.time_to_first_token)
                got[name] = answer.token_ids
                talk += answer.token_ids

    before = resident()
    begin = perf_counter()
    await asyncio.gather(*(client(i) for i in range(args.clients)))
    seconds = perf_counter() - begin
    counts = llm.metrics.snapshot()
    kept = counts["prefix_cache"]
    await llm.close()
    return {
        "mebibytes": limit >> 20,
        "prompt_tokens": counts["prompt_tokens"],
        "prompt_tokens_cached": counts["prompt_tokens_cached"],
        "kept_tokens": kept["kept_tokens"],
        "reused_tokens": kept["reused_tokens"],
        "dropped_tokens": kept["dropped_tokens"],
        "refused_tokens": kept["refused_tokens"],
        "megabytes_copied_per_request": round(copied[0] / 1e6 / len(got), 2),
        "rows_copied_per_request": round(copied[0] / sum(row_bytes(llm)) / len(got), 1),
        "mean_ttft_ms": round(1e3 * float(np.mean(first)), 1),
        "seconds": round(seconds, 1),
        "resident_growth_mb": round((resident() - before) / 1e6),
    }, got


def row_bytes(llm: AsyncLLM) -> tuple[int, int]:
    sizes = llm.bundle.manifest["cache_bytes_per_token"]
    return sizes["target"], sizes["drafter"]


def count_copies(caches: Any, size: int, copied: list[int]) -> None:
    """Count the bytes that an engine's caches copy, in `copied`."""
    rows_of: dict[str, Callable[..., int]] = {
        "copy": lambda source, target, length: length,
        "keep": lambda slot, start, stop: stop - start,
        "restore": lambda slot, kept, length: length,
    }
    for name, rows in rows_of.items():
        setattr(caches, name, counting(getattr(caches, name), rows, size, copied))


def counting(
    copy: Callable[..., Any], rows: Callable[..., int], size: int, copied: list[int]
) -> Callable[..., Any]:
    def counted(*args: Any) -> Any:
        copied[0] += size * rows(*args)
        return copy(*args)

    return counted


def noise(seed: int, length: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(2, VOCAB, length)]


def resident() -> float:
    """Resident memory of this process, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    raise SystemExit(main())
