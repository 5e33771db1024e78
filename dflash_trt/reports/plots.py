"""Plots of measurements, drawn by matplotlib (the extra `train` has it) in the format of the file's suffix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from dflash_trt.errors import DFlashError
from dflash_trt.extras import install

Line = Sequence[tuple[float | str, float]]


def available() -> bool:
    return find_spec("matplotlib") is not None


def check(file: Path | None) -> None:
    """Raise DFlashError if no plot can be written to `file`. To be asked before long work, whose result is drawn."""
    if file is None:
        return
    if not available():
        raise DFlashError(f"plots are drawn by matplotlib, which is not installed: {install('plot')}")
    from matplotlib.figure import Figure

    formats = Figure().canvas.get_supported_filetypes()
    if file.suffix.lower().lstrip(".") not in formats:
        raise DFlashError(f"--plot {file}: the name ends in none of .{', .'.join(sorted(formats))}")
    if not file.absolute().parent.is_dir() or file.is_dir():
        raise DFlashError(f"--plot {file}: is a directory, or its directory does not exist")


def plot(file: Path, panels: Mapping[str, Mapping[str, Line]], *, title: str, x: str) -> None:
    """Draw a panel for each entry, with its lines by name through their points (x, y). `x` names the axis."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * len(panels) + 1, 4), layout="constrained")
    figure.suptitle(title)
    for axis, (name, lines) in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True
    ):
        for label, points in lines.items():
            axis.plot(*zip(*points, strict=True), "o-", label=label, markersize=4)
        axis.set(title=name, xlabel=x, ylim=(0, None))
        axis.grid(alpha=0.3)
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower left", ncols=6)
    figure.savefig(file)
