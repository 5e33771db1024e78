"""`dflash-trt bench`: throughput and latency under load, plain and drafting, in one run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from dflash_trt.building.progress import progress_display
from dflash_trt.cli.generate import add_chat_template_arguments
from dflash_trt.cli.options import (
    add_bundle,
    add_common,
    at_least,
    list_of,
    option,
)
from dflash_trt.cli.output import print_json, print_table
from dflash_trt.errors import UsageError

if TYPE_CHECKING:
    from dflash_trt.reports.benchmark import Method, MethodPoint
    from dflash_trt.runtime import Runtime

SUMMARY = "measure throughput and latency under load"
DESCRIPTION = """\
Serve the same greedy requests in several ways: plain decoding, drafting with a fixed block length, drafting with the
adaptive length, and draft trees if the bundle was built with --tree-width. A closed loop sends a request after the
previous answer. An open loop has Poisson arrivals. Methods and bundles take turns within each load. The table at the
end shows every load. --json prints all figures as one document instead.

Compare TPOT: (last token - first token) / (tokens - 1) of each request. The time between two tokens is bursty with
block drafting, because a round gives several tokens at once.
"""
EXAMPLES = """\
examples:
  dflash-trt bench bundles/tiny
  dflash-trt bench bundles/tiny --concurrency 1,8 --requests 64 --plot tiny.svg
  dflash-trt bench bundles/tiny --rate 20,40 --methods plain,draft
  dflash-trt bench bundles/mine bundles/mine-eagle3 --concurrency 1     # two drafters of one target
  dflash-trt bench bundles/mine --prompts prompts.jsonl --max-tokens 256 --json

