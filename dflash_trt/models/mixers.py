"""Mixers: the part of a decoder layer that mixes the tokens of a sequence. Attention is one.

The layer's entry in the configuration's `layers` selects its mixer. A mixer declares the caches of its layers as
inputs and outputs of the graph. A cache may hold one row per token, or a state of fixed size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import onnx_ir as ir

from dflash_trt.checkpoint.rope import inverse_frequencies
from dflash_trt.checkpoint.schema import DecoderConfig, LayerAttention
from dflash_trt.graph.builder import FLOAT, INT64, GraphBuilder
from dflash_trt.graph.dialect import AttentionKind, Dialect
from dflash_trt.models.module import Module


class Mixer(Protocol):
    """All layers of one kind in one pass."""

    def layer(self, m: Module, i: int, x: ir.Value, written: ir.Value) -> ir.Value:
        """The mixer's output of layer i, [B*S, D], to be added to the residual stream.

        x [B*S, D]: the query rows.
        written [B*T, D]: the rows to write into the caches.
        m: the layer's place in the checkpoint.
        """


class PassRows:
    """Rows that pass a layer together: B sequences x S rows, with their positions and rotations."""

    def __init__(
        self, g: GraphBuilder, batch: ir.Value, count: ir.Value, positions: ir.Value, config: DecoderConfig
    ):
        self.g, self.batch, self.count, self.positions = g, batch, count, positions
        self._shapes: dict[tuple[int, ...], ir.Value] = {}
        frequencies, factor = inverse_frequencies(
            config.rope, config.head_dim, config.max_position_embeddings
        )
        # Angles are computed in float32 from the position, as in Transformers. Without a table there is no length
        # limit.
        angles = g.op(
            "Mul",
            g.op("Cast", g.unsqueeze(positions, 2), name="position", to=int(FLOAT)),
            g.constant(frequencies, np.float32),
            name="angles",
        )
        rotations = [g.op(kind, angles, name=kind.lower()) for kind in ("Cos", "Sin")]
        if factor != 1.0:
            rotations = [g.op("Mul", r, g.constant(factor, np.float32), name="scaled") for r in rotations]
        self.cos, self.sin = (g.to_dtype(r, FLOAT) for r in rotations)

    def shape(self, *tail: int) -> ir.Value:
        """The shape [B, S, *tail] as a tensor."""
        if tail not in self._shapes:
            self._shapes[tail] = self.g.shape(self.batch, self.count, *tail)
        return self._shapes[tail]

    def heads(self, x: ir.Value, n: int, size: int) -> ir.Value:
        """[B*S, n*size] -> [B, S, n, size]."""
        return self.g.op("Reshape", x, self.shape(n, size), name="heads")

    def rotate(self, x: ir.Value, heads: int | None) -> ir.Value:
        """[B, n, S, size], or [B, S, heads*size], rotated by position (half-split pairs)."""
        attributes: dict[str, Any] = {} if heads is None else {"num_heads": heads}
        return self.g.op("RotaryEmbedding", x, self.cos, self.sin, name="rope", **attributes)


@dataclass(frozen=True)
class Pass:
    """The common values of all layers in one pass. int64 [B]: `start` is the first slot written, `lengths` the slots
    in use.
    """

    g: GraphBuilder
    dialect: Dialect
    config: DecoderConfig
    capacity: int | str
    start: ir.Value
    queries: PassRows
    written: PassRows
    lengths: ir.Value


class Attention:
    """The attention layers of one pass: slots written, masks by kind of layer, a key and a value cache per layer."""

    def __init__(self, shared: Pass, layers: Sequence[int]) -> None:
        self.g, self.dialect, self.config = shared.g, shared.dialect, shared.config
        self.start, self.lengths, self.sinks = shared.start, shared.lengths, shared.config.attention_sinks
        self.queries, self.written = shared.queries, shared.written
        g, dialect, config, capacity = self.g, self.dialect, self.config, shared.capacity
        self._shapes = dialect.cache_shapes(
            config.num_key_value_heads, config.head_dim, capacity, sinks=self.sinks
        )
        self._caches = {
            i: [
                g.input(f"{side}_cache.{i}", g.dtype, shape)
                for side, shape in zip("kv", self._shapes, strict=True)
            ]
            for i in layers
        }
        self._capacity = g.dim(self._caches[layers[0]][0], len(self._shapes[0]) - 2, name="capacity")
        self.updated: dict[int, list[ir.Value]] = {}  # the caches of a layer that was called
        self._masks: dict[tuple[LayerAttention, int | None], tuple[ir.Value, ...]] = {}

    def _mask(self, i: int) -> tuple[ir.Value, ...]:
        """The mask of a layer, or of its kind.

        Slot j holds position j, so a row sees a range of slots: first .. last.
        """
        kind, apart = self.config.layers[i], self.dialect.masks_by_layer
        if (kind, i if apart else None) not in self._masks:
            g, position = self.g, self.queries.positions
            if kind.causal:
                last = position
            else:
                final = g.op("Sub", g.unsqueeze(self.lengths, 1), g.constant(1), name="final_slot")
                if kind.window is None:
                    last = g.op("Expand", final, g.shape(self.queries.batch, self.queries.count), name="last")
                else:  # a window that is not causal reaches equally far in both directions
                    last = g.op(
                        "Min", g.op("Add", position, g.constant(kind.window - 1), name="ahead"), final
                    )
            if kind.window is None:
                first = g.op("Sub", position, position, name="first")
            else:
                first = g.op("Sub", position, g.constant(kind.window - 1), name="first")
            name = f"mask_{'causal' if kind.causal else 'block'}{kind.window or ''}"
            slots = [first, last]
            if self.sinks:
                body = self.dialect.sink_attention_mask(self._kind(kind))
                slots.append(self.lengths)
            else:
                body = self.dialect.attention_mask(self._kind(kind))
            layer = {"layer": i} if apart else {}
            mask = g.call(body, *slots, self._capacity, outputs=len(body.outputs), name=name, **layer)
            self._masks[kind, i if apart else None] = mask
        return self._masks[kind, i if apart else None]

    def _kind(self, layer: LayerAttention) -> AttentionKind:
        c = self.config
        return AttentionKind(
            c.num_attention_heads, c.num_key_value_heads, c.head_dim, layer.window is not None
        )

    def _arranged(self, m: Module, rows: PassRows, x: ir.Value, n: int, norm: str | None) -> ir.Value:
        """x [B*S, n*size] as the dialect has rows, each head normed first where `norm` names its weight."""
        size = self.config.head_dim
        if norm is not None or self.dialect.by_head:
            x = rows.heads(x, n, size)
        if norm is not None:
            x = m.rms_norm(x, norm, size, self.config.rms_norm_eps)
        if self.dialect.by_head:
            return self.g.op("Transpose", x, name="by_head", perm=[0, 2, 1, 3])
        return self.g.op("Reshape", x, rows.shape(n * size), name="by_row")

    def layer(
        self, m: Module, i: int, x: ir.Value, written: ir.Value, *, width: int | None = None
    ) -> ir.Value:
        """`Mixer.layer`; rows have `width` numbers, the hidden size by default."""
        g, c, m = self.g, self.config, m.at("self_attn")
        width = width or c.hidden_size
        size, bias = c.head_dim, c.attention_bias
        n_q, n_kv = c.num_attention_heads, c.num_key_value_heads
        asking, stored = {"q_proj": n_q * size}, {"k_proj": n_kv * size, "v_proj": n_kv * size}
        if written is x:
            q, k, v = m.linears(x, asking | stored, width, bias=bias)
        else:
            (q,) = m.linears(x, asking, width, bias=bias)
            k, v = m.linears(written, stored, width, bias=bias)
        norms = ("q_norm", "k_norm") if c.qk_norm else (None, None)
        q = self._arranged(m, self.queries, q, n_q, norms[0])
        k = self._arranged(m, self.written, k, n_kv, norms[1])
        v = self._arranged(m, self.written, v, n_kv, None)
        kind, by_head = self._kind(c.layers[i]), self.dialect.by_head
        body = self.dialect.sink_attention(kind) if self.sinks else self.dialect.cached_attention(kind)
        y, *updated = g.call(
            body,
            self.queries.rotate(q, None if by_head else n_q),
            self.written.rotate(k, None if by_head else n_kv),
            v,
            *self._caches[i],
            self.start,
            *self._mask(i),
            self.lengths,
            *([m.weight("sinks", n_q)] if self.sinks else []),
            outputs=3,
            name="cached",
        )
        self.updated[i] = updated
        for side, cache, shape in zip("kv", updated, self._shapes, strict=True):
            g.output(cache, f"{side}_cache_out.{i}", g.dtype, shape)
        if by_head:
            y = g.op("Transpose", y, name="by_row", perm=[0, 2, 1, 3])
        y = g.op("Reshape", y, g.constant([-1, n_q * size]), name="merge")
        return m.linear(y, "o_proj", n_q * size, c.hidden_size, bias=bias)


# By the class of the entry in `DecoderConfig.layers`.
MIXERS: Mapping[type, Callable[[Pass, Sequence[int]], Mixer]] = {LayerAttention: Attention}


def mixers(shared: Pass) -> list[Mixer]:
    """The mixer of each layer. Layers of one kind share a mixer."""
    layers = shared.config.layers
    kinds = {kind: [i for i, layer in enumerate(layers) if type(layer) is kind] for kind in map(type, layers)}
    found = {kind: MIXERS[kind](shared, indices) for kind, indices in kinds.items()}
    return [found[type(layer)] for layer in layers]


def positions_from(g: GraphBuilder, start: ir.Value, count: ir.Value, name: str = "positions") -> ir.Value:
    """[B, count]: start, start+1, ..."""
    return g.op("Add", g.unsqueeze(start, 1), g.arange(count), name=name)


def ints(g: GraphBuilder, name: str, *shape: int | str) -> ir.Value:
    return g.input(name, INT64, shape)
