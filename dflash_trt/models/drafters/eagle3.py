"""EAGLE-3 (arXiv 2503.01840): one layer that drafts token by token, as a chain in one graph.

The row of position j has the tapped states of j and the embedding of token j + 1. Tap -1 is the target's embedding. So
the features alone hold both, except for the newest token, which is the anchor. The row of the last
committed position depends on the anchor. A pass therefore begins with that row again. The fused states of all
positions are a cache for it, g_cache.

The rows of committed positions enter as keys and values only: the layer is the only one. The row of the anchor gives
the first draft. Every further step takes the draft before it, and the layer's last row in place of tapped states. Its
keys and values are not committed, so they are apart from the cache. Where the heads of a row lie side by side, these
steps are a Loop, and a shorter draft takes fewer. Where heads lie apart, as for TensorRT, the steps are unrolled: its
loops cannot carry rows that grow in number. A shorter draft then takes all steps, and the last are cut off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir

from dflash_trt.checkpoint.fields import Fields, stated
from dflash_trt.checkpoint.rope import read_rope
from dflash_trt.checkpoint.schema import DrafterConfig, LayerAttention
from dflash_trt.checkpoint.tensors import Checkpoint, same_bytes, tensor_names
from dflash_trt.errors import CheckpointError, quoted
from dflash_trt.graph.builder import FLOAT, INT64, GraphBuilder
from dflash_trt.models.attention import Attention, parts_of
from dflash_trt.models.decoder import Stream, embed, gated_mlp
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
    windowed = fields.boolean("use_sliding_window", default=True)
    refuse(fields, {name: kept for name, kept in _NEUTRAL.items() if windowed or name != "sliding_window"})
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


def layer_input(layer: Module, config: DrafterConfig, tokens: ir.Value, states: ir.Value) -> ir.Value:
    """The normed embeddings beside the normed states, [rows, 2*D]."""
    token = layer.rms_norm(tokens, "input_layernorm", config.hidden_size, config.rms_norm_eps)
    state = layer.rms_norm(states, "hidden_norm", config.hidden_size, config.rms_norm_eps)
    return layer.g.op("Concat", token, state, name="layer_input", axis=1)


def rest_of_layer(layer: Module, config: DrafterConfig, states: ir.Value, attended: ir.Value) -> Stream:
    """The layer after its attention, rows [rows, D]."""
    hidden = config.hidden_size
    if config.own.norm_before_residual:
        states = layer.rms_norm(states, "hidden_norm", hidden, config.rms_norm_eps)
    x, h = layer.add_norm(attended, states, "post_attention_layernorm", hidden, config.rms_norm_eps)
    return x, gated_mlp(layer.at("mlp"), h, hidden, config.intermediate_size)


class DraftChain:
    """The steps after the first: a Loop over the drafts, with their own keys and values after the cache's.

    `caches`: keys and values [B, C, N*d], up to and including `position` [B].
    """

    row_axis = 1

    def __init__(
        self,
        m: Module,
        config: DrafterConfig,
        embedding: Module,
        caches: Sequence[ir.Value],
        position: ir.Value,
        batch: ir.Value,
    ) -> None:
        self.m, self.config, self.embedding, self.caches = m, config, embedding, caches
        self.position, self.batch = position, batch
        g = m.g
        cache_rows = g.arange(g.dim(caches[0], self.row_axis, name="cache_rows"))
        seen = g.op("LessOrEqual", cache_rows, g.unsqueeze(position, 1), name="seen")
        shown, hidden = (g.constant(x, np.float32) for x in (0, np.finfo(np.float32).min))
        mask = g.op("Where", seen, shown, hidden, name="mask")
        self.group = config.num_attention_heads // config.num_key_value_heads
        self.mask = self._for_rows(g.unsqueeze(mask, 1, 2))

    def _for_rows(self, mask: ir.Value) -> ir.Value:
        """A mask [B, 1, 1, C], for the query heads of a key-value head as rows of one product."""
        g = self.m.g
        return g.op("Expand", mask, g.shape(1, 1, self.group, 1), name="chain_mask")

    def steps(
        self, tokens: ir.Value, logprobs: ir.Value, state: ir.Value, n_block: ir.Value, best: Any
    ) -> tuple[ir.Value, ir.Value]:
        """Candidates and log-probabilities [B, K-1, W], from those of the first step, [B, W], and its row [B, D]."""
        g, config = self.m.g, self.config
        body = g.body("step")
        number = body.input("step", INT64, [])
        body.input("going", ir.DataType.BOOL, [])
        token = body.input("token", INT64, ["B"])
        before = body.input("state", g.dtype, ["B", config.hidden_size])
        size = config.num_key_value_heads * config.head_dim
        step_rows = [body.input(name, g.dtype, ["B", "T", size]) for name in ("own_keys", "own_values")]

        m = self.m.inside(body)
        layer = m.at(config.own.layer)
        embedded = embed(self.embedding.inside(body), token, config.vocab_size, config.hidden_size)
        x = layer_input(layer, config, embedded, before)
        step_rows, attended = self._attend(layer, x, step_rows, number)
        drafted, drafted_logprobs, after = best(m, *rest_of_layer(layer, config, before, attended))
        outputs: list[tuple[ir.Value, str, ir.DataType]] = [
            (body.op("Identity", body.graph.inputs[1]), "still_going", ir.DataType.BOOL),
            (self._first(body, drafted), "next_token", INT64),
            (body.op("Identity", after), "next_state", g.dtype),
            (step_rows[0], "all_own_keys", g.dtype),
            (step_rows[1], "all_own_values", g.dtype),
            (body.op("Identity", drafted), "drafted", INT64),
            (body.op("Identity", drafted_logprobs), "drafted_logprobs", FLOAT),
        ]
        for value, name, dtype in outputs:
            value.name, value.type = f"{body.graph.name}/{name}", ir.TensorType(dtype)
            body.graph.outputs.append(value)

        none = g.op("Expand", g.scalar(0.0), g.shape(self.batch, 0, size), name="no_rows")
        count = g.op("Squeeze", g.op("Sub", n_block, g.constant([2]), name="n_steps"), name="steps")
        going = g.constant(True, np.bool_)
        results = g.multi(
            "Loop",
            *(count, going, self._first(g, tokens), state, none, none),
            outputs=6,
            name="chain",
            body=body.graph,
        )
        rows = []
        for one, others in zip((tokens, logprobs), results[4:], strict=True):
            every = g.op("Concat", g.unsqueeze(one, 0), others, name="places", axis=0)
            rows.append(g.op("Transpose", every, name="by_sequence", perm=[1, 0, 2]))
        return rows[0], rows[1]

    @staticmethod
    def _first(g: GraphBuilder, tokens: ir.Value) -> ir.Value:
        """The best of candidates [B, W]."""
        first = g.slice(tokens, 0, 1, axis=1, name="first")
        return g.op("Squeeze", first, g.constant([1]), name="first_token")

    def _attend(
        self, layer: Module, x: ir.Value, step_rows: list[ir.Value], number: ir.Value
    ) -> tuple[list[ir.Value], ir.Value]:
        """One row of each sequence, over the cache and the rows of earlier steps. Returns the latter with this row."""
        g, c, m = layer.g, self.config, layer.at("self_attn")
        n, size = c.num_key_value_heads, c.head_dim
        q, k, v = self._row(m, x, number)
        step_rows = [
            g.op("Concat", old, new, name="own", axis=1) for old, new in zip(step_rows, (k, v), strict=True)
        ]
        both = [
            g.op("Concat", cache, rows, name="all", axis=1)
            for cache, rows in zip(self.caches, step_rows, strict=True)
        ]
        # The query heads of a key-value head are rows of one product.
        q = g.op("Reshape", q, g.constant([0, n, self.group, size]), name="heads")
        q = g.op("Transpose", q, name="grouped", perm=[0, 2, 1, 3])
        q = g.op("Reshape", q, g.constant([0, self.group, n * size]), name="rows")
        shown = g.op(
            "Expand",
            g.constant(0, np.float32),
            g.shape(self.batch, 1, self.group, g.dim(step_rows[0], 1, name="n_own")),
            name="own_shown",
        )
        mask = g.op("Concat", self.mask, shown, name="mask", axis=3)
        y = g.op("Attention", q, *both, mask, name="attended", q_num_heads=n, kv_num_heads=n)
        y = g.op("Reshape", y, g.constant([0, self.group, n, size]), name="groups")
        y = g.op("Transpose", y, name="ungrouped", perm=[0, 2, 1, 3])
        y = g.op("Reshape", y, g.constant([-1, c.num_attention_heads * size]), name="merge")
        return step_rows, m.linear(
            y, "o_proj", c.num_attention_heads * size, c.hidden_size, bias=c.attention_bias
        )

    def _row(self, m: Module, x: ir.Value, number: ir.Value) -> list[ir.Value]:
        """The query, key and value of a step's row: [B, 1, n*d], or [B, n, 1, d]."""
        g, c, one = m.g, self.config, m.g.constant([1])
        position = g.op("Add", g.unsqueeze(self.position, 1), g.op("Add", number, one), name="position")
        row = PassRows(g, self.batch, one, position, c)
        parts = parts_of(m, c, c.heads, row, row)
        columns = {f"{kind}_proj": part.columns for kind, part in parts.items()}
        products = m.products(x, columns, 2 * c.hidden_size, bias=c.attention_bias)
        return m.dialect.heads(g, [([name[0] for name in names], y) for names, y in products], parts)


