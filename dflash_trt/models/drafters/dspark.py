"""DSpark and DeepSpec's DFlash: every row of the block predicts, and a Markov head corrects a token by the one before.

Row i predicts the token after its own position, so that K - 1 rows give K - 1 drafts. The head adds W2 W1[a] to the
logits after token a, or W2 (gate * W1[a]) with a gate that follows from the row and a. A head corrects the best
CANDIDATES tokens of each place. All tokens would take a product with the whole vocabulary for each place. The
confidence head estimates how likely the draft of a place is accepted, which stands in for its log-probability.

Embedding and head are the drafter's own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, cast, get_args

import numpy as np
import onnx_ir as ir

from dflash_trt.checkpoint.fields import Fields
from dflash_trt.checkpoint.schema import DrafterConfig, LayerAttention
from dflash_trt.models.drafters.block import BlockPass, BlockSettings
from dflash_trt.models.drafters.kind import DrafterKind, DrafterParts
from dflash_trt.models.drafters.walk import PairScores, best_walk, followed
from dflash_trt.models.gemma4 import gemma_decoder
from dflash_trt.models.module import Module
from dflash_trt.models.reading import QWEN_HEAD_DIM, decoder, layer_ids, refuse, windows

CANDIDATES = 64
Head = Literal["vanilla", "gated"]
_ROWS, _RANK = 1024, 1 << 14


@dataclass(frozen=True, kw_only=True)
class DSpark(BlockSettings):
    """rank, head: of the Markov head; rank 0 without. confidence: whether there is such a head.

    confidence_of_pair: whether the confidence head reads the token before too.
    """

    rank: int
    head: Head = "vanilla"
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
    """
    refuse(fields, _NEUTRAL)
    common = decoder(fields, head_dim=QWEN_HEAD_DIM, qk_norm=True)
    layers = (LayerAttention(False, window) for window in windows(fields, common["num_hidden_layers"]))
    return drafter_config(fields, common, tuple(layers))


def drafter_config(
    fields: Fields, common: dict[str, Any], layers: tuple[LayerAttention, ...]
) -> DrafterConfig:
    """The configuration of a drafter with these layers. `common`: as `reading.decoder` gives it."""
    settings = heads(fields, common["vocab_size"], every_row=True, embedding=True)
    return DrafterConfig(
        **common,
        layers=layers,
        block_size=fields.integer("block_size", maximum=_ROWS) + 1,
        mask_token_id=fields.integer("mask_token_id", minimum=0),
        target_layer_ids=layer_ids(fields, "target_layer_ids", minimum=-1),
        most_candidates=most_candidates(settings, common["vocab_size"]),
        own=settings,
    )


def most_candidates(settings: DSpark, vocab_size: int) -> int:
    """The candidates of a place: those that the Markov head corrects, or all tokens of the head."""
    vocabulary = settings.vocabulary or vocab_size
    return min(CANDIDATES, vocabulary) if settings.rank else vocabulary


def heads(fields: Fields, vocabulary: int | None, *, confidence: bool = False, **settings: Any) -> DSpark:
    """The Markov head and the confidence head of config.json.

    `vocabulary`, `settings`: fields of `BlockSettings`. `confidence`: whether there is such a head if nothing says so,
    and whether it reads the token before.
    """
    rank = fields.integer("markov_rank", minimum=0, maximum=_RANK, default=0)
    head = fields.string("markov_head_type", among=get_args(Head)) if rank else "vanilla"
    pair = fields.boolean("confidence_head_with_markov", default=confidence)
    confidence = fields.boolean("enable_confidence_head", default=confidence)
    return DSpark(
        vocabulary=vocabulary,
        rank=rank,
        head=cast(Head, head),
        confidence=confidence,
        confidence_of_pair=bool(rank) and confidence and pair,
        **settings,
    )


