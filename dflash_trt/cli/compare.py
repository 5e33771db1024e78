"""`dflash-trt compare`: several drafters for one target, side by side."""

from __future__ import annotations

import argparse
from pathlib import Path

from dflash_trt.building.progress import progress_display
from dflash_trt.cli.options import (
    add_json,
    add_limit,
    add_prompts,
    add_target,
    add_threads,
    at_least,
    each,
    option,
)
from dflash_trt.cli.output import print_json, print_table, write_chart

SUMMARY = "compare drafters of one target"
DESCRIPTION = """\
Decode the same prompts with each drafter, one prompt at a time on ONNX Runtime. The drafters take turns at each prompt.
The tables show the tokens per pass, the milliseconds of a draft and of a verification, and the tokens per second. Whole
blocks show what a drafter can do; the adaptive length drafts less where that is faster. With --tree-width, draft trees
are measured too. The tokens must be those of plain decoding.
"""
EXAMPLES = """\
examples:
  dflash-trt compare --target smollm2-135m --drafter smollm2-135m --drafter runs/eagle3/best
  dflash-trt compare --target tiny --drafter tiny --limit 8 --temperatures 0,1 --json
  dflash-trt compare --target tiny --drafter tiny --limit 8 --tree-width 4 --tree-nodes 12
  dflash-trt compare --target PATH --drafter A --drafter B --prompts prompts.jsonl --svg drafters.svg

A prompt file is as `dflash-trt verify --help` describes it.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The target, its drafters, how the prompts are decoded, and where the work is kept."""
    add_target(parser)
    option(parser, "--drafter", "NAME_OR_PATH", str, "a drafter for it; give the option once for each",
           required=True, action="append")  # fmt: skip
    add_prompts(parser, "shipped natural")
    add_limit(parser, 32)
    option(parser, "--max-tokens", "N", at_least(2), "tokens per prompt", 96)
    option(parser, "--temperatures", "T,...", each(float), default=[0.0])
    option(parser, "--tree-width", "W", at_least(2),
           "compare with draft trees too, from W candidates for each place (default: chains only)")  # fmt: skip
    option(parser, "--tree-nodes", "N", at_least(2),
           "with --tree-width: nodes of a tree, beside the adaptive number", 16)  # fmt: skip
    add_threads(parser)
    option(parser, "--work", "DIR", Path,
           "keep the bundles and the answers here; the same command continues after them (default: keep nothing)"
    )  # fmt: skip
    option(parser, "--seconds", "S", at_least(1),
           "begin no further prompt after S seconds of decoding; with --work, go on another time")  # fmt: skip
    option(parser, "--svg", "FILE", Path, "draw acceptance and speed at the first temperature")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Decode with every drafter and print the tables. Returns 1 if tokens differ."""
    from contextlib import ExitStack
    from math import inf

    from dflash_trt.files.disk import temporary_folder
    from dflash_trt.prompts import natural_prompts
    from dflash_trt.reports import charts
    from dflash_trt.reports.comparison import categories_of, chart_of, compare, rows_of

    charts.check(args.svg)
    prompts = natural_prompts(args.prompts, args.limit)
    with ExitStack() as stack, progress_display() as progress:
        if args.work is None:
            work = stack.enter_context(temporary_folder(prefix="dflash-trt-"))
        else:
            (work := args.work).mkdir(parents=True, exist_ok=True)
        result = compare(
            args.target,
            args.drafter,
            prompts,
            work,
            max_tokens=args.max_tokens,
            temperatures=list(dict.fromkeys(args.temperatures)),
            tree_width=args.tree_width,
            tree_nodes=args.tree_nodes if args.tree_width else 0,
            threads=args.threads,
            seconds=inf if args.seconds is None else args.seconds,
            progress=progress,
        )
    if args.svg:
        write_chart(args.svg, chart_of(result))
    if args.json:
        print_json(result)
    else:
        same = "all equal" if result["same_tokens"] else "DIFFERENT"
        print(result["processor"])
        print(f"{result['prompts']} prompts, at most {args.max_tokens} tokens each; tokens: {same}")
        for run in result["runs"]:
            print(f"\ntemperature {run['temperature']:g}")
            print_table(rows_of(run), heading=True)
            print("\ntokens per pass")
            print_table(categories_of(run), heading=True)
    return 0 if result["same_tokens"] else 1
