"""Drafters of one layer that draft token by token, as a chain in one graph.

The row of position j has a state of j and the embedding of token j + 1. Tap -1 is the target's embedding. So
the features alone hold both, except for the newest token, which is the anchor. The row of the last
committed position depends on the anchor. A pass therefore begins with that row again. The states of all
positions are a cache for it, g_cache.

The rows of committed positions enter as keys and values only: the layer is the only one. The row of the anchor gives
the first draft. Every further step takes the draft before it, and the layer's last row in place of the target's state.
Its keys and values are not committed, so they are apart from the cache. Where the heads of a row lie side by side,
these steps are a Loop, and a shorter draft takes fewer. Where heads lie apart, as for TensorRT, the steps are unrolled:
its loops cannot carry rows that grow in number. A shorter draft then takes all steps, and the last are cut off.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import onnx_ir as ir

from dflash_trt.graph.builder import FLOAT, INT64, GraphBuilder
from dflash_trt.models.attention import Attention, output_of, parts_of, products_of
from dflash_trt.models.decoder import Stream, embed
from dflash_trt.models.drafters.kind import DrafterParts, DrafterPass
from dflash_trt.models.module import Module
from dflash_trt.models.passes import Mixer, PassRows, rows_of

# The steps of the published measurements, and the anchor.
BLOCK = 8


@dataclass(frozen=True)
class _Mixer(Mixer):
    """The layer's attention on rows that come as a kind's layer gives them: `attend` has their keys and values."""

    attend: Callable[[Module, ir.Value], ir.Value]

    def layer(self, m: Module, i: int, x: ir.Value, written: ir.Value) -> ir.Value:
        return self.attend(m, x)


class ChainPass(DrafterPass):
    """One pass.

    Its rows are those of the features, and in front the last committed position's. At the beginning there is none, and
    rows begin one place later. first: the position of the first row. newest: the row of the anchor. order: the flat
    numbers of a pass's rows in its rows and one more. width: the numbers of a row that enters the layer. embedding: the
    place of the target's.
    """

    # The state of the next step: the normed row, or the row before its norm.
    recycles_norm = True

    def __init__(self, parts: DrafterParts, width: int) -> None:
        super().__init__(parts)
        g, self.width, self.embedding = self.g, width, self.root.at(parts.target.prefix)
        zero, one = g.constant(0), g.constant(1)
        from_start = g.op("Equal", self.start, zero, name="from_start")
        skipped = g.op("Cast", from_start, name="skipped", to=int(INT64))
        self.first = g.op("Max", g.op("Sub", self.start, one, name="before"), zero, name="first")
        self.newest = g.op("Max", g.op("Sub", self.n_features, skipped, name="behind"), zero, name="newest")
        self.n_written = g.op("Add", self.n_context, g.constant([1]), name="n_written")
        source = g.op("Add", g.arange(self.n_written), g.unsqueeze(skipped, 1), name="source")
        self.order = self.flat_rows(g.op("Min", source, self.n_context, name="clamped"), self.n_written)

    @abstractmethod
    def states(self, tapped: ir.Value) -> ir.Value:
        """The states [rows, D] of rows of taps [rows, n*D] without the embedding."""

    @abstractmethod
    def enter(self, m: Module, tokens: ir.Value, states: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Rows of embeddings and states [rows, D] as the layer's stream [rows, D], and what its attention gets, [rows,
        width]. m: the drafter's place in the graph or a subgraph.
        """

    @abstractmethod
    def layer(self, m: Module, mixer: Mixer, x: ir.Value, h: ir.Value) -> Stream:
        """The layer on what `enter` gives."""

    def drafted(self) -> ir.Model:
        """The graph: the layer on the rows of the pass, and the chain of drafts after the anchor's."""
        g = self.g
        tokens, states, kept = self._rows()
        position = g.op("Add", self.first, self.newest, name="position")
        stream, rows = self.enter(self.m, tokens, states)
        asking = PassRows(g, self.batch, g.constant([1]), g.unsqueeze(position, 1), self.config)
        lengths = g.op("Add", position, g.constant(1), name="lengths")
        (attention,) = self.mixers(self.first, self.n_written, asking, lengths)
        assert isinstance(attention, Attention)
        begin = g.op("Mul", g.arange(self.batch), g.op("Squeeze", self.n_written), name="begin")
        row = g.op("Add", begin, self.newest, name="row")
        with g.scope("first"):
            x, h = (g.op("Gather", value, row, name="input") for value in (stream, rows))
            mixer = _Mixer(lambda m, h: attention.layer(m, 0, h, rows, width=self.width))
            best, logprobs, state = self.best(self.m, *self.layer(self.m, mixer, x, h))
        chain = (UnrolledChain if self.parts.dialect.by_head else DraftChain)(
            self, attention.updated[0], position
        )
        drafts = chain.steps(best, logprobs, state, g.dim(self.block, 1, name="n_block"))
        g.output(kept, "g_cache_out.0", g.dtype, self._cache_shape)
        return self.model(*drafts)

    @property
    def _cache_shape(self) -> list[int | str]:
        heads = [1] if self.parts.dialect.by_head else []  # such a cache has heads, this one a single head
        return ["B", *heads, rows_of(self.parts.capacity, None), self.config.hidden_size]

    def _rows(self) -> tuple[ir.Value, ir.Value, ir.Value]:
        """Embeddings and states of the rows, [B*(S+1), D], and the updated cache of states."""
        g, hidden, dialect = self.g, self.config.hidden_size, self.parts.dialect
        cache = g.input("g_cache.0", g.dtype, self._cache_shape)
        taps = g.from_dtype(self.features, self.features.dtype or g.dtype)
        embedded = g.slice(taps, 0, hidden, axis=2, name="embedded")
        tapped = g.slice(taps, hidden, 2**31, axis=2, name="tapped")
        width = (len(self.config.target_layer_ids) - 1) * hidden
        states = self.states(g.op("Reshape", tapped, g.constant([-1, width]), name="flat"))
        states = g.op("Reshape", states, self.by_sequence, name="state_rows")
        kept = dialect.keep(g, cache, g.unsqueeze(states, 1) if dialect.by_head else states, self.start)
        flat = g.op("Squeeze", kept, g.constant([1]), name="kept") if dialect.by_head else kept
        last = g.op("GatherND", flat, g.unsqueeze(self.first, 1), name="last_state", batch_dims=1)
        states = g.op("Concat", g.unsqueeze(last, 1), states, name="all_states", axis=1)

        anchor = g.slice(self.block, 0, 1, axis=1, name="anchor")
        anchor = embed(self.embedding, anchor, self.target.vocab_size, hidden)
        anchor = g.op("Reshape", anchor, self.by_sequence, name="anchor_row")
        newest = g.op("Equal", g.arange(self.n_written), g.unsqueeze(self.n_features, 1), name="is_newest")
        tokens = g.op("Concat", embedded, anchor, name="tokens_and_one", axis=1)
        tokens = g.op("Where", g.unsqueeze(newest, 2), anchor, tokens, name="tokens")
        rows = [g.op("Reshape", x, g.constant([-1, hidden]), name="flat") for x in (tokens, states)]
        tokens, states = (g.op("Gather", x, self.order, name="ordered") for x in rows)
        return tokens, states, kept

    def best(self, m: Module, x: ir.Value, y: ir.Value | None) -> tuple[ir.Value, ir.Value, ir.Value]:
        """The candidates after a row x + y [B, D] of the layer, their log-probabilities, and the next step's state."""
        state, normed = m.add_norm(x, y, "norm", self.config.hidden_size, self.config.rms_norm_eps)
        numbers, logprobs = self.best_candidates(m.g, self.head_logits(m.g, normed))
        return self.tokens(m.g, numbers), logprobs, normed if self.recycles_norm else state


