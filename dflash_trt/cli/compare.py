"""`dflash-trt compare`: several drafters for one target, side by side."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from dflash_trt.building.progress import progress_display
from dflash_trt.cli.options import at_least
from dflash_trt.cli.output import print_json, print_table

SUMMARY = "compare drafters of one target"
DESCRIPTION = """\
Decode the same prompts with each drafter, one prompt at a time on ONNX Runtime. The drafters take turns at each prompt.
The tables show the tokens per pass, the milliseconds of a draft and of a verification, and the tokens per second. Whole
blocks show what a drafter can do; the adaptive length drafts less where that is faster. The tokens must be those of
plain decoding.
"""
EXAMPLES = """\
examples:
  dflash-trt compare --target smollm2-135m --drafter smollm2-135m --drafter runs/eagle3/best
  dflash-trt compare --target tiny --drafter tiny --limit 8 --temperature 1 --json
  dflash-trt compare --target PATH --drafter A --drafter B --prompts prompts.jsonl --svg drafters.svg

A prompt file is as `dflash-trt verify --help` describes it.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--target", required=True, metavar="NAME_OR_PATH", help="the model that decides the tokens"
    )
    parser.add_argument(
        "--drafter",
        required=True,
        action="append",
        metavar="NAME_OR_PATH",
        help="a drafter for it; give the option once for each",
    )
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE", help="a JSONL file (default: the shipped natural prompts)"
    )
    parser.add_argument(
        "--limit", type=at_least(0), default=32, metavar="N", help="number of prompts; 0: all (default: 32)"
    )
    parser.add_argument(
        "--max-tokens", type=at_least(2), default=96, metavar="N", help="tokens per prompt (default: 96)"
    )
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="default: 0")
    parser.add_argument(
        "--threads", type=at_least(1), metavar="N", help="CPU threads per pass (default: all)"
    )
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw acceptance and speed")
    parser.add_argument("--json", action="store_true", help="print all figures as JSON, and no table")


def run(args: argparse.Namespace) -> int:
    from tempfile import TemporaryDirectory

    from dflash_trt.prompts import natural_prompts
    from dflash_trt.reports.comparison import categories_of, chart_of, compare, rows_of

    prompts = natural_prompts(args.prompts, args.limit)
    with TemporaryDirectory(prefix="dflash-trt-") as work, progress_display() as progress:
        result = compare(
            args.target,
            args.drafter,
            prompts,
            Path(work),
            max_tokens=args.max_tokens,
            temperature=args.temperature,
            threads=args.threads,
            progress=progress,
        )
    if args.svg:
        args.svg.write_text(chart_of(result), encoding="utf-8")
        print(f"drew {args.svg}", file=sys.stderr)
    if args.json:
        print_json(result)
    else:
        same = "all equal" if result["same_tokens"] else "DIFFERENT"
        print(result["processor"])
        print(f"{len(prompts)} prompts, at most {args.max_tokens} tokens each; tokens: {same}")
        print_table(rows_of(result), heading=True)
        print()
        print("tokens per pass, in whole blocks")
        print_table(categories_of(result), heading=True)
    return 0 if result["same_tokens"] else 1
