"""An engine as models/ see it: a dtype to compute in, the steps between a layer's products, and the bodies of the
`dflash::` operators.

The steps are methods that models call: `add_norm`, `heads` and `attend`, `gated`, `router`, `best_token`. Each is a few
standard operators here. An engine that has one step for them overrides the method. The signatures of the operators are
at the top of onnxruntime.py, delta_net.py, experts.py, quantized.py and quantized_experts.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from dflash_trt.checkpoint.schema import Activation, LayerDeltaNet
from dflash_trt.graph.builder import BOOL, FLOAT, INT64, GraphBuilder
from dflash_trt.graph.delta_net import causal_conv
from dflash_trt.graph.experts import Storage, activated
from dflash_trt.graph.quantized import QuantizedLinear
from dflash_trt.graph.quantized_experts import ExpertLayer

# Extra key columns that carry the sink; eight keep the rows aligned.
SINK_PADDING = 8


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """The traits that decide the body of an attention layer.

    `windowed`: whether rows see less than all cache rows before them.
    `sinks`: whether each head has a learnt logit in the softmax.
    `trees`: whether the rows of a pass may be a tree.
    `scale`: of the products of queries and keys; None: head_dim ** -0.5.
    `apart`: whether the model has layers with other heads.
    """

    heads: int
    kv_heads: int
    head_dim: int
    windowed: bool
    sinks: bool = False
    trees: bool = False
    scale: float | None = None
    apart: bool = False

    @property
    def factor(self) -> float:
        """What products of queries and keys are multiplied by."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def name(self) -> str:
        """The name of the operator. Layers with other heads have bodies of their own."""
        return ("SinkAttention" if self.sinks else "CachedAttention") + self._heads

    @property
    def mask_name(self) -> str:
        """The name of the mask's operator. Bodies for trees have more inputs."""
        return "Tree" * self.trees + "Sink" * self.sinks + "AttentionMask" + self._heads

    @property
    def _heads(self) -> str:
        return f"{self.kv_heads}x{self.head_dim}" if self.apart else ""

    @property
    def group(self) -> int:
        """Query heads for each key/value head."""
        return self.heads // self.kv_heads


# A product [rows, n], and the names of the layers whose outputs lie side by side in its rows.
Product = tuple[Sequence[str], ir.Value]


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMSNorm: its weight [size] and epsilon, and a name for its node. A float32 weight is for rows in float32."""

    weight: ir.Value
    epsilon: float
    name: str = "norm"


@dataclass(frozen=True, slots=True)
class Part:
    """The queries, keys or values of a layer: `heads` of `size` numbers in each row [B*S, heads*size] of a product.

    shape: gives [B, S, *tail] as a tensor.
    norm: of each head, before it is rotated.
    angles: cos and sin [B, S, r/2], which rotate the first r numbers of each head in half-split pairs; `rotated`: r.
        Without angles, no head is rotated.
    """

    heads: int
    size: int
    shape: Callable[..., ir.Value]
    norm: Norm | None = None
    angles: tuple[ir.Value, ...] = ()
    rotated: int = 0

    @property
    def columns(self) -> int:
        """Numbers in a row."""
        return self.heads * self.size


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """A layer's attention: the products of its queries, keys and values, its `parts` "q", "k" and "v", and what
    `CachedAttention` takes beside them. mask: what `attention_mask` gives.
    """

    kind: AttentionKind
    products: Sequence[Product]
    parts: Mapping[str, Part]
    caches: Sequence[ir.Value]
    start: ir.Value
    mask: Sequence[ir.Value]
    lengths: ir.Value
    sinks: ir.Value | None


def apart(g: GraphBuilder, products: Sequence[Product], sizes: Mapping[str, int]) -> dict[str, ir.Value]:
    """What each layer gives, [..., n], by its name. `sizes`: n."""
    found: dict[str, ir.Value] = {}
    for names, y in products:
        if len(names) == 1:
            found[names[0]] = y
        else:
            lengths = g.constant([sizes[name] for name in names])
            path = f"{'-'.join(names)}/split"
            outputs = g.multi("Split", y, lengths, outputs=len(names), name=path, axis=-1)
            found |= zip(names, outputs, strict=True)
    return found


def normed(g: GraphBuilder, x: ir.Value, norm: Norm) -> ir.Value:
    """The norm of x [..., size], in the graph's dtype."""
    attributes: dict[str, Any] = {"name": norm.name, "epsilon": norm.epsilon, "axis": -1}
    if norm.weight.dtype != FLOAT:
        return g.op("RMSNormalization", x, norm.weight, **attributes)
    return g.from_dtype(g.op("RMSNormalization", g.to_float(x), norm.weight, **attributes), FLOAT)


