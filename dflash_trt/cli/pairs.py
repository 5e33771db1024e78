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
    rows = [
        (
            pair.name,
            pair.target_repo or "shipped",
            pair.drafter_repo or "shipped",
            str(pair.block_size),
            pair.note,
        )
        for pair in PAIRS
    ]
    print_table([("name", "target", "drafter", "block", "note"), *rows])
    return 0
