"""`dflash-trt bench --server`: load on any server of OpenAI's API."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

from dflash_trt.building.progress import progress_display
from dflash_trt.cli.output import colours
from dflash_trt.errors import UsageError

KEY_VARIABLE = "OPENAI_API_KEY"
_TIMES = {"ttft": "TTFT, ms", "tpot": "TPOT, ms", "itl": "ITL, ms", "e2el": "E2E, ms"}
_KINDS = ("mean", "median", "p99")


def run(args: argparse.Namespace) -> int:
    from dflash_trt.prompts import read_prompts
    from dflash_trt.reports import charts
    from dflash_trt.reports.benchmark import Load
    from dflash_trt.reports.http_stream import LoadedServer
    from dflash_trt.reports.server_load import measure

    charts.check(args.svg)
    closed = args.concurrency or ([] if args.rate else [1, 2, 4, 8, 16])
    loads = [Load(n) for n in closed] + [Load(1, rate) for rate in args.rate]
    server = LoadedServer(args.server, os.environ.get(KEY_VARIABLE))
    model = args.model or server.model()
    common = {
        "model": model, "max_tokens": args.max_tokens, "temperature": 0, "stream": True,
        "stream_options": {"include_usage": True}, **({"ignore_eos": True} if args.ignore_eos else {}),
    }  # fmt: skip
    bodies = [
        ("/completions", {**common, "prompt": p.content})
        if isinstance(p.content, str)
        else ("/chat/completions", {**common, "messages": p.content})
        for p in read_prompts(args.prompts, 0)
    ]
    with progress_display() as progress:
        points = list(measure(server, bodies, loads, requests=args.requests, progress=progress))
    names, rows = [point.load.name for point in points], [point.to_dict() for point in points]
    if args.svg:
        args.svg.write_text(_chart(names, rows, f"{model} at {server.url}"), encoding="utf-8")
        print(f"drew {args.svg}", file=sys.stderr)
    if args.json:
        print(
            json.dumps({"server": server.url, "model": model, "max_tokens": args.max_tokens, "points": rows})
        )
    else:
        print(f"{model} at {server.url}")
        print(f"{args.requests} requests per load, at most {args.max_tokens} tokens each")
        _print(names, rows)
    return 0 if all(row["completed"] for row in rows) else 1


def refuse_options_of_bundles(args: argparse.Namespace) -> None:
    """Raise UsageError for an option that says how a bundle is decoded: a server decides that itself."""
    given = {"BUNDLE": args.bundle is not None, "--methods": args.methods is not None}
    given |= {"--block-length": args.block_length is not None, "--tree-nodes": args.tree_nodes is not None}
    given |= {"--threads": args.threads is not None}
    if wrong := [name for name, is_given in given.items() if is_given]:
        raise UsageError(f"{wrong[0]} is given with --server, which decides that itself: leave it out")


def _print(names: list[str], rows: list[dict[str, Any]]) -> None:
    """One column for each load."""
    lines: list[tuple[str, list[str]]] = [("load", names)]
    lines += [
        (title, [str(row[key]) for row in rows])
        for title, key in (("answered", "completed"), ("failed", "failed"))
    ]
    for title, key in (
        ("requests per s", "request_throughput"),
        ("tokens per s", "output_throughput"),
        ("tokens per s with prompts", "total_token_throughput"),
    ):
        lines.append((title, [f"{row[key]:.4g}" for row in rows]))
    if any(row["draft_acceptance_rate"] is not None for row in rows):
        lines.append(("drafts accepted", [_written(row["draft_acceptance_rate"], "{:.0%}") for row in rows]))
    for name, title in _TIMES.items():
        for kind in _KINDS:
            cells = [_written(row[f"{kind}_{name}_ms"], "{:.1f}") for row in rows]
            lines.append((f"{title if kind == 'mean' else '':<10}{kind}", cells))
    left = max(len(title) for title, _ in lines)
    wide = max(len(cell) for _, cells in lines for cell in cells)
    bold = colours(sys.stdout)
    for number, (title, cells) in enumerate(lines):
        line = f"{title:<{left}}" + "".join(f"  {cell:>{wide}}" for cell in cells)
        print(f"\033[1m{line}\033[0m" if bold and not number else line)
    for name, row in zip(names, rows, strict=True):
        for fault, count in row["errors"].items():
            print(f"load {name}: {count} failed with {fault}")


def _written(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _chart(names: list[str], rows: list[dict[str, Any]], title: str) -> str:
    from dflash_trt.reports.charts import load_chart

    panels: dict[str, dict[str, list[float | None]]] = {
        f"{_TIMES[name]}": {kind: [row[f"{kind}_{name}_ms"] for row in rows] for kind in ("median", "p99")}
        for name in ("ttft", "tpot", "e2el")
    }
    # The first two colours are those of median and p99.
    none: list[float | None] = [None] * len(rows)
    speeds = [row["output_throughput"] for row in rows]
    panels["tokens per second"] = {"median": none, "p99": none, "all": speeds}
    return load_chart(names, panels, title=title, x="load")
