"""The `dflash::` operators as ONNX functions: one signature, one body per dialect.

A graph calls these operators; which engine it is for is decided by the dialect whose bodies are attached. A body is
also the operator's executable specification. Shapes: B sequences, S rows that ask, T rows that are written, H query
heads, N key/value heads, d head size, C cache capacity, R rows that get logits, V vocabulary, E experts. Integers are
int64. Slot j of a cache row holds position j.

AttentionMask(first [B,S], last [B,S], capacity [1]) -> mask bool, origin [1]
    Row i sees the cache slots first[i] .. last[i]. The mask starts at slot `origin`.
SinkAttentionMask(first, last, sink [B], capacity) -> mask, origin
    The same, and every row sees the slot `sink` too.
CachedAttention(q [B,H,S,d], k [B,N,T,d], v [B,N,T,d], k_cache [B,N,C,d], v_cache [B,N,C,d], start [B], mask, origin,
                lengths [B]) -> y [B,H,S,d], k_cache', v_cache'
    Writes the new rows at slot `start`, then attends with scale d**-0.5 to what the mask shows. `lengths` is the number
    of slots in use. The cache outputs alias the cache inputs.
SinkAttention(the same, sinks [H]) -> the same
    With a learnt logit per head that takes part in the softmax and has no value. k_cache is [B,N,C,d+SINK_PADDING].
HiddenStateTap(h_0 .. h_n-1 [rows,D]) -> features [rows, n*D]
BlockAcceptance(tokens [B,S], rows [B,R], logits [B,R,V]) -> accepted [B], next_token [B]
    Greedy: the drafted token at rows[i+1] is accepted while it equals the argmax of logits[i].
MoE: see experts.py. FP8Linear and the like: see quantized.py. QuantizedExperts: see quantized_experts.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from dflash_trt.checkpoint.linears import StoredLinear
from dflash_trt.graph.builder import BOOL, INT64, GraphBuilder
from dflash_trt.graph.dialect import SINK_PADDING, AttentionInputs, Dialect
from dflash_trt.graph.experts import Storage, onnxruntime_moe
from dflash_trt.graph.quantized import INPUTS, kind_of, onnxruntime_linear, tensors
from dflash_trt.graph.quantized_experts import Projection, Stack, onnxruntime_experts, onnxruntime_inputs

# Up to this size all experts are widened to float32 as the engine loads (its peak then is four times that); beyond it,
# those in use are, in every pass.
RESIDENT_EXPERT_BYTES = 256 << 20
# The same of linear layers, of which every pass uses all: widening them in every pass costs ten times the product.
RESIDENT_LINEAR_BYTES = 4 << 30


class OnnxRuntime(Dialect):
    """Bodies of standard operators, shaped for ONNX Runtime on a CPU.

    Mask and attention cover only the slots between the first and the last that any row of the batch sees: attending
    over the whole capacity costs many times more.
    """

    name = "onnxruntime"

    def attention_mask(self) -> ir.Function:
        g = GraphBuilder("AttentionMask")
        first, last = g.input("first", INT64, ["B", "S"]), g.input("last", INT64, ["B", "S"])
        g.input("capacity", INT64, [1])
        _visible(g, first, last, last, None)
        return g.function()

    def sink_attention_mask(self) -> ir.Function:
        g = GraphBuilder("SinkAttentionMask")
        first, last = g.input("first", INT64, ["B", "S"]), g.input("last", INT64, ["B", "S"])
        sink = g.input("sink", INT64, ["B"])
        g.input("capacity", INT64, [1])
        _visible(g, first, last, sink, sink)
        return g.function()

    def cached_attention(self, head_dim: int) -> ir.Function:
        g = GraphBuilder("CachedAttention")
        a = AttentionInputs(g, key_size="d", value_size="d")
        _attend(g, a, a.q, (a.k, a.v))
        return g.function()

    def sink_attention(self, head_dim: int) -> ir.Function:
        """Exact: the slot behind the rows written gets the key (0 .. 0, 1, 0 ..) and the value 0, all other keys get
        zeros there, and every query gets sink / scale in that column: its score is the sink, its share adds nothing.
        """
        g = GraphBuilder("SinkAttention")
        a = AttentionInputs(g, key_size=f"{head_dim}+{SINK_PADDING}", value_size="d")
        sinks = g.input("sinks", self.dtype, ["H"])
        scale = head_dim**-0.5
        batch, heads = g.dim(a.k, 0, name="batch"), g.dim(a.k, 1, name="heads")
        pads = g.constant([0, 0, 0, 0, 0, 0, 0, SINK_PADDING])
        column = g.op("Div", sinks, g.constant(scale, np.float32), name="column")
        column = g.op("Reshape", column, g.constant([1, -1, 1, 1]), name="per_head")
        column = g.op("Expand", column, g.shape(batch, 1, g.dim(a.q, 2, name="rows"), 1), name="per_row")
        tail = g.constant([0, 0, 0, 0, 0, 0, 0, SINK_PADDING - 1])
        q = g.op("Concat", a.q, g.op("Pad", column, tail, name="tail"), name="q_with_sink", axis=-1)
        sink_key = np.zeros((1, 1, 1, head_dim + SINK_PADDING), np.float32)
        sink_key[..., head_dim] = 1
        key = g.op("Expand", g.constant(sink_key, np.float32), g.shape(batch, heads, 1, 1), name="sink_key")
        k = g.op("Concat", g.op("Pad", a.k, pads, name="padded"), key, name="k_with_sink", axis=2)
        v = g.op("Pad", a.v, g.constant([0, 0, 0, 0, 0, 0, 1, 0]), name="v_with_sink")
        _attend(g, a, q, (k, v), scale=scale)
        return g.function()

    def moe(
        self, storage: Storage, weight_dtype: ir.DataType, *, biased: bool, widened_bytes: int
    ) -> ir.Function:
        resident = widened_bytes <= RESIDENT_EXPERT_BYTES
        return onnxruntime_moe(storage, weight_dtype, biased=biased, resident=resident)

    def quantized_linear(
        self,
        g: GraphBuilder,
        x: ir.Value,
        stored: StoredLinear,
        folder: str,
        bias: ir.Value | None,
        *,
        name: str,
        widened_bytes: int,
    ) -> ir.Value:
        inputs = tensors(g, stored, folder, packed_as_bytes=True)
        if bias is not None:
            inputs["bias"] = bias
        kind, resident = kind_of(stored, biased=bias is not None), widened_bytes <= RESIDENT_LINEAR_BYTES
        body = onnxruntime_linear(kind, inputs, self.dtype, resident=resident)
        (y,) = g.call(body, x, *(inputs[n] for n in INPUTS if n in inputs), name=name)
        return y

    def quantized_experts(
        self,
        g: GraphBuilder,
        x: ir.Value,
        router: ir.Value,
        stacks: Mapping[Projection, Stack],
        folder: str,
        *,
        k: int,
        widened_bytes: int,
    ) -> ir.Value:
        inputs = [value for stack in stacks.values() for value in onnxruntime_inputs(g, stack, folder)]
        body = onnxruntime_experts(stacks, resident=widened_bytes <= RESIDENT_EXPERT_BYTES)
        (y,) = g.call(body, x, router, *inputs, name="experts", k=k)
        return y


def _visible(
    g: GraphBuilder, first: ir.Value, last: ir.Value, furthest: ir.Value, sink: ir.Value | None
) -> None:
    lowest = g.op("ReduceMin", first, name="lowest", keepdims=0)
    origin = g.op("Max", lowest, g.constant(0), name="origin_slot")
    end = g.op("Add", g.op("ReduceMax", furthest, name="furthest", keepdims=0), g.constant(1), name="end")
    slots = g.op("Range", origin, end, g.constant(1), name="slots")
    not_before = g.op("GreaterOrEqual", slots, g.unsqueeze(first, 1, 3), name="not_before")
    not_after = g.op("LessOrEqual", slots, g.unsqueeze(last, 1, 3), name="not_after")
    mask = g.op("And", not_before, not_after, name="in_range")
    if sink is not None:
        mask = g.op(
            "Or", mask, g.op("Equal", slots, g.unsqueeze(sink, 1, 2, 3), name="is_sink"), name="or_sink"
        )
    g.output(mask, "mask", BOOL, ["B", 1, "S", "L"])
    g.output(g.op("Reshape", origin, g.constant([1])), "origin", INT64, [1])


def _attend(
    g: GraphBuilder,
    a: AttentionInputs,
    q: ir.Value,
    rows: tuple[ir.Value, ir.Value],
    scale: float | None = None,
) -> None:
    updated = [
        g.op("TensorScatter", cache, new, a.start, name="write", axis=-2, mode="linear")
        for cache, new in zip(a.caches, rows, strict=True)
    ]
    end = g.op("Add", a.origin, g.dim(a.mask, 3, name="seen"), name="end")
    k, v = (g.op("Slice", u, a.origin, end, g.constant([2]), name="in_use") for u in updated)
    attributes: dict[str, Any] = {} if scale is None else {"scale": scale}
    a.output(g.op("Attention", q, k, v, a.mask, **attributes), *updated)
