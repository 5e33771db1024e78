"""`dflash-trt bench`: throughput and latency under load, plain and drafting, in one run."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_trt.cli.options import at_least, each

if TYPE_CHECKING:
    from dflash_trt.reports.benchmark import Point

SUMMARY = "measure throughput and latency under load"
DESCRIPTION = """\
Serve the same greedy requests in three ways: plain decoding, drafting with a fixed block length, and drafting with the
adaptive length. A closed loop sends a request after the previous answer. An open loop has Poisson arrivals. The methods
take turns within each load. The last line is one JSON document.

Compare TPOT: (last token - first token) / (tokens - 1) of each request. The time between two tokens is bursty with
block drafting, because a round gives several tokens at once.
"""
EXAMPLES = """\
examples:
  dflash-trt bench bundles/tiny
  dflash-trt bench bundles/tiny --concurrency 1,8 --requests 64 --svg tiny.svg
  dflash-trt bench bundles/tiny --rate 20,40 --methods plain,draft
  dflash-trt bench bundles/mine --prompts prompts.jsonl --max-tokens 256 --json

A prompt file is as `dflash-trt verify --help` describes it.
"""
METHODS = ("plain", "draft", "adaptive")
COLUMNS = "{:>8}  {:<8}  {:>9}  {:>8}  {:>22}  {:>15}  {:>10}  {:>5}  {:>6}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", type=Path, metavar="BUNDLE", help="a directory made by `dflash-trt build`")
    parser.add_argument(
        "--concurrency",
        type=each(at_least(1)),
        metavar="N,...",
        help="closed loops: requests at a time (default: 1,2,4,8,16, or none with --rate)",
    )
    parser.add_argument(
        "--rate",
        type=each(_positive),
        default=[],
        metavar="R,...",
        help="open loops: requests per second",
    )
    parser.add_argument(
        "--requests",
        type=at_least(1),
        default=96,
        metavar="N",
        help="requests per load and method (default: 96)",
    )
    parser.add_argument(
        "--max-tokens", type=at_least(2), default=64, metavar="N", help="tokens per request (default: 64)"
    )
    parser.add_argument(
        "--methods", type=each(_method), default=list(METHODS), metavar="M,...",
        help="any of plain, draft, adaptive (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--block-length", type=int, metavar="N", help="block length of `draft` (default: the block size)"
    )
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE", help="a JSONL file (default: the shipped prompts)"
    )
    parser.add_argument(
        "--threads", type=at_least(1), metavar="N", help="CPU threads per pass (default: all)"
    )
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw throughput against TPOT")
    parser.add_argument("--json", action="store_true", help="print only the JSON line")


def _positive(text: str) -> float:
    if not (value := float(text)) > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _method(text: str) -> str:
    if text not in METHODS:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(METHODS)}")
    return text


def run(args: argparse.Namespace) -> int:
    from dflash_trt.hardware import processor
    from dflash_trt.prompts import read_prompts
    from dflash_trt.reports.benchmark import Load, bench
    from dflash_trt.runtime import Runtime

    closed = args.concurrency or ([] if args.rate else [1, 2, 4, 8, 16])
    most = max(closed, default=16)
    loads = [Load(n) for n in closed] + [Load(most, rate) for rate in args.rate]
    say: Callable[..., None] = (lambda *_: None) if args.json else print
    runtime = Runtime(
        args.bundle,
        max_batch_size=most,
        prefill_chunk=512,
        prefix_cache_bytes=0,
        threads=args.threads,
        check="size",
    )
    try:
        prompts = [
            runtime.tokenizer.encode(p.content)
            if isinstance(p.content, str)
            else runtime.chat_prompt(p.content)
            for p in read_prompts(args.prompts, 0)
        ]
        fixed = args.block_length or runtime.block_size
        lengths = {"plain": (False, 1), "draft": (True, fixed), "adaptive": (True, None)}
        methods = {name: runtime.lengths(*lengths[name]) for name in dict.fromkeys(args.methods)}
        say(f"{processor()}; {args.requests} requests per load and method, at most {args.max_tokens} tokens")
        say(f"draft: {fixed} tokens per round")
        say(
            COLUMNS.format(
                "load", "method", "tokens/s", "to plain", "TPOT ms p50/p90/p99", "TTFT ms p50/p99", "acceptance",
                "block", "host"
            )
        )  # fmt: skip
        rows: list[dict[str, Any]] = []
        same = True
        for points in bench(
            runtime, prompts, loads, methods, requests=args.requests, max_tokens=args.max_tokens
        ):
            same &= all(point.outputs == points[0].outputs for point in points)
            plain = next((p.to_dict()["tokens_per_second"] for p in points if p.method == "plain"), None)
            for point in points:
                rows.append(point.to_dict())
                say(_row(point, rows[-1], plain))
    finally:
        runtime.pair.close()
    say(f"tokens of the methods: {'all equal' if same else 'DIFFERENT'}")
    say("TPOT is a mean per request: tokens come in bursts, a round at a time.")
    if args.svg:
        args.svg.write_text(_chart(rows, args.bundle.name))
        say(f"drew {args.svg}")
    document = {"bundle": args.bundle.name, "processor": processor(), "max_tokens": args.max_tokens}
    document |= {"block_size": runtime.block_size, "fixed_block_length": fixed, "same_tokens": same}
    print(json.dumps(document | {"points": rows}))
    return 0 if same else 1


def _row(point: Point, figures: dict[str, Any], plain: float | None) -> str:
    tpot, ttft = figures["tpot_ms"], figures["ttft_ms"]
    drafted = point.method != "plain"
    return COLUMNS.format(
        point.load.name,
        point.method,
        f"{figures['tokens_per_second']:.0f}",
        f"{figures['tokens_per_second'] / plain:.2f}x" if plain else "",
        "/".join(f"{tpot[p]:.2f}" for p in ("p50", "p90", "p99")) if tpot else "",
        "/".join(f"{ttft[p]:.1f}" for p in ("p50", "p99")),
        f"{figures['mean_acceptance_length']:.2f}" if drafted else "",
        f"{figures['mean_block_length']:.1f}" if drafted else "",
        f"{figures['host_share']:.0%}",
    )


def _chart(rows: list[dict[str, Any]], bundle: str) -> str:
    from dflash_trt.reports.plot import line_chart

    series: dict[str, list[tuple[float, float, str]]] = {}
    for row in rows:
        label = row["concurrency"] or f"{row['rate']:g}/s"
        name = row["method"] if row["rate"] is None else f"{row['method']}, open"
        point = (row["tpot_ms"].get("mean", 0.0), row["tokens_per_second"], str(label))
        series.setdefault(name, []).append(point)
    return line_chart(
        series,
        title=f"{bundle}: throughput against latency",
        x="TPOT, ms (mean over requests; tokens come in bursts). Labels: requests at a time, or per second",
        y="tokens per second",
    )
