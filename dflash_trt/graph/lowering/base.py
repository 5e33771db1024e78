"""The contract of a lowering: how the layers of a number format become nodes of a graph, in each dialect."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import onnx_ir as ir

from dflash_trt.checkpoint.linears import StoredLinear
from dflash_trt.formats import FORMATS, NumberFormat
from dflash_trt.graph.builder import GraphBuilder

from . import bodies

Activations = Literal["none", "static", "row"]


@dataclass(frozen=True, slots=True)
class LinearKind:
    """The properties of a quantized layer that determine the body of its operator.

    group_rows: rows that share a scale with `group_size` columns, where a scale belongs to a block.
    exponents: scales are bytes, powers of two.
    reciprocal: the scales of the whole weight and of the input divide.
    unsigned: integers whose zero is the middle, or a zero point.
    """

    scheme: str
    group_size: int
    activations: Activations
    smoothed: bool
    biased: bool
    by_row: bool
    group_rows: int = 1
    exponents: bool = False
    reciprocal: bool = False
    unsigned: bool = False
    zero_points: bool = False
    zero_term: bool = False
    ordered: bool = False

    @property
    def format(self) -> NumberFormat:
        """The number format."""
        return FORMATS[self.scheme]


class Lowering(ABC):
    """Nodes for layers of one number format. `kind` describes a layer's storage, `inputs` are its tensors as values."""

    # The scale of an input whose largest magnitude is 1, for formats that quantize inputs too.
    unit_input_scale = 1.0

    def operator(self, kind: LinearKind) -> str:
        """The name of a layer's `dflash::` operator, without the suffixes that all formats share."""
        return f"{kind.scheme.upper()}Linear"

    # The engine's type for pairs of numbers in a byte, where it has one.
    pairs: ir.DataType | None = None

    def weight(
        self, g: GraphBuilder, stored: StoredLinear, raw: ir.Value, *, packed_as_bytes: bool
    ) -> ir.Value:
        """The codes `raw`, as they are on disk, in the engine's type for them."""
        if self.pairs is None or packed_as_bytes:
            return raw
        rows, columns = stored.weight.shape
        return g.reinterpret(raw, self.pairs, (rows, 2 * columns))

    @abstractmethod
    def onnxruntime_weight(
        self, g: GraphBuilder, kind: LinearKind, inputs: Mapping[str, ir.Value], x: ir.Value, resident: bool
    ) -> ir.Value:
        """float32 [out, in]. ONNX Runtime folds casts and look-ups of constants when it loads, but never
        DequantizeLinear.
        """

    @abstractmethod
    def tensorrt_weight(self, g: GraphBuilder, kind: LinearKind, inputs: Mapping[str, ir.Value]) -> ir.Value:
        """[out, in] in the graph's dtype. A packed constant may only feed a DequantizeLinear."""

    def onnxruntime_input(self, g: GraphBuilder, scale: ir.Value, x: ir.Value) -> ir.Value:
        """x, float32, rounded as the format does, in float32."""
        raise NotImplementedError("this format quantizes weights only")

    def tensorrt_input(self, g: GraphBuilder, scale: ir.Value, x: ir.Value) -> ir.Value:
        """x rounded as the format does, in the graph's dtype."""
        raise NotImplementedError("this format quantizes weights only")

    def expert_factors(self, g: GraphBuilder, kind: LinearKind, parts: Mapping[str, ir.Value]) -> ir.Value:
        """The factor of each row or group of a stack of experts, float32, from scales that may be bytes."""
        return g.op("Cast", parts["scale"], name="factors", to=int(bodies.FLOAT))
