"""The common parts of the layers in one pass: its rows with their positions, and the interface of a mixer.

A mixer is the part of a decoder layer that mixes the tokens of a sequence. It declares the caches of its layers as
inputs and outputs of the graph. A cache may hold one row per token, or a state of fixed size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import onnx_ir as ir

from dflash_trt.checkpoint.rope import RopeConfig, inverse_frequencies
from dflash_trt.checkpoint.schema import DecoderConfig, Heads
from dflash_trt.graph.builder import FLOAT, GraphBuilder
from dflash_trt.graph.dialect import Dialect, Norm, Part
from dflash_trt.models.module import Module

# Rows of a sequence's caches, by the window of a layer (None: no window); one number for all; or the name of an axis
# whose size the engine chooses in every pass. Each window then has an axis of its own.
Capacity = int | str | Mapping[int | None, int]


def rows_of(capacity: Capacity, window: int | None) -> int | str:
    """Rows of the caches of layers with this window, or the name of their axis."""
    if isinstance(capacity, str):
        return capacity if window is None else f"{capacity}{window}"
    return capacity if isinstance(capacity, int) else capacity[window]


class Mixer(Protocol):
    """All layers of one kind in one pass."""

    def layer(self, m: Module, i: int, x: ir.Value, written: ir.Value) -> ir.Value:
        """The mixer's output of layer i, [B*S, D], to be added to the residual stream.

        x [B*S, D]: the query rows.
        written [B*T, D]: the rows to write into the caches.
        m: the layer's place in the checkpoint.
        """


class PassRows:
    """Rows that pass a layer together: B sequences x S rows, with their positions and rotations."""

    def __init__(
        self, g: GraphBuilder, batch: ir.Value, count: ir.Value, positions: ir.Value, config: DecoderConfig
    ):
        self.g, self.batch, self.count, self.positions = g, batch, count, positions
        self._shapes: dict[tuple[int, ...], ir.Value] = {}
        # Angles are computed in float32 from the position, as in Transformers. Without a table there is no length
        # limit.
        position = g.op("Cast", g.unsqueeze(positions, 2), name="position", to=int(FLOAT))
        kinds = dict.fromkeys(
            (h.rope, h.rotary_dim) for h in map(config.heads_of, config.attention_layers) if h.rope
        )
        self._rotations = {
            (rope, size): self._rotation(position, rope, size, config.max_position_embeddings)
            for rope, size in kinds
        }

    def _rotation(
        self, position: ir.Value, rope: RopeConfig, size: int, length: int
    ) -> dict[bool, tuple[ir.Value, ...]]:
        """cos and sin [B, S, size/2] of keys (False), and of queries (True), which may grow with their position."""
        g = self.g
        frequencies, factor = inverse_frequencies(rope, size, length)
        angles = g.op("Mul", position, g.constant(frequencies, np.float32), name="angles")
        rotations = [g.op(kind, angles, name=kind.lower()) for kind in ("Cos", "Sin")]
        if factor != 1.0:
            rotations = [g.op("Mul", r, g.constant(factor, np.float32), name="scaled") for r in rotations]
        keys = tuple(g.from_dtype(r, FLOAT) for r in rotations)
        if not rope.growth:
            return {False: keys, True: keys}
        original = rope.parameters["original_max_position_embeddings"]
        periods = g.op("Div", position, g.constant(original, np.float32), name="periods")
        grown = g.op("Add", g.op("Floor", periods), g.constant(1, np.float32), name="periods_begun")
        grown = g.op("Mul", g.op("Log", grown), g.constant(rope.growth, np.float32), name="growth")
        grown = g.op("Add", grown, g.constant(1, np.float32), name="query_scale")
        # The scale of a row commutes with its rotation.
        queries = tuple(g.from_dtype(g.op("Mul", r, grown, name="of_queries"), FLOAT) for r in rotations)
        return {False: keys, True: queries}

    def shape(self, *tail: int) -> ir.Value:
        """The shape [B, S, *tail] as a tensor."""
        if tail not in self._shapes:
            self._shapes[tail] = self.g.shape(self.batch, self.count, *tail)
        return self._shapes[tail]

    def part(self, heads: int, kind: Heads, norm: Norm | None, *, queries: bool = False) -> Part:
        """Queries or keys of these rows, rotated by position if heads of this kind are."""
        if kind.rope is None:
            return Part(heads, kind.head_dim, self.shape, norm)
        angles = self._rotations[kind.rope, kind.rotary_dim][queries]
        return Part(heads, kind.head_dim, self.shape, norm, angles, kind.rotary_dim)


@dataclass(frozen=True)
class Tree:
    """The rows of a pass as nodes: int64 depths [B,S], and bool visible [B,S,S]. Row i sees row j."""

    depths: ir.Value
    visible: ir.Value


@dataclass(frozen=True)
class Pass:
    """The common values of all layers in one pass. int64 [B]: `start` is the first position written, `lengths` the
    number of positions in use.

    capacity: rows of the caches, see `rows_of`.
    certain: how many of the pass's first rows nobody takes back, int64 [B]; None if no layer keeps a state.
    tree: the rows that queries see among those of this pass; None if these are all before them.
    """

    g: GraphBuilder
    dialect: Dialect
    config: DecoderConfig
    capacity: Capacity
    start: ir.Value
    queries: PassRows
    written: PassRows
    lengths: ir.Value
    certain: ir.Value | None = None
    tree: Tree | None = None


def positions_from(g: GraphBuilder, start: ir.Value, count: ir.Value, name: str = "positions") -> ir.Value:
    """[B, count]: start, start+1, ..."""
    return g.op("Add", g.unsqueeze(start, 1), g.arange(count), name=name)
