"""The steps of an EAGLE-3 head after the first. Each takes the draft before it, and the layer's last row.

A step's keys and values are not committed, so they are apart from the cache. Where the heads of a row lie side by side,
the steps are a Loop, and a shorter draft takes fewer. Where heads lie apart, as for TensorRT, the steps are unrolled.
Its loops cannot carry rows that grow in number. A shorter draft then takes all steps, and the last are cut off.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from dflash_trt.checkpoint.schema import DrafterConfig
from dflash_trt.graph.builder import INT64, GraphBuilder
from dflash_trt.models.attention import parts_of
from dflash_trt.models.decoder import Stream, embed, gated_mlp
from dflash_trt.models.module import Module
from dflash_trt.models.passes import PassRows


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
            (body.op("Identity", drafted_logprobs), "drafted_logprobs", ir.DataType.FLOAT),
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
        q = g.op("Mul", g.to_float(q), g.scalar(size**-0.5, ir.DataType.FLOAT), name="scaled")
        q = g.op(
            "Reshape", g.from_dtype(q, ir.DataType.FLOAT), g.constant([0, n, self.group, size]), name="groups"
        )

        def scores(keys: ir.Value) -> ir.Value:
            turned = g.op("Transpose", keys, name="turned", perm=[0, 1, 3, 2])
            return g.to_float(g.op("MatMul", q, turned, name="scores"))

        of_cache = g.op("Add", scores(self.caches[0]), self.mask, name="masked")
        shares = g.op("Concat", of_cache, scores(keys), name="all_scores", axis=3)
        shares = g.from_dtype(g.op("Softmax", shares, name="shares", axis=-1), ir.DataType.FLOAT)
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
