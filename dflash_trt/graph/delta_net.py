"""The `dflash::` operators of Gated DeltaNet. Rows of a pass, and before them the pending ones, which are replayed.

Shapes: B sequences, S rows of the pass, W = PENDING_ROWS, P rows replayed, C channels, K taps of the convolution, Hk
key heads of size dk, Hv value heads of size dv. P is W, or on ONNX Runtime the most `replayed` rows of the batch.

- replayed [B] int64: the pending rows that count, from the first on.
- certain [B] int64: the rows of the pass that enter the new state. The W rows after them become the new pending ones.
- begun [B] float32: 0 for a sequence that starts with this pass, and 1 otherwise.

A pass of more than W rows is one over a prompt. Only the first of its uncertain rows has a defined result.

CausalConv(x [B,S,C], history [B,K-1,C], pending [B,W,C], weight [C,1,K], replayed, certain, begun)
           -> y [B,P+S,C] float32, history', pending'
    silu of a depthwise causal convolution. The first row of the pass follows the last replayed one.
GatedDeltaNet(q, k [B,P+S,Hk*dk], v [B,P+S,Hv*dv], gates [B,S,2*Hv], state [B,Hv,dk,dv], pending_gates [B,W,2*Hv],
              replayed, certain, begun) -> y [B,S,Hv*dv], state', pending_gates'
    For each row, with decay d = exp(gate) and beta b of a value head (arXiv 2412.06464, eq. 10):
        state = d * state;  state += outer(k, b * (v - k @ state));  y = q @ state
    All float32. Queries and keys come with their lengths; nothing is scaled here.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from dflash_trt.checkpoint.schema import PENDING_ROWS, LayerDeltaNet
from dflash_trt.graph import MICROSOFT_DOMAIN
from dflash_trt.graph.builder import FLOAT, INT64, GraphBuilder


class _Places:
    """The inputs that say which rows count, and rows chosen by them."""

    def __init__(self, g: GraphBuilder) -> None:
        self.g = g
        self.replayed, self.certain = g.input("replayed", INT64, ["B"]), g.input("certain", INT64, ["B"])
        self.begun = g.input("begun", FLOAT, ["B"])

    def kept(self, x: ir.Value, axes: int) -> ir.Value:
        """x, or zeros where the sequence starts. `axes`: those of x after the first."""
        begun = self.g.from_dtype(self.g.unsqueeze(self.begun, *range(1, axes + 1)), FLOAT)
        return self.g.op("Mul", x, begun, name="kept")

    def rows(self, x: ir.Value, first: ir.Value, count: int, last: ir.Value | None = None) -> ir.Value:
        """Rows first .. first+count-1 of each sequence of x [B,T,C]; `last` stands for rows behind it."""
        g = self.g
        index = g.op("Add", g.unsqueeze(first, 1), g.constant(np.arange(count)), name="index")
        if last is not None:
            index = g.op("Min", index, last, name="within")
        return g.op("GatherND", x, g.unsqueeze(index, 2), name="rows", batch_dims=1)


def causal_conv(kind: LayerDeltaNet, dtype: ir.DataType, *, few: bool) -> ir.Function:
    """The body in standard operators. `few`: only as many pending rows as some sequence replays.

    ONNX Runtime's own CausalConvWithState took 1 to 90 times as long, with the transpositions that it needs: it has a
    row for each channel.
    """
    g = GraphBuilder("CausalConv", dtype=dtype)
    x = g.input("x", dtype, ["B", "S", "C"])
    history = g.input("history", dtype, ["B", kind.kernel - 1, "C"])
    pending = g.input("pending", dtype, ["B", PENDING_ROWS, "C"])
    weight = g.input("weight", FLOAT, ["C", 1, kind.kernel])
    at, before = _Places(g), kind.kernel - 1
    replayed = pending
    if few:
        most = g.op("ReduceMax", at.replayed, name="most", keepdims=1)
        replayed = g.slice(pending, 0, most, axis=1, name="replayed")
    old = g.op("Concat", at.kept(history, 2), replayed, name="old", axis=1)
    new = g.op("Concat", at.rows(old, at.replayed, before), x, name="new", axis=1)
    # Both in one: between their rows are `before` others, which see rows of both.
    both = g.to_float(g.op("Concat", old, new, name="both", axis=1))
    taps = g.multi("Split", weight, outputs=kind.kernel, name="taps", axis=2, num_outputs=kind.kernel)
    total: ir.Value | None = None
    for j, tap in enumerate(taps):
        # Ends count from the last row, so that no length has to be computed.
        rows = g.slice(both, j, j - before if j < before else 2**31, axis=1, name="shifted")
        part = g.op("Mul", rows, g.op("Reshape", tap, g.constant([-1]), name="tap"), name="part")
        total = part if total is None else g.op("Add", total, part, name="sum")
    assert total is not None
    total = g.op("Swish", total, name="silu")
    length = g.op("Sub", g.dim(old, 1, name="old_rows"), g.constant([before]), name="pending_rows")
    end = g.op("Add", length, g.constant([before]), name="gap_end")
    first = g.slice(total, 0, length, axis=1, name="of_pending")
    second = g.slice(total, end, 2**31, axis=1, name="of_new")
    g.output(g.op("Concat", first, second, axis=1), "y", FLOAT, ["B", "P+S", "C"])
    last = g.op("Sub", g.dim(new, 1, name="new_rows"), g.constant([1]), name="last")
    g.output(at.rows(new, at.certain, before), "history_out", dtype, ["B", before, "C"])
    first_pending = g.op("Add", at.certain, g.constant([before]), name="first_pending")
    g.output(at.rows(new, first_pending, PENDING_ROWS, last), "pending_out", dtype, ["B", PENDING_ROWS, "C"])
    return g.function()


class DeltaInputs:
    """The inputs of `GatedDeltaNet`, declared as inputs of `g`, and its outputs."""

    def __init__(self, g: GraphBuilder, kind: LayerDeltaNet) -> None:
        self.g, self.kind = g, kind
        keys, values = kind.key_heads * kind.key_dim, kind.value_heads * kind.value_dim
        self.q, self.k = (g.input(name, FLOAT, ["B", "P+S", keys]) for name in "qk")
        self.v = g.input("v", FLOAT, ["B", "P+S", values])
        self.gates = g.input("gates", FLOAT, ["B", "S", 2 * kind.value_heads])
        self._state: list[int | str] = ["B", kind.value_heads, kind.key_dim, kind.value_dim]
        self.state = g.input("state", FLOAT, self._state)
        self._pending: list[int | str] = ["B", PENDING_ROWS, 2 * kind.value_heads]
        self.pending_gates = g.input("pending_gates", FLOAT, self._pending)
        self.at = _Places(g)

    def output(self, y: ir.Value, state: ir.Value, pending_gates: ir.Value) -> None:
        """Declare the operator's outputs."""
        g = self.g
        g.output(y, "y", FLOAT, ["B", "S", self.kind.value_heads * self.kind.value_dim])
        g.output(state, "state_out", FLOAT, self._state)
        g.output(pending_gates, "pending_gates_out", FLOAT, self._pending)


