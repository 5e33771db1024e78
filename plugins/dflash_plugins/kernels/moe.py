"""MoE: a layer of gated experts in MXFP4, for the few tokens of a verification. Semantics: `graph/experts.py`.

Most of the time goes into reading the 4-bit weights of the experts in use, so each weight is read once. Tokens are
grouped by expert, and a program computes a stripe of one expert's outputs for all of its tokens. The weights are the
left operand, because their many rows fill the tensor cores. The tokens, 16 columns, are the right one.

There are five kernels. `route` selects experts, `group` groups tokens, `gate_up` and `down` are the grouped products,
and `combine` adds the experts of a token. It adds in the order of their shares, so a token's sum does not depend on the
other tokens of the batch.

A pair is a token and one of its k experts: number token * k + slot. `down` writes by pair, `gate_up` in grouped
order.
"""

from __future__ import annotations

import triton
import triton.language as tl


def _unpacking(numbers: str, bits: int, shifts: tuple[int, ...]) -> str:
    """Instructions that make four pairs of numbers of twice 16 bits, $4, times two scales, $5.

    Pair i is nibble i of both. A nibble is a sign, two bits of exponent and one of mantissa. `bits`: the places of the
    last three in two 16-bit floats. `shifts`: to the left, from each nibble to there. Such a float is too small by a
    power of two, also if it is subnormal. The scales make up for that.

    sm_89 has no multiplication of two bfloat16. Adding -0 to a product changes no bit of it.
    """
    lines = ["{", ".reg .b32 number, sign, nothing;", "mov.b32 nothing, 0x80008000;"]
    for i, shift in enumerate(shifts):
        move = f"shl.b32 number, $4, {shift};" if shift > 0 else f"shr.u32 number, $4, {-shift};"
        lines += [move, f"and.b32 number, number, {bits:#010x};", f"shl.b32 sign, $4, {12 - 4 * i};"]
        lines += ["and.b32 sign, sign, 0x80008000;", "or.b32 number, number, sign;"]
        lines.append(f"fma.rn.{numbers} ${i}, number, $5, nothing;")
    return "\n".join([*lines, "}"])


_TO_BF16 = tl.constexpr(_unpacking("bf16x2", 0x01C001C0, (6, 2, -2, -6)))
_TO_FP16 = tl.constexpr(_unpacking("f16x2", 0x0E000E00, (9, 5, 1, -3)))
_REGISTERS = tl.constexpr("=r,=r,=r,=r,r,r")
# A bfloat16 of a nibble's bits is 2**-126 of its value. Sums are kept at 2**-63 of theirs. So scales from 2**-69 to
# 2**64 are exact. A float16 is 2**-14 of the value, and scales up to 2 fit. Larger scales give infinities.
_KEPT = tl.constexpr(2.0**63)


@triton.jit(do_not_specialize=["rows"])
def route(
    router_logits,  # [rows, E] float32
    rows,
    shares,  # [rows, K] float32: softmax over the k best logits, best first
    chosen,  # [rows, K] int32: the expert of each pair
    counts,  # [programs, E] int32: the pairs of each expert among the program's rows
    E: tl.constexpr,
    K: tl.constexpr,
    E_SLOTS: tl.constexpr,
    K_SLOTS: tl.constexpr,
    ROW_SLOTS: tl.constexpr,
):
    """The k experts with the largest logits of each row, and the pairs of each expert."""
    expert, slot = tl.arange(0, E_SLOTS), tl.arange(0, K_SLOTS)
    row = tl.program_id(0) * ROW_SLOTS + tl.arange(0, ROW_SLOTS)
    real = row < rows
    free = real[:, None] & (expert < E)[None, :]
    x = tl.load(router_logits + row[:, None] * E + expert[None, :], mask=free, other=0.0)
    # NaN is larger than nothing, so no expert would be chosen. Such a row gets any, and shares of NaN.
    broken = (tl.max((x != x).to(tl.int32), axis=1) > 0)[:, None]
    x = tl.where(broken, 0.0, x)
    logit = tl.full([ROW_SLOTS, K_SLOTS], -float("inf"), tl.float32)
    count = tl.zeros([E_SLOTS], tl.int32)
    for s in tl.static_range(K):
        largest = tl.max(tl.where(free, x, -float("inf")), axis=1)
        best = tl.min(tl.where(free & (x == largest[:, None]), expert[None, :], E_SLOTS), axis=1)
        tl.store(chosen + row * K + s, best, mask=real)
        logit = tl.where(slot[None, :] == s, largest[:, None], logit)
        taken = expert[None, :] == best[:, None]
        count += tl.sum((taken & real[:, None]).to(tl.int32), axis=0)
        free = free & (expert[None, :] != best[:, None])
    logit = tl.where(real[:, None], logit, 0.0)
    weight = tl.exp(logit - tl.max(logit, axis=1)[:, None])
    weight = tl.where(broken, float("nan"), weight / tl.sum(weight, axis=1)[:, None])
    pair = row[:, None] * K + slot[None, :]
    tl.store(shares + pair, weight, mask=real[:, None] & (slot < K)[None, :])
    tl.store(counts + tl.program_id(0) * E + expert, count, mask=expert < E)


