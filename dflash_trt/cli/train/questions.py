"""Options of the prompts that a drafter is measured with."""

from __future__ import annotations

import argparse
from pathlib import Path

from dflash_trt.cli.options import add_limit, at_least


def add_questions(parser: argparse.ArgumentParser, default: str) -> None:
    """`default`: the prompts without --held-out."""
    parser.add_argument(
        "--held-out", type=Path, metavar="FILE", help=f"prompts to measure with (default: {default})"
    )
    add_limit(parser, 32)
    parser.add_argument(
        "--eval-tokens",
        type=at_least(2),
        default=96,
        metavar="N",
        help="limit of tokens per answer (default: 96)",
    )
