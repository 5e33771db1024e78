"""The supported kinds of drafters. A new one is a module with a `KIND`, listed here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

from dflash_trt.checkpoint.schema import DrafterConfig
from dflash_trt.models.drafters import dflash
from dflash_trt.models.drafters.kind import DrafterKind

KINDS: Mapping[str, DrafterKind] = {kind.architecture: kind for kind in (dflash.KIND,)}


def build_drafter(config: DrafterConfig, *checkpoints: Any, **options: Any) -> ir.Model:
    """The graph of a drafter of any kind. The arguments are those of `kind.BuildDrafter`."""
    return KINDS[config.architecture].build(config, *checkpoints, **options)