class Dialect(ABC):
    """The `dflash::` bodies for one engine. Hidden states and linear layers have the dialect's `dtype`, and so have
    caches, but for its `cache_dtype`.

    Norms, rotations, routers and logits are float32.
    """

    name: str
    # Whether `quantized_experts` also handles experts in floating point.
    experts_apart = False
    # Whether the heads of a row lie apart: [B,n,S,d] in attention and in caches. Otherwise they are [B,S,n*d].
    by_head = False
    # Whether quantized layers of one input become one product if they are adjacent in their file.
    joins_quantized = False
    # Whether each layer has a mask of its own. `layer`, an attribute of the mask's operator, then tells them apart.
    masks_by_layer = False
    # Whether layers of one input in floating point are one product, wherever they lie.
    joins_floats = False

    def __init__(self, dtype: ir.DataType = FLOAT) -> None:
        self.dtype = self.cache_dtype = dtype

    def add_norm(self, g: GraphBuilder, x: ir.Value, y: ir.Value, norm: Norm) -> tuple[ir.Value, ir.Value]:
        """The residual sum x + y [rows, size], and its norm."""
        total = g.op("Add", x, y, name="residual")
        return total, normed(g, total, norm)

    def heads(
        self, g: GraphBuilder, products: Sequence[Product], parts: Mapping[str, Part]
    ) -> list[ir.Value]:
        """The parts "q", "k" and "v" of these products as attention takes them, normed and rotated."""
        found: dict[str, ir.Value] = {}
        for kinds, y in products:
            # Where nothing is done to a head, all get the shape of rows at once.
            whole = not self.by_head and not any(parts[kind].norm for kind in kinds)
            if whole:
                shape = parts[kinds[0]].shape(sum(parts[kind].columns for kind in kinds))
                y = g.op("Reshape", y, shape, name="by_row")
            for kind, x in apart(g, [(kinds, y)], {kind: parts[kind].columns for kind in kinds}).items():
                part = parts[kind]
                found[kind] = self._rotated(g, x if whole else self._arranged(g, x, part), part)
        return [found[kind] for kind in "qkv"]

    def _arranged(self, g: GraphBuilder, x: ir.Value, part: Part) -> ir.Value:
        """x [B*S, heads*size] as [B, heads, S, size] or [B, S, heads*size], each head normed."""
        if part.norm or self.by_head:
            x = g.op("Reshape", x, part.shape(part.heads, part.size), name="heads")
        if part.norm:
            x = normed(g, x, part.norm)
        if self.by_head:
            return g.op("Transpose", x, name="by_head", perm=[0, 2, 1, 3])
        return g.op("Reshape", x, part.shape(part.columns), name="by_row")

    def _rotated(self, g: GraphBuilder, x: ir.Value, part: Part) -> ir.Value:
        if not part.angles:
            return x
        attributes: dict[str, Any] = {} if self.by_head else {"num_heads": part.heads}
        if part.rotated != part.size:
            attributes["rotary_embedding_dim"] = part.rotated
        return g.op("RotaryEmbedding", x, *part.angles, name="rope", **attributes)

    def attend(self, g: GraphBuilder, a: AttentionCall) -> tuple[ir.Value, list[ir.Value]]:
        """A layer's attention [B*S, H*d], and its key and value cache with the new rows."""
        inputs = [*self.heads(g, a.products, a.parts), *a.caches, a.start, *a.mask, a.lengths]
        inputs += [] if a.sinks is None else [a.sinks]
        y, *updated = g.call(self.attention(a.kind), *inputs, outputs=3, name="cached")
        if self.by_head:
            y = g.op("Transpose", y, name="by_row", perm=[0, 2, 1, 3])
        return g.op("Reshape", y, g.constant([-1, a.parts["q"].columns]), name="merge"), updated

    def gated(
        self,
        g: GraphBuilder,
        products: Sequence[Product],
        sizes: Mapping[str, int],
        activation: Activation,
    ) -> ir.Value:
        """activation(gate) * up, of the products of the two layers that `sizes` names in this order."""
        gate, up = map(apart(g, products, sizes).__getitem__, sizes)
        return g.op("Mul", activated(g, gate, activation), up, name="gated")

    def router(
        self, g: GraphBuilder, x: ir.Value, weight: ir.Value, bias: ir.Value | None, name: str
    ) -> ir.Value:
        """x [rows, D] by a weight [E, D], with a bias [E], both float32: float32 [rows, E]."""
        return g.op("Gemm", g.to_float(x), weight, *([] if bias is None else [bias]), name=name, transB=1)

    def best_token(self, g: GraphBuilder, logits: ir.Value) -> tuple[ir.Value, ir.Value]:
        """The first best token of each row of logits [rows, V], and its log-probability in float32: [rows, 1]."""
        logits = g.to_float(logits)
        logprobs = g.op("LogSoftmax", logits, name="logprobs", axis=-1)
        token = g.op("ArgMax", logits, name="best", axis=-1, keepdims=1)
        return token, g.op("ReduceMax", logprobs, g.constant([-1]), name="best_logprob", keepdims=1)

    def cache_sizes(self, head_dim: int, *, sinks: bool) -> tuple[int, int]:
        """Row sizes of the key and the value cache of a head."""
        return (head_dim + SINK_PADDING if sinks else head_dim), head_dim

    def cache_shapes(
        self, kv_heads: int, head_dim: int, capacity: int | str, *, sinks: bool
    ) -> list[list[int | str]]:
        """The shapes of a layer's key and value cache. Rows are the last axis but one."""
        sizes = self.cache_sizes(head_dim, sinks=sinks)
        if self.by_head:
            return [["B", kv_heads, capacity, size] for size in sizes]
        return [["B", capacity, kv_heads * size] for size in sizes]

    @staticmethod
    @abstractmethod
    def window_stride(head_dim: int) -> int:
        """How many rows move down at once in layers with a window.

        A multiple of the rows that attention adds up at a time, so that a sum has the same parts wherever rows lie.
        """

    def keep(self, g: GraphBuilder, cache: ir.Value, rows: ir.Value, start: ir.Value) -> ir.Value:
        """A cache [..., C, n] with rows [..., S, n] written from cache row `start` [B] on."""
        return g.op("TensorScatter", cache, rows, start, name="keep", axis=-2, mode="linear")

    @abstractmethod
    def attention_mask(self, kind: AttentionKind) -> ir.Function:
        """`AttentionMask` or `SinkAttentionMask`: which cache rows each row sees."""

    def attention(self, kind: AttentionKind) -> ir.Function:
        """`CachedAttention` or `SinkAttention`, which `attend` calls: write the new rows, and attend over the cache."""
        raise NotImplementedError

    def mxfp4_experts(
        self, g: GraphBuilder, blocks: ir.Value, scales: ir.Value
    ) -> tuple[ir.Value, ir.Value | None]:
        """The inputs of `moe` for matrices stored as blocks [E,O,G,16] and scales [E,O,G], both bytes."""
        return blocks, scales

    @abstractmethod
    def moe(
        self, storage: Storage, weight_dtype: ir.DataType, *, biased: bool, widened_bytes: int
    ) -> ir.Function:
        """`MoE` for weights in this storage. widened_bytes: of all experts of the model in float32."""

    @abstractmethod
    def quantized_linear(self, g: GraphBuilder, x: ir.Value, layer: QuantizedLinear) -> ir.Value:
        """x [rows, in] through a layer; see quantized.py."""

    @abstractmethod
    def quantized_experts(
        self, g: GraphBuilder, x: ir.Value, router: ir.Value, layer: ExpertLayer
    ) -> ir.Value:
        """x [rows, D], router logits [rows, E] in float32 -> [rows, D]; see quantized_experts.py."""

    @abstractmethod
    def gated_delta_net(self, kind: LayerDeltaNet) -> ir.Function:
        """`GatedDeltaNet`, see delta_net.py."""

    def causal_conv(self, kind: LayerDeltaNet) -> ir.Function:
        """`CausalConv`, see delta_net.py."""
        return causal_conv(kind, self.dtype, few=False)

    def hidden_state_tap(self, taps: int) -> ir.Function:
        """`HiddenStateTap`: hidden states of several layers side by side."""
        g = GraphBuilder("HiddenStateTap")
        hidden = [g.input(f"h_{i}", self.dtype, ["rows", "D"]) for i in range(taps)]
        g.output(g.op("Concat", *hidden, axis=-1), "features", self.dtype, ["rows", "nD"])
        return g.function()

    def block_acceptance(self) -> ir.Function:
        """`BlockAcceptance`: how many drafts the target agrees with, and its token after them."""
        g = GraphBuilder("BlockAcceptance")
        tokens, rows = g.input("tokens", INT64, ["B", "S"]), g.input("rows", INT64, ["B", "R"])
        logits = g.input("logits", FLOAT, ["B", "R", "V"])
        chosen = g.op("ArgMax", logits, name="chosen", axis=-1, keepdims=0)
        # Compare the choice of row i with the token of row i+1. The last row has no successor and never matches. So a
        # first mismatch always exists, and its index is the number of accepted drafts.
        count = g.dim(rows, 1, name="count")
        index = g.arange(count)
        final = g.op("Sub", count, g.constant(1), name="final")
        successor = g.op("Min", g.op("Add", index, g.constant(1), name="next"), final, name="successor")
        next_rows = g.op("Gather", rows, successor, name="next_rows", axis=1)
        drafted = g.op("GatherElements", tokens, next_rows, name="drafted", axis=1)
        differs = g.op("Not", g.op("Equal", drafted, chosen, name="equal"), name="differs")
        mismatch = g.op("Or", differs, g.op("Equal", index, final, name="is_final"), name="mismatch")
        mismatch = g.op("Cast", mismatch, name="as_number", to=int(ir.DataType.INT32))
        accepted = g.op("ArgMax", mismatch, name="first", axis=1, keepdims=1)
        next_token = g.op("GatherElements", chosen, accepted, name="next_token", axis=1)
        g.output(g.op("Squeeze", accepted, g.constant([1])), "accepted", INT64, ["B"])
        g.output(g.op("Squeeze", next_token, g.constant([1])), "next", INT64, ["B"])
        return g.function()


