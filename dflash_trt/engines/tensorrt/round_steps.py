"""The steps between the passes of a round: one kernel after the drafter's pass, and one after the target's."""

from __future__ import annotations

import torch
from dflash_plugins import round_reference, rounds
from dflash_plugins.launch import Run

Tensor = torch.Tensor


class RoundSteps:
    """The two steps, by kernels where they can be launched, else by torch's operators. Nothing waits for them.

    run: launches the kernels. None for torch's operators.
    """

    def __init__(self, device: torch.device, *, slots: int, block_size: int, run: Run | None) -> None:
        self.run, self._most = run, block_size
        self._counters = torch.zeros(slots * block_size, dtype=torch.int32, device=device)

    def fill_tokens(self, block: Tensor, drafts: Tensor | None, tokens: Tensor, rows: Tensor) -> None:
        """The target's tokens and rows: `round_reference.fill_tokens`."""
        if self.run is None:
            round_reference.fill_tokens(block, drafts, tokens=tokens, rows=rows)
        else:
            rounds.fill_tokens(block, drafts, tokens=tokens, rows=rows, most=self._most, run=self.run)

    def end_round(
        self, logits: Tensor, features: Tensor, places: Tensor | None, *, finite: Tensor, waiting: Tensor
    ) -> None:
        """Finite rows, and features for the drafter: `round_reference.end_round`."""
        given: dict[str, Tensor] = {"finite": finite, "waiting": waiting}
        if self.run is None:
            round_reference.end_round(logits, features, places, **given)
        else:
            rounds.end_round(logits, features, places, **given, counters=self._counters, run=self.run)