@triton.jit(do_not_specialize=["rows"])
def group(
    chosen,
    counts,
    rows,
    pairs,  # [rows * K] int32: the pairs, by expert and then by token
    groups,  # [E, 3] int32: expert, its first index in `pairs`, its number of pairs; experts in use come first
    E: tl.constexpr,
    K: tl.constexpr,
    E_SLOTS: tl.constexpr,
    ROW_SLOTS: tl.constexpr,
    PART_SLOTS: tl.constexpr,
):
    """The pairs in the order of their experts."""
    expert, program = tl.arange(0, E_SLOTS), tl.program_id(0)
    count, before = tl.zeros([E_SLOTS], tl.int32), tl.zeros([E_SLOTS], tl.int32)
    for start in range(0, tl.num_programs(0), PART_SLOTS):
        part = start + tl.arange(0, PART_SLOTS)
        there = (part < tl.num_programs(0))[:, None] & (expert < E)[None, :]
        counted = tl.load(counts + part[:, None] * E + expert[None, :], mask=there, other=0)
        count += tl.sum(counted, axis=0)
        before += tl.sum(tl.where((part < program)[:, None], counted, 0), axis=0)
    first = tl.cumsum(count, axis=0) - count

    if program == 0:
        used = (count > 0).to(tl.int32)
        idle = ((count == 0) & (expert < E)).to(tl.int32)
        order = tl.where(used == 1, tl.cumsum(used, axis=0) - 1, tl.sum(used) + tl.cumsum(idle, axis=0) - 1)
        tl.store(groups + order * 3, expert, mask=expert < E)
        tl.store(groups + order * 3 + 1, first, mask=expert < E)
        tl.store(groups + order * 3 + 2, count, mask=expert < E)

    row = program * ROW_SLOTS + tl.arange(0, ROW_SLOTS)
    real = row < rows
    taken = tl.zeros([ROW_SLOTS, E_SLOTS], tl.int32)
    for s in tl.static_range(K):
        best = tl.load(chosen + row * K + s, mask=real, other=E_SLOTS)
        taken += (expert[None, :] == best[:, None]).to(tl.int32)
    place = (first + before)[None, :] + tl.cumsum(taken, axis=0) - taken
    for s in tl.static_range(K):
        best = tl.load(chosen + row * K + s, mask=real, other=E_SLOTS)
        at = tl.sum(tl.where(expert[None, :] == best[:, None], place, 0), axis=1)
        tl.store(pairs + at, row * K + s, mask=real)


@triton.jit
def pairs_of(groups):
    """The expert of this program, its first pair and the number of its pairs."""
    group = tl.program_id(1) * 3
    return tl.load(groups + group), tl.load(groups + group + 1), tl.load(groups + group + 2)


