"""The bodies for TensorRT and TensorRT-RTX, in BF16 or FP16, or in FP32 for comparing numbers.

Caches have a static capacity C. Attention covers all of it, with a mask, up to the length of each sequence.
`trt::` operators are those of the ONNX parser (github.com/onnx/onnx-tensorrt, docs/TRT_custom_ops.md).
Each expert is computed for every row, in groups: TensorRT-RTX widens weights before it multiplies them, and a group
limits the memory for that (docs/tensorrt.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from dflash_trt.checkpoint.schema import LayerDeltaNet
from dflash_trt.errors import BuildError
from dflash_trt.graph.builder import BOOL, FLOAT, INT64, GraphBuilder
from dflash_trt.graph.dialect import SINK_PADDING, AttentionInputs, AttentionKind, HeadMajor, TreeRows
from dflash_trt.graph.experts import Storage, activated, declared
from dflash_trt.graph.lowering import LOWERINGS, TRT_DOMAIN, Values
from dflash_trt.graph.quantized import QuantizedLinear, input_scale, split_rows, tensorrt_linear, tensors
from dflash_trt.graph.quantized_experts import ExpertLayer, Projection, Stack, stacked

WIDENED_BYTES = 1 << 28  # widened weights of one product: eight of gpt-oss's experts


def router_shares(g: GraphBuilder, router: ir.Value, k: ir.Value) -> ir.Value:
    """Softmax over the k (int64 [1]) best logits of each row, in their columns, and 0 elsewhere; [rows, E]."""
    logits, best = g.multi("TopK", router, k, outputs=2, name="best", axis=-1)
    none = g.op("Expand", g.scalar(0.0, FLOAT), g.op("Shape", router, name="all"), name="none")
    chosen = g.op("Softmax", logits, name="softmax", axis=-1)
    return g.op("ScatterElements", none, best, chosen, name="shares", axis=1)


def shared(g: GraphBuilder, y: ir.Value, shares: ir.Value) -> ir.Value:
    """y times the shares of its rows, in float32. Not 0 * y: an expert that was not chosen may have overflowed."""
    zero = g.scalar(0.0, FLOAT)
    y = g.op("Where", g.op("Greater", shares, zero, name="chosen"), g.to_float(y), zero, name="asked")
    return g.op("Mul", y, shares, name="shared")


def after(g: GraphBuilder, x: ir.Value, total: ir.Value) -> ir.Value:
    """x [1,...] unchanged, but available only after `total` [...], float32.

    The result is x + 0; the compiler cannot know that the summand is 0. Otherwise it joins all products of the same x
    into one, and widens the weights of all of them.
    """
    zero = g.scalar(0.0, FLOAT)
    nothing = g.op("Min", g.op("Max", total, zero, name="positive"), zero, name="nothing")
    return g.op("Add", x, g.unsqueeze(g.from_dtype(nothing, FLOAT), 0), name="after")


def at_a_time(experts: int, size: int) -> int:
    """The number of experts in one product. `size`: bytes of an expert's larger matrix when widened.

    The result divides the number of experts. It is at least two, also for experts that are too large: TensorRT-RTX
    joins products of a single expert and widens the weights of all of them.
    """
    most = max(WIDENED_BYTES, 2 * size)
    return max(n for n in range(1, experts + 1) if experts % n == 0 and n * size <= most)


def quantized_experts(g: GraphBuilder, x: ir.Value, router: ir.Value, layer: ExpertLayer) -> ir.Value:
    """The layer for TensorRT and TensorRT-RTX, written out in the graph itself (see quantized.py), in its dtype.

    As in tensorrt.py's `moe`, every expert is computed for every row. Packed constants cannot be concatenated, so
    each is dequantized first. Experts are multiplied in groups of the size that `at_a_time` gives, one group
    after the other. Each expert has its own static input scale. So inputs are divided by it and
    rounded with a scale of 1, and the product is multiplied by it.
    """
    shares = router_shares(g, router, g.constant([layer.k]))
    shares = g.unsqueeze(g.op("Transpose", shares, name="by_expert", perm=[1, 0]), 2)
    stacks, scales = layer.stacks, layer.scales
    gate = stacks["gate"]
    count = at_a_time(len(gate), 2 * gate.rows * gate.columns * g.dtype.numpy().itemsize)
    steps = len(gate) // count
    x = g.unsqueeze(x, 0)

    def some(x: ir.Value, first: int, share: ir.Value) -> ir.Value:
        """The contribution of `count` experts, in float32."""

        def linear(name: Projection, value: ir.Value) -> ir.Value:
            """[1 or count, rows, columns] -> [count, rows, rows of the stack]"""
            with g.scope(name):
                return _linear(g, stacks[name].part(first, count), value, layer.folder)

        gate, up = (g.to_float(linear(name, x)) for name in ("gate", "up"))
        gated = g.op("Mul", activated(g, gate, layer.activation), up, name="gated")
        y = shared(g, linear("down", g.from_dtype(gated, FLOAT)), share)
        if scales is not None:
            y = g.op(
                "Mul", y, g.unsqueeze(g.slice(scales, first, first + count, axis=0), 1, 2), name="scaled"
            )
        return g.op("ReduceSum", y, g.constant([0]), name="sum", keepdims=0)

    by_step = g.multi("Split", shares, outputs=steps, name="shares", axis=0, num_outputs=steps)
    total = some(x, 0, by_step[0])
    for i, share in enumerate(by_step[1:], 1):
        total = g.op("Add", total, some(after(g, x, total), i * count, share), name="total")
    return g.from_dtype(total, FLOAT)


def _linear(g: GraphBuilder, stack: Stack, x: ir.Value, folder: str) -> ir.Value:
    first, factor = stack.first, None
    by_expert = [tensors(g, stored, folder) for stored in stack.stored]
    if first is None:
        weights = [g.cast(g.raw_weight(info, folder), g.dtype) for info in stack.plain]
    else:
        lowering = LOWERINGS[first.algorithm.scheme]
        weights = [lowering.tensorrt_weight(g, first, inputs) for inputs in by_expert]
        if first.order is not None:
            x = _in_order(g, x, _by_stack(g, by_expert, "order"))
        if first.pre_quant_scale is not None:
            smooth = [g.unsqueeze(g.cast(inputs["pre_quant_scale"], g.dtype), 0, 1) for inputs in by_expert]
            x = g.op("Mul", x, stacked(g, smooth), name="smoothed")
        if first.rounding == "row":
            x, factor = split_rows(g, g.to_float(x))
            scale = input_scale(g, first)
        elif first.rounding == "static":
            factor = stacked(g, [g.unsqueeze(inputs["input_scale"], 0, 1, 2) for inputs in by_expert])
            x, scale = g.op("Div", g.to_float(x), factor, name="by_scale"), g.scalar(1.0, FLOAT)
        if factor is not None:
            x = lowering.tensorrt_input(g, scale, g.from_dtype(x, FLOAT))
    weight = stacked(g, [g.unsqueeze(value, 0) for value in weights])
    y = g.op("MatMul", x, g.op("Transpose", weight, name="transposed", perm=[0, 2, 1]), name="product")
    if (
        first is not None and first.zero_term is not None
    ):  # only integers have it, whose inputs are not rounded here
        return _with_zeros(g, y, x, _by_stack(g, by_expert, "zero_term"))
    if factor is None:
        return y
    return g.from_dtype(g.op("Mul", g.to_float(y), factor, name="rescaled"), FLOAT)


def _by_stack(g: GraphBuilder, by_expert: Sequence[Values], name: str) -> ir.Value:
    return stacked(g, [g.unsqueeze(inputs[name], 0) for inputs in by_expert])


def _in_order(g: GraphBuilder, x: ir.Value, order: ir.Value) -> ir.Value:
    """x [1 or count, rows, columns] -> [count, rows, columns], with each expert's own order [count, columns]."""
    shape = g.shape(g.dim(order, 0, name="experts"), g.dim(x, 1, name="rows"), g.dim(x, 2, name="columns"))
    x, order = (g.op("Expand", value, shape) for value in (x, g.unsqueeze(order, 1)))
    return g.op("GatherElements", x, order, name="ordered", axis=2)


