"""`dflash-trt bench --server`: load on any server of OpenAI's API."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dflash_trt.building.progress import progress_display
from dflash_trt.cli.output import print_figures, print_json, write_chart
from dflash_trt.errors import UsageError

if TYPE_CHECKING:
    from dflash_trt.reports.benchmark import Load

KEY_VARIABLE = "OPENAI_API_KEY"
_TIMES = {"ttft": "TTFT, ms", "tpot": "TPOT, ms", "itl": "ITL, ms", "e2el": "E2E, ms"}
_KINDS = ("mean", "median", "p99")


# Title, and the name of the figure in `LoadPoint.to_dict`.
_COUNTS = {"answered": "completed", "failed": "failed"}
_RATES = {
    "requests per s": "request_throughput",
    "tokens per s": "output_throughput",
    "tokens per s with prompts": "total_token_throughput",
}


def run(args: argparse.Namespace, loads: Sequence[Load]) -> int:
    """Send the loads and print the figures. Returns 1 if a load got no answer."""
    from dflash_trt.prompts import read_prompts
    from dflash_trt.reports.http_stream import LoadedServer
    from dflash_trt.reports.server_load import measure

    _refuse_options_of_bundles(args)
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
        write_chart(args.svg, _chart(names, rows, f"{model} at {server.url}"))
    if args.json:
        print_json({"server": server.url, "model": model, "max_tokens": args.max_tokens, "points": rows})
    else:
        print(f"{model} at {server.url}")
        print(f"{args.requests} requests per load, at most {args.max_tokens} tokens each")
        _print(names, rows)
    return 0 if all(row["completed"] for row in rows) else 1


def _refuse_options_of_bundles(args: argparse.Namespace) -> None:
    """Raise UsageError for an option that says how a bundle is decoded: a server decides that itself."""
    options = ("methods", "block_length", "tree_nodes", "threads")
    given = ["BUNDLE"] if args.bundle is not None else []
    given += [f"--{name.replace('_', '-')}" for name in options if getattr(args, name) is not None]
    if given:
        raise UsageError(f"{given[0]} is given with --server, which decides that itself: leave it out")


def _print(names: list[str], rows: list[dict[str, Any]]) -> None:
    """One column for each load."""
    lines = [["load", *names]]
    lines += [[title, *(str(row[key]) for row in rows)] for title, key in _COUNTS.items()]
    lines += [[title, *(f"{row[key]:.4g}" for row in rows)] for title, key in _RATES.items()]
    if any(row["draft_acceptance_rate"] is not None for row in rows):
        lines.append(["drafts accepted", *(_written(row["draft_acceptance_rate"], "{:.0%}") for row in rows)])
    for name, title in _TIMES.items():
        for kind in _KINDS:
            cells = (_written(row[f"{kind}_{name}_ms"], "{:.1f}") for row in rows)
            lines.append([f"{title if kind == 'mean' else '':<10}{kind}", *cells])
    print_figures(lines)
    for name, row in zip(names, rows, strict=True):
        for fault, count in row["errors"].items():
            print(f"load {name}: {count} failed with {fault}")


def _written(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _chart(names: list[str], rows: list[dict[str, Any]], title: str) -> str:
    from dflash_trt.reports.charts import load_chart

    panels: dict[str, dict[str, list[float | None]]] = {
        _TIMES[name]: {kind: [row[f"{kind}_{name}_ms"] for row in rows] for kind in ("median", "p99")}
        for name in ("ttft", "tpot", "e2el")
    }
    # The first two colours are those of median and p99.
    none: list[float | None] = [None] * len(rows)
    speeds = [row["output_throughput"] for row in rows]
    panels["tokens per second"] = {"median": none, "p99": none, "all": speeds}
    return load_chart(names, panels, title=title, x="load")
