"""Strict reading of the config.json fields that several families share.

No relevant field is guessed or ignored. Fields mean the same as in Transformers' configuration and modeling sources.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import onnx_ir as ir

from dflash_trt.checkpoint.fields import Fields, stated
from dflash_trt.checkpoint.rope import RopeConfig, read_rope
from dflash_trt.checkpoint.schema import Activation, LayerAttention, MoEConfig, TargetConfig
from dflash_trt.errors import quoted, show
from dflash_trt.models.decoder import Stream
from dflash_trt.models.module import Module
from dflash_trt.models.passes import Mixer

# Far above any model. These numbers determine work and memory before the tensor shapes are checked.
LAYERS, HEAD_DIM = 10_000, 1 << 14
WIDTH, _VOCABULARY, EXPERTS = 1 << 22, 1 << 24, 1 << 14
_EOS_IDS = 1024
QWEN_HEAD_DIM = 128  # Qwen3Config's default, not hidden_size / num_attention_heads
_ACTIVATIONS: Mapping[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


def architecture_of(fields: Fields, role: str, supported: Mapping[str, object]) -> str:
    """The architecture named in the file. It must be one of `supported`."""
    names = fields.strings("architectures", most=LAYERS)
    if len(names) != 1:
        raise fields.error("architectures", f"is {quoted(list(names))}, expected one name")
    if names[0] not in supported:
        raise fields.error(
            "architectures", f"is {quoted(list(names))}, supported as a {role}: {', '.join(supported)}"
        )
    return names[0]


def beside_images(
    read: Callable[[Fields], TargetConfig],
    *text_types: str,
    skipped: tuple[str, ...],
    tied: bool = False,
) -> Callable[[Fields], TargetConfig]:
    """The reader of a model that also sees images, whose text part `read` reads.

    `text_types`: what the type of that part may be. `skipped`: see TargetConfig. `tied`: what `tie_word_embeddings`
    is where it is missing.
    """

    def read_text(fields: Fields) -> TargetConfig:
        text = fields.needed("text_config", "the object that describes the text model")
        text.string("model_type", among=text_types or None)
        place = fields if fields.get("tie_word_embeddings") is not None else text
        tie = place.boolean("tie_word_embeddings", default=tied)
        return replace(read(text), tie_word_embeddings=tie, prefix="model.language_model", skipped=skipped)

    return read_text


def refuse(fields: Fields, neutral: Mapping[str, tuple[object, ...]]) -> None:
    """Refuse a field of `neutral` unless its value is one of those that change nothing."""
    for key, harmless in neutral.items():
        value = fields.get(key)
        if value is None or any(
            value == other and isinstance(value, bool) == isinstance(other, bool) for other in harmless
        ):
            continue
        raise fields.wrong(key, "which this version does not support")


def decoder(
    fields: Fields,
    *,
    head_dim: int | None = None,
    attention_bias: bool = False,
    rope: RopeConfig | None = None,
    activation: tuple[str, str] = ("hidden_act", "silu"),
    **family: Any,
) -> dict[str, Any]:
    """DecoderConfig's fields except `layers` and `architecture`, with those that `family` gives.

    `head_dim` (None: hidden_size / num_attention_heads) and `attention_bias` are the family's defaults. The file may
    override them. `rope` is read here unless it is given. `activation`: the field that names it, and the name.
    """
    key, name = activation
    fields.string(key, among=(name,))
    hidden, heads = (fields.integer(key, maximum=WIDTH) for key in ("hidden_size", "num_attention_heads"))
    kv_heads = fields.integer("num_key_value_heads", maximum=WIDTH)
    if heads % kv_heads:
        raise fields.error(
            "num_attention_heads", f"is {heads}, not a multiple of num_key_value_heads, {kv_heads}"
        )
    head_dim = fields.integer("head_dim", maximum=HEAD_DIM, default=head_dim or hidden // heads)
    if head_dim % 2:
        raise fields.error("head_dim", f"is {head_dim}, but RoPE needs an even one")
    return {
        "path": fields.path,
        "hidden_size": hidden,
        "intermediate_size": fields.integer("intermediate_size", maximum=WIDTH),
        "num_hidden_layers": fields.integer("num_hidden_layers", maximum=LAYERS),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": fields.integer("vocab_size", maximum=_VOCABULARY),
        "rms_norm_eps": fields.number("rms_norm_eps"),
        "max_position_embeddings": fields.integer("max_position_embeddings"),
        "attention_bias": fields.boolean("attention_bias", default=attention_bias),
        "rope": rope or read_rope(fields),
        "activation": _ACTIVATIONS[name],
        **family,
    }


def windows(fields: Fields, layers: int) -> list[int | None]:
    """The window of each layer: `use_sliding_window` enables it and `layer_types` places it, as in Qwen3Config.

    A Llama configuration has neither `use_sliding_window` nor `max_window_layers`: a window that it states is in use.
    """
    llama = fields.get("model_type") == "llama"
    window = window_of(fields, default=llama)
    if fields.get("layer_types") is None and window is not None:
        stated_use = fields.get("use_sliding_window") is not None
        first = (
            fields.integer("max_window_layers", minimum=0, default=0 if llama else None) if stated_use else 0
        )
        return [window if index >= first else None for index in range(layers)]
    return place_window(fields, layers, window)


def place_window(
    fields: Fields, layers: int, window: int | None, default: Sequence[str] | None = None
) -> list[int | None]:
    """The window of each layer that `layer_types` calls sliding, or `default` where the file has none."""
    if fields.get("layer_types") is not None:
        types = layer_types(fields, layers, "full_attention", "sliding_attention")
    elif default is None:
        return [None] * layers
    else:
        types = tuple(default)
    if window is None and "sliding_attention" in types:
        raise fields.error(
            f"layer_types[{types.index('sliding_attention')}]",
            f"is 'sliding_attention', but use_sliding_window is {show(fields.get('use_sliding_window'))} "
            f"and sliding_window is {show(fields.get('sliding_window'))}: such a layer needs a window",
        )
    return [window if kind == "sliding_attention" else None for kind in types]


def layer_types(fields: Fields, layers: int, *kinds: str) -> tuple[str, ...]:
    types = fields.strings("layer_types", most=LAYERS, among=kinds)
    if len(types) != layers:
        raise fields.error("layer_types", f"has {len(types)} entries, but num_hidden_layers is {layers}")
    return types


def layer_ids(fields: Fields, key: str, *, minimum: int = 0) -> tuple[int, ...]:
    """The layers that `key` names: at least one, and none twice."""
    layers = fields.integers(key, most=LAYERS, minimum=minimum)
    if not layers or len(set(layers)) != len(layers):
        raise fields.error(key, f"is {quoted(list(layers))}, expected at least one layer and no duplicates")
    return layers


def must_equal(fields: Fields, key: str, name: str, value: int) -> None:
    """Refuse a field that, if it is there, differs from `value`, the field `name` of the model."""
    if fields.get(key) is not None and fields.integer(key) != value:
        raise fields.wrong(key, f"but {name} is {value}: they must be equal")


def softcap(*places: Fields) -> float | None:
    return stated([(place, "final_logit_softcapping") for place in places], Fields.number)


def window_of(fields: Fields, *, default: bool = False) -> int | None:
    """The window, where `use_sliding_window`, or `default` in its place, enables it."""
    if not fields.boolean("use_sliding_window", default=default):
        return None
    return stated([(fields, "sliding_window")], Fields.integer)


def expert_counts(fields: Fields, total: Sequence[str], chosen: Sequence[str]) -> tuple[int, int]:
    """The number of experts, and the number of experts per token. Each may have one of several names."""
    counts = []
    for names in (total, chosen):
        count = stated([(fields, name) for name in names], partial(Fields.integer, maximum=EXPERTS))
        if count is None:
            raise fields.error(" or ".join(names), "is missing, expected an integer of at least 1")
        counts.append(count)
    if counts[1] > counts[0]:
        raise fields.error(chosen[0], f"is {counts[1]}, but there are {counts[0]} experts")
    return counts[0], counts[1]


def target(
    fields: Fields,
    common: dict[str, Any],
    windows: Sequence[int | None],
    moe: MoEConfig | None = None,
    *,
    tied: bool = False,
) -> TargetConfig:
    """`tied`: what `tie_word_embeddings` is where it is missing."""
    refuse(fields, {"is_causal": (True,)})
    path, vocab_size = fields.path.with_name("generation_config.json"), common["vocab_size"]
    generation = Fields.read(path) if path.exists() else None
    return TargetConfig(
        **common,
        layers=tuple(LayerAttention(True, window) for window in windows),
        tie_word_embeddings=fields.boolean("tie_word_embeddings", default=tied),
        eos_token_ids=_token_ids(generation, "eos_token_id", vocab_size)
        or _token_ids(fields, "eos_token_id", vocab_size),
        bos_token_id=next(iter(_token_ids(fields, "bos_token_id", vocab_size)), None),
        moe=moe,
    )


def _token_ids(fields: Fields | None, key: str, vocab_size: int) -> tuple[int, ...]:
    if fields is None or fields.get(key) is None:
        return ()
    if isinstance(fields.get(key), list):
        return fields.integers(key, maximum=vocab_size - 1, most=_EOS_IDS)
    return (fields.integer(key, minimum=0, maximum=vocab_size - 1),)


# Adds decoder layer i to the residual stream [B*S, D]. The mixer mixes the tokens.
Layer = Callable[[Module, Mixer, TargetConfig, int, ir.Value, ir.Value], Stream]


@dataclass(frozen=True)
class Family:
    """A target family, with the `architecture` and `model_type` of config.json.

    read: turns the file's fields into a configuration. Raises CheckpointError, naming a field that it cannot take.
    layer: adds one decoder layer to a graph, on the residual stream and its norm.
    centred: the norms of layers scale by 1 + weight.
    """

    architecture: str
    model_type: str
    read: Callable[[Fields], TargetConfig]
    layer: Layer
    centred: bool = False
