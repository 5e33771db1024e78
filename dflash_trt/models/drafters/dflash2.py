"""DFlash2: DFlash with convolutions along the block, and a selector that walks through the candidates of each place.

A convolution mixes a row with the row before it, before and after each sublayer. Its weights have a fixed part
and one that follows from the sublayer's input. Context rows have no convolution. The selector takes the `top_k` best
tokens of each place, and adds to a token's logit how well it follows a candidate of the place before. A file may have a
trained confidence head beside it, as DSpark's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import onnx_ir as ir

from dflash_trt.checkpoint.fields import Fields
from dflash_trt.checkpoint.schema import DrafterConfig
from dflash_trt.models.drafters.block import BlockPass, BlockSettings, Rows
from dflash_trt.models.drafters.dflash import read_dflash
from dflash_trt.models.drafters.kind import DrafterKind, DrafterParts
from dflash_trt.models.drafters.walk import PairScores, best_walk, confident, followed
from dflash_trt.models.module import Module

_TAPS = 2  # rows of a convolution: its own, and the one before
_SIDES = 2  # before and after the sublayer
_RANK, _TOP_K = 1 << 14, 256
# The names under which a selector may have a confidence head. Its width tells whether it reads the token before, too.
_CONFIDENCE = ("confidence_head.proj", "confidence_head")


@dataclass(frozen=True, kw_only=True)
class DFlash2(BlockSettings):
    """group: channels that share the part of a convolution that depends on the input.

    rank, top_k: of the selector. multiplier: of the logits, before their soft-cap.
    """

    group: int
    rank: int
    top_k: int
    multiplier: float


_FIELDS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k", "output_multiplier")


def read_dflash2(fields: Fields) -> DrafterConfig:
    """The configuration of a DFlash2 drafter: DFlash's, with more fields in `dflash_config`."""
    config = read_dflash(fields, _FIELDS)
    settings = selector(fields.needed("dflash_config", "an object"), config.hidden_size, config.vocab_size)
    # Where the file is silent, z-lab's class and vLLM take the target's rows as they are stored.
    row_scale = 1.0 if config.row_scale is None else config.row_scale
    return replace(config, settings=settings, most_candidates=settings.top_k, row_scale=row_scale)


def selector(fields: Fields, hidden_size: int, vocab_size: int, **settings: Any) -> DFlash2:
    """The convolutions and the selector that `fields` describe. `settings`: fields of `BlockSettings`."""
    if (taps := fields.integer("conv_kernel_size")) != _TAPS:
        raise fields.error("conv_kernel_size", f"is {taps}, only {_TAPS} is supported")
    group = fields.integer("conv_group_size", maximum=hidden_size)
    if hidden_size % group:
        raise fields.error("conv_group_size", f"is {group}, which does not divide hidden_size, {hidden_size}")
    return DFlash2(
        group=group,
        rank=fields.integer("selector_rank", maximum=_RANK),
        top_k=fields.integer("selector_top_k", maximum=min(_TOP_K, vocab_size)),
        multiplier=fields.number("output_multiplier", default=1.0),
        **settings,
    )


def build_dflash2(parts: DrafterParts) -> ir.Model:
    block = BlockPass(parts)
    rows = block.drafted(lambda m, name, u: _convolutions(block, m.at(name), u))
    logits = block.logits(rows, multiplier=block.config.settings.multiplier)
    return block.model(*_select(block, rows, logits))


def _convolutions(block: BlockPass, m: Module, u: ir.Value) -> tuple[Rows, Rows]:
    """The convolutions before and after a sublayer with the normed input u [B*R, D]."""
    g, hidden, group = block.g, block.config.hidden_size, block.config.settings.group
    groups = hidden // group
    fixed = g.op(
        "Reshape",
        m.weight("base_kernel", _SIDES, _TAPS, hidden),
        g.constant([_SIDES * _TAPS, groups, group]),
        name="fixed",
    )
    fixed_parts = g.multi(
        "Split", fixed, g.constant([1] * (_SIDES * _TAPS)), outputs=_SIDES * _TAPS, name="fixed_parts", axis=0
    )
    varying = m.linear(u, "kernel_projection", hidden, _SIDES * _TAPS * groups)
    varying = g.op("Reshape", varying, g.shape(block.batch, -1, _SIDES * _TAPS * groups, 1), name="varying")
    sizes = g.constant([groups] * (_SIDES * _TAPS))
    parts = g.multi("Split", varying, sizes, outputs=_SIDES * _TAPS, name="parts", axis=2)
    shape = g.shape(block.batch, -1, groups, group)

    def convolve(side: int, y: ir.Value) -> ir.Value:
        y = g.op("Reshape", y, shape, name="by_group")
        start = g.constant([0, 1, 0, 0, 0, 0, 0, 0])  # a row of zeros in front
        before = g.op("Pad", y, start, name="padded")
        before = g.slice(before, 0, -1, axis=1, name="row_before")
        kernels = [
            g.op("Add", parts[side * _TAPS + tap], fixed_parts[side * _TAPS + tap], name="kernel")
            for tap in range(_TAPS)
        ]
        mixed = [g.op("Mul", k, rows, name="tap") for k, rows in zip(kernels, (y, before), strict=True)]
        y = g.op("Add", *mixed, name="convolved")
        return g.op("Reshape", y, g.constant([-1, hidden]), name="flat")

    return (lambda y: convolve(0, y)), (lambda y: convolve(1, y))


def _select(block: BlockPass, rows: ir.Value, logits: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The selector's walk over the best tokens of each place."""
    g, config, settings = block.g, block.config, block.config.settings
    m = block.m.at("candidate_selector")
    scores = PairScores.of_logits(block, logits, settings.top_k)
    with g.scope("selector"):
        weights = m.linear(rows, "hidden_projection", config.hidden_size, settings.rank)
        weights = g.op("Reshape", weights, g.shape(block.batch, -1, 1, settings.rank), name="weights")
        tables = [
            g.from_dtype(
                g.op("Gather", m.raw(name, config.vocab_size, settings.rank), tokens, name=name),
                m.dtype_of(name),
            )
            for name, tokens in (
                ("predecessor_codebook", scores.before),
                ("successor_codebook", scores.tokens),
            )
        ]
        followers = g.op("Mul", tables[1], weights, name="followers")
        followers = g.op("Transpose", followers, name="by_rank", perm=[0, 1, 3, 2])
        fit = g.to_float(g.op("MatMul", tables[0], followers, name="fit"))
        best, logprobs, behind = best_walk(block, scores, fit)
        name = next((name for name in _CONFIDENCE if m.has(f"{name}.weight")), None)
        if name is not None:
            weight = m.checkpoint.tensors[f"{m.prefix}{name}.weight"]
            before = followed(g, tables[0], behind) if weight.shape[-1] > config.hidden_size else None
            bias = m.has(f"{name}.bias")
            logprobs = confident(block, m, name, rows, before, logprobs, bias=bias)
        return best, logprobs


# Published DFlash2DraftModels have model_type "qwen3", as DFlash's.
KIND = DrafterKind("DFlash2DraftModel", "qwen3", read_dflash2, build_dflash2)
