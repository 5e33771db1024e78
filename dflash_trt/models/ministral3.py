"""Ministral 3: Llama's layers with YaRN, and queries that grow with their position.

Published checkpoints are of models that also see images (`Mistral3ForConditionalGeneration`). Only the text part is
read. The tensors of the vision tower are skipped.
"""

from __future__ import annotations

from dflash_trt.checkpoint.fields import Fields, stated
from dflash_trt.checkpoint.rope import read_rope
from dflash_trt.checkpoint.schema import TargetConfig
from dflash_trt.models.decoder import dense_layer
from dflash_trt.models.family import Family
from dflash_trt.models.reading import (
    QWEN_HEAD_DIM,
    alone,
    beside_images,
    check_quantization,
    decoder,
    refuse,
    target,
)

_TEXT = "ministral3"
_IMAGES = tuple(
    f"{place}{part}." for place in ("", "model.") for part in ("vision_tower", "multi_modal_projector")
)


def _read(top: Fields, text: Fields) -> TargetConfig:
    check_quantization(top)
    refuse(text, {"layer_types": (), "attention_bias": (False,), "mlp_bias": (False,)})
    common = decoder(
        text,
        head_dim=QWEN_HEAD_DIM,  # Ministral3Config's default too
        rope=read_rope(text, growing=True),
        architecture=top.strings("architectures", most=1)[0],
    )
    window = stated([(text, "sliding_window")], Fields.integer)
    return target(text, common, [window] * common["num_hidden_layers"])


FAMILIES = (
    Family("Ministral3ForCausalLM", _TEXT, alone(_read), dense_layer),
    Family(
        *("Mistral3ForConditionalGeneration", "mistral3"),
        *(beside_images(_read, _TEXT, skipped=_IMAGES), dense_layer),
    ),
)