def build_dspark(parts: DrafterParts) -> ir.Model:
    """DSpark, with its own embedding and head as they are on disk."""
    block = BlockPass(parts)
    config, settings = block.config, block.config.own
    rows = block.drafted()
    logits, before = block.logits(rows), None
    if settings.rank:
        scores = PairScores.of_logits(block, logits, most_candidates(settings, config.vocab_size))
        with block.g.scope("markov"):
            tokens, logprobs, before = _markov(block, rows, scores)
    else:
        tokens, logprobs = block.best(logits)
    if settings.confidence:
        with block.g.scope("confidence"):
            before = before if settings.confidence_of_pair else None
            logprobs = _confident(block, rows, before, logprobs)
    return block.model(tokens, logprobs)


def _table(m: Module, name: str, size: int, rank: int, ids: ir.Value) -> ir.Value:
    """Rows of a table [size, rank], in the graph's dtype."""
    g = m.g
    rows = g.op("Gather", m.raw(f"{name}.weight", size, rank), ids, name=name)
    return g.from_dtype(rows, m.dtype_of(f"{name}.weight"))


def _markov(block: BlockPass, rows: ir.Value, scores: PairScores) -> tuple[ir.Value, ir.Value, ir.Value]:
    """The walk through pair scores. The third result has the rows of W1 of the tokens before, [B,P,r]."""
    g, m, config, settings = block.g, block.m.at("markov_head"), block.config, block.config.own
    hidden, rank = config.hidden_size, settings.rank
    w1 = _table(m, "markov_w1", config.vocab_size, rank, scores.before)
    # W2 has the tokens of the head in the file, else the target's; here the candidates' rows [B,P,k,r].
    ids = scores.tokens if settings.vocabulary is None else scores.numbers
    w2 = _table(m, "markov_w2", settings.vocabulary or config.vocab_size, rank, ids)
    left = w1
    if config.own.head == "gated":
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
    tokens, logprobs, behind = best_walk(block, scores, g.to_float(fit))
    return tokens, logprobs, followed(g, w1, behind)


def _confident(block: BlockPass, rows: ir.Value, before: ir.Value | None, logprobs: ir.Value) -> ir.Value:
    """Log-probabilities [B*P, W] in which the best candidate has its confidence, and the others share the rest."""
    g, m, settings, width = block.g, block.m.at("confidence_head"), block.config.own, block.parts.width
    size = block.config.hidden_size
    if before is not None:
        flat = g.op("Reshape", before, g.constant([-1, settings.rank]), name="token_before")
        rows, size = g.op("Concat", rows, flat, name="row_and_token", axis=1), size + settings.rank
    logit = g.to_float(m.linear(rows, "proj", size, 1, bias=True))
    one = g.constant(-1.0, np.float32)
    sure = g.op("Neg", g.op("Softplus", g.op("Mul", logit, one, name="against")), name="sure")
    if width == 1:
        return sure
    unsure = g.op("Neg", g.op("Softplus", logit, name="for"), name="unsure")
    others = g.slice(logprobs, 1, width, axis=1, name="others")
    share = g.op("LogSoftmax", others, name="share", axis=-1)
    return g.op("Concat", sure, g.op("Add", unsure, share, name="rest"), name="confident", axis=1)


def _read_gemma4(fields: Fields) -> DrafterConfig:
    """DeepSpec's drafters for Gemma 4, through Gemma's own layers: the target's text model with other numbers.

    All layers see all tokens and have the heads that such layers of the target have. Embedded rows are scaled, and
    logits soft-capped, as the target's.
    """
    refuse(fields, {"enable_moe_block": (False,), "is_causal": (False,)})
    common = gemma_decoder(fields)
    layers = common.pop("layers")
    if any(layer.window for layer in layers):
        raise fields.error("layer_types", "has a sliding window, but these drafters are read without any")
    if (heads := layers[0].heads) is not None:
        common |= {"num_key_value_heads": heads.kv_heads, "head_dim": heads.head_dim, "rope": heads.rope}
    config = drafter_config(
        fields, common, tuple(replace(layer, causal=False, heads=None) for layer in layers)
    )
    return replace(config, own=replace(config.own, sandwich=True))


KINDS = (
    DrafterKind("Qwen3DSparkModel", "qwen3", read_dspark, build_dspark),
    # The names of the text models whose configuration the drafter's was made from.
    DrafterKind(
        *("Gemma4DSparkModel", "gemma4_unified_text", _read_gemma4, build_dspark), also=("gemma4_text",)
    ),
)
