"""MoE: a layer of gated experts in MXFP4, for the few tokens of a verification. Semantics: `graph/experts.py`.

Most of the time goes into reading the 4-bit weights of the experts in use, so each weight is read once. Tokens are
grouped by expert, and a program computes a stripe of one expert's outputs for all of its tokens. The weights are the
left operand, because their many rows fill the tensor cores. The tokens, 16 columns or more, are the right one. Their
numbers are arranged once as the tensor cores take those of the weights, so that no step moves a number between threads.

There are five kernels. `route` selects experts, `group` groups tokens, `gate_up` and `down` are the grouped products,
and `combine` adds the experts of a token and the parts of their inputs. It adds in the order of their shares, so a
token's sum does not depend on the other tokens of the batch.

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


@triton.jit
def arranged_place(column):
    """Where a column lies among arranged ones: of 128 columns, a thread of the tensor cores reads the numbers of one
    group of 32, whose weights share a scale and lie together, 16 bytes.
    """
    number, word, group = column % 4, column // 4 % 8, column // 32 % 4
    return column // 128 * 128 + number * 32 + word // 2 * 8 + group * 2 + word % 2


@triton.jit(do_not_specialize=["rows"])
def route(
    router_logits,  # [rows, E] float32
    x,  # [rows, D], or None
    rows,
    shares,  # [rows, K] float32: softmax over the k best logits, best first
    chosen,  # [rows, K] int32: the expert of each pair
    counts,  # [programs, E] int32: the pairs of each expert among the program's rows; None with `pairs`
    arranged,  # [rows, D in whole blocks of 128]: x with its columns arranged, then zeros; None without x
    pairs,  # as in `group`, which one program does without; else None
    groups,
    E: tl.constexpr,
    K: tl.constexpr,
    E_SLOTS: tl.constexpr,
    K_SLOTS: tl.constexpr,
    ROW_SLOTS: tl.constexpr,
    D: tl.constexpr,  # as BLOCK, of x alone
    BLOCK: tl.constexpr,
):
    """The k experts with the largest logits of each row, and the pairs of each expert. Programs after those of the rows
    arrange columns, BLOCK each.
    """
    program = tl.program_id(0) - (rows + ROW_SLOTS - 1) // ROW_SLOTS
    if program >= 0:
        if x is not None:
            width: tl.constexpr = (D + 127) // 128 * 128
            blocks: tl.constexpr = (width + BLOCK - 1) // BLOCK
            token, column = (program // blocks).to(tl.int64), program % blocks * BLOCK + tl.arange(0, BLOCK)
            number = tl.load(x + token * D + column, mask=column < D, other=0.0)
            tl.store(arranged + token * width + arranged_place(column), number, mask=column < width)
    else:
        program = tl.program_id(0)
        choose(
            *(router_logits, program, rows, shares, chosen, counts, pairs, groups),
            *(E, K, E_SLOTS, K_SLOTS, ROW_SLOTS),
        )


@triton.jit
def choose(
    router_logits,
    part,  # of the rows, ROW_SLOTS each
    rows,
    shares,
    chosen,
    counts,
    pairs,
    groups,
    E: tl.constexpr,
    K: tl.constexpr,
    E_SLOTS: tl.constexpr,
    K_SLOTS: tl.constexpr,
    ROW_SLOTS: tl.constexpr,
):
    """The experts of a part of the rows. A row's shares are added up in their order, whatever kernel calls this."""
    expert, slot = tl.arange(0, E_SLOTS), tl.arange(0, K_SLOTS)
    row = part * ROW_SLOTS + tl.arange(0, ROW_SLOTS)
    real = row < rows
    free = real[:, None] & (expert < E)[None, :]
    at = router_logits + row[:, None] * E + expert[None, :]
    value = tl.load(at, mask=free, other=0.0, cache_modifier=".cg")  # other programs may just have written
    # NaN is larger than nothing, so no expert would be chosen. Such a row gets any, and shares of NaN.
    broken = tl.max((value != value).to(tl.int32), axis=1) > 0
    value = tl.where(broken[:, None], 0.0, value)
    weight, summed = tl.zeros([ROW_SLOTS, K_SLOTS], tl.float32), tl.zeros([ROW_SLOTS], tl.float32)
    most = tl.where(real, tl.max(tl.where(free, value, -float("inf")), axis=1), 0.0)
    taken, slots = tl.zeros([ROW_SLOTS, E_SLOTS], tl.int32), tl.zeros([ROW_SLOTS, E_SLOTS], tl.int32)
    for s in tl.static_range(K):
        largest = tl.max(tl.where(free, value, -float("inf")), axis=1)
        best = tl.min(tl.where(free & (value == largest[:, None]), expert[None, :], E_SLOTS), axis=1)
        tl.store(chosen + row * K + s, best, mask=real)
        power = tl.where(real, tl.exp(largest - most), 1.0)
        weight, summed = tl.where(slot[None, :] == s, power[:, None], weight), summed + power
        mine = (expert[None, :] == best[:, None]) & real[:, None]
        taken, slots = taken + mine.to(tl.int32), slots + tl.where(mine, s, 0)
        free = free & (expert[None, :] != best[:, None])
    weight = weight / tl.where(broken, float("nan"), summed)[:, None]
    pair = row[:, None] * K + slot[None, :]
    tl.store(shares + pair, weight, mask=real[:, None] & (slot < K)[None, :])
    count = tl.sum(taken, axis=0)
    if pairs is None:
        tl.store(counts + part * E + expert, count, mask=expert < E)
    else:
        first = tl.cumsum(count, axis=0) - count
        _list_groups(groups, first, count, E)
        place = first[None, :] + tl.cumsum(taken, axis=0) - taken
        tl.store(pairs + place, row[:, None] * K + slots, mask=taken > 0)


