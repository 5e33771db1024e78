"""The first layer of a bundle whose numbers differ from ONNX Runtime's.

Every layer's keys and values are rows of a cache, and both engines keep them. They come from the layer's input, so the
first layer whose rows differ comes after the fault, or has it in its own projections. No plan needs marks for this, and
any engine can be asked.

How far the numbers of two engines may lie apart: what rounding gives, by precision and by depth.

The reference computes in float32. An engine in a precision with unit roundoff u differs from it by about u (1 + g
sqrt(l)) of a tensor's size in layer l, because every layer adds its own roundings to those before. The limit is twice
that. The form is a model and g = 1.3 was fitted: random pairs of three layers reach 0.4 to 0.7 of the limit, and
SmolLM2-135M with its 30 layers 0.72 (tests/reports/test_faults.py measures the random pairs again). In a mixture of
experts, rounding makes a row choose another expert where two are nearly equal, which changes that row by a tenth and
more. There the median row is compared, with a g of 4 that was fitted to one random pair of eight layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash_trt.decoding.pair import Pair
from dflash_trt.decoding.widths import cache_rows

Array = np.ndarray[Any, Any]
# A name, the models that it runs, the positions whose rows are compared, and what it gives.
Stage = tuple[str, Sequence[str], tuple[int, int], str, Callable[[Pair], Array]]
# Unit roundoffs. That of float32 is an allowance and not fitted: 2^-24 sqrt(4096), as a sum rounds with each product.
UNITS = {"float": 2.0**-18, "float16": 2.0**-11, "bfloat16": 2.0**-8}
# Of layers whose inputs are quantized too, by what their format's name contains, or whose weights an engine quantizes
# in groups of its own. ONNX Runtime rounds the inputs of integer weights to eight bits. Fitted as g was.
FORMAT_UNITS = {
    "NVFP4": 2.0**-3,
    "W4A16_AWQ": 2.0**-3,
    "FP8": 2.0**-5,
    **dict.fromkeys(("AWQ", "GPTQ", "INT", "W8", "W4"), 2.0**-7),
}
_MARGIN, _GROWTH, _GROWTH_OF_EXPERTS = 2.0, 1.3, 4.0
# A single row, column or number has a larger error than all of them together, and a common factor a smaller one.
PART, _FACTOR = 3.0, 2.0
_FEWEST_ROWS = 8  # for a column to have an error of its own


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
        same = [
            result for result in self.compared if (result.stage, result.model) == (self.first.stage, model)
        ]
        kind, dot, layer = tensor.rpartition(".")
        layers = [result.tensor.rpartition(".")[2] for result in same if "." in result.tensor]
        if not dot:
            after = f"layer {layers[-1]} after its keys and values, " if layers else ""
            return f"the {model}'s {after}a later layer, the final norm or the head"
        wrong = {
            result.tensor.rpartition(".")[0]
            for result in same
            if result.wrong and result.tensor.endswith(dot + layer)
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


class Limits:
    """The largest `deviation` that rounding explains, for the tensors of the bundle with this manifest."""

    def __init__(self, manifest: Mapping[str, Any]) -> None:
        self.experts = "experts" in manifest["target"].get("weight_bytes", {})
        roles = [role for role in ("target", "drafter") if manifest[role] is not None]
        self._layers = {role: manifest[role]["num_hidden_layers"] for role in roles}
        units = {role: _unit(manifest, role) for role in self._layers}
        self._units = units | {"drafter": max(units.values())}  # what it reads comes from the target

    def of(self, model: str, tensor: str) -> float:
        """The limit for `k_cache.3`, `logits` or another tensor of `target` or `drafter`, as a share of its size."""
        _, dot, layer = tensor.rpartition(".")
        depth = int(layer) if dot else self._layers[model]
        if model == "drafter":
            depth += self._layers["target"]
        growth = _GROWTH_OF_EXPERTS if self.experts else _GROWTH
        return float(_MARGIN * self._units[model] * (1 + growth * np.sqrt(depth)))


def deviation(ours: Array, theirs: Array, *, size: float | None = None, median: bool = False) -> float:
    """The error of `ours` [rows, numbers] as a share of `size`, by default the root mean square of `theirs`.

    It is the largest of: the root mean square over all numbers, a third of that of the worst row or column, and twice
    the common factor by which they differ. So a fault of one head, one position or one scale is not averaged away.
    median: the error of the median row instead. Infinite if a number is not finite.
    """
    if not np.isfinite(ours).all():
        return float("inf")
    ours, theirs = (np.atleast_2d(numbers).astype(np.float64) for numbers in (ours, theirs))
    difference = ours - theirs
    size = max(size or float(_root_mean_square(theirs)), 1e-6)
    rows = _root_mean_square(difference, 1) / size
    if median:
        return float(np.median(rows))
    errors = [_root_mean_square(difference) / size, rows.max() / PART]
    errors.append(_FACTOR * abs(np.mean(difference * theirs)) / size**2)
    if len(rows) >= _FEWEST_ROWS:
        errors.append(_root_mean_square(difference, 0).max() / size / PART)
    return float(max(errors))


def centred(logits: Array) -> Array:
    """Logits less the mean of their row, which changes no probability."""
    return np.asarray(logits - logits.mean(axis=-1, keepdims=True))


def _root_mean_square(numbers: Array, axis: int | None = None) -> Array:
    return np.asarray(np.sqrt(np.mean(numbers**2, axis=axis)))


def _unit(manifest: Mapping[str, Any], role: str) -> float:
    formats = f"{(manifest.get('quantization') or {}).get(role)} {manifest['precision'].get('cache')}"
    units = [unit for name, unit in FORMAT_UNITS.items() if name in formats.upper()]
    return max([*units, UNITS[manifest["precision"][role]]])
