"""Number formats of quantized weights: one module for each, with everything that is special about it.

A format says how its tensors lie in a checkpoint, reads and writes them, widens them to float32, gives each dialect
the nodes that compute with them, and names the GPUs that have such arithmetic. `base.NumberFormat` is the contract.
"""

from __future__ import annotations

from collections.abc import Mapping

from .base import Algorithm, NumberFormat
from .fp8 import FP8
from .int4 import INT4
from .mxfp4 import MXFP4
from .nvfp4 import NVFP4

__all__ = ["ALGORITHMS", "FORMATS", "INT4", "MXFP4", "SCHEMES", "Algorithm", "NumberFormat"]

FORMATS: Mapping[str, NumberFormat] = {f.name: f for f in (FP8(), NVFP4(), MXFP4(), INT4())}
SCHEMES = tuple(FORMATS)
# By the name that NVIDIA's Model Optimizer gives them in hf_quant_config.json.
ALGORITHMS: Mapping[str, Algorithm] = {a.name: a for f in FORMATS.values() for a in f.algorithms}
