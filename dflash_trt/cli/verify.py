"""`dflash-trt verify`: compare the tokens with and without drafting."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from dflash_trt.cli.generate import add_chat_template_arguments
from dflash_trt.cli.options import (
    add_bundle,
    add_common,
    add_limit,
    at_least,
    list_of,
    option,
    or_auto,
)
from dflash_trt.cli.output import print_json

if TYPE_CHECKING:
    from dflash_trt.decoding.params import DraftingOptions
    from dflash_trt.llm import LLM
    from dflash_trt.prompts import Prompt

SUMMARY = "check that drafting does not change the tokens"
DESCRIPTION = """\
Generate from every prompt with and without drafting, and compare the tokens at several temperatures, block lengths,
tree sizes and batch sizes, and with drafts from the text itself alone (lookup). The first difference, if any, is shown
with the gap between the two logits. Exit code 1 if anything differs.

By default it decodes 32 tokens from one prompt of each category.

With --widths, no drafter runs. The plain greedy answers are fed to the target again in passes of several rows, beside
other sequences and after prompts that were read in parts, and every logit is compared bit for bit with plain
decoding's. If all agree, no draft can change a token, on this machine and with these versions. The exit code is 1 if a
greedy token changes.
"""
EXAMPLES = """\
examples:
  dflash-trt verify bundles/tiny
  dflash-trt verify bundles/tiny --limit 0 --temperatures 0,0.7,1 --block-lengths 2,4,8,auto --max-tokens 256
  dflash-trt verify bundles/tiny --widths
  dflash-trt verify bundles/mine --widths --limit 1 --context 2000
  dflash-trt verify bundles/mine --prompts prompts.jsonl --temperatures 0 --block-lengths 4,8 --json

