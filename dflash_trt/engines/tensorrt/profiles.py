"""The shapes of a plan: two optimization profiles per graph, prefill and decoding."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_trt.errors import UsageError

PREFILL, DECODE = 0, 1
# TensorRT wants addresses that are multiples of so many bytes.
ALIGNMENT = 256
# The rows of a slot are a multiple of so many, so that every slot begins at an aligned address: a row of a head has at
# least 16 bytes, eight numbers of 16 bits.
ROW_UNIT = ALIGNMENT // 16
# The beginning of the names of a plan's outputs that nothing reads (builder.py).
QUERY = "query."


@dataclass(frozen=True)
class PlanLimits:
    """The limits of a plan: sequences at a time, prompt tokens per pass, tokens per block, cache rows."""

    max_batch_size: int
    prefill_chunk: int
    block_size: int
    capacity: int

    def __post_init__(self) -> None:
        if self.max_batch_size < 1:
            raise UsageError(f"--max-batch-size is {self.max_batch_size}, expected 1 or more")
        if self.prefill_chunk < self.block_size:
            raise UsageError(
                f"--prefill-chunk is {self.prefill_chunk}, expected {self.block_size} (the block size) or more"
            )
        most = self.capacity - self.block_size - 1
        if self.prefill_chunk > most:
            raise UsageError(
                f"--prefill-chunk is {self.prefill_chunk}, but the cache has {self.capacity} rows, and a pass can fill "
                f"{most} of them: lower it, or build with a larger --max-seq-len"
            )


def aligned_rows(rows: int) -> int:
    """At least so many cache rows, such that every slot begins at an aligned address."""
    return -(-rows // ROW_UNIT) * ROW_UNIT


def prefill_lengths(most: int, *, apart: bool = False) -> list[int]:
    """The lengths of prefill passes, up to `most` tokens. A shorter part of a prompt is filled up to one of them.

    Each length costs TensorRT-RTX a compilation, and any engine a preparation. `apart`: no shorter part is filled up to
    `most`.
    """
    lengths = [16, 32, 64, *range(128, most, 128), *([most - 1] * apart)]
    return [*(n for n in lengths if n < most), most]


def pass_sizes(most: int) -> list[int]:
    """The sizes of decoding passes, up to `most`: of their batch, and of the tokens of a sequence."""
    return [*(2**i for i in range((most - 1).bit_length())), most]


def fitting(size: int, sizes: Sequence[int]) -> int:
    """The least of ascending sizes that holds this many, or the size itself if it is larger than all."""
    at = bisect_left(sizes, size)
    return sizes[at] if at < len(sizes) else size


@dataclass(frozen=True)
class Profile:
    """Smallest, usual and largest length of each dynamic dimension."""

    name: str
    lengths: Mapping[str, tuple[int, int, int]]

    def shapes(self, shape: Sequence[int | str]) -> tuple[tuple[int, ...], ...]:
        """Smallest, usual and largest shape of an input whose dimensions are numbers or names."""
        return tuple(
            tuple(d if isinstance(d, int) else self.lengths[d][which] for d in shape) for which in range(3)
        )

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, **{name: list(lengths) for name, lengths in self.lengths.items()}}


def profiles(role: str, limits: PlanLimits) -> tuple[Profile, Profile]:
    """The profiles of "target" or "drafter", in the order PREFILL, DECODE."""
    batch, chunk, block = limits.max_batch_size, limits.prefill_chunk, limits.block_size
    one, batches, chunks = (1, 1, 1), (1, max(1, batch // 2), batch), (1, chunk, chunk)
    if role == "target":
        decode = {"B": batches, "S": (1, block, block), "R": (1, block, block)}
        return Profile("prefill", {"B": one, "S": chunks, "R": one}), Profile("verify", decode)
    # The features for the drafter are in a buffer with one block per sequence, and are passed in together.
    decode = {"B": batches, "S": (block, block, block), "K": (2, block, block)}
    return Profile("prefill", {"B": one, "S": chunks, "K": (2, 2, 2)}), Profile("draft", decode)
