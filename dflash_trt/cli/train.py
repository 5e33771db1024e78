"""`dflash-trt train`: train a drafter for your own target."""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dflash_trt.building.progress import Display, progress_display
from dflash_trt.cli.options import (
    DEBUG,
    LOG_LEVEL,
    add_common,
    add_fields,
    add_limit,
    add_target,
    at_least,
    fields_of,
    option,
)
from dflash_trt.cli.output import byte_count, print_json, print_table
from dflash_trt.errors import DFlashError, UsageError
from dflash_trt.extras import install
from dflash_trt.logs import LEVELS
from dflash_trt.training.recipe import AnswerSampling, Design, Recipe

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
  dflash-trt train drafter --target qwen3-4b --from qwen3-4b --data answers.jsonl --out runs/tuned --steps 5000
  accelerate launch -m dflash_trt train drafter ...            # several GPUs or nodes
  dflash-trt train evaluate --target tiny --drafter runs/mine/best
  dflash-trt train export --target Qwen/Qwen3-4B --drafter runs/mine/best --out drafter
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    steps = parser.add_subparsers(title="steps", metavar="STEP", required=True)
    for name, (text, add, run_step) in STEPS.items():
        examples = [line for line in EXAMPLES.splitlines() if f" train {name} " in line]
        step = steps.add_parser(
            name,
            help=text,
            description=text[0].upper() + text[1:] + ".",
            epilog="\n".join(["examples:", *examples]),
        )
        add(step)
        step.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=DEBUG)
        step.add_argument("--log-level", choices=tuple(LEVELS), default=argparse.SUPPRESS, help=LOG_LEVEL)
        step.set_defaults(run_step=run_step, step_error=step.error)


def run(args: argparse.Namespace) -> int:
    code: int = args.run_step(args)
    return code


def check_installed() -> None:
    """Raise DFlashError, with the command that installs it, if a package of the extra `train` is missing."""
    for name in ("accelerate", "safetensors", "torch", "transformers"):
        if find_spec(name) is None:
            raise DFlashError(f"{name} is not installed; training needs: {install('train')}")


def _add_questions(parser: argparse.ArgumentParser, default: str) -> None:
    """`default`: the prompts without --held-out."""
    option(parser, "--held-out", "FILE", Path, f"prompts to measure with (default: {default})")
    add_limit(parser, 32)
    option(parser, "--eval-tokens", "N", at_least(2), "limit of tokens per answer", 96)


