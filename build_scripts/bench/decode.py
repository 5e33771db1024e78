"""Decoding speed of a bundle at batch 1: plain, with drafts at several block lengths, and Transformers, in one run.

    python -m build_scripts.bench.decode [--target tiny] [--prompts 8] [--max-tokens 128] [--block-lengths 4,6,8]

The methods take turns on every prompt, so that a slow moment of the machine affects all of them. A method's time is
the sum over prompts of the best of `--repeats` runs. Prefill and the first token are left out. The tokens of all
methods are compared, also those of Transformers. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dflash_trt import LLM, SamplingParams, Statistics
from dflash_trt.building.build import build
from dflash_trt.building.sources import resolve_pair
from dflash_trt.prompts import SHIPPED_PROMPTS, read_prompts

CATEGORIES = ("math", "code", "tools", "chat")


@dataclass
class Total:
    """One method on one category."""

    seconds: float = 0.0
    tokens: int = 0
    outputs: list[list[int]] = field(default_factory=list)
    statistics: list[Statistics] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="tiny", help="a known pair")
    parser.add_argument("--prompts", type=int, default=8, help="per category")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--block-lengths", default="4,6,8")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    lengths = [int(n) for n in args.block_lengths.split(",")]

    with tempfile.TemporaryDirectory() as work:
        bundle = build(args.target, None, Path(work) / "bundle")
        with LLM(bundle.path, max_batch_size=1, threads=args.threads) as llm:
            methods: dict[str, Callable[[list[int]], tuple[list[int], float, Statistics | None]]] = {
                "plain": lambda ids: run(llm, ids, args.max_tokens, 1)
            }
            for n in lengths:
                methods[f"draft {n}"] = lambda ids, n=n: run(llm, ids, args.max_tokens, n)  # type: ignore[misc]
            methods["transformers"] = transformers_method(args, bundle.manifest["eos_token_ids"])
            totals = measure(llm, methods, args.prompts, args.repeats)
    report(totals, lengths, args)


def run(llm: LLM, ids: list[int], max_tokens: int, length: int) -> tuple[list[int], float, Statistics]:
    done = llm.generate(ids, SamplingParams(max_tokens=max_tokens), speculate=length > 1, block_length=length)
    return done.token_ids, done.statistics.generation_time, done.statistics


def transformers_method(
    args: argparse.Namespace, eos: list[int]
) -> Callable[[list[int]], tuple[list[int], float, None]]:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.generation.streamers import BaseStreamer
    from transformers.utils.quantization_config import Mxfp4Config

    torch.set_num_threads(args.threads)
    source = resolve_pair(args.target)[0].directory
    packed = "quantization_config" in json.loads((source / "config.json").read_text())
    model: Any = AutoModelForCausalLM.from_pretrained(
        source,
        dtype=torch.float32,
        **({"quantization_config": Mxfp4Config(dequantize=True)} if packed else {}),
    )

    class Clock(BaseStreamer):
        """Records the time of the first token. The first call of `put` gets the prompt."""

        def __init__(self) -> None:
            self.calls, self.first = 0, 0.0

        def put(self, value: object) -> None:
            self.calls += 1
            if self.calls == 2:
                self.first = time.perf_counter()

        def end(self) -> None:
            pass

    def method(ids: list[int]) -> tuple[list[int], float, None]:
        clock = Clock()
        prompt = torch.tensor([ids])
        with torch.inference_mode():
            out = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=args.max_tokens,
                do_sample=False,
                eos_token_id=eos,
                pad_token_id=eos[0],
                streamer=clock,
            )
        return out[0, len(ids) :].tolist(), time.perf_counter() - clock.first, None

    return method


def measure(llm: LLM, methods: dict[str, Any], prompts: int, repeats: int) -> dict[str, dict[str, Total]]:
    totals = {name: {category: Total() for category in CATEGORIES} for name in methods}
    for category in CATEGORIES:
        for prompt in read_prompts(SHIPPED_PROMPTS / f"{category}.jsonl", limit=prompts):
            assert not isinstance(prompt.content, str)  # the shipped prompts are chats
            ids = llm.chat_prompt(prompt.content)
            best: dict[str, tuple[list[int], float, Statistics | None]] = {}
            for method in methods.values():
                method(ids)
            for _ in range(repeats):
                for name, method in methods.items():
                    found = method(ids)
                    if name not in best or found[1] < best[name][1]:
                        best[name] = found
            for name, (tokens, seconds, statistics) in best.items():
                total = totals[name][category]
                total.seconds += seconds
                total.tokens += len(tokens) - 1  # the first one belongs to prefill
                total.outputs.append(tokens)
                if statistics is not None:
                    total.statistics.append(statistics)
    return totals


def report(totals: dict[str, dict[str, Total]], lengths: list[int], args: argparse.Namespace) -> None:
    plain = totals["plain"]
    same = {name: all(by[c].outputs == plain[c].outputs for c in CATEGORIES) for name, by in totals.items()}
    versions = {name: version(name) for name in ("dflash-trt", "onnxruntime", "torch", "transformers")}
    print(f"{cpu()}, {args.threads} threads; " + ", ".join(f"{k} {v}" for k, v in versions.items()))
    print(f"{args.prompts} prompts per category, at most {args.max_tokens} tokens, temperature 0, batch 1\n")
    print(f"{'tokens/s':<14}" + "".join(f"{c:>20}" for c in CATEGORIES) + f"{'same tokens':>14}")
    rows: dict[str, Any] = {}
    for name, by in totals.items():
        cells = []
        rows[name] = {}
        for c in CATEGORIES:
            total, ratio = by[c], by[c].rate / plain[c].rate
            row: dict[str, Any] = {"tokens_per_second": round(total.rate, 1), "ratio": round(ratio, 3)}
            text = f"{total.rate:.0f} ({ratio:.2f}x)"
            if name.startswith("draft"):
                merged = Statistics.merge(total.statistics)
                passes = merged.draft_time + merged.verify_time + merged.host_time
                row |= {
                    "mean_acceptance_length": round(merged.mean_acceptance_length, 3),
                    "draft_share": round(merged.draft_time / passes, 3),
                    "verify_share": round(merged.verify_time / passes, 3),
                    "host_share": round(merged.host_time / passes, 3),
                    "round_us": round(1e6 * passes / max(merged.num_drafts, 1)),
                }
                text += f" {merged.mean_acceptance_length:.2f}"
            rows[name][c] = row
            cells.append(text)
        print(
            f"{name:<14}" + "".join(f"{cell:>20}" for cell in cells) + f"{'yes' if same[name] else 'NO':>14}"
        )
    print("\n(ratio to plain decoding) mean acceptance length\n")
    print(f"{'round':<14}{'us':>8}{'draft':>8}{'verify':>8}{'host':>8}   math")
    for n in lengths:
        r = rows[f"draft {n}"]["math"]
        shares = "".join(f"{r[f'{part}_share']:>8.1%}" for part in ("draft", "verify", "host"))
        print(f"{f'draft {n}':<14}{r['round_us']:>8}{shares}")
    print(
        json.dumps(
            {
                "target": args.target,
                "cpu": cpu(),
                "threads": args.threads,
                "versions": versions,
                "same_tokens": same,
                "methods": rows,
            }
        )
    )


def cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown CPU"
    )


if __name__ == "__main__":
    main()
