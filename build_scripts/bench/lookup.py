"""Drafts from the drafter, from the text itself and from both, on natural prompts and on such that copy, as a table.
Of a bundle without a drafter, drafts come from the text itself.

    python -m build_scripts.bench.lookup BUNDLE [BUNDLE ...] [--prompts 6] [--rounds 5] [--max-tokens 96]
    python -m build_scripts.bench.lookup FLOAT32 --methods chains trees auto --by-category --prompts 2    # draft trees

Each prompt is answered by all methods together: in turn, a few tokens each, so that a slow moment of the machine hits
all. There are as many `LLM`s as methods, and in each round a method has the next one, since one may be slower than
another for good. All must give the same tokens. A speed is that of the tokens after the first one, relative to plain
decoding of the same prompt in the same round. The table has the speed of all prompts together (the sum of median
times), the least prompt (the median of its rounds), and tokens per pass. Plain decoding goes twice: its second turn
shows what the clock cannot tell. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from build_scripts import harness
from dflash_trt import LLM, SamplingParams
from dflash_trt.decoding.results import Chunk
from dflash_trt.hardware import processor
from dflash_trt.prompts import SHIPPED_PROMPTS, read_prompts

METHODS: dict[str, dict[str, Any]] = {
    "plain": {"speculate": False},
    "plain again": {"speculate": False},
    "drafter": {"draft_source": "drafter"},
    "lookup": {"draft_source": "lookup"},
    "both": {"draft_source": "drafter,lookup"},
    # Of the drafter alone: chains, trees of 16 nodes, and whichever should be faster in a round.
    "chains": {"draft_source": "drafter", "tree_nodes": 0},
    "trees": {"draft_source": "drafter", "tree_nodes": 16},
    "auto": {"draft_source": "drafter"},
}
PLAIN = ["plain", "plain again"]
COPYING = "copying"
_TURN = 4  # tokens that a method decodes before the next one's turn


def main(argv: list[str] | None = None) -> int:
    """Print a table for each bundle. Returns 1 if methods differ in a token."""
    parser = harness.parser(__doc__)
    parser.add_argument("bundles", nargs="+", metavar="BUNDLE")
    parser.add_argument(
        "--prompts", type=int, default=6, help="of copying, and of all other categories together"
    )
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=["drafter", "lookup", "both"])
    parser.add_argument(
        "--by-category", action="store_true", help="so many prompts and a row for each category"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--threads", type=int)
    args = parser.parse_args(argv)
    chosen = prompts(args.prompts, by_category=args.by_category)
    print(processor())
    records, same = list[dict[str, Any]](), True
    for bundle in args.bundles:
        measured, equal = measure(bundle, chosen, args)
        table(bundle, measured)
        records += [{"bundle": bundle, **record} for record in measured]
        same = same and equal
    print(f"tokens of the methods: {'all equal' if same else 'DIFFERENT'}")
    print(json.dumps({"processor": processor(), "rounds": args.rounds, "records": records}))
    return 0 if same else 1


def prompts(count: int, *, by_category: bool = False) -> list[tuple[str, Any]]:
    """So many that copy, and as many of the other categories in turn, each with its kind; or as many of each."""
    files = sorted((SHIPPED_PROMPTS / "natural").glob("*.jsonl"))
    if by_category:
        return [(file.stem, asked) for file in files for asked in read_prompts(file, count)]
    others = [read_prompts(file, 0) for file in files if file.stem != COPYING]
    natural = [prompt for row in zip(*others, strict=True) for prompt in row]
    copying = read_prompts(SHIPPED_PROMPTS / "natural" / f"{COPYING}.jsonl", count)
    return [("natural", asked) for asked in natural[:count]] + [(COPYING, asked) for asked in copying]


@dataclass
class _Answer:
    """A method's answer to one prompt, and the seconds after the first token."""

    stream: Iterator[Chunk]
    seconds: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    passes: int = 0
    ended: bool = False

    def go_on(self, tokens: int) -> None:
        """Decode at least so many tokens, or to the end."""
        begin, end = perf_counter(), len(self.token_ids) + tokens
        while not self.ended and len(self.token_ids) < end:
            chunk = next(self.stream)
            self.token_ids += chunk.token_ids
            if chunk.statistics is not None:
                self.passes, self.ended = sum(chunk.statistics.block_length_histogram), True
                next(self.stream, None)
        self.seconds += perf_counter() - begin


