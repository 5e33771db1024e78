"""Muse Glimmer: windows with RoPE, and in every fourth layer full attention without positions.

Embedded rows, queries and keys pass norms without weights, and a gate scales the output of the heads. Norms stand
before and after each half of a layer. Only the text part of the checkpoint, which also sees images, is read.
"""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir

from dflash_trt.checkpoint.fields import Fields
from dflash_trt.checkpoint.rope import read_rope
from dflash_trt.checkpoint.schema import Heads, TargetConfig
from dflash_trt.models.decoder import Stream, gated_mlp, sandwich_layer
from dflash_trt.models.module import Module
from dflash_trt.models.passes import Mixer
from dflash_trt.models.reading import LAYERS, Family, beside_images, decoder, place_window, target

POST_EPSILON = 1e-8  # Transformers' default of post_norm_eps
_OTHERS = ("model.vision_",)


def _read(text: Fields) -> TargetConfig:
    layers = text.integer("num_hidden_layers", maximum=LAYERS)
    full = [(layers - 1 - i) % 4 == 0 for i in range(layers)]
    rope = read_rope(text, theta=10_000.0)
    scale = text.number("qk_scale_factor", default=3.87)
    common = decoder(
        text,
        head_dim=128,
        qk_norm=True,
        qk_norm_weights=False,
        rope=rope,
        activation=("hidden_activation", "silu"),
        attention_gate="gate_proj",
    )
    common |= {
        # The factor of the queries commutes with their rotation.
        "attention_scale": scale * common["head_dim"] ** -0.5,
        "logit_multiplier": text.number("output_multiplier", default=0.19611613513818404),
        "logit_softcap": text.number("final_logit_softcapping", default=20.0),
        "post_norm_eps": text.number("post_norm_eps", default=POST_EPSILON),
    }
    kinds = ["full_attention" if is_full else "sliding_attention" for is_full in full]
    windows = place_window(text, layers, text.integer("sliding_window", default=2048), kinds)
    config = target(text, common, windows)
    plain = Heads(config.num_key_value_heads, config.head_dim, None)
    rotated = _rotated(text, full, rope.theta)
    placed = tuple(
        layer if turns else replace(layer, heads=plain)
        for layer, turns in zip(config.attention_layers, rotated, strict=True)
    )
    return replace(config, layers=placed, embedding_norm=True)


def _rotated(text: Fields, full: list[bool], theta: float) -> list[bool]:
    """Whether the heads of each layer rotate. Transformers reads no other theta than 0 and the model's."""
    if text.get("layer_rope_theta") is None:
        return [not is_full for is_full in full]
    thetas = text.get("layer_rope_theta")
    if not isinstance(thetas, list) or len(thetas) != len(full) or not all(x in (0, theta) for x in thetas):
        raise text.wrong(
            "layer_rope_theta",
            f"expected {len(full)} numbers, each 0 or rope_theta, {theta:g}",
        )
    return [x != 0 for x in thetas]


def _layer(m: Module, mixer: Mixer, c: TargetConfig, i: int, x: ir.Value, h: ir.Value) -> Stream:
    def attention(h: ir.Value) -> ir.Value:
        return mixer.layer(m, i, h, h)

    def feed_forward(h: ir.Value, _: ir.Value) -> Stream:
        return gated_mlp(m.at("mlp"), h, c.hidden_size, c.intermediate_size), None

    return sandwich_layer(m, c, x, h, attention, feed_forward, after=c.post_norm_eps, scaled=False)


FAMILY = Family(
    "MuseGlimmerForConditionalGeneration",
    "muse_glimmer",
    beside_images(_read, "muse_glimmer_text", skipped=_OTHERS),
    _layer,
    centred=True,
)
