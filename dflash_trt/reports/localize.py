"""The first layer of a bundle whose numbers differ from ONNX Runtime's.

Every layer's keys and values are rows of a cache, and both engines keep them. They come from the layer's input, so the
first layer whose rows differ comes after the fault, or has it in its own projections. No plan needs marks for this, and
any engine can be asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash_trt.decoding.pair import Pair
from dflash_trt.decoding.widths import cache_rows
from dflash_trt.reports.rounding import Limits, centred, deviation

Array = np.ndarray[Any, Any]
# A name, the models that it runs, the positions whose rows are compared, and what it gives.
Stage = tuple[str, Sequence[str], tuple[int, int], str, Callable[[Pair], Array]]


@dataclass(frozen=True)
class Compared:
    """One tensor of both engines. `error`: their `deviation`. `limit`: the largest that rounding explains."""

    stage: str
    model: str
    tensor: str
    error: float
    limit: float

    @property
    def wrong(self) -> bool:
        return self.error > self.limit


class Localizer:
    """Passes of two pairs in step, and the comparison of all that they keep."""

    def __init__(self, pair: Pair, reference: Pair, limits: Limits) -> None:
        self.pair, self.reference, self.limits = pair, reference, limits
        self.compared: list[Compared] = []
        self.first: Compared | None = None
        self._largest: float | None = None  # of the target's logits

    def run(self, stages: Sequence[Stage]) -> None:
        for stage, models, span, output, run in stages:
            theirs, ours = run(self.reference), run(self.pair)
            for model in models:
                for tensor, a, b in self._rows(model, *span):
                    self._compare(stage, model, tensor, a, b)
                if (model == "target") == (output == "logits"):
                    if output == "logits":
                        ours, theirs = centred(ours), centred(theirs)
                        self._largest = float(np.abs(theirs).max())
                    # Log-probabilities err as the largest logits do, however near to 0 they are.
                    size = None if output == "logits" else self._largest
                    self._compare(stage, model, output, ours, theirs, size=size)

    def describe(self) -> str:
        """The first tensor that differs, and the part of the model that is at fault."""
        first = self.first
        assert first is not None
        return (
            f"{first.stage}: {first.tensor} of the {first.model} differs by {first.error:.2g} of its size, where "
            f"rounding explains {first.limit:.2g}; look at {self.culprit()}"
        )

    def culprit(self) -> str:
        """The part of the model whose fault explains which tensors of the first wrong layer differ."""
        assert self.first is not None
        model, tensor = self.first.model, self.first.tensor
        same = [each for each in self.compared if (each.stage, each.model) == (self.first.stage, model)]
        kind, dot, layer = tensor.rpartition(".")
        layers = [each.tensor.rpartition(".")[2] for each in same if "." in each.tensor]
        if not dot:
            after = f"layer {layers[-1]} after its keys and values, " if layers else ""
            return f"the {model}'s {after}a later layer, the final norm or the head"
        wrong = {
            each.tensor.rpartition(".")[0]
            for each in same
            if each.wrong and each.tensor.endswith(dot + layer)
        }
        if len(wrong) == 1:
            part = "value projection" if kind.startswith("v") else "key projection, key norm or rotation"
            return f"the {model}'s layer {layer}: its {part}"
        if model == "drafter":  # whose layers all read the same features
            return f"the drafter's tapped features, their projection, or layer {layer}'s own projections"
        if layer == layers[0]:
            before = "embedding" if layer == "0" else f"layers before layer {layer}"
        else:
            before = f"layer {layers[layers.index(layer) - 1]} after its keys and values"
        return f"the target's {before}, or layer {layer}'s input norm"

    def _rows(self, model: str, start: int, stop: int) -> Iterator[tuple[str, Array, Array]]:
        """The rows of both engines' caches, layer by layer, as [positions, numbers]."""
        ours, theirs = (dict(cache_rows(pair, model, 0, start, stop)) for pair in (self.pair, self.reference))
        for name, rows in ours.items():
            yield name, *_alike(rows, theirs[name])

    def _compare(
        self, stage: str, model: str, tensor: str, ours: Array, theirs: Array, size: float | None = None
    ) -> None:
        error = deviation(ours, theirs, size=size, median=self.limits.experts)
        comparison = Compared(stage, model, tensor, error, self.limits.of(model, tensor))
        self.compared.append(comparison)
        if self.first is None and comparison.wrong:
            self.first = comparison


def _alike(ours: Array, theirs: Array) -> tuple[Array, Array]:
    """Rows [positions, numbers] of both. On a device they are [heads, positions, size], with columns for sinks."""
    if ours.ndim == 2:
        return ours, theirs
    heads, positions, size = ours.shape
    if theirs.ndim == 2:
        theirs = theirs.reshape(positions, heads, -1).transpose(1, 0, 2)
    size = min(size, theirs.shape[2])
    both = (rows.transpose(1, 0, 2)[..., :size].reshape(positions, -1) for rows in (ours, theirs))
    return next(both), next(both)
