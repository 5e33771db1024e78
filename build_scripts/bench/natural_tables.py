"""The tables and the chart of `build_scripts.bench.natural`."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from build_scripts.bench.peers import OURS, kind_of

Record = dict[str, Any]


def count(record: Record) -> tuple[float, float]:
    """Tokens and their seconds of one run. Of one request, without the first token."""
    alone = record["requests"] == 1
    return sum(map(len, record["tokens"])) - alone, record["seconds"] - alone * record["first"]


def rate(records: Iterable[Record]) -> float | None:
    """Tokens per second over all prompts, of the median of each prompt's rounds."""
    prompts: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for record in records:
        prompts[record["prompt"]].append(count(record))
    medians = [[statistics.median(each) for each in zip(*runs, strict=True)] for runs in prompts.values()]
    return sum(n for n, _ in medians) / sum(s for _, s in medians) if medians else None


def quartiles(records: Iterable[Record]) -> list[float]:
    """The first and the third quartile of the runs' tokens per second."""
    rates = [n / s for n, s in map(count, records)]
    first, _, third = statistics.quantiles(rates, method="inclusive") if len(rates) > 1 else [rates[0]] * 3
    return [first, third]


def table(records: list[Record], peers: Iterable[str]) -> dict[str, Record]:
    """The figures of each decoder. The ratio, that of the prompt where it is least, and the same answers are to the
    first one's.
    """
    categories = sorted({r["category"] for r in records})
    rows: dict[str, Record] = {}
    for peer in peers:
        mine = [r for r in records if r["peer"] == peer]
        rounds, given = sum(r["rounds"] for r in mine), {r["prompt"]: r["tokens"] for r in mine}
        alone = {prompt: rate(r for r in mine if r["prompt"] == prompt) or 0 for prompt in given}
        if not rows:
            base, first, base_alone = rate(mine) or 1, given, alone
        rows[peer] = {
            "all": (speed := rate(mine) or 0),
            **{category: rate(r for r in mine if r["category"] == category) for category in categories},
            "ratio": speed / base,
            "least_ratio": min(alone[prompt] / (base_alone[prompt] or 1) for prompt in alone),
            "acceptance_length": 1 + sum(r["accepted"] for r in mine) / rounds if rounds else None,
            "same_answers": sum(tokens == first.get(prompt) for prompt, tokens in given.items()),
            "prompts": len(given),
            "runs": len(mine),
            "quartiles": quartiles(mine),
            "peak_mb": max(r["peak_mb"] for r in mine),
        }
    return rows


def markdown(rows: Mapping[str, Record], categories: list[str]) -> str:
    titles = [*categories, "all", "quartiles", "ratio", "least", "acceptance", "same answers", "peak MB"]
    lines = [f"| | {' | '.join(titles)} |", "|---" * (len(titles) + 1) + "|"]
    for peer, row in rows.items():
        cells = [f"{row[name]:.1f}" for name in (*categories, "all")]
        cells.append("{:.0f}-{:.0f}".format(*row["quartiles"]))
        length = row["acceptance_length"]
        cells += [
            f"{row['ratio']:.2f}",
            f"{row['least_ratio']:.2f}",
            "" if length is None else f"{length:.2f}",
        ]
        cells += [f"{row['same_answers']}/{row['prompts']}", f"{row['peak_mb']:.0f}"]
        lines.append(f"| {label(peer)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def widths_table(records: list[Record]) -> list[Record]:
    """For each decoder and width: answers, tokens that were fed, flips, and answers with a flip."""
    rows = []
    for peer in dict.fromkeys(r["peer"] for r in records):
        mine = [r["flips"] for r in records if r["peer"] == peer]
        for width in mine[0]:
            fed, places = zip(*(flips[width] for flips in mine), strict=True)
            rows.append(
                {
                    "peer": peer,
                    "width": int(width),
                    "answers": len(mine),
                    "changed": sum(map(bool, places)),
                    "tokens": sum(fed),
                    "flips": sum(map(len, places)),
                }
            )
    return rows


def widths_markdown(rows: list[Record]) -> str:
    lines = ["| | width | answers changed | tokens | flips per 1,000 |", "|---|---|---|---|---|"]
    for row in rows:
        cells = [
            label(row["peer"]),
            row["width"],
            f"{row['changed']} of {row['answers']}",
            f"{row['tokens']:,}",
        ]
        lines.append(f"| {' | '.join(map(str, cells))} | {1000 * row['flips'] / row['tokens']:.3g} |")
    return "\n".join(lines)


def label(peer: str) -> str:
    """How a table names a decoder: "dflash-trt, blocks of 4", "llama.cpp Q8_0"."""
    kind, _, weights = peer.partition(":")
    if kind_of(peer) not in OURS:
        return f"{'OpenVINO' if kind == 'openvino' else kind} {weights}"
    method = {"plain": "plain", "draft": "whole blocks", "adaptive": "adaptive"}.get(
        kind, f"blocks of {kind.partition('-')[2]}"
    )
    return f"dflash-trt, {method}" if weights == "default" else f"dflash-trt {weights}, {method}"


def chart(file: Path, rows: Mapping[str, Record], machine: str) -> None:
    """Draw a bar for each decoder's tokens per second, with a line from the first to the third quartile."""
    import matplotlib
    from matplotlib.figure import Figure

    names, speeds = [label(peer) for peer in rows], [row["all"] for row in rows.values()]
    spread = [[abs(row["all"] - row["quartiles"][end]) for row in rows.values()] for end in (0, 1)]
    colours = ["#0969da" if kind_of(peer) in OURS else "#8c959f" for peer in rows]
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        figure = Figure(figsize=(9, 1 + 0.35 * len(rows)), layout="constrained")
        axis = figure.subplots()
        axis.bar_label(axis.barh(names, speeds, xerr=spread, color=colours), fmt="%.0f", padding=4)
        axis.invert_yaxis()
        count = max(row["prompts"] for row in rows.values())
        axis.set(
            title=f"SmolLM2-135M, {count} prompts, {machine}", xlabel="tokens per second, quartiles of runs"
        )
        figure.savefig(file)
