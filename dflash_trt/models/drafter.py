"""The DFlash drafter's graph: one pass from the target's tapped states and an anchor to a block of drafts.

in:  features [B,S,n*D] (the rows the last target pass committed, n_features of them valid), n_features [B],
     start [B] (position of the first feature row), block [B,K] = [anchor, mask, ...], its own caches
out: draft_tokens [B,K-1], draft_logprobs [B,K-1] float32, updated caches

Context rows enter every layer as key and value only (arXiv 2602.06036, section 4.1): no query, no MLP, no input norm.
Context and block rows are written in one go: the block rows are moved up to follow the valid context rows, so slot j
holds position j, and the next pass, which starts at the first block row, overwrites the block.
"""

from __future__ import annotations

import onnx_ir as ir

from dflash_trt.checkpoint.config import DrafterConfig, TargetConfig
from dflash_trt.checkpoint.tensors import Checkpoint, Outline
from dflash_trt.graph.builder import FLOAT, INT64, GraphBuilder
from dflash_trt.graph.dialect import Dialect

from .decoder import CachedAttention, Module, Rows, embed, gated_mlp, ints, positions_from
from .target import lm_head

# Tapped states pass 2e4, their sums through fc would pass 65504. What comes out is normed, so a power of two before
# and its square on the norm's epsilon change nothing but the range.
FP16_FEATURE_SCALE = 2.0**-6


def build_drafter(
    config: DrafterConfig,
    checkpoint: Checkpoint | Outline,
    target: TargetConfig,
    target_checkpoint: Checkpoint | Outline,
    dialect: Dialect,
    *,
    folder: str,
    target_folder: str,
    capacity: int | str = "C",
    features_dtype: ir.DataType | None = None,
    head: tuple[Checkpoint | Outline, str] | None = None,
    metadata: dict[str, str] | None = None,
) -> ir.Model:
    """The drafter as an ONNX model. Embedding and head are the target's own tensors, in `target_folder`.

    `features_dtype` is what the target computes in, by default what the drafter does. `head` is a checkpoint that has
    nothing but a quantized LM head, and its folder, to use in place of the target's.

    Raises CheckpointError where a tensor is missing, has another shape than the config says, or is left over.
    """
    g = GraphBuilder("drafter", dtype=dialect.dtype)
    hidden, taps = config.hidden_size, len(config.target_layer_ids)
    features = g.input("features", features_dtype or g.dtype, ["B", "S", taps * hidden])
    n_features, start, block = ints(g, "n_features", "B"), ints(g, "start", "B"), ints(g, "block", "B", "K")
    batch = g.dim(block, 0, name="batch")
    n_context, n_block = g.dim(features, 1, name="n_context"), g.dim(block, 1, name="n_block")
    n_written = g.op("Add", n_context, n_block, name="n_written")
    block_start = g.op("Add", start, n_features, name="block_start")

    asking = Rows(g, batch, n_block, positions_from(g, block_start, n_block, name="block_positions"), config)
    written = Rows(g, batch, n_written, positions_from(g, start, n_written, name="written_positions"), config)
    lengths = g.op("Add", block_start, n_block, name="lengths")
    attention = CachedAttention(g, dialect, config, capacity, start, asking, written, lengths)
    order = _block_after_valid_context(g, batch, n_context, n_written, n_features)

    m = Module(g, checkpoint, folder, dialect)
    target_root = Module(g, target_checkpoint, target_folder, dialect)
    context = g.op("Reshape", features, g.constant([-1, taps * hidden]), name="flat_features")
    epsilon = config.rms_norm_eps
    if g.dtype == ir.DataType.FLOAT16:
        context = g.op("Mul", context, g.scalar(FP16_FEATURE_SCALE, features.dtype), name="into_range")
        epsilon *= FP16_FEATURE_SCALE**2
    context = m.linear(g.to_dtype(context, features.dtype or g.dtype), "fc", taps * hidden, hidden)
    context = m.rms_norm(context, "hidden_norm", hidden, epsilon)
    by_sequence = g.shape(batch, -1, hidden)
    context = g.op("Reshape", context, by_sequence, name="context")

    x = embed(target_root.at("model"), block, target.vocab_size, hidden)
    for i in range(config.num_hidden_layers):
        layer = m.at(f"layers.{i}")
        with g.scope(f"layers.{i}"):
            with g.scope("attention"):
                h = layer.rms_norm(x, "input_layernorm", hidden, config.rms_norm_eps)
                both = g.op(
                    "Concat", context, g.op("Reshape", h, by_sequence, name="block"), name="both", axis=1
                )
                both = g.op("Reshape", both, g.constant([-1, hidden]), name="flat")
                both = g.op("Gather", both, order, name="packed")
                h = attention.layer(layer.at("self_attn"), i, h, both)
                x = g.op("Add", x, h, name="residual")
            with g.scope("mlp"):
                h = layer.rms_norm(x, "post_attention_layernorm", hidden, config.rms_norm_eps)
                h = gated_mlp(layer.at("mlp"), h, hidden, config.intermediate_size)
                x = g.op("Add", x, h, name="residual")

    # Row i of the block predicts the token at its own position; row 0 is the anchor, which is known.
    drafted = g.op(
        "Slice", g.op("Reshape", x, by_sequence, name="by_row"), *map(g.constant, ([1], [2**31], [1]))
    )
    drafted = g.op("Reshape", drafted, g.constant([-1, hidden]), name="drafted")
    drafted = m.rms_norm(drafted, "norm", hidden, config.rms_norm_eps)
    if head is None:
        logits = lm_head(drafted, target_root, target)
    else:
        logits = Module(g, *head, dialect).linear(drafted, "lm_head", hidden, target.vocab_size)
    logits = g.to_float(logits)
    m.check_all_used()

    n_drafts = g.op("Sub", n_block, g.constant([1]), name="n_drafts")
    shape = g.shape(batch, n_drafts)
    tokens = g.op("ArgMax", logits, name="best", axis=-1, keepdims=0)
    logprobs = g.op("LogSoftmax", logits, name="logprobs", axis=-1)
    best = g.op("ReduceMax", logprobs, g.constant([-1]), name="best_logprob", keepdims=0)
    g.output(g.op("Reshape", tokens, shape), "draft_tokens", INT64, ["B", "K-1"])
    g.output(g.op("Reshape", best, shape), "draft_logprobs", FLOAT, ["B", "K-1"])
    return g.model(metadata or {})


def _block_after_valid_context(
    g: GraphBuilder, batch: ir.Value, n_context: ir.Value, n_written: ir.Value, n_features: ir.Value
) -> ir.Value:
    """Flat row numbers [B*(S+K)] that put each sequence's block rows right behind its valid context rows.

    The rows left over at the end repeat the last row; they land behind the block, where nothing looks.
    """
    i = g.arange(n_written)
    valid = g.unsqueeze(n_features, 1)
    shifted = g.op("Add", i, g.op("Sub", n_context, valid, name="skipped"), name="shifted")
    source = g.op("Where", g.op("Less", i, valid, name="is_context"), i, shifted, name="source")
    source = g.op("Min", source, g.op("Sub", n_written, g.constant([1]), name="final"), name="clamped")
    base = g.op("Mul", g.unsqueeze(g.arange(batch), 1), n_written, name="base")
    return g.op("Reshape", g.op("Add", base, source, name="order"), g.constant([-1]), name="flat_order")
