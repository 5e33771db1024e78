"""The `dflash::` operators as ONNX functions: one signature, one body per dialect.

A graph calls these operators; which engine it is for is decided by the dialect whose bodies are attached. A body is
also the operator's executable specification. Shapes: B sequences, S rows that ask, T rows that are written, H query
heads, N key/value heads, d head size, C cache capacity, R rows that get logits, V vocabulary, E experts. Integers are
int64. Cache row j of a sequence is at the position base + j (models/attention.py). Rows are [B,S,H*d] on ONNX Runtime
and [B,H,S,d] on the other engines, and caches [B,C,N*d] and [B,N,C,d].

AttentionMask(first [B,S], last [B,S], capacity [1]) -> mask, origin [1] (, few [1])
    Row i of the pass sees the cache rows first[i] .. last[i]. The mask starts at cache row `origin`. On ONNX Runtime it
    is float32 [B,1,S',L], to be added to scores. `few` (bool): at most GROUPED_ROWS rows, whose query heads are
    grouped. Then S' is S*H/N, and S otherwise. With H = N only a single row counts as few; it is computed twice, so
    that S' is 2. On the other engines the mask is bool [B,1,S,C].
SinkAttentionMask(first, last, sink [B], capacity) -> mask, origin
    The same, and every row also sees the cache row `sink`; on ONNX Runtime, the last of the SUMMED rows around it.
TreeAttentionMask(first, last, start [B], visible [B,S,S], capacity), TreeSinkAttentionMask -> the same
    Of the cache rows that this pass writes, start .. start+S-1, row i sees those that visible[i] marks, whatever its
    range.
CachedAttention(q, k [T rows], v [T rows], k_cache, v_cache, start [B], mask, origin (, few), lengths [B])
                -> y, k_cache', v_cache'
    Writes the new rows at cache row `start`, then attends with scale d**-0.5, or with the model's own, to what the
    mask shows. `lengths` is the number of cache rows in use. The cache outputs alias the cache inputs. On ONNX
    Runtime, y [B,S,H*d] may have its heads in axes of their own.
SinkAttention(the same, sinks [H]) -> the same
    With a learnt logit per head that takes part in the softmax and has no value. Rows of k_cache are SINK_PADDING wider
    for each head, except with plugins.
WindowedAttentionMask, WindowedCachedAttention and so on (ONNX Runtime): the same, where `first` may be above 0.
    The others see all cache rows from 0 on.
HiddenStateTap(h_0 .. h_n-1 [rows,D]) -> features [rows, n*D]
BlockAcceptance(tokens [B,S], rows [B,R], logits [B,R,V]) -> accepted [B], next_token [B]
    Greedy: the drafted token at rows[i+1] is accepted while it equals the argmax of logits[i].
CausalConv, GatedDeltaNet: see delta_net.py.
MoE: see experts.py. QuantizedExperts: see quantized_experts.py.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from dflash_trt.checkpoint.schema import LayerDeltaNet
from dflash_trt.graph import MICROSOFT_DOMAIN
from dflash_trt.graph.builder import BOOL, FLOAT, INT64, GraphBuilder
from dflash_trt.graph.delta_net import causal_conv, onnxruntime_delta
from dflash_trt.graph.dialect import SINK_PADDING, AttentionInputs, AttentionKind, Dialect, Norm, TreeRows
from dflash_trt.graph.experts import Storage, onnxruntime_moe
from dflash_trt.graph.quantized import QuantizedLinear, onnxruntime_channels, onnxruntime_integers
from dflash_trt.graph.quantized_experts import ExpertLayer, onnxruntime_experts, onnxruntime_inputs

# Up to this size all experts are widened to float32 as the engine loads (its peak then is four times that); beyond it,
# those in use are, in every pass.
RESIDENT_EXPERT_BYTES = 256 << 20
# Passes of more rows attend with each query head apart. With 3 heads in a group, on 2 cores, one product for a group
# took 0.3 to 1.1 of the time up to 16 rows, and 1.2 to 1.9 from 32 rows on.
GROUPED_ROWS = 16
# ONNX Runtime's softmax adds up so many numbers at a time.
SUMMED = 64
# Its products of queries and keys add up head_dim as one block or as several, by the number of cache rows below this
# one.
STEP = 128


class OnnxRuntime(Dialect):
    """Bodies of standard operators, shaped for ONNX Runtime on a CPU.

    Attention reads the caches where they lie, all of their C rows: the engine binds no more rows than a pass needs.
    Windowed layers read a copy of the rows between the first and the last that any row of the batch sees.
    """

    name = "onnxruntime"
    joins_floats = True
    joins_quantized = True

    def add_norm(self, g: GraphBuilder, x: ir.Value, y: ir.Value, norm: Norm) -> tuple[ir.Value, ir.Value]:
        """One node: a pass of one row took 0.97 to 1.00 of the time."""
        g.graph.opset_imports[MICROSOFT_DOMAIN] = 1
        outputs = g.multi(
            *("SkipSimplifiedLayerNormalization", x, y, norm.weight),
            outputs=4,
            name="residual",
            domain=MICROSOFT_DOMAIN,
            epsilon=norm.epsilon,
        )
        for unused in outputs[1:3]:
            unused.name = ""
        return outputs[3], outputs[0]

    @staticmethod
    def window_stride(head_dim: int) -> int:
        """Whole blocks of the products of weights and values, and of queries and keys."""
        return max(STEP, _block(head_dim))

    def attention_mask(self, kind: AttentionKind) -> ir.Function:
        """Of numbers to be added to scores; the sink is the last of the summed rows around it."""
        g = GraphBuilder("Windowed" * kind.windowed + kind.mask_name)
        rows = [g.input(name, INT64, ["B", "S"]) for name in ("first", "last")]
        _visible(g, kind, rows, g.input("sink", INT64, ["B"]) if kind.sinks else None)
        return g.function()

    def attention(self, kind: AttentionKind) -> ir.Function:
        g = GraphBuilder("Windowed" * kind.windowed + kind.name)
        if kind.sinks:
            return self._sink_attention(g, kind)
        a = AttentionInputs(g, by_head=False, mask=FLOAT)
        _attend(g, kind, a, a.q, (a.k, a.v))
        return g.function()

    def _sink_attention(self, g: GraphBuilder, kind: AttentionKind) -> ir.Function:
        """Exact: the cache row after the rows written gets the key (0 .. 0, 1, 0 ..) and the value 0, all other keys
        get zeros there, and every query its head's sink, divided by the scale.
        """
        size = kind.head_dim
        a = AttentionInputs(g, sizes=(f"{size}+{SINK_PADDING}", "d"), by_head=False, mask=FLOAT)
        sinks = g.input("sinks", self.dtype, ["H"])
        scale, key_size = kind.factor, size + SINK_PADDING
        batch = g.dim(a.k, 0, name="batch")

        def heads(x: ir.Value, n: int) -> ir.Value:
            return g.op("Reshape", x, g.constant([0, 0, n, size]), name="heads")

        def rows(x: ir.Value) -> ir.Value:
            return g.op("Reshape", x, g.constant([0, 0, -1]), name="rows")

        column = g.op("Div", sinks, g.constant(scale, np.float32), name="column")
        column = g.op("Reshape", column, g.constant([1, 1, -1, 1]), name="per_head")
        column = g.op("Expand", column, g.shape(batch, g.dim(a.q, 1, name="count"), 1, 1), name="per_row")
        tail = g.constant([0, 0, 0, 0, 0, 0, 0, SINK_PADDING - 1])
        column = g.op("Pad", column, tail, name="tail")
        q = rows(g.op("Concat", heads(a.q, kind.heads), column, name="q_with_sink", axis=-1))
        k = g.op("Pad", heads(a.k, kind.kv_heads), g.constant([0] * 7 + [SINK_PADDING]), name="padded")
        sink_key = np.zeros((1, 1, kind.kv_heads, key_size), np.float32)
        sink_key[..., size] = 1
        key = g.op("Expand", g.constant(sink_key, np.float32), g.shape(batch, 1, 1, 1), name="sink_key")
        k = rows(g.op("Concat", k, key, name="k_with_sink", axis=1))
        v = g.op("Pad", a.v, g.constant([0, 0, 0, 0, 1, 0]), name="v_with_sink")
        cache_rows = g.op(
            "Add", g.unsqueeze(a.start, 1), g.arange(g.dim(a.k, 1, name="new")), name="cache_rows"
        )
        cache_rows = g.op(
            "Concat", cache_rows, g.unsqueeze(_sink_row(g, a.lengths), 1), name="cache_rows_with_sink", axis=1
        )
        sequence = g.op("Expand", g.unsqueeze(g.arange(batch), 1), g.op("Shape", cache_rows), name="sequence")
        places = g.op("Concat", g.unsqueeze(sequence, 2), g.unsqueeze(cache_rows, 2), name="places", axis=2)
        _attend(g, kind, a, q, (k, v), places=places)
        return g.function()

    def causal_conv(self, kind: LayerDeltaNet) -> ir.Function:
        """With a form of its own for passes of few rows."""
        return causal_conv(kind, self.dtype, few=True)

    def gated_delta_net(self, kind: LayerDeltaNet) -> ir.Function:
        return onnxruntime_delta(kind)

    def moe(
        self, storage: Storage, weight_dtype: ir.DataType, *, biased: bool, widened_bytes: int
    ) -> ir.Function:
        """By ONNX Runtime's fused operator. Experts are widened once up to RESIDENT_EXPERT_BYTES."""
        resident = widened_bytes <= RESIDENT_EXPERT_BYTES
        return onnxruntime_moe(storage, weight_dtype, biased=biased, resident=resident)

    def quantized_linear(self, g: GraphBuilder, x: ir.Value, layer: QuantizedLinear) -> ir.Value:
        """A product of integers: a build widens all other layers."""
        blocks = layer.stored.layout == "blocks"
        return (onnxruntime_integers if blocks else onnxruntime_channels)(g, x, layer)

    def quantized_experts(
        self, g: GraphBuilder, x: ir.Value, router: ir.Value, layer: ExpertLayer
    ) -> ir.Value:
        """A loop over the experts that some row chose, in float32."""
        stacks = layer.stacks.values()
        inputs = [value for stack in stacks for value in onnxruntime_inputs(g, stack, layer.folder)]
        inputs += [] if layer.scales is None else [layer.scales]
        body = onnxruntime_experts(layer, resident=layer.widened_bytes <= RESIDENT_EXPERT_BYTES)
        (y,) = g.call(body, x, router, *inputs, name="experts", k=layer.k)
        return y


