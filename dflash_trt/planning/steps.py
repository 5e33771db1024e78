"""Measured pass times: the file that `bench --steps` writes, and the times between its points.

The file is a JSON object. `passes` has the seconds of a pass by kind, batch, rows for each request, and context. Kinds
are "target" and "drafter", or "round" where the engine runs whole rounds by itself. `host` has the seconds of a round
outside its passes. Each kind is measured on a whole grid, so every time within it can be interpolated.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from dflash_trt import hardware
from dflash_trt.bundle.manifest import Bundle, digest
from dflash_trt.checkpoint.catalogue import PAIRS, known_configs, known_pair
from dflash_trt.errors import RequestError, UsageError, quoted
from dflash_trt.files.reading import read_object
from dflash_trt.formats import ALGORITHMS
from dflash_trt.planning.acceptance import Chain
from dflash_trt.planning.gpus import find_gpu, gpus

FORMAT, VERSION = "dflash-trt steps", 1
TARGET, DRAFTER, ROUND, HOST = "target", "drafter", "round", "host"
_WRITE = "write it again with `dflash-trt bench BUNDLE --steps FILE`"
_OBJECTS = ("machine", "versions", "bundle")


@dataclass(frozen=True, slots=True)
class Grid:
    """Seconds at every combination of the points on each axis, and linear between them."""

    axes: tuple[tuple[int, ...], ...]
    seconds: Mapping[tuple[int, ...], float]

    def __call__(self, *at: float) -> float:
        """The time at a place within the axes."""
        corners: dict[tuple[int, ...], float] = {(): 1.0}
        for axis, value in zip(self.axes, at, strict=True):
            ends = _ends(axis, value)
            corners = {
                (*place, end): weight * share
                for place, weight in corners.items()
                for end, share in ends
                if share
            }
        return sum(weight * self.seconds[place] for place, weight in corners.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """A steps file: what was measured where, and a grid for each kind of pass.

    Axes of the passes: batch, rows for each request, context. Axes of "host": batch, rows.
    """

    file: str
    machine: Mapping[str, Any]
    versions: Mapping[str, Any]
    bundle: Mapping[str, Any]
    grids: Mapping[str, Grid]

    @property
    def name(self) -> str:
        return str(self.bundle["name"])

    @property
    def known(self) -> str | None:
        """The name of the known pair that was measured."""
        for name in (self.name, str(self.bundle["target"].get("name"))):
            if (pair := known_pair(name)) is not None:
                return pair.name
        recorded = self.bundle["target"].get("config_sha256")
        configs = {pair.name: known_configs(pair.name)[0] / "config.json" for pair in PAIRS}
        return next((name for name, config in configs.items() if digest(config) == recorded), None)

    @property
    def precision(self) -> str | None:
        """The formats that the bundle was built in, as for `build --precision`; None: as stored."""
        stored = self.bundle.get("quantization") or {}
        roles = {role: ALGORITHMS[name].scheme for role, name in stored.items() if name in ALGORITHMS}
        return ",".join(f"{role}={scheme}" for role, scheme in roles.items()) or None

    @property
    def gpu(self) -> str | None:
        """The name in `plan --gpus` of the machine's GPU. A GPU that is not listed keeps its own name."""
        if not self.machine["gpus"]:
            return None
        reported = str(self.machine["gpus"][0])
        return next((name for name, gpu in gpus().items() if gpu.is_named(reported)), reported)

    def check_target(self, target: str) -> None:
        """Raise RequestError if the steps are not of this target: a known pair, or a checkpoint's directory."""
        pair, names = known_pair(target), {self.name, self.bundle["target"].get("name")}
        config = Path(target) / "config.json"
        same = target in names or (pair is not None and pair.name == self.known)
        if not same and config.is_file():
            same = digest(config) == self.bundle["target"].get("config_sha256")
        if not same:
            raise UsageError(
                f"--target {target}: {self.file} was measured with {self.known or self.name}; leave --target out, or "
                "measure a bundle of that target"
            )

    def differs_from(self, bundle: Bundle) -> str:
        """The first thing in which a bundle or this machine differs from the file; empty if nothing does."""
        manifest = bundle.manifest
        of = {"engine": manifest["engine"], "quantization": manifest.get("quantization", {})}
        for name, value in of.items():
            if self.bundle[name] != value:
                return f"its {name} is {quoted(self.bundle[name])}, and the bundle's is {quoted(value)}"
        for side in (TARGET, DRAFTER):
            recorded, own = (of[side].get("config_sha256") for of in (self.bundle, manifest))
            if recorded != own:
                return f"it was measured with another {side}"
        here = [hardware.processor(), *(gpu["name"] for gpu in hardware.gpus())]
        return "" if self.place == ", ".join(here) else f"it was measured on {self.place}"

    def check_gpu(self, name: str) -> None:
        """Raise an error if the steps were not measured on this GPU."""
        gpu = find_gpu(name)
        if not any(gpu.is_named(each) for each in self.machine["gpus"]):
            raise UsageError(
                f"--gpu {name}: {self.file} was measured on {self.place}; leave --gpu out, or measure on that GPU"
            )

    @property
    def place(self) -> str:
        """The machine in a few words."""
        return ", ".join([str(self.machine["processor"]), *self.machine["gpus"]])

    @property
    def plain(self) -> bool:
        """Whether plain decoding was measured."""
        return TARGET in self.grids

    @property
    def block_size(self) -> int:
        return int(self.bundle["block_size"])

    @property
    def contexts(self) -> tuple[int, int]:
        """The shortest and the longest measured context."""
        axis = self._target.axes[2]
        return axis[0], axis[-1]

    @property
    def _target(self) -> Grid:
        return self.grids.get(TARGET) or self.grids[ROUND]

    def layout(self, context: int) -> MeasuredLayout:
        """The times behind this many rows of context. Raises RequestError for a context that was not measured."""
        least, most = self.contexts
        if not least <= context <= most:
            raise UsageError(
                f"--context {context}: {self.file} has passes behind {least} to {most} rows; choose a context there, "
                "or measure a bundle of a larger --max-seq-len"
            )
        return MeasuredLayout(self, context, int(self.bundle["gpus"]), self._target.axes[0][-1])


