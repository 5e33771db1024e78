"""`dflash-trt fit`: from a target to a drafter that makes it faster, and their bundle."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from dflash_trt.building.progress import progress_display
from dflash_trt.cli.options import add_common, option
from dflash_trt.cli.output import print_json, print_table

SUMMARY = "make a drafter for your model, and a bundle if it is faster"
DESCRIPTION = """\
Give a model a drafter of its own within the hours that you have: the target answers prompts, a drafter is trained on
the answers, and the pair is measured. Without prompts, the target writes its own. Layers, block size and draft
vocabulary are those that are fastest on this machine. The bundle is made if drafts make the target faster; otherwise
the command says what would help, and ends with 1. Everything so far lies in OUT.fit, and the same command continues
there.
It needs dflash-trt[train].
"""
EXAMPLES = """\
examples:
  dflash-trt fit checkpoints/my-model --hours 4 --out bundles/mine
  dflash-trt fit checkpoints/my-model --hours 4 --prompts prompts.jsonl --from qwen3-8b --out bundles/mine
  dflash-trt serve bundles/mine --log-prompts kept.jsonl      # what is asked, for --prompts
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "the model, as `build --target` takes it: a name or a directory"
    option(parser, "target", "NAME_OR_PATH", str, text)
    option(
        parser, "--hours", "H", _hours, "the time for all of it, calls that continue included", required=True
    )
    option(parser, "--out", "DIR", Path, "the bundle; OUT.fit beside it has the work", required=True)
    option(parser, "--prompts", "FILE", Path,
           "prompts as your users send them, as JSON lines, or those that `serve --log-prompts` kept (default: the "
           "target writes its own)")  # fmt: skip
    option(
        parser, "--from", "NAME_OR_PATH", str, "a drafter to continue from (default: a new one)", dest="start"
    )
    add_common(parser, "--threads", "--json")


def _hours(text: str) -> float:
    if not 0 < (value := float(text)) < 10_000:
        raise argparse.ArgumentTypeError(f"{text} is not above 0, or is over a year")
    return value


def run(args: argparse.Namespace) -> int:
    from dflash_trt.cli.train import check_installed

    check_installed()
    from dflash_trt.building.sources import resolve
    from dflash_trt.files.disk import continued
    from dflash_trt.training.fit import fit

    start = None if args.start is None else resolve(args.start, "drafter").directory
    with progress_display() as display, continued(args.out.with_name(f"{args.out.name}.fit")):
        outcome = fit(
            *(resolve(args.target, "target").directory, args.target, args.out, 3600 * args.hours),
            prompts=args.prompts,
            start=start,
            threads=args.threads,
            report=lambda share, text: display("fit", int(1000 * share), 1000, text),
        )
    if args.json:
        print_json({**asdict(outcome), "bundle": outcome.bundle and str(outcome.bundle.path)})
        return 0 if outcome.bundle else 1
    for note in outcome.notes:
        print(note)
    print(", ".join(f"{name}: {rate:.0f} tokens/s" for name, rate in outcome.rates.items()))
    print_table([
        ["category", "tokens per pass", "plain tok/s", "with drafts", "gain"],
        *(
            [row.category, f"{row.tokens_per_pass:.2f}", f"{row.plain:.1f}", f"{row.drafted:.1f}",
             f"{row.drafted / row.plain:.2f}x"]
            for row in outcome.rows
        ),
    ])  # fmt: skip
    if outcome.bundle:
        print(f"{args.out}: a bundle with this drafter")
        return 0
    print("no bundle was made, since drafts are not faster here; what would help:")
    for line in outcome.advice:
        print(f"- {line}")
    return 1
