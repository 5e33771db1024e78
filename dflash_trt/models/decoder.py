"""The common parts of decoder families: embedding, pre-norm layers, the gated MLP.

Hidden states are flat, [B*S, D]. So every linear layer is one Gemm on the checkpoint's own [out, in] weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from dflash_trt.checkpoint.schema import Activation, DecoderConfig, TargetConfig
from dflash_trt.graph.builder import FLOAT, GraphBuilder
from dflash_trt.graph.experts import activated
from dflash_trt.models.module import Module
from dflash_trt.models.passes import Mixer


def mixer_block(m: Module, mixer: Mixer, c: DecoderConfig, i: int, x: ir.Value) -> ir.Value:
    """The first half of a pre-norm layer: x + mixer(norm(x)), x [B*S, D]."""
    g = m.g
    with g.scope("attention"):
        h = m.rms_norm(x, "input_layernorm", c.hidden_size, c.rms_norm_eps)
        return g.op("Add", x, mixer.layer(m, i, h, h), name="residual")


def dense_layer(m: Module, mixer: Mixer, c: TargetConfig, i: int, x: ir.Value) -> ir.Value:
    """A pre-norm layer with a gated MLP, x [B*S, D]."""
    g = m.g
    x = mixer_block(m, mixer, c, i, x)
    with g.scope("mlp"):
        h = m.rms_norm(x, "post_attention_layernorm", c.hidden_size, c.rms_norm_eps)
        h = gated_mlp(m.at("mlp"), h, c.hidden_size, c.intermediate_size, bias=c.mlp_bias)
        return g.op("Add", x, h, name="residual")


def sandwich_layer(
    m: Module,
    c: DecoderConfig,
    x: ir.Value,
    attention: Callable[[ir.Value], ir.Value],
    feed_forward: Callable[[ir.Value, ir.Value], ir.Value],
    *,
    after: float | None = None,
    scaled: bool = True,
) -> ir.Value:
    """A layer with norms before and after each half, x [B*S, D].

    attention: of the normed rows. feed_forward: of the normed rows, and of the rows before that norm.
    after: the epsilon of the norms after a half, if it is another. scaled: the result is scaled by a number of the
    layer's own.
    """
    g, size, epsilon = m.g, c.hidden_size, c.rms_norm_eps
    after = epsilon if after is None else after
    with g.scope("attention"):
        h = attention(m.rms_norm(x, "input_layernorm", size, epsilon))
        h = m.rms_norm(h, "post_attention_layernorm", size, after)
        x = g.op("Add", x, h, name="residual")
    with g.scope("mlp"):
        h = feed_forward(m.rms_norm(x, "pre_feedforward_layernorm", size, epsilon), x)
        h = m.rms_norm(h, "post_feedforward_layernorm", size, after)
        h = g.op("Add", x, h, name="residual")
        return g.op("Mul", h, m.weight("layer_scalar", 1), name="scaled") if scaled else h


def gated_mlp(
    m: Module,
    x: ir.Value,
    hidden: int,
    intermediate: int,
    *,
    bias: bool = False,
    activation: Activation = "silu",
) -> ir.Value:
    """down(activation(gate(x)) * up(x))."""
    gate, up = m.linears(x, {"gate_proj": intermediate, "up_proj": intermediate}, hidden, bias=bias)
    h = m.g.op("Mul", activated(m.g, gate, activation), up, name="gated")
    return m.linear(h, "down_proj", intermediate, hidden, bias=bias)


def embed(m: Module, tokens: ir.Value, vocab: int, hidden: int, *, scale: float = 1.0) -> ir.Value:
    """tokens [B,S] -> [B*S, D]. The table stays as it is on disk: only the rows looked up are widened.

    scale: of the rows, rounded to the table's dtype as in Transformers.
    """
    g, name = m.g, "embed_tokens"
    flat = g.op("Reshape", tokens, g.constant([-1]), name="flat_tokens")
    rows = g.op("Gather", m.raw(f"{name}.weight", vocab, hidden), flat, name=name)
    stored = m.dtype_of(f"{name}.weight")
    rows = g.from_dtype(rows, stored, name=f"{name}/cast")
    if scale == 1:
        return rows
    factor = float(np.asarray(scale, stored.numpy()))
    return g.op("Mul", rows, g.scalar(factor), name=f"{name}/scaled")


def soft_capped(g: GraphBuilder, logits: ir.Value, cap: float | None, *, multiplier: float = 1.0) -> ir.Value:
    """Logits in float32, times `multiplier`, as cap * tanh(logits / cap); None: without a cap."""
    if multiplier != 1:
        logits = g.op("Mul", logits, g.scalar(multiplier, FLOAT), name="multiplied")
    if cap is None:
        return logits
    most = g.scalar(cap, FLOAT)
    within = g.op("Tanh", g.op("Div", logits, most, name="in_cap"), name="capped")
    return g.op("Mul", within, most, name="soft")


def cache_row_bytes(model: ir.Model) -> dict[int, int]:
    """Bytes of one row in the caches of each layer of a graph."""
    by_layer: dict[int, int] = {}
    for value in model.graph.inputs:
        if value.name and "_cache." in value.name and value.shape is not None and value.dtype is not None:
            layer = int(value.name.rpartition(".")[2])
            of_a_row = [int(str(n)) for n in (*value.shape[1:-2], value.shape[-1])]
            by_layer[layer] = by_layer.get(layer, 0) + math.prod(of_a_row) * round(value.dtype.itemsize)
    return by_layer
