"""The DFlash drafter's graph: one pass from the target's tapped states and an anchor to a block of drafts.

in:  features [B,S,n*D] (the rows the last target pass committed, n_features of them valid), n_features [B],
     start [B] (position of the first feature row), block [B,K] = [anchor, mask, ...], its own caches
out: draft_tokens [B,K-1,W], draft_logprobs [B,K-1,W] float32, updated caches

Context rows enter every layer as key and value only (arXiv 2602.06036, section 4.1): no query, no MLP, no input norm.
Context and block rows are written together. The block rows follow the valid context rows directly, so slot j holds
position j. The next pass starts at the first block row and overwrites the block.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from dflash_trt.checkpoint.fields import Fields
from dflash_trt.checkpoint.schema import DrafterConfig, LayerAttention, TargetConfig
from dflash_trt.checkpoint.tensors import Checkpoint, Outline
from dflash_trt.errors import quoted, show
from dflash_trt.graph.builder import GraphBuilder
from dflash_trt.graph.dialect import Dialect
from dflash_trt.models.decoder import embed, gated_mlp
from dflash_trt.models.drafters.candidates import best_candidates, output_candidates
from dflash_trt.models.drafters.kind import DrafterKind
from dflash_trt.models.mixers import Pass, PassRows, ints, mixers, positions_from
from dflash_trt.models.module import Module
from dflash_trt.models.reading import HEAD_DIM, LAYERS, agreed, check_quantization, decoder, refuse, windows
from dflash_trt.models.target import lm_head

# Tapped states exceed 2e4, and their sums through fc would exceed 65504. The sums are normalized afterwards. So a
# power of two before fc, with its square on the norm's epsilon, changes only the range.
FP16_FEATURE_SCALE = 2.0**-6


_BLOCK = 1024  # published drafters have 8 to 16


def read_dflash(fields: Fields) -> DrafterConfig:
    """The configuration of a DFlash drafter, as z-lab publishes them.

    `block_size` may be in `dflash_config` or at the top level. Causality per layer is `is_causal`, else
    `dflash_config.causal`. Without both, exactly the sliding layers are causal (vLLM's rule for these checkpoints).

    Raises:
        CheckpointError: a field is missing, out of range, or requests something not supported.
    """
    dflash = fields.section("dflash_config")
    if dflash is None:
        raise fields.error(
            "dflash_config", "is missing, expected an object with mask_token_id and target_layer_ids"
        )
    check_quantization(fields)
    refuse(fields, _DRAFTER_NEUTRAL)
    refuse(dflash, {key: _DRAFTER_NEUTRAL.get(key, ()) for key in dflash.values if key not in _DFLASH_FIELDS})
    # Qwen3Config's default of head_dim is 128, not hidden_size / num_attention_heads.
    common = decoder(fields, head_dim=fields.integer("head_dim", maximum=HEAD_DIM, default=128), qk_norm=True)
    for key, size in (("draft_vocab_size", "vocab_size"), ("target_hidden_size", "hidden_size")):
        for place in (fields, dflash):
            if place.get(key) is not None and place.integer(key) != common[size]:
                raise place.error(
                    key, f"is {show(place.get(key))}, but {size} is {common[size]}: they must be equal"
                )
    taps = dflash.integers("target_layer_ids", most=LAYERS)
    if not taps or len(set(taps)) != len(taps):
        raise dflash.error(
            "target_layer_ids", f"is {quoted(list(taps))}, expected at least one layer and no duplicates"
        )
    causal = next((place.boolean(key) for place, key in _causal_places(fields, dflash)), None)
    block_size = agreed([(dflash, "block_size"), (fields, "block_size")], minimum=2, maximum=_BLOCK)
    if block_size is None:
        raise fields.error(
            "block_size", "is missing, here and in dflash_config, expected an integer of at least 2"
        )
    return DrafterConfig(
        **common,
        layers=tuple(
            LayerAttention(window is not None if causal is None else causal, window)
            for window in windows(fields, common["num_hidden_layers"])
        ),
        block_size=block_size,
        mask_token_id=dflash.integer("mask_token_id", minimum=0),
        target_layer_ids=taps,
        num_target_layers=agreed([(dflash, "num_target_layers"), (fields, "num_target_layers")], minimum=1),
    )


def _causal_places(fields: Fields, dflash: Fields) -> list[tuple[Fields, str]]:
    places = [(fields, "is_causal"), (dflash, "causal")]
    return [(place, key) for place, key in places if place.get(key) is not None]


_DFLASH_FIELDS = {
    "block_size",
    "mask_token_id",
    "target_layer_ids",
    "num_target_layers",
    "causal",
    "draft_vocab_size",
    "target_hidden_size",
}
# Fields of published drafters of other kinds that change the computation, with the values that leave it unchanged.
_DRAFTER_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "add_swa_attention_sink_bias": (False,),
    "attention_mode": ("gqa",),
    "attention_sink_bias": (False,),
    "attention_value_scale": (1,),
    "aux_hidden_state_layer_ids": (),
    "conv_group_size": (),
    "conv_kernel": (),
    "conv_kernel_size": (),
    "final_logit_softcapping": (),
    "is_neox_style": (True,),
    "kv_lora_rank": (),
    "markov_rank": (0,),
    "mask_embedding": (False,),
    "mlp_bias": (False,),
    "output_multiplier": (1,),
    "partial_rotary_factor": (1,),
    "projector_type": ("dflash",),
    "rope_interleave": (False,),
    "rope_interleaved": (False,),
    "sample_from_anchor": (False,),
    "selector_rank": (),
    "selector_top_k": (),
    "speculators_model_type": (),
    "swa_window": (),
    "swa_window_size": (),
    "use_aux_hidden_state": (True,),
    "use_swa": (False,),
}


def build_dflash(
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
    width: int = 1,
    head: tuple[Checkpoint | Outline, str] | None = None,
    metadata: dict[str, str] | None = None,
) -> ir.Model:
    """The drafter as an ONNX model. Embedding and head are the target's own tensors, in `target_folder`.

    features_dtype: the target's compute dtype; by default the drafter's.
    width: the candidates for each place, W.
    head: a checkpoint that contains only a quantized LM head, and its folder. It replaces the target's head.

    Raises CheckpointError if a tensor is missing, is unused, or has another shape than the config gives.
    """
    g = GraphBuilder("drafter", dtype=dialect.dtype)
    hidden, taps = config.hidden_size, len(config.target_layer_ids)
    features = g.input("features", features_dtype or g.dtype, ["B", "S", taps * hidden])
    n_features, start, block = ints(g, "n_features", "B"), ints(g, "start", "B"), ints(g, "block", "B", "K")
    batch = g.dim(block, 0, name="batch")
    n_context, n_block = g.dim(features, 1, name="n_context"), g.dim(block, 1, name="n_block")
    n_written = g.op("Add", n_context, n_block, name="n_written")
    block_start = g.op("Add", start, n_features, name="block_start")

    asking = PassRows(
        g, batch, n_block, positions_from(g, block_start, n_block, name="block_positions"), config
    )
    written = PassRows(
        g, batch, n_written, positions_from(g, start, n_written, name="written_positions"), config
    )
    lengths = g.op("Add", block_start, n_block, name="lengths")
    by_layer = mixers(Pass(g, dialect, config, capacity, start, asking, written, lengths))
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
                h = by_layer[i].layer(layer, i, h, both)
                x = g.op("Add", x, h, name="residual")
            with g.scope("mlp"):
                h = layer.rms_norm(x, "post_attention_layernorm", hidden, config.rms_norm_eps)
                h = gated_mlp(layer.at("mlp"), h, hidden, config.intermediate_size)
                x = g.op("Add", x, h, name="residual")

    # Row i of the block predicts the token at its own position. Row 0 is the anchor, which is known.
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

    output_candidates(g, *best_candidates(g, logits, width), batch, width)
    return g.model(metadata or {})


def _block_after_valid_context(
    g: GraphBuilder, batch: ir.Value, n_context: ir.Value, n_written: ir.Value, n_features: ir.Value
) -> ir.Value:
    """Flat row numbers [B*(S+K)] that move each sequence's block rows directly behind its valid context rows.

    The remaining rows repeat the last row. They land behind the block, where no query looks.
    """
    i = g.arange(n_written)
    valid = g.unsqueeze(n_features, 1)
    shifted = g.op("Add", i, g.op("Sub", n_context, valid, name="skipped"), name="shifted")
    source = g.op("Where", g.op("Less", i, valid, name="is_context"), i, shifted, name="source")
    source = g.op("Min", source, g.op("Sub", n_written, g.constant([1]), name="final"), name="clamped")
    base = g.op("Mul", g.unsqueeze(g.arange(batch), 1), n_written, name="base")
    return g.op("Reshape", g.op("Add", base, source, name="order"), g.constant([-1]), name="flat_order")


# All published DFlashDraftModels have model_type "qwen3" for any target: their layers are Qwen3's.
KIND = DrafterKind("DFlashDraftModel", "qwen3", read_dflash, build_dflash)
