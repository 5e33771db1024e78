"""`dflash-trt bench`: throughput and latency under load, plain and drafting, in one run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from dflash_trt.building.progress import progress_display
from dflash_trt.cli import bench_server
from dflash_trt.cli.options import (
    add_bundle,
    add_exact,
    add_json,
    add_prompts,
    add_threads,
    add_tree_nodes,
    at_least,
    each,
    option,
    switch,
)
from dflash_trt.cli.output import print_figures, print_json, write_chart
from dflash_trt.errors import UsageError

if TYPE_CHECKING:
    from dflash_trt.decoding.length.policy import Lengths
    from dflash_trt.reports.benchmark import Load, MethodPoint
    from dflash_trt.runtime import Runtime

SUMMARY = "measure throughput and latency under load"
DESCRIPTION = """\
Serve the same greedy requests in several ways: plain decoding, drafting with a fixed block length, drafting with the
adaptive length, and draft trees if the bundle was built with --tree-width. A closed loop sends a request after the
previous answer. An open loop has Poisson arrivals. The methods take turns within each load. The table at the end shows
every load. --json prints all figures as one document instead.

Compare TPOT: (last token - first token) / (tokens - 1) of each request. The time between two tokens is bursty with
block drafting, because a round gives several tokens at once.

With --server the same loads go to any server of OpenAI's API as streams. The metrics are those of `vllm bench serve`:
TTFT, TPOT, ITL and E2E, each with mean, median and p99. The variable OPENAI_API_KEY may hold the server's key.
"""
EXAMPLES = """\
examples:
  dflash-trt bench bundles/tiny
  dflash-trt bench bundles/tiny --concurrency 1,8 --requests 64 --svg tiny.svg
  dflash-trt bench bundles/tiny --rate 20,40 --methods plain,draft
  dflash-trt bench bundles/mine --prompts prompts.jsonl --max-tokens 256 --json
  dflash-trt bench --server http://127.0.0.1:8000 --concurrency 1,8,32 --rate 10 --svg load.svg

A prompt file is as `dflash-trt verify --help` describes it.
"""
METHODS = ("plain", "draft", "adaptive", "tree")
# Two lines of headings, so that the table fits 80 columns.
HEADINGS = (
    ("", "", "tokens", "to", "TPOT, ms", "TTFT, ms", "accept.", "", ""),
    ("load", "method", "per s", "plain", "p50/p90/p99", "p50/p99", "length", "block", "host"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What is measured, under which loads, and what is printed."""
    add_bundle(parser, nargs="?")
    option(parser, "--server", "URL", str, "measure this server of OpenAI's API instead of a bundle")
    option(parser, "--model", "NAME", str, "with --server: the model's name (default: the server's first)")
    switch(parser, "--ignore-eos",
           "with --server: every answer has --max-tokens tokens, where the server knows this field")  # fmt: skip
    option(parser, "--concurrency", "N,...", each(at_least(1)),
           "closed loops: requests at a time (default: 1,2,4,8,16, or none with --rate)")  # fmt: skip
    option(parser, "--rate", "R,...", each(_positive), "open loops: requests per second", [])
    option(parser, "--requests", "N", at_least(1), "requests per load and method", 96)
    option(parser, "--max-tokens", "N", at_least(2), "tokens per request", 64)
    option(parser, "--methods", "M,...", each(_method),
           "any of plain, draft, adaptive, tree (default: all that the bundle can do)")  # fmt: skip
    option(parser, "--block-length", "N", int, "block length of `draft` (default: the block size)")
    add_tree_nodes(parser)
    add_prompts(parser)
    add_threads(parser)
    add_exact(parser)
    option(parser, "--svg", "FILE", Path, "draw throughput and TPOT over the loads")
    add_json(parser)


def _positive(text: str) -> float:
    if not (value := float(text)) > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _method(text: str) -> str:
    if text not in METHODS:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(METHODS)}")
    return text


def run(args: argparse.Namespace) -> int:
    """Measure a bundle or a server. Returns 1 if the methods differ in a token, or a load got no answer."""
    from dflash_trt.reports import charts
    from dflash_trt.reports.benchmark import Load

    charts.check(args.svg)
    closed = args.concurrency or ([] if args.rate else [1, 2, 4, 8, 16])
    most = max(closed, default=16)
    loads = [Load(n) for n in closed] + [Load(most, rate) for rate in args.rate]
    if args.server is not None:
        return bench_server.run(args, loads)
    if args.bundle is None:
        args.usage_error("give a BUNDLE, or --server URL")
    if args.model is not None or args.ignore_eos:
        args.usage_error("--model and --ignore-eos need --server URL")
    return _bundle(args, loads)