def _counted_rows(g: GraphBuilder, a: DeltaInputs, replayed: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
    """bool [B,P+S]: rows before the uncertain ones, those of them that enter the new state, and the uncertain ones."""
    row = g.op("Sub", g.arange(g.dim(a.q, 1, name="all")), replayed, name="row")  # from 0 on in this pass
    certain = g.op("Less", row, g.unsqueeze(a.at.certain, 1), name="is_certain")
    pending = g.op("Add", row, replayed, name="pending_row")
    kept = g.op("Less", pending, g.unsqueeze(a.at.replayed, 1), name="is_kept")
    new = g.op("GreaterOrEqual", row, g.constant([0]), name="is_new")
    entering = g.op("Or", g.op("And", certain, new, name="new_certain"), kept, name="entering")
    return certain, entering, g.op("Not", certain, name="uncertain")


def onnxruntime_delta(kind: LayerDeltaNet) -> ir.Function:
    """Two calls of ONNX Runtime's operator: one up to the new state, one from there over the uncertain rows.

    The operator goes row by row. So the state after a row is the same, bit for bit, in whatever passes the rows came.
    Rows with decay 1 and beta 0 leave the state as it is, which masks those that do not count.
    """
    g = GraphBuilder("GatedDeltaNet", opsets={MICROSOFT_DOMAIN: 1})
    a = DeltaInputs(g, kind)
    at, state = a.at, a.at.kept(a.state, 3)
    count = g.dim(a.gates, 1, name="count")
    replayed = g.op("Sub", g.dim(a.q, 1, name="all"), count, name="replayed_rows")
    of_pending = g.slice(a.pending_gates, 0, replayed, axis=1, name="replayed")
    all_gates = g.op("Concat", of_pending, a.gates, name="all_gates", axis=1)
    zero = g.constant([0])
    most = g.op("ReduceMax", at.certain, name="most", keepdims=1)
    least = g.op("ReduceMin", at.certain, name="least", keepdims=1)
    certain, entering, uncertain = _counted_rows(g, a, replayed)

    def cut(x: ir.Value, first: ir.Value, end: ir.Value) -> ir.Value:
        return g.slice(x, first, end, axis=1, name="part")

    def run(counted: ir.Value, first: ir.Value, end: ir.Value, state: ir.Value) -> tuple[ir.Value, ...]:
        mask = g.op("Cast", g.unsqueeze(counted, 2), name="mask", to=int(FLOAT))
        gates = g.op("Mul", all_gates, mask, name="masked")
        decay, beta = g.multi(
            "Split", cut(gates, first, end), outputs=2, name="gates", axis=-1, num_outputs=2
        )
        results = g.multi(
            "LinearAttention",
            *(cut(x, first, end) for x in (a.q, a.k, a.v)),
            *(state, decay, beta),
            outputs=2,
            name="recurrence",
            domain=MICROSOFT_DOMAIN,
            q_num_heads=kind.key_heads,
            kv_num_heads=kind.value_heads,
            update_rule="gated_delta",
            scale=1.0,
        )
        # ONNX knows no type of this operator's results, so its checker needs a cast. ONNX Runtime drops the cast.
        return tuple(g.op("Cast", result, name="typed", to=int(FLOAT)) for result in results)

    end = g.dim(a.q, 1, name="end")
    behind = g.op("Add", replayed, most, name="behind_certain")
    begin = g.op("Add", replayed, least, name="first_uncertain")
    first, state = run(entering, zero, behind, state)
    second, _ = run(uncertain, begin, end, state)
    # Rows from `least` to `most` are certain in some sequences only.
    differ = g.op("Sub", most, least, name="differ")
    mixed = g.op(
        "Where",
        g.unsqueeze(cut(certain, begin, behind), 2),
        cut(first, begin, behind),
        cut(second, zero, differ),
        name="mixed",
    )
    parts = cut(first, replayed, begin), mixed, cut(second, differ, count)
    y = g.op("Concat", *parts, name="y", axis=1)
    last = g.op("Sub", g.dim(all_gates, 1, name="rows"), g.constant([1]), name="last")
    first_pending = g.op("Add", at.certain, replayed, name="first_pending")
    a.output(y, state, at.rows(all_gates, first_pending, PENDING_ROWS, last))
    return g.function()
