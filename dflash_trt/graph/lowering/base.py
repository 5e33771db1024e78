"""The contract of a lowering: how the layers of a number format become nodes of a graph, in each dialect. At the end,
the nodes that several formats share.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from dflash_trt.checkpoint.linears import StoredLinear
from dflash_trt.formats.base import BLOCK
from dflash_trt.graph.builder import FLOAT, GraphBuilder

Values = Mapping[str, ir.Value]
TRT_DOMAIN = "trt"  # its operators are those of TensorRT's own parser
E4M3, E2M1, INT4 = ir.DataType.FLOAT8E4M3FN, ir.DataType.FLOAT4E2M1, ir.DataType.INT4


class Lowering(ABC):
    """Nodes for layers of one number format. `inputs` are the tensors of a `stored` layer as values."""

    # The scale of an input whose largest magnitude is 1, for formats that quantize inputs too.
    unit_input_scale = 1.0

    def operator(self, stored: StoredLinear) -> str:
        """The name of a layer's `dflash::` operator, without the suffixes that all formats share."""
        return f"{stored.algorithm.scheme.upper()}Linear"

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
        self, g: GraphBuilder, stored: StoredLinear, inputs: Values, x: ir.Value, resident: bool
    ) -> ir.Value:
        """float32 [out, in]. ONNX Runtime folds casts and look-ups of constants when it loads, but never
        DequantizeLinear.
        """

    @abstractmethod
    def tensorrt_weight(self, g: GraphBuilder, stored: StoredLinear, inputs: Values) -> ir.Value:
        """[out, in] in the graph's dtype. A packed constant may only feed a DequantizeLinear."""

    def onnxruntime_input(self, g: GraphBuilder, scale: ir.Value, x: ir.Value) -> ir.Value:
        """x, float32, rounded as the format does, in float32."""
        raise NotImplementedError("this format quantizes weights only")

    def tensorrt_input(self, g: GraphBuilder, scale: ir.Value, x: ir.Value) -> ir.Value:
        """x rounded as the format does, in the graph's dtype."""
        raise NotImplementedError("this format quantizes weights only")

    def expert_factors(self, g: GraphBuilder, stored: StoredLinear, parts: Values) -> ir.Value:
        """The factor of each row or group of a stack of experts, float32, from scales that may be bytes."""
        return g.op("Cast", parts["scale"], name="factors", to=int(FLOAT))


def lookup(g: GraphBuilder, table: ir.Value, codes: ir.Value) -> ir.Value:
    """The entries of a table [n] that codes of any shape stand for."""
    flat = g.op("Reshape", codes, g.constant([-1]), name="flat")
    index = g.op("Cast", flat, name="index", to=int(ir.DataType.INT32))
    found = g.op("GatherElements", table, index, name="looked_up", axis=0)
    return g.op("Reshape", found, g.op("Shape", codes), name="as_codes")


def table(g: GraphBuilder, values: np.ndarray, x: ir.Value, resident: bool) -> ir.Value:
    """A table to look up in: folded into the weight as the engine loads where that is `resident`, never otherwise."""
    whole = g.constant(values, np.float32)
    if resident:
        return whole
    # A length that only the pass knows, so that nothing looked up can be folded into a widened weight.
    end = g.op("Add", g.dim(x, 0), g.constant([len(values)]), name="table_end")
    return g.op("Slice", whole, g.constant([0]), end, name="table")


def by_block(g: GraphBuilder, low: ir.Value, high: ir.Value, weight: ir.Value, group_size: int) -> ir.Value:
    """Pairs of numbers [out, in/2], looked up in two tables -> [out, groups, group_size]."""
    # On entries this small, Gather takes many times as long as GatherElements on one axis.
    halves = [g.unsqueeze(lookup(g, half, weight), 2) for half in (low, high)]
    numbers = g.op("Concat", *halves, name="numbers", axis=2)
    return g.op("Reshape", numbers, g.constant([0, -1, group_size]), name="numbers_by_block")


def times_factors(g: GraphBuilder, numbers: ir.Value, factors: ir.Value) -> ir.Value:
    """[out, groups, group_size] and [out, groups] -> [out, in]."""
    widened = g.op("Mul", numbers, g.unsqueeze(factors, 2), name="widened_by_block")
    return g.op("Reshape", widened, g.constant([0, -1]), name="widened")


def microscaled(g: GraphBuilder, numbers: ir.Value, exponents: ir.Value) -> ir.Value:
    """E2M1 or E4M3 numbers [..., n] and exponents [..., n/32] -> the graph's dtype, by TensorRT's own operator."""
    return g.op(
        *("TRT_MXFP8DequantizeLinear", numbers, exponents),
        name="widened",
        domain=TRT_DOMAIN,
        axis=-1,
        block_size=BLOCK,
        output_dtype=int(g.dtype),
    )
