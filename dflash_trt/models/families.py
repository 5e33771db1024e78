"""The supported target families. A new one is a module with a `FAMILY`, listed here.

Dense decoders are read here: Llama 3, whose linear layers may have biases; Qwen3, which norms each head of queries and
keys; and Ministral 3, which has Llama's layers with YaRN, and queries that grow with their position. Published
checkpoints of Ministral 3 are of models that also see images (`Mistral3ForConditionalGeneration`). Only the text part
is read. The tensors of the vision tower are skipped.
"""

from __future__ import annotations

from collections.abc import Mapping

from dflash_trt.checkpoint.fields import Fields, stated
from dflash_trt.checkpoint.rope import read_rope
from dflash_trt.checkpoint.schema import TargetConfig
from dflash_trt.models import (
    gemma4,
    gpt_oss,
    muse_glimmer,
    qwen3_moe,
    qwen3_next,
)
from dflash_trt.models.decoder import dense_layer
from dflash_trt.models.reading import QWEN_HEAD_DIM, Family, beside_images, decoder, refuse, target, windows

_MINISTRAL = "ministral3"
_IMAGES = tuple(
    f"{place}{part}." for place in ("", "model.") for part in ("vision_tower", "multi_modal_projector")
)


def _qwen3(fields: Fields) -> TargetConfig:
    common = decoder(fields, head_dim=QWEN_HEAD_DIM, qk_norm=True)
    return target(fields, common, windows(fields, common["num_hidden_layers"]))


def _llama(fields: Fields) -> TargetConfig:
    refuse(fields, {"pretraining_tp": (1,)})
    common = decoder(fields, mlp_bias=fields.boolean("mlp_bias", default=False))
    return target(fields, common, [None] * common["num_hidden_layers"])


def _ministral(text: Fields) -> TargetConfig:
    refuse(text, {"layer_types": (), "attention_bias": (False,), "mlp_bias": (False,)})
    common = decoder(
        text,
        head_dim=QWEN_HEAD_DIM,  # Ministral3Config's default too
        rope=read_rope(text, growing=True),
    )
    window = stated([(text, "sliding_window")], Fields.integer)
    return target(text, common, [window] * common["num_hidden_layers"])


_DENSE = (
    Family("Qwen3ForCausalLM", "qwen3", _qwen3, dense_layer),
    Family("LlamaForCausalLM", "llama", _llama, dense_layer),
    Family("Ministral3ForCausalLM", _MINISTRAL, _ministral, dense_layer),
    Family(
        *("Mistral3ForConditionalGeneration", "mistral3"),
        *(beside_images(_ministral, _MINISTRAL, skipped=_IMAGES), dense_layer),
    ),
)

FAMILIES: Mapping[str, Family] = {
    family.architecture: family
    for family in (
        *_DENSE,
        *(qwen3_moe.FAMILY, gpt_oss.FAMILY, *qwen3_next.FAMILIES, *gemma4.FAMILIES, muse_glimmer.FAMILY),
    )
}
