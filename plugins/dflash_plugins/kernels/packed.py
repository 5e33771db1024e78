"""Products with a weight [OUT, IN], or one of each expert: of x's type ("plain"), or codes of four or eight bits with
scales, which are multiplied as they are stored.

A code stands for number * factor + zero term, computed in float32 and rounded to x's type, as the operators of torch
widen it. The weights are the left operand of the tensor cores, the tokens the right one, as in moe.py.

A row's bits do not depend on the other rows. A program adds up some of the inputs for a stripe of outputs and a piece
of TOKENS rows, and the last one adds what the others wrote, in their order. The pieces of a stripe run at once, and
share its weights in the cache. Of an expert, a program adds up all inputs for all rows that chose it, a few at a time:
several experts keep the memory busy.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dflash_plugins.kernels.layers import place

# The bits of 2**23 in float32: a whole number in the low bits is added to it.
_WHOLE = tl.constexpr(0x4B000000)


@triton.constexpr_function
def _unpacking(codes: str, brain: bool, multiplied: bool) -> str:
    """Instructions that make pairs of numbers of twice 16 bits: pair i is code i of both, and exact in 16-bit floats.
    With `multiplied`, each is multiplied by its factor, of the same type.

    An integer is put into the low bits of a power of two, which is subtracted again. The bits of an E2M1 or E4M3 number
    make a float that is too small by a power of two, also if it is subnormal.

    sm_89 has no multiplication of two bfloat16. Adding -0 to a product changes no bit of it.
    """
    numbers, words = "bf16x2" if brain else "f16x2", 2 if codes == "e4m3" else 4
    source, one, fraction, bias = f"${words}", *((0x3F80, 7, 127) if brain else (0x3C00, 10, 15))
    if codes == "int4":
        power = bias + fraction << fraction  # the bits of 2**fraction
        up, less = one, 0x8000 | power | 8
    else:
        exponent, mantissa = (1, 1) if codes == "e2m1" else (7, 3)
        up, less = 2 * bias - exponent << fraction, 0x8000
        # The lowest bit, and the bits of a magnitude.
        top, width = fraction - mantissa, 3 if codes == "e2m1" else 7
    lines = ["{", ".reg .b32 number, sign, nothing, up, less;", "mov.b32 nothing, 0x80008000;"]
    lines += [f"mov.b32 up, {up * 0x10001:#010x};", f"mov.b32 less, {less * 0x10001:#010x};"]
    for i in range(words):
        if codes == "int4":
            lines += [f"shr.u32 number, {source}, {4 * i};", "and.b32 number, number, 0x000f000f;"]
            lines.append(f"xor.b32 number, number, {(power | 8) * 0x10001:#010x};")
        else:
            shift, size = top - (width + 1) * i, width + 1
            move = (
                f"shl.b32 number, {source}, {shift};" if shift > 0 else f"shr.u32 number, {source}, {-shift};"
            )
            lines += [move, f"and.b32 number, number, {((1 << width) - 1 << top) * 0x10001:#010x};"]
            lines += [f"shl.b32 sign, {source}, {16 - size * (i + 1)};", "and.b32 sign, sign, 0x80008000;"]
            lines.append("or.b32 number, number, sign;")
        lines.append(f"fma.rn.{numbers} {'number' if multiplied else f'${i}'}, number, up, less;")
        if multiplied:
            lines.append(f"fma.rn.{numbers} ${i}, number, ${words + 1}, nothing;")
    return "\n".join([*lines, "}"])


@triton.jit
def _e4m3(bits):
    """E4M3 numbers of bytes in 32 bits, as float32."""
    magnitude = ((bits & 0x7F) << 20).to(tl.float32, bitcast=True) * 2.0**120
    value = tl.where((bits & 0x80) != 0, -magnitude, magnitude)
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def _unpacked(words, factor, CODES: tl.constexpr, BRAIN: tl.constexpr, EXACT: tl.constexpr):
    """The bits of the numbers of two or four codes in each word. With EXACT, `factor`, in 16 bits, multiplies them."""
    text: tl.constexpr = _unpacking(CODES, BRAIN, EXACT)
    parts = (words, factor) if EXACT else (words,)
    if CODES == "e4m3":
        two: tl.constexpr = "=r,=r,r,r" if EXACT else "=r,=r,r"
        return tl.inline_asm_elementwise(text, two, parts, dtype=(tl.int16, tl.int16), is_pure=True, pack=2)
    else:
        four: tl.constexpr = "=r,=r,=r,=r,r,r" if EXACT else "=r,=r,=r,=r,r"
        return tl.inline_asm_elementwise(
            text, four, parts, dtype=(tl.int16, tl.int16, tl.int16, tl.int16), is_pure=True, pack=2
        )


@triton.jit
def _weight(
    words,
    parts,
    factor,
    zero,
    PART: tl.constexpr,
    CODES: tl.constexpr,
    DTYPE: tl.constexpr,
    EXACT: tl.constexpr,
):
    """A part of the weight in DTYPE, [rows, words]. A factor of that type (EXACT) has multiplied already, which rounds
    as the operators of torch do: float32 has the product exactly.
    """
    if EXACT:
        return parts[PART].to(DTYPE, bitcast=True)
    else:
        if CODES == "int8":
            # The sign's bit is turned, so that whole numbers from 0 to 255 are 128 more than the codes.
            whole = (words.to(tl.uint32) & (255 << 8 * PART)) ^ (_WHOLE | (128 << 8 * PART))
            less: tl.constexpr = 2.0 ** (23 - 8 * PART) + 128
            number = tl.fma(whole.to(tl.float32, bitcast=True), 2.0 ** (-8 * PART), -less)
        else:
            kind: tl.constexpr = tl.float16 if DTYPE.is_fp16() else tl.bfloat16
            number = parts[PART].to(kind, bitcast=True).to(tl.float32)
        value = number * factor
        if zero is not None:
            value += zero
        return value.to(DTYPE)


@triton.jit
def _words(codes, row, in_row, k, IN: tl.constexpr, PER: tl.constexpr, BLOCK_K: tl.constexpr):
    """Words of PER codes each, 16 bits, [rows, BLOCK_K / PER]."""
    word = k // PER + tl.arange(0, BLOCK_K // PER)
    codes = codes.to(tl.pointer_type(tl.uint16))
    at = codes + row[:, None] * (IN // PER) + word[None, :]
    return tl.load(at, mask=in_row[:, None] & (word < IN // PER)[None, :], other=0)


@triton.jit
def _by_group(values, row, in_row, k, IN: tl.constexpr, GROUP: tl.constexpr, BLOCK_K: tl.constexpr):
    """The entries of the groups of columns from k on, [rows, groups]."""
    count: tl.constexpr = BLOCK_K // GROUP if GROUP < BLOCK_K else 1
    columns: tl.constexpr = (IN + GROUP - 1) // GROUP
    column = k // GROUP + tl.arange(0, count)
    at = values + row[:, None] * columns + column[None, :]
    return tl.load(at, mask=in_row[:, None] & (column < columns)[None, :], other=0)


@triton.jit
def _factors(
    scales, second, SCALES: tl.constexpr, SECOND: tl.constexpr, EXACT: tl.constexpr, DTYPE: tl.constexpr
):
    """Factors from scales as they are stored: in DTYPE if it has them all exactly (EXACT), else in float32. `second`:
    the scale of the whole weight, or None.
    """
    if SCALES == "e8m0":
        exponent = scales.to(tl.uint32)
        bits = tl.where(exponent == 0, 0x400000, exponent << 23)  # 2**-127 is subnormal
        factor = tl.where(exponent == 255, float("nan"), bits.to(tl.float32, bitcast=True))
    elif SCALES == "e4m3":
        factor = _e4m3(scales.to(tl.uint32))
    elif SCALES == "bf16" and not EXACT:
        # LLVM would multiply a number that is widened from bfloat16 by one from float16 in float16, which lacks the
        # range of the first. It widens no bits.
        factor = (scales.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        factor = scales.to(tl.float32)
    if SECOND == "times":
        factor = factor * tl.load(second)
    elif SECOND == "over":
        factor = tl.div_rn(factor, tl.load(second))
    if EXACT:
        factor = factor.to(DTYPE)
    return factor


@triton.jit
def _for_words(values, WORDS: tl.constexpr):
    """[rows, groups] for each of the words of a row, [rows, WORDS]."""
    rows: tl.constexpr = values.shape[0]
    groups: tl.constexpr = values.shape[1]
    count: tl.constexpr = WORDS // groups
    return tl.reshape(tl.broadcast_to(values[:, :, None], [rows, groups, count]), [rows, WORDS])


@triton.jit
def _columns(x, token, in_token, k, IN: tl.constexpr, PER: tl.constexpr, BLOCK_K: tl.constexpr):
    """The numbers of tokens, [BLOCK_K / PER, tokens] for each of the codes of a word."""
    column = k + tl.arange(0, BLOCK_K)
    at = x + token[:, None] * IN + column[None, :]
    numbers = tl.load(at, mask=in_token[:, None] & (column < IN)[None, :], other=0.0)
    if PER == 4:
        even, odd = tl.split(tl.reshape(numbers, [token.shape[0], BLOCK_K // 4, 2, 2]))
        zeroth, second = tl.split(even)
        first, third = tl.split(odd)
        return tl.trans(zeroth), tl.trans(first), tl.trans(second), tl.trans(third)
    else:
        even, odd = tl.split(tl.reshape(numbers, [token.shape[0], BLOCK_K // 2, 2]))
        return tl.trans(even), tl.trans(odd)


@triton.jit
def _plain_sums(
    x,
    weight,
    row,
    in_row,
    token,
    in_token,
    begin,
    IN: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """As `_sums`, of a weight of x's type. The compiler pipelines both operands."""
    total = tl.zeros([row.shape[0], token.shape[0]], tl.float32)
    of_rows, of_tokens = weight + row[:, None] * IN, x + token[None, :].to(tl.int64) * IN
    for k in range(begin, min(begin + SPAN, IN), BLOCK_K):
        column = k + tl.arange(0, BLOCK_K)
        inside = column < IN
        part = tl.load(of_rows + column[None, :], mask=in_row[:, None] & inside[None, :], other=0.0)
        columns = tl.load(of_tokens + column[:, None], mask=inside[:, None] & in_token[None, :], other=0.0)
        total = tl.dot(part, columns, acc=total)
    return total


