"""`config.json` of targets and drafters, read strictly: nothing that matters is guessed or skipped."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from dflash_trt.checkpoint.families import (
    HEAD_DIM,
    LAYERS,
    TARGET_ARCHITECTURES,
    agreed,
    check_quantization,
    decoder,
    open_config,
    refuse,
    windows,
)
from dflash_trt.checkpoint.fields import Fields
from dflash_trt.checkpoint.rope import RopeConfig
from dflash_trt.checkpoint.schema import DecoderConfig, DrafterConfig, LayerAttention, MoEConfig, TargetConfig
from dflash_trt.errors import quoted, show
from dflash_trt.reading import read_object

__all__ = [
    "DRAFTER_ARCHITECTURES",
    "TARGET_ARCHITECTURES",
    "DecoderConfig",
    "DrafterConfig",
    "LayerAttention",
    "MoEConfig",
    "RopeConfig",
    "TargetConfig",
    "read_drafter_config",
    "read_target_config",
]

_BLOCK = 1024  # published drafters have 8 to 16
# Every DFlashDraftModel published says "qwen3", whatever its target is: its layers are Qwen3's.
DRAFTER_ARCHITECTURES: Mapping[str, tuple[str]] = {"DFlashDraftModel": ("qwen3",)}


def read_target_config(directory: Path) -> TargetConfig:
    """Read a target's config.json and generation_config.json.

    Raises:
        CheckpointError: a file is missing or malformed, the architecture is not one of TARGET_ARCHITECTURES, the
            quantization is not one it is published in, or a field is missing, of the wrong type, or out of range.
    """
    fields = _fields(directory)
    return TARGET_ARCHITECTURES[open_config(fields, "target", TARGET_ARCHITECTURES)][1](fields)


def read_drafter_config(directory: Path) -> DrafterConfig:
    """Read a DFlash drafter's config.json as z-lab publishes them.

    `block_size` is read from `dflash_config` or from the top level. Per-layer causality: `is_causal`, else
    `dflash_config.causal`, else a layer is causal exactly when it slides (vLLM's rule for these checkpoints).

    Raises:
        CheckpointError: as read_target_config, and for a field that asks for something not implemented.
    """
    fields = _fields(directory)
    open_config(fields, "drafter", DRAFTER_ARCHITECTURES)
    dflash = fields.section("dflash_config")
    if dflash is None:
        raise fields.error(
            "dflash_config", "is missing, expected an object with mask_token_id and target_layer_ids"
        )
    check_quantization(fields)
    refuse(fields, _DRAFTER_NEUTRAL)
    refuse(dflash, {key: _DRAFTER_NEUTRAL.get(key, ()) for key in dflash.values if key not in _DFLASH_FIELDS})
    # Qwen3Config's default of head_dim is 128, not hidden_size / num_attention_heads.
    common = decoder(fields, head_dim=fields.integer("head_dim", maximum=HEAD_DIM, default=128), qk_norm=True)
    for key, size in (("draft_vocab_size", "vocab_size"), ("target_hidden_size", "hidden_size")):
        for place in (fields, dflash):
            if place.get(key) is not None and place.integer(key) != common[size]:
                raise place.error(
                    key, f"is {show(place.get(key))}, but {size} is {common[size]}: they must be equal"
                )
    taps = dflash.integers("target_layer_ids", most=LAYERS)
    if not taps or len(set(taps)) != len(taps):
        raise dflash.error(
            "target_layer_ids", f"is {quoted(list(taps))}, expected at least one layer and none twice"
        )
    causal = next((place.boolean(key) for place, key in _causal_places(fields, dflash)), None)
    block_size = agreed([(dflash, "block_size"), (fields, "block_size")], minimum=2, maximum=_BLOCK)
    if block_size is None:
        raise fields.error(
            "block_size", "is missing, here and in dflash_config, expected an integer of at least 2"
        )
    return DrafterConfig(
        **common,
        layers=tuple(
            LayerAttention(window is not None if causal is None else causal, window)
            for window in windows(fields, common["num_hidden_layers"])
        ),
        block_size=block_size,
        mask_token_id=dflash.integer("mask_token_id", minimum=0),
        target_layer_ids=taps,
        num_target_layers=agreed([(dflash, "num_target_layers"), (fields, "num_target_layers")], minimum=1),
    )


def _fields(directory: Path) -> Fields:
    path = directory / "config.json"
    return Fields(path, read_object(path))


def _causal_places(fields: Fields, dflash: Fields) -> list[tuple[Fields, str]]:
    places = [(fields, "is_causal"), (dflash, "causal")]
    return [(place, key) for place, key in places if place.get(key) is not None]


_DFLASH_FIELDS = {
    "block_size",
    "mask_token_id",
    "target_layer_ids",
    "num_target_layers",
    "causal",
    "draft_vocab_size",
    "target_hidden_size",
}
# Fields of published drafters of other kinds that change the computation, each with the values that do not.
_DRAFTER_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "add_swa_attention_sink_bias": (False,),
    "attention_mode": ("gqa",),
    "attention_sink_bias": (False,),
    "attention_value_scale": (1,),
    "aux_hidden_state_layer_ids": (),
    "conv_group_size": (),
    "conv_kernel": (),
    "conv_kernel_size": (),
    "final_logit_softcapping": (),
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
