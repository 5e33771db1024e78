"""`dflash-trt train evaluate`: measure a drafter on held-out prompts."""

from __future__ import annotations

import argparse

from dflash_trt.cli.options import add_json, add_target, option
from dflash_trt.cli.output import print_json, print_table
from dflash_trt.cli.train.common import add_questions
from dflash_trt.errors import UsageError

SUMMARY = "acceptance length of a drafter, by category and position in the block"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target(parser, "the model that the drafter is for")
    option(parser, "--drafter", "NAME_OR_PATH", str, "default: the target's known drafter")
    option(parser, "--draft-vocabulary", "FILE", str, "as of build: tokens that may be drafted, or all")
    option(parser, "--temperature", "T", float, default=0.0)
    add_questions(parser, "the shipped natural ones")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from dflash_trt.building.sources import find_sources
    from dflash_trt.files.disk import temporary_folder
    from dflash_trt.prompts import natural_prompts
    from dflash_trt.training.evaluation import Questions, measure

    target, drafter = find_sources(args.target, args.drafter, "copy")
    if drafter is None:
        raise UsageError(
            f"--target {args.target}: no drafter is known for it; give one with --drafter, or train one"
        )
    with temporary_folder(prefix="dflash-trt-") as work:
        questions = Questions(natural_prompts(args.held_out, args.limit), args.eval_tokens, args.temperature)
        figures = measure(target.directory, drafter.directory, questions, work, args.draft_vocabulary)
    if args.json:
        print_json(figures)
        return 0
    places = max(len(part["acceptance_by_place"]) for part in figures.values())
    rows = [["category", "tokens per pass", *(f"place {i}" for i in range(1, places + 1)), "passes"]]
    for category, part in figures.items():
        shares = [f"{share:.2f}" for share in part["acceptance_by_place"]]
        shares += [""] * (places - len(shares))
        rows.append([category, f"{part['acceptance_length']:.2f}", *shares, str(part["passes"])])
    print_table(rows)
    return 0
