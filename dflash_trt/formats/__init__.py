"""Number formats of quantized weights.

A format knows its tensors in a checkpoint, reads and writes them, widens them to float32, and names the GPUs that
support its arithmetic. `base.NumberFormat` is the contract. graph/lowering.py has the nodes that compute with it.
"""

from __future__ import annotations

from collections.abc import Mapping

from .base import Algorithm, NumberFormat
from .floats import FP8, MXFP4, NVFP4
from .integers import INT4, INT8

__all__ = ["ALGORITHMS", "FORMATS", "INT4", "MXFP4", "SCHEMES", "Algorithm", "NumberFormat"]

FORMATS: Mapping[str, NumberFormat] = {f.name: f for f in (FP8(), NVFP4(), MXFP4(), INT8(), INT4())}
SCHEMES = tuple(FORMATS)
# By the names that NVIDIA's Model Optimizer uses in hf_quant_config.json.
ALGORITHMS: Mapping[str, Algorithm] = {a.name: a for f in FORMATS.values() for a in f.algorithms}
