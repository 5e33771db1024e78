"""Options, random prompts and the memory of a process, for all soaks."""

from __future__ import annotations

import argparse
import os
import random
from contextlib import suppress
from pathlib import Path

WORDS = [
    "def add(a, b):",
    "\n    return",
    "the",
    "sum of",
    "17 and 25",
    "stickers",
    ", please.",
    "héllo",
    "{'x': [1, 2]}",
]


def server_options(description: str | None) -> argparse.Namespace:
    """The options of a soak of a server."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def random_prompts(rng: random.Random, count: int) -> list[str]:
    return [" ".join(rng.choices(WORDS, k=rng.randint(1, 20))) for _ in range(count)]


def resident_of(pid: int) -> float:
    """Resident memory of a process, in MB; 0 if it is gone."""
    with suppress(OSError):
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6
    return 0.0
