"""Qwen3.5 and its successors Qwen3.6 and Qwen3.8, dense or with experts: Qwen3-Next with its projections apart.

Published checkpoints are of models that also see images (`ForConditionalGeneration`). Only the text part is read. The
tensors of the vision tower are skipped.
"""

from __future__ import annotations

from functools import partial

from dflash_trt.models.family import Family
from dflash_trt.models.qwen3_moe import moe_layer
from dflash_trt.models.qwen3_next import PREDICTION, read_hybrid
from dflash_trt.models.reading import alone, beside_images

_SKIPPED = (PREDICTION, "model.visual.")


def _families(name: str, model_type: str, *, sparse: bool) -> tuple[Family, Family]:
    read = partial(read_hybrid, fused=False, sparse=sparse, stacked=sparse)
    with_images = beside_images(read, skipped=_SKIPPED)
    return (
        Family(f"{name}ForCausalLM", f"{model_type}_text", alone(read), moe_layer),
        Family(f"{name}ForConditionalGeneration", model_type, with_images, moe_layer),
    )


FAMILIES = (
    *_families("Qwen3_5", "qwen3_5", sparse=False),
    *_families("Qwen3_5Moe", "qwen3_5_moe", sparse=True),
)
