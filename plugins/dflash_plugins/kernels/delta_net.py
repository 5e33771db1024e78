"""GatedDeltaNet (graph/delta_net.py), row by row: first the replayed pending rows, then those of the pass.

A program holds some columns of a head's state in registers, and every row is the same steps of one loop, in float32 and
without operations that the compiler may fuse. So what a row gives depends on the rows before it and on nothing else:
not on the pass in which it came, nor on its place in the batch, and a row that is replayed has its bits again.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _row(
    q,
    k,
    v,
    gates,
    pending_gates,
    i,
    old,
    in_key,
    in_value,
    KEYS: tl.constexpr,
    DV: tl.constexpr,
    HEADS: tl.constexpr,
    PENDING: tl.constexpr,
):
    """Key, query, values, decay and beta of row i. Pointers are to a sequence's first row. Rows before `old` are
    replayed.
    """
    row, gate = (i + PENDING - old).to(tl.int64), gates + (i - old) * 2 * HEADS
    if i < old:
        row, gate = row + old - PENDING, pending_gates + i * 2 * HEADS
    return (
        tl.load(k + row * KEYS, mask=in_key, other=0.0),
        tl.load(q + row * KEYS, mask=in_key, other=0.0),
        tl.load(v + row * (HEADS * DV), mask=in_value, other=0.0),
        tl.load(gate),
        tl.load(gate + HEADS),
    )


@triton.jit(do_not_specialize=["count"])
def delta_rows(
    q,  # [B, PENDING + count, KEY_HEADS * DK]
    k,
    v,  # [B, PENDING + count, HEADS * DV]
    gates,  # [B, count, 2 * HEADS]: the decays' logarithms, then the betas
    state,  # [B, HEADS, DK, DV]
    pending_gates,  # [B, PENDING, 2 * HEADS]
    replayed,  # [B] int64
    certain,  # [B] int64
    begun,  # [B]
    count,
    y,  # [B, count, HEADS * DV]
    state_out,  # as `state`
    pending_gates_out,  # as `pending_gates`; behind the pass's last row, copies of it
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    PENDING: tl.constexpr,
    DK_SLOTS: tl.constexpr,  # DK, rounded up to a power of two
    COLUMNS: tl.constexpr,
):
    """One program for some columns of a value head."""
    sequence, head = (tl.program_id(1) // HEADS).to(tl.int64), tl.program_id(1) % HEADS
    number, column = tl.arange(0, DK_SLOTS), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    in_key, in_value = number < DK, column < DV
    inside = in_key[:, None] & in_value[None, :]
    at = (sequence * HEADS + head) * DK * DV + number[:, None] * DV + column[None, :]
    s = tl.zeros([DK_SLOTS, COLUMNS], tl.float32)
    if tl.load(begun + sequence) != 0:
        s = tl.load(state + at, mask=inside, other=0.0)
    old = tl.load(replayed + sequence).to(tl.int32)
    entering = old + tl.load(certain + sequence).to(tl.int32)
    key = head // (HEADS // KEY_HEADS) * DK + number
    value, first_row = head * DV + column, sequence * (PENDING + count)
    # Where the sequence's first rows are.
    q += first_row * (KEY_HEADS * DK) + key
    k += first_row * (KEY_HEADS * DK) + key
    v += first_row * (HEADS * DV) + value
    new, waiting = gates + sequence * count * 2 * HEADS, pending_gates + sequence * PENDING * 2 * HEADS
    y += sequence * count * (HEADS * DV) + value
    row = _row(
        *(q, k, v, new + head, waiting + head, 0, old, in_key, in_value),
        *(KEY_HEADS * DK, DV, HEADS, PENDING),
    )
    for i in range(old + count):
        if i == entering:
            tl.store(state_out + at, s, mask=inside)
        key_row, query_row, value_row, decay, beta = row
        # The next row comes from memory while this one is computed.
        following = tl.minimum(i + 1, old + count - 1)
        row = _row(
            *(q, k, v, new + head, waiting + head, following, old, in_key, in_value),
            *(KEY_HEADS * DK, DV, HEADS, PENDING),
        )
        s *= tl.exp(decay)
        change = beta * (value_row - tl.sum(key_row[:, None] * s, axis=0))
        s += key_row[:, None] * change[None, :]
        result = tl.sum(query_row[:, None] * s, axis=0)
        if i >= old:
            tl.store(y + (i - old).to(tl.int64) * (HEADS * DV), result, mask=in_value)
    if entering == old + count:
        tl.store(state_out + at, s, mask=inside)

    if tl.program_id(0) == 0:
        first, slot = entering - old, tl.arange(0, PENDING)
        source = (sequence * count + tl.minimum(first + slot, count - 1)) * 2 * HEADS + head
        target = (sequence * PENDING + slot) * 2 * HEADS + head
        tl.store(pending_gates_out + target, tl.load(gates + source))
        tl.store(pending_gates_out + target + HEADS, tl.load(gates + source + HEADS))
