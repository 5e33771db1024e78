"""Ten thousand short requests to one AsyncLLM, with random cancellations and deadlines. Every token is checked.

    python -m build_scripts.soak.engine BUNDLE [--requests 10000] [--concurrency 32] [--max-batch-size 8] [--seed 0]

Requests use a few dozen prompts with common beginnings, greedy and sampled, with and without drafting. Each must get
the tokens of the target alone, from the first on, none lost and none twice. A request that ends by itself gets all of
them. One that is cancelled or times out gets a beginning. Resident memory is read at intervals. The last line is one
JSON document. Exit code 1 if a token was wrong or something was left behind.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import random
import resource
import time
from collections import Counter
from typing import Any

from build_scripts.harness import options, report, resident_of
from dflash_trt import LLM, AsyncLLM, SamplingParams
from dflash_trt.bundle.manifest import Bundle

PROMPTS, LONGEST = 48, 24


def main() -> int:
    """Compare every answer with the target alone."""
    parser = options(__doc__, requests=10_000, concurrency=32, max_batch_size=8)
    args = parser.parse_args()
    asked, whole = references(args)
    figures = asyncio.run(soak(args, asked, whole))
    return report(figures, ["wrong tokens"] * figures["wrong"] + ["left behind"] * figures["left_behind"])


def references(args: argparse.Namespace) -> tuple[list[tuple[list[int], SamplingParams]], list[list[int]]]:
    """The requests, and the complete answer of each, decoded by the target alone, one at a time."""
    rng = random.Random(args.seed)
    with LLM(args.bundle, max_batch_size=1, prefix_cache_bytes=0, threads=1) as llm:
        vocab, longest = llm.bundle.manifest["vocab_size"], min(40, llm.max_seq_len - LONGEST - 8)
        common = [rng.randrange(vocab) for _ in range(longest)]
        asked = []
        for i in range(PROMPTS):
            prompt = common[: rng.randint(0, longest)] + [rng.randrange(vocab) for _ in range(8)]
            temperature = rng.choice((0.0, 0.0, 0.7, 1.0))
            asked.append((prompt, SamplingParams(max_tokens=LONGEST, temperature=temperature, seed=i)))
        return asked, [llm.generate(p, s, speculate=False).token_ids for p, s in asked]


async def soak(args: argparse.Namespace, asked: Any, whole: list[list[int]]) -> dict[str, Any]:
    """All requests. Returns the figures."""
    rng, ends, wrong = random.Random(args.seed + 1), Counter[str](), 0
    numbers = iter(range(args.requests))
    memory: list[float] = []
    begin = time.perf_counter()

    async def client(llm: AsyncLLM) -> None:
        nonlocal wrong
        for number in numbers:
            if number % max(args.requests // 20, 1) == 0:
                gc.collect()
                memory.append(resident_of(os.getpid()))
            which, most = rng.randrange(PROMPTS), rng.randint(1, LONGEST)
            prompt, params = asked[which]
            params = SamplingParams(max_tokens=most, temperature=params.temperature, seed=params.seed)
            timeout = rng.choice((None, None, None, 0.0, 0.01, 0.1))
            leave = rng.choice((None, None, None, 0, 1, 2))
            stream = llm.stream(prompt, params, timeout=timeout, speculate=rng.random() < 0.8)
            got: list[int] = []
            reason: str | None = None
            async for chunk in stream:
                got += chunk.token_ids
                reason = chunk.finish_reason
                if leave is not None and reason is None:
                    leave -= 1
                    if leave < 0:
                        break
            await stream.aclose()
            expected = whole[which][:most]
            ends[reason or "left"] += 1
            wrong += got != (expected if reason in ("stop", "length") else expected[: len(got)])

    # Always the whole block, so that drafting is tested even if it does not pay on these prompts.
    block = Bundle.open(args.bundle).manifest["block_size"]
    async with AsyncLLM(
        args.bundle, max_batch_size=args.max_batch_size, block_length=block, threads=1
    ) as llm:
        await asyncio.gather(*(client(llm) for _ in range(args.concurrency)))
        scheduler = llm._runtime.scheduler
        while not scheduler.idle:  # the round in which the last one left
            await asyncio.sleep(0.01)
        left = llm.in_flight + len(llm._arrivals) + len(asyncio.all_tasks()) - 1
        counts = llm.metrics.snapshot()
        gc.collect()
        memory.append(resident_of(os.getpid()))
    return {
        "requests": args.requests,
        "wrong": wrong,
        "left_behind": left,
        "ends": dict(ends),
        "seconds": round(time.perf_counter() - begin, 1),
        "tokens": counts["generation_tokens"],
        "prompt_tokens": counts["prompt_tokens"],
        "prompt_tokens_cached": counts["prompt_tokens_cached"],
        "accepted": counts["spec_decode_num_accepted_tokens"],
        "resident_mb": [round(value, 1) for value in memory],
        "resident_growth_mb": round(memory[-1] - memory[len(memory) // 4], 1),
        "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6, 1),
    }


if __name__ == "__main__":
    raise SystemExit(main())