class UnrolledChain(DraftChain):
    """The same steps one after another, over `caches` [B, N, C, d].

    The scores over the cache and over the steps' own rows are computed apart and joined, so that no cache is copied.
    """

    row_axis = 2

    def _for_rows(self, mask: ir.Value) -> ir.Value:
        return mask

    def steps(
        self, tokens: ir.Value, logprobs: ir.Value, state: ir.Value, n_block: ir.Value, best: Any
    ) -> tuple[ir.Value, ir.Value]:
        """As those of the Loop, for the longest block, of which the places of this one are kept."""
        g, config, layer = self.m.g, self.config, self.m.at(self.config.own.layer)
        places: list[tuple[ir.Value, ir.Value]] = [(tokens, logprobs)]
        step_rows: tuple[list[ir.Value], list[ir.Value]] = ([], [])
        for number in range(config.block_size - 2):
            with g.scope(f"step.{number}"):
                token = self._first(g, tokens)
                embedded = embed(self.embedding, token, config.vocab_size, config.hidden_size)
                x = layer_input(layer, config, embedded, state)
                attended = self._over_both(layer, x, step_rows, g.constant(number))
                tokens, logprobs, state = best(self.m, *rest_of_layer(layer, config, state, attended))
                places.append((tokens, logprobs))
        count = g.op("Sub", n_block, g.constant([1]), name="n_drafts")
        drafts = []
        for of_places in zip(*places, strict=True):
            every = g.op("Concat", *(g.unsqueeze(x, 1) for x in of_places), name="places", axis=1)
            drafts.append(g.slice(every, 0, count, axis=1, name="of_block"))
        return drafts[0], drafts[1]

    def _over_both(
        self, layer: Module, x: ir.Value, step_rows: tuple[list[ir.Value], list[ir.Value]], number: ir.Value
    ) -> ir.Value:
        """One row of each sequence, over the cache and `step_rows`, those of earlier steps, to which it adds."""
        g, c = layer.g, self.config
        n, size = c.num_key_value_heads, c.head_dim
        q, *new = self._row(layer.at("self_attn"), x, number)
        for rows, row in zip(step_rows, new, strict=True):
            rows.append(row)
        keys, values = (g.op("Concat", *rows, name="own", axis=2) for rows in step_rows)
        q = g.op("Mul", g.to_float(q), g.scalar(size**-0.5, FLOAT), name="scaled")
        q = g.op("Reshape", g.from_dtype(q, FLOAT), g.constant([0, n, self.group, size]), name="groups")

        def scores(keys: ir.Value) -> ir.Value:
            turned = g.op("Transpose", keys, name="turned", perm=[0, 1, 3, 2])
            return g.to_float(g.op("MatMul", q, turned, name="scores"))

        of_cache = g.op("Add", scores(self.caches[0]), self.mask, name="masked")
        shares = g.op("Concat", of_cache, scores(keys), name="all_scores", axis=3)
        shares = g.from_dtype(g.op("Softmax", shares, name="shares", axis=-1), FLOAT)
        cache_rows = g.dim(self.caches[0], 2, name="cache_rows")
        of_cache = g.slice(shares, 0, cache_rows, axis=3, name="of_cache")
        of_steps = g.slice(shares, cache_rows, 2**31, axis=3, name="of_steps")
        y = g.op(
            "Add",
            g.op("MatMul", of_cache, self.caches[1], name="from_cache"),
            g.op("MatMul", of_steps, values, name="from_steps"),
            name="attended",
        )
        y = g.op("Reshape", y, g.constant([-1, c.num_attention_heads * size]), name="merge")
        return layer.at("self_attn").linear(
            y, "o_proj", c.num_attention_heads * size, c.hidden_size, bias=c.attention_bias
        )


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
