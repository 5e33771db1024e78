"""Tokens per round as a function of the block length: published, given by the user, or measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from dflash_trt.errors import RequestError, UsageError
from dflash_trt.files.reading import read_object

# Every published figure that the project uses, with its source: acceptance lengths, throughputs, speedups, pass times.
_FIGURES = Path(__file__).with_name("published.json")
_TASK = "HumanEval"


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Acceptance lengths by block length, in tokens per round, the target's own token included."""

    lengths: Mapping[int, float]
    source: str

    def length(self, block: int) -> float:
        """The acceptance length of `block` rows.

        Between two known lengths it is interpolated. Below the shortest, and above the longest, each draft is
        accepted after an accepted one with a constant probability, which gives the nearest known length.
        """
        known = sorted(self.lengths)
        if block in self.lengths:
            return self.lengths[block]
        for low, high in pairwise(known):
            if low < block < high:
                part = (block - low) / (high - low)
                return self.lengths[low] * (1 - part) + self.lengths[high] * part
        nearest = known[0] if block < known[0] else known[-1]
        chance = _chance(nearest, self.lengths[nearest])
        return sum(chance**place for place in range(block))


def _chance(block: int, length: float) -> float:
    """The chance of a draft after an accepted one, if it is the same at each place of the block."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if sum(middle**place for place in range(block)) < length:
            low = middle
        else:
            high = middle
    return high


def figures() -> dict[str, Any]:
    """The published figures. `tables`: rows by pair and task. `steps`: times of single passes, in milliseconds."""
    published: dict[str, Any] = json.loads(_FIGURES.read_text())
    return published


def published(pair: str) -> Acceptance | None:
    """The published acceptance of a known pair's drafter.

    Of the first table with this pair: on HumanEval, or on what it has.
    """
    for table in figures()["tables"]:
        rows = [row for row in table["rows"] if row["pair"] == pair and "acceptance" in row]
        if rows:
            task = _TASK if any(row["task"] == _TASK for row in rows) else rows[0]["task"]
            lengths = {row["block"]: row["acceptance"] for row in rows if row["task"] == task}
            return Acceptance(lengths, f"{table['source']}; {task}")
    return None


def parse(text: str) -> Acceptance:
    """`4=3.1,8=4.1`: acceptance lengths by block length. Or a file that `train evaluate --json` printed.

    Raises RequestError for anything else.
    """
    if Path(text).is_file():
        return measured(Path(text))
    lengths: dict[int, float] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        try:
            block, length = int(name), float(value)
        except ValueError:
            raise UsageError(
                f"--acceptance {text!r}: {part!r} is not BLOCK=TOKENS, and there is no such file; for example "
                "4=3.1,8=4.1"
            ) from None
        if not (block >= 2 and 1 <= length <= block):
            raise UsageError(
                f"--acceptance {text!r}: {part!r}: a block of 2 rows or more gives from 1 token to as many as its rows"
            )
        lengths[block] = length
    return Acceptance(lengths, "given by --acceptance")


def measured(file: Path) -> Acceptance:
    """From the report of `train evaluate --json`: the shares of passes that accepted each place of a whole block."""
    figures = read_object(file).get("all")
    shares = figures.get("acceptance_by_place") if isinstance(figures, dict) else None
    if not isinstance(shares, list) or not shares or not all(isinstance(s, (int, float)) for s in shares):
        raise RequestError(
            f"{file}: has no acceptance_by_place under all; write it with `dflash-trt train evaluate --json`"
        )
    lengths = {block: 1 + sum(shares[: block - 1]) for block in range(2, len(shares) + 2)}
    return Acceptance(lengths, f"measured: {file.name}")
