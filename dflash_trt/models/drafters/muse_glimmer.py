"""Muse Glimmer's drafter by Meta: DFlash's graph with other names, fields, and windows that reach both ways.

It has no embedding, head or vocabulary of its own. Its logits are the target's, multiplied and soft-capped alike.
"""

from __future__ import annotations

import onnx_ir as ir

from dflash_trt.checkpoint.fields import Fields
from dflash_trt.checkpoint.rope import read_rope
from dflash_trt.checkpoint.schema import DrafterConfig, LayerAttention
from dflash_trt.models.decoder import soft_capped
from dflash_trt.models.drafters.block import BlockPass, BlockSettings
from dflash_trt.models.drafters.dflash import BLOCK
from dflash_trt.models.drafters.kind import DrafterKind, DrafterParts
from dflash_trt.models.reading import decoder, layer_ids, place_window


def _read(fields: Fields) -> DrafterConfig:
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


def _build(parts: DrafterParts) -> ir.Model:
    block = BlockPass(parts)
    logits = block.logits(block.drafted(), multiplier=block.target.logit_multiplier)
    return block.model(*block.best(soft_capped(block.g, logits, block.target.logit_softcap)))


KIND = DrafterKind(
    "MuseGlimmerAssistantModel", "muse_glimmer_assistant", _read, _build, vocabulary_of_target=True
)
