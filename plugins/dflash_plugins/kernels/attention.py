"""CachedAttention and SinkAttention: the rows of a pass over the slots of a cache, as flash-decoding.

The query heads that share a key head are rows of one matrix, so a slot is read once for all of them. `attend` splits
the slots that its rows see among several programs. Each gives its rows' largest score, sum and weighted values.
`merge` puts the parts of a row together, and adds the sink, a logit without a value.

A row sees a range of slots. `visible`, if given, marks those that it sees among the slots that the pass itself wrote.
No slot outside of these is read, whatever the capacity. Scores and sums are float32. The weights are rounded to the
cache's type before they multiply the values.

Many rows of a wide head do not fit shared memory. Their scores are then sums over parts of COLUMNS of the head, for
which queries and keys are read part by part.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["count", "capacity", "splits"])
def attend(
    q,  # [B, H, count, D]: the heads of a key head are neighbours, and so are their rows
    k_cache,  # [B, N, capacity, D], with the rows of this pass
    v_cache,
    first,  # [B, count] int64: a row sees the slots first .. last
    last,  # [B, count] int64
    start,  # [B] int64: the slot of the pass's first row; None if `visible` is None
    visible,  # [B, count, count] int32: whether row i sees row j of the pass, whatever its range; or None
    count,
    capacity,
    splits,
    partial,  # [splits * B * H * count or more, D] float32: weighted values, not divided by their sum
    largest,  # [the same] float32: the largest score of a row's part, times log2(e); -inf if it sees nothing
    total,  # [the same] float32: sum of exp2(score - largest)
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a key head
    D: tl.constexpr,
    D_SLOTS: tl.constexpr,  # D, rounded up to a power of two
    STRIPE: tl.constexpr,  # slots of a stripe, a multiple of SLOTS
    COLUMNS: tl.constexpr,  # D_SLOTS, or a part of it
    ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """One program for some rows of a key head, and for one part of the slots."""
    head = tl.program_id(1)  # sequence * KV_HEADS + key head
    sequence, split = head // KV_HEADS, tl.program_id(2)
    rows = GROUP * count
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, D_SLOTS)
    real, inner = row < rows, column < D
    at = head.to(tl.int64) * rows + row
    if COLUMNS == D_SLOTS:
        queries = tl.load(
            q + at[:, None] * D + column[None, :], mask=real[:, None] & inner[None, :], other=0.0
        )

    node = sequence * count + row % count
    low = tl.load(first + node, mask=real, other=capacity).to(tl.int32)
    high = tl.load(last + node, mask=real, other=-1).to(tl.int32)
    begin, end = tl.maximum(tl.min(low), 0), tl.max(high) + 1
    own = capacity
    if visible is not None:
        own = tl.load(start + sequence).to(tl.int32)
        begin, end = tl.minimum(begin, own), tl.maximum(end, own + count)
    end = tl.minimum(end, capacity)

    # Part i has the stripes i, i + splits, ... of the cache. What a row sees is summed in the same parts and steps,
    # wherever the pass's other rows begin and end: a step in which a row sees nothing changes none of its bits.
    STEPS: tl.constexpr = STRIPE // SLOTS
    leading = begin // STRIPE
    stripe = leading + (split + splits - leading % splits) % splits
    stripes = tl.maximum((end + STRIPE - 1) // STRIPE - stripe + splits - 1, 0) // splits
    step = tl.where(stripe == leading, begin % STRIPE // SLOTS, 0)
    closing = stripe + (stripes - 1) * splits  # this part's last stripe
    spare = tl.maximum((closing + 1) * STRIPE - end, 0) // SLOTS
    steps = tl.where(stripes > 0, stripes * STEPS - spare, 0)

    cache = head.to(tl.int64) * capacity * D
    peak = tl.full([ROWS], -float("inf"), tl.float32)
    summed = tl.zeros([ROWS], tl.float32)
    values = tl.zeros([ROWS, D_SLOTS], tl.float32)
    for i in range(step, steps):
        slot = (stripe + i // STEPS * splits) * STRIPE + i % STEPS * SLOTS + tl.arange(0, SLOTS)
        there = slot < end
        if COLUMNS == D_SLOTS:
            k_at = cache + slot[None, :] * D + column[:, None]
            k = tl.load(k_cache + k_at, mask=there[None, :] & inner[:, None], other=0.0)
            score = tl.dot(queries, k)
        else:
            score = tl.zeros([ROWS, SLOTS], tl.float32)
            for low_column in range(0, D, COLUMNS):
                part = low_column + tl.arange(0, COLUMNS)
                q_part = tl.load(
                    q + at[:, None] * D + part[None, :], mask=real[:, None] & (part < D)[None, :], other=0.0
                )
                k_part = tl.load(
                    k_cache + cache + slot[None, :] * D + part[:, None],
                    mask=there[None, :] & (part < D)[:, None],
                    other=0.0,
                )
                score = tl.dot(q_part, k_part, acc=score)
        v_at = cache + slot[:, None] * D + column[None, :]
        v = tl.load(v_cache + v_at, mask=there[:, None] & inner[None, :], other=0.0)
        score *= LOG2E * (1.0 / tl.sqrt(float(D)))
        seen = (slot[None, :] >= low[:, None]) & (slot[None, :] <= high[:, None])
        if visible is not None:
            written = slot - own
            inside = (written >= 0) & (written < count)
            edge = tl.load(
                visible + node[:, None] * count + written[None, :],
                mask=real[:, None] & inside[None, :],
                other=0,
            )
            seen = tl.where(inside[None, :], edge != 0, seen)
        score = tl.where(seen & there[None, :], score, -float("inf"))
        higher = tl.maximum(peak, tl.max(score, axis=1))
        base = tl.where(higher == -float("inf"), 0.0, higher)  # -inf - -inf is NaN
        weight = tl.exp2(score - base[:, None])
        kept = tl.exp2(peak - base)
        summed = summed * kept + tl.sum(weight, axis=1)
        values = tl.dot(weight.to(v.dtype), v, acc=values * kept[:, None])
        peak = higher

    at += split * tl.num_programs(1) * rows  # fits int32: few parts have many rows
    tl.store(largest + at, peak, mask=real)
    tl.store(total + at, summed, mask=real)
    wanted = row < tl.where(step < steps, rows, 0)
    tl.store(partial + at[:, None] * D + column[None, :], values, mask=wanted[:, None] & inner[None, :])


@triton.jit(do_not_specialize=["rows", "count", "splits"])
def merge(
    partial,  # as `attend` gives them
    largest,
    total,
    like,  # a tensor with y's shape and type, which tells TensorRT about y; never read
    sinks,  # [H] of y's type, or None
    rows,  # B * H * count
    count,
    splits,
    y,  # [B, H, count, D], or [B, count, H, D] with BY_ROW; rows that see nothing are 0
    HEADS: tl.constexpr,
    D: tl.constexpr,
    D_SLOTS: tl.constexpr,
    SPLITS: tl.constexpr,  # a power of two, at least `splits`
    BY_ROW: tl.constexpr,
):
    """One program for each row: its parts as one, and a sink's share."""
    row, split, column = tl.program_id(0), tl.arange(0, SPLITS), tl.arange(0, D_SLOTS)
    part = split * rows + row
    peaks = tl.load(largest + part, mask=split < splits, other=-float("inf"))
    sums = tl.load(total + part, mask=split < splits, other=0.0)
    peak, sink = tl.max(peaks, axis=0), -float("inf")
    if sinks is not None:
        sink = tl.load(sinks + row // count % HEADS).to(tl.float32) * LOG2E
        peak = tl.maximum(peak, sink)
    base = tl.where(peak == -float("inf"), 0.0, peak)
    used = sums != 0  # also if it is NaN
    weight = tl.where(used, tl.exp2(peaks - base), 0.0)
    summed = tl.sum(tl.where(used, sums * weight, 0.0), axis=0)
    if sinks is not None:
        summed += tl.exp2(sink - base)
    if splits == 1:  # as of a prompt's many rows
        seen = (column < D) & (tl.load(total + row) != 0)
        value = tl.load(partial + row.to(tl.int64) * D + column, mask=seen, other=0.0)
        value *= tl.sum(weight, axis=0)
    else:
        at = part.to(tl.int64)[:, None] * D + column[None, :]
        values = tl.load(partial + at, mask=used[:, None] & (column < D)[None, :], other=0.0)
        value = tl.sum(values * weight[:, None], axis=0)
    value = value / tl.where(summed == 0, 1.0, summed)
    if BY_ROW:
        row = (row // (count * HEADS) * count + row % count) * HEADS + row // count % HEADS
    tl.store(y + row.to(tl.int64) * D + column, value.to(y.dtype.element_ty), mask=column < D)
