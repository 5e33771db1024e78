"""The contract of a kind of drafter, and the common parts of their graphs; the modules beside this one have the kinds.

A drafter's graph takes the features that the target committed since the last pass, an anchor and its own caches. It
returns W candidates for each place, best first, with their log-probabilities. docs/graphs.md gives the inputs and
outputs with their shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from dflash_trt.checkpoint.fields import Fields
from dflash_trt.checkpoint.schema import DrafterConfig, TargetConfig
from dflash_trt.checkpoint.tensors import Checkpoint, Outline
from dflash_trt.errors import CheckpointError
from dflash_trt.graph.builder import FLOAT, INT64, GraphBuilder
from dflash_trt.graph.dialect import Dialect
from dflash_trt.models.module import Module
from dflash_trt.models.passes import Capacity, Mixer, Pass, PassRows, positions_from
from dflash_trt.models.target import lm_head, mixers


@dataclass(frozen=True)
class DrafterParts:
    """What a drafter's graph is made from. The target's checkpoint is there because the two share embedding and head.

    folder, target_folder: where the weights lie in the bundle. capacity: cache rows (`Capacity`).
    features_dtype: that of the target's features, by default the dialect's. width: the candidates for each place.
    head: the drafter's own copy of the target's head, and its folder.
    """

    config: DrafterConfig
    checkpoint: Checkpoint | Outline
    target: TargetConfig
    target_checkpoint: Checkpoint | Outline
    dialect: Dialect
    folder: str
    target_folder: str
    capacity: Capacity = "C"
    features_dtype: ir.DataType | None = None
    width: int = 1
    head: tuple[Checkpoint | Outline, str] | None = None


@dataclass(frozen=True)
class DrafterKind:
    """A kind of drafter, with the `architecture` and `model_type` of config.json. Other model types have `also`.

    read: turns the file's fields into a configuration: block size, mask token, and the target's tapped layers. Raises
        CheckpointError if a field is missing, out of range, or requests something not supported.
    build: makes the graph. Raises CheckpointError if a tensor is missing, is unused, or has another shape than the
        config gives.
    taps: the tapped layers for a target of this many layers, if the file does not name them.
    vocabulary_of_target: the file has no vocab_size, and takes the target's.
    """

    architecture: str
    model_type: str
    read: Callable[[Fields], DrafterConfig]
    build: Callable[[DrafterParts], ir.Model]
    taps: Callable[[int], tuple[int, ...]] | None = None
    also: tuple[str, ...] = ()
    vocabulary_of_target: bool = False


class DrafterPass:
    """One pass of a drafter.

    m, root, head: the drafter's checkpoint, the target's, and that of the drafter's own head, if any: in its file, or a
        copy of the target's that is quantized, or has fewer rows, or both.
    vocabulary: the tokens of that head; None: all.
    """

    def __init__(self, parts: DrafterParts) -> None:
        self.parts, self.config, self.target = parts, parts.config, parts.target
        g = self.g = GraphBuilder("drafter", dtype=parts.dialect.dtype)
        self.m = Module(g, parts.checkpoint, parts.folder, parts.dialect)
        self.root = Module(g, parts.target_checkpoint, parts.target_folder, parts.dialect)
        self.head = None if parts.head is None else Module(g, *parts.head, parts.dialect)
        self.vocabulary: DraftVocabulary | None = None
        hidden = self.config.hidden_size
        taps = len(self.config.target_layer_ids) * hidden
        self.features = g.input("features", parts.features_dtype or g.dtype, ["B", "S", taps])
        self.n_features, self.start = (g.input(name, INT64, ["B"]) for name in ("n_features", "start"))
        self.block = g.input("block", INT64, ["B", "K"])
        self.batch = g.dim(self.block, 0, name="batch")
        self.n_context = g.dim(self.features, 1, name="n_context")
        self.by_sequence = g.shape(self.batch, -1, hidden)

    def find_head(self, size: int | None) -> None:
        """Take the head. size: the tokens of one in the file; None: the target's, or one in the file for all."""
        if size is not None or self.m.has("lm_head.weight"):
            self.head = self.m
            self.vocabulary = DraftVocabulary(self.m, self.config, size or self.config.vocab_size)
        elif self.head is not None and self.head.has("d2t"):
            rows = self.head.checkpoint.tensors["d2t"].shape[0]
            self.vocabulary = DraftVocabulary(self.head, self.config, rows)

    def head_logits(self, g: GraphBuilder, rows: ir.Value) -> ir.Value:
        """Normed rows [rows, D] of the graph or a subgraph through the head: [rows, V]."""
        if self.head is None:
            return lm_head(rows, self.root.inside(g), self.target)
        size = self.target.vocab_size if self.vocabulary is None else self.vocabulary.size
        return self.head.inside(g).linear(rows, "lm_head", self.config.hidden_size, size)

    def tokens(self, g: GraphBuilder, numbers: ir.Value) -> ir.Value:
        """The target's ids of tokens that the head numbers, of any shape."""
        return numbers if self.vocabulary is None else self.vocabulary.tokens(g, numbers)

    def mixers(
        self, start: ir.Value, n_written: ir.Value, asking: PassRows, lengths: ir.Value
    ) -> list[Mixer]:
        """The mixer of each layer, where `n_written` rows are written from cache row `start` on."""
        g, parts = self.g, self.parts
        positions = positions_from(g, start, n_written, name="written_positions")
        written = PassRows(g, self.batch, n_written, positions, self.config)
        return mixers(Pass(g, parts.dialect, self.config, parts.capacity, start, asking, written, lengths))

    def flat_rows(self, rows: ir.Value, count: ir.Value) -> ir.Value:
        """Numbers [B, count] of rows of each sequence, which has `count`, as numbers of flat rows, [B*count]."""
        g = self.g
        base = g.op("Mul", g.unsqueeze(g.arange(self.batch), 1), count, name="base")
        return g.op("Reshape", g.op("Add", base, rows, name="order"), g.constant([-1]), name="flat_order")

    def best_candidates(self, g: GraphBuilder, logits: ir.Value) -> tuple[ir.Value, ir.Value]:
        """logits [rows, V] -> the W best tokens of each row, best first, and their log-probabilities in float32."""
        width = self.parts.width
        if width == 1:
            return self.parts.dialect.best_token(g, logits)
        logprobs = g.op("LogSoftmax", g.to_float(logits), name="logprobs", axis=-1)
        best, tokens = g.multi("TopK", logprobs, g.constant([width]), outputs=2, name="best", axis=-1)
        return tokens, best

    def model(self, tokens: ir.Value, logprobs: ir.Value) -> ir.Model:
        """The graph, with these candidates [B*(K-1), W] and their log-probabilities as outputs."""
        self.m.check_all_used(OF_TRAINING)
        g, width = self.g, self.parts.width
        shape = g.shape(self.batch, -1, width)
        named: list[int | str] = ["B", "K-1", width]
        g.output(g.op("Reshape", tokens, shape), "draft_tokens", INT64, named)
        g.output(g.op("Reshape", logprobs, shape), "draft_logprobs", FLOAT, named)
        return g.model()


