"""The bodies for the engine that runs graphs by torch: standard operators, and a few of its own in the domain `torch`
(dflash_trt/engines/torch/operators.py).

WriteRows(cache [B,N,C,d], rows [B,N,T,d], start int64 [B]) -> cache
    The cache itself, with the rows from cache row start[b] on.
Attend(q [B,H,S,d], k_cache, v_cache [B,N,C,d], first [B,S], last [B,S], start [B], visible int32 [B,S,S], sinks [H];
       scale) -> y [B,H,S,d]
    Row i sees the cache rows first[i] .. last[i]; of those that the pass wrote, from `start` on, the ones that
    visible[i] marks. Without trees the two are absent, and without sinks the last one.
Route(router_logits [rows,E]; k) -> shares float32 [rows,k], best [rows,k], order [pairs], groups [n,3]
    The k experts with the largest logits, best first, and softmax over these logits. A pair is a row and one of them,
    number row * k + place. `order`: the pairs by expert and then by row. `groups`: an expert, the place in `order` of
    its first pair, and the number of its pairs.
GroupedProduct(x [pairs,in], weight [E,out,in], expert [pairs], order, groups) -> y [pairs,out]
    Each row by the matrix of its expert.
Widened(codes uint8 [out,in/2] or [out,in], scale, global_scale, zero_term [out,groups]; codes, columns, group_size,
        group_rows, reciprocal, to) -> weight [out,in]
    The numbers that `codes` stand for ("int4" and "e2m1", the first of two in the low half of a byte; "int8", "e4m3")
    times the scale of their group, plus its zero term. It is computed as the graph is loaded, or only in a product.
    Of experts, every input has an axis of them in front, and so has the weight.
MXFP4Experts, GatedDeltaNet: the operators of experts.py and delta_net.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from dflash_trt.checkpoint.linears import StoredLinear
from dflash_trt.checkpoint.schema import LayerDeltaNet
from dflash_trt.checkpoint.tensors import TensorInfo
from dflash_trt.graph.builder import FLOAT, GraphBuilder
from dflash_trt.graph.delta_net import DeltaInputs
from dflash_trt.graph.dialect import AttentionInputs, AttentionKind, ranges
from dflash_trt.graph.experts import Storage, activated, declared
from dflash_trt.graph.lowering import LOWERINGS
from dflash_trt.graph.quantized import QuantizedLinear, input_scale, multiplied, prepared, rounded, split_rows
from dflash_trt.graph.quantized_experts import ExpertLayer, Projection, Stack, stacked
from dflash_trt.graph.tensorrt import TensorRT

DOMAIN = "torch"
# Attention's kernel divides the cache into stripes of so many rows, and sums up each of them apart.
STRIDE = 256
_CODES = {"int4": "int4", "nvfp4": "e2m1", "mxfp4": "e2m1", "int8": "int8", "fp8": "e4m3"}


class Torch(TensorRT):
    """`dtype`: BF16, FP16 or FP32."""

    name = "torch"
    joins_floats = True
    masks_by_layer = False
    experts_apart = True

    def __init__(self, dtype: ir.DataType) -> None:
        super().__init__(dtype, trt_operators=False)

    def cache_sizes(self, head_dim: int, *, sinks: bool) -> tuple[int, int]:
        """No columns for sinks."""
        return head_dim, head_dim

    @staticmethod
    def window_stride(head_dim: int) -> int:
        return STRIDE

    def keep(self, g: GraphBuilder, cache: ir.Value, rows: ir.Value, start: ir.Value) -> ir.Value:
        return self._kept(g, cache, rows, start)

    def _written(
        self, g: GraphBuilder, caches: Sequence[ir.Value], rows: Sequence[ir.Value], start: ir.Value
    ) -> list[ir.Value]:
        return [_own(g, "WriteRows", *pair, start) for pair in zip(caches, rows, strict=True)]

    def attention_mask(self, kind: AttentionKind) -> ir.Function:
        """The ranges of cache rows in place of a mask."""
        return ranges(kind)

    def attention(self, kind: AttentionKind) -> ir.Function:
        g = self._builder(kind.name)
        a = AttentionInputs(g, by_head=True, mask=None, trees=kind.trees)
        tree = [a.start, *a.visible] if kind.trees else [None, None]
        sinks = g.input("sinks", self.dtype, ["H"]) if kind.sinks else None
        k, v = self._written(g, a.caches, (a.k, a.v), a.start)
        y = _own(g, "Attend", a.q, k, v, *a.ranges, *tree, sinks, scale=kind.factor)
        a.output(y, k, v)
        return g.function()

    def quantized_linear(self, g: GraphBuilder, x: ir.Value, layer: QuantizedLinear) -> ir.Value:
        """A product with the weight, its input rounded as the format does."""
        stored = layer.stored

        def raw(part: str) -> ir.Value | None:
            info = getattr(stored, part)
            return None if info is None else g.raw_weight(info, layer.folder)

        with g.scope(layer.name):
            weight = _widened(g, stored, stored.weight.shape[1] * stored.format.numbers_in_byte, raw)
            x = prepared(g, x, raw("order"), raw("pre_quant_scale"), g.dtype)
            factor: ir.Value | None = None
            if stored.rounding != "none":
                scale = raw("input_scale")
                scale = None if scale is None else g.cast(scale, FLOAT)
                x, factor = rounded(g, stored, g.to_float(x), scale)
                x = g.from_dtype(x, FLOAT)
            return multiplied(g, x, weight, factor, layer.bias, g.dtype)

    def quantized_experts(
        self, g: GraphBuilder, x: ir.Value, router: ir.Value, layer: ExpertLayer
    ) -> ir.Value:
        """Products of pairs of a row and one of its experts; written out in the graph."""
        with g.scope("experts"):
            pairs = _Pairs(g, router, layer.k)
            if layer.scales is not None:
                own = g.op("Gather", layer.scales, pairs.best, name="own_scales", axis=0)
                pairs.shares = g.op("Mul", pairs.shares, own, name="scaled_shares")

            def linear(name: Projection, value: ir.Value) -> ir.Value:
                with g.scope(name):
                    return _expert_linear(g, layer.stacks[name], value, pairs, layer.folder)

            x = pairs.rows(x)
            gate, up = linear("gate", x), linear("up", x)
            hidden = g.op("Mul", activated(g, gate, layer.activation), up, name="gated")
            return pairs.sum(linear("down", hidden))

    def moe(
        self, storage: Storage, weight_dtype: ir.DataType, *, biased: bool, widened_bytes: int
    ) -> ir.Function:
        """Products of pairs of a row and one of its experts. In MXFP4, one operator."""
        g = self._builder("MoE")
        x, router = g.input("x", self.dtype, ["rows", "D"]), g.input("router_logits", FLOAT, ["rows", "E"])
        packed = storage == "mxfp4"
        given: dict[str, tuple[ir.Value, ir.Value | None, ir.Value | None]] = {}
        for name in ("gate_up", "down"):
            weight = g.input(name, weight_dtype, ["E", "O", "G", 16] if packed else ["E", "O", "I"])
            scales = g.input(f"{name}_scales", ir.DataType.UINT8, ["E", "O", "G"]) if packed else None
            given[name] = weight, scales, g.input(f"{name}_bias", self.dtype, ["E", "O"]) if biased else None
        k = ir.RefAttr("k", "k", ir.AttributeType.INT)
        if packed:
            attributes: dict[str, Any] = {"k": k}
            for name in ("alpha", "beta", "limit"):
                attributes[name] = ir.RefAttr(name, name, ir.AttributeType.FLOAT)
            y = _own(g, "MXFP4Experts", x, router, *given["gate_up"], *given["down"], **attributes)
        else:
            pairs = _Pairs(g, router, k)

            def linear(name: str, value: ir.Value) -> ir.Value:
                weight, _, bias = given[name]
                y = pairs.product(value, g.cast(weight, self.dtype))
                return y if bias is None else g.op("Add", y, g.op("Gather", bias, pairs.expert, axis=0))

            y = pairs.sum(linear("down", self._swiglu(g, linear("gate_up", pairs.rows(x)))))
        g.output(y, "y", self.dtype, ["rows", "D"])
        return g.function(declared())

    def gated_delta_net(self, kind: LayerDeltaNet) -> ir.Function:
        """One operator, which goes row by row."""
        g = self._builder("GatedDeltaNet")
        a = DeltaInputs(g, kind)
        a.output(*g.multi("GatedDeltaNet", *g.graph.inputs, outputs=3, name="delta", domain=DOMAIN))
        return g.function()

    def _builder(self, name: str) -> GraphBuilder:
        return GraphBuilder(name, dtype=self.dtype, opsets={DOMAIN: 1})


class _Pairs:
    """Pairs of a row and one of its k experts. shares, best: see Route. expert [rows*k]."""

    def __init__(self, g: GraphBuilder, router: ir.Value, k: int | ir.Attr) -> None:
        self._g = g
        g.graph.opset_imports[DOMAIN] = 1
        routed = g.multi("Route", router, outputs=4, name="route", domain=DOMAIN, k=k)
        self.shares, self.best, *self._by_expert = routed
        self._k = g.dim(self.best, 1, name="k")
        self.expert = g.op("Reshape", self.best, g.constant([-1]), name="expert")

    def product(self, x: ir.Value, weight: ir.Value) -> ir.Value:
        """x [rows*k,in] by the matrices of experts [E,out,in] -> [rows*k,out]."""
        return _own(self._g, "GroupedProduct", x, weight, self.expert, *self._by_expert)

    def rows(self, x: ir.Value) -> ir.Value:
        """x [rows,D] as rows of pairs [rows*k,D]."""
        g = self._g
        times = g.op("Concat", g.constant([1]), self._k, g.constant([1]), name="times", axis=0)
        x = g.op("Expand", g.unsqueeze(x, 1), times, name="of_pairs")
        return g.op("Reshape", x, g.op("Concat", g.constant([-1]), g.dim(x, 2), axis=0), name="pairs")

    def sum(self, y: ir.Value) -> ir.Value:
        """y [rows*k,D] by row, weighted, summed in float32."""
        g = self._g
        shape = g.op("Concat", g.constant([-1]), self._k, g.dim(y, 1), name="by_row", axis=0)
        y = g.op("Reshape", g.to_float(y), shape, name="of_row")
        y = g.op("Mul", y, g.unsqueeze(self.shares, 2), name="weighted")
        return g.from_dtype(g.op("ReduceSum", y, g.constant([1]), name="sum", keepdims=0), FLOAT)


def _own(g: GraphBuilder, name: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
    g.graph.opset_imports[DOMAIN] = 1
    return g.op(name, *inputs, name=name, domain=DOMAIN, **attributes)


def _widened(
    g: GraphBuilder, stored: StoredLinear, columns: int, raw: Callable[[str], ir.Value | None]
) -> ir.Value:
    """The weight of a layer, or of a stack of experts; `raw` gives its parts as they are stored."""
    return _own(
        *(g, "Widened", raw("weight"), raw("scale"), raw("global_scale"), raw("zero_term")),
        codes=_CODES[stored.algorithm.scheme],
        columns=columns,
        group_size=stored.algorithm.group_size,
        group_rows=stored.algorithm.group_rows,
        reciprocal=int(stored.algorithm.reciprocal),
        to=int(g.dtype),
    )


def _expert_linear(g: GraphBuilder, stack: Stack, x: ir.Value, pairs: _Pairs, folder: str) -> ir.Value:
    """x [pairs,columns] by the layer of each pair's expert -> [pairs,rows]."""
    first, factor = stack.first, None

    def whole(infos: Sequence[TensorInfo]) -> ir.Value:
        """The tensors of all experts, with an axis of these in front."""
        return stacked(g, [g.unsqueeze(g.raw_weight(info, folder), 0) for info in infos])

    def raw(part: str) -> ir.Value | None:
        infos = [getattr(stored, part) for stored in stack.stored]
        return None if infos[0] is None else whole(infos)

    def own(part: str) -> ir.Value | None:
        """That of each pair's expert."""
        value = raw(part)
        return None if value is None else g.op("Gather", value, pairs.expert, name=f"own_{part}", axis=0)

    if first is None:
        return pairs.product(x, g.cast(whole(stack.plain), g.dtype, name="weight"))
    if (order := own("order")) is not None:
        x = g.op("GatherElements", x, order, name="ordered", axis=1)
    if (smooth := own("pre_quant_scale")) is not None:
        x = g.op("Mul", x, g.cast(smooth, g.dtype), name="smoothed")
    if first.rounding != "none":
        x, scale = g.to_float(x), g.constant(1, np.float32)
        if first.rounding == "row":
            x, factor = split_rows(g, x)
            scale = input_scale(g, first)
        else:
            given = own("input_scale")
            assert given is not None
            factor = g.op("Reshape", g.cast(given, FLOAT), g.constant([-1, 1]), name="input_scale")
            if first.algorithm.reciprocal:
                factor = g.op("Reciprocal", factor, name="input_scale")
            x = g.op("Div", x, factor, name="by_scale")
        x = g.from_dtype(LOWERINGS[first.algorithm.scheme].rounded_input(g, scale, x), FLOAT)
    y = pairs.product(x, _widened(g, first, stack.columns, raw))
    if factor is None:
        return y
    return g.from_dtype(g.op("Mul", g.to_float(y), factor, name="rescaled"), FLOAT)
