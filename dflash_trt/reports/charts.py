"""Charts as SVG documents, drawn by matplotlib (the extra `charts`). They follow the viewer's light or dark mode."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec

from dflash_trt.errors import DFlashError
from dflash_trt.extras import install

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colours that differ in brightness too, from Okabe and Ito (jfly.uni-koeln.de/color), readable on white and on black.
COLOURS = ("#8c959f", "#e69f00", "#2f81f7", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#b8a500", "#a371f7")
# Stand-ins that become variables: text and axes, and the grid.
_INK, _GRID = "#010203", "#040506"
_STYLE = """<style>
svg { --ink: #24292f; --grid: #d8dee4 }
@media (prefers-color-scheme: dark) { svg { --ink: #e6edf3; --grid: #30363d } }
</style>"""
_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "dflash-trt",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _GRID,
    "grid.linewidth": 0.6,
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _INK),
}

Arguments = ParamSpec("Arguments")
Series = Mapping[str, Sequence[float | None]]


def available() -> bool:
    """Whether the library that draws is installed."""
    return find_spec("matplotlib") is not None


def _require() -> None:
    if not available():
        raise DFlashError(f"charts are drawn by matplotlib, which is not installed: {install('charts')}")


def check(file: Path | None) -> None:
    """Raise DFlashError if a chart cannot be drawn to `file`. To be asked before long work, whose result is drawn."""
    if file is None:
        return
    _require()
    if not file.absolute().parent.is_dir() or file.is_dir():
        raise DFlashError(f"--svg {file}: is a directory, or its directory does not exist")


def _styled(draw: Callable[Arguments, str]) -> Callable[Arguments, str]:
    """Draw with the settings of these charts, whatever those of the program are."""

    @wraps(draw)
    def styled(*arguments: Arguments.args, **options: Arguments.kwargs) -> str:
        _require()
        import matplotlib

        with matplotlib.rc_context(_SETTINGS):
            return draw(*arguments, **options)

    return styled


@_styled
def load_chart(loads: Sequence[str], panels: Mapping[str, Series], *, title: str, x: str) -> str:
    """One panel for each entry of `panels`: its lines over the loads, in their order, at equal distances."""
    figure, axes = _figure(len(panels), title)
    for axis, (name, series) in zip(axes, panels.items(), strict=True):
        for (label, values), colour in zip(series.items(), COLOURS, strict=False):
            axis.plot(range(len(values)), _gaps(values), "o-", label=label, color=colour, markersize=4)
        axis.set_title(name)
        axis.set_xticks(range(len(loads)), loads)
        axis.set_xlabel(x)
        axis.set_ylim(bottom=0)
        axis.grid(axis="x", visible=False)
    _legend(figure, axes[0])
    return _svg(figure, title)


@_styled
def curve_chart(series: Mapping[str, Sequence[tuple[float, float]]], *, title: str, x: str, y: str) -> str:
    """One line for each entry of `series`, through its points. The last one is drawn in bold."""
    figure, (axis,) = _figure(1, title)
    for number, (label, points) in enumerate(series.items()):
        last = number == len(series) - 1
        style: dict[str, Any] = {
            "color": _INK if last else COLOURS[number % len(COLOURS)],
            "linewidth": 2.2 if last else 1.3,
        }
        axis.plot(
            [px for px, _ in points], [py for _, py in points], "o-", label=label, markersize=3, **style
        )
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    axis.set_ylim(bottom=0)
    _legend(figure, axis)
    return _svg(figure, title)


@_styled
def stack_chart(parts: Mapping[str, float], *, limit: float, limit_name: str, title: str, unit: str) -> str:
    """One bar of all parts after one another, against a limit. A name stands in the legend, so none is cut."""
    figure, (axis,) = _figure(1, title, height=1.9)
    left = 0.0
    for (name, size), colour in zip(parts.items(), COLOURS, strict=False):
        axis.barh([0], [size], left=left, color=colour, label=f"{name} {size:.2f}", height=0.6)
        left += size
    axis.axvline(limit, color=_INK, linewidth=1.6)
    axis.set_xlim(0, max(left, limit) * 1.02)
    axis.set_yticks([])
    axis.set_xlabel(f"{unit}; the line is {limit_name}")
    axis.grid(axis="y", visible=False)
    _legend(figure, axis)
    return _svg(figure, title)


@_styled
def bars_chart(panels: Mapping[str, Mapping[str, Mapping[str, float]]], *, title: str) -> str:
    """Panels of groups of bars, one below the other. Each bar has its height above it.

    The same names have the same colours in all panels.
    """
    names = list(dict.fromkeys(n for groups in panels.values() for group in groups.values() for n in group))
    figure, axes = _figure(len(panels), title, height=0.6 + 2.6 * len(panels), across=False)
    width = 0.8 / len(names)
    for axis, (heading, groups) in zip(axes, panels.items(), strict=True):
        for number, name in enumerate(names):
            places = [place + (number - (len(names) - 1) / 2) * width for place in range(len(groups))]
            heights = [group.get(name, 0.0) for group in groups.values()]
            bars = axis.bar(places, heights, width * 0.94, label=name, color=COLOURS[number % len(COLOURS)])
            axis.bar_label(bars, [f"{height:.3g}" for height in heights], padding=2, fontsize=7)
        axis.set_title(heading)
        axis.set_xticks(range(len(groups)), list(groups))
        axis.grid(axis="x", visible=False)
    _legend(figure, axes[0])
    return _svg(figure, title)


def _figure(
    panels: int, title: str, height: float = 3.6, across: bool = True
) -> tuple[Figure, Sequence[Axes]]:
    from matplotlib.figure import Figure as Made

    figure = Made(figsize=(9, height), layout="constrained")
    figure.patch.set_visible(False)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    axes = figure.subplots(*((1, panels) if across else (panels, 1)), squeeze=False).ravel().tolist()
    for axis in axes:
        axis.patch.set_visible(False)
    return figure, axes


def _legend(figure: Figure, axis: Axes) -> None:
    """The names below the panels, in as many rows as they need: they never lie on lines or labels."""
    handles, labels = axis.get_legend_handles_labels()
    if len(labels) > 1:
        room = max(1, int(100 / (max(map(len, labels)) + 6)))
        figure.legend(handles, labels, loc="outside lower left", ncols=room, frameon=False, labelcolor=_INK)


def _gaps(values: Sequence[float | None]) -> list[float]:
    return [float("nan") if value is None else value for value in values]


def _svg(figure: Figure, title: str) -> str:
    out = io.StringIO()
    metadata: dict[str, Any] = {"Date": None, "Title": title, "Creator": None}
    figure.savefig(out, format="svg", metadata=metadata)
    text = re.sub(r"<\?xml.*?<svg", "<svg", out.getvalue(), count=1, flags=re.DOTALL)
    text = text.replace(_INK, "var(--ink)").replace(_GRID, "var(--grid)")
    return re.sub(r"(<svg[^>]*>)", lambda match: f"{match[1]}\n{_STYLE}", text, count=1)
