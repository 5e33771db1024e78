"""`dflash-trt train drafter`: train, measure, keep the best."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from dflash_trt.building.progress import Display, progress_display
from dflash_trt.checkpoint.draft_vocabulary import LEAST
from dflash_trt.cli.options import add_target, at_least, each, option, share
from dflash_trt.cli.output import byte_count
from dflash_trt.cli.train.common import add_questions, check_installed
from dflash_trt.extras import install

SUMMARY = "train a drafter and measure it regularly"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target(parser, "the model that the drafter is for")
    option(parser, "--data", "FILE", Path, "the answers of `train regenerate`", required=True)
    option(parser, "--out", "DIR", Path, "directory of the run; it is continued", required=True)
    option(parser, "--steps", "N", at_least(1), "number of steps", required=True)
    option(parser, "--seed", "N", at_least(0), "of weights, order and anchors", 0)
    option(parser, "--save-every", "N", at_least(1), "steps between saved states", 50)
    option(parser, "--evaluate-every", "N", at_least(0),
           "steps between evaluations; 0: only before the first step and at the end", 500)  # fmt: skip
    add_questions(parser, "a tenth of those of --data, whose answers are not trained on")
    new = parser.add_argument_group("drafter")
    option(
        new,
        "--from",
        "NAME_OR_PATH",
        str,
        "a drafter to continue from (default: a new one)",
        dest="checkpoint",
    )
    option(new, "--kind", None, str, "default: dflash, or as --from; dflash2 can begin with a DFlash drafter",
           choices=["dflash", "dflash2"])  # fmt: skip
    option(new, "--draft-vocabulary", "N", at_least(LEAST),
           "draft only so many tokens: the end tokens and the most frequent ones of the answers (default: all)"
    )  # fmt: skip
    option(new, "--layers", "N", at_least(1), "layers of a new drafter (default: 2)")
    option(
        new,
        "--taps",
        "L,...",
        each(at_least(0)),
        "tapped target layers of a new drafter (default: 5, spread evenly)",
    )
    option(
        new, "--block-size", "K", at_least(2), "tokens of a block, with the anchor (default: 8, or as --from)"
    )
    option(
        new, "--mask-token-id", "ID", at_least(0), "mask token of a new drafter (default: an unused token)"
    )
    recipe = parser.add_argument_group("recipe")
    option(recipe, "--batch-size", "N", at_least(1), "answers per step and process", 8)
    option(recipe, "--anchors", "N", at_least(1), "limit of blocks per answer and step", 64)
    option(recipe, "--max-length", "N", at_least(4), "limit of tokens of prompt and answer", 1024)
    option(recipe, "--distill", "SHARE", share,
           "share of the loss that compares with the target's own distribution, 0 to 1", 0.0)  # fmt: skip
    option(recipe, "--learning-rate", "R", float, "the highest", 6e-4)


def run(args: argparse.Namespace) -> int:
    check_installed()
    from dflash_trt.building.sources import resolve
    from dflash_trt.reports import plots
    from dflash_trt.training.evaluation import average, read_history
    from dflash_trt.training.loop import Recipe
    from dflash_trt.training.run import Design
    from dflash_trt.training.run import run as train

    given = {name: value for name, value in vars(args).items() if name != "held_out"}  # there a digest
    recipe = Recipe(**{each.name: given[each.name] for each in fields(Recipe) if each.name in given})
    if args.checkpoint:
        given["checkpoint"] = resolve(args.checkpoint, "drafter").directory
    design = Design(**{each.name: given[each.name] for each in fields(Design)})
    if not plots.available():
        print(f"there will be no curve, as matplotlib is not installed: {install('plot')}", file=sys.stderr)
    with progress_display() as display:

        def report(line: dict[str, Any]) -> None:
            _report(display, line, args.steps)

        ended = train(
            resolve(args.target, "target").directory,
            args.target,
            args.data,
            args.out,
            design,
            recipe,
            held_out=args.held_out,
            save_every=args.save_every,
            evaluate_every=args.evaluate_every,
            report=report,
        )
    history = read_history(args.out / "evaluation.jsonl")
    lengths = {step: average(figures) for step, figures in history.items()}
    best = max(lengths, key=lambda step: lengths[step])
    print(
        f"{args.out}: on the prompts of held_out.jsonl {lengths[0]:.3f} tokens per pass before the first step, and at "
        f"best {lengths[best]:.3f}, after step {best}"
    )
    if ended < args.steps:
        print(f"{args.out}: ended after step {ended}, as asked; the same command continues from there")
        return 1
    curve = ", curve in acceptance.svg" if plots.available() else ""
    print(f"{args.out}: newest weights in checkpoint/, best weights in best/{curve}")
    return 0


def _report(display: Display, line: dict[str, Any], steps: int) -> None:
    """Show a line of the log: an evaluation that begins, one that has ended, or a step."""
    if "measuring" in line:
        display.say(f"step {line['step']}: measuring on {line['measuring']} held-out prompts")
    elif "acceptance_length" in line:
        display.say(f"step {line['step']}: {line['acceptance_length']:.3f} tokens per pass")
    else:
        note = f"loss {line['loss']:.3f}, {byte_count(line['memory_bytes'])}"
        display("train", line["step"], steps, f"step {line['step']}, {note}")
