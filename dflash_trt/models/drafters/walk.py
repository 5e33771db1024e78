"""The best chain through a few candidates of each place, where a token's score depends on the token before it.

Every token at a place has one best successor. So a place is a map from the candidates before it to its own. The chain
is the composition of the maps, which takes log2(K) steps for any length of the block.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from dflash_trt.graph.builder import GraphBuilder
from dflash_trt.models.drafters.block import BlockPass
from dflash_trt.models.module import Module


@dataclass(frozen=True)
class PairScores:
    """P = K - 1 places with k candidates each.

    tokens [B,P,k]: the candidates. numbers [B,P,k]: their rows in the head. logits [B,P,k]: the head's, float32.
    before [B,P,k]: the candidates of the place before; the anchor, k times, at the first place.
    """

    tokens: ir.Value
    numbers: ir.Value
    logits: ir.Value
    before: ir.Value
    count: int

    @classmethod
    def of_logits(cls, block: BlockPass, logits: ir.Value, count: int) -> PairScores:
        """The `count` best tokens of each row of logits [B*P, V]."""
        g = block.g
        best, numbers = g.multi(
            "TopK", g.to_float(logits), g.constant([count]), outputs=2, name="best", axis=-1
        )
        by_place = g.shape(block.batch, -1, count)
        best = g.op("Reshape", best, by_place, name="best_logits")
        numbers = g.op("Reshape", numbers, by_place, name="candidates")
        tokens = block.tokens(block.g, numbers)
        anchor = g.slice(block.block, 0, 1, axis=1, name="anchor")
        anchors = g.op("Expand", g.unsqueeze(anchor, 2), g.shape(1, 1, count), name="anchors")
        before = g.op("Concat", anchors, tokens, name="shifted", axis=1)
        before = g.slice(before, 0, -1, axis=1, name="before")
        return cls(tokens, numbers, best, before, count)


def best_walk(block: BlockPass, scores: PairScores, fit: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
    """The W best tokens [B*P, W] of each place after the walk so far, and their log-probabilities.

    The third result is the number of the candidate before each place that the walk took, [B,P].

    fit [B,P,k,k]: what candidate a before adds to the logit of candidate b. The walk takes the best one at each place.
    Log-probabilities are of a softmax over the k candidates.
    """
    g = block.g
    pairs = g.op("Add", fit, g.unsqueeze(scores.logits, 2), name="pairs")
    chosen = _walk(g, pairs, scores.count, block.config.block_size - 1)
    # Behind which candidate each place stands. At the first place all are the anchor.
    first = g.slice(chosen, 0, 1, axis=1, name="first")
    none = g.op("Sub", first, first, name="none")
    behind = g.op("Concat", none, chosen, name="shifted", axis=1)
    behind = g.slice(behind, 0, -1, axis=1, name="behind")
    return *best_of(block, scores, followed(g, pairs, behind)), behind


def best_of(block: BlockPass, scores: PairScores, row: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The W best tokens [B*P, W] of each place, and their log-probabilities, by the logits `row` [B,P,k] of its k
    candidates.
    """
    g, width = block.g, block.parts.width
    logprobs = g.op("LogSoftmax", row, name="logprobs", axis=-1)
    best, places = g.multi("TopK", logprobs, g.constant([width]), outputs=2, name="best", axis=-1)
    tokens = g.op("GatherElements", scores.tokens, places, name="tokens", axis=2)
    flat = g.constant([-1, width])
    return g.op("Reshape", tokens, flat, name="flat_tokens"), g.op(
        "Reshape", best, flat, name="flat_logprobs"
    )


def followed(g: GraphBuilder, table: ir.Value, behind: ir.Value) -> ir.Value:
    """The rows [B,P,n] of a table [B,P,k,n] for the candidates that the walk took before each place."""
    return g.op("GatherND", table, g.unsqueeze(behind, 2), name="followed", batch_dims=2)


def confident(
    block: BlockPass,
    m: Module,
    name: str,
    rows: ir.Value,
    before: ir.Value | None,
    logprobs: ir.Value,
    *,
    bias: bool = True,
) -> ir.Value:
    """Log-probabilities [B*P, W] in which the best candidate has its confidence, and the others share the rest.

    name: of the confidence head, a layer that reads the row and, where `before` [B,P,r] is there, numbers of the token
    before.
    """
    g, width, size = block.g, block.parts.width, block.config.hidden_size
    if before is not None:
        rank = block.config.settings.rank
        flat = g.op("Reshape", before, g.constant([-1, rank]), name="token_before")
        rows, size = g.op("Concat", rows, flat, name="row_and_token", axis=1), size + rank
    logit = g.to_float(m.linear(rows, name, size, 1, bias=bias))
    against = g.op("Mul", logit, g.constant(-1.0, np.float32), name="against")
    sure = g.op("Neg", g.op("Softplus", against), name="sure")
    if width == 1:
        return sure
    unsure = g.op("Neg", g.op("Softplus", logit, name="for"), name="unsure")
    others = g.slice(logprobs, 1, width, axis=1, name="others")
    share = g.op("LogSoftmax", others, name="share", axis=-1)
    return g.op("Concat", sure, g.op("Add", unsure, share, name="rest"), name="confident", axis=1)


def _walk(g: GraphBuilder, pairs: ir.Value, count: int, places: int) -> ir.Value:
    """The number of the candidate that the walk takes at each place, [B,P]."""
    maps = g.op("ArgMax", pairs, name="successors", axis=-1, keepdims=0)  # [B,P,k]
    itself = g.constant(list(range(count)))
    batch, reach = g.dim(pairs, 0, name="walks"), 1
    while reach < places:
        # A map over the last `reach` places becomes one over twice as many. The beginning has no more places.
        identity = g.op("Expand", itself, g.shape(batch, reach, count), name="identity")
        earlier = g.op("Concat", identity, maps, name="earlier", axis=1)
        earlier = g.slice(earlier, 0, -reach, axis=1, name="aligned")
        maps = g.op("GatherElements", maps, earlier, name="composed", axis=2)
        reach *= 2
    path = g.slice(maps, 0, 1, axis=2, name="path")
    return g.op("Squeeze", path, g.constant([2]), name="chosen")