@dataclass(frozen=True, slots=True)
class MeasuredLayout:
    """The measured layout, as `curve.Layout`."""

    steps: Steps
    context: int
    gpus: int
    most: int

    def plain(self, batch: int) -> float | None:
        """Seconds of a step of plain decoding: one token for each request."""
        grids = self.steps.grids
        if TARGET not in grids:
            return None
        return grids[TARGET](batch, 1, self.context) + grids[HOST](batch, 1)

    def round(self, batch: int, block: int) -> float | None:
        """Seconds of a round with a block of this many rows for each request. None where it was not measured."""
        grids = self.steps.grids
        if ROUND in grids:
            axis = grids[ROUND].axes[1]
            return grids[ROUND](batch, block, self.context) if axis[0] <= block <= axis[-1] else None
        return (
            grids[DRAFTER](batch, block, self.context)
            + grids[TARGET](batch, block, self.context)
            + grids[HOST](batch, block)
        )

    def chain(self, batch: int, chain: Chain) -> None:
        """Not measured."""


def read_steps(path: Path) -> Steps:
    """Read a steps file.

    Raises RequestError that names the file, and the field or the missing measurement.
    """
    values = read_object(path, kind=RequestError)
    if values.get("format") != FORMAT:
        raise RequestError(
            f"{path}: format is {quoted(values.get('format'))}, expected {FORMAT!r}; `dflash-trt bench BUNDLE --steps "
            "FILE` writes such a file"
        )
    if values.get("version") != VERSION:
        raise RequestError(
            f"{path}: version is {quoted(values.get('version'))}, but this program reads version {VERSION}; {_WRITE}"
        )
    for name in _OBJECTS:
        if not isinstance(values.get(name), dict):
            raise RequestError(f"{path}: {name} is {quoted(values.get(name))}, expected an object; {_WRITE}")
    _check_fields(path, values)
    found: dict[str, dict[tuple[int, ...], float]] = {}
    for place, row in _rows(path, values, "passes"):
        kind = row.get("pass")
        if kind not in (TARGET, DRAFTER, ROUND):
            raise RequestError(f"{path}: {place}.pass is {quoted(kind)}, expected target, drafter or round")
        _add(path, place, found.setdefault(kind, {}), row, ("batch", "rows", "context"))
    for place, row in _rows(path, values, HOST):
        _add(path, place, found.setdefault(HOST, {}), row, ("batch", "rows"))
    if set(found) not in ({TARGET, DRAFTER, HOST}, {ROUND}):
        raise RequestError(
            f"{path}: has times of {', '.join(found) or 'nothing'}, expected target, drafter and host, or round; "
            f"{_WRITE}"
        )
    grids = {kind: _grid(path, kind, seconds) for kind, seconds in found.items()}
    _check_ranges(path, grids, values["bundle"]["block_size"])
    return Steps(
        file=path.name,
        machine=values["machine"],
        versions=values["versions"],
        bundle=values["bundle"],
        grids=grids,
    )


