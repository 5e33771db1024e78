"""`dflash-trt pairs`: the pairs with a name, and the published drafters."""

from __future__ import annotations

import argparse
import dataclasses

from dflash_trt.cli.options import add_json
from dflash_trt.cli.output import print_json, print_table

SUMMARY = "list the known pairs, and published drafters"
DESCRIPTION = (
    "List the target and drafter pairs that `build --target` knows by name, and the published drafters with kind, "
    "target and licence. `build --drafter REPOSITORY` takes any that is read."
)
EXAMPLES = """\
examples:
  dflash-trt pairs
  dflash-trt pairs --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from dflash_trt.checkpoint.catalogue import PAIRS
    from dflash_trt.checkpoint.published import PUBLISHED

    if args.json:
        drafters = [
            {**dataclasses.asdict(drafter), "publisher": drafter.publisher, "pair": _pair(drafter.repository)}
            for drafter in PUBLISHED
        ]
        print_json({"pairs": [dataclasses.asdict(pair) for pair in PAIRS], "drafters": drafters})
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
    print()
    published = []
    for drafter in PUBLISHED:
        kind = drafter.kind if drafter.read else f"{drafter.kind}, not read"
        published += [(drafter.repository, kind, drafter.licence), (f"  for {drafter.target}", "", "")]
    print_table([("published drafter", "kind", "licence"), *published], heading=True)
    return 0


def _pair(repository: str) -> str | None:
    """The name of the pair that has this drafter."""
    from dflash_trt.checkpoint.catalogue import PAIRS

    return next((pair.name for pair in PAIRS if pair.drafter_repo == repository), None)
