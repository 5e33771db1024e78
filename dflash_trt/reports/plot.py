"""A line chart as an SVG document."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 720, 440, 70, 20, 44, 52
_COLOURS = ("#6b7280", "#d97706", "#2563eb", "#059669", "#9333ea", "#dc2626", "#0891b2", "#a16207", "#db2777")

Points = Sequence[tuple[float, float, str]]  # x, y and the label of the point


def line_chart(series: Mapping[str, Points], *, title: str, x: str, y: str) -> str:
    """One line per entry of `series`, through its points in their order. Both axes begin at 0."""
    points = [point for line in series.values() for point in line]
    right = _round_up(max((px for px, _, _ in points), default=1.0))
    top = _round_up(max((py for _, py, _ in points), default=1.0))

    def at(px: float, py: float) -> tuple[float, float]:
        across = _LEFT + px / right * (_WIDTH - _LEFT - _RIGHT)
        return round(across, 1), round(_HEIGHT - _BOTTOM - py / top * (_HEIGHT - _TOP - _BOTTOM), 1)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        _text(_LEFT, 18, title, "start", 'font-size="14" font-weight="bold"'),
        _text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 12, x),
        _text(16, _HEIGHT / 2, y, extra=f'transform="rotate(-90 16 {_HEIGHT / 2})"'),
    ]
    for i in range(6):
        px, py = at(right * i / 5, top * i / 5)
        floor, ceiling = _HEIGHT - _BOTTOM, _TOP
        out.append(f'<path d="M{px} {floor}V{ceiling}M{_LEFT} {py}H{_WIDTH - _RIGHT}" stroke="#e5e7eb"/>')
        out.append(_text(px, floor + 18, f"{right * i / 5:.4g}"))
        out.append(_text(_LEFT - 8, py + 4, f"{top * i / 5:.4g}", "end"))
    apart = min(100, (_WIDTH - _LEFT - _RIGHT) // max(1, len(series)))
    for number, (name, line) in enumerate(series.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        places = [at(px, py) for px, py, _ in line]
        path = " ".join(f"{px},{py}" for px, py in places)
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for (px, py), (_, _, label) in zip(places, line, strict=True):
            out.append(f'<circle cx="{px}" cy="{py}" r="3.5" fill="{colour}"/>')
            out.append(_text(px + 6, py - 6, label, "start", f'fill="{colour}" font-size="10"'))
        legend = _WIDTH - _RIGHT - apart * (len(series) - number)
        out.append(_text(legend, 36, name, "start", f'fill="{colour}"'))
    return "\n".join([*out, "</svg>"]) + "\n"


def _round_up(value: float) -> float:
    """The next number of the form 1, 2, 2.5 or 5 times a power of ten."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= value)


def _text(x: float, y: float, text: str, anchor: str = "middle", extra: str = "") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" {extra}>{escape(text)}</text>'