def _with_zeros(g: GraphBuilder, y: ir.Value, x: ir.Value, term: ir.Value) -> ir.Value:
    """As in quantized.py, for y [count, rows, out], x [1 or count, rows, in] and term [count, out, groups]."""
    groups = g.dim(term, 2, name="groups")
    by_group = g.op("Reshape", g.to_float(x), g.shape(0, 0, groups, -1), name="by_group")
    sums = g.op("ReduceSum", by_group, g.constant([3]), name="sums", keepdims=0)
    term = g.op("Transpose", g.cast(term, FLOAT), name="by_group_of_inputs", perm=[0, 2, 1])
    zeros = g.op("MatMul", sums, term, name="zeros")
    return g.from_dtype(g.op("Add", g.to_float(y), zeros, name="with_zeros"), FLOAT)


# Attention's kernels take up to so many keys at a time.
STRIDE = 128
# The widest heads that they take. Attention with wider heads becomes products and a softmax over the whole capacity.
FUSED_HEAD = 256


class TensorRT(HeadMajor):
    """`trt_operators`: whether the parser has `trt::TRT_Attention` and `trt::TRT_KVCacheUpdate`, as from TensorRT 11
    on.

    Otherwise standard operators do the same, and also in FP32, which has no fused kernel. They attend to the whole
    capacity, because only the mask hides the cache rows beyond a sequence's length.
    """

    name = "tensorrt"
    # TensorRT-RTX computes a mask of one layer within attention, and finds the tiles that it hides. A mask of several
    # layers goes to memory, and no tile is skipped.
    masks_by_layer = True

    def __init__(self, dtype: ir.DataType, *, trt_operators: bool = True) -> None:
        super().__init__(dtype)
        self.fused = trt_operators and dtype != FLOAT

    def cache_sizes(self, head_dim: int, *, sinks: bool) -> tuple[int, int]:
        """Keys and values must have the same size."""
        size = head_dim + SINK_PADDING if sinks else head_dim
        return size, size

    @staticmethod
    def window_stride(head_dim: int) -> int:
        return STRIDE

    def keep(self, g: GraphBuilder, cache: ir.Value, rows: ir.Value, start: ir.Value) -> ir.Value:
        return self._kept(g, cache, rows, start) if self.fused else super().keep(g, cache, rows, start)

    def _kept(self, g: GraphBuilder, cache: ir.Value, rows: ir.Value, start: ir.Value) -> ir.Value:
        """By an operator of the engine's own, in a function."""
        body = self._builder("KeptRows")
        inputs = [body.input(n, self.dtype, ["B", "N", c, "d"]) for n, c in (("cache", "C"), ("rows", "S"))]
        (kept,) = self._written(body, inputs[:1], inputs[1:], body.input("start", INT64, ["B"]))
        body.output(kept, "kept", self.dtype, ["B", "N", "C", "d"])
        (updated,) = g.call(body.function(), cache, rows, start, name="keep")
        return updated

    def attention_mask(self, kind: AttentionKind) -> ir.Function:
        """[B,1,S,C], from cache row 0 on. Both sides are shifted by the layer's number, so that no compiler joins the
        masks of several layers.
        """
        g = GraphBuilder(kind.mask_name)
        ranges = [g.input(n, INT64, ["B", "S"]) for n in ("first", "last")]
        sink = g.input("sink", INT64, ["B"]) if kind.sinks else None
        tree = TreeRows(g) if kind.trees else None
        layer = g.op(
            "Constant", name="layer", value_int=ir.RefAttr("value_int", "layer", ir.AttributeType.INT)
        )

        def shifted(value: ir.Value) -> ir.Value:
            return g.op("Add", value, layer, name="shifted")

        first, last = (g.unsqueeze(shifted(rows), 1, 3) for rows in ranges)
        unshifted = g.arange(g.input("capacity", INT64, [1]))
        cache_rows = shifted(unshifted)
        # A cache row's distance from what the row sees, 0 or less within. TensorRT-RTX finds no hidden tiles in `Or`.
        after, before = (
            g.op("Sub", cache_rows, last, name="after"),
            g.op("Sub", first, cache_rows, name="before"),
        )
        distance = g.op("Max", after, before, name="outside")
        if tree is not None:
            inside, seen = (g.unsqueeze(rows, 1) for rows in tree.seen(unshifted))
            hidden = g.op(
                "Sub", g.constant(1), g.op("Cast", seen, name="as_number", to=int(INT64)), name="hidden"
            )
            distance = g.op("Where", inside, hidden, distance, name="outside_tree")
        if sink is not None:
            from_sink = g.op("Sub", cache_rows, g.unsqueeze(shifted(sink), 1, 2, 3), name="from_sink")
            distance = g.op("Min", distance, g.op("Abs", from_sink, name="off_sink"), name="outside_both")
        mask = g.op("LessOrEqual", distance, g.constant(0), name="seen")
        g.output(mask, "mask", BOOL, ["B", 1, "S", "C"])
        g.output(g.op("Identity", g.constant([0])), "origin", INT64, [1])
        return g.function([ir.Attr("layer", ir.AttributeType.UNDEFINED, None)])

    def attention(self, kind: AttentionKind) -> ir.Function:
        g = self._builder(kind.name)
        if kind.sinks:
            return self._sink_attention(g, kind)
        a = AttentionInputs(g, by_head=True, mask=BOOL)
        fused = kind.head_dim <= FUSED_HEAD
        q = self._scaled(g, a.q, kind.factor)
        a.output(*self._attend(g, a, q, (a.k, a.v), a.lengths, fused=fused))
        return g.function()

    def _sink_attention(self, g: GraphBuilder, kind: AttentionKind) -> ir.Function:
        """As on ONNX Runtime (onnxruntime.py), except that there is no scale, so that the column is the sink itself."""
        head_dim = kind.head_dim
        size = f"{head_dim}+{SINK_PADDING}"
        a = AttentionInputs(g, sizes=(size, size), by_head=True, mask=BOOL)
        sinks = g.input("sinks", self.dtype, ["H"])
        batch, heads = g.dim(a.k, 0, name="batch"), g.dim(a.k, 1, name="heads")
        asking = (batch, g.dim(a.q, 1, name="query_heads"), g.dim(a.q, 2, name="rows"))
        column = g.op("Reshape", sinks, g.constant([1, -1, 1, 1]), name="per_head")
        column = g.op("Expand", column, g.shape(*asking, 1), name="column")
        tail = self._constant(g, np.zeros(SINK_PADDING - 1), *asking)
        q = g.op("Concat", self._scaled(g, a.q, kind.factor), column, tail, name="q_with_sink", axis=-1)
        rows = []
        for name, value in (("k", a.k), ("v", a.v)):
            pad = self._constant(g, np.zeros(SINK_PADDING), batch, heads, g.dim(value, 2))
            sink_row = np.zeros(head_dim + SINK_PADDING)
            sink_row[head_dim] = name == "k"
            padded = g.op("Concat", value, pad, name=f"{name}_padded", axis=-1)
            sink = self._constant(g, sink_row, batch, heads, 1)
            rows.append(g.op("Concat", padded, sink, name=f"{name}_with_sink", axis=2))
        lengths = g.op("Add", a.lengths, g.constant(1), name="with_sink")
        fused = head_dim + SINK_PADDING <= FUSED_HEAD
        y, *caches = self._attend(g, a, q, (rows[0], rows[1]), lengths, fused=fused)
        a.output(g.slice(y, 0, head_dim, axis=3, name="without_sink"), *caches)
        return g.function()

    def quantized_linear(self, g: GraphBuilder, x: ir.Value, layer: QuantizedLinear) -> ir.Value:
        return tensorrt_linear(g, x, layer)

    def quantized_experts(
        self, g: GraphBuilder, x: ir.Value, router: ir.Value, layer: ExpertLayer
    ) -> ir.Value:
        with g.scope("experts"):
            return quantized_experts(g, x, router, layer)

    def gated_delta_net(self, kind: LayerDeltaNet) -> ir.Function:
        """Left to the dialects with plugins."""
        raise BuildError(f"{self.name}: Gated DeltaNet is computed by plugins only")

    def moe(
        self, storage: Storage, weight_dtype: ir.DataType, *, biased: bool, widened_bytes: int
    ) -> ir.Function:
        """Every expert for every row, weighted by 0 if it was not chosen. The sum over experts is in float32. MXFP4 is
        left to the dialects with plugins.

        Gathering the chosen matrices would read less. But TensorRT-RTX 1.7 writes the gathered matrices to memory: 72
        GB for 512 rows of gpt-oss-20b.
        """
        if storage != "float":
            raise BuildError(f"{self.name}: experts in {storage} are computed by plugins only")
        g = self._builder("MoE")
        x, router = g.input("x", self.dtype, ["rows", "D"]), g.input("router_logits", FLOAT, ["rows", "E"])
        weights: dict[str, tuple[ir.Value, ir.Value | None]] = {}
        for name in ("gate_up", "down"):
            weight = g.input(name, weight_dtype, ["E", "O", "I"])
            weights[name] = weight, g.input(f"{name}_bias", self.dtype, ["E", "O"]) if biased else None
        k = g.op("Constant", name="k", value_int=ir.RefAttr("value_int", "k", ir.AttributeType.INT))
        shares = router_shares(g, router, g.op("Reshape", k, g.constant([1]), name="count"))
        shares = g.unsqueeze(g.op("Transpose", shares, name="by_expert", perm=[1, 0]), 2)

        def linear(name: str, value: ir.Value) -> ir.Value:
            """[1 or E, rows, I] -> [E, rows, O]"""
            weight, bias = weights[name]
            weight = g.op("Transpose", g.cast(weight, self.dtype), name=f"{name}/transposed", perm=[0, 2, 1])
            value = g.op("MatMul", value, weight, name=name)
            return value if bias is None else g.op("Add", value, g.unsqueeze(bias, 1), name=f"{name}/biased")

        y = linear("down", self._swiglu(g, linear("gate_up", g.unsqueeze(x, 0))))
        y = g.op("ReduceSum", shared(g, y, shares), g.constant([0]), name="sum", keepdims=0)
        g.output(g.from_dtype(y, FLOAT), "y", self.dtype, ["rows", "D"])
        return g.function(declared())

    def _builder(self, name: str) -> GraphBuilder:
        return GraphBuilder(name, dtype=self.dtype, opsets={TRT_DOMAIN: 1})

    def _constant(self, g: GraphBuilder, row: np.ndarray, *dims: ir.Value | int) -> ir.Value:
        """`row`, repeated to [*dims, len(row)]."""
        constant = g.constant(row.reshape(1, 1, 1, -1), self.dtype.numpy())
        return g.op("Expand", constant, g.shape(*dims, len(row)), name="repeated")

    def _scaled(self, g: GraphBuilder, q: ir.Value, factor: float) -> ir.Value:
        """Scale queries in float32. Rounded to BF16, most scales would be off by a thousandth, for all scores alike."""
        if factor == 1:
            return q
        scaled = g.op("Mul", g.to_float(q), g.scalar(factor, FLOAT), name="scaled")
        return g.from_dtype(scaled, FLOAT)

    def _attend(
        self,
        g: GraphBuilder,
        a: AttentionInputs,
        q: ir.Value,
        rows: tuple[ir.Value, ir.Value],
        lengths: ir.Value,
        *,
        fused: bool,
    ) -> tuple[ir.Value, ir.Value, ir.Value]:
        """Write the rows and attend. Returns y and both caches. `fused`: whether there is a kernel for such heads."""
        k, v = self._written(g, a.caches, rows, a.start)
        if not (self.fused and fused):
            apart = self.dtype == FLOAT or not fused
            decomposable: dict[str, Any] = {"TRT_decomposable": 1} if apart else {}
            return g.op("Attention", q, k, v, a.mask, name="attention", scale=1.0, **decomposable), k, v
        ends = g.op("Cast", lengths, name="as_int32", to=int(ir.DataType.INT32))
        return g.op("TRT_Attention", q, k, v, a.mask, None, ends, domain=TRT_DOMAIN, name="attention"), k, v

    def _written(
        self, g: GraphBuilder, caches: Sequence[ir.Value], rows: Sequence[ir.Value], start: ir.Value
    ) -> list[ir.Value]:
        """Caches [B,N,C,d], each with its rows [B,N,T,d] from cache row `start` [B] on."""
        operator, options = "TensorScatter", dict[str, Any](axis=-2, mode="linear")
        if self.fused:
            start = g.op("Cast", start, name="as_int32", to=int(ir.DataType.INT32))
            operator, options = "TRT_KVCacheUpdate", {"domain": TRT_DOMAIN, "cache_mode": "linear"}
        return [
            g.op(operator, cache, new, start, name="write", **options)
            for cache, new in zip(caches, rows, strict=True)
        ]
