"""The bodies for the engine that runs graphs by torch: standard operators, and a few of its own in the domain `torch`
(dflash_trt/engines/torch/operators.py).

PlaceHeads(x [B*S,columns], shape [2] = [B,S], q_norm, k_norm, v_norm [d], cos, sin [B,S,r/2], start [B],
           k_cache, v_cache [B,N,C,d]; kinds, heads, size, epsilon) -> one output for each of `kinds`
    The columns are queries, keys and values, those that `kinds` names, in this order. Queries [B,H,S,d] are given.
    Keys and values are written into their caches from row start[b] on; the caches are given. `Part` (dialect.py) says
    what is done to a head before.
Attend(q [B,H,S,d], k_cache, v_cache [B,N,C,d], first [B,S], last [B,S], start [B], visible int32 [B,S,S], sinks [H];
       scale, windowed) -> y [B,S,H,d]
    Row i sees the cache rows first[i] .. last[i]; of those that the pass wrote, from `start` on, the ones that
    visible[i] marks. Without trees the two are absent, and without sinks the last one. `windowed`: rows move down in
    these caches. Caches may be bytes [B,N,C,d+4]: E4M3 numbers, and the float32 scale of a row after them.
WriteRows(cache [B,N,C,d], rows [B,N,T,d], start int64 [B]) -> cache
    The cache itself, with the rows from cache row start[b] on.
AddNorm(x, y [rows,D], weight [D]; epsilon) -> x + y and its RMSNorm, computed in the weight's dtype, in that of x
Gate(x [rows,2*I], sizes [2]) -> Swish of the first I numbers of a row times the others
Router(x [rows,D], weight [E,D], bias [E]) -> float32 [rows,E]
BestToken(logits [rows,V]) -> token [rows,1], float32 log-probability [rows,1]
QuantizedRows(x [rows,in], scale [1]; by_row, scheme) -> numbers [rows,in], factor float32 [rows,1]
    Numbers times factor are x as `scheme` (fp8, nvfp4) rounds it with this scale: with `by_row`, each row after it was
    divided by its largest magnitude. Numbers are exact in x's dtype, and below 1.
ScaledProduct(x [rows,in], weight [out,in], factor float32 [rows,1], bias [out]) -> x @ weight.T * factor + bias
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

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from dflash_trt.checkpoint.linears import StoredLinear
from dflash_trt.checkpoint.schema import Activation, LayerDeltaNet
from dflash_trt.checkpoint.tensors import TensorInfo
from dflash_trt.errors import BuildError
from dflash_trt.formats.numbers import CACHE_SCALE_BYTES
from dflash_trt.graph.builder import FLOAT, GraphBuilder
from dflash_trt.graph.delta_net import DeltaInputs
from dflash_trt.graph.dialect import (
    AttentionCall,
    AttentionKind,
    HeadMajor,
    Norm,
    Part,
    Product,
    apart,
    ranges,
)
from dflash_trt.graph.experts import Storage, activated, declared
from dflash_trt.graph.lowering import LOWERINGS
from dflash_trt.graph.quantized import QuantizedLinear, input_scale, multiplied, prepared
from dflash_trt.graph.quantized_experts import ExpertLayer, Projection, Stack, stacked

DOMAIN, VERSION = "torch", 3  # of the operators; engines/torch/program.py runs no other version
# Attention's kernel divides the cache into stripes of so many rows, and sums up each of them apart.
STRIDE = 256
_CODES = {"int4": "int4", "nvfp4": "e2m1", "mxfp4": "e2m1", "int8": "int8", "fp8": "e4m3"}


class Torch(HeadMajor):
    """`dtype`: BF16, FP16 or FP32. The steps between products are one operator each.

    cache: "fp8", or as `dtype`. rounds_head: whether a quantized head rounds its inputs as its format does.
    """

    name = "torch"
    joins_floats = True
    experts_apart = True

    def __init__(
        self, dtype: ir.DataType = FLOAT, cache: str | None = None, *, rounds_head: bool = True
    ) -> None:
        super().__init__(dtype)
        self._rounds_head = rounds_head
        if cache is not None:
            self.cache_dtype = ir.DataType.UINT8

    def cache_sizes(self, head_dim: int, *, sinks: bool) -> tuple[int, int]:
        """No columns for sinks. Bytes of a row end with its scale."""
        if self.cache_dtype == self.dtype:
            return head_dim, head_dim
        if head_dim % CACHE_SCALE_BYTES:
            raise BuildError(
                f"--cache fp8: heads have {head_dim} numbers, expected a multiple of {CACHE_SCALE_BYTES}; leave it out"
            )
        return head_dim + CACHE_SCALE_BYTES, head_dim + CACHE_SCALE_BYTES

    @staticmethod
    def window_stride(head_dim: int) -> int:
        return STRIDE

    def keep(self, g: GraphBuilder, cache: ir.Value, rows: ir.Value, start: ir.Value) -> ir.Value:
        return _own(g, "WriteRows", cache, rows, start)

    def add_norm(self, g: GraphBuilder, x: ir.Value, y: ir.Value, norm: Norm) -> tuple[ir.Value, ir.Value]:
        total, rows = _several(g, "AddNorm", x, y, norm.weight, outputs=2, epsilon=norm.epsilon)
        return total, rows

    def attend(self, g: GraphBuilder, a: AttentionCall) -> tuple[ir.Value, list[ir.Value]]:
        """Each product's heads are placed by one operator."""
        placed = dict(zip("kv", a.caches, strict=True))
        for kinds, y in _placeable(g, a.products, a.parts):
            placed |= zip(kinds, _placed(g, kinds, y, a, placed), strict=True)
        first, last, *visible = a.mask
        tree = [a.start, *visible] if visible else [None, None]
        how: dict[str, Any] = {"scale": a.kind.factor, "windowed": int(a.kind.windowed)}
        y = _own(g, "Attend", *map(placed.get, "qkv"), first, last, *tree, a.sinks, **how)
        y = g.op("Reshape", y, g.constant([-1, a.parts["q"].columns]), name="merge")
        return y, [placed["k"], placed["v"]]

    def gated(
        self,
        g: GraphBuilder,
        products: Sequence[Product],
        sizes: Mapping[str, int],
        activation: Activation,
    ) -> ir.Value:
        """One operator where the two layers are one product, in their order."""
        names, y = products[0]
        if activation != "silu" or tuple(names) != tuple(sizes):
            return super().gated(g, products, sizes, activation)
        return _own(g, "Gate", y, g.constant(list(sizes.values())))

    def router(
        self, g: GraphBuilder, x: ir.Value, weight: ir.Value, bias: ir.Value | None, name: str
    ) -> ir.Value:
        """Rows in float32 have a usual product."""
        if self.dtype == FLOAT:
            return super().router(g, x, weight, bias, name)
        return _own(g, "Router", x, weight, bias)

    def best_token(self, g: GraphBuilder, logits: ir.Value) -> tuple[ir.Value, ir.Value]:
        token, logprob = _several(g, "BestToken", logits, outputs=2)
        return token, logprob

    def attention_mask(self, kind: AttentionKind) -> ir.Function:
        """The ranges of cache rows in place of a mask."""
        return ranges(kind)

    def quantized_linear(self, g: GraphBuilder, x: ir.Value, layer: QuantizedLinear) -> ir.Value:
        """A product with the weight, its input rounded as the format does."""
        stored = layer.stored

        def raw(part: str) -> ir.Value | None:
            info = getattr(stored, part)
            return None if info is None else g.raw_weight(info, layer.folder)

        with g.scope(layer.name):
            weight = _widened(g, stored, stored.weight.shape[1] * stored.format.numbers_in_byte, raw)
            x = prepared(g, x, raw("order"), raw("pre_quant_scale"), g.dtype)
            factor = None
            if self._rounds_head or layer.name != "lm_head":
                scale = raw("input_scale")
                x, factor = _quantized(g, stored, x, None if scale is None else g.cast(scale, FLOAT))
            if factor is None:
                return multiplied(g, x, weight, None, layer.bias, g.dtype)
            return _own(g, "ScaledProduct", x, weight, factor, layer.bias)

    def quantized_experts(
        self, g: GraphBuilder, x: ir.Value, router: ir.Value, layer: ExpertLayer
    ) -> ir.Value:
        """Products of pairs of a row and one of its experts; written out in the graph."""
        with g.scope("experts"):
            pairs = _Pairs(g, router, layer.k)
            if layer.scales is not None:
                scales = g.op("Gather", layer.scales, pairs.best, name="own_scales", axis=0)
                pairs.shares = g.op("Mul", pairs.shares, scales, name="scaled_shares")

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
        weights: dict[str, tuple[ir.Value, ir.Value | None, ir.Value | None]] = {}
        for name in ("gate_up", "down"):
            weight = g.input(name, weight_dtype, ["E", "O", "G", 16] if packed else ["E", "O", "I"])
            scales = g.input(f"{name}_scales", ir.DataType.UINT8, ["E", "O", "G"]) if packed else None
            bias = g.input(f"{name}_bias", self.dtype, ["E", "O"]) if biased else None
            weights[name] = weight, scales, bias
        k = ir.RefAttr("k", "k", ir.AttributeType.INT)
        if packed:
            attributes: dict[str, Any] = {"k": k}
            for name in ("alpha", "beta", "limit"):
                attributes[name] = ir.RefAttr(name, name, ir.AttributeType.FLOAT)
            y = _own(g, "MXFP4Experts", x, router, *weights["gate_up"], *weights["down"], **attributes)
        else:
            pairs = _Pairs(g, router, k)

            def linear(name: str, value: ir.Value) -> ir.Value:
                weight, _, bias = weights[name]
                y = pairs.product(value, g.cast(weight, self.dtype))
                return y if bias is None else g.op("Add", y, g.op("Gather", bias, pairs.expert, axis=0))

            y = pairs.sum(linear("down", self._swiglu(g, linear("gate_up", pairs.rows(x)))))
        g.output(y, "y", self.dtype, ["rows", "D"])
        return g.function(declared())

    def gated_delta_net(self, kind: LayerDeltaNet) -> ir.Function:
        """One operator, which goes row by row."""
        g = self._builder("GatedDeltaNet")
        a = DeltaInputs(g, kind)
        a.output(*_several(g, "GatedDeltaNet", *g.graph.inputs, outputs=3))
        return g.function()

    def _builder(self, name: str) -> GraphBuilder:
        return GraphBuilder(name, dtype=self.dtype, opsets={DOMAIN: VERSION})