def _visible(g: GraphBuilder, kind: AttentionKind, rows: list[ir.Value], sink: ir.Value | None) -> None:
    """Outputs of a mask's body: the mask [B,1,rows,L], each row of the pass as often as `_attend` repeats it, the first
    of its L cache rows, and whether the pass has few rows. `rows`: `first` and `last` [B,S].
    """
    tree = TreeRows(g) if kind.trees else None
    capacity = g.input("capacity", INT64, [1])
    origin, end = g.constant(0), g.op("Squeeze", capacity, name="end")
    if sink is not None:
        sink = _sink_row(g, sink)
    if kind.windowed:
        step = g.constant(_block(kind.head_dim))
        lowest = g.op("ReduceMin", rows[0], name="lowest", keepdims=0)
        lowest = g.op("Div", g.op("Max", lowest, origin, name="lowest_row"), step, name="blocks_before")
        origin = g.op("Mul", lowest, step, name="origin_row")
        furthest = rows[1] if sink is None else sink
        if sink is None and tree is not None:
            furthest = tree.final
        last = _last_of_step(g, g.op("ReduceMax", furthest, name="furthest", keepdims=0), STEP)
        end = g.op("Min", g.op("Add", last, g.constant(1), name="after"), end, name="end_row")
    few_rows, repeated = (GROUPED_ROWS, kind.group) if kind.group > 1 else (1, 2)
    few = g.op("LessOrEqual", g.dim(rows[1], 1, name="count"), g.constant([few_rows]))
    times = g.op("Where", few, g.constant([repeated]), g.constant([1]), name="times")
    repeats = g.shape(1, 1, times)

    def by_query(row: ir.Value) -> ir.Value:
        row = g.op("Expand", g.unsqueeze(row, 2), repeats, name="repeated")
        row = g.op("Reshape", row, g.constant([0, -1]), name="by_query")
        return g.unsqueeze(row, 1, 3)

    cache_rows = g.op("Range", origin, end, g.constant(1), name="cache_rows")
    mask = g.op("LessOrEqual", cache_rows, by_query(rows[1]), name="not_after")
    if kind.windowed:
        not_before = g.op("GreaterOrEqual", cache_rows, by_query(rows[0]), name="not_before")
        mask = g.op("And", mask, not_before, name="in_range")
    if tree is not None:
        inside, seen = tree.seen(cache_rows)
        seen = g.op("Expand", g.unsqueeze(seen, 2), g.shape(1, 1, times, 1), name="seen_repeated")
        seen = g.op("Reshape", seen, g.shape(tree.batch, -1, g.dim(cache_rows, 0)), name="seen_by_query")
        inside, seen = g.unsqueeze(inside, 1), g.unsqueeze(seen, 1)  # ONNX Runtime has no Where of booleans
        outside = g.op("And", g.op("Not", inside, name="outside"), mask, name="in_range_before")
        mask = g.op("Or", outside, g.op("And", inside, seen, name="in_tree"), name="or_tree")
    if sink is not None:
        is_sink = g.op("Equal", cache_rows, g.unsqueeze(sink, 1, 2, 3), name="is_sink")
        mask = g.op("Or", mask, is_sink, name="or_sink")
    zero, lowest = (g.constant(x, np.float32) for x in (0, np.finfo(np.float32).min))
    g.output(g.op("Where", mask, zero, lowest), "mask", FLOAT, ["B", 1, "rows", "L"])
    g.output(g.op("Reshape", origin, g.constant([1])), "origin", INT64, [1])
    g.output(few, "few", BOOL, [1])