A prompt file has one JSON object per line, with "id", "category" and "chat_template_kwargs" if you like:
{"prompt": "..."} or {"messages": [{"role": "user", "content": "..."}]}
"""
HEADINGS = ("temperature", "block length", "batch size", "equal", "differing", "tokens per pass")
COLUMNS = "{:>11}  {:>12}  {:>10}  {:>5}  {:>9}  {:>17}"
WIDTH_HEADINGS = ("rows fed as", "equal rows", "largest difference", "flips per 1,000", "answers")
WIDTH_COLUMNS = "{:<24}  {:>11}  {:>18}  {:>15}  {:>7}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_bundle(parser)
    add_common(parser, "--prompts")
    add_chat_template_arguments(parser)
    add_limit(parser, 4)
    option(parser, "--temperatures", "T,...", list_of(float), default=[0.0, 0.7])
    option(parser, "--block-lengths", "auto|N,...", list_of(or_auto(1)), "default: whole blocks, and auto")
    option(parser, "--tree-nodes", "auto|N,...", list_of(or_auto(0)),
           "trees of so many nodes too, of a bundle built with --tree-width; 0: chains only "
           "(default: 1.5 blocks, auto)")  # fmt: skip
    option(parser, "--draft-source", "SOURCES", str,
           "drafts from drafter, lookup (the text itself), or drafter,lookup (default: both, and lookup alone)"
    )  # fmt: skip
    option(parser, "--batch-sizes", "N,...", list_of(at_least(1)),
           "sequences at a time (default: 1,4); with --widths, up to the largest (default: 8)")  # fmt: skip
    option(parser, "--max-tokens", "N", at_least(1), "tokens per prompt", 32)
    option(parser, "--widths", "N,...", list_of(at_least(1)),
           "compare the logits of passes of N rows instead (default: 1 to the block length)",
           nargs="?", const=[])  # fmt: skip
    option(parser, "--context", "N", at_least(0), "put N tokens of text before each prompt", 0)
    add_common(parser, "--exact", "--json")


def run(args: argparse.Namespace) -> int:
    """Print each case or way when it has been compared. Returns 1 if a token differs."""
    from dflash_trt.decoding.params import SamplingParams
    from dflash_trt.llm import LLM
    from dflash_trt.prompts import read_prompts
    from dflash_trt.reports.verification import TOP_P, verify

    prompts = read_prompts(args.prompts, args.limit, args.chat_template_kwargs)
    batches = args.batch_sizes or ([8] if args.widths is not None else [1, 4])
    if args.widths is not None:
        return _widths(args, prompts, max(batches))
    cases, show = [], _rows_to(args)
    with LLM(args.bundle, max_batch_size=max(batches), exact=args.exact, engine=args.engine) as llm:
        if llm.exactness:
            print(f"exact mode: {llm.exactness.describe()}", file=sys.stderr)
        asked: dict[str, Any] = {
            "temperatures": args.temperatures,
            "ways": _ways(args, llm),
            "batch_sizes": batches,
            "max_tokens": args.max_tokens,
            "context": args.context,
        }
        for temperature in args.temperatures:  # wrong values are refused before the work
            SamplingParams(temperature=temperature)
        for way in asked["ways"]:
            llm.generate([], **way)
        count = "1 prompt" if len(prompts) == 1 else f"{len(prompts)} prompts"
        show(f"{count}, {args.max_tokens} tokens each, top-p {TOP_P} where sampled")
        show(COLUMNS.format(*HEADINGS))
        for case in verify(llm, prompts, **asked):
            cases.append(case)
            length = case.block_length or "auto"
            if case.tree_nodes != 0:
                length = f"tree {case.tree_nodes or 'auto'}"
            elif case.draft_source == "lookup":
                length = f"lookup {length}"
            numbers = (case.temperature, length, case.batch_size, case.equal, case.differing)
            show(COLUMNS.format(*numbers, f"{case.tokens_per_pass:.2f}"))
    differing = [case.first_difference for case in cases if case.first_difference]
    if args.json:
        rows = [dataclasses.asdict(case) for case in cases]
        print_json({"equal": not differing, "prompts": len(prompts), "cases": rows})
    elif differing:
        first = differing[0]
        print(f"first difference: prompt {first.prompt_id}, generated token {first.position}")
        print(f"  plain    {first.plain_token} {first.plain_text!r}")
        print(f"  drafted  {first.drafted_token} {first.drafted_text!r}")
        if first.logit_gap is not None:
            print(f"  logit gap, plain minus drafted: {first.logit_gap:.3g}")
    else:
        print("all equal")
    return 1 if differing else 0


def _widths(args: argparse.Namespace, prompts: list[Prompt], batch: int) -> int:
    from dflash_trt.building.exactness import settle
    from dflash_trt.decoding.widths import classes, measure
    from dflash_trt.llm import LLM
    from dflash_trt.reports.verification import token_ids

    outcomes, known, show = [], None, _rows_to(args)
    with LLM(args.bundle, max_batch_size=batch, exact=args.exact or False, engine=args.engine) as llm:
        pair, manifest, ids = llm.runtime.pair, llm.bundle.manifest, token_ids(llm, prompts, args.context)
        widths = sorted({1, *args.widths}) if args.widths else list(range(1, llm.block_size + 1))
        if len(widths) == llm.block_size:  # exact mode follows what is found
            ids += llm.runtime.measured_prompts()[1:]
        show(WIDTH_COLUMNS.format(*WIDTH_HEADINGS))
        for outcome in measure(pair, ids, widths, args.max_tokens, manifest, locate=True):
            outcomes.append(outcome)
            share = f"{1000 * outcome.flips / outcome.rows:.3g}"
            cells = f"{outcome.equal}/{outcome.rows}", f"{outcome.largest:.3g}", share, outcome.answers
            show(WIDTH_COLUMNS.format(outcome.way.name, *cells))
        if args.exact:
            known = llm.exactness
        elif len(widths) == llm.block_size:
            known = settle(llm.bundle, pair, ids, outcomes, threads=None, tokens=args.max_tokens)
    differing = [outcome for outcome in outcomes if outcome.equal < outcome.rows]
    agreeing, flips = classes(outcomes), sum(outcome.flips for outcome in outcomes)
    if args.json:
        verdict = {"equal": not differing, "flips": flips, "prompts": len(prompts), "classes": agreeing}
        verdict |= {"exact": known and dataclasses.asdict(known)}
        print_json(verdict | {"ways": [outcome.as_dict() for outcome in outcomes]})
    elif differing:
        for i, ways in enumerate(agreeing, 1):
            print(f"equal bits {i}: {'; '.join(ways)}")
        first, worst = differing[0], max(differing, key=lambda outcome: outcome.flips)
        print(f"{first.way.name}: {first.first} is the first that differs")
        if flips:
            margin = f"{max(worst.margins):.3g}"
            print(
                f"{worst.way.name}: {worst.flips} of {worst.rows} greedy tokens change, at margins of up to {margin}"
            )
        else:
            print("logits differ, but no greedy token changes")
    else:
        print("all equal, bit for bit: drafts change no token here")
    if known and not args.json:
        print(f"exact mode: {known.describe()}")
    return 1 if flips else 0


def _rows_to(args: argparse.Namespace) -> Callable[[str], None]:
    """Where rows go as they come: with --json to standard error, so that an interrupted run has shown them, too."""
    return partial(print, file=sys.stderr if args.json else sys.stdout, flush=True)


def _ways(args: argparse.Namespace, llm: LLM) -> list[DraftingOptions]:
    """The ways to draft: chains, then trees if the bundle verifies them, and chains from the text itself."""
    from dflash_trt.reports.verification import chains

    trees, most = args.tree_nodes, llm.most_tree_nodes
    if trees is None:
        trees = [min(llm.block_size * 3 // 2, most), None] if most else []
    lengths = args.block_lengths or [llm.block_size, None]
    ways = chains(lengths) + [{"tree_nodes": nodes} for nodes in trees if nodes != 0]
    source, chosen = args.draft_source, ways
    if source is None and "drafter" in llm.bundle.roles:
        source, chosen = "lookup", chains([max(lengths, key=lambda length: length or 0)])
        ways += chosen
    for way in chosen if source else ():
        way["draft_source"] = source
    return ways