@triton.jit
def scales_of(scales, row, in_row, k, WIDTH: tl.constexpr, BLOCK_K: tl.constexpr):
    """The scales [rows, BLOCK_K / 32] of numbers from k on."""
    scale = k // 32 + tl.arange(0, BLOCK_K // 32)
    at = scales + row[:, None] * (WIDTH // 32) + scale[None, :]
    return tl.load(at, mask=in_row[:, None] & (scale < WIDTH // 32)[None, :], other=0)


@triton.jit
def _blocks(blocks, row, in_row, k, WIDTH: tl.constexpr, BLOCK_K: tl.constexpr):
    """Four numbers in each 16 bits."""
    four = k // 4 + tl.arange(0, BLOCK_K // 4)
    at = blocks.to(tl.pointer_type(tl.uint16)) + row[:, None] * (WIDTH // 4) + four[None, :]
    return tl.load(at, mask=in_row[:, None] & (four < WIDTH // 4)[None, :], other=0)


@triton.jit
def _columns(x, token, in_token, k, WIDTH: tl.constexpr, BLOCK_K: tl.constexpr):
    """The numbers of tokens, [BLOCK_K / 4, tokens] for each of the four in 16 bits of weights."""
    column = k + tl.arange(0, BLOCK_K)
    at = x + token[:, None] * WIDTH + column[None, :]
    numbers = tl.load(at, mask=in_token[:, None] & (column < WIDTH)[None, :], other=0.0)
    even, odd = tl.split(tl.reshape(numbers, [token.shape[0], BLOCK_K // 4, 2, 2]))
    zeroth, second = tl.split(even)
    first, third = tl.split(odd)
    return tl.trans(zeroth), tl.trans(first), tl.trans(second), tl.trans(third)


@triton.jit
def _product(weight, scale, columns, total):
    """total + weight @ columns, of E2M1 numbers with scales 2**(byte - 127) [N, K/32]; see _KEPT."""
    if columns[0].dtype == tl.bfloat16:
        bits = tl.minimum(scale.to(tl.int32) + 63, 255) << 7
    else:
        bits = tl.minimum(tl.maximum(scale.to(tl.int32) - 98, 0), 31) << 10
    rows: tl.constexpr = weight.shape[0]
    groups: tl.constexpr = scale.shape[1]
    each = tl.reshape(tl.broadcast_to(bits.to(tl.int16)[:, :, None], [rows, groups, 8]), [rows, 8 * groups])
    if columns[0].dtype == tl.bfloat16:
        parts = tl.inline_asm_elementwise(
            _TO_BF16,
            _REGISTERS,
            [weight, each],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        parts = tl.inline_asm_elementwise(
            _TO_FP16,
            _REGISTERS,
            [weight, each],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    for i in tl.static_range(4):
        total = tl.dot(parts[i], columns[i], acc=total)
    return total


@triton.jit
def activate(gate, up, bias, row, in_row, ALPHA: tl.constexpr, BETA: tl.constexpr, LIMIT: tl.constexpr):
    """The activation of sums [N, tokens] in float32. `row`: of each gate; its up row is the next one."""
    if bias is not None:
        gate += tl.load(bias + row, mask=in_row, other=0.0).to(tl.float32)[:, None]
        up += tl.load(bias + row + 1, mask=in_row, other=0.0).to(tl.float32)[:, None]
    # A NaN must reach the logits, which are checked.
    gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    up = tl.clamp(up, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    return (up + BETA) * gate * (1 / (1 + tl.exp(-ALPHA * gate)))


@triton.jit
def write_shared(y, bias, row, in_row, pairs, place, in_token, shares, outputs, out, D: tl.constexpr):
    """Write sums [N, tokens] in float32, times the shares of the pairs at `place`."""
    if bias is not None:
        y += tl.load(bias + row, mask=in_row, other=0.0).to(tl.float32)[:, None]
    pair = tl.load(pairs + place, mask=in_token, other=0)
    y *= tl.load(shares + pair, mask=in_token, other=0.0)[None, :]
    tl.store(outputs + pair[None, :] * D + out[:, None], y, mask=in_row[:, None] & in_token[None, :])


@triton.jit
def gate_up(
    x,  # [rows, D] bfloat16 or float16
    pairs,
    groups,
    blocks,  # [E, 2I, D/32, 16] bytes
    scales,  # [E, 2I, D/32] bytes
    bias,  # [E, 2I] of x's type, or None
    activated,  # [rows * K, I] of x's type, in the order of `pairs`
    D: tl.constexpr,
    INNER: tl.constexpr,
    K: tl.constexpr,
    ALPHA: tl.constexpr,
    BETA: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """One program for a stripe of an expert's gates and up rows, for all of its tokens."""
    expert, first, count = pairs_of(groups)
    out = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_row = out < INNER
    row = expert.to(tl.int64) * (2 * INNER) + 2 * out  # gate rows; each up row is the next one
    for start in range(0, count, TOKENS):
        place = start + tl.arange(0, TOKENS)
        in_token = place < count
        token = tl.load(pairs + first + place, mask=in_token, other=0) // K
        gate, up = tl.zeros([BLOCK_N, TOKENS], tl.float32), tl.zeros([BLOCK_N, TOKENS], tl.float32)
        gate_scale = scales_of(scales, row, in_row, 0, D, BLOCK_K)
        up_scale = scales_of(scales, row + 1, in_row, 0, D, BLOCK_K)
        columns = _columns(x, token, in_token, 0, D, BLOCK_K)
        for k in range(0, D, BLOCK_K):
            # The compiler pipelines the weights. The other operands are fetched one step ahead.
            next_columns = _columns(x, token, in_token, k + BLOCK_K, D, BLOCK_K)
            next_gate_scale = scales_of(scales, row, in_row, k + BLOCK_K, D, BLOCK_K)
            next_up_scale = scales_of(scales, row + 1, in_row, k + BLOCK_K, D, BLOCK_K)
            gate_weight = _blocks(blocks, row, in_row, k, D, BLOCK_K)
            up_weight = _blocks(blocks, row + 1, in_row, k, D, BLOCK_K)
            gate = _product(gate_weight, gate_scale, columns, gate)
            up = _product(up_weight, up_scale, columns, up)
            columns, gate_scale, up_scale = next_columns, next_gate_scale, next_up_scale
        if x.dtype.element_ty == tl.bfloat16:
            gate, up = gate * _KEPT, up * _KEPT
        value = activate(gate, up, bias, row, in_row, ALPHA, BETA, LIMIT)
        at = activated + (first + place)[None, :] * INNER + out[:, None]
        tl.store(at, value.to(activated.dtype.element_ty), mask=in_row[:, None] & in_token[None, :])


@triton.jit
def down(
    activated,  # [rows * K, I], in the order of `pairs`
    shares,
    pairs,
    groups,
    blocks,  # [E, D, I/32, 16] bytes
    scales,  # [E, D, I/32] bytes
    bias,  # [E, D] of activated's type, or None
    outputs,  # [rows * K, D] float32, by pair, multiplied by its share
    D: tl.constexpr,
    INNER: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """One program for a stripe of an expert's outputs, for all of its tokens."""
    expert, first, count = pairs_of(groups)
    out = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_row = out < D
    row = expert.to(tl.int64) * D + out
    for start in range(0, count, TOKENS):
        place = start + tl.arange(0, TOKENS)
        in_token = place < count
        y = tl.zeros([BLOCK_N, TOKENS], tl.float32)
        scale = scales_of(scales, row, in_row, 0, INNER, BLOCK_K)
        columns = _columns(activated, first + place, in_token, 0, INNER, BLOCK_K)
        for k in range(0, INNER, BLOCK_K):
            next_columns = _columns(activated, first + place, in_token, k + BLOCK_K, INNER, BLOCK_K)
            next_scale = scales_of(scales, row, in_row, k + BLOCK_K, INNER, BLOCK_K)
            weight = _blocks(blocks, row, in_row, k, INNER, BLOCK_K)
            y = _product(weight, scale, columns, y)
            columns, scale = next_columns, next_scale
        if activated.dtype.element_ty == tl.bfloat16:
            y = y * _KEPT
        write_shared(y, bias, row, in_row, pairs, first + place, in_token, shares, outputs, out, D)


@triton.jit
def combine(
    outputs,  # [rows * K, D] float32
    like,  # a tensor with y's shape and type, which tells TensorRT about y; never read
    y,  # [rows, D]
    D: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The experts of a token, added in the order of their shares."""
    row, column = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for s in tl.static_range(K):
        total += tl.load(outputs + (row * K + s) * D + column, mask=column < D, other=0.0)
    tl.store(y + row * D + column, total.to(y.dtype.element_ty), mask=column < D)
