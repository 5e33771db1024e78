"""The products of MoE for whole chunks of a prompt on sm_100: tokens in MXFP8, times MXFP4 weights as they are stored.

The tensor cores multiply both with their scales, so no weight is unpacked. Rounding the tokens to MXFP8 changes the
result, and a token must have the same numbers whether it is drafted or not. So only passes of exactly WHOLE rows, which
are whole chunks, are computed so; all others call the kernels of moe.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dflash_plugins.kernels import moe


@triton.jit(do_not_specialize=["rows"])
def quantize(
    x,  # [n, D] bfloat16 or float16
    shares,  # [rows, K], which tells TensorRT the rows of the pass; never read
    rows,
    numbers,  # [n, D] bytes: E4M3
    powers,  # [n, D/32] bytes: 2**(byte - 127) for 32 numbers
    D: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The power is the least at which no number is larger than 448, the largest of E4M3."""
    if rows == WHOLE:
        row, part = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
        column, group = part + tl.arange(0, BLOCK), part // 32 + tl.arange(0, BLOCK // 32)
        value = tl.load(x + row * D + column, mask=column < D, other=0.0).to(tl.float32)
        value = tl.reshape(value, [BLOCK // 32, 32])
        bits = tl.max(tl.abs(value), axis=1).to(tl.int32, bitcast=True)
        above = ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)  # 448 is 1.75 * 2**8
        power = tl.maximum((bits >> 23) - 8 + above, 0)
        inverse = ((254 - power) << 23).to(tl.float32, bitcast=True)
        number = tl.reshape((value * inverse[:, None]).to(tl.float8e4nv), [BLOCK])
        tl.store(numbers + row * D + column, number.to(tl.uint8, bitcast=True), mask=column < D)
        tl.store(powers + row * (D // 32) + group, power.to(tl.uint8), mask=group < D // 32)


@triton.jit
def _packed(blocks, row, in_row, k, WIDTH: tl.constexpr, BLOCK_K: tl.constexpr):
    """Two numbers in each byte."""
    pair = k // 2 + tl.arange(0, BLOCK_K // 2)
    at = blocks + row[:, None] * (WIDTH // 2) + pair[None, :]
    return tl.load(at, mask=in_row[:, None] & (pair < WIDTH // 2)[None, :], other=0)


@triton.jit
def _numbers(numbers, token, in_token, k, WIDTH: tl.constexpr, BLOCK_K: tl.constexpr):
    """The numbers of tokens, [BLOCK_K, tokens]."""
    column = k + tl.arange(0, BLOCK_K)
    at = numbers + token[:, None] * WIDTH + column[None, :]
    there = tl.load(at, mask=in_token[:, None] & (column < WIDTH)[None, :], other=0)
    return tl.trans(there.to(tl.float8e4nv, bitcast=True))


@triton.jit(do_not_specialize=["rows"])
def gate_up(
    x,
    numbers,  # of `quantize`, for x
    powers,
    pairs,
    groups,
    blocks,
    scales,
    bias,
    rows,
    activated,
    D: tl.constexpr,
    INNER: tl.constexpr,
    K: tl.constexpr,
    ALPHA: tl.constexpr,
    BETA: tl.constexpr,
    LIMIT: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """As moe.gate_up."""
    if rows == WHOLE:
        expert, first, count = moe.pairs_of(groups)
        out = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        in_row = out < INNER
        row = expert.to(tl.int64) * (2 * INNER) + 2 * out
        for start in range(0, count, TOKENS):
            place = start + tl.arange(0, TOKENS)
            in_token = place < count
            token = tl.load(pairs + first + place, mask=in_token, other=0) // K
            gate, up = tl.zeros([BLOCK_N, TOKENS], tl.float32), tl.zeros([BLOCK_N, TOKENS], tl.float32)
            for k in range(0, D, BLOCK_K):
                right = _numbers(numbers, token, in_token, k, D, BLOCK_K)
                power = moe.scales_of(powers, token, in_token, k, D, BLOCK_K)
                weight = _packed(blocks, row, in_row, k, D, BLOCK_K)
                scale = moe.scales_of(scales, row, in_row, k, D, BLOCK_K)
                gate = tl.dot_scaled(weight, scale, "e2m1", right, power, "e4m3", acc=gate)
                weight = _packed(blocks, row + 1, in_row, k, D, BLOCK_K)
                scale = moe.scales_of(scales, row + 1, in_row, k, D, BLOCK_K)
                up = tl.dot_scaled(weight, scale, "e2m1", right, power, "e4m3", acc=up)
            value = moe.activate(gate, up, bias, row, in_row, ALPHA, BETA, LIMIT)
            at = activated + (first + place)[None, :] * INNER + out[:, None]
            tl.store(at, value.to(activated.dtype.element_ty), mask=in_row[:, None] & in_token[None, :])
    else:
        moe.gate_up(
            *(x, pairs, groups, blocks, scales, bias, activated),
            *(D, INNER, K, ALPHA, BETA, LIMIT, BLOCK_N, BLOCK_K, TOKENS),
        )


@triton.jit(do_not_specialize=["rows"])
def down(
    activated,
    numbers,  # of `quantize`, for activated
    powers,
    shares,
    pairs,
    groups,
    blocks,
    scales,
    bias,
    rows,
    outputs,
    D: tl.constexpr,
    INNER: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """As moe.down."""
    if rows == WHOLE:
        expert, first, count = moe.pairs_of(groups)
        out = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        in_row = out < D
        row = expert.to(tl.int64) * D + out
        for start in range(0, count, TOKENS):
            place = start + tl.arange(0, TOKENS)
            in_token = place < count
            y = tl.zeros([BLOCK_N, TOKENS], tl.float32)
            for k in range(0, INNER, BLOCK_K):
                right = _numbers(numbers, first + place, in_token, k, INNER, BLOCK_K)
                power = moe.scales_of(powers, first + place, in_token, k, INNER, BLOCK_K)
                weight = _packed(blocks, row, in_row, k, INNER, BLOCK_K)
                scale = moe.scales_of(scales, row, in_row, k, INNER, BLOCK_K)
                y = tl.dot_scaled(weight, scale, "e2m1", right, power, "e4m3", acc=y)
            moe.write_shared(y, bias, row, in_row, pairs, first + place, in_token, shares, outputs, out, D)
    else:
        moe.down(
            *(activated, shares, pairs, groups, blocks, scales, bias, outputs),
            *(D, INNER, BLOCK_N, BLOCK_K, TOKENS),
        )
