"""Heads of a drafter's own, over the target's vocabulary or over some of its tokens."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from dflash_trt.checkpoint.schema import DrafterConfig
from dflash_trt.checkpoint.tensors import Checkpoint
from dflash_trt.errors import CheckpointError
from dflash_trt.models.module import Module

# The target's tensors that training may leave in a drafter's file.
OF_TRAINING = ("verifier_norm.weight", "verifier_lm_head.weight")


class DraftVocabulary:
    """The `size` tokens of a drafter's own head. Token i of the target's has number j here if i = j + d2t[j].

    The mask t2d says the same from the other side, and is not read. A drafter with all tokens needs neither.
    """

    def __init__(self, m: Module, config: DrafterConfig, size: int) -> None:
        self.m, self.size = m, size
        for name in ("t2d", "d2t") if size == config.vocab_size else ("t2d",):
            m.ignore(name)
        self._offsets = None
        if size != config.vocab_size:
            self._offsets = m.integers("d2t", size)
            if isinstance(m.checkpoint, Checkpoint):
                self._check(m.checkpoint, config)

    def _check(self, checkpoint: Checkpoint, config: DrafterConfig) -> None:
        tokens = np.arange(self.size) + checkpoint.array("d2t")
        outside = (tokens < 0) | (tokens >= config.vocab_size)
        if outside.any():
            place = int(np.flatnonzero(outside)[0])
            raise CheckpointError(
                f"{checkpoint['d2t'].file}: d2t maps draft token {place} to {int(tokens[place])}, but vocab_size is "
                f"{config.vocab_size}; the table has offsets, target id minus draft id"
            )
        if len(np.unique(tokens)) < self.size:
            raise CheckpointError(
                f"{checkpoint['d2t'].file}: d2t maps two draft tokens to one of the target's"
            )

    def logits(self, rows: ir.Value, m: Module, hidden: int) -> ir.Value:
        """Rows [rows, D] through the head at `m`: float32 [rows, size]."""
        return m.g.to_float(m.linear(rows, "lm_head", hidden, self.size))

    def tokens(self, numbers: ir.Value, m: Module) -> ir.Value:
        """The target's ids of tokens of this vocabulary, of any shape."""
        if self._offsets is None:
            return numbers
        offsets = m.g.op("Gather", self._offsets, numbers, name="offsets")
        return m.g.op("Add", numbers, offsets, name="target_ids")
