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
from functools import partial
from typing import Any

import onnx_ir as ir

from dflash_trt.checkpoint.fields import Fields, stated
from dflash_trt.checkpoint.rope import read_rope
from dflash_trt.checkpoint.schema import DrafterConfig, LayerAttention
from dflash_trt.checkpoint.tensors import Checkpoint, same_bytes, tensor_names
from dflash_trt.errors import CheckpointError, quoted
from dflash_trt.graph.builder import INT64
from dflash_trt.models.attention import Attention
from dflash_trt.models.decoder import embed
from dflash_trt.models.drafters.eagle3_chain import DraftChain, UnrolledChain, layer_input, rest_of_layer
from dflash_trt.models.drafters.kind import (
    DrafterKind,
    DrafterParts,
    DrafterPass,
    DraftVocabulary,
)
from dflash_trt.models.module import Module
from dflash_trt.models.passes import PassRows, rows_of
from dflash_trt.models.reading import LAYERS, decoder, must_equal, refuse
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


NORMS = ("fc_norm", "norm_before_fc", "norm_output", "norm_before_residual")
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
    """The configuration of an EAGLE-3 head: as SafeAILab, SpecForge or Model Optimizer save them.

    The last two have an `eagle_config`. SafeAILab's and SpecForge's layer is `midlayer`, whose tapped states are the
    outputs of the layers in the file; Model Optimizer's is `layers.0`, whose states enter them. The tensors tell, and
    before they are there, the file does. `draft_vocab_size` tells either from a target.
    """
    exported = fields.section("eagle_config")
    refuse(fields, _NEUTRAL)
    places = [fields]
    if exported is not None:
        refuse(exported, _NEUTRAL_EAGLE)
        places.append(exported)
    names = tensor_names(fields.path.parent)
    midlayer = any(name.startswith("midlayer.") for name in names) if names else exported is None
    layers = () if exported is None else eagle3_layers(exported)
    norms: dict[str, Any] = {
        name: stated([(place, name) for place in places], Fields.boolean) or False for name in NORMS
    }
    return eagle3_config(
        fields,
        entered=tuple(layer + 1 for layer in layers) if midlayer else layers,
        layer="midlayer" if midlayer else "layers.0",
        **norms,
    )


def eagle3_layers(fields: Fields) -> tuple[int, ...]:
    """The layers whose input is tapped; none where the file does not name them."""
    layers = partial(Fields.integers, most=LAYERS)
    return stated([(fields, "eagle_aux_hidden_state_layer_ids")], layers) or ()


def eagle3_config(
    fields: Fields,
    *,
    entered: Sequence[int],
    layers: Fields | None = None,
    **settings: Any,
) -> DrafterConfig:
    """The configuration of an EAGLE-3 head. `entered`: the layers whose input is tapped; none: the usual ones.

    layers: the fields of its layer, if they are apart. Then a layer of Qwen3's has norms of queries and keys.
    settings: fields of `Eagle3`.
    """
    apart = layers is not None
    layers = layers or fields
    common = decoder(
        layers,
        qk_norm=apart and layers.get("model_type") == "qwen3",
        rope=None if apart else read_rope(layers, theta=_THETA),
    )
    if common["num_hidden_layers"] != 1:
        raise layers.error("num_hidden_layers", f"is {common['num_hidden_layers']}, but EAGLE-3 has 1 layer")
    must_equal(fields, "target_hidden_size", "hidden_size", common["hidden_size"])
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
        masks=False,
        most_candidates=vocabulary,
        own=Eagle3(vocabulary=vocabulary, **settings),
    )


def taps_entering(layers: Sequence[int]) -> tuple[int, ...]:
    """Our taps for states that enter these layers: the embedding, and the states after the layers before them."""
    return (-1, *(layer - 1 for layer in layers))


