"""The supported target families. A new one is a module with a `FAMILY`, listed here."""

from __future__ import annotations

from collections.abc import Mapping

from dflash_trt.models import (
    dense,
    gemma4,
    gpt_oss,
    muse_glimmer,
    qwen3_moe,
    qwen3_next,
)
from dflash_trt.models.reading import Family

FAMILIES: Mapping[str, Family] = {
    family.architecture: family
    for family in (
        *dense.FAMILIES,
        *(qwen3_moe.FAMILY, gpt_oss.FAMILY, *qwen3_next.FAMILIES, *gemma4.FAMILIES, muse_glimmer.FAMILY),
    )
}
