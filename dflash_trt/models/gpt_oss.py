"""gpt-oss: attention with sinks, a window in every other layer, and experts in every layer, stored in MXFP4."""

from __future__ import annotations

from typing import Literal

import onnx_ir as ir

from dflash_trt.checkpoint.fields import Fields, stated
from dflash_trt.checkpoint.schema import MoEConfig, TargetConfig
from dflash_trt.formats.base import BLOCK
from dflash_trt.graph.experts import Experts
from dflash_trt.models.decoder import Stream, mixer_block
from dflash_trt.models.module import Module
from dflash_trt.models.passes import Mixer
from dflash_trt.models.qwen3_moe import experts
from dflash_trt.models.reading import (
    HEAD_DIM,
    LAYERS,
    Family,
    decoder,
    expert_counts,
    place_window,
    refuse,
    target,
)

# The parts of published gpt-oss checkpoints that are in BF16: everything but the experts' matrices.
_MXFP4_KEPT = {"model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"}


def _read(fields: Fields) -> TargetConfig:
    if not fields.get("rope_parameters") and not fields.get("rope_scaling"):
        raise fields.error("rope_scaling", "is missing, expected the YaRN parameters of this checkpoint")
    size = fields.integer("head_dim", maximum=HEAD_DIM)  # which must be there
    common = decoder(fields, head_dim=size, attention_bias=True, attention_sinks=True)
    layers, window = common["num_hidden_layers"], stated([(fields, "sliding_window")], Fields.integer)
    types = ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)]
    experts, chosen = expert_counts(
        fields, ("num_local_experts", "num_experts"), ("num_experts_per_tok", "experts_per_token")
    )
    moe = MoEConfig(
        num_experts=experts,
        experts_per_token=chosen,
        intermediate_size=common["intermediate_size"],
        normalize_weights=True,
        sparse_layers=(True,) * layers,
        alpha=fields.number("swiglu_alpha", default=1.702),
        beta=1.0,
        limit=fields.number("swiglu_limit", default=7.0),
        quantization=_mxfp4(fields),
    )
    return target(fields, common, place_window(fields, layers, window, types), moe)


def _mxfp4(fields: Fields) -> Literal["mxfp4"] | None:
    section = fields.section("quantization_config")
    if section is None:
        return None
    section.string("quant_method", among=("mxfp4",))  # as OpenAI publishes it
    refuse(
        section, {key: () for key in section.values if key not in ("quant_method", "modules_to_not_convert")}
    )
    if section.get("modules_to_not_convert") is not None:
        kept = section.strings("modules_to_not_convert", most=LAYERS)
        if missing := sorted(_MXFP4_KEPT - set(kept)):
            raise section.error("modules_to_not_convert", f"lacks {', '.join(missing)}")
    for key in ("hidden_size", "intermediate_size"):
        if fields.integer(key) % BLOCK:
            raise fields.error(key, f"is {fields.get(key)}, but MXFP4 needs a multiple of {BLOCK}")
    return "mxfp4"


def _layer(m: Module, mixer: Mixer, c: TargetConfig, i: int, x: ir.Value, h: ir.Value) -> Stream:
    moe, mlp = c.moe, m.at("mlp")
    assert moe is not None
    x, h = mixer_block(m, mixer, c, i, x, h)
    with m.g.scope("mlp"):
        logits = mlp.router(h, "router", c.hidden_size, moe.num_experts, bias=True)
        weights = _weights(mlp.at("experts"), c.hidden_size, moe)
        return x, experts(m, c.hidden_size, moe, h, logits, weights)


def _weights(m: Module, hidden: int, moe: MoEConfig) -> Experts:
    n, inner = moe.num_experts, moe.intermediate_size
    biases = {
        "gate_up_bias": m.weight("gate_up_proj_bias", n, 2 * inner),
        "down_bias": m.weight("down_proj_bias", n, hidden),
    }
    if moe.quantization == "mxfp4":

        def packed(name: str, rows: int, columns: int) -> tuple[ir.Value, ir.Value | None]:
            groups = columns // BLOCK
            blocks = m.raw(f"{name}_blocks", n, rows, groups, BLOCK // 2, dtypes=("U8",))
            scales = m.raw(f"{name}_scales", n, rows, groups, dtypes=("U8",))
            with m.g.scope(name):
                return m.dialect.mxfp4_experts(m.g, blocks, scales)

        gate_up, gate_up_scales = packed("gate_up_proj", 2 * inner, hidden)
        down, down_scales = packed("down_proj", hidden, inner)
        all_scales = {"gate_up_scales": gate_up_scales, "down_scales": down_scales}
        return Experts(gate_up=gate_up, down=down, **all_scales, **biases)
    # Matrices in floating point are stored transposed.
    gate_up = m.g.op("Transpose", m.raw("gate_up_proj", n, hidden, 2 * inner), name="gate_up", perm=[0, 2, 1])
    down = m.g.op("Transpose", m.raw("down_proj", n, inner, hidden), name="down", perm=[0, 2, 1])
    gate_up.type = down.type = ir.TensorType(m.dtype_of("gate_up_proj"))
    return Experts(gate_up=gate_up, down=down, **biases)


FAMILY = Family("GptOssForCausalLM", "gpt_oss", _read, _layer)
