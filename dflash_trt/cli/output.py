"""How the commands print: aligned columns, byte counts, JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence


def print_table(rows: Iterable[Sequence[str]]) -> None:
    """Print rows of equal length as left-aligned columns."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def print_json(document: object) -> None:
    print(json.dumps(document, indent=2, ensure_ascii=False))


def byte_count(count: float) -> str:
    """A byte count with a decimal unit: 18.4 MB."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