def _bundle(args: argparse.Namespace, loads: Sequence[Load]) -> int:
    from dflash_trt.hardware import processor
    from dflash_trt.runtime import Runtime

    runtime = Runtime(
        args.bundle,
        max_batch_size=max(load.concurrency for load in loads),
        prefix_cache_bytes=0,
        threads=args.threads,
        exact=args.exact,
    )
    fixed = args.block_length or runtime.block_size
    try:
        measured = _measure(args, runtime, loads, fixed)
    finally:
        runtime.scheduler.close()
    same = all(point.outputs == points[0].outputs for points in measured for point in points)
    rows = [point.to_dict() for points in measured for point in points]
    if args.svg:
        write_chart(args.svg, _chart(rows, runtime.bundle.path.name))
    if args.json:
        document = {
            "bundle": runtime.bundle.path.name,
            "processor": processor(),
            "max_tokens": args.max_tokens,
        }
        document |= {"exact": runtime.exactness and runtime.exactness.as_dict()}
        document |= {"block_size": runtime.block_size, "fixed_block_length": fixed, "same_tokens": same}
        document |= {"tree_nodes": "auto" if args.tree_nodes is None else args.tree_nodes, "points": rows}
        print_json(document)
    else:
        print(processor())
        print(f"{args.requests} requests per load and method, at most {args.max_tokens} tokens each")
        if runtime.exactness:
            print(fill(f"exact mode: {runtime.exactness.describe()}", 80))
        print(
            f"draft: {fixed} tokens per round; tokens of the methods: {'all equal' if same else 'DIFFERENT'}"
        )
        _print(measured)
    return 0 if same else 1


def _measure(
    args: argparse.Namespace, runtime: Runtime, loads: Sequence[Load], fixed: int
) -> list[list[MethodPoint]]:
    """A point for each method under each load."""
    from dflash_trt.prompts import read_prompts
    from dflash_trt.reports.benchmark import bench

    contents = [prompt.content for prompt in read_prompts(args.prompts, 0)]
    prompts = [
        runtime.tokenizer.encode(content) if isinstance(content, str) else runtime.chat_prompt(content)
        for content in contents
    ]
    counts = {"requests": args.requests, "max_tokens": args.max_tokens}
    with progress_display() as progress:
        return list(
            bench(runtime, prompts, loads, _lengths(args, runtime, fixed), **counts, progress=progress)
        )


def _lengths(args: argparse.Namespace, runtime: Runtime, fixed: int) -> dict[str, Lengths]:
    """The methods by name: those asked for, or all that the bundle can do."""
    from dflash_trt.decoding.options import RequestOptions

    ways = {
        "plain": RequestOptions(speculate=False, tree_nodes=0),
        "draft": RequestOptions(block_length=fixed, tree_nodes=0),
        "adaptive": RequestOptions(tree_nodes=0),
        "tree": RequestOptions(tree_nodes=args.tree_nodes),
    }
    runtime.check(ways["tree"])
    if not runtime.scheduler.most_tree_nodes or args.tree_nodes == 0:
        del ways["tree"]
    asked = list(dict.fromkeys(args.methods or ways))
    if not set(asked) <= set(ways):
        raise UsageError(
            f"--methods has tree, but {args.bundle} verifies chains: build it with --tree-width 2 or more"
            if not runtime.scheduler.most_tree_nodes
            else "--methods has tree, but --tree-nodes is 0: give a number of nodes, or leave it out"
        )
    return {name: runtime.lengths(ways[name]) for name in asked}


def _print(measured: Sequence[Sequence[MethodPoint]]) -> None:
    lines: list[tuple[str, ...]] = list(HEADINGS)
    for points in measured:
        plain = next((p.to_dict()["tokens_per_second"] for p in points if p.method == "plain"), None)
        lines += [_row(point, point.to_dict(), plain) for point in points]
    print_figures(lines, headings=len(HEADINGS), left=1)


def _row(point: MethodPoint, figures: dict[str, Any], plain: float | None) -> tuple[str, ...]:
    tpot, ttft = figures["tpot_ms"], figures["ttft_ms"]
    drafted = point.method != "plain"
    return (
        point.load.name,
        point.method,
        f"{figures['tokens_per_second']:.0f}",
        f"{figures['tokens_per_second'] / plain:.2f}x" if plain else "",
        "/".join(_milliseconds(tpot[p]) for p in ("p50", "p90", "p99")) if tpot else "",
        "/".join(_milliseconds(ttft[p]) for p in ("p50", "p99")),
        f"{figures['mean_acceptance_length']:.2f}" if drafted else "",
        f"{figures['mean_block_length']:.1f}" if drafted else "",
        f"{figures['host_share']:.0%}",
    )


def _milliseconds(value: float) -> str:
    """At most four characters below 10 s, so that the table fits 80 columns."""
    return next((f"{value:.{d}f}" for d in (2, 1) if len(f"{value:.{d}f}") <= 4), f"{value:.0f}")


def _chart(rows: list[dict[str, Any]], bundle: str) -> str:
    """Throughput and TPOT over the loads, in the order in which they were given."""
    from dflash_trt.reports.charts import load_chart

    def name(row: dict[str, Any]) -> str:
        return str(row["concurrency"] or f"{row['rate']:g}/s")

    loads = list(dict.fromkeys(map(name, rows)))
    by_place = {(row["method"], name(row)): row for row in rows}
    methods = list(dict.fromkeys(row["method"] for row in rows))
    speeds = {m: [by_place[m, load]["tokens_per_second"] for load in loads] for m in methods}
    times = {m: [by_place[m, load]["tpot_ms"].get("p50") for load in loads] for m in methods}
    return load_chart(
        loads,
        {"tokens per second": speeds, "TPOT, ms (median)": times},
        title=f"{bundle}: throughput and time per output token",
        x="requests at a time, or per second",
    )