@triton.jit
def _list_groups(groups, first, count, E: tl.constexpr):
    expert = tl.arange(0, count.shape[0])
    used = (count > 0).to(tl.int32)
    idle = ((count == 0) & (expert < E)).to(tl.int32)
    order = tl.where(used == 1, tl.cumsum(used, axis=0) - 1, tl.sum(used) + tl.cumsum(idle, axis=0) - 1)
    tl.store(groups + order * 3, expert, mask=expert < E)
    tl.store(groups + order * 3 + 1, first, mask=expert < E)
    tl.store(groups + order * 3 + 2, count, mask=expert < E)


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
        _list_groups(groups, first, count, E)

    row = program * ROW_SLOTS + tl.arange(0, ROW_SLOTS)
    taken, slots = tl.zeros([ROW_SLOTS, E_SLOTS], tl.int32), tl.zeros([ROW_SLOTS, E_SLOTS], tl.int32)
    for s in tl.static_range(K):
        best = tl.load(chosen + row * K + s, mask=row < rows, other=E_SLOTS)
        mine = expert[None, :] == best[:, None]
        taken, slots = taken + mine.to(tl.int32), slots + tl.where(mine, s, 0)
    place = (first + before)[None, :] + tl.cumsum(taken, axis=0) - taken
    tl.store(pairs + place, row[:, None] * K + slots, mask=taken > 0)


@triton.jit
def pairs_of(groups):
    """The expert of this program, its first pair and the number of its pairs."""
    group = tl.program_id(1) * 3
    return tl.load(groups + group), tl.load(groups + group + 1), tl.load(groups + group + 2)