class HeadMajor(Dialect):
    """What the dialects for GPUs share: the heads of a row lie apart, [B,n,S,d] in attention and in caches; and the
    activation of experts.
    """

    by_head = True
    # For adjacent layers, TensorRT would build a joined copy itself, once per profile. Other layers it leaves
    # separate.
    joins_quantized = True

    def _swiglu(self, g: GraphBuilder, x: ir.Value) -> ir.Value:
        """Interleaved gate and up, 2I numbers in a row -> I. In float32, where no limit overflows."""

        def attribute(name: str) -> ir.Value:
            reference = ir.RefAttr("value_float", name, ir.AttributeType.FLOAT)
            return g.op("Constant", name=name, value_float=reference)

        limit = attribute("limit")
        gate, up = (
            g.op("Slice", g.to_float(x), *map(g.constant, ([i], [2**31], [-1], [2])), name=name)
            for i, name in enumerate(("gate", "up"))
        )
        gate = g.op("Min", gate, limit, name="gate_cut")
        up = g.op(
            "Max", g.op("Min", up, limit, name="up_cut"), g.op("Neg", limit, name="least"), name="up_clamped"
        )
        share = g.op("Sigmoid", g.op("Mul", gate, attribute("alpha"), name="scaled_gate"), name="share")
        up = g.op("Add", up, attribute("beta"), name="shifted")
        return g.from_dtype(g.op("Mul", g.op("Mul", gate, share, name="activated"), up, name="gated"), FLOAT)


