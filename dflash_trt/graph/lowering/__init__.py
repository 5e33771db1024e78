"""How each number format becomes nodes of a graph, one module each. formats/ has the numbers themselves."""

from __future__ import annotations

from collections.abc import Mapping

from .base import Activations, LinearKind, Lowering
from .fp8 import FP8Lowering
from .int4 import INT4Lowering
from .int8 import INT8Lowering
from .mxfp4 import MXFP4Lowering
from .nvfp4 import NVFP4Lowering

__all__ = ["LOWERINGS", "Activations", "LinearKind", "Lowering"]

# By the names in formats.FORMATS.
LOWERINGS: Mapping[str, Lowering] = {
    "fp8": FP8Lowering(),
    "nvfp4": NVFP4Lowering(),
    "mxfp4": MXFP4Lowering(),
    "int8": INT8Lowering(),
    "int4": INT4Lowering(),
}
