"""The `dflash::` operators as ONNX functions: one signature, one body per engine.

A graph calls these operators; which engine it runs on is decided by the library attached to it. A body is also
the operator's executable specification. Shapes: B sequences, S rows this pass, H query heads, N key/value heads,
d head size, C cache capacity, R rows that get logits, V vocabulary. Integers are int64.

    AttentionMask(first [B,S], last [B,S], capacity [1]) -> mask
        bool: query row i sees cache slots first[i] .. last[i], both included.
    CachedAttention(q [B,H,S,d], k [B,N,T,d], v [B,N,T,d], k_cache [B,N,C,d], v_cache, start [B], mask, lengths [B])
        -> y [B,H,S,d], k_cache', v_cache'
        Writes the T new rows at slot `start`, then attends with scale d**-0.5 to the slots that `mask` shows.
        `lengths` is the number of valid slots. The cache outputs alias the cache inputs.
    HiddenStateTap(h_0 .. h_n-1 [B*S,D]) -> features [B*S, n*D]
    BlockAcceptance(tokens [B,S], rows [B,R], logits [B,R,V]) -> accepted [B], next_token [B]
        Greedy: the drafted token at rows[i+1] is accepted while it equals the argmax of logits[i].
"""

from __future__ import annotations

import onnx_ir as ir

from .builder import BOOL, DFLASH_DOMAIN, FLOAT, INT64, GraphBuilder


def onnxruntime_library(taps: int, dtype: ir.DataType = FLOAT) -> list[ir.Function]:
    """Bodies of standard operators, shaped for ONNX Runtime on a CPU.

    The mask covers only the slots in use (the longest of the batch) and attention reads just those: attending over
    the whole capacity costs many times more.
    """
    return [
        _attention_mask_used(),
        _cached_attention_sliced(dtype),
        hidden_state_tap(taps, dtype),
        block_acceptance(),
    ]


def _attention_mask_used() -> ir.Function:
    g = GraphBuilder("AttentionMask")
    first, last = g.input("first", INT64, ["B", "S"]), g.input("last", INT64, ["B", "S"])
    g.input("capacity", INT64, [1])
    used = g.op("Add", g.op("ReduceMax", last, name="furthest", keepdims=0), g.constant(1), name="used")
    slots = g.op("Range", g.constant(0), used, g.constant(1), name="slots")
    not_before = g.op("GreaterOrEqual", slots, g.unsqueeze(first, 1, 3), name="not_before")
    not_after = g.op("LessOrEqual", slots, g.unsqueeze(last, 1, 3), name="not_after")
    g.output(g.op("And", not_before, not_after), "mask", BOOL, ["B", 1, "S", "L"])
    return g.function("AttentionMask")


def _cached_attention_sliced(dtype: ir.DataType) -> ir.Function:
    g = GraphBuilder("CachedAttention")
    q = g.input("q", dtype, ["B", "H", "S", "d"])
    rows = [g.input(n, dtype, ["B", "N", "T", "d"]) for n in ("k", "v")]
    caches = [g.input(n, dtype, ["B", "N", "C", "d"]) for n in ("k_cache", "v_cache")]
    start = g.input("start", INT64, ["B"])
    mask = g.input("mask", BOOL, ["B", 1, "S", "L"])
    g.input("lengths", INT64, ["B"])
    updated = [
        g.op("TensorScatter", cache, new, start, name="write", axis=-2, mode="linear")
        for cache, new in zip(caches, rows, strict=True)
    ]
    used = g.dim(mask, 3, name="used")
    k, v = (g.op("Slice", u, g.constant([0]), used, g.constant([2]), name="in_use") for u in updated)
    g.output(g.op("Attention", q, k, v, mask), "y", dtype, ["B", "H", "S", "d"])
    for value, name in zip(updated, ("k_cache_out", "v_cache_out"), strict=True):
        g.output(value, name, dtype, ["B", "N", "C", "d"])
    return g.function("CachedAttention")


def hidden_state_tap(taps: int, dtype: ir.DataType) -> ir.Function:
    g = GraphBuilder("HiddenStateTap")
    hidden = [g.input(f"h_{i}", dtype, ["rows", "D"]) for i in range(taps)]
    g.output(g.op("Concat", *hidden, axis=-1), "features", dtype, ["rows", "nD"])
    return g.function("HiddenStateTap")


def block_acceptance() -> ir.Function:
    g = GraphBuilder("BlockAcceptance")
    tokens, rows = g.input("tokens", INT64, ["B", "S"]), g.input("rows", INT64, ["B", "R"])
    logits = g.input("logits", FLOAT, ["B", "R", "V"])
    chosen = g.op("ArgMax", logits, name="chosen", axis=-1, keepdims=0)
    # Compare the choice of row i with the token of row i+1. The last row has no successor and never matches,
    # so the first mismatch always exists, and its index is the number of accepted drafts.
    count = g.dim(rows, 1, name="count")
    index = g.arange(count)
    final = g.op("Sub", count, g.constant(1), name="final")
    successor = g.op("Min", g.op("Add", index, g.constant(1), name="next"), final, name="successor")
    drafted = g.op(
        "GatherElements", tokens, g.op("Gather", rows, successor, name="next_rows", axis=1), axis=1
    )
    differs = g.op("Not", g.op("Equal", drafted, chosen, name="equal"), name="differs")
    mismatch = g.op("Or", differs, g.op("Equal", index, final, name="is_final"), name="mismatch")
    accepted = g.op(
        "ArgMax", g.op("Cast", mismatch, to=int(ir.DataType.INT32)), name="first", axis=1, keepdims=1
    )
    next_token = g.op("GatherElements", chosen, accepted, name="next_token", axis=1)
    g.output(g.op("Squeeze", accepted, g.constant([1])), "accepted", INT64, ["B"])
    g.output(g.op("Squeeze", next_token, g.constant([1])), "next", INT64, ["B"])
    return g.function("BlockAcceptance")


def attention_mask(
    g: GraphBuilder, first: ir.Value, last: ir.Value, capacity: ir.Value, name: str
) -> ir.Value:
    mask = g.op("AttentionMask", first, last, capacity, name=name, domain=DFLASH_DOMAIN)
    mask.type = ir.TensorType(BOOL)
    return mask
