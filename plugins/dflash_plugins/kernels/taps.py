"""HiddenStateTap: the hidden states of n layers side by side."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gather_taps(
    taps,  # n tensors [rows, D]
    features,  # [rows, n * D]
    D: tl.constexpr,
    SLOTS: tl.constexpr,  # D, rounded up to a power of two
):
    """One program for each row of each tap."""
    row, tap = tl.program_id(0), tl.program_id(1)
    column = tl.arange(0, SLOTS)
    x = tl.zeros([SLOTS], features.dtype.element_ty)
    for i in tl.static_range(len(taps)):
        if tap == i:
            x = tl.load(taps[i] + row.to(tl.int64) * D + column, mask=column < D, other=0).to(x.dtype)
    out = features + (row.to(tl.int64) * len(taps) + tap) * D
    tl.store(out + column, x, mask=column < D)