def _add_regenerate(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    option(source, "--target", "NAME_OR_PATH", str,
           "the target, decoded here without a drafter; with --server: its tokenizer and template")  # fmt: skip
    option(source, "--bundle", "BUNDLE", str,
           "the target as a bundle, or a pair's name; decoded here without drafting")  # fmt: skip
    option(parser, "--server", "URL", str,
           "the base URL of a server with OpenAI's chat completions, which answers")  # fmt: skip
    option(parser, "--model", "NAME", str, "with --server: its name for the model")
    option(parser, "--prompts", "FILE", Path,
           "a JSONL file: id, category, and prompt or messages", required=True)  # fmt: skip
    option(parser, "--out", "FILE", Path, "a JSONL file of answers; it is continued", required=True)
    add_fields(parser, AnswerSampling)
    option(parser, "--concurrency", "N", at_least(1), "prompts answered at a time", 32)
    add_common(parser, "--threads")


def _regenerate(args: argparse.Namespace) -> int:
    if (args.server is None) != (args.model is None):
        args.step_error("--server and --model belong together")
    if args.server is not None and args.target is None:
        args.step_error("--server needs --target, for its tokenizer and template")
    from dflash_trt.building.sources import resolve
    from dflash_trt.files.disk import continued, temporary_folder
    from dflash_trt.prompts import read_prompts
    from dflash_trt.training.answers import read_answers, summary
    from dflash_trt.training.regenerate import regenerate_with_bundle, regenerate_with_server, target_bundle

    prompts = read_prompts(args.prompts, 0)
    sampling = AnswerSampling(**fields_of(args, AnswerSampling))
    target = None if args.target is None else resolve(args.target, "target").directory
    with progress_display() as display, continued(args.out), ExitStack() as opened:

        def report(done: int, of: int, tokens: int, seconds: float) -> None:
            display("answer", done, of, f"{done} prompts, {tokens / max(seconds, 1e-9):.0f} tokens/s")

        task: dict[str, Any] = {"concurrency": args.concurrency, "report": report}
        if args.server is not None and target is not None:
            regenerate_with_server(args.server, args.model, target, prompts, args.out, sampling, **task)
        else:
            bundle = args.bundle
            if target is not None:
                args.out.parent.mkdir(parents=True, exist_ok=True)
                work = opened.enter_context(
                    temporary_folder(prefix=f".{args.out.name}.", dir=args.out.parent)
                )
                bundle = target_bundle(target, work / "bundle")
            regenerate_with_bundle(bundle, prompts, args.out, sampling, threads=args.threads, **task)
    counts = summary(read_answers(args.out))
    print(
        f"{args.out}: {counts['answers']} answers of {counts['answer_tokens']} tokens, "
        f"{counts['ended']} of them complete"
    )
    return 0


def _add_drafter(parser: argparse.ArgumentParser) -> None:
    add_target(parser, "the model that the drafter is for")
    option(parser, "--data", "FILE", Path, "the answers of `train regenerate`", required=True)
    option(parser, "--out", "DIR", Path, "directory of the run; it is continued", required=True)
    option(parser, "--evaluate-every", "N", at_least(0),
           "steps between evaluations; 0: only before the first step and at the end", 500)  # fmt: skip
    _add_questions(parser, "a tenth of those of --data, whose answers are not trained on")
    add_fields(parser.add_argument_group("drafter"), Design)
    add_fields(parser.add_argument_group("recipe"), Recipe)


def _drafter(args: argparse.Namespace) -> int:
    check_installed()
    from dflash_trt.building.sources import resolve
    from dflash_trt.files.disk import continued
    from dflash_trt.reports import plots
    from dflash_trt.training.evaluation import average, read_history
    from dflash_trt.training.run import run as train

    recipe = Recipe(**fields_of(args, Recipe) | {"held_out": None})  # there a digest
    start = args.checkpoint and resolve(args.checkpoint, "drafter").directory
    design = Design(**fields_of(args, Design) | {"checkpoint": start})
    if not plots.available():
        print(f"there will be no curve, as matplotlib is not installed: {install('plot')}", file=sys.stderr)
    with progress_display() as display, continued(args.out):

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


def _add_evaluate(parser: argparse.ArgumentParser) -> None:
    add_target(parser, "the model that the drafter is for")
    option(parser, "--drafter", "NAME_OR_PATH", str, "default: the target's known drafter")
    option(parser, "--draft-vocabulary", "FILE", str, "as of build: tokens that may be drafted, or all")
    option(parser, "--temperature", "T", float, default=0.0)
    _add_questions(parser, "the shipped natural ones")
    option(parser, "--card", "FILE", Path,
           "a drafter's README.md, whose section on acceptance gets the figures at temperatures 0 and 1")  # fmt: skip
    add_common(parser, "--json")


def _evaluate(args: argparse.Namespace) -> int:
    from dflash_trt.building.sources import find_sources
    from dflash_trt.files.disk import temporary_folder
    from dflash_trt.prompts import natural_prompts
    from dflash_trt.training.evaluation import measure

    target, drafter = find_sources(args.target, args.drafter, "copy")
    if drafter is None:
        raise UsageError(
            f"--target {args.target}: no drafter is known for it; give one with --drafter, or train one"
        )
    prompts = natural_prompts(args.held_out, args.limit)
    card = None if args.card is None else args.card.read_text(encoding="utf-8")
    with temporary_folder(prefix="dflash-trt-") as work:

        def measured(temperature: float) -> dict[str, Any]:
            return measure(
                *(target.directory, drafter.directory, prompts, work),
                max_tokens=args.eval_tokens,
                temperature=temperature,
                draft_vocabulary=args.draft_vocabulary,
            )

        figures = measured(args.temperature)
        if card is not None:
            both = (figures if t == args.temperature else measured(t) for t in (0.0, 1.0))
            _write_card(args, card, len(prompts), *both)
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


def _write_card(
    args: argparse.Namespace, card: str, count: int, greedy: dict[str, Any], sampled: dict[str, Any]
) -> None:
    from dflash_trt.files.disk import whole_file
    from dflash_trt.training.export import with_acceptance

    command = f"train evaluate --target {args.target} --limit {args.limit} --eval-tokens {args.eval_tokens}"
    how = (
        f"`dflash-trt {command} --card README.md` decodes {count} held-out prompts in whole blocks, at most "
        f"{args.eval_tokens} tokens each."
    )
    with whole_file(args.card) as file:
        file.write(with_acceptance(card, how, greedy, sampled).encode())


def _add_export(parser: argparse.ArgumentParser) -> None:
    add_target(parser, "the model that the drafter is for")
    option(parser, "--drafter", "DIR", Path,
           "a drafter of `train drafter`, such as runs/mine/best", required=True)  # fmt: skip
    option(parser, "--out", "DIR", Path, "made, or replaced when it is whole", required=True)


def _export(args: argparse.Namespace) -> int:
    check_installed()
    from dflash_trt.building.sources import resolve
    from dflash_trt.training.export import export

    target = resolve(args.target, "target").directory
    for warning in export(args.drafter, target, args.out):
        print(f"warning: {warning}", file=sys.stderr)
    print(f"{args.out}: a drafter in z-lab's layout; README.md has the commands that run it")
    return 0


# Step -> what it does, its options, and the function that runs it.
STEPS = {
    "regenerate": ("let the target answer prompts: the data to train on", _add_regenerate, _regenerate),
    "drafter": ("train a drafter and measure it regularly", _add_drafter, _drafter),
    "evaluate": (
        "tokens per pass of a drafter, by category and position in the block",
        _add_evaluate,
        _evaluate,
    ),
    "export": ("write a drafter for vLLM, SGLang, TensorRT-LLM and others", _add_export, _export),
}
