"""The caches of an engine, by slot, and copies kept of them.

A slot's length is the number of tokens that its caches have taken in. Attention keeps a row for each token, so its rows
can be cut to any shorter length. A recurrent layer keeps a state, which belongs to one length and cannot be cut.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Kept:
    """A copy of what positions start .. stop-1 left in a slot's caches. It is freed when nobody holds it any more.

    lengths: the lengths from start + 1 to stop that a slot can be given, once this is put back behind the copies of
        the positions before; ascending.
    data: what the caches need to put it back. Only they look at it.
    """

    start: int
    stop: int
    lengths: Sequence[int]
    data: Any


class Caches(Protocol):
    """The caches of one engine. A length that is given to a method is one of the slot's `lengths`."""

    def lengths(self, slot: int, length: int) -> Sequence[int]:
        """The lengths that a slot of this length can be cut to, itself included, 0 left out; ascending."""

    def kept_bytes(self, length: int) -> int:
        """Bytes of a copy of so many positions."""

    def copy(self, source: int, target: int, length: int) -> None:
        """Give a slot the first `length` positions of another one."""

    def keep(self, slot: int, start: int, stop: int) -> Kept:
        """Copy positions start .. stop-1 out of a slot. Raises MemoryError where there is no room."""

    def restore(self, slot: int, kept: Sequence[Kept], length: int) -> None:
        """Give a slot the first `length` positions of copies that follow each other from position 0 on."""

    def compact(self, slot: int, start: int, nodes: Sequence[int]) -> None:
        """Let the node that a pass wrote at start + nodes[i] be position start + i. `nodes` ascend."""

    def clear(self, slot: int, first: int = 0, last: int | None = None) -> None:
        """Make what positions first .. last-1 left in a slot 0."""


def longest(most: int, *lengths: Sequence[int]) -> int:
    """The largest number up to `most` that is in all of these ascending sequences; 0 if none is."""
    while True:
        least = most
        for each in lengths:
            fitting = bisect_right(each, least)
            least = each[fitting - 1] if fitting else 0
        if least == most:
            return most
        most = least