@triton.jit
def _sums(
    x,
    codes,
    scales,
    second,
    zeros,
    row,  # of the codes, for each output of the program
    scale_row,
    in_row,
    token,
    in_token,
    begin,
    IN: tl.constexpr,
    CODES: tl.constexpr,
    SCALES: tl.constexpr,
    SECOND: tl.constexpr,
    EXACT: tl.constexpr,
    PER: tl.constexpr,
    GROUP: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The sums [rows, tokens] of SPAN inputs from `begin` on, in float32."""
    if CODES == "plain":
        total = _plain_sums(x, codes, row, in_row, token, in_token, begin, IN, SPAN, BLOCK_K)
    else:
        total = tl.zeros([row.shape[0], token.shape[0]], tl.float32)
        scale = _by_group(scales, scale_row, in_row, begin, IN, GROUP, BLOCK_K)
        columns = _columns(x, token, in_token, begin, IN, PER, BLOCK_K)
        for k in range(begin, min(begin + SPAN, IN), BLOCK_K):
            # The compiler pipelines the codes. The other operands are fetched one step ahead.
            next_columns = _columns(x, token, in_token, k + BLOCK_K, IN, PER, BLOCK_K)
            next_scale = _by_group(scales, scale_row, in_row, k + BLOCK_K, IN, GROUP, BLOCK_K)
            words = _words(codes, row, in_row, k, IN, PER, BLOCK_K)
            factor = _for_words(
                _factors(scale, second, SCALES, SECOND, EXACT, x.dtype.element_ty), BLOCK_K // PER
            )
            zero = None
            if zeros is not None:
                zero = _for_words(_by_group(zeros, row, in_row, k, IN, GROUP, BLOCK_K), BLOCK_K // PER)
            parts = None
            if CODES != "int8":
                parts = _unpacked(words, factor, CODES, x.dtype.element_ty != tl.float16, EXACT)
            for part in tl.static_range(PER):
                weight = _weight(words, parts, factor, zero, part, CODES, x.dtype.element_ty, EXACT)
                total = tl.dot(weight, columns[part], acc=total)
            columns, scale = next_columns, next_scale
    return total


@triton.jit(do_not_specialize=["rows"])
def product(
    x,  # [rows, IN] bfloat16 or float16
    codes,  # [OUT, IN / 2] bytes of two codes, the first in the low half; or [OUT, IN]; one after the other of experts
    scales,  # [ceil(OUT / GROUP_ROWS), ceil(IN / GROUP)]; None of a plain weight
    second,  # [1] float32, or None
    zeros,  # [OUT, IN / GROUP] float32, or None
    bias,  # [OUT] of x's type, or None
    factor,  # [rows] float32, what a row of sums is multiplied by; or None
    rows,
    partial,  # [SPLITS, rows, OUT] float32; None if there is one split
    counters,  # int32 by stripe and piece, zeros, and zeros again at the end; None likewise
    order,  # [rows] int32, the rows of x by expert; None if there are no experts
    groups,  # [programs, 3] int32: an expert, the place in `order` of its first row, and their number; None likewise
    y,  # [rows, OUT] of x's type
    OUT: tl.constexpr,
    IN: tl.constexpr,
    CODES: tl.constexpr,
    SCALES: tl.constexpr,
    SECOND: tl.constexpr,
    EXACT: tl.constexpr,  # whether x's type has the factors exactly
    PER: tl.constexpr,  # codes of a word
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    SPAN: tl.constexpr,  # inputs of a split, a multiple of BLOCK_K
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """y = x @ weight.T * factor + bias. One program for a stripe of outputs and a part of the inputs, a piece of the
    rows, or an expert.
    """
    pieces = 1
    if groups is None:
        pieces = (rows + TOKENS - 1) // TOKENS
    stripe = tl.program_id(0) // pieces
    out = stripe * BLOCK_N + tl.arange(0, BLOCK_N)
    in_row, row, token = out < OUT, out.to(tl.int64), tl.arange(0, TOKENS)
    if groups is not None:
        group = groups + tl.program_id(1) * 3
        expert, first, count = tl.load(group).to(tl.int64), tl.load(group + 1), tl.load(group + 2)
        scale_row = expert * ((OUT + GROUP_ROWS - 1) // GROUP_ROWS) + row // GROUP_ROWS
        row += expert * OUT
        if second is not None:
            second += expert
        for start in range(0, count, TOKENS):
            in_token = start + token < count
            pair = tl.load(order + first + start + token, mask=in_token, other=0)
            total = _sums(
                *(x, codes, scales, second, zeros, row, scale_row, in_row, pair, in_token, 0),
                *(IN, CODES, SCALES, SECOND, EXACT, PER, GROUP, SPAN, BLOCK_K),
            )
            at = pair[None, :] * OUT + out[:, None]
            _write(total, bias, factor, y, out, pair, in_row, in_token, at)
    else:
        token += tl.program_id(0) % pieces * TOKENS
        in_token = token < rows
        mask = in_row[:, None] & in_token[None, :]
        at = token[None, :] * OUT + out[:, None]
        total = _sums(
            *(x, codes, scales, second, zeros, row, row // GROUP_ROWS, in_row, token, in_token),
            *(tl.program_id(1) * SPAN, IN, CODES, SCALES, SECOND, EXACT, PER, GROUP, SPAN, BLOCK_K),
        )
        if SPLITS == 1:
            _write(total, bias, factor, y, out, token, in_row, in_token, at)
        else:
            tl.store(partial + tl.program_id(1) * rows.to(tl.int64) * OUT + at, total, mask=mask)
            tl.debug_barrier()  # the whole program has written
            done = tl.atomic_add(counters + tl.program_id(0), 1, sem="acq_rel")
            if done == SPLITS - 1:
                total = _added(partial, rows, at, mask, OUT, SPLITS, 1)
                _write(total, bias, factor, y, out, token, in_row, in_token, at)
                tl.store(counters + tl.program_id(0), 0)


@triton.jit
def _added(partial, rows, at, mask, OUT: tl.constexpr, SPLITS: tl.constexpr, AT_ONCE: tl.constexpr):
    """The sum of what the programs of a stripe wrote, in their order, of which AT_ONCE are read at a time."""
    total = tl.zeros(at.shape, tl.float32)
    for split in tl.range(0, SPLITS, loop_unroll_factor=AT_ONCE):
        part_of = partial + split * rows.to(tl.int64) * OUT + at
        total += tl.load(part_of, mask=mask, other=0.0, cache_modifier=".cg")
    return total


@triton.jit
def _scaled(total, bias, factor, out, token, in_row, in_token):
    if factor is not None:
        total *= tl.load(factor + token, mask=in_token, other=0.0)[None, :]
    if bias is not None:
        total += tl.load(bias + out, mask=in_row, other=0.0).to(tl.float32)[:, None]
    return total


@triton.jit
def _write(total, bias, factor, y, out, token, in_row, in_token, at):
    total = _scaled(total, bias, factor, out, token, in_row, in_token)
    tl.store(y + at, total.to(y.dtype.element_ty), mask=in_row[:, None] & in_token[None, :])


@triton.jit(do_not_specialize=["rows", "count", "capacity"])
def product_heads(
    x,  # as of `product`, like those that follow
    codes,
    scales,
    second,
    zeros,
    bias,
    factor,
    rows,
    partial,
    counters,  # by head and piece
    q_norm,  # as of `place_heads` (layers.py) of y, like those that follow
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
    OUT: tl.constexpr,
    IN: tl.constexpr,
    CODES: tl.constexpr,
    SCALES: tl.constexpr,
    SECOND: tl.constexpr,
    EXACT: tl.constexpr,
    PER: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TOKENS: tl.constexpr,
    H: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    HALF: tl.constexpr,
    EPSILON: tl.constexpr,
    D: tl.constexpr,  # a multiple of BLOCK_N
    D_SLOTS: tl.constexpr,  # the same
    AHEAD: tl.constexpr,  # rows of a head at a time
):
    """`product`, and what `place_heads` does with y, which is not written. The last program of a head does it."""
    pieces = (rows + TOKENS - 1) // TOKENS
    STRIPES: tl.constexpr = D // BLOCK_N
    stripe, piece = tl.program_id(0) // pieces, tl.program_id(0) % pieces
    out, token = stripe * BLOCK_N + tl.arange(0, BLOCK_N), piece * TOKENS + tl.arange(0, TOKENS)
    in_row, row, in_token = out < OUT, out.to(tl.int64), token < rows
    total = _sums(
        *(x, codes, scales, second, zeros, row, row // GROUP_ROWS, in_row, token, in_token),
        *(tl.program_id(1) * SPAN, IN, CODES, SCALES, SECOND, EXACT, PER, GROUP, SPAN, BLOCK_K),
    )
    of_split = partial + tl.program_id(1) * rows.to(tl.int64) * OUT
    tl.store(of_split + token[None, :] * OUT + out[:, None], total, mask=in_token[None, :])
    tl.debug_barrier()  # the whole program has written
    head = stripe // STRIPES
    counter = counters + head * pieces + piece
    if tl.atomic_add(counter, 1, sem="acq_rel") == SPLITS * STRIPES - 1:
        column = head * D + tl.arange(0, D)
        for low in range(0, tl.minimum(TOKENS, rows - piece * TOKENS), AHEAD):
            some = piece * TOKENS + low + tl.arange(0, AHEAD)
            real = some < rows
            at = some[None, :] * OUT + column[:, None]
            value = _added(partial, rows, at, real[None, :], OUT, SPLITS, SPLITS)
            value = _scaled(value, bias, factor, column, some, column < OUT, real)
            value = value.to(x.dtype.element_ty).to(tl.float32)  # as `product` writes it
            place(
                *(value, head, some, real, q_norm, k_norm, cos, sin, start, region, count, capacity),
                *(q, k_cache, v_cache, H, KEYS, VALUES, HALF, EPSILON, D, D_SLOTS),
            )
        tl.store(counter, 0)


@triton.jit
def widen(
    codes,
    scales,
    second,
    zeros,
    y,  # [OUT, IN]
    OUT: tl.constexpr,
    IN: tl.constexpr,
    CODES: tl.constexpr,
    SCALES: tl.constexpr,
    SECOND: tl.constexpr,
    EXACT: tl.constexpr,
    PER: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The weight in y's type: a block of it by each program."""
    out = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_row, row, k = out < OUT, out.to(tl.int64), tl.program_id(1) * BLOCK_K
    words = _words(codes, row, in_row, k, IN, PER, BLOCK_K)
    scale = _by_group(scales, row // GROUP_ROWS, in_row, k, IN, GROUP, BLOCK_K)
    factor = _for_words(_factors(scale, second, SCALES, SECOND, EXACT, y.dtype.element_ty), BLOCK_K // PER)
    zero = None
    if zeros is not None:
        zero = _for_words(_by_group(zeros, row, in_row, k, IN, GROUP, BLOCK_K), BLOCK_K // PER)
    parts = None
    if CODES != "int8":
        parts = _unpacked(words, factor, CODES, y.dtype.element_ty != tl.float16, EXACT)
    for part in tl.static_range(PER):
        column = k + tl.arange(0, BLOCK_K // PER) * PER + part
        at = y + row[:, None] * IN + column[None, :]
        weight = _weight(words, parts, factor, zero, part, CODES, y.dtype.element_ty, EXACT)
        tl.store(at, weight, mask=in_row[:, None] & (column < IN)[None, :])
