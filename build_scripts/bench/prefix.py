"""Time to first token with and without a prefix hit, and the acceptance length after one.

    python -m build_scripts.bench.prefix BUNDLE [--lengths 128,512,896] [--repeats 5] [--max-tokens 64]

For each length, a prompt is decoded cold. It is decoded again after a request that shares all but its last 8 tokens.
Prompts are the shipped ones, concatenated. The last line is one JSON document. Exit code 1 if tokens differ.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median

from dflash_trt import LLM, Completion, SamplingParams
from dflash_trt.hardware import processor
from dflash_trt.prompts import read_prompts

OWN = 8  # last tokens of the prompt, which no other request shares


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--lengths", default="128,512,896", help="tokens of the prompt")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()
    rows = []
    print(f"{processor()}; median of {args.repeats}, at most {args.max_tokens} tokens, greedy")
    print(
        f"{'prompt':>6}  {'cached':>6}  {'TTFT ms cold':>12}  {'hit':>8}  {'acceptance cold':>15}  {'hit':>6}"
    )
    with LLM(args.bundle, max_batch_size=1, prefix_cache_bytes=1 << 30) as llm:
        text = [
            token
            for prompt in read_prompts(None, 0)
            for token in (llm.chat_prompt(prompt.content) if isinstance(prompt.content, list) else [])
        ]
        params = SamplingParams(max_tokens=args.max_tokens, ignore_eos=True)
        for length in map(int, args.lengths.split(",")):
            cold, hit = [], []
            for repeat in range(args.repeats + 1):  # the first of each length is warm-up
                prompt = text[repeat * 64 : repeat * 64 + length]
                llm.generate([0, 0], SamplingParams(max_tokens=1))  # shares nothing
                llm._runtime.scheduler.forget()
                cold.append(llm.generate(prompt, params, block_length=llm.block_size))
                llm._runtime.scheduler.forget()
                llm.generate(prompt[:-OWN], params, block_length=llm.block_size)
                hit.append(llm.generate(prompt, params, block_length=llm.block_size))
            rows.append(row(length, cold[1:], hit[1:]))
            print(
                "{:>6}  {:>6}  {:>12.2f}  {:>8.2f}  {:>15.4f}  {:>6.4f}".format(*list(rows[-1].values())[:6])
            )
    print(json.dumps({"bundle": args.bundle.name, "processor": processor(), "rows": rows}))
    return 0 if all(each["same_tokens"] and each["same_acceptance"] for each in rows) else 1


def row(length: int, cold: list[Completion], hit: list[Completion]) -> dict[str, float]:
    def first(completions: list[Completion]) -> float:
        return round(1e3 * median(c.statistics.time_to_first_token for c in completions), 3)

    def accepted(completions: list[Completion]) -> float:
        tokens = sum(c.statistics.num_accepted_tokens for c in completions)
        return round(1 + tokens / max(sum(c.statistics.num_drafts for c in completions), 1), 4)

    return {
        "prompt_tokens": length,
        "cached_tokens": hit[0].statistics.num_cached_tokens,
        "ttft_ms_cold": first(cold),
        "ttft_ms_hit": first(hit),
        "mean_acceptance_length_cold": accepted(cold),
        "mean_acceptance_length_hit": accepted(hit),
        "same_tokens": [c.token_ids for c in cold] == [c.token_ids for c in hit],
        "same_acceptance": [c.statistics.acceptance_histogram for c in cold]
        == [c.statistics.acceptance_histogram for c in hit],
    }


if __name__ == "__main__":
    raise SystemExit(main())
