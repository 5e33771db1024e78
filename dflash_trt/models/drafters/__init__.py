"""The supported kinds of drafters. A new one is a module with a `KIND`, listed here."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from dflash_trt.models.drafters import (
    dflash,
    dflash2,
    dspark,
    eagle3,
    mtp,
    speculators,
)
from dflash_trt.models.drafters.kind import DrafterKind, DrafterParts

_KINDS = (
    dflash.KIND,
    dflash2.KIND,
    *dspark.KINDS,
    dflash.MUSE_GLIMMER,
    *eagle3.KINDS,
    *mtp.KINDS,
    *speculators.KINDS.values(),
)
KINDS: Mapping[str, DrafterKind] = {kind.architecture: kind for kind in _KINDS}


def build_drafter(parts: DrafterParts) -> ir.Model:
    """The graph of a drafter of any kind."""
    return KINDS[parts.config.architecture].build(parts)
