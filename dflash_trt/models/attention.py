"""Attention as a mixer: masks by kind of layer, and a key and a value cache for each layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from dflash_trt.bundle.cache_kinds import base_input
from dflash_trt.checkpoint.schema import Heads, LayerAttention
from dflash_trt.graph.builder import INT64
from dflash_trt.graph.dialect import AttentionKind
from dflash_trt.models.module import Module, Shaped
from dflash_trt.models.passes import Pass, PassRows, Tree, rows_of


class _Rows:
    """The cache rows of the layers with one window, and the pass in them. Row j is at position base + j.

    caches: key and value cache of each layer, of its `shapes`; int64 [1] `capacity`: their rows.
    start, lengths: int64 [B], the first row written, and the rows in use.
    positions: int64 [B,S], the queries' rows.
    """

    def __init__(self, shared: Pass, window: int | None, layers: Mapping[int, Heads]) -> None:
        g, config = shared.g, shared.config
        self.start, self.lengths, self.positions = shared.start, shared.lengths, shared.queries.positions
        if window is not None:
            base = g.input(base_input(window), INT64, ["B"])
            self.start = g.op("Sub", self.start, base, name=f"start_in_{window}")
            self.lengths = g.op("Sub", self.lengths, base, name=f"lengths_in_{window}")
            self.positions = g.op("Sub", self.positions, g.unsqueeze(base, 1), name=f"rows_in_{window}")
        self.shapes: dict[int, list[list[int | str]]] = {}
        for i, heads in layers.items():
            self.shapes[i] = shared.dialect.cache_shapes(
                heads.kv_heads,
                heads.head_dim,
                rows_of(shared.capacity, window),
                sinks=config.attention_sinks,
            )
        self.caches = {
            i: [g.input(f"{side}_cache.{i}", g.dtype, s) for side, s in zip("kv", shapes, strict=True)]
            for i, shapes in self.shapes.items()
        }
        first = next(iter(layers))
        self.capacity = g.dim(self.caches[first][0], len(self.shapes[first][0]) - 2, name="capacity")


class Attention:
    """The attention layers of one pass: rows written, masks by kind of layer, a key and a value cache per layer."""

    def __init__(self, shared: Pass, layers: Sequence[int]) -> None:
        self.g, self.dialect, self.config = shared.g, shared.dialect, shared.config
        self.sinks = shared.config.attention_sinks
        self.queries, self.written, self.tree = shared.queries, shared.written, shared.tree
        self._layers = {
            i: layer for i, layer in enumerate(self.config.layers) if isinstance(layer, LayerAttention)
        }
        by_window: dict[int | None, dict[int, Heads]] = {}
        for i in layers:
            heads = self.config.heads_of(self._layers[i])
            by_window.setdefault(self._layers[i].window, {})[i] = heads
        self._rows = {window: _Rows(shared, window, heads) for window, heads in by_window.items()}
        self.updated: dict[int, list[ir.Value]] = {}  # the caches of a layer that was called
        self._masks: dict[tuple[LayerAttention, int | None], tuple[ir.Value, ...]] = {}

    def _mask(self, i: int) -> tuple[ir.Value, ...]:
        """The mask of a layer, or of its kind. A query sees a range of cache rows: first .. last."""
        kind, apart = self._layers[i], self.dialect.masks_by_layer
        key = kind, i if apart else None
        if key not in self._masks:
            g, rows = self.g, self._rows[kind.window]
            body, inputs = self.dialect.attention_mask(self._kind(kind)), self._range(kind, rows)
            inputs += [rows.lengths] if self.sinks else []
            if self.tree is not None:
                inputs += [rows.start, self._seen(self.tree, kind.window)]
            name = f"mask_{'causal' if kind.causal else 'block'}{kind.window or ''}"
            layer = {"layer": i} if apart else {}
            outputs = len(body.outputs)
            self._masks[key] = g.call(body, *inputs, rows.capacity, outputs=outputs, name=name, **layer)
        return self._masks[key]

    def _range(self, kind: LayerAttention, rows: _Rows) -> list[ir.Value]:
        """The first and the last row that each query sees. A window that is not causal reaches equally far in both
        directions.
        """
        g, last = self.g, rows.positions
        reach = None if kind.window is None else g.constant(kind.window - 1)
        if not kind.causal:
            final = g.op("Sub", g.unsqueeze(rows.lengths, 1), g.constant(1), name="final_row")
            if reach is None:
                last = g.op("Expand", final, g.shape(self.queries.batch, self.queries.count), name="last")
            else:
                last = g.op("Min", g.op("Add", rows.positions, reach, name="ahead"), final)
        first = g.op("Sub", rows.positions, rows.positions if reach is None else reach, name="first")
        return [first, last]

    def _seen(self, tree: Tree, window: int | None) -> ir.Value:
        """The visible rows of the pass, no further up than a window reaches."""
        if window is None:
            return tree.visible
        g = self.g
        up = g.op("Sub", g.unsqueeze(tree.depths, 2), g.unsqueeze(tree.depths, 1), name="depths_up")
        near = g.op("Less", up, g.constant(window), name="near")
        return g.op("And", tree.visible, near, name="visible_in_window")

    def _kind(self, layer: LayerAttention) -> AttentionKind:
        heads = self.config.heads_of(layer)
        return AttentionKind(
            self.config.num_attention_heads,
            heads.kv_heads,
            heads.head_dim,
            layer.window is not None,
            self.sinks,
            trees=self.tree is not None,
            scale=self.config.attention_scale,
            apart=layer.heads is not None,
        )

    def _arranged(
        self,
        m: Module,
        rows: PassRows,
        x: ir.Value,
        n: int,
        size: int,
        norm: str | None = None,
        *,
        normed: bool,
    ) -> ir.Value:
        """x [B*S, n*size] as the dialect has rows, each head `normed` first, with the weight that `norm` names."""
        if normed or self.dialect.by_head:
            x = rows.heads(x, n, size)
        if normed:
            x = m.rms_norm(x, norm, size, self.config.rms_norm_eps)
        if self.dialect.by_head:
            return self.g.op("Transpose", x, name="by_head", perm=[0, 2, 1, 3])
        return self._by_row(x, n * size, rows)

    def _by_row(self, x: ir.Value, size: int, rows: PassRows | None = None) -> ir.Value:
        """x with `size` numbers in a row, as [B,S,size]."""
        return self.g.op("Reshape", x, (rows or self.queries).shape(size), name="by_row")

    def _gate(self, q: ir.Value, size: int) -> tuple[ir.Value, ir.Value]:
        """q_proj's columns, [query | gate] by head, as queries and gates [rows, heads*size]."""
        g, n = self.g, self.config.num_attention_heads
        both = g.op("Reshape", q, g.constant([-1, n, 2 * size]), name="by_head")
        parts = g.multi("Split", both, outputs=2, name="query_and_gate", axis=-1, num_outputs=2)
        query, gate = (g.op("Reshape", part, g.constant([-1, n * size]), name="flat") for part in parts)
        return query, gate

    def _projected(
        self,
        m: Module,
        layer: LayerAttention,
        x: ir.Value,
        written: ir.Value,
        width: int,
        shaped: Shaped | None,
    ) -> tuple[ir.Value, ir.Value, ir.Value]:
        """Queries (and gates) of x, and keys and values of `written`. `shaped`: see `Module.linears`."""
        c, heads = self.config, self.config.heads_of(layer)
        bias, kept = c.attention_bias, heads.kv_heads * heads.head_dim
        asking = {
            "q_proj": c.num_attention_heads * heads.head_dim * (2 if c.attention_gate == "q_proj" else 1)
        }
        others = {"k_proj": kept} | ({} if layer.keys_as_values else {"v_proj": kept})
        if written is x:
            q, k, *v = m.linears(x, asking | others, width, bias=bias, shaped=shaped)
        else:
            (q,) = m.linears(x, asking, width, bias=bias)
            k, *v = m.linears(written, others, width, bias=bias)
        return q, k, v[0] if v else k

    def layer(
        self,
        m: Module,
        i: int,
        x: ir.Value,
        written: ir.Value,
        *,
        width: int | None = None,
    ) -> ir.Value:
        """`Mixer.layer`; rows have `width` numbers, the hidden size by default."""
        g, c, m = self.g, self.config, m.at("self_attn")
        heads = c.heads_of(self._layers[i])
        size, n_q, n_kv = heads.head_dim, c.num_attention_heads, heads.kv_heads
        # By row, as the dialect has them, all three in one step where nothing is done to a head.
        plain = not (self.dialect.by_head or c.qk_norm or c.value_norm or c.attention_gate == "q_proj")
        shaped = self._by_row if plain and written is x else None
        q, k, v = self._projected(m, self._layers[i], x, written, width or c.hidden_size, shaped)
        gate = None
        if c.attention_gate == "q_proj":
            q, gate = self._gate(q, size)
        elif c.attention_gate is not None:
            gate = m.linear(x, c.attention_gate, width or c.hidden_size, n_q * size)
        if shaped is None:
            q_norm, k_norm = ("q_norm", "k_norm") if c.qk_norm_weights else (None, None)
            q = self._arranged(m, self.queries, q, n_q, size, q_norm, normed=c.qk_norm)
            k = self._arranged(m, self.written, k, n_kv, size, k_norm, normed=c.qk_norm)
            v = self._arranged(m, self.written, v, n_kv, size, normed=c.value_norm)
        kind, by_head = self._kind(self._layers[i]), self.dialect.by_head
        rows = self._rows[self._layers[i].window]
        y, *updated = g.call(
            self.dialect.attention(kind),
            self.queries.rotate(q, heads, None if by_head else n_q, queries=True),
            self.written.rotate(k, heads, None if by_head else n_kv),
            v,
            *rows.caches[i],
            rows.start,
            *self._mask(i),
            rows.lengths,
            *([m.weight("sinks", n_q)] if self.sinks else []),
            outputs=3,
            name="cached",
        )
        self.updated[i] = updated
        for side, cache, shape in zip("kv", updated, rows.shapes[i], strict=True):
            g.output(cache, f"{side}_cache_out.{i}", g.dtype, shape)
        if by_head:
            y = g.op("Transpose", y, name="by_row", perm=[0, 2, 1, 3])
        y = g.op("Reshape", y, g.constant([-1, n_q * size]), name="merge")
        if gate is not None:
            y = g.op("Mul", y, g.op("Sigmoid", gate, name="gate"), name="gated")
        return m.linear(y, "o_proj", n_q * size, c.hidden_size, bias=c.attention_bias)