A prompt file is as `dflash-trt verify --help` describes it.
"""
METHODS = ("plain", "draft", "adaptive", "tree", "lookup")
# Two lines of headings, so that the table of one bundle fits 80 columns.
HEADINGS = (
    ("", "", "", "tokens", "to", "TPOT, ms", "TTFT, ms", "tokens", "", ""),
    ("load", "bundle", "method", "per s", "plain", "p50/p90/p99", "p50/p99", "a pass", "block", "host"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_bundle(parser, "bundles", nargs="+")
    option(parser, "--concurrency", "N,...", list_of(at_least(1)),
           "closed loops: requests at a time (default: 1,2,4,8,16, or none with --rate)")  # fmt: skip
    option(parser, "--rate", "R,...", list_of(_positive), "open loops: requests per second", [])
    option(parser, "--requests", "N", at_least(1), "requests per load and method", 96)
    option(parser, "--max-tokens", "N", at_least(2), "tokens per request", 64)
    option(parser, "--methods", "M,...", list_of(_method),
           "any of plain, draft, adaptive, tree, lookup (default: all but lookup that the bundle can do)")  # fmt: skip
    option(parser, "--block-length", "N", int, "block length of `draft` (default: the block size)")
    add_common(parser, "--tree-nodes", "--prompts")
    add_chat_template_arguments(parser)
    add_common(parser, "--threads", "--exact")
    option(parser, "--plot", "FILE", Path, "draw throughput and TPOT over the loads, as SVG, PNG or PDF")
    add_common(parser, "--json")


def _positive(text: str) -> float:
    if not (value := float(text)) > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _method(text: str) -> str:
    if text not in METHODS:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(METHODS)}")
    return text


def run(args: argparse.Namespace) -> int:
    """Measure the bundles. Returns 1 if the methods of one differ in a token."""
    from dflash_trt.hardware import processor
    from dflash_trt.reports import plots
    from dflash_trt.reports.benchmark import Load, bench
    from dflash_trt.runtime import Runtime

    plots.check(args.plot)
    closed = args.concurrency or ([] if args.rate else [1, 2, 4, 8, 16])
    loads = [Load(n) for n in closed] + [Load(max(closed, default=16), rate) for rate in args.rate]
    if len(set(args.bundles)) < len(args.bundles):
        args.usage_error(f"a bundle is given twice: {' '.join(args.bundles)}")
    with ExitStack() as opened, progress_display() as progress:
        methods: list[Method] = []
        for bundle in args.bundles:
            runtime = Runtime(
                bundle,
                max_batch_size=max(load.concurrency for load in loads),
                prefix_cache_bytes=0,
                threads=args.threads,
                exact=args.exact,
                engine=args.engine,
            )
            opened.callback(runtime.close)
            methods += _methods(args, bundle, runtime)
        counts = {"requests": args.requests, "max_tokens": args.max_tokens}
        measured = list(bench(methods, loads, **counts, progress=progress))
    first = {method.bundle: i for i, method in reversed(list(enumerate(methods)))}
    same = all(p.outputs == points[first[p.method.bundle]].outputs for points in measured for p in points)
    rows = [point.to_dict() for points in measured for point in points]
    if args.plot:
        _plot(args.plot, rows)
    runtimes = {method.bundle: method.runtime for method in methods}
    if args.json:
        sizes = {"requests": args.requests, "max_tokens": args.max_tokens, "same_tokens": same}
        bundles = {
            name: {
                "block_size": runtime.block_size,
                "fixed_block_length": args.block_length or runtime.block_size,
                "exact": runtime.exactness and asdict(runtime.exactness),
            }
            for name, runtime in runtimes.items()
        }
        nodes = "auto" if args.tree_nodes is None else args.tree_nodes
        print_json(
            {"processor": processor(), **sizes, "tree_nodes": nodes, "bundles": bundles, "points": rows}
        )
        return 0 if same else 1
    print(processor())
    print(f"{args.requests} requests per load and method, at most {args.max_tokens} tokens each")
    for name, runtime in runtimes.items():
        if runtime.exactness:
            print(fill(f"{name}: exact mode: {runtime.exactness.describe()}", 80))
        print(f"{name}: draft verifies {args.block_length or runtime.block_size} tokens per round")
    print(f"tokens of the methods: {'all equal' if same else 'DIFFERENT'}")
    _print(measured, several=len(runtimes) > 1)
    return 0 if same else 1


def _methods(args: argparse.Namespace, bundle: str, runtime: Runtime) -> list[Method]:
    """The methods asked for, or all that the bundle can do."""
    from dflash_trt.decoding.params import RequestOptions
    from dflash_trt.prompts import read_prompts
    from dflash_trt.reports.benchmark import Method

    ways = {
        "plain": RequestOptions(speculate=False, tree_nodes=0),
        "draft": RequestOptions(block_length=args.block_length or runtime.block_size, tree_nodes=0),
        "adaptive": RequestOptions(tree_nodes=0),
        "tree": RequestOptions(tree_nodes=args.tree_nodes),
    }
    runtime.check(ways["tree"])
    if not runtime.scheduler.most_tree_nodes or args.tree_nodes == 0:
        del ways["tree"]
    asked = list(dict.fromkeys(args.methods or ways))
    ways["lookup"] = RequestOptions(draft_source="lookup", tree_nodes=0)
    if not set(asked) <= set(ways):
        raise UsageError(
            f"--methods has tree, but {bundle} verifies chains: build it with --tree-width 2 or more"
            if not runtime.scheduler.most_tree_nodes
            else "--methods has tree, but --tree-nodes is 0: give a number of nodes, or leave it out"
        )
    asked_for = read_prompts(args.prompts, 0, args.chat_template_kwargs)
    prompts = [prompt.token_ids(runtime.tokenizer) for prompt in asked_for]
    return [Method(bundle, name, runtime, prompts, runtime.lengths(ways[name])) for name in asked]


def _print(measured: Sequence[Sequence[MethodPoint]], *, several: bool) -> None:
    lines: list[tuple[str, ...]] = list(HEADINGS)
    for points in measured:
        figures = [point.to_dict() for point in points]
        plain = {f["bundle"]: f["tokens_per_second"] for f in figures if f["method"] == "plain"}
        lines += [_row(point.load.name, f, plain) for point, f in zip(points, figures, strict=True)]
    if not several:
        lines = [(load, *rest) for load, _, *rest in lines]
    print_table(lines, headings=len(HEADINGS), right={*range(len(lines[0]))} - {1})


def _row(load: str, figures: dict[str, Any], plain: dict[str, float]) -> tuple[str, ...]:
    tpot, ttft = figures["tpot_ms"], figures["ttft_ms"]
    drafted, base = figures["method"] != "plain", plain.get(figures["bundle"])
    return (
        load,
        figures["bundle"],
        figures["method"],
        f"{figures['tokens_per_second']:.0f}",
        f"{figures['tokens_per_second'] / base:.2f}x" if base else "",
        "/".join(_milliseconds(tpot[p]) for p in ("p50", "p90", "p99")) if tpot else "",
        "/".join(_milliseconds(ttft[p]) for p in ("p50", "p99")),
        f"{figures['tokens_per_pass']:.2f}" if drafted else "",
        f"{figures['mean_block_length']:.1f}" if drafted else "",
        f"{figures['host_share']:.0%}",
    )


def _milliseconds(value: float) -> str:
    """At most four characters below 10 s, so that the table fits 80 columns."""
    return next((f"{value:.{d}f}" for d in (2, 1) if len(f"{value:.{d}f}") <= 4), f"{value:.0f}")


def _plot(file: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Throughput and TPOT over the loads, in the order in which they were given."""
    from dflash_trt.reports.plots import plot

    panels: dict[str, dict[str, list[tuple[str, float]]]] = {"tokens per second": {}, "TPOT, ms (median)": {}}
    several = len({row["bundle"] for row in rows}) > 1
    for row in rows:
        label = f"{row['bundle']} {row['method']}" if several else row["method"]
        values = (row["tokens_per_second"], row["tpot_ms"].get("p50", float("nan")))
        for panel, value in zip(panels.values(), values, strict=True):
            panel.setdefault(label, []).append((str(row["concurrency"] or f"{row['rate']:g}/s"), value))
    title = ", ".join(dict.fromkeys(row["bundle"] for row in rows))
    plot(file, panels, title=title, x="requests at a time, or per second")
