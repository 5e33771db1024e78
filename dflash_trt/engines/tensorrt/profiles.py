"""The shapes of a plan: two optimization profiles per graph, prefill and decoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_trt.errors import UsageError

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
