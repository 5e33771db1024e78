"""Types of options that several commands share."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def at_least(minimum: int) -> Callable[[str], int]:
    """An integer, `minimum` or more."""

    def number(text: str) -> int:
        if (value := int(text)) < minimum:
            raise argparse.ArgumentTypeError(f"{value} is below {minimum}")
        return value

    return number


def block_length(text: str) -> int | None:
    """A block length, or None for `auto`."""
    return None if text == "auto" else at_least(1)(text)


def each(kind: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Values separated by commas."""

    def numbers(text: str) -> list[T]:
        return [kind(item) for item in text.split(",")]

    return numbers
