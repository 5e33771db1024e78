"""`dflash-trt train regenerate`: the target's own answers."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from dflash_trt.cli.options import at_least, each
from dflash_trt.cli.output import print_json
from dflash_trt.errors import DFlashError

SUMMARY = "let the target answer prompts: the data to train on"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    engine = parser.add_mutually_exclusive_group(required=True)
    engine.add_argument(
        "--bundle",
        metavar="BUNDLE",
        help="the target as a bundle, or a pair's name; decoded here without drafting",
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
    parser.add_argument(
        "--prompts",
        type=Path,
        required=True,
        metavar="FILE",
        help="a JSONL file: id, category, and prompt or messages",
    )
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


def run(args: argparse.Namespace) -> int:
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