class DraftChain:
    """The steps after the first: a Loop over the drafts, with their own keys and values after the cache's.

    `caches`: keys and values [B, C, N*d], up to and including `position` [B].
    """

    row_axis = 1

    def __init__(self, kind: ChainPass, caches: Sequence[ir.Value], position: ir.Value) -> None:
        self.kind, self.m, self.config, self.batch = kind, kind.m, kind.config, kind.batch
        self.caches, self.position = caches, position
        g, config = kind.g, kind.config
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

    def _step(
        self,
        m: Module,
        token: ir.Value,
        state: ir.Value,
        attend: Callable[[Module, ir.Value], ir.Value],
    ) -> tuple[ir.Value, ir.Value, ir.Value]:
        """What `best` gives after a token [B] and a state [B, D], in the graph or subgraph of m."""
        config, embedding = self.config, self.kind.embedding.inside(m.g)
        embedded = embed(embedding, token, config.vocab_size, config.hidden_size)
        return self.kind.best(m, *self.kind.layer(m, _Mixer(attend), *self.kind.enter(m, embedded, state)))

    def steps(
        self, tokens: ir.Value, logprobs: ir.Value, state: ir.Value, n_block: ir.Value
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

        drafted, drafted_logprobs, after = self._step(
            *(self.m.inside(body), token, before, partial(self._attend, step_rows, number))
        )
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

    def _attend(self, step_rows: list[ir.Value], number: ir.Value, layer: Module, x: ir.Value) -> ir.Value:
        """One row of each sequence, over the cache and `step_rows`, those of earlier steps, to which it adds."""
        g, c, m = layer.g, self.config, layer.at("self_attn")
        n, size = c.num_key_value_heads, c.head_dim
        (q, *new), gate = self._row(m, x, number)
        step_rows[:] = [
            g.op("Concat", *rows, name="own", axis=1) for rows in zip(step_rows, new, strict=True)
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
        return output_of(m, c, c.layers[0], y, gate)

    def _row(self, m: Module, x: ir.Value, number: ir.Value) -> tuple[list[ir.Value], ir.Value | None]:
        """The query, key and value of a step's row, [B, 1, n*d] or [B, n, 1, d], and the gate of its output."""
        g, c, one = m.g, self.config, m.g.constant([1])
        position = g.op("Add", g.unsqueeze(self.position, 1), g.op("Add", number, one), name="position")
        row = PassRows(g, self.batch, one, position, c)
        products, gate = products_of(m, c, c.layers[0], x, x, self.kind.width)
        return m.dialect.heads(g, products, parts_of(m, c, c.heads, row, row)), gate


class UnrolledChain(DraftChain):
    """The same steps one after another, over `caches` [B, N, C, d].

    The scores over the cache and over the steps' own rows are computed apart and joined, so that no cache is copied.
    """

    row_axis = 2

    def _for_rows(self, mask: ir.Value) -> ir.Value:
        return mask

    def steps(
        self, tokens: ir.Value, logprobs: ir.Value, state: ir.Value, n_block: ir.Value
    ) -> tuple[ir.Value, ir.Value]:
        """As those of the Loop, for the longest block, of which the places of this one are kept."""
        g, config = self.m.g, self.config
        places: list[tuple[ir.Value, ir.Value]] = [(tokens, logprobs)]
        step_rows: tuple[list[ir.Value], list[ir.Value]] = ([], [])
        for number in range(config.block_size - 2):
            with g.scope(f"step.{number}"):
                attend = partial(self._over_both, step_rows, g.constant(number))
                tokens, logprobs, state = self._step(self.m, self._first(g, tokens), state, attend)
                places.append((tokens, logprobs))
        count = g.op("Sub", n_block, g.constant([1]), name="n_drafts")
        drafts = []
        for of_places in zip(*places, strict=True):
            every = g.op("Concat", *(g.unsqueeze(x, 1) for x in of_places), name="places", axis=1)
            drafts.append(g.slice(every, 0, count, axis=1, name="of_block"))
        return drafts[0], drafts[1]

    def _over_both(
        self, step_rows: tuple[list[ir.Value], list[ir.Value]], number: ir.Value, layer: Module, x: ir.Value
    ) -> ir.Value:
        """One row of each sequence, over the cache and `step_rows`, those of earlier steps, to which it adds."""
        g, c, m = layer.g, self.config, layer.at("self_attn")
        n, size = c.num_key_value_heads, c.head_dim
        (q, *new), gate = self._row(m, x, number)
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
        return output_of(m, c, c.layers[0], y, gate)
