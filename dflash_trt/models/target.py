"""The target's graph: embedding, the family's layers, taps, head, block acceptance.

in:  tokens [B,S], start [B] (rows already committed), rows [B,R] (the rows of S that get logits), caches;
     with trees also depths [B,S] (of the rows below the first) and visible [B,S,S] (row i sees row j)
out: features [B,S,n*D] (without taps [B,S,1] in float32, not finite where a row's numbers are not), logits [B,R,V]
     float32, accepted [B], next_token [B], updated caches

Prefill is a pass with S = one chunk and R = 1. Verification is a pass over [anchor, drafts ...] with R = S.
A row of a tree has the position start + depth, and lies in the cache row start + row until it is accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from dflash_trt.checkpoint.schema import LayerAttention, LayerDeltaNet, TargetConfig
from dflash_trt.checkpoint.tensors import Checkpoint, Outline, same_bytes
from dflash_trt.errors import CheckpointError
from dflash_trt.formats.base import FLOAT_DTYPES
from dflash_trt.graph.builder import BOOL, FLOAT, INT64, GraphBuilder
from dflash_trt.graph.dialect import Dialect
from dflash_trt.models.attention import Attention
from dflash_trt.models.decoder import embed, soft_capped, summed
from dflash_trt.models.delta_net import DeltaNet
from dflash_trt.models.families import FAMILIES
from dflash_trt.models.module import Module
from dflash_trt.models.passes import Capacity, Mixer, Pass, PassRows, Tree, positions_from


def build_target(
    config: TargetConfig,
    checkpoint: Checkpoint | Outline,
    taps: Sequence[int],
    dialect: Dialect,
    *,
    folder: str,
    capacity: Capacity = "C",
    trees: bool = False,
) -> ir.Model:
    """The target as an ONNX model. Its weights stay in the safetensors files of `folder`.

    `taps` are 0-based layer indices. Tap i is the residual stream after decoder layer i, before the final norm. Tap -1
    is the embedding. Without taps, for a target without a drafter, the features are the sum of a row of that stream.
    `trees`: whether the graph takes the depths of a pass's rows, and which of them a row sees.
    Raises CheckpointError if a tensor is missing, is unused, or has another shape than the config gives.
    """
    g = GraphBuilder("target", dtype=dialect.dtype)
    hidden, vocab = config.hidden_size, config.vocab_size
    tokens, start = g.input("tokens", INT64, ["B", "S"]), g.input("start", INT64, ["B"])
    rows = g.input("rows", INT64, ["B", "R"])
    shared = _pass(g, dialect, config, capacity, tokens, start, rows, trees=trees)
    this_pass, by_layer = shared.queries, mixers(shared)

    root = Module(g, checkpoint, folder, dialect).centred(config.zero_centred_norms)
    m = root.at(config.prefix)
    x = embed(m, tokens, vocab, hidden, scale=config.embedding_scale)
    if config.embedding_norm:
        x = m.rms_norm(x, None, hidden, config.rms_norm_eps)
    family, tapped, y = FAMILIES[config.architecture], dict[int, ir.Value](), None
    for i in range(config.num_hidden_layers):
        layer = m.at(f"layers.{i}").centred(family.centred)
        with g.scope(f"layers.{i}"):
            tapped[i - 1], h = layer.add_norm(x, y, "input_layernorm", hidden, config.rms_norm_eps)
            x, y = family.layer(layer, by_layer[i], config, i, tapped[i - 1], h)
    tapped[config.num_hidden_layers - 1] = x = summed(g, x, y)

    width = len(taps) * hidden or 1
    if taps:
        states = (tapped[i] for i in taps)
        (features,) = g.call(dialect.hidden_state_tap(len(taps)), *states, name="features_flat")
    else:  # what is not finite in any layer of a row is not in its sum either
        features = g.op("ReduceSum", g.to_float(x), g.constant([1]), name="row_sums", keepdims=1)
    features = g.op("Reshape", features, this_pass.shape(width), name="features")
    by_row = g.op("Reshape", x, this_pass.shape(hidden), name="by_row")
    chosen = g.op("GatherND", by_row, g.unsqueeze(rows, 2), name="rows_with_logits", batch_dims=1)
    chosen = g.op("Reshape", chosen, g.constant([-1, hidden]), name="flat_rows")
    logits = lm_head(m.rms_norm(chosen, "norm", hidden, config.rms_norm_eps), root, config)
    logits = soft_capped(g, logits, config.logit_softcap, multiplier=config.logit_multiplier)
    logits = g.to_float(logits)
    logits = g.op("Reshape", logits, g.shape(this_pass.batch, g.dim(rows, 1), vocab), name="logits")
    acceptance = dialect.block_acceptance()
    accepted, next_token = g.call(acceptance, tokens, rows, logits, outputs=2, name="acceptance")
    root.check_all_used(_tied_copy(config, checkpoint), config.skipped)

    g.output(features, "features", g.dtype if taps else FLOAT, ["B", "S", width])
    g.output(logits, "logits", FLOAT, ["B", "R", vocab])
    g.output(accepted, "accepted", INT64, ["B"])
    g.output(next_token, "next_token", INT64, ["B"])
    return g.model()


def _pass(
    g: GraphBuilder,
    dialect: Dialect,
    config: TargetConfig,
    capacity: Capacity,
    tokens: ir.Value,
    start: ir.Value,
    rows: ir.Value,
    *,
    trees: bool,
) -> Pass:
    """What the layers share, for the graph's inputs `tokens`, `start` and `rows`."""
    batch, count = g.dim(tokens, 0, name="batch"), g.dim(tokens, 1, name="count")
    if not trees:
        tree, positions = None, positions_from(g, start, count)
    else:
        tree = Tree(g.input("depths", INT64, ["B", "S"]), g.input("visible", BOOL, ["B", "S", "S"]))
        positions = g.op("Add", g.unsqueeze(start, 1), tree.depths, name="positions")
    this_pass = PassRows(g, batch, count, positions, config)
    lengths = g.op("Add", start, count, name="lengths")
    # No token before the first row with logits depends on them, so no such row is taken back.
    certain = None
    if config.delta_layers:
        certain = g.op("Squeeze", g.slice(rows, 0, 1, axis=1), g.constant([1]))
    return Pass(g, dialect, config, capacity, start, this_pass, this_pass, lengths, certain, tree)


