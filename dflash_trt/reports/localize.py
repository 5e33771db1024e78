"""The first layer of a bundle whose numbers differ from ONNX Runtime's, and an archive of it for a bug report.

Every layer's keys and values are rows of a cache, and both engines keep them. They come from the layer's input. So the
first layer whose rows differ is the one behind the fault, or has it in its own projections. No plan needs marks for
this, and any engine can be asked.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dflash_trt.decoding.pair import Pair
from dflash_trt.decoding.widths import cache_rows
from dflash_trt.files.disk import whole_file

Array = np.ndarray[Any, Any]
# A name, the models that it runs, the positions whose rows are compared, and what it gives.
Stage = tuple[str, Sequence[str], tuple[int, int], str, Callable[[Pair], Array]]


@dataclass(frozen=True)
class Compared:
    """One tensor of both engines. `error`: the largest difference as a share of the reference's spread."""

    stage: str
    model: str
    tensor: str
    error: float


class Localizer:
    """Passes of two pairs in step, and the comparison of all that they keep.

    limit: the error that rounding explains.
    """

    def __init__(self, pair: Pair, reference: Pair, limit: float) -> None:
        self.pair, self.reference, self.limit = pair, reference, limit
        self.compared: list[Compared] = []
        self.first: Compared | None = None
        self.tensors: tuple[Array, Array] | None = None  # of the first that differs

    def run(self, stages: Sequence[Stage]) -> None:
        """Run each stage on both."""
        for stage, models, span, output, run in stages:
            ours, theirs = run(self.pair), run(self.reference)
            for model in models:
                for tensor, a, b in self._rows(model, *span):
                    self._compare(stage, model, tensor, a, b)
            self._compare(stage, "target" if output == "logits" else "drafter", output, ours, theirs)

    def describe(self) -> str:
        if self.first is None:
            worst = max(each.error for each in self.compared)
            return f"no layer differs; the largest error is {worst:.3f} of the spread"
        first = self.first
        same = [e for e in self.compared if (e.stage, e.model) == (first.stage, first.model)]
        before = [e.tensor for e in same[: same.index(first)]]
        behind = f"; {before[-1]} before it is right" if before else ""
        return f"{first.stage}: {first.tensor} of the {first.model} differs by {first.error:.2f} of the spread{behind}"

    def _rows(self, model: str, start: int, stop: int) -> Iterator[tuple[str, Array, Array]]:
        """The rows of both engines' caches, layer by layer, as [positions, numbers]."""
        ours, theirs = (dict(cache_rows(pair, model, 0, start, stop)) for pair in (self.pair, self.reference))
        for name, rows in ours.items():
            yield name, *_alike(rows, theirs[name])

    def _compare(self, stage: str, model: str, tensor: str, ours: Array, theirs: Array) -> None:
        spread = max(float(np.std(theirs)), 1e-6)
        error = float(np.abs(ours - theirs).max() / spread) if np.isfinite(ours).all() else float("inf")
        comparison = Compared(stage, model, tensor, error)
        self.compared.append(comparison)
        if self.first is None and error > self.limit:
            self.first, self.tensors = comparison, (ours, theirs)


def write_archive(
    archive: Path, localizer: Localizer, report: dict[str, Any], tokens: dict[str, list[int]], bundle: Path
) -> None:
    """One file with the report, the errors by layer, the tokens, the first tensor that differs, and the plans' logs.

    It has numbers that follow from random tokens, and none of a user's.
    """
    with whole_file(archive) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as packed:
        errors = {
            "limit": localizer.limit,
            "result": localizer.describe(),
            "first": localizer.first and asdict(localizer.first),
            "compared": [asdict(each) for each in localizer.compared],
            "engine": {
                model: {name: str(dtype) for name, dtype in getattr(engine, "dtypes", {}).items()}
                for model, engine in (
                    ("target", localizer.pair.target),
                    ("drafter", localizer.pair.drafter.engine),
                )
            },
        }
        for name, content in (("selftest.json", report), ("layers.json", errors), ("tokens.json", tokens)):
            packed.writestr(name, json.dumps(content, indent=1, default=str) + "\n")
        if localizer.tensors is not None:
            data = io.BytesIO()
            np.savez(data, ours=localizer.tensors[0], reference=localizer.tensors[1])
            packed.writestr("first.npz", data.getvalue())
        for log in sorted(bundle.rglob("*.log")):
            packed.write(log, str(log.relative_to(bundle)))


def _alike(ours: Array, theirs: Array) -> tuple[Array, Array]:
    """Rows [positions, numbers] of both. On a device they are [heads, positions, size], with columns for sinks."""
    if ours.ndim == theirs.ndim:
        return ours, theirs
    heads, positions, size = ours.shape
    theirs = theirs.reshape(positions, heads, -1)
    size = min(size, theirs.shape[2])
    return ours.transpose(1, 0, 2)[..., :size].reshape(positions, -1), theirs[..., :size].reshape(
        positions, -1
    )
