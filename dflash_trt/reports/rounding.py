"""How far the numbers of two engines may lie apart: what rounding gives, by precision and by depth.

The reference computes in float32. An engine in a precision with unit roundoff u differs from it by about u (1 + g
sqrt(l)) of a tensor's size in layer l, because every layer adds its own roundings to those before. The limit is twice
that. The form is a model and g = 1.3 was fitted: random pairs of three layers reach 0.4 to 0.7 of the limit, and
SmolLM2-135M with its 30 layers 0.72 (tests/reports/test_faults.py measures the random pairs again). In a mixture of
experts, rounding makes a row choose another expert where two are nearly equal, which changes that row by a tenth and
more. There the median row is compared, with a g of 4 that was fitted to one random pair of eight layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
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
    ours, theirs = (np.atleast_2d(each).astype(np.float64) for each in (ours, theirs))
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
    formats = (manifest.get("quantization") or {}).get(role) or ""
    units = [unit for name, unit in FORMAT_UNITS.items() if name in formats.upper()]
    return max([*units, UNITS[manifest["precision"][role]]])
