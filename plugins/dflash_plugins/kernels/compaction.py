"""Accepted nodes of a tree move to their positions, in all caches at once.

A pass writes node i of a slot to row start + i. The accepted nodes, from the anchor down, belong to the rows
start, start + 1, .... One program moves the rows of one head of one cache. It reads all of them before it writes any,
so no row is lost.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["slot", "start", "count", "capacity"])
def compact_rows(
    caches,  # [caches] int64: the addresses of [slots, heads, capacity, words]
    heads,  # [caches] int32
    words,  # [caches] int32: 4-byte words of a row
    nodes,  # [count] int64: rows after `start`, rising
    slot,
    start,
    count,
    capacity,
    NODES: tl.constexpr,  # a power of two, at least `count`
    WORDS: tl.constexpr,  # words of a row that are moved at a time
):
    """One program for each head of each cache: row start + nodes[i] becomes row start + i."""
    cache, head = tl.program_id(0), tl.program_id(1)
    in_cache = tl.load(heads + cache)
    if head < in_cache:
        width = tl.load(words + cache)
        row = (slot.to(tl.int64) * in_cache + head) * capacity + start
        base = tl.load(caches + cache).to(tl.pointer_type(tl.int32)) + row * width
        place, column = tl.arange(0, NODES), tl.arange(0, WORDS)
        there = place < count
        node = tl.load(nodes + place, mask=there, other=0)
        for first in range(0, width, WORDS):
            at = first + column
            whole = there[:, None] & (at < width)[None, :]
            moved = tl.load(base + node[:, None] * width + at[None, :], mask=whole, other=0)
            tl.debug_barrier()  # all threads have read
            tl.store(base + place.to(tl.int64)[:, None] * width + at[None, :], moved, mask=whole)
