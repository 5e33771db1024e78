"""DSpark and DeepSpec's DFlash: every row of the block predicts, and a Markov head corrects a token by the one before.

Row i predicts the token after its own position, so that K - 1 rows give K - 1 drafts. The head adds W2 W1[a] to the
logits after token a, or W2 (gate * W1[a]) with a gate that follows from the row and a, or W2 tanh(o) with o of a small
recurrent network over the drafts of the block. A head corrects the best CANDIDATES tokens of each place. All tokens
would take a product with the whole vocabulary for each place. The confidence head estimates how likely the draft of a
place is accepted, which stands in for its log-probability.

Embedding and head are the drafter's own in DeepSpec's files, and the target's in SpecForge's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, cast, get_args

import onnx_ir as ir

from dflash_trt.checkpoint.fields import Fields
from dflash_trt.checkpoint.schema import DrafterConfig, LayerAttention
from dflash_trt.errors import show
from dflash_trt.graph.builder import GraphBuilder
from dflash_trt.models.drafters.block import BlockPass, BlockSettings
from dflash_trt.models.drafters.kind import DrafterKind, DrafterParts
from dflash_trt.models.drafters.walk import PairScores, best_of, best_walk, confident, followed
from dflash_trt.models.gemma4 import gemma_decoder
from dflash_trt.models.module import Module
from dflash_trt.models.reading import QWEN_HEAD_DIM, decoder, layer_ids, refuse, windows

CANDIDATES = 64
Head = Literal["vanilla", "gated", "rnn"]
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
    "add_swa_attention_sink_bias": (False,),
    "attention_sink_bias": (False,),
    "causal": (False,),
    "final_logit_softcapping": (),
    "is_causal": (False,),
    "mlp_bias": (False,),
    "output_multiplier": (1,),
    "projector_type": ("dspark",),
}
# Where SpecForge's files have the fields that are the kind's own, which DeepSpec's have at the top.
_SECTIONS = ("dflash_config", "dspark_config")


def read_dspark(fields: Fields) -> DrafterConfig:
    """The configuration of a DSpark drafter, or of DeepSpec's DFlash, which has no Markov head.

    DeepSpec's files have an embedding and a head, and SpecForge's neither. `block_size` counts the rows. Where all of
    them predict, the block of a verification has one token more, the anchor.
    """
    tables = fields.strings("architectures", most=1) == ("Qwen3DSparkModel",)
    for name in _SECTIONS:
        if (section := fields.section(name)) is not None:
            fields, tables = _merged(fields, section), False
    refuse(fields, _NEUTRAL)
    common = decoder(fields, head_dim=QWEN_HEAD_DIM, qk_norm=True)
    layers = (LayerAttention(False, window) for window in windows(fields, common["num_hidden_layers"]))
    return drafter_config(fields, common, tuple(layers), tables=tables)


def _merged(fields: Fields, section: Fields) -> Fields:
    """The fields at the top with those of a section, which must agree."""
    there = {key: value for key, value in fields.values.items() if value is not None}
    for key, value in section.values.items():
        if key in there and value is not None and value != there[key]:
            raise section.wrong(key, f"but {key} at the top is {show(there[key])}")
    return Fields(fields.path, {**section.values, **there})


def drafter_config(
    fields: Fields, common: dict[str, Any], layers: tuple[LayerAttention, ...], *, tables: bool = True
) -> DrafterConfig:
    """The configuration of a drafter with these layers.

    common: as `reading.decoder` gives it. tables: the file must have an embedding and a head; otherwise it may.
    """
    # vLLM's name and llama.cpp's.
    every_row = not fields.boolean("dspark_bonus_anchor", default=False)
    every_row = fields.boolean("sample_from_anchor", default=every_row)
    vocabulary = common["vocab_size"] if tables else None
    settings = heads(fields, vocabulary, every_row=every_row, embedding=tables)
    return DrafterConfig(
        **common,
        layers=layers,
        block_size=fields.integer("block_size", minimum=2 - every_row, maximum=_ROWS) + every_row,
        mask_token_id=fields.integer("mask_token_id", minimum=0),
        target_layer_ids=layer_ids(fields, "target_layer_ids", minimum=-1),
        most_candidates=most_candidates(settings, common["vocab_size"]),
        settings=settings,
        row_scale=1.0,
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
    config, settings = block.config, block.config.settings
    rows, m = block.drafted(), block.m
    if m.has("logit_head.markov_head.markov_w1.weight"):  # as early versions of SpecForge saved the heads
        m = m.at("logit_head")
    logits, before = block.logits(rows), None
    if settings.rank:
        scores = PairScores.of_logits(block, logits, most_candidates(settings, config.vocab_size))
        with block.g.scope("markov"):
            tokens, logprobs, before = _markov(block, m.at("markov_head"), rows, scores)
    else:
        tokens, logprobs = block.best(logits)
    if settings.confidence:
        with block.g.scope("confidence"):
            before = before if settings.confidence_of_pair else None
            logprobs = confident(block, m, "confidence_head.proj", rows, before, logprobs)
    return block.model(tokens, logprobs)


def _table(m: Module, name: str, size: int, rank: int, ids: ir.Value) -> ir.Value:
    """Rows of a table [size, rank], in the graph's dtype."""
    g = m.g
    rows = g.op("Gather", m.raw(f"{name}.weight", size, rank), ids, name=name)
    return g.from_dtype(rows, m.dtype_of(f"{name}.weight"))


