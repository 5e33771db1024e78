"""The common parts of all drafters' graphs: their inputs, their places in the checkpoints, and their outputs."""

from __future__ import annotations

import onnx_ir as ir

from dflash_trt.graph.builder import FLOAT, INT64, GraphBuilder
from dflash_trt.models.drafters.kind import DrafterParts
from dflash_trt.models.drafters.vocabulary import OF_TRAINING
from dflash_trt.models.mixers import mixers
from dflash_trt.models.module import Module
from dflash_trt.models.passes import Mixer, Pass, PassRows, ints, positions_from


class DrafterPass:
    """One pass of a drafter.

    m, root, head: the drafter's checkpoint, the target's, and that of the drafter's own copy of the head, if any.
    """

    def __init__(self, parts: DrafterParts) -> None:
        self.parts, self.config, self.target = parts, parts.config, parts.target
        g = self.g = GraphBuilder("drafter", dtype=parts.dialect.dtype)
        self.m = Module(g, parts.checkpoint, parts.folder, parts.dialect)
        self.root = Module(g, parts.target_checkpoint, parts.target_folder, parts.dialect)
        self.head = None if parts.head is None else Module(g, *parts.head, parts.dialect)
        hidden = self.config.hidden_size
        taps = len(self.config.target_layer_ids) * hidden
        self.features = g.input("features", parts.features_dtype or g.dtype, ["B", "S", taps])
        self.n_features, self.start = ints(g, "n_features", "B"), ints(g, "start", "B")
        self.block = ints(g, "block", "B", "K")
        self.batch = g.dim(self.block, 0, name="batch")
        self.n_context = g.dim(self.features, 1, name="n_context")
        self.by_sequence = g.shape(self.batch, -1, hidden)

    def mixers(
        self, start: ir.Value, n_written: ir.Value, asking: PassRows, lengths: ir.Value
    ) -> list[Mixer]:
        """The mixer of each layer, where `n_written` rows are written from cache row `start` on."""
        g, parts = self.g, self.parts
        positions = positions_from(g, start, n_written, name="written_positions")
        written = PassRows(g, self.batch, n_written, positions, self.config)
        return mixers(Pass(g, parts.dialect, self.config, parts.capacity, start, asking, written, lengths))

    def flat_rows(self, rows: ir.Value, count: ir.Value) -> ir.Value:
        """Numbers [B, count] of rows of each sequence, which has `count`, as numbers of flat rows, [B*count]."""
        g = self.g
        base = g.op("Mul", g.unsqueeze(g.arange(self.batch), 1), count, name="base")
        return g.op("Reshape", g.op("Add", base, rows, name="order"), g.constant([-1]), name="flat_order")

    def model(self, tokens: ir.Value, logprobs: ir.Value) -> ir.Model:
        """The graph, with these candidates [B*(K-1), W] and their log-probabilities as outputs."""
        self.m.check_all_used(OF_TRAINING)
        g, width = self.g, self.parts.width
        shape = g.shape(self.batch, -1, width)
        named: list[int | str] = ["B", "K-1", width]
        g.output(g.op("Reshape", tokens, shape), "draft_tokens", INT64, named)
        g.output(g.op("Reshape", logprobs, shape), "draft_logprobs", FLOAT, named)
        return g.model()


def best_candidates(g: GraphBuilder, logits: ir.Value, width: int) -> tuple[ir.Value, ir.Value]:
    """logits [rows, V] float32 -> the `width` best tokens of each row, best first, and their log-probabilities."""
    logprobs = g.op("LogSoftmax", logits, name="logprobs", axis=-1)
    if width == 1:
        tokens = g.op("ArgMax", logits, name="best", axis=-1, keepdims=1)
        return tokens, g.op("ReduceMax", logprobs, g.constant([-1]), name="best_logprob", keepdims=1)
    best, tokens = g.multi("TopK", logprobs, g.constant([width]), outputs=2, name="best", axis=-1)
    return tokens, best
