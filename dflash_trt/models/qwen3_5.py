"""Qwen3.5 and its successors Qwen3.6 and Qwen3.8, dense or with experts: Qwen3-Next with its projections apart.

Published checkpoints are of models that also see images (`ForConditionalGeneration`). Only the text part is read. The
tensors of the vision tower are skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dflash_trt.checkpoint.fields import Fields
from dflash_trt.checkpoint.schema import TargetConfig
from dflash_trt.models.family import Family
from dflash_trt.models.qwen3_moe import moe_layer
from dflash_trt.models.qwen3_next import PREDICTION, read_hybrid
from dflash_trt.models.reading import text_of

_VISION = "model.visual."


def _reader(*, sparse: bool, images: bool) -> Callable[[Fields], TargetConfig]:
    def read(fields: Fields) -> TargetConfig:
        if not images:
            return read_hybrid(fields, fields, fused=False, sparse=sparse, stacked=sparse)
        place: dict[str, Any] = {"prefix": "model.language_model", "skipped": (PREDICTION, _VISION)}
        return read_hybrid(fields, text_of(fields), **place, fused=False, sparse=sparse, stacked=sparse)

    return read


FAMILIES = (
    Family("Qwen3_5ForCausalLM", "qwen3_5_text", _reader(sparse=False, images=False), moe_layer),
    Family("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", _reader(sparse=True, images=False), moe_layer),
    Family("Qwen3_5ForConditionalGeneration", "qwen3_5", _reader(sparse=False, images=True), moe_layer),
    Family("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe", _reader(sparse=True, images=True), moe_layer),
)
