"""Gemma 4: windows in five of six layers, and in the sixth other heads, whose values may be their keys.

Keys, queries and values are normed by head, and their products are not scaled. Norms stand before and after each half
of a layer. The 26B-A4B has experts beside its MLP. Only the text part of checkpoints that also see images is read. E2B
and E4B share keys and values between layers, and have inputs of each layer's own: they are refused.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir

from dflash_trt.checkpoint.fields import Fields
from dflash_trt.checkpoint.rope import RopeConfig, read_rope_of
from dflash_trt.checkpoint.schema import Heads, LayerAttention, MoEConfig, TargetConfig
from dflash_trt.errors import show
from dflash_trt.graph.builder import FLOAT
from dflash_trt.graph.quantized_experts import ExpertLayer
from dflash_trt.models.decoder import Stream, gated_mlp, sandwich_layer
from dflash_trt.models.module import Module
from dflash_trt.models.passes import Mixer
from dflash_trt.models.qwen3_moe import expert_stacks, widened_bytes
from dflash_trt.models.reading import (
    HEAD_DIM,
    WIDTH,
    Family,
    beside_images,
    decoder,
    expert_counts,
    place_window,
    refuse,
    softcap,
    target,
)

SLIDING, FULL = "sliding_attention", "full_attention"
_PATTERN = 6  # the sixth layer sees all tokens
_ROPE = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}
_OTHERS = tuple(
    f"model.{part}."
    for part in ("vision_tower", "vision_embedder", "audio_tower", "embed_vision", "embed_audio")
)
_SMALL = (
    "the layers of E2B and E4B, which are not supported, share keys and values and have inputs of their own"
)


def gemma_decoder(text: Fields) -> dict[str, Any]:
    """DecoderConfig's fields."""
    refuse(text, {"use_bidirectional_attention": ("vision",)})
    # Null is none.
    missing = "hidden_size_per_layer_input" not in text.values and text.get("model_type") == "gemma4_text"
    for key, default in (("num_kv_shared_layers", 0), ("hidden_size_per_layer_input", 256 if missing else 0)):
        if (value := text.integer(key, minimum=0, default=default)) != 0:
            raise text.error(key, f"is {value}: {_SMALL}")
    if text.get("rope_parameters") is None:
        text = Fields(text.path, {**text.values, "rope_parameters": _ROPE}, text.prefix)
    ropes = {kind: read_rope_of(kind, text, 10_000.0) for kind in (SLIDING, FULL)}
    common = decoder(
        text,
        head_dim=256,
        qk_norm=True,
        value_norm=True,
        attention_scale=1.0,
        rope=ropes[SLIDING],
        activation=("hidden_activation", "gelu_pytorch_tanh"),
    )
    return common | {
        "layers": _layers(text, common, ropes[FULL]),
        "embedding_scale": common["hidden_size"] ** 0.5,
        "logit_softcap": softcap(text),
    }


def _checked(text: Fields, heads: Heads, queries: int) -> Heads:
    if queries % heads.kv_heads:
        raise text.error(
            "num_global_key_value_heads",
            f"is {heads.kv_heads}, which does not divide the {queries} heads of queries",
        )
    if heads.head_dim % 2:
        raise text.error("global_head_dim", f"is {heads.head_dim}, but RoPE needs an even one")
    return heads


def _layers(text: Fields, common: dict[str, Any], rope: RopeConfig) -> tuple[LayerAttention, ...]:
    """`rope`: of the layers that see all tokens."""
    count, kinds = common["num_hidden_layers"], text.get("layer_types")
    if kinds is None:
        kinds = [SLIDING if (i + 1) % _PATTERN else FULL for i in range(count)]
    if isinstance(kinds, list) and kinds:
        kinds = [*kinds[:-1], FULL]  # as Transformers does
    placed = Fields(text.path, {**text.values, "layer_types": kinds}, text.prefix)
    windows = place_window(placed, count, text.integer("sliding_window"))
    of_windows = Heads(common["num_key_value_heads"], common["head_dim"], common["rope"])
    keys_as_values = text.boolean("attention_k_eq_v", default=False)
    of_all = replace(of_windows, rope=rope)
    if text.get("per_layer_config") is None:
        kv_heads = of_all.kv_heads
        if keys_as_values:
            kv_heads = text.integer("num_global_key_value_heads", maximum=WIDTH, default=kv_heads)
        size = text.integer("global_head_dim", maximum=HEAD_DIM, default=512)
        of_all = _checked(text, Heads(kv_heads, size, rope), common["num_attention_heads"])
    heads = {
        sliding: _as_listed(
            text, [i for i, w in enumerate(windows) if (w is not None) == sliding], kind, common
        )
        for sliding, kind in ((True, of_windows), (False, of_all))
    }
    others = {sliding: None if kind == of_windows else kind for sliding, kind in heads.items()}
    return tuple(
        LayerAttention(True, window, others[window is not None], keys_as_values and window is None)
        for window in windows
    )


