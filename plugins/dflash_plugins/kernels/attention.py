"""CachedAttention and SinkAttention: the rows of a pass over the slots of a cache, as flash-decoding.

The query heads that share a key head are rows of one matrix, so a slot is read once for all of them. The cache is cut
into parts, by its slots alone: `part_begin`. In each, a row's scores give their largest, their sum and the weighted
values. `fold` adds one part after the other, from the first one that the row sees.

A program of `attend` takes one part, or all of them, and `merge` adds what is left to add, and the sink, a logit
without a value. Both have the same sums in the same order, by fused operations that are written out. So a row's bits
depend neither on the other rows of its pass, nor on the other sequences.

A row sees a range of slots. `visible`, if given, marks those that it sees among the slots that the pass itself wrote.
No slot outside of these is read, whatever the capacity. Scores and sums are float32. The weights are rounded to the
cache's type before they multiply the values.

A cache may hold E4M3 numbers: bytes, and after those of a row its scale in float32, which multiplies its scores, or
the weight of its values.

Many rows of a wide head do not fit shared memory. Their scores are then sums over parts of COLUMNS of the head, for
which queries and keys are read part by part.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.constexpr_function
def _widening(brain: bool) -> str:
    """Instructions that make four bytes in E4M3 numbers of 16 bits. The bits of a byte make a float that is too small
    by a power of two, also if it is subnormal. Adding -0 changes no bit.
    """
    shift, magnitude, power, kind = (4, 0x07F0, 0x7B80, "bf16x2") if brain else (1, 0x3F80, 0x5C00, "f16x2")
    lines = ["{", ".reg .b32 pair, sign, number, up, nothing;", "mov.b32 nothing, 0x80008000;"]
    lines.append(f"mov.b32 up, {power * 0x10001:#010x};")
    for i, bytes_of_pair in enumerate(("0x1404", "0x3424")):
        lines += [f"prmt.b32 pair, $2, 0, {bytes_of_pair};", "and.b32 sign, pair, 0x80008000;"]
        lines += [f"shr.u32 number, pair, {shift};", f"and.b32 number, number, {magnitude * 0x10001:#010x};"]
        lines += ["or.b32 number, number, sign;", f"fma.rn.{kind} ${i}, number, up, nothing;"]
    return "\n".join([*lines, "}"])


@triton.jit
def _numbers(at, mask, DTYPE: tl.constexpr):
    """Numbers of a cache, without the scales of rows."""
    if at.dtype.element_ty == DTYPE:
        return tl.load(at, mask=mask, other=0.0)
    else:
        codes = tl.load(at, mask=mask, other=0)
        text: tl.constexpr = _widening(DTYPE.is_bf16())
        bits = tl.inline_asm_elementwise(text, "=r,=r,r", [codes], dtype=tl.int16, is_pure=True, pack=4)
        return bits.to(DTYPE, bitcast=True)


@triton.jit
def _scales(at, mask):
    """Those of rows, at their end."""
    return tl.load(at.to(tl.pointer_type(tl.float32)), mask=mask, other=0.0)


@triton.jit
def part_begin(part, PART: tl.constexpr, ALIKE: tl.constexpr):
    """The first slot of a part. So many parts have PART slots, as many after them twice as many, and so on."""
    return ((ALIKE + part % ALIKE) * PART << part // ALIKE) - ALIKE * PART


@triton.jit
def fold(peak, summed, values, part_peak, part_sum, part_values):
    """Rows [R], [R], [R, D] with their next part. One in which a row sees nothing changes none of its bits."""
    higher = tl.maximum(peak, part_peak)
    base = tl.where(higher == -float("inf"), 0.0, higher)  # -inf - -inf is NaN
    kept, added = tl.exp2(peak - base), tl.exp2(part_peak - base)
    summed = tl.fma(part_sum, added, summed * kept)
    weight = tl.broadcast_to(added[:, None], values.shape)
    return higher, summed, tl.fma(part_values, weight, values * kept[:, None])


@triton.jit(do_not_specialize=["count", "capacity", "splits"])
def attend(
    q,  # [B, H, count, D]: the heads of a key head are neighbours, and so are their rows
    k_cache,  # [B, N, capacity, D], with the rows of this pass; with `region` [N, capacity, D], of all sequences. Or
    # bytes, four more in a row
    v_cache,
    first,  # [B, count] int64: a row sees the slots first .. last
    last,  # [B, count] int64
    start,  # [B] int64: the slot of the pass's first row; None if `visible` is None
    visible,  # [B, count, count] int32: whether row i sees row j of the pass, whatever its range; or None
    region,  # [B] int64: where a sequence's slots begin in a cache of all; or None
    count,
    capacity,
    splits,  # 1: a program takes all parts
    partial,  # [splits * B * H * count or more, D] float32: weighted values, not divided by their sum
    largest,  # [the same] float32: the largest score of a row's part, times log2(e); -inf if it sees nothing
    total,  # [the same] float32: sum of exp2(score - largest)
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a key head
    D: tl.constexpr,
    D_SLOTS: tl.constexpr,  # D, rounded up to a power of two
    PART: tl.constexpr,  # slots of the first parts, a multiple of SLOTS and a power of two
    ALIKE: tl.constexpr,  # parts of the same size, a power of two
    PARTS: tl.constexpr,  # the last of so many has no end
    COLUMNS: tl.constexpr,  # D_SLOTS, or a part of it
    ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """One program for some rows of a key head, and for one part of the slots or all."""
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
    begun = capacity
    if visible is not None:
        begun = tl.load(start + sequence).to(tl.int32)
        begin, end = tl.minimum(begin, begun), tl.maximum(end, begun + count)
    end = tl.minimum(end, capacity)

    # A step in which a row sees nothing changes none of its bits either.
    OFFSET: tl.constexpr = ALIKE * PART
    at_slot = begin // SLOTS * SLOTS
    if splits > 1:
        at_slot = tl.maximum(at_slot, part_begin(split, PART, ALIKE))
        if split < PARTS - 1:
            end = tl.minimum(end, part_begin(split + 1, PART, ALIKE))
    # Slots of the part: of the slot's distance from -OFFSET, the power of two is that of a float's exponent.
    exponent = ((at_slot + OFFSET).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
    size = tl.minimum((1 << exponent) // ALIKE, PART << PARTS // ALIKE - 1)

    PACKED: tl.constexpr = k_cache.dtype.element_ty != q.dtype.element_ty
    WIDTH: tl.constexpr = D + 4 if PACKED else D
    DTYPE: tl.constexpr = q.dtype.element_ty
    cache = head.to(tl.int64) * capacity * WIDTH
    if region is not None:
        cache = ((head % KV_HEADS).to(tl.int64) * capacity + tl.load(region + sequence)) * WIDTH
    peak = tl.full([ROWS], -float("inf"), tl.float32)
    summed = tl.zeros([ROWS], tl.float32)
    values = tl.zeros([ROWS, D_SLOTS], tl.float32)
    all_peak, all_sum, all_values = peak, summed, values
    for low_slot in range(at_slot, end, SLOTS):
        slot = low_slot + tl.arange(0, SLOTS)
        there = slot < end
        if COLUMNS == D_SLOTS:
            k_at = cache + slot[None, :] * WIDTH + column[:, None]
            k = _numbers(k_cache + k_at, there[None, :] & inner[:, None], DTYPE)
            score = tl.dot(queries, k)
        else:
            score = tl.zeros([ROWS, SLOTS], tl.float32)
            for low_column in range(0, D, COLUMNS):
                part = low_column + tl.arange(0, COLUMNS)
                q_part = tl.load(
                    q + at[:, None] * D + part[None, :], mask=real[:, None] & (part < D)[None, :], other=0.0
                )
                k_at = cache + slot[None, :] * WIDTH + part[:, None]
                k_part = _numbers(k_cache + k_at, there[None, :] & (part < D)[:, None], DTYPE)
                score = tl.dot(q_part, k_part, acc=score)
        v_at = cache + slot[:, None] * WIDTH + column[None, :]
        v = _numbers(v_cache + v_at, there[:, None] & inner[None, :], DTYPE)
        score *= LOG2E * (1.0 / tl.sqrt(float(D)))
        if PACKED:
            score *= _scales(k_cache + (cache + slot * WIDTH + D), there)[None, :]
        seen = (slot[None, :] >= low[:, None]) & (slot[None, :] <= high[:, None])
        if visible is not None:
            written = slot - begun
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
        if PACKED:
            weight *= _scales(v_cache + (cache + slot * WIDTH + D), there)[None, :]
        values = tl.dot(weight.to(v.dtype), v, acc=values * kept[:, None])
        peak = higher
        following = low_slot + SLOTS + OFFSET
        if (following & (size - 1)) == 0 and following < OFFSET << PARTS // ALIKE:
            all_peak, all_sum, all_values = fold(all_peak, all_sum, all_values, peak, summed, values)
            peak = tl.full([ROWS], -float("inf"), tl.float32)
            summed = tl.zeros([ROWS], tl.float32)
            values = tl.zeros([ROWS, D_SLOTS], tl.float32)
            size = tl.where(following == 2 * ALIKE * size, 2 * size, size)
    all_peak, all_sum, all_values = fold(all_peak, all_sum, all_values, peak, summed, values)

    at += split * tl.num_programs(1) * rows  # fits int32: few parts have many rows
    tl.store(largest + at, all_peak, mask=real)
    tl.store(total + at, all_sum, mask=real)
    wanted = row < tl.where(at_slot < end, rows, 0)
    tl.store(partial + at[:, None] * D + column[None, :], all_values, mask=wanted[:, None] & inner[None, :])


@triton.jit(do_not_specialize=["rows", "count", "splits"])
def merge(
    partial,  # as `attend` gives them
    largest,
    total,
    like,  # a tensor with y's shape and type, which tells TensorRT about y; never read
    cache,  # a cache, whose slots tell TensorRT `splits`; never read
    sinks,  # [H] of y's type, or None
    rows,  # B * H * count
    count,
    splits,
    y,  # [B, H, count, D], or [B, count, H, D] with BY_ROW; rows that see nothing are 0
    HEADS: tl.constexpr,
    D: tl.constexpr,
    D_SLOTS: tl.constexpr,
    PARTS: tl.constexpr,  # a power of two, at least `splits`
    AHEAD: tl.constexpr,  # parts that are read at once
    BY_ROW: tl.constexpr,
):
    """One program for each row: its parts as one, and a sink's share."""
    row, column, split = tl.program_id(0), tl.arange(0, D_SLOTS)[None, :], tl.arange(0, PARTS)
    sums = tl.load(total + split * rows + row, mask=split < splits, other=0.0)
    first = tl.min(tl.where(sums != 0, split, PARTS), axis=0)  # != also if it is NaN
    last = tl.max(tl.where(sums != 0, split, -1), axis=0)

    peak = tl.full([1], -float("inf"), tl.float32)
    summed = tl.zeros([1], tl.float32)
    value = tl.zeros([1, D_SLOTS], tl.float32)
    for low in range(first, last + 1, AHEAD):
        for i in tl.static_range(AHEAD):
            number = low + i + tl.zeros([1], tl.int32)
            at, seen = number * rows + row, number <= last
            part_peak = tl.load(largest + at, mask=seen, other=-float("inf"))
            part_sum = tl.load(total + at, mask=seen, other=0.0)
            there = seen[:, None] & (column < D)
            part = tl.load(partial + at.to(tl.int64)[:, None] * D + column, mask=there, other=0.0)
            peak, summed, value = fold(peak, summed, value, part_peak, part_sum, part)

    if sinks is not None:
        sink = tl.load(sinks + row // count % HEADS).to(tl.float32) * LOG2E
        base = tl.maximum(peak, sink)
        kept = tl.exp2(peak - base)
        summed, value = tl.fma(summed, kept, tl.exp2(sink - base)), value * kept[:, None]
    value = value / tl.where(summed == 0, 1.0, summed)[:, None]
    if BY_ROW:
        row = (row // (count * HEADS) * count + row % count) * HEADS + row // count % HEADS
    tl.store(y + row.to(tl.int64) * D + column, value.to(y.dtype.element_ty), mask=column < D)
