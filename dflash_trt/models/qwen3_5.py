"""Qwen3.5 and its successors Qwen3.6 and Qwen3.8, dense or with experts: Qwen3-Next with its projections apart.

Published checkpoints are of models that also see images (`ForConditionalGeneration`). Only the text part is read. The
tensors of the vision tower are skipped.
"""

from __future__ import annotations

from collections.abc import Callable

from dflash_trt.checkpoint.fields import Fields
from dflash_trt.checkpoint.schema import TargetConfig
from dflash_trt.models.family import Family
from dflash_trt.models.qwen3_moe import moe_layer
from dflash_trt.models.qwen3_next import PREDICTION, read_hybrid

_VISION = "model.visual."


def _text(sparse: bool) -> Callable[[Fields], TargetConfig]:
    def read(fields: Fields) -> TargetConfig:
        return read_hybrid(fields, fields, fused=False, sparse=sparse, stacked=sparse)

    return read


def _with_images(sparse: bool) -> Callable[[Fields], TargetConfig]:
    def read(fields: Fields) -> TargetConfig:
        text = fields.section("text_config")
        if text is None:
            raise fields.error("text_config", "is missing, expected the object that describes the text model")
        return read_hybrid(
            fields,
            text,
            prefix="model.language_model",
            skipped=(PREDICTION, _VISION),
            fused=False,
            sparse=sparse,
            stacked=sparse,
        )

    return read


FAMILIES = (
    Family("Qwen3_5ForCausalLM", "qwen3_5_text", _text(False), moe_layer),
    Family("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", _text(True), moe_layer),
    Family("Qwen3_5ForConditionalGeneration", "qwen3_5", _with_images(False), moe_layer),
    Family("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe", _with_images(True), moe_layer),
)
