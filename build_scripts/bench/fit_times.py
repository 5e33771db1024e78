"""Fit the constants of the time model (dflash_trt/planning/times.py) to published throughputs. Needs scipy.

    python -m build_scripts.bench.fit_times [--write]

It fits to all points, and to each half of them, and prints the errors: also on the half that a fit has not seen. The
halves are the points of even and odd number. `--write` writes the constants of all points. The
constants in use are also compared with the other published figures (dflash_trt/planning/published.json): speedups of
drafting, and times of single passes, which are compared without the host's share.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from build_scripts import harness
from dflash_trt.checkpoint.catalogue import known_configs
from dflash_trt.models.configs import read_drafter_config, read_target_config
from dflash_trt.models.inventory import Inventory, take_inventory
from dflash_trt.planning import times
from dflash_trt.planning.acceptance import figures
from dflash_trt.planning.gpus import Gpu, find_gpu
from dflash_trt.planning.work import Work, work_of

_NAMES = [field.name for field in fields(times.Constants)]
_START = [40e-6, 0.8, 0.5, 1e-3, 20e-6, 0.8, 32.0]
_BOUNDS = ([0, 0.3, 0.1, 0, 0, 0.3, 0], [120e-6, 1, 1, 6e-3, 400e-6, 1, 256])
_SCALE = [1e-5, 0.1, 0.1, 1e-3, 1e-5, 0.1, 10.0]


@dataclass(frozen=True, slots=True)
class Throughput:
    """A published throughput in tokens per second: plain, or with drafts (`acceptance` tokens a round)."""

    pair: str
    task: str
    requests: int
    published: float
    acceptance: float | None


@cache
def inventory(pair: str) -> Inventory:
    """What a known pair reads and computes."""
    target, drafter = known_configs(pair)
    return take_inventory(read_target_config(target), read_drafter_config(drafter))


class Table:
    """All points of the published table of throughputs, with the work of their pairs."""

    def __init__(self) -> None:
        (data,) = (table for table in figures()["tables"] if "plain" in table["rows"][0])
        self.source: str = data["source"]
        self.gpu: Gpu = find_gpu(data["gpu"])
        self.context = data["context"]
        (self.block,) = {row["block"] for row in data["rows"]}
        self.points = [
            Throughput(row["pair"], row["task"], requests, value, acceptance)
            for row in data["rows"]
            for kind, acceptance in (("plain", None), ("drafted", row["acceptance"]))
            for requests, value in zip(data["requests"], row[kind], strict=True)
        ]
        self.work: dict[str, tuple[Work, Work]] = {}
        for pair in {point.pair for point in self.points}:
            self.work[pair] = (
                work_of(inventory(pair), "target", self.gpu),
                work_of(inventory(pair), "drafter", self.gpu),
            )

    def throughput(self, point: Throughput, constants: times.Constants) -> float:
        """Tokens per second, by the model."""
        target, drafter = self.work[point.pair]
        setting = {"requests": point.requests, "context": self.context}
        if point.acceptance is None:
            return point.requests / times.plain_seconds(target, self.gpu, constants, **setting)
        seconds = times.round_seconds(
            target,
            drafter,
            self.gpu,
            constants,
            width=self.block,
            requests=point.requests,
            context=self.context,
        )
        return point.requests * point.acceptance / seconds

    def errors(self, constants: times.Constants, points: Sequence[Throughput] | None = None) -> np.ndarray:
        """Relative errors of the throughputs: 0.1 is 10% too fast."""
        chosen = self.points if points is None else points
        return np.array([self.throughput(p, constants) / p.published - 1 for p in chosen])

    def fit(self, points: Sequence[Throughput] | None = None) -> times.Constants:
        """The constants with the least squares of logarithmic errors."""
        from scipy.optimize import least_squares

        chosen = self.points if points is None else points
        solution = least_squares(
            lambda x: np.log1p(self.errors(_constants(x), chosen)),
            np.array(_START) / _SCALE,
            bounds=tuple(np.array(bound) / _SCALE for bound in _BOUNDS),
        )
        return _constants(solution.x)


def _constants(x: Sequence[float]) -> times.Constants:
    return times.Constants(**dict(zip(_NAMES, (float(v) for v in np.array(x) * _SCALE), strict=True)))


def speedups() -> list[dict[str, Any]]:
    """The tables that have speedups, one for each pair. A row without acceptance has that of another table."""
    lengths: dict[tuple[Any, ...], float] = {}
    tables: list[dict[str, Any]] = []
    for table in figures()["tables"]:
        for row in table["rows"]:
            row.setdefault("acceptance", lengths.get(key := (row["pair"], row["task"], row["block"])))
            lengths[key] = row["acceptance"]
        for pair in dict.fromkeys(row["pair"] for row in table["rows"]):
            own = [row for row in table["rows"] if row["pair"] == pair and "speedup" in row]
            if own:
                tables.append({**table, "pair": pair, "rows": own})
    return tables


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
    target = work_of(inventory(table["pair"]), "target", gpu)
    errors = []
    for row in table["rows"]:
        for requests, value in zip(table["requests"], row["milliseconds"], strict=True):
            at = {"requests": requests, "width": row["width"], "context": table["context"]}
            errors.append(1e3 * times.pass_seconds(target, gpu, constants, **at) / value - 1)
    return errors


def describe(errors: np.ndarray) -> str:
    """One line: how many points are near, the median and the largest error."""
    size = np.abs(errors)
    near = ", ".join(f"{(size <= limit).sum()} within {limit:.0%}" for limit in (0.1, 0.15, 0.2))
    worst = errors[size.argmax()]
    return f"{len(size)} points: {near}; median {np.median(size):.1%}, largest {worst:+.0%}"


def main() -> None:
    """Print the fit and its errors."""
    parser = harness.parser(__doc__)
    parser.add_argument("--write", action="store_true", help="write dflash_trt/planning/times.json")
    args = parser.parse_args()
    table = Table()
    whole = table.fit()
    print("all points:", describe(table.errors(whole)))
    for first in (0, 1):
        seen, unseen = table.points[first::2], table.points[1 - first :: 2]
        print(f"half {first + 1}, on the other half:", describe(table.errors(table.fit(seen), unseen)))
    for name, value in asdict(whole).items():
        print(f"  {name} {value:.4g}")
    for point, error in zip(table.points, table.errors(whole), strict=True):
        kind = "plain" if point.acceptance is None else "drafted"
        print(
            f"{point.pair:<22}{point.task:<10}{kind:<8}{point.requests:>3}{point.published:>8.0f}{error:>+7.0%}"
        )
    for tables, errors_of in ((speedups(), speedup_errors), (figures()["steps"], pass_errors)):
        for other in tables:
            print(f"{other['pair']}, {other['source']}\n  {describe(np.array(errors_of(other)))}")
    if args.write:
        rounded = {name: float(f"{value:.4g}") for name, value in asdict(whole).items()}
        errors = np.abs(table.errors(times.Constants(**rounded)))
        document = {
            "source": table.source,
            "gpu": table.gpu.name,
            "median_error": round(float(np.median(errors)), 3),
            "constants": rounded,
        }
        (Path(times.__file__).with_name("times.json")).write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
