"""The end of every drafter's graph: the best tokens of each place, with their log-probabilities."""

from __future__ import annotations

import onnx_ir as ir

from dflash_trt.graph.builder import FLOAT, INT64, GraphBuilder


def best_candidates(g: GraphBuilder, logits: ir.Value, width: int) -> tuple[ir.Value, ir.Value]:
    """logits [rows, V] float32 -> the `width` best tokens of each row, best first, and their log-probabilities."""
    logprobs = g.op("LogSoftmax", logits, name="logprobs", axis=-1)
    if width == 1:
        tokens = g.op("ArgMax", logits, name="best", axis=-1, keepdims=1)
        return tokens, g.op("ReduceMax", logprobs, g.constant([-1]), name="best_logprob", keepdims=1)
    best, tokens = g.multi("TopK", logprobs, g.constant([width]), outputs=2, name="best", axis=-1)
    return tokens, best


def output_candidates(
    g: GraphBuilder, tokens: ir.Value, logprobs: ir.Value, batch: ir.Value, width: int
) -> None:
    """Make [B*(K-1), W] tokens and log-probabilities the outputs of a drafter's graph."""
    shape = g.shape(batch, -1, width)
    named: list[int | str] = ["B", "K-1", width]
    g.output(g.op("Reshape", tokens, shape), "draft_tokens", INT64, named)
    g.output(g.op("Reshape", logprobs, shape), "draft_logprobs", FLOAT, named)