def answer(llms: Mapping[str, LLM], ids: list[int], params: SamplingParams, first: int) -> dict[str, _Answer]:
    """The answers of all methods, who take turns."""
    answers = {name: _Answer(llm.stream(ids, params, **METHODS[name])) for name, llm in llms.items()}
    for running in answers.values():
        running.go_on(1)
        running.seconds = 0.0
    while going := [name for name, running in answers.items() if not running.ended]:
        for name in harness.rotated(going, first):
            answers[name].go_on(_TURN)
        first += 1
    return answers


def measure(
    bundle: str, chosen: list[tuple[str, Any]], args: argparse.Namespace
) -> tuple[list[dict[str, Any]], bool]:
    """For each prompt and method the median seconds after the first token; and whether all tokens are equal."""
    seconds = defaultdict[tuple[str, str, str], list[float]](list)
    counts = dict[tuple[str, str, str], tuple[int, int]]()
    params, equal = SamplingParams(max_tokens=args.max_tokens), True
    with ExitStack() as stack:

        def opened() -> LLM:
            return stack.enter_context(
                LLM(bundle, max_batch_size=1, prefix_cache_bytes=0, threads=args.threads)
            )

        everyone = [opened()]
        drafter = "drafter" in everyone[0].bundle.roles
        methods = PLAIN + [name for name in args.methods if drafter or name == "lookup"]
        everyone += [opened() for _ in methods[1:]]
        warming = len(methods)  # rounds in which each LLM learns what each method teaches it
        for number in range(warming + args.rounds):
            llms = dict(zip(methods, harness.rotated(everyone, number), strict=True))
            for place, (kind, prompt) in enumerate(chosen):
                ids = everyone[0].chat_prompt(prompt.content)
                answers = answer(llms, ids, params, number + place)
                equal = equal and len({tuple(reply.token_ids) for reply in answers.values()}) == 1
                for method, reply in answers.items():
                    counts[kind, prompt.id, method] = len(reply.token_ids) - 1, reply.passes
                    if number >= warming:
                        seconds[kind, prompt.id, method].append(reply.seconds)
    fields = ("kind", "prompt", "method", "seconds", "speed", "tokens", "passes")

    def speed(kind: str, prompt: str, times: list[float]) -> float:
        return median([a / b for a, b in zip(seconds[kind, prompt, "plain"], times, strict=True)])

    records = [
        dict(zip(fields, (*key, median(times), speed(*key[:2], times), *counts[key]), strict=True))
        for key, times in seconds.items()
        if counts[key][0] > 0
    ]
    return records, equal


def table(bundle: str, records: list[dict[str, Any]]) -> None:
    """Print speeds relative to plain decoding, with the least prompt, and tokens per pass."""
    plain = {record["prompt"]: record["seconds"] for record in records if record["method"] == "plain"}
    methods = [method for method in METHODS if any(r["method"] == method for r in records)][1:]
    rows = []
    for kind in dict.fromkeys(r["kind"] for r in records):
        cells = [kind]
        for method in methods:
            mine = [r for r in records if r["kind"] == kind and r["method"] == method]
            speed = sum(plain[r["prompt"]] for r in mine) / sum(r["seconds"] for r in mine)
            least = min(r["speed"] for r in mine)
            tokens = sum(r["tokens"] for r in mine) / sum(r["passes"] for r in mine)
            cells.append(f"{speed:.2f} (least {least:.2f}; {tokens:.2f} tokens a pass)")
        rows.append(cells)
    print(f"\n{Path(bundle).name}\n{harness.markdown(['', *methods], rows)}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
