"""Attention as a mixer: masks by kind of layer, and a key and a value cache for each layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from dflash_trt.bundle.cache_kinds import base_input
from dflash_trt.checkpoint.schema import DecoderConfig, Heads, LayerAttention
from dflash_trt.graph.builder import INT64, GraphBuilder
from dflash_trt.graph.dialect import AttentionCall, AttentionKind, Norm, Part, Product, apart
from dflash_trt.models.module import Module
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
            i: [
                g.input(f"{side}_cache.{i}", shared.dialect.cache_dtype, s)
                for side, s in zip("kv", shapes, strict=True)
            ]
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
        g, c, m, layer = self.g, self.config, m.at("self_attn"), self._layers[i]
        products, gate = products_of(m, c, layer, x, written, width or c.hidden_size)
        rows = self._rows[layer.window]
        call = AttentionCall(
            kind=self._kind(layer),
            products=products,
            parts=parts_of(m, c, c.heads_of(layer), self.queries, self.written),
            caches=rows.caches[i],
            start=rows.start,
            mask=self._mask(i),
            lengths=rows.lengths,
            sinks=m.weight("sinks", c.num_attention_heads) if self.sinks else None,
        )
        y, self.updated[i] = self.dialect.attend(g, call)
        for side, cache, shape in zip("kv", self.updated[i], rows.shapes[i], strict=True):
            g.output(cache, f"{side}_cache_out.{i}", self.dialect.cache_dtype, shape)
        return output_of(m, c, layer, y, gate)


def products_of(
    m: Module, c: DecoderConfig, layer: LayerAttention, x: ir.Value, written: ir.Value, width: int
) -> tuple[list[Product], ir.Value | None]:
    """Queries of x, and keys and values of `written`; and a gate of the output."""
    g, heads = m.g, c.heads_of(layer)
    asking, kept = c.num_attention_heads * heads.head_dim, heads.kv_heads * heads.head_dim
    sizes = {"q_proj": asking * (2 if c.attention_gate == "q_proj" else 1), "k_proj": kept}
    sizes |= {} if layer.keys_as_values else {"v_proj": kept}
    if written is x:
        products = m.products(x, sizes, width, bias=c.attention_bias)
    else:
        products = m.products(x, {"q_proj": sizes["q_proj"]}, width, bias=c.attention_bias)
        rest = {name: size for name, size in sizes.items() if name != "q_proj"}
        products += m.products(written, rest, width, bias=c.attention_bias)
    products = [("".join(name[0] for name in names), y) for names, y in products]
    gate = None
    if c.attention_gate == "q_proj" or layer.keys_as_values:
        found = apart(g, products, {name[0]: n for name, n in sizes.items()})
        if c.attention_gate == "q_proj":
            found["q"], gate = _gate(g, found["q"], c.num_attention_heads, heads.head_dim)
        products = [*(found | {"v": found.get("v", found["k"])}).items()]
    elif c.attention_gate is not None:
        gate = m.linear(x, c.attention_gate, width, asking)
    return products, gate


def _gate(g: GraphBuilder, q: ir.Value, heads: int, size: int) -> tuple[ir.Value, ir.Value]:
    """q_proj's columns, [query | gate] by head, as queries and gates [rows, heads*size]."""
    both = g.op("Reshape", q, g.constant([-1, heads, 2 * size]), name="by_head")
    parts = g.multi("Split", both, outputs=2, name="query_and_gate", axis=-1, num_outputs=2)
    query, gate = (g.op("Reshape", part, g.constant([-1, heads * size]), name="flat") for part in parts)
    return query, gate


def output_of(
    m: Module, c: DecoderConfig, layer: LayerAttention, y: ir.Value, gate: ir.Value | None
) -> ir.Value:
    """The rows of the heads [rows, H*d], through the gate, if there is one, and o_proj."""
    if gate is not None:
        y = m.g.op("Mul", y, m.g.op("Sigmoid", gate, name="gate"), name="gated")
    columns = c.num_attention_heads * c.heads_of(layer).head_dim
    return m.linear(y, "o_proj", columns, c.hidden_size, bias=c.attention_bias)


def parts_of(
    m: Module, c: DecoderConfig, heads: Heads, queries: PassRows, written: PassRows
) -> dict[str, Part]:
    """What becomes of a layer's queries "q", keys "k" and values "v"."""

    def norm(name: str, *, there: bool) -> Norm | None:
        weights = f"{name}_norm" if c.qk_norm_weights and name != "v" else None
        return m.norm(weights, heads.head_dim, c.rms_norm_eps) if there else None

    return {
        "q": queries.part(c.num_attention_heads, heads, norm("q", there=c.qk_norm), queries=True),
        "k": written.part(heads.kv_heads, heads, norm("k", there=c.qk_norm)),
        "v": Part(heads.kv_heads, heads.head_dim, written.shape, norm("v", there=c.value_norm)),
    }
