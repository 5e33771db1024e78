"""`dflash-trt train drafter`: train, measure, keep the best."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from dflash_trt.building.progress import Display, progress_display
from dflash_trt.checkpoint.draft_vocabulary import LEAST
from dflash_trt.cli.options import add_target, at_least, each, share
from dflash_trt.cli.output import byte_count
from dflash_trt.cli.train.extra import check_installed
from dflash_trt.cli.train.questions import add_questions
from dflash_trt.extras import install

SUMMARY = "train a drafter and measure it regularly"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the step."""
    add_target(parser, "the model that the drafter is for")
    parser.add_argument(
        "--data", type=Path, required=True, metavar="FILE", help="the answers of `train regenerate`"
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="directory of the run; it is continued"
    )
    number: dict[str, Any] = {"type": at_least(1), "metavar": "N"}
    parser.add_argument("--steps", required=True, help="number of steps", **number)
    parser.add_argument(
        "--seed", type=at_least(0), default=0, help="of weights, order and anchors (default: 0)"
    )
    parser.add_argument(
        "--features", type=Path, metavar="DIR", help="keep the target's features here (default: nowhere)"
    )
    parser.add_argument(
        "--save-every", default=50, help="steps between saved states (default: %(default)s)", **number
    )
    parser.add_argument(
        "--evaluate-every", type=at_least(0), default=500, metavar="N",
        help="steps between evaluations; 0: only before the first step and at the end (default: %(default)s)",
    )  # fmt: skip
    add_questions(parser, "a tenth of those of --data, whose answers are not trained on")
    _add_drafter(parser.add_argument_group("drafter"))
    _add_recipe(parser.add_argument_group("recipe"))


def _add_drafter(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--from", dest="checkpoint", metavar="NAME_OR_PATH",
        help="a drafter to continue from (default: a new one)",
    )  # fmt: skip
    group.add_argument(
        "--kind", choices=["dflash", "dflash2"],
        help="default: dflash, or as --from; dflash2 can begin with a DFlash drafter",
    )  # fmt: skip
    group.add_argument(
        "--draft-vocabulary", type=at_least(LEAST), metavar="N",
        help="draft only so many tokens: the end tokens and the most frequent ones of the answers (default: all)",
    )  # fmt: skip
    group.add_argument("--layers", type=at_least(1), metavar="N", help="layers of a new drafter (default: 2)")
    group.add_argument(
        "--taps", type=each(at_least(0)), metavar="L,...",
        help="tapped target layers of a new drafter (default: 5, spread evenly)",
    )  # fmt: skip
    group.add_argument(
        "--block-size", type=at_least(2), metavar="K",
        help="tokens of a block, including the anchor (default: 8, or as --from)",
    )  # fmt: skip
    group.add_argument(
        "--mask-token-id", type=at_least(0), metavar="ID",
        help="mask token of a new drafter (default: an unused token)",
    )  # fmt: skip


def _add_recipe(group: argparse._ArgumentGroup) -> None:
    """The fields of `Recipe` that are options."""
    number: dict[str, Any] = {"type": at_least(1), "metavar": "N"}
    group.add_argument("--batch-size", default=8, help="answers per step and process (default: 8)", **number)
    group.add_argument(
        "--anchors", default=64, help="limit of blocks per answer and step (default: 64)", **number
    )
    group.add_argument(
        "--max-length", type=at_least(4), default=1024, metavar="N",
        help="limit of tokens of prompt and answer (default: 1024)",
    )  # fmt: skip
    group.add_argument(
        "--head-tokens", type=at_least(0), default=0, metavar="N",
        help="tokens whose logits the loss has, drawn for each step; 0: all (default: 0)",
    )  # fmt: skip
    group.add_argument(
        "--distill", type=share, default=0.0, metavar="SHARE",
        help="share of the loss that compares with the target's own distribution, 0 to 1 (default: 0)",
    )  # fmt: skip
    group.add_argument(
        "--learning-rate", type=float, default=6e-4, metavar="R", help="the highest (default: 0.0006)"
    )
    group.add_argument(
        "--optimizer", choices=["adamw", "muon"], default="adamw", help="of the matrices (default: adamw)"
    )
    group.add_argument(
        "--weighting", choices=["dpace", "decay"], default="dpace",
        help="weights of the loss over a block (default: dpace)",
    )  # fmt: skip
    group.add_argument(
        "--shorter", type=share, default=0.2, metavar="SHARE", help="share of shortened blocks (default: 0.2)"
    )


def run(args: argparse.Namespace) -> int:
    """Train, and print what came of it."""
    check_installed()
    from dflash_trt.building.sources import resolve
    from dflash_trt.reports import plots
    from dflash_trt.training.evaluation import average, read_history
    from dflash_trt.training.loop import Recipe
    from dflash_trt.training.run import Design
    from dflash_trt.training.run import run as train

    given = {name: value for name, value in vars(args).items() if name != "held_out"}  # there a digest
    recipe = Recipe(**{each.name: given[each.name] for each in fields(Recipe) if each.name in given})
    design = Design(
        checkpoint=resolve(args.checkpoint, "drafter").directory if args.checkpoint else None,
        kind=args.kind,
        draft_vocabulary=args.draft_vocabulary,
        layers=args.layers,
        taps=args.taps,
        block_size=args.block_size,
        mask_token_id=args.mask_token_id,
    )

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
            features=args.features,
            held_out=args.held_out,
            save_every=args.save_every,
            evaluate_every=args.evaluate_every,
            report=report,
        )
    history = read_history(args.out / "evaluation.jsonl")
    lengths = {entry["step"]: average(entry["figures"]) for entry in history}
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
