"""What lies between the products of a layer, each in one step: a residual sum with the norm after it, heads with their
norm, rotation and place in a cache, a gated activation, and the product of a router. After the head, the best token.

Each row is computed alone and in one order, whatever the other rows of a pass. Numbers are float32 until they are
stored.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dflash_plugins.kernels.moe import arranged_place, choose

_BLOCK = tl.constexpr(16)  # of E2M1 numbers that share a scale
_TINY = tl.constexpr(2.0**-100)


@triton.jit
def _whole(x):
    """The nearest whole number, of two the even one; a NaN stays one."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _e4m3_rounded(x):
    """The nearest E4M3 numbers, at most 448, in float32."""
    x = tl.where(x > 448.0, 448.0, tl.where(x < -448.0, -448.0, x))
    step = tl.maximum((x.to(tl.int32, bitcast=True) & 0x7F800000) - (3 << 23), 118 << 23)
    inverse = ((254 << 23) - step).to(tl.float32, bitcast=True)
    return _whole(x * inverse) * step.to(tl.float32, bitcast=True)


@triton.jit
def _quantize(
    value,
    row,
    column,
    inner,
    scale,
    codes,
    factor,
    D,
    SCHEME: tl.constexpr,
    BY_ROW: tl.constexpr,
    SHRUNK: tl.constexpr,
):
    """Store a row [slots] in float32, zeros after its D numbers, as `quantized_rows` does."""
    second = tl.load(scale)
    times = second
    if BY_ROW:
        largest = tl.max(tl.abs(value), axis=0)
        largest = tl.where(largest < _TINY, _TINY, largest)
        value = tl.div_rn(value, largest)
        times = largest * second
    if SCHEME == "fp8":
        number = _e4m3_rounded(tl.div_rn(value, second))
    else:
        blocks = tl.reshape(value, [value.shape[0] // _BLOCK, _BLOCK])
        of_block = tl.div_rn(tl.max(tl.abs(blocks), axis=1), second * 6.0)
        of_block = _e4m3_rounded(tl.where(of_block < 0.001953125, 0.001953125, of_block))[:, None]
        blocks = tl.div_rn(blocks, tl.broadcast_to(of_block * second, blocks.shape))
        blocks = tl.where(blocks > 6.0, 6.0, tl.where(blocks < -6.0, -6.0, blocks))
        step = tl.where(tl.abs(blocks) < 2.0, 0.5, tl.where(tl.abs(blocks) < 4.0, 1.0, 2.0))
        number = tl.reshape(_whole(blocks / step) * step * of_block, [value.shape[0]])
    tl.store(codes + row * D + column, (number * SHRUNK).to(codes.dtype.element_ty), mask=inner)
    tl.store(factor + row, times / SHRUNK)


@triton.jit
def quantized_rows(
    x,  # [rows, D]
    scale,  # [1] float32
    codes,  # [rows, D] of x's type: the rounded numbers without scale, times a power of two, which is exact
    factor,  # [rows] float32: what they are to be multiplied by
    D: tl.constexpr,
    D_SLOTS: tl.constexpr,
    SCHEME: tl.constexpr,
    BY_ROW: tl.constexpr,
    SHRUNK: tl.constexpr,  # what the numbers are multiplied by
):
    """One program for each row."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, D_SLOTS)
    value = tl.load(x + row * D + column, mask=column < D, other=0.0).to(tl.float32)
    _quantize(value, row, column, column < D, scale, codes, factor, D, SCHEME, BY_ROW, SHRUNK)


@triton.jit
def _normed(one, other, weight, column, inner, D: tl.constexpr, EPSILON: tl.constexpr):
    """The sum [slots] of two rows, zeros after their D numbers, in the type of the first one, and its RMS norm."""
    added = (one.to(tl.float32) + other.to(tl.float32)).to(one.dtype)
    wide = added.to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / D + EPSILON)
    times = tl.load(weight + column, mask=inner, other=0.0).to(tl.float32)
    return added, (wide * inverse * times).to(one.dtype)


@triton.jit
def add_norm(
    x,  # [rows, D]
    y,  # [rows, D], or the parts of experts, [rows * PARTS, D] float32
    weight,  # [D]
    total,  # [rows, D]: x + y, rounded
    normed,  # [rows, D]: RMS norm of `total`
    scale,  # of `quantized_rows` of `normed`, or None
    codes,
    factor,
    EPSILON: tl.constexpr,
    D: tl.constexpr,
    D_SLOTS: tl.constexpr,  # D, rounded up to a power of two
    PARTS: tl.constexpr,  # 0: y has rows
    SCHEME: tl.constexpr,
    BY_ROW: tl.constexpr,
    SHRUNK: tl.constexpr,  # what the numbers are multiplied by
):
    """One program for each row."""
    column = tl.arange(0, D_SLOTS)
    inner = column < D
    at = tl.program_id(0).to(tl.int64) * D + column
    one = tl.load(x + at, mask=inner, other=0.0)
    if PARTS:  # as `combine` (moe.py) adds and rounds them
        other = tl.zeros([D_SLOTS], tl.float32)
        for s in tl.static_range(PARTS):
            of_part = (tl.program_id(0).to(tl.int64) * PARTS + s) * D + column
            other += tl.load(y + of_part, mask=inner, other=0.0)
        other = other.to(one.dtype)
    else:
        other = tl.load(y + at, mask=inner, other=0.0)
    added, rounded = _normed(one, other, weight, column, inner, D, EPSILON)
    tl.store(total + at, added, mask=inner)
    tl.store(normed + at, rounded, mask=inner)
    if scale is not None:
        row = tl.program_id(0).to(tl.int64)
        _quantize(rounded.to(tl.float32), row, column, inner, scale, codes, factor, D, SCHEME, BY_ROW, SHRUNK)


@triton.jit
def _place(cache, row, real, value, D: tl.constexpr):
    """Store the numbers [slots, rows] of a head, zeros after its D, in the rows of a cache that are real: as they are,
    or as E4M3 with their scale after them, which is NaN if one of them is not finite.
    """
    column = tl.arange(0, value.shape[0])
    inner = (column < D)[:, None] & real[None, :]
    if cache.dtype.element_ty == tl.uint8:
        largest = tl.max(tl.abs(value), axis=0)
        scale = tl.div_rn(tl.where(largest < _TINY, _TINY, largest), 448.0)
        number = _e4m3_rounded(tl.div_rn(value, tl.broadcast_to(scale[None, :], value.shape)))
        bits = (number * 2.0**-120).to(tl.int32, bitcast=True)
        at = cache + row[None, :] * (D + 4) + column[:, None]
        tl.store(at, (((bits >> 20) & 0x7F) | ((bits >> 24) & 0x80)).to(tl.uint8), mask=inner)
        at_scale = (cache + row * (D + 4) + D).to(tl.pointer_type(tl.float32))
        tl.store(at_scale, scale + tl.sum(value * 0.0, axis=0), mask=real)
    else:
        at = cache + row[None, :] * D + column[:, None]
        tl.store(at, value.to(cache.dtype.element_ty), mask=inner)


@triton.constexpr_function
def _halvings(slots: int) -> int:
    return slots.bit_length() - 1


@triton.jit
def _sum(x):
    """The sums [rows] of [slots, rows], of neighbours and then of their sums: in one order, however a program holds
    them.
    """
    for _ in tl.static_range(_halvings(x.shape[0])):
        x = tl.sum(tl.reshape(x, [x.shape[0] // 2, 2, x.shape[1]]), axis=1)
    return tl.reshape(x, [x.shape[1]])


@triton.jit
def place(
    value,  # float32 [D_SLOTS, rows]: numbers of a head, zeros after its D
    head,
    row,  # [rows] of a pass
    real,  # [rows]: whether it is one
    q_norm,  # as of `place_heads`, like those that follow
    k_norm,
    cos,
    sin,
    start,
    region,
    count,
    capacity,
    q,
    k_cache,
    v_cache,
    H: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    HALF: tl.constexpr,
    EPSILON: tl.constexpr,
    D: tl.constexpr,
    D_SLOTS: tl.constexpr,
):
    """A head's norm, its rotation, and its place."""
    sequence, i, column = row // count, row % count, tl.arange(0, D_SLOTS)
    inner, key = column < D, row * 0 + (head - H)  # negative: it is of a query
    if head < H + KEYS:
        if q_norm is not None or k_norm is not None:
            scale = (1.0 / tl.sqrt(_sum(value * value) / D + EPSILON))[None, :]
            if head < H:
                if q_norm is not None:
                    value *= scale * tl.load(q_norm + column, mask=inner, other=0.0).to(tl.float32)[:, None]
            else:
                if k_norm is not None:
                    value *= scale * tl.load(k_norm + column, mask=inner, other=0.0).to(tl.float32)[:, None]
        if cos is not None:
            low, turned = (column < HALF)[:, None], (column < 2 * HALF)[:, None]
            partner = tl.broadcast_to(
                tl.where(low, column[:, None] + HALF, column[:, None] - HALF), value.shape
            )
            other = tl.where(turned, tl.gather(value, partner, 0), 0.0)
            pair = row[None, :] * HALF + tl.where(low, column[:, None], column[:, None] - HALF)
            c = tl.load(cos + pair, mask=turned & real[None, :], other=1.0).to(tl.float32)
            s = tl.load(sin + pair, mask=turned & real[None, :], other=0.0).to(tl.float32)
            value = value * c + tl.where(low, -other, other) * s
    if q is not None:
        at = (((sequence.to(tl.int64) * H + head) * count + i) * D)[None, :] + column[:, None]
        tl.store(q + at, value.to(q.dtype.element_ty), mask=inner[:, None] & (real & (key < 0))[None, :])
    if start is not None:
        place, owner = tl.load(start + sequence, mask=real, other=0) + i, sequence.to(tl.int64)
        if region is not None:
            place, owner = place + tl.load(region + sequence, mask=real, other=0), owner * 0
        if k_cache is not None:
            at = (owner * KEYS + key) * capacity + place
            _place(k_cache, at, real & (key >= 0) & (key < KEYS), value, D)
        if v_cache is not None:
            at = (owner * VALUES + key - KEYS) * capacity + place
            _place(v_cache, at, real & (key >= KEYS), value, D)


@triton.jit(do_not_specialize=["count", "capacity"])
def place_heads(
    x,  # [B * count, (H + KEYS + VALUES) * D]: queries, keys and values of each row
    q_norm,  # [D], or None
    k_norm,  # [D], or None
    cos,  # [B * count, HALF], or None: no rotation
    sin,
    start,  # [B] int64: the cache row of the first row; None without keys and values
    region,  # [B] int64: where a sequence's rows begin in caches [KEYS, capacity, D] of all sequences; or None
    count,
    capacity,
    q,  # [B, H, count, D]; None without queries
    k_cache,  # [B, KEYS, capacity, D], or bytes [..., D + 4], or None
    v_cache,  # [B, VALUES, capacity, D], or bytes [..., D + 4], or None
    H: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    HALF: tl.constexpr,  # pairs that are rotated: column i with column HALF + i
    EPSILON: tl.constexpr,
    D: tl.constexpr,
    D_SLOTS: tl.constexpr,  # D, rounded up to a power of two
):
    """One program for each head of each row: its norm, its rotation, and its place."""
    row, head = tl.program_id(0) + tl.arange(0, 1), tl.program_id(1)
    column = tl.arange(0, D_SLOTS)
    source = x + ((row.to(tl.int64) * (H + KEYS + VALUES) + head) * D)[None, :]
    value = tl.load(source + column[:, None], mask=(column < D)[:, None], other=0.0).to(tl.float32)
    place(
        *(value, head, row, row >= 0, q_norm, k_norm, cos, sin, start, region, count, capacity),
        *(q, k_cache, v_cache, H, KEYS, VALUES, HALF, EPSILON, D, D_SLOTS),
    )


@triton.jit
def gate(
    x,  # [rows, 2 * INNER]: gates, then values
    y,  # [rows, INNER]: silu(gates) * values
    scale,  # of `quantized_rows` of y, where BLOCK is a whole row; or None
    codes,
    factor,
    INNER: tl.constexpr,
    BLOCK: tl.constexpr,
    SCHEME: tl.constexpr,
    BY_ROW: tl.constexpr,
    SHRUNK: tl.constexpr,  # what the numbers are multiplied by
):
    """One program for BLOCK numbers of a row."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inner = column < INNER
    gates = tl.load(x + row * 2 * INNER + column, mask=inner, other=0.0).to(tl.float32)
    values = tl.load(x + row * 2 * INNER + INNER + column, mask=inner, other=0.0).to(tl.float32)
    gated = gates / (1.0 + tl.exp(-gates)) * values
    rounded = gated.to(y.dtype.element_ty)
    tl.store(y + row * INNER + column, rounded, mask=inner)
    if scale is not None:
        _quantize(
            rounded.to(tl.float32), row, column, inner, scale, codes, factor, INNER, SCHEME, BY_ROW, SHRUNK
        )


@triton.jit(do_not_specialize=["rows"])
def router(
    x,  # [rows, D]
    y,  # [rows, D]: as in `add_norm`, whose norm is multiplied then; or None
    norm,  # [D]: its weight
    weight,  # [E, D] float32
    bias,  # [E] float32, or None
    counter,  # int32, zero, and zero again at the end; None: experts are not chosen
    rows,
    total,  # as of `add_norm`
    normed,
    arranged,  # of `normed`, as by `route` (moe.py), like those that follow; or None
    logits,  # [rows, E] float32
    shares,
    chosen,
    pairs,
    groups,
    EPSILON: tl.constexpr,
    D: tl.constexpr,
    D_SLOTS: tl.constexpr,
    E: tl.constexpr,
    OUTPUTS: tl.constexpr,
    K: tl.constexpr,
    E_SLOTS: tl.constexpr,
    K_SLOTS: tl.constexpr,
    ROW_SLOTS: tl.constexpr,
):
    """One program for OUTPUTS experts of a row, which also computes the row's norm. The last one chooses the experts of
    all rows, up to ROW_SLOTS.
    """
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, D_SLOTS)
    inner, at = column < D, row * D + column
    value = tl.load(x + at, mask=inner, other=0.0)
    if y is not None:
        other = tl.load(y + at, mask=inner, other=0.0)
        added, value = _normed(value, other, norm, column, inner, D, EPSILON)
        if tl.program_id(1) == 0:
            tl.store(total + at, added, mask=inner)
            tl.store(normed + at, value, mask=inner)
            if arranged is not None:
                width: tl.constexpr = (D + 127) // 128 * 128
                place = arranged + row * width + arranged_place(column)
                tl.store(place, tl.where(inner, value, 0.0), mask=column < width)
    expert = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    real = expert < E
    of_weight = weight + expert[:, None] * D + column[None, :]
    weights = tl.load(of_weight, mask=real[:, None] & inner[None, :], other=0.0)
    logit = tl.sum(weights * value.to(tl.float32)[None, :], axis=1)
    if bias is not None:
        logit += tl.load(bias + expert, mask=real, other=0.0)
    tl.store(logits + row * E + expert, logit, mask=real)
    if counter is not None:
        tl.debug_barrier()  # the whole program has written
        done = tl.atomic_add(counter, 1, sem="acq_rel")
        if done == tl.num_programs(0) * tl.num_programs(1) - 1:
            choose(
                *(logits, 0, rows, shares, chosen, None, pairs, groups),
                *(E, K, E_SLOTS, K_SLOTS, ROW_SLOTS),
            )
            tl.store(counter, 0)


@triton.jit
def best_token(
    logits,  # [rows, COUNT]: of tokens, or the largest ones of stripes
    tokens,  # [rows, COUNT] int64: the best ones of stripes; None: `logits` are those of tokens
    logprobs,  # [rows, COUNT] float32: of these, each in its stripe, or None
    largest,  # [rows, stripes] float32: the largest logit of each stripe
    token,  # [rows, stripes] int64: the first one that has it
    logprob,  # [rows, stripes] float32: of this token in its stripe; not finite if a logit is NaN or infinity
    COUNT: tl.constexpr,
    STRIPE: tl.constexpr,  # a power of two
):
    """One program for each stripe of a row."""
    row, stripe = tl.program_id(0), tl.program_id(1)
    number = stripe * STRIPE + tl.arange(0, STRIPE)
    at, there = row.to(tl.int64) * COUNT + number, number < COUNT
    x = tl.load(logits + at, mask=there, other=-float("inf")).to(tl.float32)
    x = tl.where(x == x, x, float("inf"))  # a NaN is the largest; with an infinity, the sum is NaN
    top = tl.max(x, axis=0)
    share = tl.exp(x - tl.where(top == -float("inf"), 0.0, top))
    if tokens is not None:
        number = tl.load(tokens + at, mask=there, other=0).to(tl.int32)
        share *= tl.exp(-tl.load(logprobs + at, mask=there, other=0.0))
    out = row * tl.num_programs(1) + stripe
    tl.store(largest + out, top)
    tl.store(token + out, tl.min(tl.where(x == top, number, 0x7FFFFFFF), axis=0))
    tl.store(logprob + out, -tl.log(tl.sum(share, axis=0)))
