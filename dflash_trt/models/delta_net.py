"""Gated DeltaNet as a mixer (Yang et al. 2024, arXiv 2412.06464), as Qwen3-Next and Qwen3.5 have it.

A layer keeps a state of fixed size instead of rows. Rows that a pass writes may be taken back, but a state cannot be
cut. So the states lie behind: they belong to `position`, and the rows from there on are *pending*. The next pass says
with its `start` how many of them were kept. It replays these first, then runs its own rows.

Caches of a sequence, W = PENDING_ROWS:
    position_state           [B] int64: the number of tokens that the states have read, one for all layers
    delta_state.i            [B, Hv, dk, dv] float32
    conv_state.i             [B, kernel-1, C]: the convolution's inputs before `position`
    pending_rows_state.i     [B, W, C]: its inputs from `position` on
    pending_gates_state.i    [B, W, 2*Hv] float32: decays (logarithms), then betas
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from dflash_trt.checkpoint.schema import PENDING_ROWS, DecoderConfig, LayerDeltaNet
from dflash_trt.graph.builder import FLOAT, INT64
from dflash_trt.models.module import Module
from dflash_trt.models.passes import Pass

# Added to the squared length of queries and keys, as in Transformers.
_EPSILON = 1e-6
# ONNX Runtime computes Softplus for four numbers at a time, and the last ones of a tensor in another way. With rows of
# a multiple of them, a row's numbers do not depend on the rows beside it.
_ALIGNED = 16


class DeltaNet:
    def __init__(self, shared: Pass, layers: Sequence[int]) -> None:
        g = self.g = shared.g
        self.dialect, self.config, self.rows = shared.dialect, shared.config, shared.queries
        assert shared.certain is not None
        self.certain = shared.certain
        position = g.input("position_state", INT64, ["B"])
        none = g.constant([0])
        begun = g.op("Greater", shared.start, none, name="begun")
        # At position 0 a new sequence begins, whatever the caches hold.
        kept = g.op(
            "Where", begun, g.op("Sub", shared.start, position, name="kept"), none, name="of_a_sequence"
        )
        kept = g.op("Max", kept, none, name="not_negative")
        self.replayed = g.op("Min", kept, g.constant([PENDING_ROWS]), name="replayed")
        self.begun = g.op("Cast", begun, name="begun_as_number", to=int(FLOAT))
        committed = g.op("Add", g.op("Add", position, self.replayed, name="read"), self.certain, name="ahead")
        committed = g.op("Where", begun, committed, self.certain, name="committed")
        g.output(committed, "position_state_out", INT64, ["B"])
        self._caches = {
            i: [
                g.input(f"{n}.{i}", self._dtype(n), ["B", *s]) for n, s in cache_shapes(self._kind(i)).items()
            ]
            for i in layers
        }

    def _kind(self, i: int) -> LayerDeltaNet:
        kind = self.config.layers[i]
        assert isinstance(kind, LayerDeltaNet)
        return kind

    def _dtype(self, cache: str) -> ir.DataType:
        return FLOAT if cache in _FLOATS else self.g.dtype

    def layer(self, m: Module, i: int, x: ir.Value, written: ir.Value) -> ir.Value:
        """`Mixer.layer`. The written rows are those that ask."""
        g, m, c = self.g, m.at("linear_attn"), self._kind(i)
        assert written is x
        inputs, z, b, a = self._projected(m, x, c)
        gates = self._gates(m, a, b, c)
        state, history, pending, pending_gates = self._caches[i]
        weight = m.weight("conv1d.weight", c.channels, 1, c.kernel, dtype=FLOAT)
        mixed, *convolved = g.call(
            self.dialect.causal_conv(c),
            *(inputs, history, pending, weight, self.replayed, self.certain, self.begun),
            outputs=3,
            name="conv",
        )
        q, k, v = self._heads(mixed, c)
        y, *updated = g.call(
            self.dialect.gated_delta_net(c),
            *(q, k, v, gates, state, pending_gates, self.replayed, self.certain, self.begun),
            outputs=3,
            name="delta",
        )
        new = (updated[0], *convolved, updated[1])
        for (name, shape), value in zip(cache_shapes(c).items(), new, strict=True):
            g.output(value, f"{name}_out.{i}", self._dtype(name), ["B", *shape])
        y = g.op("Reshape", y, g.constant([-1, c.value_dim]), name="by_head")
        # The norm of the output's heads scales by its weight; float32 in, the graph's dtype out.
        weight, epsilon = m.weight("norm.weight", c.value_dim, dtype=FLOAT), self.config.rms_norm_eps
        y = g.from_dtype(g.op("RMSNormalization", y, weight, name="norm", epsilon=epsilon, axis=-1), FLOAT)
        z = g.op("Reshape", z, g.constant([-1, c.value_dim]), name="gates_by_head")
        y = g.op("Mul", y, g.op("Swish", z, name="silu"), name="gated")
        y = g.op("Reshape", y, g.constant([-1, c.value_heads * c.value_dim]), name="merge")
        return m.linear(y, "out_proj", c.value_heads * c.value_dim, self.config.hidden_size)

    def _projected(
        self, m: Module, x: ir.Value, c: LayerDeltaNet
    ) -> tuple[ir.Value, ir.Value, ir.Value, ir.Value]:
        """x [B*S, D]: the convolution's inputs [B, S, C], the output's gates [B*S, Hv*dv], and b and a [B*S, Hv]."""
        g, hidden, heads = self.g, self.config.hidden_size, c.value_heads
        keys, values = c.key_heads * c.key_dim, heads * c.value_dim
        if not c.fused:
            rows = {"in_proj_qkv": c.channels, "in_proj_z": values, "in_proj_b": heads, "in_proj_a": heads}
            u, z, b, a = m.linears(x, rows, hidden)
            return g.op("Reshape", u, self.rows.shape(c.channels), name="by_row"), z, b, a
        # By key head: [q | k | v of its value heads | z of them], and [b of them | a of them].
        both = m.linears(x, {"in_proj_qkvz": 2 * keys + 2 * values, "in_proj_ba": 2 * heads}, hidden)
        group = heads // c.key_heads
        parts: list[ir.Value] = []
        for x, sizes in zip(both, ([c.key_dim] * 2 + [group * c.value_dim] * 2, [group] * 2), strict=True):
            x = g.op("Reshape", x, g.constant([-1, c.key_heads, sum(sizes)]), name="by_key_head")
            split = g.multi("Split", x, g.constant(sizes), outputs=len(sizes), name="split", axis=-1)
            for part, size in zip(split, sizes, strict=True):
                parts.append(g.op("Reshape", part, g.constant([-1, c.key_heads * size]), name="flat"))
        q, k, v, z, b, a = parts
        u = g.op("Concat", q, k, v, name="qkv", axis=-1)
        return g.op("Reshape", u, self.rows.shape(c.channels), name="by_row"), z, b, a

    def _gates(self, m: Module, a: ir.Value, b: ir.Value, c: LayerDeltaNet) -> ir.Value:
        """Decays -exp(A_log) * softplus(a + dt_bias), then betas: float32 [B, S, 2*Hv]."""
        g, heads = self.g, c.value_heads
        x = g.op("Add", g.to_float(a), m.weight("dt_bias", heads, dtype=FLOAT), name="with_bias")
        spare = -heads % _ALIGNED
        if spare:
            x = g.op("Pad", x, g.constant([0, 0, 0, spare]), name="padded")
        x = g.op("Softplus", x, name="softplus")
        if spare:
            x = g.slice(x, 0, heads, axis=1, name="unpadded")
        rate = g.op("Exp", m.weight("A_log", heads, dtype=FLOAT), name="rate")
        decay = g.op("Neg", g.op("Mul", x, rate, name="scaled"), name="decay")
        beta = g.op("Sigmoid", g.to_float(b), name="beta")
        both = g.op("Concat", decay, beta, name="gates", axis=-1)
        return g.op("Reshape", both, self.rows.shape(2 * heads), name="gates_by_row")

    def _heads(self, mixed: ir.Value, c: LayerDeltaNet) -> tuple[ir.Value, ir.Value, ir.Value]:
        """Queries, keys and values of pending and new rows, float32 [B, rows, heads*size].

        Queries and keys have length 1, and queries are scaled by key_dim**-0.5.
        """
        g, keys = self.g, c.key_heads * c.key_dim
        sizes = g.constant([keys, keys, c.value_heads * c.value_dim])
        q, k, v = g.multi("Split", mixed, sizes, outputs=3, name="qkv", axis=-1)
        return self._unit(q, c, c.key_dim**-0.5), self._unit(k, c, 1.0), v

    def _unit(self, x: ir.Value, c: LayerDeltaNet, length: float) -> ir.Value:
        """Each head with this length: x / sqrt(sum(x^2) + eps) is RMSNorm with eps / n, times n**-0.5."""
        g, n = self.g, c.key_dim
        x = g.op("Reshape", x, g.constant([0, -1, c.key_heads, n]), name="by_head")
        scale = g.constant(np.full(n, length * n**-0.5), np.float32)
        x = g.op("RMSNormalization", x, scale, name="unit", epsilon=_EPSILON / n, axis=-1)
        return g.op("Reshape", x, g.constant([0, -1, c.key_heads * n]), name="by_row")


_FLOATS = ("delta_state", "pending_gates_state")


def cache_shapes(c: LayerDeltaNet) -> dict[str, list[int]]:
    """The caches of one layer, by name, without the batch."""
    return {
        "delta_state": [c.value_heads, c.key_dim, c.value_dim],
        "conv_state": [c.kernel - 1, c.channels],
        "pending_rows_state": [PENDING_ROWS, c.channels],
        "pending_gates_state": [PENDING_ROWS, 2 * c.value_heads],
    }


def state_bytes(config: DecoderConfig, element: int) -> int:
    """Bytes of a sequence in all layers, whatever its length. `element`: bytes of the compute dtype's numbers."""
    return sum(
        math.prod(shape) * (4 if name in _FLOATS else element)
        for layer in config.delta_layers
        for name, shape in cache_shapes(layer).items()
    )
