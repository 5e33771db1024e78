"""`config.json` of targets and drafters, read strictly: nothing that matters is guessed or skipped."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_trt.checkpoint.fields import Fields, read_object, show
from dflash_trt.checkpoint.rope import RopeConfig, read_rope

__all__ = [
    "DRAFTER_ARCHITECTURES",
    "TARGET_ARCHITECTURES",
    "DecoderConfig",
    "DrafterConfig",
    "LayerAttention",
    "RopeConfig",
    "TargetConfig",
    "read_drafter_config",
    "read_target_config",
]


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """How one layer attends. `window` counts the row itself: row i sees rows j > i - window (None: all)."""

    causal: bool
    window: int | None


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """What targets and drafters have in common. `path` is the config.json it was read from."""

    path: Path
    model_type: str
    architecture: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    attention_bias: bool
    rope: RopeConfig
    layers: tuple[LayerAttention, ...]


@dataclass(frozen=True, kw_only=True)
class TargetConfig(DecoderConfig):
    """A target. `eos_token_ids`: generation_config.json's where it names any, else config.json's."""

    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None


@dataclass(frozen=True, kw_only=True)
class DrafterConfig(DecoderConfig):
    """A drafter. Tap i is the residual stream after target layer `target_layer_ids[i]` (0-based)."""

    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None


def read_target_config(directory: Path) -> TargetConfig:
    """Read a target's config.json and generation_config.json.

    Raises:
        CheckpointError: a file is missing or malformed, the architecture is not one of TARGET_ARCHITECTURES,
            the checkpoint is quantized, or a field is missing, of the wrong type, or out of range.
    """
    fields = _open(directory, "target", TARGET_ARCHITECTURES)
    return TARGET_ARCHITECTURES[_architecture(fields)][1](fields)


def read_drafter_config(directory: Path) -> DrafterConfig:
    """Read a DFlash drafter's config.json as z-lab publishes them.

    `block_size` is read from `dflash_config` or from the top level. Per-layer causality: `is_causal`, else
    `dflash_config.causal`, else a layer is causal exactly when it slides (vLLM's rule for these checkpoints).

    Raises:
        CheckpointError: as read_target_config, and for a field that asks for something not implemented.
    """
    fields = _open(directory, "drafter", DRAFTER_ARCHITECTURES)
    dflash = fields.section("dflash_config")
    if dflash is None:
        raise fields.error(
            "dflash_config", "is missing, expected an object with mask_token_id and target_layer_ids"
        )
    _refuse(fields, _DRAFTER_NEUTRAL)
    _refuse(
        dflash, {key: _DRAFTER_NEUTRAL.get(key, ()) for key in dflash.values if key not in _DFLASH_FIELDS}
    )
    common = _decoder(fields)
    for key, size in (("draft_vocab_size", "vocab_size"), ("target_hidden_size", "hidden_size")):
        for place in (fields, dflash):
            if place.get(key) is not None and place.integer(key) != common[size]:
                raise place.error(
                    key, f"is {place.get(key)}, but {size} is {common[size]}: they must be equal"
                )
    taps = dflash.integers("target_layer_ids")
    if not taps or len(set(taps)) != len(taps):
        raise dflash.error("target_layer_ids", f"is {list(taps)}, expected at least one layer and none twice")
    windows = _windows(fields, common["num_hidden_layers"])
    causal = next((place.boolean(key) for place, key in _causal_places(fields, dflash)), None)
    return DrafterConfig(
        **common,
        layers=tuple(
            LayerAttention(window is not None if causal is None else causal, window) for window in windows
        ),
        block_size=_agreed(dflash, fields, "block_size", minimum=2),
        mask_token_id=dflash.integer("mask_token_id", minimum=0),
        target_layer_ids=taps,
        num_target_layers=_agreed(dflash, fields, "num_target_layers", minimum=1)
        if any(place.get("num_target_layers") is not None for place in (fields, dflash))
        else None,
    )


def _read_qwen3(fields: Fields) -> TargetConfig:
    common = _decoder(fields)
    generation = _generation_config(fields.path.with_name("generation_config.json"))
    vocab_size = common["vocab_size"]
    return TargetConfig(
        **common,
        layers=tuple(
            LayerAttention(True, window) for window in _windows(fields, common["num_hidden_layers"])
        ),
        tie_word_embeddings=fields.boolean("tie_word_embeddings", default=False),
        eos_token_ids=_token_ids(generation, "eos_token_id", vocab_size)
        or _token_ids(fields, "eos_token_id", vocab_size),
        bos_token_id=next(iter(_token_ids(fields, "bos_token_id", vocab_size)), None),
    )


# Architecture -> (model_type, reader). The one list of what can be read; everything else derives from it.
TARGET_ARCHITECTURES: Mapping[str, tuple[str, Callable[[Fields], TargetConfig]]] = {
    "Qwen3ForCausalLM": ("qwen3", _read_qwen3),
}
DRAFTER_ARCHITECTURES: Mapping[str, tuple[str]] = {"DFlashDraftModel": ("qwen3",)}

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
    "output_multiplier": (1,),
    "partial_rotary_factor": (1,),
    "projector_type": ("dflash",),
    "quantization_config": (),
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
_TARGET_NEUTRAL: Mapping[str, tuple[object, ...]] = {"partial_rotary_factor": (1,), "quantization_config": ()}


def _refuse(fields: Fields, neutral: Mapping[str, tuple[object, ...]]) -> None:
    for key, harmless in neutral.items():
        value = fields.get(key)
        if value is None or any(
            value == other and isinstance(value, bool) == isinstance(other, bool) for other in harmless
        ):
            continue
        raise fields.error(key, f"is {show(value)}, which this version does not implement")


def _open(directory: Path, role: str, architectures: Mapping[str, tuple[Any, ...]]) -> Fields:
    path = directory / "config.json"
    fields = Fields(path, read_object(path))
    architecture, supported = _architecture(fields), ", ".join(architectures)
    if architecture not in architectures:
        raise fields.error("architectures", f"is [{architecture!r}], supported as a {role}: {supported}")
    model_type = architectures[architecture][0]
    if fields.string("model_type") != model_type:
        raise fields.error(
            "model_type", f"is {fields.get('model_type')!r}, but {architecture} has {model_type!r}"
        )
    _refuse(fields, _TARGET_NEUTRAL)
    if fields.string("hidden_act") != "silu":
        raise fields.error("hidden_act", f"is {fields.get('hidden_act')!r}, only 'silu' is supported")
    return fields


def _architecture(fields: Fields) -> str:
    names = fields.strings("architectures")
    if len(names) != 1:
        raise fields.error("architectures", f"is {list(names)}, expected one name")
    return names[0]


def _decoder(fields: Fields) -> dict[str, Any]:
    heads = fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads")
    if heads % kv_heads:
        raise fields.error(
            "num_attention_heads", f"is {heads}, not a multiple of num_key_value_heads, {kv_heads}"
        )
    # Qwen3Config's default of head_dim is 128, not hidden_size / num_attention_heads.
    head_dim = fields.integer("head_dim", minimum=2, default=128)
    if head_dim % 2:
        raise fields.error("head_dim", f"is {head_dim}, but RoPE needs an even one")
    return {
        "path": fields.path,
        "model_type": fields.string("model_type"),
        "architecture": _architecture(fields),
        "hidden_size": fields.integer("hidden_size"),
        "intermediate_size": fields.integer("intermediate_size"),
        "num_hidden_layers": fields.integer("num_hidden_layers", maximum=10_000),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": fields.integer("vocab_size"),
        "rms_norm_eps": fields.number("rms_norm_eps"),
        "max_position_embeddings": fields.integer("max_position_embeddings"),
        "attention_bias": fields.boolean("attention_bias", default=False),
        "rope": read_rope(fields),
    }


def _windows(fields: Fields, layers: int) -> list[int | None]:
    """Each layer's window, by Qwen3Config's rule: `use_sliding_window` gates it, `layer_types` places it."""
    window = None
    if fields.boolean("use_sliding_window", default=False) and fields.get("sliding_window") is not None:
        window = fields.integer("sliding_window")
    if fields.get("layer_types") is None:
        if window is None:
            return [None] * layers
        first = fields.integer("max_window_layers", minimum=0)
        return [window if index >= first else None for index in range(layers)]
    types = fields.strings("layer_types")
    if len(types) != layers:
        raise fields.error("layer_types", f"has {len(types)} entries, but num_hidden_layers is {layers}")
    for index, kind in enumerate(types):
        if kind not in ("full_attention", "sliding_attention"):
            raise fields.error(
                f"layer_types[{index}]",
                f"is {kind!r}, supported are 'full_attention' and 'sliding_attention'",
            )
        if kind == "sliding_attention" and window is None:
            raise fields.error(
                f"layer_types[{index}]",
                f"is 'sliding_attention', but use_sliding_window is {show(fields.get('use_sliding_window'))} "
                f"and sliding_window is {show(fields.get('sliding_window'))}: such a layer needs a window",
            )
    return [window if kind == "sliding_attention" else None for kind in types]


def _causal_places(fields: Fields, dflash: Fields) -> list[tuple[Fields, str]]:
    places = [(fields, "is_causal"), (dflash, "causal")]
    return [(place, key) for place, key in places if place.get(key) is not None]


def _agreed(dflash: Fields, fields: Fields, key: str, *, minimum: int) -> int:
    places = [place for place in (dflash, fields) if place.get(key) is not None]
    if not places:
        raise fields.error(
            key, f"is missing, here and in dflash_config, expected an integer of at least {minimum}"
        )
    values = [place.integer(key, minimum=minimum) for place in places]
    if values[0] != values[-1]:
        raise dflash.error(key, f"is {values[0]}, but {key} at the top level is {values[-1]}")
    return values[0]


def _token_ids(fields: Fields | None, key: str, vocab_size: int) -> tuple[int, ...]:
    if fields is None or fields.get(key) is None:
        return ()
    if isinstance(fields.get(key), list):
        return fields.integers(key, maximum=vocab_size - 1)
    return (fields.integer(key, minimum=0, maximum=vocab_size - 1),)


def _generation_config(path: Path) -> Fields | None:
    return Fields(path, read_object(path)) if path.exists() else None
