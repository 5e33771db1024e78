"""Ministral 3: Llama's layers with YaRN, and queries that grow with their position.

Published checkpoints are of models that also see images (`Mistral3ForConditionalGeneration`). Only the text part is
read. The tensors of the vision tower are skipped.
"""

from __future__ import annotations

from dataclasses import replace

from dflash_trt.checkpoint.fields import Fields
from dflash_trt.checkpoint.rope import read_rope
from dflash_trt.checkpoint.schema import TargetConfig
from dflash_trt.models.decoder import dense_layer
from dflash_trt.models.family import Family
from dflash_trt.models.reading import HEAD_DIM, check_quantization, decoder, refuse, target, text_of

_TEXT = "ministral3"
_IMAGES = tuple(
    f"{place}{part}." for place in ("", "model.") for part in ("vision_tower", "multi_modal_projector")
)


def _read(top: Fields, text: Fields) -> TargetConfig:
    check_quantization(top)
    refuse(text, {"layer_types": (), "attention_bias": (False,), "mlp_bias": (False,)})
    common = decoder(
        text,
        # Ministral3Config's default of head_dim is 128, not hidden_size / num_attention_heads.
        head_dim=text.integer("head_dim", maximum=HEAD_DIM, default=128),
        rope=read_rope(text, growing=True),
        architecture=top.strings("architectures", most=1)[0],
    )
    window = None if text.get("sliding_window") is None else text.integer("sliding_window")
    return target(text, common, [window] * common["num_hidden_layers"])


def _read_wrapped(fields: Fields) -> TargetConfig:
    text = text_of(fields, _TEXT)
    place = fields if fields.get("tie_word_embeddings") is not None else text
    return replace(
        _read(fields, text),
        tie_word_embeddings=place.boolean("tie_word_embeddings", default=False),
        prefix="model.language_model",
        skipped=_IMAGES,
    )


def _alone(fields: Fields) -> TargetConfig:
    return _read(fields, fields)


FAMILIES = (
    Family("Ministral3ForCausalLM", _TEXT, _alone, dense_layer),
    Family("Mistral3ForConditionalGeneration", "mistral3", _read_wrapped, dense_layer),
)