def mixers(shared: Pass) -> list[Mixer]:
    """The mixer of each layer, by its entry in the configuration's `layers`. Layers of one kind share a mixer."""
    layers = shared.config.layers
    makers: dict[type, Callable[[Pass, Sequence[int]], Mixer]] = {
        LayerAttention: Attention,
        LayerDeltaNet: DeltaNet,
    }
    kinds = {kind: [i for i, layer in enumerate(layers) if type(layer) is kind] for kind in map(type, layers)}
    by_kind = {kind: makers[kind](shared, indices) for kind, indices in kinds.items()}
    return [by_kind[type(layer)] for layer in layers]


def _tied_copy(config: TargetConfig, checkpoint: Checkpoint | Outline) -> tuple[str, ...]:
    """The name of a head that is stored although embeddings are tied. It must equal them: Transformers would use it."""
    tied = config.tie_word_embeddings and "lm_head.weight" in checkpoint.tensors
    if not tied or _quantized_head(checkpoint):
        return ()
    embedding = f"{config.prefix}.embed_tokens.weight"
    head, table = (checkpoint.tensors[name] for name in ("lm_head.weight", embedding))
    if not same_bytes(head, table):
        raise CheckpointError(
            f"{config.path}: tie_word_embeddings is true, but {head.file.name} has an lm_head.weight that differs from "
            f"{embedding}; set tie_word_embeddings to false to use the head"
        )
    return ("lm_head.weight",)


def _quantized_head(checkpoint: Checkpoint | Outline) -> bool:
    """Whether there is a head in fewer bits beside a tied embedding."""
    if checkpoint.quantization.algorithm("lm_head") is None:
        return False
    head = checkpoint.tensors.get("lm_head.weight")
    return isinstance(checkpoint, Outline) if head is None else head.dtype not in FLOAT_DTYPES


def lm_head(x: ir.Value, root: Module, config: TargetConfig) -> ir.Value:
    """x [rows, D], already normalized -> logits [rows, V] through the target's head, tied or not."""
    hidden, vocab = config.hidden_size, config.vocab_size
    if not config.tie_word_embeddings or _quantized_head(root.checkpoint):
        return root.linear(x, "lm_head", hidden, vocab)
    weight = root.weight(f"{config.prefix}.embed_tokens.weight", vocab, hidden)
    return root.g.op("Gemm", x, weight, name="lm_head", transB=1)