def _markov(
    block: BlockPass, m: Module, rows: ir.Value, scores: PairScores
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """The walk through pair scores. The third result has the rows of W1 of the tokens before, [B,P,r]."""
    g, config, settings = block.g, block.config, block.config.settings
    rank = settings.rank
    w1 = _table(m, "markov_w1", config.vocab_size, rank, scores.before)
    # W2 has the tokens of the head in the file, else the target's; here the candidates' rows [B,P,k,r].
    ids = scores.tokens if settings.vocabulary is None else scores.numbers
    w2 = _table(m, "markov_w2", settings.vocabulary or config.vocab_size, rank, ids)
    by_rank = g.op("Transpose", w2, name="by_rank", perm=[0, 1, 3, 2])
    if settings.head == "rnn":
        return _recurrent(block, m, rows, scores, w1, by_rank)
    left = w1
    if settings.head == "gated":
        (of_token,), part = _parts(block, m, "gate_proj", rank, rows, "rv")
        gate = g.op("Add", g.op("MatMul", w1, of_token, name="gate_of_token"), g.unsqueeze(part, 2))
        left = g.op("Mul", g.op("Sigmoid", gate, name="gate"), w1, name="gated")
    tokens, logprobs, behind = best_walk(block, scores, g.to_float(g.op("MatMul", left, by_rank, name="fit")))
    return tokens, logprobs, followed(g, w1, behind)


def _parts(
    block: BlockPass, m: Module, name: str, size: int, rows: ir.Value, order: str
) -> tuple[list[ir.Value], ir.Value]:
    """A layer of `size` numbers whose input is a row of the block and vectors of the rank, such as W1's.

    order: of the inputs, "r" for the row and "v" for a vector. Returns the weights of the vectors, [r,size] each, and
    what the rows give with the bias, [B,P,size].
    """
    g, sizes = block.g, {"r": block.config.hidden_size, "v": block.config.settings.rank}
    widths = [sizes[kind] for kind in order]
    weight = m.weight(f"{name}.weight", size, sum(widths))
    parts = list(g.multi("Split", weight, g.constant(widths), outputs=len(order), name="by_input", axis=1))
    of_row = parts.pop(order.index("r"))
    product = g.op("Gemm", rows, of_row, m.weight(f"{name}.bias", size), name="of_row", transB=1)
    turned = [g.op("Transpose", part, name="turned", perm=[1, 0]) for part in parts]
    return turned, g.op("Reshape", product, g.shape(block.batch, -1, size), name="by_place")


def _at(g: GraphBuilder, table: ir.Value, place: ir.Value) -> ir.Value:
    """The entries [B,...] of one place of a table [B,P,...]."""
    return g.op("Squeeze", g.op("Gather", table, place, name="row", axis=1), g.constant([1]), name="of_place")


def _recurrent(
    block: BlockPass, m: Module, rows: ir.Value, scores: PairScores, w1: ir.Value, by_rank: ir.Value
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """As `_markov`. A token depends on all before it, so the places follow one another.

    A shorter block takes all steps: those behind its end repeat its last place, and are cut off.
    """
    g, rank = block.g, block.config.settings.rank
    (of_state, of_token), of_rows = _parts(block, m, "joint_proj", 3 * rank, rows, "vvr")
    state = g.op("Expand", g.scalar(0.0), g.shape(block.batch, rank), name="state")
    behind = g.op("Expand", g.constant([0]), g.shape(block.batch), name="anchor")
    count = g.dim(of_rows, 1, name="places")
    last = g.op("Sub", count, g.constant([1]), name="last")
    steps: list[tuple[ir.Value, ...]] = []
    for number in range(block.config.block_size - 1):
        with g.scope(f"place.{number}"):
            place = g.op("Min", g.constant([number]), last, name="place")
            before = g.op("GatherND", _at(g, w1, place), g.unsqueeze(behind, 1), name="before", batch_dims=1)
            total = g.op(
                "Add", _at(g, of_rows, place), g.op("MatMul", before, of_token, name="of_token"), name="sum"
            )
            total = g.op("Add", total, g.op("MatMul", state, of_state, name="of_state"), name="total")
            gate, candidate, out = g.multi(
                "Split", total, g.constant([rank] * 3), outputs=3, name="thirds", axis=1
            )
            gate, candidate = g.op("Sigmoid", gate), g.op("Tanh", candidate)
            kept = g.op("Mul", gate, g.op("Sub", state, candidate), name="kept")
            state = g.op("Add", kept, candidate, name="state")
            out = g.unsqueeze(g.op("Tanh", out, name="output"), 1)
            fit = g.op(
                "Squeeze",
                g.op("MatMul", out, _at(g, by_rank, place), name="fit"),
                g.constant([1]),
                name="bias",
            )
            row = g.op("Add", _at(g, scores.logits, place), g.to_float(fit), name="corrected")
            behind = g.op("ArgMax", row, name="chosen", axis=-1, keepdims=0)
            steps.append((row, before))
    corrected, tokens_before = (
        g.slice(
            g.op("Concat", *(g.unsqueeze(x, 1) for x in of_steps), name="steps", axis=1), 0, count, axis=1
        )
        for of_steps in zip(*steps, strict=True)
    )
    return *best_of(block, scores, corrected), tokens_before


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
    return replace(config, settings=replace(config.settings, sandwich=True))


KINDS = (
    DrafterKind("Qwen3DSparkModel", "qwen3", read_dspark, build_dspark),
    DrafterKind("DSparkDraftModel", "qwen3", read_dspark, build_dspark),
    # The names of the text models whose configuration the drafter's was made from.
    DrafterKind(
        *("Gemma4DSparkModel", "gemma4_unified_text", _read_gemma4, build_dspark), also=("gemma4_text",)
    ),
)
