"""Drafters in the format of speculators (github.com/vllm-project/speculators): DFlash, DFlash2, DSpark and EAGLE-3.

`speculators_model_type` tells the kind. The fields of the layers are in `transformer_layer_config`. The ids of tapped
states count the layer that is entered, so our tap is one less. The head may have a vocabulary of its own. Embedding and
head are used where the file has them, and are the target's otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from dflash_trt.checkpoint.fields import Fields, stated
from dflash_trt.checkpoint.schema import DrafterConfig, LayerAttention
from dflash_trt.models.drafters.block import BlockSettings
from dflash_trt.models.drafters.dflash import BLOCK, ROW_SCALE, build_dflash
from dflash_trt.models.drafters.dflash2 import build_dflash2, selector
from dflash_trt.models.drafters.dspark import build_dspark, heads, most_candidates
from dflash_trt.models.drafters.eagle3 import NORMS, build_eagle3, eagle3_config, eagle3_layers, usual_taps
from dflash_trt.models.drafters.kind import DrafterKind
from dflash_trt.models.reading import (
    decoder,
    layer_ids,
    must_equal,
    refuse,
    softcap,
    windows,
)

TYPE = "speculators_model_type"
# Fields of the layers that change the computation, with the values that are computed.
_NEUTRAL = {
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "mlp_bias": (False,),
    "pretraining_tp": (1,),
}


def _layers(fields: Fields) -> Fields:
    section = fields.needed("transformer_layer_config", "the fields of the layers")
    refuse(section, _NEUTRAL)
    section.string("model_type", among=("llama", "qwen3"))
    return section


def _block(fields: Fields, settings: Callable[..., BlockSettings]) -> DrafterConfig:
    """The configuration of a drafter with DFlash's layers. `settings` makes the kind's own from those of the block."""
    layers, model = _layers(fields), fields.string(TYPE)
    common = decoder(layers, qk_norm=True)
    vocab = common["vocab_size"]
    must_equal(fields, "target_hidden_size", "hidden_size", common["hidden_size"])
    size = fields.integer("draft_vocab_size", maximum=vocab)
    every_row = fields.boolean("sample_from_anchor", default=model == "dspark")
    entered = stated([(fields, "aux_hidden_state_layer_ids")], layer_ids)
    free = fields.boolean("sliding_window_non_causal", default=model == "dflash2")
    return DrafterConfig(
        **common,
        layers=tuple(
            LayerAttention(window is not None and not free, window)
            for window in windows(layers, common["num_hidden_layers"])
        ),
        block_size=fields.integer("block_size", minimum=1 if every_row else 2, maximum=BLOCK) + every_row,
        mask_token_id=fields.integer("mask_token_id", minimum=0),
        target_layer_ids=tuple(layer - 1 for layer in entered or ()),
        settings=settings(every_row=every_row, vocabulary=None if size == vocab else size),
        row_scale=fields.number(ROW_SCALE, default=1.0),
        logit_softcap=softcap(fields),
    )


def read_dflash(fields: Fields) -> DrafterConfig:
    """DFlash, whose head may have a vocabulary of its own."""
    config = _block(fields, BlockSettings)
    return replace(config, most_candidates=config.settings.vocabulary)


def read_dflash2(fields: Fields) -> DrafterConfig:
    """DFlash2, with the target's whole vocabulary."""
    layers = _layers(fields)
    must_equal(fields, "draft_vocab_size", "vocab_size", layers.integer("vocab_size"))
    settings = partial(selector, fields, layers.integer("hidden_size"), layers.integer("vocab_size"))
    config = _block(fields, settings)
    return replace(config, most_candidates=config.settings.top_k)


def read_dspark(fields: Fields) -> DrafterConfig:
    """DSpark, whose confidence head reads the token before too unless the file says otherwise."""
    config = _block(fields, lambda vocabulary, **block: heads(fields, vocabulary, confidence=True, **block))
    return replace(config, most_candidates=most_candidates(config.settings, config.vocab_size))


def read_eagle3(fields: Fields) -> DrafterConfig:
    """The head's layer is Llama's, or Qwen3's with norms of queries and keys."""
    layers = _layers(fields)
    return eagle3_config(
        fields,
        layers=layers,
        entered=eagle3_layers(fields),
        layer="layers.0",
        **{name: fields.boolean(name, default=False) for name in NORMS},
    )


def _taps(layers: int) -> tuple[int, ...]:
    """The taps of the states that enter layers 2, N/2 and N - 3 of N."""
    return usual_taps(layers)[1:]


# By the value of `speculators_model_type`. The architectures are our own names: those of such files are the class that
# saved them, which differs by version.
KINDS = {
    "dflash": DrafterKind("DFlashSpeculator", TYPE, read_dflash, build_dflash, taps=_taps),
    "dflash2": DrafterKind("DFlash2Speculator", TYPE, read_dflash2, build_dflash2, taps=_taps),
    "dspark": DrafterKind("DSparkSpeculator", TYPE, read_dspark, build_dspark, taps=_taps),
    "eagle3": DrafterKind("Eagle3Speculator", TYPE, read_eagle3, build_eagle3, taps=usual_taps),
}