def _check_fields(path: Path, values: Mapping[str, Any]) -> None:
    expected: dict[str, tuple[Any, type]] = {
        "machine.processor": (values["machine"].get("processor"), str),
        "machine.gpus": (values["machine"].get("gpus"), list),
        "bundle.name": (values["bundle"].get("name"), str),
        "bundle.engine": (values["bundle"].get("engine"), str),
        "bundle.target": (values["bundle"].get("target"), dict),
        "bundle.quantization": (values["bundle"].get("quantization"), dict),
        "bundle.block_size": (values["bundle"].get("block_size"), int),
        "bundle.gpus": (values["bundle"].get("gpus"), int),
    }
    for name, (value, kind) in expected.items():
        if type(value) is not kind or (isinstance(value, int) and value < 1):
            raise RequestError(f"{path}: {name} is {quoted(value)}, expected {_KINDS[kind]}; {_WRITE}")


_KINDS = {str: "a text", list: "a list", dict: "an object", int: "an integer above 0"}


def _rows(path: Path, values: Mapping[str, Any], name: str) -> list[tuple[str, dict[str, Any]]]:
    rows = values.get(name)
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise RequestError(f"{path}: {name} is not a list of objects; {_WRITE}")
    return [(f"{name}[{number}]", row) for number, row in enumerate(rows)]


def _add(
    path: Path,
    place: str,
    seconds: dict[tuple[int, ...], float],
    row: Mapping[str, Any],
    names: Sequence[str],
) -> None:
    for name in names:
        value = row.get(name)
        if type(value) is not int or value < (0 if name == "context" else 1):
            raise RequestError(f"{path}: {place}.{name} is {quoted(value)}, expected an integer above 0")
    value = row.get("seconds")
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
        raise RequestError(f"{path}: {place}.seconds is {quoted(value)}, expected a time in seconds")
    at = tuple(row[name] for name in names)
    if at in seconds:
        raise RequestError(f"{path}: {place} measures {_where(names, at)} a second time; remove one of them")
    seconds[at] = float(value)


def _grid(path: Path, kind: str, seconds: Mapping[tuple[int, ...], float]) -> Grid:
    axes = tuple(tuple(sorted(set(axis))) for axis in zip(*seconds, strict=True))
    for at in product(*axes):
        if at not in seconds:
            where = _where(("batch", "rows", "context"), at)
            raise RequestError(f"{path}: has no time of {kind} at {where}; {_WRITE}")
    return Grid(axes, seconds)


def _check_ranges(path: Path, grids: Mapping[str, Grid], block_size: int) -> None:
    """Every time that a layout may ask for lies within its grid."""
    wanted = {TARGET: 1, DRAFTER: 2, HOST: 1}
    batches = {kind: (grid.axes[0][0], grid.axes[0][-1]) for kind, grid in grids.items()}
    for kind, grid in grids.items():
        rows = grid.axes[1]
        if batches[kind] != next(iter(batches.values())) or grid.axes[0][0] != 1:
            raise RequestError(
                f"{path}: batches of {kind} are {batches[kind][0]} to {batches[kind][1]}, expected the same from 1 on "
                f"for each; {_WRITE}"
            )
        if rows[-1] != block_size or rows[0] > wanted.get(kind, block_size):
            raise RequestError(
                f"{path}: rows of {kind} are {rows[0]} to {rows[-1]}, expected {wanted.get(kind, block_size)} to the "
                f"block size {block_size}; {_WRITE}"
            )


def _where(names: Sequence[str], at: Sequence[int]) -> str:
    return ", ".join(f"{name} {value}" for name, value in zip(names, at, strict=False))


def _ends(axis: Sequence[int], value: float) -> tuple[tuple[int, float], ...]:
    """The points around a value, with their shares."""
    after = bisect_right(axis, value)
    if after == 0 or (after == len(axis) and value > axis[-1]):
        raise ValueError(f"{value} is outside {axis[0]} to {axis[-1]}")
    if axis[after - 1] == value:
        return ((axis[after - 1], 1.0),)
    low, high = axis[after - 1], axis[after]
    part = (value - low) / (high - low)
    return (low, 1 - part), (high, part)