def usual_taps(layers: int) -> tuple[int, ...]:
    """The taps of the official heads, which do not name them: what enters layers 2, N/2 and N - 3 of N."""
    return taps_entering([min(2, layers - 1), layers // 2, max(layers - 3, 0)])


def build_eagle3(parts: DrafterParts) -> ir.Model:
    return _HeadPass(parts).drafted()


class _HeadPass(DrafterPass):
    """One pass of a head.

    Its rows are those of the features, and in front the last committed position's. At the beginning there is none, and
    rows begin one place later. first: the position of the first row. newest: the row of the anchor. order: the flat
    numbers of a pass's rows in its rows and one more.
    """

    def __init__(self, parts: DrafterParts) -> None:
        super().__init__(parts)
        g, config = self.g, self.config
        _check_embedding(self.m, self.root.at(parts.target.prefix))
        self.vocabulary = DraftVocabulary(self.m, config, config.own.vocabulary)
        zero, one = g.constant(0), g.constant(1)
        from_start = g.op("Equal", self.start, zero, name="from_start")
        skipped = g.op("Cast", from_start, name="skipped", to=int(INT64))
        self.first = g.op("Max", g.op("Sub", self.start, one, name="before"), zero, name="first")
        self.newest = g.op("Max", g.op("Sub", self.n_features, skipped, name="behind"), zero, name="newest")
        self.n_written = g.op("Add", self.n_context, g.constant([1]), name="n_written")
        source = g.op("Add", g.arange(self.n_written), g.unsqueeze(skipped, 1), name="source")
        self.order = self.flat_rows(g.op("Min", source, self.n_context, name="clamped"), self.n_written)

    def drafted(self) -> ir.Model:
        """The graph: the layer on the rows of the pass, and the chain of drafts after the anchor's."""
        g, config = self.g, self.config
        tokens, fused, kept = self._rows()
        position = g.op("Add", self.first, self.newest, name="position")
        layer = self.m.at(config.own.layer)
        rows = layer_input(layer, config, tokens, fused)
        mixer = self._attention(position)
        begin = g.op("Mul", g.arange(self.batch), g.op("Squeeze", self.n_written), name="begin")
        row = g.op("Add", begin, self.newest, name="row")
        with g.scope("first"):
            x = g.op("Gather", rows, row, name="input")
            states = g.op("Gather", fused, row, name="states")
            y = mixer.layer(layer, 0, x, rows, width=2 * config.hidden_size)
            best, logprobs, state = self._best(self.m, *rest_of_layer(layer, config, states, y))
        chain = (UnrolledChain if self.parts.dialect.by_head else DraftChain)(
            *(self.m, config, self.root.at(self.parts.target.prefix)),
            *(mixer.updated[0], position, self.batch),
        )
        n_block = g.dim(self.block, 1, name="n_block")
        drafts = chain.steps(best, logprobs, state, n_block, self._best)
        g.output(kept, "g_cache_out.0", g.dtype, self._cache_shape)
        return self.model(*drafts)

    @property
    def _cache_shape(self) -> list[int | str]:
        heads = [1] if self.parts.dialect.by_head else []  # such a cache has heads, this one a single head
        return ["B", *heads, rows_of(self.parts.capacity, None), self.config.hidden_size]

    def _rows(self) -> tuple[ir.Value, ir.Value, ir.Value]:
        """Embeddings and fused states of the rows, [B*(S+1), D], and the updated cache of fused states."""
        g, hidden, dialect = self.g, self.config.hidden_size, self.parts.dialect
        cache = g.input("g_cache.0", g.dtype, self._cache_shape)
        states = g.from_dtype(self.features, self.features.dtype or g.dtype)
        embedded = g.slice(states, 0, hidden, axis=2, name="embedded")
        fused = _fused(self.m, self.config, g.slice(states, hidden, 2**31, axis=2, name="tapped"))
        fused = g.op("Reshape", fused, self.by_sequence, name="fused_rows")
        kept = dialect.keep(g, cache, g.unsqueeze(fused, 1) if dialect.by_head else fused, self.start)
        flat = g.op("Squeeze", kept, g.constant([1]), name="kept") if dialect.by_head else kept
        last = g.op("GatherND", flat, g.unsqueeze(self.first, 1), name="last_fused", batch_dims=1)
        fused = g.op("Concat", g.unsqueeze(last, 1), fused, name="all_fused", axis=1)

        anchor = g.slice(self.block, 0, 1, axis=1, name="anchor")
        table = self.root.at(self.parts.target.prefix)
        anchor = embed(table, anchor, self.parts.target.vocab_size, hidden)
        anchor = g.op("Reshape", anchor, self.by_sequence, name="anchor_row")
        newest = g.op("Equal", g.arange(self.n_written), g.unsqueeze(self.n_features, 1), name="is_newest")
        tokens = g.op("Concat", embedded, anchor, name="tokens_and_one", axis=1)
        tokens = g.op("Where", g.unsqueeze(newest, 2), anchor, tokens, name="tokens")
        rows = [g.op("Reshape", x, g.constant([-1, hidden]), name="flat") for x in (tokens, fused)]
        tokens, fused = (g.op("Gather", x, self.order, name="ordered") for x in rows)
        return tokens, fused, kept

    def _attention(self, position: ir.Value) -> Attention:
        g = self.g
        asking = PassRows(g, self.batch, g.constant([1]), g.unsqueeze(position, 1), self.config)
        lengths = g.op("Add", position, g.constant(1), name="lengths")
        (mixer,) = self.mixers(self.first, self.n_written, asking, lengths)
        assert isinstance(mixer, Attention)
        return mixer

    def _best(self, m: Module, x: ir.Value, y: ir.Value | None) -> tuple[ir.Value, ir.Value, ir.Value]:
        """The candidates after a row x + y [B, D] of the layer, and what the next step takes for its states."""
        settings, hidden, target = self.config.own, self.config.hidden_size, self.parts.target
        state, normed = m.add_norm(x, y, "norm", hidden, self.config.rms_norm_eps)
        if self.head is not None:
            logits = self.head.inside(m.g).linear(normed, "lm_head", hidden, target.vocab_size)
        elif settings.vocabulary == self.config.vocab_size and not self.m.has("lm_head.weight"):
            logits = lm_head(normed, self.root.inside(m.g), target)
        else:
            logits = m.linear(normed, "lm_head", hidden, settings.vocabulary)
        numbers, logprobs = self.best_candidates(m.g, logits)
        return self.vocabulary.tokens(m.g, numbers), logprobs, normed if settings.norm_output else state


def _check_embedding(m: Module, target: Module) -> None:
    """A copy of the target's embedding may be there. Features hold the target's, so another one is refused."""
    name = "embed_tokens.weight"
    mine, other = m.checkpoint, target.checkpoint
    if isinstance(mine, Checkpoint) and isinstance(other, Checkpoint) and m.has(name):
        m.ignore(name)
        if not same_bytes(mine[name], other[target.prefix + name]):
            raise CheckpointError(
                f"{mine[name].file}: {name} differs from the target's model.embed_tokens.weight; an EAGLE-3 head with "
                "an embedding of its own is not supported"
            )


def _fused(m: Module, config: DrafterConfig, tapped: ir.Value) -> ir.Value:
    """fc over the tapped states [B, S, 3*D], normed first where the settings say so: [B*S, D]."""
    g, hidden = m.g, config.hidden_size
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
    for name in ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM")
)
