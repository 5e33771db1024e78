"""`dflash-trt train`: train a drafter for your own target. Each step is a module of this folder."""

from __future__ import annotations

import argparse

from dflash_trt.cli.train import drafter, evaluate, export, regenerate
from dflash_trt.logs import LEVELS

SUMMARY = "train a drafter for a target, on the target's own answers"
DESCRIPTION = """\
Train a DFlash or DFlash2 drafter for any target that Transformers runs and this package builds.
`regenerate` lets the target answer prompts, `drafter` trains on the answers, `evaluate` measures a drafter, and
`export` writes it for other programs. The first two continue an interrupted call with the same arguments. They need
dflash-trt[train].
"""
EXAMPLES = """\
examples:
  dflash-trt train regenerate --target Qwen/Qwen3-4B --prompts prompts.jsonl --out answers.jsonl
  dflash-trt train regenerate --bundle bundles/tiny --prompts prompts.jsonl --out answers.jsonl
  dflash-trt train regenerate --server URL --model NAME --target PATH --prompts prompts.jsonl --out answers.jsonl
  dflash-trt train drafter --target Qwen/Qwen3-4B --data answers.jsonl --out runs/mine --steps 20000
  dflash-trt train drafter --target qwen3-4b --from z-lab/Qwen3-4B-DFlash-b16 --data answers.jsonl --out runs/tuned
  accelerate launch -m dflash_trt train drafter ...            # several GPUs or nodes
  dflash-trt train evaluate --target tiny --drafter runs/mine/best
  dflash-trt train export --target Qwen/Qwen3-4B --drafter runs/mine/best --format zlab --out drafter
"""

STEPS = {"regenerate": regenerate, "drafter": drafter, "evaluate": evaluate, "export": export}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    steps = parser.add_subparsers(title="steps", metavar="STEP", required=True)
    for name, module in STEPS.items():
        text = module.SUMMARY
        examples = [line for line in EXAMPLES.splitlines() if f" train {name} " in line]
        step = steps.add_parser(
            name,
            help=text,
            description=text[0].upper() + text[1:] + ".",
            epilog="\n".join(["examples:", *examples]),
        )
        module.add_arguments(step)
        step.add_argument(
            "--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error"
        )
        step.add_argument(
            "--log-level",
            choices=tuple(LEVELS),
            default=argparse.SUPPRESS,
            help="what is logged on standard error",
        )
        step.set_defaults(run_step=module.run, step_error=step.error)


def run(args: argparse.Namespace) -> int:
    code: int = args.run_step(args)
    return code