def _as_listed(text: Fields, layers: list[int], heads: Heads, common: dict[str, Any]) -> Heads:
    """The heads of these layers with the changes of `per_layer_config`, which are the same for all of them."""
    section = text.section("per_layer_config")
    if section is None or not layers:
        return heads
    first = section.section(str(layers[0])) or Fields(text.path, {})
    for i in layers:
        if (section.get(str(i)) or {}) != first.values:
            raise section.error(
                str(i),
                f"is {show(section.get(str(i)))}, but {show(dict(first.values))} in another layer of its type",
            )
    refuse(first, {key: () for key in first.values if key not in ("head_dim", "num_key_value_heads")})
    size = first.integer("head_dim", maximum=HEAD_DIM, default=heads.head_dim)
    kv_heads = first.integer("num_key_value_heads", maximum=WIDTH, default=heads.kv_heads)
    return _checked(first, Heads(kv_heads, size, heads.rope), common["num_attention_heads"])


def _moe(text: Fields, layers: int) -> MoEConfig | None:
    if not text.boolean("enable_moe_block", default=False):
        return None
    experts, chosen = expert_counts(text, ("num_experts",), ("top_k_experts",))
    size = "moe_intermediate_size"
    if text.get(size) is None and text.get("expert_intermediate_size") is not None:
        size = "expert_intermediate_size"  # before Transformers 5.5
    return MoEConfig(
        num_experts=experts,
        experts_per_token=chosen,
        intermediate_size=text.integer(size, maximum=WIDTH),
        normalize_weights=True,
        sparse_layers=(True,) * layers,
        stacked=True,
    )


def _read(text: Fields) -> TargetConfig:
    common = gemma_decoder(text)
    layers = common.pop("layers")
    config = target(text, common, [layer.window for layer in layers], _moe(text, len(layers)), tied=True)
    return replace(config, layers=layers)


def _layer(m: Module, mixer: Mixer, c: TargetConfig, i: int, x: ir.Value, h: ir.Value) -> Stream:
    size, epsilon = c.hidden_size, c.rms_norm_eps

    def feed_forward(h: ir.Value, before: ir.Value) -> Stream:
        y = gated_mlp(m.at("mlp"), h, size, c.intermediate_size, activation=c.activation)
        if c.moe is None:
            return y, None
        y = m.rms_norm(y, "post_feedforward_layernorm_1", size, epsilon)
        return y, m.rms_norm(_experts(m, c, c.moe, before), "post_feedforward_layernorm_2", size, epsilon)

    return sandwich_layer(m, c, x, h, lambda h: mixer.layer(m, i, h, h), feed_forward)


def _experts(m: Module, c: TargetConfig, moe: MoEConfig, x: ir.Value) -> ir.Value:
    """The experts on rows x [B*S, D] that no norm has passed: the router has one of its own."""
    g, size = m.g, c.hidden_size
    router = m.at("router")
    normed = g.to_float(m.rms_norm(x, None, size, c.rms_norm_eps))
    scale = router.weight("scale", size, dtype=FLOAT)
    factor = g.constant(size**-0.5, np.float32)
    normed = g.op("Mul", g.op("Mul", normed, scale, name="by_channel"), factor, name="router_input")
    layer = ExpertLayer(
        stacks=expert_stacks(m, size, moe),
        folder=m.folder,
        k=moe.experts_per_token,
        widened_bytes=widened_bytes(size, moe),
        activation=c.activation,
        scales=router.weight("per_expert_scale", moe.num_experts, dtype=FLOAT),
    )
    return m.dialect.quantized_experts(
        g,
        m.rms_norm(x, "pre_feedforward_layernorm_2", size, c.rms_norm_eps),
        g.op(
            "Gemm",
            normed,
            router.weight("proj.weight", moe.num_experts, size, dtype=FLOAT),
            name="proj",
            transB=1,
        ),
        layer,
    )


FAMILIES = tuple(
    Family(f"{name}For{use}", model_type, read, _layer)
    for name, text in (("Gemma4", "gemma4"), ("Gemma4Unified", "gemma4_unified"))
    for use, model_type, read in (
        ("CausalLM", f"{text}_text", _read),
        ("ConditionalGeneration", text, beside_images(_read, f"{text}_text", skipped=_OTHERS, tied=True)),
    )
)
