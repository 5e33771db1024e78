"""Muse Glimmer's drafter by Meta: DFlash's graph with other names, fields, and windows that reach both ways.

It has no embedding, head or vocabulary of its own. Its logits are the target's, multiplied and soft-capped alike.
"""

from __future__ import annotations

import onnx_ir as ir

from dflash_trt.checkpoint.fields import Fields
from dflash_trt.checkpoint.rope import read_rope
from dflash_trt.checkpoint.schema import DrafterConfig, LayerAttention
from dflash_trt.models.decoder import soft_capped
from dflash_trt.models.drafters.block import BlockPass, BlockSettings, block_builder
from dflash_trt.models.drafters.dflash import BLOCK
from dflash_trt.models.drafters.kind import DrafterKind
from dflash_trt.models.reading import LAYERS, check_quantization, decoder, layer_ids, place_window


def _read(fields: Fields) -> DrafterConfig:
    check_quantization(fields)
    mask = fields.integer("mask_token_id", minimum=0)
    # The file has no vocab_size: it is the target's.
    known = {"vocab_size": mask + 1, **fields.values}
    if known.get("layer_types") is None:
        known["layer_types"] = ["sliding_attention"] * fields.integer("num_hidden_layers", maximum=LAYERS)
    filled = Fields(fields.path, known, fields.prefix)
    common = decoder(filled, head_dim=128, qk_norm=True, rope=read_rope(filled, theta=500_000.0))
    # Transformers lets such layers see as far as this in both directions. Our windows count the row itself.
    window = 1 + filled.integer("sliding_window", default=2048)
    return DrafterConfig(
        **common,
        layers=tuple(
            LayerAttention(False, each) for each in place_window(filled, common["num_hidden_layers"], window)
        ),
        block_size=fields.integer("block_size", minimum=2, maximum=BLOCK),
        mask_token_id=mask,
        target_layer_ids=layer_ids(fields, "target_layer_ids"),
        own=BlockSettings(fusion=("encoder.fc", "encoder.output_norm_enc")),
    )


@block_builder
def _build(block: BlockPass, width: int) -> tuple[ir.Value, ir.Value]:
    rows = block.drafted(block.layers(block.embedded()))
    logits = block.logits(rows, multiplier=block.target.logit_multiplier)
    return block.best(soft_capped(block.g, logits, block.target.logit_softcap), width)


KIND = DrafterKind(
    "MuseGlimmerAssistantModel", "muse_glimmer_assistant", _read, _build, vocabulary_of_target=True
)
