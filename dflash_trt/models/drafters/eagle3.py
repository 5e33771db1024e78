"""EAGLE-3 (arXiv 2503.01840): one layer that drafts token by token, as a chain in one graph.

The row of position j has the tapped states of j and the embedding of token j + 1. Tap -1 is the target's embedding. So
the features alone hold both, except for the newest token, which is the anchor. The row of the last
committed position depends on the anchor. A pass therefore begins with that row again. The fused states of all
positions are a cache for it, g_cache.

The rows of committed positions enter as keys and values only: the layer is the only one. The row of the anchor gives
the first draft. Every further step takes the draft before it, and the layer's last row in place of tapped states. These
steps are a Loop with keys and values of its own, so that a shorter draft takes fewer steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from dflash_trt.checkpoint.fields import Fields
from dflash_trt.checkpoint.rope import read_rope
from dflash_trt.checkpoint.schema import DrafterConfig, LayerAttention, TargetConfig
from dflash_trt.checkpoint.tensors import Checkpoint, Outline, same_bytes
from dflash_trt.errors import CheckpointError, quoted, show
from dflash_trt.graph.builder import INT64, GraphBuilder
from dflash_trt.graph.dialect import Dialect
from dflash_trt.models.attention import Attention
from dflash_trt.models.decoder import embed
from dflash_trt.models.drafters.candidates import best_candidates, output_candidates
from dflash_trt.models.drafters.eagle3_chain import DraftChain, UnrolledChain, layer_input, rest_of_layer
from dflash_trt.models.drafters.kind import DrafterKind
from dflash_trt.models.drafters.vocabulary import OF_TRAINING, DraftVocabulary
from dflash_trt.models.mixers import mixers
from dflash_trt.models.module import Module
from dflash_trt.models.passes import Pass, PassRows, ints, positions_from
from dflash_trt.models.reading import LAYERS, check_quantization, decoder, refuse
from dflash_trt.models.target import lm_head

# The steps of the published measurements, and the anchor.
BLOCK = 8
_STATES = 3  # tapped states of a row, beside the embedding


@dataclass(frozen=True, kw_only=True)
class Eagle3:
    """The settings that differ between published checkpoints.

    vocabulary: tokens of the drafter's head. layer: the name of the layer.
    fc_norm: an RMSNorm on each tapped state. norm_before_fc: one on all of a row together.
    norm_output: the next step gets the normed row.
    norm_before_residual: the normed states are added to the attention's output, not the states themselves.
    """

    vocabulary: int
    layer: str = "midlayer"
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_output: bool = False
    norm_before_residual: bool = False


# What Transformers' LlamaConfig has without `rope_theta`, which SafeAILab's files leave out.
_THETA = 10_000.0
# Fields that change the computation, with the values that this module computes.
_NEUTRAL = {
    "mlp_bias": (False,),
    "parallel_drafting": (False,),
    "pretraining_tp": (1,),
    "sliding_window": (),
}
_NEUTRAL_EAGLE = {
    "next_layer_regular": (True,),
    "parallel_draft_step": (1,),
    "use_aux_hidden_state": (True,),
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
    "use_mtp_layernorm": (False,),
}


def read_eagle3(fields: Fields) -> DrafterConfig:
    """The configuration of an EAGLE-3 head: as SafeAILab publishes them, or as Model Optimizer exports them.

    The latter has an `eagle_config`, and its layer is `layers.0` in place of `midlayer`. `draft_vocab_size` tells
    either from a target.

    Raises:
        CheckpointError: a field is missing, out of range, or requests something not supported.
    """
    exported = fields.section("eagle_config")
    refuse(fields, _NEUTRAL)
    layers: tuple[int, ...] = ()
    if exported is not None:
        refuse(exported, _NEUTRAL_EAGLE)
        if exported.get("eagle_aux_hidden_state_layer_ids") is not None:
            layers = exported.integers("eagle_aux_hidden_state_layer_ids", most=LAYERS)
    return eagle3_config(
        fields,
        entered=layers,
        layer="midlayer" if exported is None else "layers.0",
        fc_norm=fields.boolean("fc_norm", default=False),
        norm_output=fields.boolean("norm_output", default=False),
    )


def eagle3_config(
    fields: Fields,
    *,
    entered: Sequence[int],
    layers: Fields | None = None,
    architecture: str | None = None,
    **own: Any,
) -> DrafterConfig:
    """The configuration of an EAGLE-3 head. `entered`: the layers whose input is tapped; none: the usual ones.

    layers: the fields of its layer, if they are apart. Then a layer of Qwen3's has norms of queries and keys.
    own: fields of `Eagle3`.
    """
    check_quantization(fields)
    apart = layers is not None
    layers = layers or fields
    common = decoder(
        layers,
        qk_norm=apart and layers.get("model_type") == "qwen3",
        rope=None if apart else read_rope(layers, theta=_THETA),
        architecture=architecture,
    )
    if common["num_hidden_layers"] != 1:
        raise layers.error("num_hidden_layers", f"is {common['num_hidden_layers']}, but EAGLE-3 has 1 layer")
    hidden = common["hidden_size"]
    if fields.get("target_hidden_size") is not None and fields.integer("target_hidden_size") != hidden:
        raise fields.error(
            "target_hidden_size",
            f"is {show(fields.get('target_hidden_size'))}, but hidden_size is {hidden}: they must be equal",
        )
    if entered and len(entered) != _STATES:
        raise fields.error(
            "eagle_aux_hidden_state_layer_ids", f"is {quoted(list(entered))}, expected {_STATES} layers"
        )
    vocabulary = fields.integer("draft_vocab_size", maximum=common["vocab_size"])
    return DrafterConfig(
        **common,
        layers=(LayerAttention(True, None),),
        block_size=BLOCK,
        mask_token_id=0,
        target_layer_ids=taps_entering(entered) if entered else (),
        num_target_layers=None,
        masks=False,
        most_candidates=vocabulary,
        own=Eagle3(vocabulary=vocabulary, **own),
    )


def taps_entering(layers: Sequence[int]) -> tuple[int, ...]:
    """Our taps for states that enter these layers: the embedding, and the states after the layers before them."""
    return (-1, *(layer - 1 for layer in layers))


def usual_taps(layers: int) -> tuple[int, ...]:
    """The taps of the official heads, which do not name them: what enters layers 2, N/2 and N - 3 of N."""
    return taps_entering([min(2, layers - 1), layers // 2, max(layers - 3, 0)])


def build_eagle3(
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
    """The head as an ONNX model. `kind.BuildDrafter` has the arguments.

    Raises CheckpointError if a tensor is missing, is unused, or has another shape than the config gives.
    """
    g = GraphBuilder("drafter", dtype=dialect.dtype)
    hidden, own = config.hidden_size, config.own
    features = g.input("features", features_dtype or g.dtype, ["B", "S", (_STATES + 1) * hidden])
    n_features, start, block = ints(g, "n_features", "B"), ints(g, "start", "B"), ints(g, "block", "B", "K")
    heads = [1] if dialect.by_head else []  # such a cache has heads, this one a single head
    g_cache = g.input("g_cache.0", g.dtype, ["B", *heads, capacity, hidden])
    batch, one, zero = g.dim(block, 0, name="batch"), g.constant([1]), g.constant([0])
    n_context = g.dim(features, 1, name="n_context")
    m, root = Module(g, checkpoint, folder, dialect), Module(g, target_checkpoint, target_folder, dialect)
    _check_embedding(checkpoint, target_checkpoint, m, target.prefix)
    by_sequence = g.shape(batch, -1, hidden)

    # The first row is the last committed position's. At the beginning there is none, and rows begin one place later.
    from_start = g.op("Equal", start, g.constant(0), name="from_start")
    skipped = g.op("Cast", from_start, name="skipped", to=int(INT64))
    first = g.op("Max", g.op("Sub", start, g.constant(1), name="before"), g.constant(0), name="first")
    n_written = g.op("Add", n_context, one, name="n_written")
    newest = g.op("Max", g.op("Sub", n_features, skipped, name="behind"), g.constant(0), name="newest")
    i = g.arange(n_written)
    source = g.op("Add", i, g.unsqueeze(skipped, 1), name="source")
    source = g.op("Min", source, n_context, name="clamped")
    base = g.op("Mul", g.unsqueeze(g.arange(batch), 1), n_written, name="base")
    order = g.op("Reshape", g.op("Add", base, source, name="order"), g.constant([-1]), name="flat_order")

    states = g.to_dtype(features, features.dtype or g.dtype)
    embedded = g.op("Slice", states, zero, g.constant([hidden]), g.constant([2]), name="embedded")
    tapped = g.op("Slice", states, g.constant([hidden]), g.constant([2**31]), g.constant([2]), name="tapped")
    fused = _fused(g, m, config, tapped)
    fused = g.op("Reshape", fused, by_sequence, name="fused_rows")
    updated = dialect.keep(g, g_cache, g.unsqueeze(fused, 1) if heads else fused, start)
    kept = g.op("Squeeze", updated, g.constant([1]), name="kept") if heads else updated
    last = g.op("GatherND", kept, g.unsqueeze(first, 1), name="last_fused", batch_dims=1)
    fused = g.op("Concat", g.unsqueeze(last, 1), fused, name="all_fused", axis=1)
    fused = g.op("Gather", g.op("Reshape", fused, g.constant([-1, hidden])), order, name="ordered")

    anchor = g.op("Slice", block, zero, one, one, name="anchor")
    anchor_row = embed(root.at(target.prefix), anchor, target.vocab_size, hidden)
    anchor_row = g.op("Reshape", anchor_row, by_sequence, name="anchor_row")
    is_newest = g.op("Equal", g.arange(n_written), g.unsqueeze(n_features, 1), name="is_newest")
    tokens = g.op("Concat", embedded, anchor_row, name="tokens_and_one", axis=1)
    tokens = g.op("Where", g.unsqueeze(is_newest, 2), anchor_row, tokens, name="tokens")
    tokens = g.op("Gather", g.op("Reshape", tokens, g.constant([-1, hidden])), order, name="ordered_tokens")

    position = g.op("Add", first, newest, name="position")
    asking = PassRows(g, batch, one, g.unsqueeze(position, 1), config)
    written = PassRows(
        g, batch, n_written, positions_from(g, first, n_written, name="written_positions"), config
    )
    lengths = g.op("Add", position, g.constant(1), name="lengths")
    mixer = mixers(Pass(g, dialect, config, capacity, first, asking, written, lengths))[0]
    assert isinstance(mixer, Attention)
    row = g.op(
        "Add", g.op("Mul", g.arange(batch), g.op("Squeeze", n_written), name="begin"), newest, name="row"
    )
    layer = m.at(own.layer)
    rows = layer_input(g, layer, config, tokens, fused)
    with g.scope("first"):
        x = g.op("Gather", rows, row, name="input")
        states_of_row = g.op("Gather", fused, row, name="states")
        y = mixer.layer(layer, 0, x, rows, width=2 * hidden)
        state = rest_of_layer(layer, config, states_of_row, y)
    vocabulary = DraftVocabulary(m, config, own.vocabulary)
    of_target = own.vocabulary == config.vocab_size and not m.has("lm_head.weight")

    def best(m: Module, state: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
        """The candidates after a row [B, D] of the layer, and what the next step takes for its states."""
        normed = m.rms_norm(state, "norm", hidden, config.rms_norm_eps)
        if head is not None:
            quantized = Module(g, *head, dialect).inside(m.g)
            logits = m.g.to_float(quantized.linear(normed, "lm_head", hidden, target.vocab_size))
        elif of_target:
            logits = m.g.to_float(lm_head(normed, root.inside(m.g), target))
        else:
            logits = vocabulary.logits(normed, m, hidden)
        numbers, logprobs = best_candidates(m.g, logits, width)
        return vocabulary.tokens(numbers, m), logprobs, normed if own.norm_output else state

    with g.scope("first"):
        found, logprobs, state = best(m, state)
    chain = (UnrolledChain if dialect.by_head else DraftChain)(
        m, config, root.at(target.prefix), mixer.updated[0], position, batch
    )
    all_tokens, all_logprobs = chain.steps(found, logprobs, state, g.dim(block, 1, name="n_block"), best)
    m.check_all_used(OF_TRAINING)
    output_candidates(g, all_tokens, all_logprobs, batch, width)
    g.output(updated, "g_cache_out.0", g.dtype, ["B", *heads, capacity, hidden])
    return g.model(metadata or {})


def _check_embedding(
    checkpoint: Checkpoint | Outline, target: Checkpoint | Outline, m: Module, prefix: str
) -> None:
    """A copy of the target's embedding may be there. Features hold the target's, so another one is refused."""
    name = "embed_tokens.weight"
    if isinstance(checkpoint, Checkpoint) and isinstance(target, Checkpoint) and m.has(name):
        m.ignore(name)
        mine, other = checkpoint[name], target[f"{prefix}.embed_tokens.weight"]
        if not same_bytes(mine, other):
            raise CheckpointError(
                f"{mine.file}: {name} differs from the target's model.embed_tokens.weight; an EAGLE-3 head with an "
                "embedding of its own is not supported"
            )


def _fused(g: GraphBuilder, m: Module, config: DrafterConfig, tapped: ir.Value) -> ir.Value:
    """fc over the tapped states [B, S, 3*D], normed first where the settings say so: [B*S, D]."""
    hidden = config.hidden_size
    flat = g.op("Reshape", tapped, g.constant([-1, _STATES * hidden]), name="flat")
    if config.own.norm_before_fc:
        flat = m.rms_norm(flat, "input_norm", _STATES * hidden, config.rms_norm_eps)
    if config.own.fc_norm:
        sizes = g.constant([hidden] * _STATES)
        parts = g.multi("Split", flat, sizes, outputs=_STATES, name="states", axis=1)
        normed = [
            m.rms_norm(part, f"fc_norm.{k}", hidden, config.rms_norm_eps) for k, part in enumerate(parts)
        ]
        flat = g.op("Concat", *normed, name="normed_states", axis=1)
    return m.linear(flat, "fc", _STATES * hidden, hidden)


KINDS = tuple(
    DrafterKind(name, "llama", read_eagle3, build_eagle3, taps=usual_taps, also=("qwen3", "qwen2"))
    for name in ("LlamaForCausalLMEagle3", "LlamaForCausalLM")
)