# The target's tensors that training may leave in a drafter's file.
OF_TRAINING = ("verifier_norm.weight", "verifier_lm_head.weight")


class DraftVocabulary:
    """The `size` tokens of a drafter's own head. Token i of the target's has number j here if i = j + d2t[j].

    The mask t2d says the same from the other side, and is not read. A drafter with all tokens needs neither.
    """

    def __init__(self, m: Module, config: DrafterConfig, size: int) -> None:
        self.size = size
        for name in ("t2d", "d2t") if size == config.vocab_size else ("t2d",):
            m.ignore(name)
        self._offsets = None
        if size != config.vocab_size:
            self._offsets = m.raw("d2t", size, dtypes=("I64",))
            if isinstance(m.checkpoint, Checkpoint):
                self._check(m.checkpoint, config)

    def _check(self, checkpoint: Checkpoint, config: DrafterConfig) -> None:
        tokens = np.arange(self.size) + checkpoint.array("d2t")
        outside = (tokens < 0) | (tokens >= config.vocab_size)
        if outside.any():
            place = int(np.flatnonzero(outside)[0])
            raise CheckpointError(
                f"{checkpoint['d2t'].file}: d2t maps draft token {place} to {int(tokens[place])}, but vocab_size is "
                f"{config.vocab_size}; the table has offsets, target id minus draft id"
            )
        if len(np.unique(tokens)) < self.size:
            raise CheckpointError(
                f"{checkpoint['d2t'].file}: d2t maps two draft tokens to one of the target's"
            )

    def tokens(self, g: GraphBuilder, numbers: ir.Value) -> ir.Value:
        """The target's ids of tokens of this vocabulary, of any shape."""
        if self._offsets is None:
            return numbers
        offsets = g.op("Gather", self._offsets, numbers, name="offsets")
        return g.op("Add", numbers, offsets, name="target_ids")
