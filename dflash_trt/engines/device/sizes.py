"""The sizes of a device engine's passes, which are few, and of its memory."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

PREFILL, DECODE = 0, 1
# TensorRT wants addresses that are multiples of so many bytes.
ALIGNMENT = 256
# The rows of a slot are a multiple of so many, so that every slot begins at an aligned address: a row of a head has at
# least 16 bytes, eight numbers of 16 bits.
ROW_UNIT = ALIGNMENT // 16


def prefill_lengths(most: int) -> list[int]:
    """The lengths of prefill passes, up to `most` tokens. A shorter part of a prompt is filled up to one of them.

    Each length costs TensorRT-RTX a compilation, and any engine a preparation.
    """
    lengths = [16, 32, 64, *range(128, most, 128)]
    return [*(n for n in lengths if n < most), most]


def pass_sizes(most: int) -> list[int]:
    """The tokens of a sequence in decoding passes, up to `most`."""
    return [*(2**i for i in range((most - 1).bit_length())), most]


def batch_sizes(most: int) -> list[int]:
    """The sequences of decoding passes, up to `most`. Beyond 8, at most a fifth of them are idle. Passes of fewer take
    about as long as reading the weights.
    """
    sizes = [1, 2, 4, 8]
    while sizes[-1] < most:
        sizes.append((sizes[-1] + 1) * 5 // 4)
    return [*(n for n in sizes if n < most), most]


def fitting(size: int, sizes: Sequence[int]) -> int:
    """The least of ascending sizes that holds this many, or the size itself if it is larger than all."""
    at = bisect_left(sizes, size)
    return sizes[at] if at < len(sizes) else size
