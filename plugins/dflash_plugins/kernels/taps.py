"""HiddenStateTap: the hidden states of n layers side by side, in the type that the drafter reads."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows_per_sequence"])
def gather_taps(
    taps,  # n tensors [B * S, D]
    valid,  # [B] int64: rows beyond these many of a sequence are left zero; or None
    rows_per_sequence,
    features,  # [B * S, n * D]
    D: tl.constexpr,
    SLOTS: tl.constexpr,  # D, rounded up to a power of two
):
    """One program for each row of each tap."""
    row, tap = tl.program_id(0), tl.program_id(1)
    column = tl.arange(0, SLOTS)
    width = D
    if valid is not None:
        sequence = row // rows_per_sequence
        width = tl.where(row - sequence * rows_per_sequence < tl.load(valid + sequence), D, 0)
    x = tl.zeros([SLOTS], features.dtype.element_ty)
    for i in tl.static_range(len(taps)):
        if tap == i:
            x = tl.load(taps[i] + row.to(tl.int64) * D + column, mask=column < width, other=0).to(x.dtype)
    out = features + (row.to(tl.int64) * len(taps) + tap) * D
    tl.store(out + column, x, mask=column < D)
