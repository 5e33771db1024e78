"""The common parts of decoder families: embedding, pre-norm layers, the gated MLP.

A layer takes the residual stream and its input norm, and leaves its last sum to whoever norms that next. Hidden states
are flat, [B*S, D]. So every linear layer is one Gemm on the checkpoint's own [out, in] weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from dflash_trt.checkpoint.schema import Activation, DecoderConfig, TargetConfig
from dflash_trt.graph.builder import FLOAT, GraphBuilder
from dflash_trt.models.module import Module
from dflash_trt.models.passes import Mixer

# A residual stream [B*S, D], and what is to be added to it.
Stream = tuple[ir.Value, ir.Value | None]


def mixer_block(
    m: Module, mixer: Mixer, c: DecoderConfig, i: int, x: ir.Value, h: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """The first half of a pre-norm layer on the stream x and its norm h: x + mixer(h), and the norm of that."""
    with m.g.scope("attention"):
        y = mixer.layer(m, i, h, h)
        return m.add_norm(x, y, "post_attention_layernorm", c.hidden_size, c.rms_norm_eps)


def dense_layer(m: Module, mixer: Mixer, c: TargetConfig, i: int, x: ir.Value, h: ir.Value) -> Stream:
    """A pre-norm layer with a gated MLP."""
    x, h = mixer_block(m, mixer, c, i, x, h)
    with m.g.scope("mlp"):
        return x, gated_mlp(m.at("mlp"), h, c.hidden_size, c.intermediate_size, bias=c.mlp_bias)


def sandwich_layer(
    m: Module,
    c: DecoderConfig,
    x: ir.Value,
    h: ir.Value,
    attention: Callable[[ir.Value], ir.Value],
    feed_forward: Callable[[ir.Value, ir.Value], Stream],
    *,
    after: float | None = None,
    scaled: bool = True,
) -> Stream:
    """A layer with norms before and after each half, on the stream x and its norm h.

    attention: of the normed rows. feed_forward: of the normed rows, and of the rows before that norm; what it gives is
    summed. after: the epsilon of the norms after a half, if it is another. scaled: the result is scaled by a number of
    the layer's own.
    """
    g, size, epsilon = m.g, c.hidden_size, c.rms_norm_eps
    after = epsilon if after is None else after
    with g.scope("attention"):
        y = m.rms_norm(attention(h), "post_attention_layernorm", size, after)
        x, h = m.add_norm(x, y, "pre_feedforward_layernorm", size, epsilon)
    with g.scope("mlp"):
        _, y = m.add_norm(*feed_forward(h, x), "post_feedforward_layernorm", size, after)
        if not scaled:
            return x, y
        return g.op("Mul", summed(g, x, y), m.weight("layer_scalar", 1), name="scaled"), None


def summed(g: GraphBuilder, x: ir.Value, y: ir.Value | None) -> ir.Value:
    """A stream with what is to be added."""
    return x if y is None else g.op("Add", x, y, name="residual")


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
    sizes = {"gate_proj": intermediate, "up_proj": intermediate}
    h = m.dialect.gated(m.g, m.products(x, sizes, hidden, bias=bias), sizes, activation)
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
    """Logits times `multiplier`, as cap * tanh(logits / cap), in float32; as they are without either."""
    if multiplier != 1:
        logits = g.op("Mul", g.to_float(logits), g.scalar(multiplier, FLOAT), name="multiplied")
        logits.type = ir.TensorType(FLOAT)
    if cap is not None:
        most = g.scalar(cap, FLOAT)
        within = g.op("Tanh", g.op("Div", g.to_float(logits), most, name="in_cap"), name="capped")
        logits = g.op("Mul", within, most, name="soft")
        logits.type = ir.TensorType(FLOAT)
    return logits


def cache_row_bytes(model: ir.Model) -> dict[int, int]:
    """Bytes of one row in the caches of each layer of a graph."""
    by_layer: dict[int, int] = {}
    for value in model.graph.inputs:
        if value.name and "_cache." in value.name and value.shape is not None and value.dtype is not None:
            layer = int(value.name.rpartition(".")[2])
            of_a_row = [int(str(n)) for n in (*value.shape[1:-2], value.shape[-1])]
            by_layer[layer] = by_layer.get(layer, 0) + math.prod(of_a_row) * round(value.dtype.itemsize)
    return by_layer
