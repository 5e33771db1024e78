"""`dflash-trt train vocabulary`: the tokens that may be drafted."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from dflash_trt.checkpoint.draft_vocabulary import LEAST
from dflash_trt.cli.options import add_target, at_least
from dflash_trt.errors import DFlashError

SUMMARY = "choose the tokens that may be drafted"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the step."""
    add_target(parser, "the model that the drafter is for")
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


def run(args: argparse.Namespace) -> int:
    """Write the file of a vocabulary."""
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
