"""DSpark and DeepSpec's DFlash: every row of the block predicts, and a Markov head corrects a token by the one before.

Row i predicts the token behind its own position, so that K - 1 rows give K - 1 drafts. The head adds W2 W1[a] to the
logits behind token a, or W2 (gate * W1[a]) with a gate that follows from the row and a. It corrects the best CANDIDATES
tokens of each place. All tokens would take a product with the whole vocabulary for each place. The confidence head
estimates how likely the draft of a place is accepted. It stands in for the log-probability of the draft.

Embedding and head are the drafter's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from dflash_trt.checkpoint.fields import Fields
from dflash_trt.checkpoint.schema import DrafterConfig, LayerAttention, TargetConfig
from dflash_trt.checkpoint.tensors import Checkpoint, Outline
from dflash_trt.errors import quoted
from dflash_trt.graph.dialect import Dialect
from dflash_trt.models.drafters.block import BlockPass
from dflash_trt.models.drafters.candidates import best_candidates
from dflash_trt.models.drafters.kind import DrafterKind
from dflash_trt.models.drafters.vocabulary import DraftVocabulary
from dflash_trt.models.drafters.walk import PairScores, best_walk, followed
from dflash_trt.models.reading import HEAD_DIM, LAYERS, check_quantization, decoder, refuse, windows

CANDIDATES = 64
_ROWS, _RANK = 1024, 1 << 14


@dataclass(frozen=True, kw_only=True)
class DSpark:
    """rank: of the Markov head; 0 without. gated: whether it has a gate. confidence: whether there is such a head.

    confidence_of_pair: whether the confidence head reads the token before too.
    """

    rank: int
    gated: bool = False
    confidence: bool = False
    confidence_of_pair: bool = False


# Fields that change the computation, with the values that this module computes.
_NEUTRAL = {
    "final_logit_softcapping": (),
    "is_causal": (False,),
    "mlp_bias": (False,),
    "output_multiplier": (1,),
}


def read_dspark(fields: Fields) -> DrafterConfig:
    """The configuration of a DSpark drafter, or of DeepSpec's DFlash, which has no Markov head.

    `block_size` counts the rows. The block of a verification has one token more, the anchor.

    Raises:
        CheckpointError: a field is missing, out of range, or requests something not supported.
    """
    check_quantization(fields)
    refuse(fields, _NEUTRAL)
    common = decoder(fields, head_dim=fields.integer("head_dim", maximum=HEAD_DIM, default=128), qk_norm=True)
    rank = fields.integer("markov_rank", minimum=0, maximum=_RANK, default=0)
    head = fields.string("markov_head_type") if rank else "vanilla"
    if head not in ("vanilla", "gated"):
        raise fields.error("markov_head_type", f"is {quoted(head)}, supported are 'vanilla' and 'gated'")
    taps = fields.integers("target_layer_ids", most=LAYERS, minimum=-1)
    if not taps or len(set(taps)) != len(taps):
        raise fields.error(
            "target_layer_ids", f"is {quoted(list(taps))}, expected at least one layer and no duplicates"
        )
    confidence = fields.boolean("enable_confidence_head", default=False)
    return DrafterConfig(
        **common,
        layers=tuple(
            LayerAttention(False, window) for window in windows(fields, common["num_hidden_layers"])
        ),
        block_size=fields.integer("block_size", maximum=_ROWS) + 1,
        mask_token_id=fields.integer("mask_token_id", minimum=0),
        target_layer_ids=taps,
        num_target_layers=None,
        most_candidates=min(CANDIDATES, common["vocab_size"]) if rank else None,
        own=DSpark(
            rank=rank,
            gated=head == "gated",
            confidence=confidence,
            confidence_of_pair=bool(rank)
            and confidence
            and fields.boolean("confidence_head_with_markov", default=False),
        ),
    )


def build_dspark(
    config: DrafterConfig,
    checkpoint: Checkpoint | Outline,
    target: TargetConfig,
    target_checkpoint: Checkpoint | Outline,
    dialect: Dialect,
    *,
    width: int = 1,
    metadata: dict[str, str] | None = None,
    **options: Any,
) -> ir.Model:
    """The drafter as an ONNX model. `kind.BuildDrafter` has the arguments. Its own head stays as it is on disk.

    Raises CheckpointError if a tensor is missing, is unused, or has another shape than the config gives.
    """
    own = config.own
    block = BlockPass(
        config, checkpoint, target, target_checkpoint, dialect, every_row=True, **{**options, "head": None}
    )
    x = block.embedded(own=True)
    for i in range(config.num_hidden_layers):
        x = block.layer(i, x)
    rows = block.drafted(x)
    vocabulary = DraftVocabulary(block.m, config, config.vocab_size)
    logits = vocabulary.logits(rows, block.m, config.hidden_size)
    before = None
    if own.rank:
        scores = PairScores.of_logits(block, logits, min(CANDIDATES, config.vocab_size))
        with block.g.scope("markov"):
            fit, embedded = _markov(block, rows, scores)
        tokens, logprobs, behind = best_walk(block, scores, fit, width)
        if own.confidence_of_pair:
            before = followed(block.g, embedded, behind)
    else:
        tokens, logprobs = best_candidates(block.g, logits, width)
    if own.confidence:
        with block.g.scope("confidence"):
            logprobs = _confident(block, rows, before, logprobs, width)
    return block.model(tokens, logprobs, width, metadata)


def _markov(block: BlockPass, rows: ir.Value, scores: PairScores) -> tuple[ir.Value, ir.Value]:
    """The pair scores of candidates, [B,P,k,k], and the rows of W1 of those before, [B,P,k,r]."""
    g, m, config, rank = block.g, block.m.at("markov_head"), block.config, block.config.own.rank
    vocab, hidden = config.vocab_size, config.hidden_size
    tables = [
        g.to_dtype(
            g.op("Gather", m.raw(f"{name}.weight", vocab, rank), ids, name=name), m.dtype_of(f"{name}.weight")
        )
        for name, ids in (("markov_w1", scores.before), ("markov_w2", scores.tokens))
    ]
    w1, w2 = tables
    left = w1
    if config.own.gated:
        weight = m.weight("gate_proj.weight", rank, hidden + rank)
        bias = m.weight("gate_proj.bias", rank)
        sizes = g.constant([hidden, rank])
        of_row, of_token = g.multi("Split", weight, sizes, outputs=2, name="gate_parts", axis=1)
        part = g.op("Gemm", rows, of_row, bias, name="gate_of_row", transB=1)
        part = g.op("Reshape", part, g.shape(block.batch, -1, 1, rank), name="by_place")
        turned = g.op("Transpose", of_token, name="turned", perm=[1, 0])
        gate = g.op(
            "Sigmoid", g.op("Add", g.op("MatMul", w1, turned, name="gate_of_token"), part), name="gate"
        )
        left = g.op("Mul", gate, w1, name="gated")
    fit = g.op("MatMul", left, g.op("Transpose", w2, name="by_rank", perm=[0, 1, 3, 2]), name="fit")
    return g.to_float(fit), w1


def _confident(
    block: BlockPass, rows: ir.Value, before: ir.Value | None, logprobs: ir.Value, width: int
) -> ir.Value:
    """Log-probabilities [B*P, W] in which the best candidate has its confidence, and the others share the rest."""
    g, m, own = block.g, block.m.at("confidence_head"), block.config.own
    size = block.config.hidden_size
    if before is not None:
        flat = g.op("Reshape", before, g.constant([-1, own.rank]), name="token_before")
        rows, size = g.op("Concat", rows, flat, name="row_and_token", axis=1), size + own.rank
    logit = g.to_float(m.linear(rows, "proj", size, 1, bias=True))
    one = g.constant(-1.0, np.float32)
    sure = g.op("Neg", g.op("Softplus", g.op("Mul", logit, one, name="against")), name="sure")
    if width == 1:
        return sure
    unsure = g.op("Neg", g.op("Softplus", logit, name="for"), name="unsure")
    others = g.op("Slice", logprobs, *map(g.constant, ([1], [width], [1])), name="others")
    share = g.op("LogSoftmax", others, name="share", axis=-1)
    return g.op("Concat", sure, g.op("Add", unsure, share, name="rest"), name="confident", axis=1)


KIND = DrafterKind("Qwen3DSparkModel", "qwen3", read_dspark, build_dspark)
