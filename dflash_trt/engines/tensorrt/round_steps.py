"""The steps between the passes of a round: one kernel after the drafter's pass, and one after the target's."""

from __future__ import annotations

import importlib.util

import torch
from dflash_plugins import round_reference

Tensor = torch.Tensor


def kernels_run(device: torch.device) -> bool:
    """Whether the plugins' kernels run on tensors of this device: on a GPU, with Triton to compile them."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


class RoundSteps:
    """The two steps, by the plugins' kernels where they run, else by torch's operators. Nothing waits for them.

    kernels: which of both. Tests set it.
    """

    def __init__(self, device: torch.device, *, slots: int, block_size: int) -> None:
        self.kernels, self._most = kernels_run(device), block_size
        self._counters = torch.zeros(slots * block_size, dtype=torch.int32, device=device)

    def fill_tokens(self, block: Tensor, drafts: Tensor | None, tokens: Tensor, rows: Tensor) -> None:
        """The target's tokens and rows: `round_reference.fill_tokens`."""
        if self.kernels:
            from dflash_plugins import rounds

            rounds.fill_tokens(block, drafts, tokens=tokens, rows=rows, most=self._most)
        else:
            round_reference.fill_tokens(block, drafts, tokens=tokens, rows=rows)

    def end_round(
        self, logits: Tensor, features: Tensor, places: Tensor | None, *, finite: Tensor, waiting: Tensor
    ) -> None:
        """Finite rows, and features for the drafter: `round_reference.end_round`."""
        if self.kernels:
            from dflash_plugins import rounds

            rounds.end_round(
                logits, features, places, finite=finite, waiting=waiting, counters=self._counters
            )
        else:
            round_reference.end_round(logits, features, places, finite=finite, waiting=waiting)