def ranges(kind: AttentionKind) -> ir.Function:
    """A mask's operator for kernels, which need no mask: the cache rows that each row sees [B,S], and the rows of its
    pass [B,S,S] as numbers, for trees.
    """
    g = GraphBuilder(kind.mask_name)
    both = [g.input(n, INT64, ["B", "S"]) for n in ("first", "last")]
    if kind.sinks:
        g.input("sink", INT64, ["B"])
    for value, output in zip(both, ("from_row", "to_row"), strict=True):
        g.output(g.op("Identity", value), output, INT64, ["B", "S"])
    if kind.trees:
        g.input("start", INT64, ["B"])
        visible = g.input("visible", BOOL, ["B", "S", "S"])
        number = g.op("Cast", visible, name="as_number", to=int(ir.DataType.INT32))
        g.output(number, "rows", ir.DataType.INT32, ["B", "S", "S"])
    g.input("capacity", INT64, [1])
    return g.function()


class TreeRows:
    """The inputs of a mask's body that tell which rows of its own pass a row sees, declared as inputs of `g`.

    start: int64 [B], the cache row of the pass's first row.
    visible: bool [B,S,S]. Row i sees row j.
    """

    def __init__(self, g: GraphBuilder) -> None:
        self.g = g
        self.start, self.visible = g.input("start", INT64, ["B"]), g.input("visible", BOOL, ["B", "S", "S"])
        self.batch = g.dim(self.start, 0, name="batch")
        self._final_row = g.op("Sub", g.dim(self.visible, 1), g.constant([1]), name="final_row")

    @property
    def final(self) -> ir.Value:
        """int64 [B]: the cache row of the pass's last row."""
        return self.g.op("Add", self.start, self._final_row, name="final_cache_row")

    def seen(self, cache_rows: ir.Value) -> tuple[ir.Value, ir.Value]:
        """For cache rows [L]: whether this pass writes them, bool [B,1,L], and whether row i sees them, [B,S,L]."""
        g = self.g
        row = g.op("Sub", cache_rows, g.unsqueeze(self.start, 1), name="row_of_pass")
        known = g.op("Min", g.op("Max", row, g.constant([0]), name="from_0"), self._final_row, name="a_row")
        inside = g.unsqueeze(g.op("Equal", row, known, name="inside"), 1)
        rows = g.shape(self.batch, g.dim(self.visible, 1), g.dim(cache_rows, 0))
        index = g.op("Expand", g.unsqueeze(known, 1), rows, name="for_each_row")
        return inside, g.op("GatherElements", self.visible, index, name="seen", axis=2)


