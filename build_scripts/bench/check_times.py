"""The time model against published figures that it was not fitted to, and the curve of the published "15x".

    python -m build_scripts.bench.check_times [--svg docs/planning_15x.svg]

`dflash_trt/planning/published.json` has the figures: speedups of drafting at a number of requests, and times of single
passes. A pass is compared without the host's share.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from build_scripts.bench.fit_times import describe
from dflash_trt.checkpoint.catalogue import known_configs
from dflash_trt.files.disk import whole_file
from dflash_trt.models.configs import read_drafter_config, read_target_config
from dflash_trt.models.inventory import Inventory, take_inventory
from dflash_trt.planning import times
from dflash_trt.planning.acceptance import figures, published
from dflash_trt.planning.curve import CHAIN, PLAIN, Curves, Point, compute_curves
from dflash_trt.planning.gpus import find_gpu
from dflash_trt.planning.layouts import model_layouts
from dflash_trt.planning.memory import Settings
from dflash_trt.planning.work import work_of

# The slice that the statement is about, as shares of plain decoding's top speed.
SLICE = (0.80, 0.85)


@cache
def inventory(pair: str) -> Inventory:
    target, drafter = known_configs(pair)
    return take_inventory(read_target_config(target), read_drafter_config(drafter))


def speedups() -> list[dict[str, Any]]:
    """The tables that have speedups, one for each pair. A row without acceptance has that of another table."""
    lengths: dict[tuple[Any, ...], float] = {}
    found: list[dict[str, Any]] = []
    for table in figures()["tables"]:
        rows = [row for row in table["rows"] if "method" not in row]
        for row in rows:
            row.setdefault("acceptance", lengths.get(key := (row["pair"], row["task"], row["block"])))
            lengths[key] = row["acceptance"]
        for pair in dict.fromkeys(row["pair"] for row in rows):
            own = [row for row in rows if row["pair"] == pair and "speedup" in row]
            if own:
                found.append({**table, "pair": pair, "rows": own})
    return found


def speedup_errors(table: dict[str, Any]) -> list[float]:
    """Relative errors of the model's speedups."""
    gpu, constants = find_gpu(table["gpu"]), times.built_in()
    target, drafter = (work_of(inventory(table["pair"]), side, gpu) for side in ("target", "drafter"))
    errors = []
    for row in table["rows"]:
        for requests, value in zip(table["requests"], row["speedup"], strict=True):
            at = {"requests": requests, "context": table["context"]}
            plain = times.plain_seconds(target, gpu, constants, **at)
            drafted = times.round_seconds(target, drafter, gpu, constants, width=row["block"], **at)
            errors.append(row["acceptance"] * plain / drafted / value - 1)
    return errors


def pass_errors(table: dict[str, Any]) -> list[float]:
    """Relative errors of the model's pass times."""
    gpu, constants = find_gpu(table["gpu"]), times.built_in()
    target = work_of(inventory(table["pair"]), "target", gpu, gpus=table["gpus"])
    errors = []
    for row in table["rows"]:
        for requests, value in zip(table["requests"], row["milliseconds"], strict=True):
            at = {"requests": requests, "width": row["width"], "context": table["context"]}
            errors.append(1e3 * times.pass_seconds(target, gpu, constants, **at) / value - 1)
    return errors


def statement() -> Curves:
    """The curves of gpt-oss-120b on a node of 8 B300."""
    settings = Settings(
        engine="tensorrt-llm", gpu=find_gpu("b300"), max_seq_len=2048, max_batch_size=1, block_size=10
    )
    pair = "gpt-oss-120b"
    acceptance, chain = published(pair)
    assert acceptance is not None
    return compute_curves(
        model_layouts(inventory(pair), settings, name=pair, context=2048),
        acceptance,
        name=pair,
        place="8 x b300",
        times=times.SOURCE,
        context=2048,
        blocks=(4, 6, 8, 10),
        chain=chain,
    )


def draw(curves: Curves) -> str:
    from dflash_trt.reports.charts import curve_chart

    def line(points: Sequence[Point]) -> list[tuple[float, float]]:
        return [(point.speed, point.throughput) for point in points]

    blocks = [point for name in curves.blocks for point in curves.frontier(name)]
    best = [p for p in blocks if not any(q.speed >= p.speed and q.throughput > p.throughput for q in blocks)]
    top = curves.top_speed
    return curve_chart(
        {
            PLAIN: line(curves.frontier(PLAIN)),
            CHAIN: line(curves.frontier(CHAIN)),
            "DFlash, best block": line(sorted(best, key=lambda point: point.speed)),
        },
        title=f"{curves.target} on {curves.place}, code: the slice of the published 15x (model)",
        x="tokens per second of one user; the band is 80 to 85% of plain decoding's top speed",
        y="tokens per second of one GPU",
        band=(SLICE[0] * top, SLICE[1] * top),
        log=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--svg", type=Path)
    args = parser.parse_args()
    for tables, errors_of in ((speedups(), speedup_errors), (figures()["steps"], pass_errors)):
        for table in tables:
            errors = np.array(errors_of(table))
            print(f"{table['pair']}, {table['source']}\n  {describe(errors)}")
            print("  " + " ".join(f"{error:+.0%}" for error in errors))
    if args.svg:
        with whole_file(args.svg) as file:
            file.write(draw(statement()).encode())


if __name__ == "__main__":
    main()
