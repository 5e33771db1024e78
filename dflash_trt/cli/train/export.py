"""`dflash-trt train export`: a drafter in a layout that other programs read."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from dflash_trt.cli.options import add_target, option
from dflash_trt.cli.train.common import check_installed

SUMMARY = "write a drafter for vLLM, SGLang, TensorRT-LLM and others"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target(parser, "the model that the drafter is for")
    option(
        parser,
        "--drafter",
        "DIR",
        Path,
        "a drafter of `train drafter`, such as runs/mine/best",
        required=True,
    )
    parser.add_argument("--format", choices=["zlab", "speculators"], required=True,
                        help="zlab: what vLLM, SGLang and TensorRT-LLM read; speculators: what vLLM reads with a draft "
                        "vocabulary")  # fmt: skip
    option(parser, "--out", "DIR", Path, "made, or replaced when it is whole", required=True)


def run(args: argparse.Namespace) -> int:
    check_installed()
    from dflash_trt.building.sources import resolve
    from dflash_trt.training.export import export

    target = resolve(args.target, "target").directory
    for warning in export(args.drafter, target, args.target, args.out, args.format):
        print(f"warning: {warning}", file=sys.stderr)
    print(f"{args.out}: a drafter in the layout of {args.format}; README.md has the commands that run it")
    return 0
