"""`dflash::GatedDeltaNet` in chunks of plain products, for engines without an operator of its own.

Within a chunk of rows i >= j, with G the running sum of the decays' logarithms (Yang et al. 2024, section 3.3):

    D = exp(G_i - G_j);  A = strictly lower part of (b * K K^T) . D;  T = (I + A)^-1
    V' = T (b * V) - T (b * exp(G) * K) S;  Y = (exp(G) * Q) S + (Q K^T . D) V'
    state after n rows = exp(G_n) S + (exp(G_n - G) * K)^T V', with rows < n only

A is nilpotent, so T is a product of C/2 factors at most: (I - A)(I + A^2)(I + A^4)(I + A^8) for 16 rows. That is exact,
and in float32 the error stays near 1e-6. Longer chunks lose it: squares of A grow before they vanish.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from dflash_trt.checkpoint.schema import PENDING_ROWS
from dflash_trt.graph.builder import FLOAT, GraphBuilder
from dflash_trt.graph.delta_net import DeltaKind, DeltaRows

# Rows of a chunk. The pending rows are one.
CHUNK = PENDING_ROWS


def chunked_delta(kind: DeltaKind) -> ir.Function:
    """The pending rows are the first chunk. A Scan carries the state from chunk to chunk."""
    g = GraphBuilder("GatedDeltaNet")
    a = DeltaRows(g, kind)
    products = _products(g, a, kind)
    end_state, chunks = g.multi(
        "Scan",
        a.state,
        *products.values(),
        outputs=2,
        name="chunks",
        body=_step(g, kind, list(products)).graph,
        num_scan_inputs=len(products),
    )
    # [chunks, B, Hv, CHUNK, dv] -> [B, rows, Hv*dv], without the pending rows and the spare ones.
    y = g.op("Transpose", chunks, name="by_row", perm=[1, 0, 3, 2, 4])
    y = g.op("Reshape", y, g.shape(g.dim(a.gates, 0), -1, kind.value_heads * kind.value_dim), name="rows")
    last = g.op("Add", a.count, g.constant([CHUNK]), name="last_row")
    a.finish(g.slice(y, CHUNK, last, axis=1, name="new_rows"), end_state)
    return g.function()


def _by_chunk(
    g: GraphBuilder, kind: DeltaKind, x: ir.Value, pads: ir.Value, heads: int, size: int, name: str
) -> ir.Value:
    """[B, W+S, heads*size] -> [chunks, B, Hv, CHUNK, size], filled up with zeros, which do not count."""
    x = g.op("Pad", x, pads, name=f"{name}_padded")
    x = g.op("Reshape", x, g.constant([0, -1, CHUNK, heads, size]), name=f"{name}_by_chunk")
    x = g.op("Transpose", x, name=f"{name}_by_head", perm=[1, 0, 3, 2, 4])
    if heads == kind.value_heads:
        return x
    # Each key head stands for several value heads.
    x = g.unsqueeze(x, 3)
    x = g.op("Concat", *[x] * (kind.value_heads // kind.key_heads), name=f"{name}_repeated", axis=3)
    return g.op("Reshape", x, g.constant([0, 0, -1, CHUNK, size]), name=f"{name}_of_values")


def _products(g: GraphBuilder, a: DeltaRows, kind: DeltaKind) -> dict[str, ir.Value]:
    """What a chunk computes without the state, [chunks, B, Hv, ..].

    Values and reads of its own rows, what the queries ask of the state and of the chunk, what the chunk writes to the
    state, and the share of the state that is kept.
    """
    spare = g.op("Mod", g.op("Neg", a.count, name="negative"), g.constant([CHUNK]), name="spare")
    zeros = [0, 0, 0, 0], [0]
    pads = g.op("Concat", g.constant(zeros[0]), spare, g.constant(zeros[1]), name="pads", axis=0)

    def by_chunk(x: ir.Value, heads: int, size: int, name: str) -> ir.Value:
        return _by_chunk(g, kind, x, pads, heads, size, name)

    q, k = (by_chunk(x, kind.key_heads, kind.key_dim, name) for x, name in ((a.q, "q"), (a.k, "k")))
    v = by_chunk(a.v, kind.value_heads, kind.value_dim, "v")
    decay, beta = g.multi("Split", a.all_gates, outputs=2, name="gates", axis=-1, num_outputs=2)
    decay, beta = (by_chunk(x, kind.value_heads, 1, name) for x, name in ((decay, "decay"), (beta, "beta")))
    count = _counts(g, a, g.dim(q, 0, name="chunks"))  # [chunks, B, 1, 1, 1]

    def product(x: ir.Value, y: ir.Value, name: str) -> ir.Value:
        return g.op("MatMul", x, y, name=name)

    def times(x: ir.Value, y: ir.Value, name: str) -> ir.Value:
        return g.op("Mul", x, y, name=name)

    def flipped(x: ir.Value, name: str) -> ir.Value:
        return g.op("Transpose", x, name=name, perm=[0, 1, 2, 4, 3])

    total = g.op("CumSum", decay, g.constant(3), name="total")
    difference = g.op("Sub", total, flipped(total, "total_by_column"), name="difference")
    lower = g.constant(np.tril(np.ones((CHUNK, CHUNK))), np.float32)
    strictly = g.constant(np.tril(np.ones((CHUNK, CHUNK)), -1), np.float32)
    zero = g.constant(0, np.float32)
    between = g.op("Exp", g.op("Min", difference, zero, name="not_above"), name="between")
    by_column = flipped(k, "k_by_column")
    system = times(times(product(k, by_column, "keys"), beta, "keys_scaled"), between, "keys_decayed")
    inverse = _inverse(g, g.op("Neg", times(system, strictly, "system"), name="negative_system"))
    decayed = g.op("Exp", total, name="decayed")
    # The rows that enter the new state.
    row = g.constant(np.arange(CHUNK).reshape(CHUNK, 1))
    entering = g.op("Cast", g.op("Less", row, count, name="enters"), name="entering", to=int(FLOAT))
    end = g.op("ReduceSum", times(decay, entering, "counted"), g.constant([3]), name="end", keepdims=1)
    left = g.op(
        "Exp", g.op("Min", g.op("Sub", end, total, name="left"), zero, name="left_below"), name="left"
    )
    return {
        "values": product(inverse, times(v, beta, "v_scaled"), "values"),
        "reads": product(inverse, times(times(k, beta, "k_scaled"), decayed, "k_decayed"), "reads"),
        "asks": times(q, decayed, "q_decayed"),
        "shares": times(times(product(q, by_column, "scores"), between, "scores_decayed"), lower, "shares"),
        "writes": flipped(times(times(k, left, "k_left"), entering, "writes"), "writes_by_column"),
        "kept": g.op("Exp", end, name="kept"),
    }


def _inverse(g: GraphBuilder, system: ir.Value) -> ir.Value:
    """(1 - system)^-1 of strictly lower matrices [.., CHUNK, CHUNK]: the product of 1 + system^(2^i)."""
    inverse = g.op("Add", g.constant(np.eye(CHUNK), np.float32), system, name="inverse")
    power, rows = system, 2
    while rows < CHUNK:
        power = g.op("MatMul", power, power, name="power")
        inverse = g.op("Add", inverse, g.op("MatMul", inverse, power, name="further"), name="inverse")
        rows *= 2
    return inverse


def _step(g: GraphBuilder, kind: DeltaKind, names: list[str]) -> GraphBuilder:
    """The Scan's body: a chunk's rows y and the state after it, from the state before and the chunk's products."""
    body = g.body("chunk")
    shape: list[int | str] = ["B", kind.value_heads]
    shapes = {
        "values": [*shape, CHUNK, kind.value_dim],
        "reads": [*shape, CHUNK, kind.key_dim],
        "asks": [*shape, CHUNK, kind.key_dim],
        "shares": [*shape, CHUNK, CHUNK],
        "writes": [*shape, kind.key_dim, CHUNK],
        "kept": [*shape, 1, 1],
    }
    state = body.input("chunk/state", FLOAT, [*shape, kind.key_dim, kind.value_dim])
    of = {name: body.input(f"chunk/{name}", FLOAT, shapes[name]) for name in names}
    new = body.op("Sub", of["values"], body.op("MatMul", of["reads"], state, name="known"), name="new")
    y = body.op(
        "Add",
        body.op("MatMul", of["asks"], state, name="of_state"),
        body.op("MatMul", of["shares"], new, name="of_chunk"),
        name="y",
    )
    after = body.op(
        "Add",
        body.op("Mul", state, of["kept"], name="left_of_state"),
        body.op("MatMul", of["writes"], new, name="written"),
        name="after",
    )
    body.output(after, "chunk/after", FLOAT, [*shape, kind.key_dim, kind.value_dim])
    body.output(y, "chunk/y", FLOAT, shapes["values"])
    return body


def _counts(g: GraphBuilder, a: DeltaRows, chunks: ir.Value) -> ir.Value:
    """The rows of each chunk that enter the new state: int64 [chunks, B, 1, 1, 1]."""
    first = g.op("Mul", g.arange(chunks), g.constant(CHUNK), name="first_row")
    first = g.op("Sub", first, g.constant(CHUNK), name="first_of_pass")  # -CHUNK for the pending ones
    left = g.op("Sub", a.at.certain, g.unsqueeze(first, 1), name="certain_from")
    left = g.op("Min", g.op("Max", left, g.constant(0), name="at_least"), g.constant(CHUNK), name="within")
    of_pending = g.op("Less", g.unsqueeze(first, 1), g.constant(0), name="is_pending")
    return g.unsqueeze(g.op("Where", of_pending, a.at.replayed, left, name="entering"), 2, 3, 4)
