"""`dflash-trt pairs`: the pairs with a name."""

from __future__ import annotations

import argparse
import dataclasses

from dflash_trt.cli.output import print_json, print_table

SUMMARY = "list the known pairs"
DESCRIPTION = "List the target and drafter pairs that `build --target` knows by name."
EXAMPLES = """\
examples:
  dflash-trt pairs
  dflash-trt pairs --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    from dflash_trt.checkpoint.catalogue import PAIRS

    if args.json:
        print_json([dataclasses.asdict(pair) for pair in PAIRS])
        return 0
    rows = []
    for pair in PAIRS:
        block = str(pair.block_size).rjust(len("block"))
        rows += [
            (pair.name, block, f"target   {pair.target_repo or 'comes with the package'}"),
            ("", "", f"drafter  {pair.drafter_repo or 'comes with the package'}"),
            ("", "", f"note     {pair.note}"),
        ]
    print_table([("name", "block", "checkpoints"), *rows], heading=True)
    return 0
