"""Qwen3-Next, Qwen3.5 and their successors Qwen3.6 and Qwen3.8: three layers of Gated DeltaNet, then one of attention.

Attention has a gate for each head and rotates a part of each head. Norms scale by 1 + weight. The MLP is dense, or has
experts and an expert that every token passes. Qwen3.5 has its projections apart, and its published checkpoints are of
models that also see images (`ForConditionalGeneration`): only the text part is read.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from dflash_trt.checkpoint import mtp
from dflash_trt.checkpoint.fields import Fields
from dflash_trt.checkpoint.rope import read_rope
from dflash_trt.checkpoint.schema import LayerAttention, LayerDeltaNet, MoEConfig, TargetConfig
from dflash_trt.models.qwen3_moe import moe_layer, read_experts
from dflash_trt.models.reading import (
    HEAD_DIM,
    WIDTH,
    Family,
    beside_images,
    decoder,
    layer_types,
    refuse,
    target,
)

_LINEAR, _FULL = "linear_attention", "full_attention"
_INTERVAL, _PARTIAL, _KERNEL = 4, 0.25, 64  # defaults of Transformers; the most taps of a convolution


def _read(text: Fields, *, fused: bool, sparse: bool, stacked: bool) -> TargetConfig:
    """The configuration of the text model.

    fused: see LayerDeltaNet. sparse: whether there are experts. stacked: see MoEConfig.
    """
    refuse(
        text,
        {
            "attn_output_gate": (True,),
            "mamba_ssm_dtype": ("float32",),
            "output_gate_type": ("swish",),
            "use_sliding_window": (False,),
            # Qwen3.5's experts are always normalized in Transformers, which does not read the field.
            **({} if fused else {"norm_topk_prob": (True,)}),
        },
    )
    # Models with experts in every layer may leave out the size of an MLP.
    values = {"intermediate_size": text.get("shared_expert_intermediate_size"), **text.values}
    common = decoder(
        Fields(text.path, values if sparse else text.values, text.prefix),
        head_dim=256,
        qk_norm=True,
        attention_gate="q_proj",
        zero_centred_norms=True,
        rope=read_rope(text, partial=_PARTIAL, images=True),
    )
    count = common["num_hidden_layers"]
    config = target(text, common, [None] * count, _moe(text, count, stacked) if sparse else None)
    rotated = config.heads.rotary_dim
    if rotated % 2 or not rotated:
        raise text.error(
            "head_dim",
            f"is {config.head_dim}, of which {rotated} are rotated: RoPE needs an even number",
        )
    return replace(config, layers=_layers(text, count, fused=fused), skipped=mtp.PREFIXES)


def _layers(fields: Fields, count: int, *, fused: bool) -> tuple[LayerAttention | LayerDeltaNet, ...]:
    key_heads, value_heads = (
        fields.integer(f"linear_num_{kind}_heads", maximum=WIDTH) for kind in ("key", "value")
    )
    if value_heads % key_heads:
        raise fields.error(
            "linear_num_value_heads", f"is {value_heads}, not a multiple of linear_num_key_heads, {key_heads}"
        )
    delta = LayerDeltaNet(
        key_heads,
        value_heads,
        fields.integer("linear_key_head_dim", maximum=HEAD_DIM),
        fields.integer("linear_value_head_dim", maximum=HEAD_DIM),
        fields.integer("linear_conv_kernel_dim", minimum=2, maximum=_KERNEL),
        fused,
    )
    if fields.get("layer_types") is None:
        interval = fields.integer("full_attention_interval", default=_INTERVAL)
        types = tuple(_FULL if (i + 1) % interval == 0 else _LINEAR for i in range(count))
    else:
        types = layer_types(fields, count, _LINEAR, _FULL)
    if _FULL not in types:
        raise fields.error("layer_types", f"has no {_FULL!r}: at least one layer must keep rows")
    return tuple(delta if kind == _LINEAR else LayerAttention(True, None) for kind in types)


def _moe(fields: Fields, layers: int, stacked: bool) -> MoEConfig:
    shared = fields.integer("shared_expert_intermediate_size", maximum=WIDTH)
    return read_experts(fields, layers, normalize=True, shared_intermediate_size=shared, stacked=stacked)


def _families(name: str, model_type: str, *, sparse: bool) -> tuple[Family, Family]:
    read = partial(_read, fused=False, sparse=sparse, stacked=sparse)
    with_images = beside_images(read, skipped=(*mtp.PREFIXES, "model.visual."))
    return (
        Family(f"{name}ForCausalLM", f"{model_type}_text", read, moe_layer),
        Family(f"{name}ForConditionalGeneration", model_type, with_images, moe_layer),
    )


_next = partial(_read, fused=True, sparse=True, stacked=True)
FAMILIES = (
    Family("Qwen3NextForCausalLM", "qwen3_next", _next, moe_layer),
    *_families("Qwen3_5", "qwen3_5", sparse=False),
    *_families("Qwen3_5Moe", "qwen3_5_moe", sparse=True),
)
