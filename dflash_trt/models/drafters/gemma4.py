"""DeepSpec's drafters for Gemma 4, DSpark and DFlash: blocks as dspark.py has them, through Gemma's own layers.

All layers see all tokens and have the heads that such layers of the target have. Embedding and head are the drafter's
own; embedded rows are scaled, and logits soft-capped, as the target's.
"""

from __future__ import annotations

from dataclasses import replace

from dflash_trt.checkpoint.fields import Fields
from dflash_trt.checkpoint.schema import DrafterConfig
from dflash_trt.models.drafters.dspark import build_dspark, drafter_config
from dflash_trt.models.drafters.kind import DrafterKind
from dflash_trt.models.gemma4 import gemma_decoder
from dflash_trt.models.reading import check_quantization, refuse


def _read(fields: Fields) -> DrafterConfig:
    """The configuration: the target's text model with other numbers, and DSpark's fields."""
    check_quantization(fields)
    refuse(fields, {"enable_moe_block": (False,), "is_causal": (False,)})
    common = gemma_decoder(fields)
    layers = common.pop("layers")
    if any(layer.window for layer in layers):
        raise fields.error("layer_types", "has a sliding window, but these drafters are read without any")
    if (heads := layers[0].heads) is not None:
        common |= {"num_key_value_heads": heads.kv_heads, "head_dim": heads.head_dim, "rope": heads.rope}
    config = drafter_config(fields, common, tuple(replace(each, causal=False, heads=None) for each in layers))
    return replace(config, own=replace(config.own, sandwich=True))


# The names of the text models whose configuration the drafter's was made from.
KIND = DrafterKind("Gemma4DSparkModel", "gemma4_unified_text", _read, build_dspark, also=("gemma4_text",))
