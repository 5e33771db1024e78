"""Draw the README's picture, docs/speed.svg, from the README's own table: tokens per second with and without
drafting.

python -m build_scripts.picture                # the table of the README
python -m build_scripts.picture natural.json   # docs/natural.svg, from the JSON line of build_scripts.bench.natural
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from dflash_trt.reports import charts

ROOT = Path(__file__).parent.parent
README, PICTURE = ROOT / "README.md", ROOT / "docs" / "speed.svg"

WIDTH, PANEL, GAP, TOP, HEIGHT, BOTTOM, BAR = 760, 350, 40, 62, 190, 40, 26

# Transparent, with other colours in dark mode. An image in a README follows the viewer's mode.
STYLE = """\
text { font: 13px sans-serif; fill: #24292f } .small { font-size: 11px } .title { font-weight: bold }
.plain { fill: #8c959f } .drafting { fill: #0969da } .axis { stroke: #8c959f }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .plain { fill: #7d8590 } .drafting { fill: #58a6ff }
}"""


class Speeds(NamedTuple):
    """Tokens per second of one pair, by category."""

    pair: str
    plain: dict[str, float]
    drafting: dict[str, float]


def read_table(text: str) -> list[Speeds]:
    """The table whose header begins with `tokens per second`: two rows per pair, plain and drafting.

    Raises ValueError if there is no such table, or a row does not fit it.
    """
    lines = iter(text.splitlines())
    header = next((line for line in lines if line.startswith("| tokens per second |")), None)
    if header is None or not next(lines, "").startswith("|---"):
        raise ValueError("README.md has no table that begins with: | tokens per second |")
    categories = _cells(header)[1:]
    rows: dict[str, dict[str, dict[str, float]]] = {}
    for line in lines:
        if not line.startswith("|"):
            break
        name, *cells = _cells(line)
        pair, _, method = name.replace("`", "").replace("*", "").partition(", ")
        if len(cells) != len(categories) or method not in ("plain", "drafting"):
            raise ValueError(f"README.md: the row {line!r} does not fit the table's header {header!r}")
        speeds = (float(cell.replace("*", "").split()[0]) for cell in cells)
        rows.setdefault(pair, {})[method] = dict(zip(categories, speeds, strict=True))
    return [Speeds(pair, methods["plain"], methods["drafting"]) for pair, methods in rows.items()]


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def draw(pairs: list[Speeds]) -> str:
    """An SVG document with one panel of bars per pair, all to the same scale."""
    top = max(speed for each in pairs for speed in each.drafting.values())
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {TOP + HEIGHT + BOTTOM}" role="img">',
        "<title>Tokens per second with and without drafting</title>",
        f"<style>{STYLE}</style>",
        _text(0, 16, "Tokens per second on 2 CPU cores: the same tokens, with and without drafting", "title"),
    ]
    for i, each in enumerate(pairs):
        out += _panel(each, i * (PANEL + GAP), HEIGHT / top)
    for x, name in ((WIDTH - 190, "plain"), (WIDTH - 100, "drafting")):
        out.append(f'<rect class="{name}" x="{x}" y="31" width="12" height="12"/>')
        out.append(_text(x + 17, 42, name))
    return "\n".join([*out, "</svg>"]) + "\n"


def _panel(speeds: Speeds, left: float, scale: float) -> list[str]:
    floor, step = TOP + HEIGHT, PANEL / len(speeds.plain)
    out = [_text(left, 42, speeds.pair, "title")]
    for i, (category, plain) in enumerate(speeds.plain.items()):
        middle, drafting = left + (i + 0.5) * step, speeds.drafting[category]
        for x, name, speed in ((middle - BAR - 1, "plain", plain), (middle + 1, "drafting", drafting)):
            height = round(speed * scale, 1)
            out.append(
                f'<rect class="{name}" x="{x:.1f}" y="{floor - height:.1f}" width="{BAR}" height="{height}"/>'
            )
        label = f"{drafting / plain:.1f}x"
        out.append(_text(middle + BAR / 2, floor - drafting * scale - 5, label, "small", "middle"))
        out.append(_text(middle, floor + 18, category, "", "middle"))
    out.append(f'<path class="axis" d="M{left} {floor}h{PANEL}"/>')
    return out


def bars(speeds: Mapping[str, float], title: str) -> str:
    """An SVG document with a line for each decoder: its name, a bar, and tokens per second."""
    left, step = 230, 26
    scale = (WIDTH - left - 60) / max(speeds.values())
    height = 34 + step * len(speeds)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style>",
        _text(0, 16, title, "title"),
    ]
    for i, (name, speed) in enumerate(speeds.items()):
        y, width = 30 + step * i, round(speed * scale, 1)
        kind = "drafting" if name.startswith("dflash-trt") else "plain"
        out.append(_text(left - 8, y + 14, name, "", "end"))
        out.append(f'<rect class="{kind}" x="{left}" y="{y}" width="{width}" height="18"/>')
        out.append(_text(left + width + 6, y + 14, f"{speed:.0f}"))
    return "\n".join([*out, "</svg>"]) + "\n"


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    style = f' class="{kind}"' if kind else ""
    return f'<text{style} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def natural(document: Mapping[str, Any], drafting: str = "adaptive:default") -> str:
    """Plain decoding against drafting on natural text, by category, from what `build_scripts.bench.natural` prints.

    Raises ValueError where it has no such rows.
    """
    rows = document["tables"].get("decode@0", {})
    if missing := [name for name in ("plain:default", drafting) if name not in rows]:
        raise ValueError(f"the table decode@0 has no row {missing[0]}, only: {', '.join(rows)}")
    plain, drafted = rows["plain:default"], rows[drafting]
    figures = ("all", "ratio", "acceptance_length", "same_answers", "peak_mb")
    groups = {
        name: {"plain": plain[name], "drafting": drafted[name]} for name in plain if name not in figures
    }
    groups["all"] = {"plain": plain["all"], "drafting": drafted["all"]}
    title = f"SmolLM2-135M: tokens per second on natural text, {document['processor']}"
    return charts.bar_chart(groups, title=title, y="tokens per second", compare=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("natural", type=Path, nargs="?", metavar="FILE", help="its last line is read")
    parser.add_argument(
        "--drafting", default="adaptive:default", metavar="PEER", help="the row to compare with plain"
    )
    args = parser.parse_args()
    if args.natural is not None:
        document = json.loads(args.natural.read_text(encoding="utf-8").splitlines()[-1])
        out = ROOT / "docs" / "natural.svg"
        out.write_text(natural(document, args.drafting), encoding="utf-8")
        print(out.relative_to(ROOT))
        return
    PICTURE.write_text(draw(read_table(README.read_text(encoding="utf-8"))), encoding="utf-8")
    print(PICTURE.relative_to(ROOT))


if __name__ == "__main__":
    main()