@triton.jit
def _weight(words, scale, BRAIN: tl.constexpr):
    """Numbers [N, 128] in the order of arranged columns, of words [N, 32] of four E2M1 numbers and scales
    2**(byte - 127) [N, 4]: bfloat16 (BRAIN) or float16; see _KEPT.
    """
    if BRAIN:
        bits = tl.minimum(scale.to(tl.int32) + 63, 255) << 7
    else:
        bits = tl.minimum(tl.maximum(scale.to(tl.int32) - 98, 0), 31) << 10
    rows: tl.constexpr = words.shape[0]
    powers = tl.reshape(tl.broadcast_to(bits.to(tl.int16)[:, :, None], [rows, 4, 8]), [rows, 32])
    if BRAIN:
        parts = tl.inline_asm_elementwise(
            _TO_BF16,
            _REGISTERS,
            [words, powers],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        parts = tl.inline_asm_elementwise(
            _TO_FP16,
            _REGISTERS,
            [words, powers],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    # Row, group, three bits of the word, two bits of the number.
    bits_apart = tl.join(tl.join(parts[0], parts[2]), tl.join(parts[1], parts[3]))
    bits_apart = tl.reshape(bits_apart, [rows, 4, 2, 2, 2, 2, 2])
    return tl.reshape(tl.permute(bits_apart, (0, 5, 6, 2, 3, 1, 4)), [rows, 128])


@triton.jit
def _sums(
    x,  # arranged columns
    blocks,
    scales,
    row,  # of the weights, for each output
    token,
    in_token,
    begin,
    end,
    IN: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """The sums [rows, tokens] of inputs from `begin` to `end`, in float32."""
    total = tl.zeros([row.shape[0], TOKENS], tl.float32)
    of_words = blocks.to(tl.pointer_type(tl.uint16)) + row[:, None] * (IN // 4)
    of_scales = scales + row[:, None] * (IN // 32)
    of_columns = x + token[None, :].to(tl.int64) * ((IN + 127) // 128 * 128)
    group, word, column = tl.arange(0, 4), tl.arange(0, 32), tl.arange(0, 128)
    first = begin // 32 + group
    scale = tl.load(of_scales + first[None, :], mask=(first < IN // 32)[None, :], other=0)
    for k in range(begin, end, 128):
        # The compiler pipelines words and columns. Scales, of a byte each, are fetched one step ahead.
        following = (k + 128) // 32 + group
        next_scale = tl.load(of_scales + following[None, :], mask=(following < IN // 32)[None, :], other=0)
        at_word = k // 4 + word
        words = tl.load(of_words + at_word[None, :], mask=(at_word < IN // 4)[None, :], other=0)
        # Without the mask, all programs would read one row of x over and over for tokens that are not there.
        columns = tl.load(of_columns + (k + column)[:, None], mask=in_token[None, :], other=0.0)
        total = tl.dot(_weight(words, scale, x.dtype.element_ty == tl.bfloat16), columns, acc=total)
        scale = next_scale
    return total * _KEPT if x.dtype.element_ty == tl.bfloat16 else total


@triton.jit
def gate_up(
    x,  # [rows, D in whole blocks of 128] bfloat16 or float16: arranged columns
    pairs,
    groups,
    blocks,  # [E, 2I, D/32, 16] bytes
    scales,  # [E, 2I, D/32] bytes
    bias,  # [E, 2I] of x's type, or None
    activated,  # [rows * K, I in whole blocks of 128] of x's type, in the order of `pairs`: arranged columns
    D: tl.constexpr,
    INNER: tl.constexpr,
    K: tl.constexpr,
    ALPHA: tl.constexpr,
    BETA: tl.constexpr,
    LIMIT: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """One program for ROWS of an expert's gates and up rows, which take turns, for all of its tokens."""
    expert, first, count = pairs_of(groups)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = expert.to(tl.int64) * (2 * INNER) + tl.minimum(row, 2 * INNER - 1)
    out = tl.program_id(0) * (ROWS // 2) + tl.arange(0, ROWS // 2)
    place_of = arranged_place(out)
    for start in range(0, count, TOKENS):
        place = start + tl.arange(0, TOKENS)
        in_token = place < count
        token = tl.load(pairs + first + place, mask=in_token, other=0) // K
        # Columns after the last are zeros. A program may have no others.
        last = tl.where(tl.program_id(0) * ROWS < 2 * INNER, D, 0)
        total = _sums(x, blocks, scales, row, token, in_token, 0, last, D, TOKENS)
        if bias is not None:
            total += tl.load(bias + row).to(tl.float32)[:, None]
        gate, up = tl.split(tl.permute(tl.reshape(total, [ROWS // 2, 2, TOKENS]), (0, 2, 1)))
        # A NaN must reach the logits, which are checked.
        gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        value = (up + BETA) * gate * (1 / (1 + tl.exp(-ALPHA * gate)))
        value = tl.where((out < INNER)[:, None], value, 0.0)
        at = activated + (first + place)[None, :] * ((INNER + 127) // 128 * 128) + place_of[:, None]
        inside = (out < (INNER + 127) // 128 * 128)[:, None] & in_token[None, :]
        tl.store(at, value.to(activated.dtype.element_ty), mask=inside)


@triton.jit
def down(
    activated,
    shares,
    pairs,
    groups,
    blocks,  # [E, D, I/32, 16] bytes
    scales,  # [E, D, I/32] bytes
    bias,  # [E, D] of activated's type, or None
    outputs,  # [rows * K * PARTS, D] float32, by pair and part of the inputs, multiplied by the pair's share
    D: tl.constexpr,
    INNER: tl.constexpr,
    PARTS: tl.constexpr,
    SPAN: tl.constexpr,  # inputs of a part, a multiple of 128
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """One program for ROWS of an expert's outputs and a part of the inputs, for all of its tokens."""
    expert, first, count = pairs_of(groups)
    part = tl.program_id(0) % PARTS
    out = tl.program_id(0) // PARTS * ROWS + tl.arange(0, ROWS)
    row = expert.to(tl.int64) * D + tl.minimum(out, D - 1)
    for start in range(0, count, TOKENS):
        place = start + tl.arange(0, TOKENS)
        in_token = place < count
        end = min(part * SPAN + SPAN, INNER)
        y = _sums(activated, blocks, scales, row, first + place, in_token, part * SPAN, end, INNER, TOKENS)
        if bias is not None:
            y += tl.where(part == 0, tl.load(bias + row).to(tl.float32), 0.0)[:, None]
        pair = tl.load(pairs + first + place, mask=in_token, other=0)
        y *= tl.load(shares + pair, mask=in_token, other=0.0)[None, :]
        at = outputs + (pair[None, :] * PARTS + part) * D + out[:, None]
        tl.store(at, y, mask=(out < D)[:, None] & in_token[None, :])


@triton.jit
def combine(
    outputs,  # [rows * PARTS, D] float32
    like,  # a tensor with y's shape and type, which tells TensorRT about y; never read
    y,  # [rows, D]
    D: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The parts of a token, added in the order of its experts' shares and of their inputs."""
    row, column = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for s in tl.static_range(PARTS):
        total += tl.load(outputs + (row * PARTS + s) * D + column, mask=column < D, other=0.0)
    tl.store(y + row * D + column, total.to(y.dtype.element_ty), mask=column < D)
