"""Which policy a request's options ask for, and the times of passes that are kept for later processes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from dflash_trt.decoding.length.adaptive import MOST_NODES, AdaptiveLength
from dflash_trt.decoding.length.policy import FixedLength, Lengths
from dflash_trt.decoding.length.times import Kept, PassTimes
from dflash_trt.decoding.length.trees import FixedCopies, FixedTrees
from dflash_trt.decoding.params import RequestOptions
from dflash_trt.errors import DFlashError
from dflash_trt.files.disk import write_object
from dflash_trt.files.reading import read_object
from dflash_trt.logs import warn_once

_log = logging.getLogger(__name__)
_BYTES = 1 << 20
_KINDS = ("draft_seconds", "verify_seconds")


class Policies:
    """Makes the policies of one scheduler. There is one adaptive policy, which all requests share and which learns.

    place: the file with times of passes of an earlier process, which `keep` writes; None: no file.
    """

    def __init__(self, block_size: int, place: Path | None = None, *, drafter: bool = True) -> None:
        """drafter: whether the bundle has one."""
        self.block_size, self._place, self._drafter = block_size, place, drafter
        self._times = self._read()
        self._adaptive: dict[int, AdaptiveLength] = {}  # by the most nodes of a tree

    def __call__(self, options: RequestOptions, most_tree_nodes: int) -> Lengths:
        """The policy for a block length and a number of tree nodes. None selects the adaptive one.

        most_tree_nodes: the most nodes of a tree that a pass verifies; 0 if it takes chains only.
        """
        length, nodes = options.block_length, options.tree_nodes
        if not options.speculate:
            return FixedLength(1)
        if nodes:
            return FixedTrees(length or self.block_size, self.block_size - 1, nodes)
        if length is not None:
            return FixedLength(length) if self._drafter and options.takes_drafter else FixedCopies(length)
        most = 0 if nodes == 0 else min(MOST_NODES, most_tree_nodes)
        if most not in self._adaptive:
            self._adaptive[most] = AdaptiveLength(self.block_size, *self._times, most)
        return self._adaptive[most]

    def keep(self) -> None:
        """Write the times that were learned, for later processes."""
        kept = [times.kept() for times in self._times]
        if self._place is None or not self._adaptive or not any(kept):
            return
        try:
            self._place.parent.mkdir(parents=True, exist_ok=True)
            write_object(self._place, dict(zip(_KINDS, kept, strict=True)))
        except OSError as error:
            warn_once(
                _log,
                f"{self._place}: cannot be written ({error.strerror}); the next process learns times anew",
            )

    def _read(self) -> tuple[PassTimes, PassTimes]:
        rows = max(MOST_NODES, self.block_size)
        kept: list[Kept | None] = [None, None]
        try:
            if self._place is not None and self._place.exists():
                values = read_object(self._place, _BYTES, DFlashError)
                kept = [_numbers(values[kind]) for kind in _KINDS]
        except (DFlashError, AttributeError, KeyError, TypeError, ValueError) as error:
            warn_once(_log, f"{self._place}: {error}; times of passes are learned anew")
        verify = PassTimes(rows, kept[1])
        return PassTimes(self.block_size, kept[0], verify), verify


def _numbers(values: Any) -> Kept:
    """Raises ValueError, TypeError or AttributeError for anything but positive times by batch size and rows."""
    read = {int(batch): {int(n): float(s) for n, s in row.items()} for batch, row in values.items()}
    for batch, row in read.items():
        if batch < 1 or not row or min(row) < 1 or not all(1e-9 < seconds < 1e9 for seconds in row.values()):
            raise ValueError(f"batch size {batch} has times {row}")
    return read
