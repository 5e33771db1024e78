"""`dflash-trt train regenerate`: the target's own answers."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dflash_trt.building.progress import progress_display
from dflash_trt.cli.options import add_threads, at_least, each, option
from dflash_trt.engines import registry

SUMMARY = "let the target answer prompts: the data to train on"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    option(source, "--target", "NAME_OR_PATH", str,
           "the target, decoded here without a drafter; with --server: its tokenizer and template")  # fmt: skip
    option(
        source,
        "--bundle",
        "BUNDLE",
        str,
        "the target as a bundle, or a pair's name; decoded here without drafting",
    )
    option(
        parser,
        "--server",
        "URL",
        str,
        "the base URL of a server with OpenAI's chat completions, which answers",
    )
    option(parser, "--model", "NAME", str, "with --server: its name for the model")
    option(
        parser, "--prompts", "FILE", Path, "a JSONL file: id, category, and prompt or messages", required=True
    )
    option(parser, "--out", "FILE", Path, "a JSONL file of answers; it is continued", required=True)
    option(parser, "--max-tokens", "N", at_least(2), "limit of tokens per answer", 256)
    option(parser, "--temperatures", "T,...", each(float), "temperatures; each prompt gets one", [0.0, 0.7])
    option(parser, "--top-p", "P", float, "top-p if the temperature is not 0", 1.0)
    option(parser, "--seed", "N", at_least(0), "seed of sampling", 0)
    option(parser, "--concurrency", "N", at_least(1), "prompts answered at a time", 32)
    add_threads(parser)


def run(args: argparse.Namespace) -> int:
    if (args.server is None) != (args.model is None):
        args.step_error("--server and --model belong together")
    if args.server is not None and args.target is None:
        args.step_error("--server needs --target, for its tokenizer and template")
    from dflash_trt.building.sources import resolve
    from dflash_trt.prompts import read_prompts
    from dflash_trt.training.answers import read_answers, summary
    from dflash_trt.training.regenerate import (
        AnswerSampling,
        regenerate_with_bundle,
        regenerate_with_server,
    )

    prompts = read_prompts(args.prompts, 0)
    sampling = AnswerSampling(args.max_tokens, args.temperatures, args.top_p, args.seed)
    target = None if args.target is None else resolve(args.target, "target").directory
    with progress_display() as display, ExitStack() as opened:

        def report(done: int, of: int, tokens: int, seconds: float) -> None:
            display("answer", done, of, f"{done} prompts, {tokens / max(seconds, 1e-9):.0f} tokens/s")

        task: dict[str, Any] = {"concurrency": args.concurrency, "report": report}
        if args.server is not None and target is not None:
            regenerate_with_server(args.server, args.model, target, prompts, args.out, sampling, **task)
        else:
            bundle = args.bundle if target is None else opened.enter_context(_bundle(target, args.out))
            regenerate_with_bundle(bundle, prompts, args.out, sampling, threads=args.threads, **task)
    counts = summary(read_answers(args.out))
    print(
        f"{args.out}: {counts['answers']} answers of {counts['answer_tokens']} tokens, "
        f"{counts['ended']} of them complete"
    )
    return 0


@contextmanager
def _bundle(target: Path, out: Path) -> Iterator[Path]:
    """A bundle of the target alone, in a folder beside the answers that is removed at the end."""
    from dflash_trt.building.build import build

    out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as work:
        asked: dict[str, Any] = {"no_drafter": True, "engine": registry.DEFAULT, "block_size": 2}
        yield build(str(target), None, Path(work, "bundle"), weights="link", **asked).path
