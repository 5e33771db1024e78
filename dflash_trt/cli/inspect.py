"""`dflash-trt inspect`: describe a bundle or a checkpoint."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from dflash_trt.cli.options import add_common, option
from dflash_trt.cli.output import byte_count, print_json, print_table

SUMMARY = "describe a bundle or a checkpoint"
DESCRIPTION = "Describe a bundle or a checkpoint directory: architecture, taps, block, parameters, bytes."
EXAMPLES = """\
examples:
  dflash-trt inspect bundles/tiny
  dflash-trt inspect checkpoints/drafter --json
"""


_BYTES = ("files", "size", "weight_bytes", "weight_bytes_by_dtype", "scratch_bytes")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option(parser, "path", "PATH", Path, "a bundle, a target or a drafter directory")
    add_common(parser, "--json")


def run(args: argparse.Namespace) -> int:
    from dflash_trt.reports.inspection import inspect

    description = inspect(args.path)
    if args.json:
        print_json(description)
    else:
        print_table([row for name, value in description.items() for row in _rows(name, value)])
    return 0


def _rows(name: str, value: object) -> Iterator[tuple[str, str]]:
    label = name.replace("_", " ")
    if not isinstance(value, dict):
        yield label, _show(name, value)
        return
    width = max((len(str(key)) for key in value), default=0)
    for key, item in value.items():
        yield label, f"{key:<{width}}  {_show(key if name in ('target', 'drafter') else name, item)}"
        label = ""


def _show(name: str, value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(
            f"{key} {_show(key if key in _BYTES else name, item)}" for key, item in value.items()
        )
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, str) and name.endswith("sha256"):
        return f"{value[:16]}..."  # --json has all of it
    if isinstance(value, int) and name in _BYTES:
        return byte_count(value)
    if isinstance(value, int) and name == "parameters":
        return f"{value:,}"
    if value is None:
        return "none" if name in ("quantization", "drafter") else "unknown"
    return str(value)
