"""Replicas of one bundle that start on a busy host: their rates on the same requests after 500 rounds.

    python -m build_scripts.bench.replicas BUNDLE [--replicas 4] [--rounds 500] [--threads N]

The adaptive length times its passes when it starts. Meanwhile 0, 1, 2, ... processes of this script keep the processor
busy, one more for each replica. Then they end, and each replica decodes its rounds. At last all decode the same
prompts in turn, and the rates are compared, also with plain decoding. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import perf_counter

from dflash_trt import LLM, SamplingParams
from dflash_trt.hardware import processor
from dflash_trt.prompts import read_prompts


def spin() -> None:
    while True:
        pass


@contextmanager
def busy(processes: int) -> Iterator[None]:
    spinning = [multiprocessing.Process(target=spin, daemon=True) for _ in range(processes)]
    for process in spinning:
        process.start()
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.join()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=None)
    args = parser.parse_args()
    params = SamplingParams(max_tokens=args.max_tokens, ignore_eos=True)
    with ExitStack() as stack:
        replicas = []
        for i in range(args.replicas):
            with busy(i):
                llm = stack.enter_context(LLM(args.bundle, max_batch_size=1, threads=args.threads))
                llm.generate([1], SamplingParams(max_tokens=2))
            replicas.append(llm)
        prompts = [
            each.content if isinstance(each.content, str) else replicas[0].chat_prompt(each.content)
            for each in read_prompts(None, 32)
        ]
        for llm in replicas:
            rounds, i = 0, 0
            while rounds < args.rounds:
                done = llm.generate(prompts[i % len(prompts)], params)
                rounds, i = rounds + sum(done.statistics.block_length_histogram), i + 1
        seconds = [0.0] * (len(replicas) + 1)
        tokens = 0
        for prompt in prompts[:: max(1, len(prompts) // 8)][:8]:
            ways = [(llm, True) for llm in replicas] + [(replicas[0], False)]
            best = [float("inf")] * len(ways)
            for _ in range(args.turns):
                for i, (llm, draft) in enumerate(ways):
                    begin = perf_counter()
                    llm.generate(prompt, params, speculate=draft)
                    best[i] = min(best[i], perf_counter() - begin)
            seconds = [total + one for total, one in zip(seconds, best, strict=True)]
            tokens += args.max_tokens
    rates = [round(tokens / each, 1) for each in seconds]
    result = {
        "tokens_per_second": rates[:-1],
        "plain": rates[-1],
        "most_to_least": round(max(rates[:-1]) / min(rates[:-1]), 3),
        "rounds": args.rounds,
        "processor": processor(),
    }
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
