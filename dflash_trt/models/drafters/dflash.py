"""DFlash: a block of masks becomes a block of drafts in one pass (arXiv 2602.06036).

block.py has the pass itself. This module reads the configuration, and takes the best tokens of each row.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial

import onnx_ir as ir

from dflash_trt.checkpoint.fields import Fields, stated
from dflash_trt.checkpoint.rope import read_rope
from dflash_trt.checkpoint.schema import DrafterConfig, LayerAttention
from dflash_trt.models.decoder import soft_capped
from dflash_trt.models.drafters.block import BlockPass, BlockSettings
from dflash_trt.models.drafters.kind import DrafterKind, DrafterParts
from dflash_trt.models.reading import (
    QWEN_HEAD_DIM,
    decoder,
    layer_ids,
    must_equal,
    place_window,
    refuse,
    softcap,
    windows,
)

BLOCK = 1024  # published drafters have 8 to 16
ROW_SCALE = "input_embedding_scale"


def read_dflash(fields: Fields, known: Collection[str] = ()) -> DrafterConfig:
    """The configuration of a DFlash drafter, as z-lab publishes them. `known`: fields that another kind reads itself.

    `block_size` may be in `dflash_config` or at the top level. Causality per layer is `is_causal`, else
    `dflash_config.causal`, else JetSpec's `dflash_config.causal_head`. Without them, exactly the sliding layers are
    causal (vLLM's rule for these checkpoints).
    """
    dflash = fields.needed("dflash_config", "an object with mask_token_id and target_layer_ids")
    refuse(fields, {key: values for key, values in _DRAFTER_NEUTRAL.items() if key not in known})
    known = {*known, *_DFLASH_FIELDS}
    refuse(dflash, {key: _DRAFTER_NEUTRAL.get(key, ()) for key in dflash.values if key not in known})
    common = decoder(fields, head_dim=QWEN_HEAD_DIM, qk_norm=True)
    for key, size in (("draft_vocab_size", "vocab_size"), ("target_hidden_size", "hidden_size")):
        for place in (fields, dflash):
            must_equal(place, key, size, common[size])
    causal_places = [(fields, "is_causal"), (dflash, "causal"), (dflash, "causal_head")]
    causal = next((place.boolean(key) for place, key in causal_places if place.get(key) is not None), None)
    places = (dflash, fields)
    read = partial(Fields.integer, minimum=2, maximum=BLOCK)
    block_size = stated([(place, "block_size") for place in places], read)
    if block_size is None:
        raise fields.error("block_size", "is missing, here and in dflash_config, expected an integer")
    return DrafterConfig(
        **common,
        layers=tuple(
            LayerAttention(window is not None if causal is None else causal, window)
            for window in windows(fields, common["num_hidden_layers"])
        ),
        block_size=block_size,
        mask_token_id=dflash.integer("mask_token_id", minimum=0),
        target_layer_ids=layer_ids(dflash, "target_layer_ids"),
        num_target_layers=stated([(place, "num_target_layers") for place in places], Fields.integer),
        logit_softcap=softcap(fields, dflash),
        row_scale=stated([(place, ROW_SCALE) for place in places], Fields.number),
    )


_DFLASH_FIELDS = {
    "block_size",
    "mask_token_id",
    "target_layer_ids",
    "num_target_layers",
    "causal",
    "causal_head",
    "draft_vocab_size",
    "target_hidden_size",
    "final_logit_softcapping",
    ROW_SCALE,
}
# Fields of published drafters of other kinds that change the computation, with the values that leave it unchanged.
_DRAFTER_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "add_swa_attention_sink_bias": (False,),
    "attention_mode": ("gqa",),
    "attention_sink_bias": (False,),
    "attention_value_scale": (1,),
    "aux_hidden_state_layer_ids": (),
    "conv_group_size": (),
    "conv_kernel": (),
    "conv_kernel_size": (),
    "is_neox_style": (True,),
    "kv_lora_rank": (),
    "markov_rank": (0,),
    "mask_embedding": (False,),
    "mlp_bias": (False,),
    "output_multiplier": (1,),
    "partial_rotary_factor": (1,),
    "projector_type": ("dflash",),
    "rope_interleave": (False,),
    "rope_interleaved": (False,),
    "sample_from_anchor": (False,),
    "selector_rank": (),
    "selector_top_k": (),
    "speculators_model_type": (),
    "swa_window": (),
    "swa_window_size": (),
    "use_aux_hidden_state": (True,),
    "use_swa": (False,),
}


def build_dflash(parts: DrafterParts) -> ir.Model:
    block = BlockPass(parts)
    return block.model(*block.best(block.logits(block.drafted())))


# All published DFlashDraftModels have model_type "qwen3" for any target: their layers are Qwen3's.
KIND = DrafterKind("DFlashDraftModel", "qwen3", read_dflash, build_dflash)


def _read_muse_glimmer(fields: Fields) -> DrafterConfig:
    """Muse Glimmer by Meta has no embedding, head or vocabulary of its own, and windows that reach both ways."""
    mask = fields.integer("mask_token_id", minimum=0)
    # The file has no vocab_size: it is the target's.
    filled = Fields(fields.path, {"vocab_size": mask + 1, **fields.values}, fields.prefix)
    common = decoder(filled, head_dim=128, qk_norm=True, rope=read_rope(fields, theta=500_000.0))
    # Transformers lets such layers see as far as this in both directions. Our windows count the row itself.
    window, layers = 1 + fields.integer("sliding_window", default=2048), common["num_hidden_layers"]
    windows = place_window(fields, layers, window, ["sliding_attention"] * layers)
    return DrafterConfig(
        **common,
        layers=tuple(LayerAttention(False, size) for size in windows),
        block_size=fields.integer("block_size", minimum=2, maximum=BLOCK),
        mask_token_id=mask,
        target_layer_ids=layer_ids(fields, "target_layer_ids"),
        settings=BlockSettings(fusion=("encoder.fc", "encoder.output_norm_enc")),
    )


def _build_muse_glimmer(parts: DrafterParts) -> ir.Model:
    """DFlash's graph with other names. The logits are the target's, multiplied and soft-capped alike."""
    block = BlockPass(parts)
    logits = block.logits(block.drafted(), multiplier=block.target.logit_multiplier)
    return block.model(*block.best(soft_capped(block.g, logits, block.target.logit_softcap)))


MUSE_GLIMMER = DrafterKind(
    "MuseGlimmerAssistantModel",
    "muse_glimmer_assistant",
    _read_muse_glimmer,
    _build_muse_glimmer,
    vocabulary_of_target=True,
)
