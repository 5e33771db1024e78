"""`dflash-trt inspect`: what a bundle or a checkpoint is."""

from __future__ import annotations

import argparse
from pathlib import Path

from dflash_trt.cli.output import byte_count, print_json, print_table

SUMMARY = "show what a bundle or a checkpoint is"
DESCRIPTION = "Show what a bundle or a checkpoint directory is: architecture, taps, block, parameters, bytes."
EXAMPLES = """\
examples:
  dflash-trt inspect bundles/tiny
  dflash-trt inspect checkpoints/drafter --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, metavar="PATH", help="a bundle, a target or a drafter directory")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    from dflash_trt.inspection import inspect

    found = inspect(args.path)
    if args.json:
        print_json(found)
    else:
        files = found.pop("files")
        rows = [(name.replace("_", " "), _show(name, value)) for name, value in found.items()]
        rows += [
            ("" if i else "files", f"{name}  {byte_count(size)}")
            for i, (name, size) in enumerate(files.items())
        ]
        print_table(rows)
    return 0


def _show(name: str, value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_show(name, item)}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, int) and name.startswith("weight_bytes"):
        return byte_count(value)
    if isinstance(value, int) and name == "parameters":
        return f"{value:,}"
    return str(value)
