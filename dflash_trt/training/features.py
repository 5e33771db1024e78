"""The target's features of each answer, computed once and kept in a file: a further epoch reads them.

For SmolLM2-135M on a CPU, most of a step's time is the target's pass.
"""

from __future__ import annotations

import shutil
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dflash_trt.training.blocks import Batch, Batches
from dflash_trt.training.target import FrozenTarget

_SHARE = 0.5  # of the disk's free space that the file may take


class FeatureStore:
    """FILE has rows [taps * D (+ D with `final`)] in the target's dtype, for every token of every answer in order, and
    FILE.have a byte per answer: whether its rows are there.

    A file that would take more than half of the free space is not made, and every batch is computed.
    """

    def __init__(self, file: Path, target: FrozenTarget, batches: Batches, taps: int, final: int) -> None:
        """taps: the numbers of a row that are features. final: those that the LM head takes, or 0. Raises OSError."""
        self._target, self._taps, width = target, taps, taps + final
        lengths = [min(len(answer.token_ids), batches.max_length) for answer in batches.answers]
        first = [0, *accumulate(lengths)]
        self._places = {
            a.id: (i, first[i], n) for i, (a, n) in enumerate(zip(batches.answers, lengths, strict=True))
        }
        size = first[-1] * width * target.dtype.itemsize
        self.holds = file.exists() or size < _SHARE * shutil.disk_usage(file.parent).free
        if self.holds:
            kept = file.with_name(f"{file.name}.have")
            self._files = file, kept
            fresh = not kept.exists() or kept.stat().st_size != len(lengths) or file.stat().st_size != size
            for path, count in ((file, size), (kept, len(lengths))) if fresh else ():
                with path.open("wb") as empty:
                    empty.truncate(count)
            self._rows = np.memmap(file, np.uint8, "r+").reshape(first[-1], -1)
            self._have = np.memmap(kept, np.uint8, "r+")

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """As `FrozenTarget.features` for the batch's tokens, except that rows after the end of an answer are zeros."""
        if not self.holds:
            return self._target.features(batch.tokens.to(self._target.device))
        places = [self._places[answer.id] for answer in batch.answers]
        if not all(self._have[number] for number, _, _ in places):
            features, final = self._target.features(batch.tokens.to(self._target.device))
            both = features if final is None else torch.cat((features, final), -1)
            for row, (number, first, count) in zip(both.cpu(), places, strict=True):
                self._rows[first : first + count] = row[:count].contiguous().view(torch.uint8).numpy()
                self._have[number] = 1
        dtype = self._target.dtype
        width = self._rows.shape[1] // dtype.itemsize
        both = torch.zeros(*batch.tokens.shape, width, dtype=dtype)
        for row, (_, first, count) in enumerate(places):
            both[row, :count] = torch.from_numpy(np.array(self._rows[first : first + count])).view(dtype)
        both = both.to(self._target.device)
        taps = self._taps
        return both[..., :taps], both[..., taps:] if width > taps else None

    def remove(self) -> None:
        """Free the disk, once no step asks for features any more."""
        for file in self._files if self.holds else ():
            file.unlink(missing_ok=True)
