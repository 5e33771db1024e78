"""`dflash-trt train`: train a drafter for your own target."""

from __future__ import annotations

import argparse
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dflash_trt.checkpoint.draft_vocabulary import LEAST
from dflash_trt.cli.options import at_least, each, share
from dflash_trt.cli.output import print_json, print_table
from dflash_trt.errors import DFlashError
from dflash_trt.extras import install

SUMMARY = "train a drafter for a target, on the target's own answers"
DESCRIPTION = """\
Train a DFlash, DFlash2 or EAGLE-3 drafter for any target that Transformers runs and this package builds.
`regenerate` lets the target answer prompts, `drafter` trains on the answers, `evaluate` measures a drafter.
Each continues an interrupted call with the same arguments. `drafter` needs dflash-trt[train].
"""
EXAMPLES = """\
examples:
  dflash-trt train regenerate --bundle bundles/tiny --prompts prompts.jsonl --out answers.jsonl
  dflash-trt train regenerate --server URL --model NAME --target PATH --prompts prompts.jsonl --out answers.jsonl
  dflash-trt train drafter --target Qwen/Qwen3-4B --data answers.jsonl --out runs/mine --steps 20000
  dflash-trt train drafter --target Qwen/Qwen3-4B --kind eagle3 --data answers.jsonl --out runs/eagle --steps 20000
  dflash-trt train drafter --target qwen3-4b --from z-lab/Qwen3-4B-DFlash-b16 --data answers.jsonl --out runs/tuned
  accelerate launch -m dflash_trt train drafter ...            # several GPUs or nodes
  dflash-trt train evaluate --target tiny --drafter runs/mine/best
  dflash-trt train vocabulary --target qwen3-4b --data answers.jsonl --size 32768 --out draft_vocabulary.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    steps = parser.add_subparsers(title="steps", metavar="STEP", required=True)
    for name, (text, add, run_step) in _STEPS.items():
        step = steps.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        add(step)
        step.add_argument(
            "--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error"
        )
        step.set_defaults(run_step=run_step, step_error=step.error)


def run(args: argparse.Namespace) -> int:
    code: int = args.run_step(args)
    return code


def _add_regenerate(parser: argparse.ArgumentParser) -> None:
    engine = parser.add_mutually_exclusive_group(required=True)
    engine.add_argument(
        "--bundle", type=Path, metavar="DIR", help="the target as a bundle, decoded here without drafting"
    )
    engine.add_argument(
        "--server", metavar="URL", help="the base URL of a server with OpenAI's chat completions"
    )
    parser.add_argument("--model", metavar="NAME", help="the server's name for the model")
    parser.add_argument(
        "--target",
        metavar="NAME_OR_PATH",
        help="with --server: the checkpoint with its tokenizer and template",
    )
    _add_prompts(parser)
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="a JSONL file of answers; it is continued"
    )
    parser.add_argument(
        "--max-tokens",
        type=at_least(2),
        default=256,
        metavar="N",
        help="limit of tokens per answer (default: 256)",
    )
    parser.add_argument(
        "--temperatures",
        type=each(float),
        default=[0.0, 0.7],
        metavar="T,...",
        help="temperatures; each prompt gets one (default: 0,0.7)",
    )
    parser.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="top-p if the temperature is not 0 (default: 1)"
    )
    parser.add_argument("--seed", type=at_least(0), default=0, help="seed of sampling (default: 0)")
    parser.add_argument(
        "--concurrency",
        type=at_least(1),
        default=32,
        metavar="N",
        help="prompts answered at a time (default: 32)",
    )
    parser.add_argument("--threads", type=at_least(1), metavar="N", help="CPU threads (default: all cores)")


def _add_prompts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prompts",
        type=Path,
        required=True,
        metavar="FILE",
        help="a JSONL file: id, category, and prompt or messages",
    )


def _regenerate(args: argparse.Namespace) -> int:
    from dflash_trt.prompts import read_prompts
    from dflash_trt.training.answers import read_answers, summary
    from dflash_trt.training.regenerate import Sampling, regenerate_with_bundle, regenerate_with_server

    prompts = read_prompts(args.prompts, 0)
    sampling = Sampling(args.max_tokens, args.temperatures, args.top_p, args.seed)

    def report(done: int, of: int, tokens: int, seconds: float) -> None:
        print(f"{done} of {of} prompts, {tokens / max(seconds, 1e-9):.0f} tokens/s", file=sys.stderr)

    if args.bundle is not None:
        regenerate_with_bundle(
            args.bundle,
            prompts,
            args.out,
            sampling,
            concurrency=args.concurrency,
            threads=args.threads,
            report=report,
        )
    else:
        from dflash_trt.building.sources import resolve
        from dflash_trt.models.configs import read_target_config
        from dflash_trt.text.tokenizer import Tokenizer

        if args.model is None or args.target is None:
            args.step_error("--server needs --model and --target")
        directory = resolve(args.target, "target").directory
        ends = read_target_config(directory).eos_token_ids
        if not ends:
            raise DFlashError(f"{directory}: names no eos_token_id, so the end of an answer is unknown")
        regenerate_with_server(
            args.server,
            args.model,
            Tokenizer(directory),
            ends[0],
            prompts,
            args.out,
            sampling,
            concurrency=args.concurrency,
            report=report,
        )
    print_json(summary(read_answers(args.out)))
    return 0


def _add_drafter(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--target", required=True, metavar="NAME_OR_PATH", help="the model that the drafter is for")
    add(
        "--data",
        type=Path,
        required=True,
        metavar="FILE",
        help="the target's answers, from `train regenerate`",
    )
    add(
        "--out",
        type=Path,
        required=True,
        metavar="DIR",
        help="directory of the run: checkpoints, state, log and curve",
    )
    add("--steps", type=at_least(1), required=True, metavar="N", help="number of steps")
    add(
        "--from",
        dest="checkpoint",
        metavar="NAME_OR_PATH",
        help="a drafter to continue from (default: a new one)",
    )
    add(
        "--kind",
        choices=["dflash", "dflash2", "eagle3"],
        help="kind of the drafter (default: dflash, or as --from); dflash2 can begin with a DFlash drafter",
    )
    add(
        "--draft-vocabulary",
        type=at_least(16),
        metavar="N",
        help="tokens of the head of an EAGLE-3 drafter: the most frequent of the answers (default: 8192)",
    )
    add("--layers", type=at_least(1), metavar="N", help="layers of a new drafter (default: 2)")
    add(
        "--taps",
        type=each(at_least(0)),
        metavar="L,...",
        help="tapped target layers of a new drafter (default: 5, spread evenly)",
    )
    add(
        "--block-size",
        type=at_least(2),
        metavar="K",
        help="tokens of a block, including the anchor (default: 8, or as --from)",
    )
    add(
        "--mask-token-id",
        type=at_least(0),
        metavar="ID",
        help="mask token of a new drafter (default: an unused token)",
    )
    add(
        "--batch-size",
        type=at_least(1),
        default=8,
        metavar="N",
        help="answers per step and process (default: 8)",
    )
    add(
        "--anchors",
        type=at_least(1),
        default=64,
        metavar="N",
        help="limit of blocks per answer and step (default: 64)",
    )
    add(
        "--max-length",
        type=at_least(4),
        default=1024,
        metavar="N",
        help="limit of tokens of prompt and answer (default: 1024)",
    )
    add(
        "--head-tokens",
        type=at_least(0),
        default=0,
        metavar="N",
        help="tokens whose logits the loss has, drawn for each step (default: 0, all)",
    )
    add(
        "--distill",
        type=share,
        default=0.0,
        metavar="SHARE",
        help="share of the target's own distribution in what a row shall predict, 0 to 1 (default: 0)",
    )
    add(
        "--learning-rate", type=float, default=6e-4, metavar="R", help="highest learning rate (default: 6e-4)"
    )
    add("--optimizer", choices=["adamw", "muon"], default="adamw", help="default: adamw")
    add(
        "--weighting",
        choices=["dpace", "decay"],
        default="dpace",
        help="weights of the loss over a block (default: dpace)",
    )
    add(
        "--shorter",
        type=share,
        default=0.2,
        metavar="SHARE",
        help="share of shortened blocks (default: 0.2)",
    )
    add("--seed", type=at_least(0), default=0, help="seed of weights, order and anchors (default: 0)")
    add(
        "--features",
        type=Path,
        metavar="DIR",
        help="keep the target's features here (default: compute them each time)",
    )
    add(
        "--save-every",
        type=at_least(1),
        default=50,
        metavar="N",
        help="steps between saved states (default: 50)",
    )
    add(
        "--evaluate-every",
        type=at_least(0),
        default=500,
        metavar="N",
        help="steps between evaluations; 0: only at the end (default: 500)",
    )
    _add_questions(parser)


def _add_questions(parser: argparse.ArgumentParser) -> None:
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


def _questions(args: argparse.Namespace, temperature: float = 0.0) -> Any:
    from dflash_trt.prompts import natural_prompts
    from dflash_trt.training.evaluation import Questions

    return Questions(natural_prompts(args.held_out, args.limit), args.eval_tokens, temperature)


def _drafter(args: argparse.Namespace) -> int:
    for name in ("accelerate", "safetensors", "torch", "transformers"):
        if find_spec(name) is None:
            raise DFlashError(f"{name} is not installed; training needs: {install('train')}")
    from dflash_trt.building.sources import resolve
    from dflash_trt.training.loop import Recipe
    from dflash_trt.training.run import Design, run

    recipe = Recipe(
        steps=args.steps,
        batch_size=args.batch_size,
        anchors=args.anchors,
        learning_rate=args.learning_rate,
        optimizer=args.optimizer,
        weighting=args.weighting,
        shorter=args.shorter,
        max_length=args.max_length,
        head_tokens=args.head_tokens,
        distill=args.distill,
        seed=args.seed,
    )
    design = Design(
        checkpoint=resolve(args.checkpoint, "drafter").directory if args.checkpoint else None,
        kind=args.kind,
        vocabulary=args.draft_vocabulary,
        layers=args.layers,
        taps=args.taps,
        block_size=args.block_size,
        mask_token_id=args.mask_token_id,
    )

    def report(line: dict[str, Any]) -> None:
        print(json.dumps({key: value for key, value in line.items() if key != "figures"}), file=sys.stderr)

    ended = run(
        resolve(args.target, "target").directory,
        args.target,
        args.data,
        args.out,
        design,
        recipe,
        features=args.features,
        questions=_questions(args),
        save_every=args.save_every,
        evaluate_every=args.evaluate_every,
        report=report,
    )
    if ended < args.steps:
        print(f"{args.out}: ended after step {ended}, as asked; the same command goes on from there")
        return 1
    print(f"{args.out}: newest weights in checkpoint/, best weights in best/, curve in acceptance.svg")
    return 0


def _add_evaluate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--target", required=True, metavar="NAME_OR_PATH", help="the model that the drafter is for"
    )
    parser.add_argument("--drafter", metavar="NAME_OR_PATH", help="default: the target's known drafter")
    parser.add_argument(
        "--draft-vocabulary", metavar="FILE", help="as of build: tokens that may be drafted, or all"
    )
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="default: 0")
    _add_questions(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def _evaluate(args: argparse.Namespace) -> int:
    from tempfile import TemporaryDirectory

    from dflash_trt.building.sources import resolve_pair
    from dflash_trt.training.evaluation import measure

    target, drafter = resolve_pair(args.target, args.drafter)
    with TemporaryDirectory(prefix="dflash-trt-") as work:
        questions = _questions(args, args.temperature)
        figures = measure(target.directory, drafter.directory, questions, Path(work), args.draft_vocabulary)
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


def _add_vocabulary(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--target", required=True, metavar="NAME_OR_PATH", help="the model that the drafter is for"
    )
    parser.add_argument(
        "--data", type=Path, required=True, metavar="FILE", help="answers of `train regenerate`"
    )
    parser.add_argument(
        "--size",
        type=at_least(LEAST),
        required=True,
        metavar="N",
        help="tokens that may be drafted: end tokens, then the most frequent of the answers, then the lowest ids",
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="FILE",
        help="for `build --draft-vocabulary`; a build finds draft_vocabulary.json in the drafter's directory by itself",
    )


def _vocabulary(args: argparse.Namespace) -> int:
    from dflash_trt.building.sources import resolve
    from dflash_trt.checkpoint.draft_vocabulary import most_frequent
    from dflash_trt.files.disk import whole_file
    from dflash_trt.models.configs import read_target_config
    from dflash_trt.training.answers import read_answers

    config = read_target_config(resolve(args.target, "target").directory)
    answers = [answer.answer_ids for answer in read_answers(args.data)]
    count = sum(map(len, answers))
    if not count:
        raise DFlashError(f"--data {args.data}: has no answers")
    if (largest := max(map(max, filter(None, answers)))) >= config.vocab_size:
        raise DFlashError(
            f"--data {args.data}: has token {largest}, but the target embeds {config.vocab_size}: the answers are of "
            "another target"
        )
    tokens = most_frequent(answers, args.size, config.vocab_size, config.eos_token_ids)
    with whole_file(args.out) as file:
        file.write(json.dumps({"tokens": tokens}, separators=(",", ":")).encode() + b"\n")
    kept = set(tokens)
    share = sum(token in kept for answer in answers for token in answer) / count
    print(
        f"{args.out}: {len(tokens)} of {config.vocab_size} tokens, {share:.1%} of {count} tokens of the answers"
    )
    return 0


_STEPS = {
    "regenerate": ("let the target answer prompts: the data to train on", _add_regenerate, _regenerate),
    "drafter": ("train a drafter and measure it regularly", _add_drafter, _drafter),
    "evaluate": (
        "acceptance length of a drafter, by category and position in the block",
        _add_evaluate,
        _evaluate,
    ),
    "vocabulary": ("choose the tokens that may be drafted", _add_vocabulary, _vocabulary),
}