def _last_of_step(g: GraphBuilder, row: ir.Value, step: int) -> ir.Value:
    """The last row of the step that holds `row`. `step`: a power of two."""
    return g.op("BitwiseOr", row, g.constant(step - 1), name="last_of_step")


def _sink_row(g: GraphBuilder, lengths: ir.Value) -> ir.Value:
    """Rows of sinks after the rows in use, in the same place of a sum's step whatever pass writes it: int64 [B]."""
    return _last_of_step(g, lengths, SUMMED)


def _block(head_dim: int) -> int:
    """The products of weights and values add up blocks of so many rows, by ONNX Runtime's rule: a power of two."""
    rows, columns = 128, 128
    while columns > 16 and columns // 2 >= head_dim:
        rows, columns = 2 * rows, columns // 2
    return rows


def _attend(
    g: GraphBuilder,
    kind: AttentionKind,
    a: AttentionInputs,
    q: ir.Value,
    rows: tuple[ir.Value, ir.Value],
    places: ir.Value | None = None,
) -> None:
    """With few rows, the query heads of a key/value head are rows of one product: it reads keys and values once.

    With one query head for each, a single row is there twice: ONNX Runtime rounds the product of one row otherwise than
    that of several, and drafts must not change a row.

    `places`: int64 [B,T,2], the sequence and the cache row of each new row, where there are sinks. Keys are wider then.

    Only the product itself differs between few and many rows. An `If` costs more with each node and input of its
    branches. So the nodes around it are the same for both, with other shapes.
    """
    n, group = kind.kv_heads, kind.group

    def written(cache: ir.Value, new: ir.Value) -> ir.Value:
        if places is not None:
            return g.op("ScatterND", cache, places, new, name="write")
        return g.op("TensorScatter", cache, new, a.start, name="write", axis=-2, mode="linear")

    k, v = updated = [written(cache, new) for cache, new in zip(a.caches, rows, strict=True)]
    if kind.windowed:
        end = g.op("Add", a.origin, g.dim(a.mask, 3, name="seen"), name="end")
        k, v = (g.slice(u, a.origin, end, axis=1, name="in_use") for u in updated)

    def attend(g: GraphBuilder, q: ir.Value, heads: int) -> ir.Value:
        return g.op("Attention", q, k, v, a.mask, q_num_heads=heads, kv_num_heads=n, scale=kind.factor)

    if group == 1:
        times = g.op("Where", a.few, g.constant([1, 2, 1]), g.constant([1, 1, 1]), name="times")
        y = attend(g, g.op("Expand", q, times, name="repeated"), n)
        count = g.op("Where", a.few, g.constant([1]), g.constant([2**31]), name="count")
        a.output(g.slice(y, 0, count, axis=1, name="first"), *updated)
        return

    def arranged(x: ir.Value, name: str, few: list[int], many: list[int]) -> ir.Value:
        shape = g.op("Where", a.few, g.constant(few), g.constant(many), name=f"{name}_shape")
        return g.op("Reshape", x, shape, name=name)

    def swapped(x: ir.Value) -> ir.Value:
        return g.op("Transpose", x, name="swapped", perm=[0, 1, 3, 2, 4])

    size = kind.head_dim + SINK_PADDING * (places is not None)
    q = swapped(arranged(q, "heads", [0, 0, n, group, size], [0, 0, kind.heads, 1, size]))
    q = arranged(q, "rows", [0, -1, n * size], [0, -1, kind.heads * size])
    few, many = g.body("few"), g.body("many")
    few.output(attend(few, q, n), "attended_few", g.dtype, ["B", "rows", "columns"])
    many.output(attend(many, q, kind.heads), "attended_many", g.dtype, ["B", "rows", "columns"])
    y = g.op("If", a.few, name="attended", then_branch=few.graph, else_branch=many.graph)
    y = arranged(y, "groups", [0, -1, group, n, kind.head_dim], [0, -1, 1, kind.heads, kind.head_dim])
    a.output(swapped(y), *updated)
