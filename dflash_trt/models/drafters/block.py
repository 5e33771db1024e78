"""The pass of the drafters that draft a block at once: from tapped states and an anchor to one row for each draft.

in:  features [B,S,n*D] (the rows the last target pass committed, n_features of them valid), n_features [B],
     start [B] (position of the first feature row), block [B,K] = [anchor, mask, ...], its own caches
out: draft_tokens [B,K-1,W], draft_logprobs [B,K-1,W] float32, updated caches

Context rows enter every layer as key and value only (arXiv 2602.06036, section 4.1): no query, no MLP, no input norm.
Context and block rows are written together. The block rows follow the valid context rows directly, so cache row j
holds position j. The next pass starts at the first block row and overwrites the block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import onnx_ir as ir

from dflash_trt.models.decoder import Stream, embed, gated_mlp, sandwich_layer, soft_capped, summed
from dflash_trt.models.drafters.kind import DrafterParts, DrafterPass
from dflash_trt.models.module import Module
from dflash_trt.models.passes import PassRows, positions_from

# Tapped states exceed 2e4, and their sums through fc would exceed 65504. The sums are normalized afterwards. So a
# power of two before fc, with its square on the norm's epsilon, changes only the range.
FP16_FEATURE_SCALE = 2.0**-6

# A change of block rows [B*R, D], before or after attention or the MLP.
Rows = Callable[[ir.Value], ir.Value]
Convolve = Callable[[Module, str, ir.Value], tuple[Rows, Rows]]


@dataclass(frozen=True, kw_only=True)
class BlockSettings:
    """Settings of a kind that drafts a block at once.

    every_row: the anchor's row predicts too. Then row i predicts the token after its own position, and K - 1 rows are
        enough. Otherwise row i predicts the token at its position, and the anchor's row nothing.
    vocabulary: tokens of the head that the file must have. None: the target's head, or one in the file for all tokens.
    embedding: the file must have an embedding. Otherwise it is the target's, or one in the file.
    sandwich: layers have norms before and after each half, and a scale (`decoder.sandwich_layer`).
    fusion: the names of the layer that fuses features, and of the norm after it.
    """

    every_row: bool = False
    vocabulary: int | None = None
    embedding: bool = False
    sandwich: bool = False
    fusion: tuple[str, str] = ("fc", "hidden_norm")


class BlockPass(DrafterPass):
    """The parts of a kind's graph, in the order of its methods. n_rows: rows of a block in the pass."""

    def __init__(self, parts: DrafterParts) -> None:
        super().__init__(parts)
        g, config = self.g, self.config
        self.settings: BlockSettings = config.settings or BlockSettings()
        self.rows_of_block = self.block
        if self.settings.every_row:
            self.rows_of_block = g.slice(self.block, 0, -1, axis=1, name="predicting")
        self.n_rows = g.dim(self.rows_of_block, 1, name="n_block")
        n_written = g.op("Add", self.n_context, self.n_rows, name="n_written")
        block_start = g.op("Add", self.start, self.n_features, name="block_start")
        positions = positions_from(g, block_start, self.n_rows, name="block_positions")
        asking = PassRows(g, self.batch, self.n_rows, positions, config)
        lengths = g.op("Add", block_start, self.n_rows, name="lengths")
        self.by_layer = self.mixers(self.start, n_written, asking, lengths)
        self.order = self._block_after_valid_context(n_written)
        self.find_head(self.settings.vocabulary)
        self.context = self._fused()

    def _block_after_valid_context(self, n_written: ir.Value) -> ir.Value:
        """Flat row numbers [B*(S+K)] that move each sequence's block rows directly after its valid context rows.

        The remaining rows repeat the last row. They land after the block, where no query looks.
        """
        g = self.g
        i, valid = g.arange(n_written), g.unsqueeze(self.n_features, 1)
        shifted = g.op("Add", i, g.op("Sub", self.n_context, valid, name="skipped"), name="shifted")
        source = g.op("Where", g.op("Less", i, valid, name="is_context"), i, shifted, name="source")
        last = g.op("Sub", n_written, g.constant([1]), name="final")
        return self.flat_rows(g.op("Min", source, last, name="clamped"), n_written)

    def _fused(self) -> ir.Value:
        """The fused features [B, S, D] that every layer takes its context rows from."""
        g, m, config = self.g, self.m, self.config
        width, hidden = len(config.target_layer_ids) * config.hidden_size, config.hidden_size
        context = g.op("Reshape", self.features, g.constant([-1, width]), name="flat_features")
        epsilon = config.rms_norm_eps
        if g.dtype == ir.DataType.FLOAT16:
            scale = g.scalar(FP16_FEATURE_SCALE, self.features.dtype)
            context = g.op("Mul", context, scale, name="into_range")
            epsilon *= FP16_FEATURE_SCALE**2
        layer, norm = self.settings.fusion
        context = m.linear(g.from_dtype(context, self.features.dtype or g.dtype), layer, width, hidden)
        context = m.rms_norm(context, norm, hidden, epsilon)
        return g.op("Reshape", context, self.by_sequence, name="context")

    def _embedded(self) -> ir.Value:
        has_embedding = self.settings.embedding or self.m.has("embed_tokens.weight")
        root = self.m if has_embedding else self.root.at(self.target.prefix)
        target_scale = self.target.embedding_scale if self.config.row_scale is None else self.config.row_scale
        scale = self.config.embedding_scale if has_embedding else target_scale
        return embed(root, self.rows_of_block, self.target.vocab_size, self.config.hidden_size, scale=scale)

    def _layer(self, i: int, x: ir.Value, y: ir.Value | None, convolve: Convolve | None) -> Stream:
        """Layer i on the block rows x + y [B*R, D], of which y may be absent.

        `convolve(m, name, u)` gives what is done before and after the sublayer `name`, whose normed input is u.
        """
        g, layer, config = self.g, self.m.at(f"layers.{i}"), self.config
        size, epsilon = config.hidden_size, config.rms_norm_eps

        def attention(h: ir.Value) -> ir.Value:
            return self.by_layer[i].layer(layer, i, h, self._behind_context(h))

        def mlp(h: ir.Value) -> ir.Value:
            return gated_mlp(layer.at("mlp"), h, size, config.intermediate_size, activation=config.activation)

        if self.settings.sandwich:
            x, h = layer.add_norm(x, y, "input_layernorm", size, epsilon)
            return sandwich_layer(layer, config, x, h, attention, lambda h, _: (mlp(h), None))
        sublayers = (("attention", "input_layernorm", attention), ("mlp", "post_attention_layernorm", mlp))
        for name, norm, sublayer in sublayers:
            with g.scope(name):
                x, h = layer.add_norm(x, y, norm, size, epsilon)
                if convolve is None:
                    y = sublayer(h)
                else:
                    before, after = convolve(layer, f"{name}_conv", h)
                    y = after(sublayer(before(h)))
        return x, y

    def _behind_context(self, rows: ir.Value) -> ir.Value:
        """Context rows and block rows [B*R, D] as they are written, [B*(S+R), D]."""
        g = self.g
        parts = [g.op("Reshape", part, self.by_sequence, name="rows") for part in (self.context, rows)]
        both = g.op("Concat", *parts, name="both", axis=1)
        both = g.op("Reshape", both, g.constant([-1, self.config.hidden_size]), name="flat")
        return g.op("Gather", both, self.order, name="packed")

    def drafted(self, convolve: Convolve | None = None) -> ir.Value:
        """The normed rows that predict, [B*(K-1), D]. `convolve`: see `_layer`."""
        g, config, y = self.g, self.config, None
        x = self._embedded()
        for i in range(config.num_hidden_layers):
            with g.scope(f"layers.{i}"):
                x, y = self._layer(i, x, y, convolve)
        if not self.settings.every_row:  # Row 0 is the anchor, which is known.
            x, y = g.op("Reshape", summed(g, x, y), self.by_sequence, name="by_row"), None
            x = g.slice(x, 1, 2**31, axis=1)
            x = g.op("Reshape", x, g.constant([-1, config.hidden_size]), name="drafted")
        return self.m.add_norm(x, y, "norm", config.hidden_size, config.rms_norm_eps)[1]

    def logits(self, rows: ir.Value, *, multiplier: float = 1.0) -> ir.Value:
        """Normed rows [rows, D] through the head, times `multiplier`, with the drafter's soft-cap: [rows, V]."""
        logits = self.head_logits(self.g, rows)
        return soft_capped(self.g, logits, self.config.logit_softcap, multiplier=multiplier)

    def best(self, logits: ir.Value) -> tuple[ir.Value, ir.Value]:
        """The W best tokens of each row of logits [rows, V], by the target's ids, and their log-probabilities."""
        numbers, logprobs = self.best_candidates(self.g, logits)
        return self.tokens(self.g, numbers), logprobs