class AttentionInputs:
    """The inputs of `CachedAttention` and `SinkAttention`, declared as inputs of `g`, and their outputs.

    `sizes`: of a head's row in the key and the value cache. `by_head`: see `Dialect`.
    `mask`: its type. None takes each row's range of cache rows in its place, `visible` too if the rows are a tree
    (`trees`).
    """

    def __init__(
        self,
        g: GraphBuilder,
        *,
        sizes: tuple[str, str] = ("d", "d"),
        by_head: bool,
        mask: ir.DataType | None,
        trees: bool = False,
    ) -> None:
        self.g, self._by_head = g, by_head
        self._caches = [["B", "N", "C", size] if by_head else ["B", "C", f"N*({size})"] for size in sizes]
        self.q = g.input("q", g.dtype, self._rows("H", "S"))
        self.k, self.v = (g.input(name, g.dtype, self._rows("N", "T")) for name in "kv")
        self.caches = tuple(
            g.input(f"{name}_cache", g.dtype, shape) for name, shape in zip("kv", self._caches, strict=True)
        )
        self.start = g.input("start", INT64, ["B"])
        if mask is None:
            self.ranges = [g.input(name, INT64, ["B", "S"]) for name in ("first", "last")]
            self.visible = [g.input("visible", ir.DataType.INT32, ["B", "S", "S"])] if trees else []
        else:
            self.mask = g.input("mask", mask, ["B", 1, "S", "L"] if by_head else ["B", 1, "rows", "L"])
            self.origin = g.input("origin", INT64, [1])
        if not by_head:  # ONNX Runtime's
            self.few = g.input("few", BOOL, [1])
        self.lengths = g.input("lengths", INT64, ["B"])

    def _rows(self, heads: str, rows: str) -> list[str]:
        return ["B", heads, rows, "d"] if self._by_head else ["B", rows, f"{heads}*d"]

    def output(self, y: ir.Value, k_cache: ir.Value, v_cache: ir.Value) -> None:
        """Declare the operator's outputs."""
        g = self.g
        g.output(y, "y", g.dtype, self._rows("H", "S"))
        for name, cache, shape in zip("kv", (k_cache, v_cache), self._caches, strict=True):
            g.output(cache, f"{name}_cache_out", g.dtype, shape)
