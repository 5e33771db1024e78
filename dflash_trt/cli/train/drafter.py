"""`dflash-trt train drafter`: train, measure, keep the best."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from dflash_trt.building.progress import counted_display
from dflash_trt.cli.options import at_least, each, share
from dflash_trt.cli.output import byte_count
from dflash_trt.cli.train.extra import check_installed
from dflash_trt.cli.train.questions import add_questions
from dflash_trt.extras import install

SUMMARY = "train a drafter and measure it regularly"


_NUMBER = {"metavar": "N"}
# Option, and add_argument's arguments. A default other than None ends the help.
_OPTIONS: dict[str, dict[str, Any]] = {
    "--target": {"required": True, "metavar": "NAME_OR_PATH", "help": "the model that the drafter is for"},
    "--data": {
        "type": Path,
        "required": True,
        "metavar": "FILE",
        "help": "the target's answers, from `train regenerate`",
    },
    "--out": {
        "type": Path,
        "required": True,
        "metavar": "DIR",
        "help": "directory of the run: checkpoints, state, log and curve",
    },
    "--steps": {"type": at_least(1), "required": True, **_NUMBER, "help": "number of steps"},
    "--from": {
        "dest": "checkpoint",
        "metavar": "NAME_OR_PATH",
        "help": "a drafter to continue from (default: a new one)",
    },
    "--kind": {
        "choices": ["dflash", "dflash2", "eagle3"],
        "help": "kind of the drafter (default: dflash, or as --from); dflash2 can begin with a DFlash drafter",
    },
    "--draft-vocabulary": {
        "type": at_least(16),
        **_NUMBER,
        "help": "tokens of the head of an EAGLE-3 drafter: the most frequent of the answers (default: 8192)",
    },
    "--layers": {"type": at_least(1), **_NUMBER, "help": "layers of a new drafter (default: 2)"},
    "--taps": {
        "type": each(at_least(0)),
        "metavar": "L,...",
        "help": "tapped target layers of a new drafter (default: 5, spread evenly)",
    },
    "--block-size": {
        "type": at_least(2),
        "metavar": "K",
        "help": "tokens of a block, including the anchor (default: 8, or as --from)",
    },
    "--mask-token-id": {
        "type": at_least(0),
        "metavar": "ID",
        "help": "mask token of a new drafter (default: an unused token)",
    },
    "--batch-size": {"type": at_least(1), "default": 8, **_NUMBER, "help": "answers per step and process"},
    "--anchors": {
        "type": at_least(1),
        "default": 64,
        **_NUMBER,
        "help": "limit of blocks per answer and step",
    },
    "--max-length": {
        "type": at_least(4),
        "default": 1024,
        **_NUMBER,
        "help": "limit of tokens of prompt and answer",
    },
    "--head-tokens": {
        "type": at_least(0),
        "default": 0,
        **_NUMBER,
        "help": "tokens whose logits the loss has, drawn for each step; 0: all",
    },
    "--distill": {
        "type": share,
        "default": 0.0,
        "metavar": "SHARE",
        "help": "share of the target's own distribution in what a row shall predict, 0 to 1",
    },
    "--learning-rate": {"type": float, "default": 6e-4, "metavar": "R", "help": "highest learning rate"},
    "--optimizer": {"choices": ["adamw", "muon"], "default": "adamw", "help": "of the matrices"},
    "--weighting": {
        "choices": ["dpace", "decay"],
        "default": "dpace",
        "help": "weights of the loss over a block",
    },
    "--shorter": {"type": share, "default": 0.2, "metavar": "SHARE", "help": "share of shortened blocks"},
    "--seed": {"type": at_least(0), "default": 0, "help": "seed of weights, order and anchors"},
    "--features": {
        "type": Path,
        "metavar": "DIR",
        "help": "keep the target's features here (default: compute them each time)",
    },
    "--save-every": {"type": at_least(1), "default": 50, **_NUMBER, "help": "steps between saved states"},
    "--evaluate-every": {
        "type": at_least(0),
        "default": 500,
        **_NUMBER,
        "help": "steps between evaluations; 0: only before the first step and at the end",
    },
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for option, arguments in _OPTIONS.items():
        given = dict(arguments)
        if "default" in given:
            given["help"] += f" (default: {given['default']})"
        parser.add_argument(option, **given)
    add_questions(parser, "a tenth of those of --data, whose answers are not trained on")


def run(args: argparse.Namespace) -> int:
    check_installed()
    from dflash_trt.building.sources import resolve
    from dflash_trt.reports import charts
    from dflash_trt.training.evaluation import average, read_history
    from dflash_trt.training.loop import Recipe
    from dflash_trt.training.run import Design
    from dflash_trt.training.run import run as train

    given = {name: value for name, value in vars(args).items() if name != "held_out"}  # there a digest
    recipe = Recipe(**{each.name: given[each.name] for each in fields(Recipe) if each.name in given})
    design = Design(
        checkpoint=resolve(args.checkpoint, "drafter").directory if args.checkpoint else None,
        kind=args.kind,
        vocabulary=args.draft_vocabulary,
        layers=args.layers,
        taps=args.taps,
        block_size=args.block_size,
        mask_token_id=args.mask_token_id,
    )

    if not charts.available():
        print(f"there will be no curve, as matplotlib is not installed: {install('charts')}", file=sys.stderr)
    with counted_display("train", "steps") as display:

        def report(line: dict[str, Any]) -> None:
            if "measuring" in line:
                display.say(f"step {line['step']}: measuring on {line['measuring']} held-out prompts")
            elif "acceptance_length" in line:
                display.say(f"step {line['step']}: {line['acceptance_length']:.3f} tokens per pass")
            else:
                note = f"loss {line['loss']:.3f}, {byte_count(line['memory_bytes'])}"
                display.update(line["step"], args.steps, note)

        ended = train(
            resolve(args.target, "target").directory,
            args.target,
            args.data,
            args.out,
            design,
            recipe,
            features=args.features,
            held_out=args.held_out,
            save_every=args.save_every,
            evaluate_every=args.evaluate_every,
            report=report,
        )
    lengths = {
        entry["step"]: average(entry["figures"]) for entry in read_history(args.out / "evaluation.jsonl")
    }
    best = max(lengths, key=lambda step: lengths[step])
    print(
        f"{args.out}: on the prompts of held_out.jsonl {lengths[0]:.3f} tokens per pass before the first step, and at "
        f"best {lengths[best]:.3f}, after step {best}"
    )
    if ended < args.steps:
        print(f"{args.out}: ended after step {ended}, as asked; the same command goes on from there")
        return 1
    curve = ", curve in acceptance.svg" if charts.available() else ""
    print(f"{args.out}: newest weights in checkpoint/, best weights in best/{curve}")
    return 0