class _Pairs:
    """Pairs of a row and one of its k experts. shares, best: see Route. expert [rows*k]."""

    def __init__(self, g: GraphBuilder, router: ir.Value, k: int | ir.Attr) -> None:
        self._g = g
        self.shares, self.best, *self._by_expert = _several(g, "Route", router, outputs=4, k=k)
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


def _several(
    g: GraphBuilder, name: str, *inputs: ir.Value | None, outputs: int, **attributes: Any
) -> tuple[ir.Value, ...]:
    g.graph.opset_imports[DOMAIN] = VERSION
    return g.multi(name, *inputs, outputs=outputs, name=name, domain=DOMAIN, **attributes)


def _own(g: GraphBuilder, name: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
    return _several(g, name, *inputs, outputs=1, **attributes)[0]


def _placeable(g: GraphBuilder, products: Sequence[Product], parts: Mapping[str, Part]) -> Iterator[Product]:
    """The products as PlaceHeads takes them: parts in their order, with the same angles for queries and keys."""
    for kinds, y in products:
        angles = {parts[kind].angles for kind in kinds if kind != "v"}
        if len(angles) > 1 or sorted(kinds, key="qkv".index) != list(kinds):
            yield from apart(g, [(kinds, y)], {kind: parts[kind].columns for kind in kinds}).items()
        else:
            yield kinds, y


def _placed(
    g: GraphBuilder, kinds: Sequence[str], y: ir.Value, a: AttentionCall, caches: Mapping[str, ir.Value]
) -> Sequence[ir.Value]:
    parts = {kind: a.parts[kind] for kind in kinds}
    norms = {kind: part.norm for kind, part in parts.items() if part.norm}
    first = parts[kinds[0]]
    cos, sin = next((part.angles for part in parts.values() if part.angles), (None, None))
    return _several(
        *(g, "PlaceHeads", y, first.shape()),
        *(norms[kind].weight if kind in norms else None for kind in "qkv"),
        *(cos, sin, None if kinds == "q" else a.start),
        *(caches[kind] if kind in parts else None for kind in "kv"),
        outputs=len(parts),
        kinds="".join(kinds),
        heads=[part.heads for part in parts.values()],
        size=first.size,
        epsilon=next((norm.epsilon for norm in norms.values()), 0.0),
    )


def _quantized(
    g: GraphBuilder, stored: StoredLinear, x: ir.Value, scale: ir.Value | None
) -> tuple[ir.Value, ir.Value | None]:
    """x as the layer's format rounds it, and the factor of each row, float32 [rows,1], of its products."""
    if stored.rounding == "none":
        return x, None
    by_row, scale = stored.rounding == "row", input_scale(g, stored, scale)
    if stored.algorithm.reciprocal and not by_row:
        scale = g.op("Reciprocal", scale, name="input_scale")
    attributes: dict[str, Any] = {"by_row": int(by_row), "scheme": stored.algorithm.scheme}
    x, factor = _several(g, "QuantizedRows", x, scale, outputs=2, **attributes)
    return x, factor


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

    def of_pair(part: str) -> ir.Value | None:
        """That of each pair's expert."""
        value = raw(part)
        return None if value is None else g.op("Gather", value, pairs.expert, name=f"own_{part}", axis=0)

    if first is None:
        return pairs.product(x, g.cast(whole(stack.plain), g.dtype, name="weight"))
    if (order := of_pair("order")) is not None:
        x = g.op("GatherElements", x, order, name="ordered", axis=1)
    if (smooth := of_pair("pre_quant_scale")) is not None:
        x = g.op("Mul", x, g.cast(smooth, g.dtype), name="smoothed")
    if first.rounding == "row":
        x, factor = _quantized(g, first, x, None)
    elif first.rounding == "static":
        input_scales = of_pair("input_scale")
        assert input_scales is not None
        factor = g.op("Reshape", g.cast(input_scales, FLOAT), g.constant([-1, 1]), name="input_scale")
        if first.algorithm.reciprocal:
            factor = g.op("Reciprocal", factor, name="input_scale")
        x, one = g.op("Div", g.to_float(x), factor, name="by_scale"), g.constant(1, np.float32)
        x = g.from_dtype(LOWERINGS[first.algorithm.scheme].rounded_input(g, one, x), FLOAT)
    y = pairs.product(x, _widened(g, first, stack.columns, raw))
    if factor is None:
        return y
    return g.from_dtype(g.op("Mul", g.to_float(y), factor, name="rescaled"), FLOAT)
