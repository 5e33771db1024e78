"""Options of the prompts that a drafter is measured with."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from dflash_trt.cli.options import at_least


def add_questions(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--held-out",
        type=Path,
        metavar="FILE",
        help="prompts to measure with (default: the shipped natural ones)",
    )
    parser.add_argument(
        "--limit", type=at_least(0), default=32, metavar="N", help="number of prompts; 0: all (default: 32)"
    )
    parser.add_argument(
        "--eval-tokens",
        type=at_least(2),
        default=96,
        metavar="N",
        help="limit of tokens per answer (default: 96)",
    )


def questions_of(args: argparse.Namespace, temperature: float = 0.0) -> Any:
    from dflash_trt.prompts import natural_prompts
    from dflash_trt.training.evaluation import Questions

    return Questions(natural_prompts(args.held_out, args.limit), args.eval_tokens, temperature)
