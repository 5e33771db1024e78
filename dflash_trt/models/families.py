"""The supported target families. A new one is a module with a `FAMILY`, listed here."""

from __future__ import annotations

from collections.abc import Mapping

from dflash_trt.models import (
    gemma4,
    gpt_oss,
    llama,
    ministral3,
    muse_glimmer,
    qwen3,
    qwen3_5,
    qwen3_moe,
    qwen3_next,
)
from dflash_trt.models.family import Family

FAMILIES: Mapping[str, Family] = {
    family.architecture: family
    for family in (
        *(qwen3.FAMILY, llama.FAMILY, qwen3_moe.FAMILY, gpt_oss.FAMILY),
        *(qwen3_next.FAMILY, *qwen3_5.FAMILIES, *ministral3.FAMILIES, *gemma4.FAMILIES, muse_glimmer.FAMILY),
    )
}
