"""The operators in plain NumPy: the reference for the kernels.

If an operator has a function body (graph/), the body computes the same. SampleRows is `decoding.sampling.sample` for
each row. Dtypes narrower than float32 come from ml_dtypes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_trt.formats.mxfp4 import unpack_blocks

Array = NDArray[Any]


def gather_taps(taps: Sequence[Array], dtype: Any, valid: Array | None = None, rows: int = 1) -> Array:
    """n arrays [B * rows, D] -> [B * rows, n * D]. Rows from valid[b] on are zero."""
    features: Array = np.concatenate([tap.astype(dtype) for tap in taps], axis=-1)
    if valid is not None:
        features[np.arange(features.shape[0]) % rows >= np.repeat(valid, rows)] = 0
    return features


def accept_block(
    tokens: Sequence[int], sampled: Sequence[int], parents: Sequence[int] | None = None
) -> list[int]:
    """The accepted nodes of one tree, from the anchor down. Node i drafted tokens[i]; sampled[i] was sampled after
    it.
    """
    parents = range(-1, len(tokens) - 1) if parents is None else parents
    path = [0]
    while True:
        follows = [
            i for i in range(1, len(tokens)) if parents[i] == path[-1] and tokens[i] == sampled[path[-1]]
        ]
        if not follows:
            return path
        path.append(follows[0])


def moe(
    x: Array,
    router_logits: Array,
    gate_up: tuple[Array, Array, Array | None],
    down: tuple[Array, Array, Array | None],
    *,
    k: int,
    alpha: float,
    beta: float,
    limit: float,
) -> Array:
    """dflash::MoE with MXFP4 experts, each (blocks, scales, bias). Sums in float64, rounded where the kernels round."""
    dtype = x.dtype
    x = x.astype(np.float64)
    y = np.zeros_like(x)
    for row in range(x.shape[0]):
        best = np.argsort(-router_logits[row], kind="stable")[:k]
        share = np.exp(router_logits[row, best].astype(np.float64) - router_logits[row, best[0]])
        for expert, p in zip(best, share / share.sum(), strict=True):
            h = _linear(x[row], gate_up, expert)
            gate, up = np.minimum(h[0::2], limit), np.clip(h[1::2], -limit, limit)
            h = ((up + beta) * gate / (1 + np.exp(-alpha * gate))).astype(dtype).astype(np.float64)
            y[row] += p * _linear(h, down, expert)
    return y.astype(dtype)


def _linear(x: Array, weights: tuple[Array, Array, Array | None], expert: int) -> Array:
    blocks, scales, bias = weights
    product: Array = unpack_blocks(blocks[expert], scales[expert]).astype(np.float64) @ x
    return product if bias is None else product + bias[expert].astype(np.float64)


def attention(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    first: Array,
    last: Array,
    *,
    start: Array | None = None,
    visible: Array | None = None,
    sinks: Array | None = None,
) -> Array:
    """q [B, H, S, d] over caches [B, N, C, d], in float64; arguments as in attention.py. Rows that see none are 0."""
    batch, heads, rows, size = q.shape
    group, y = heads // k_cache.shape[1], np.zeros(q.shape)
    for b, h, i in np.ndindex(batch, heads, rows):
        seen = np.zeros(k_cache.shape[2], bool)
        seen[max(0, first[b, i]) : last[b, i] + 1] = True
        if visible is not None and start is not None:
            seen[start[b] : start[b] + rows] = visible[b, i]
        if not seen.any():
            continue
        keys, values = (c[b, h // group, seen].astype(np.float64) for c in (k_cache, v_cache))
        scores = keys @ q[b, h, i].astype(np.float64) / np.sqrt(size)
        sink = -np.inf if sinks is None else float(sinks[h])
        weights = np.exp(scores - max(scores.max(), sink))
        y[b, h, i] = weights @ values / (weights.sum() + np.exp(sink - max(scores.max(), sink)))
    return y.astype(q.dtype)


def gated_delta_net(
    q: Array,
    k: Array,
    v: Array,
    gates: Array,
    state: Array,
    pending_gates: Array,
    replayed: Array,
    certain: Array,
    begun: Array,
) -> tuple[Array, Array, Array]:
    """dflash::GatedDeltaNet in float64: y, the new state, and the new pending gates."""
    (batch, count, _), (_, heads, key_dim, value_dim) = gates.shape, state.shape
    before = q.shape[1] - count
    y, new_state = (
        np.zeros((batch, count, heads * value_dim)),
        state * begun[:, None, None, None].astype(float),
    )
    for b in range(batch):
        s, old = new_state[b], int(replayed[b])
        for i, gate in enumerate(np.concatenate([pending_gates[b, :old], gates[b]]).astype(np.float64)):
            row = i if i < old else before + i - old
            key, query = (
                x[b, row].reshape(-1, key_dim).repeat(heads * key_dim // x.shape[2], axis=0) for x in (k, q)
            )
            s = s * np.exp(gate[:heads])[:, None, None]
            known = np.einsum("hkv,hk->hv", s, key)
            change = gate[heads:, None] * (v[b, row].reshape(heads, value_dim) - known)
            s = s + key[:, :, None] * change[:, None]
            if i >= old:
                y[b, i - old] = np.einsum("hkv,hk->hv", s, query).reshape(-1)
            if i < old + certain[b]:
                new_state[b] = s
    waiting = np.minimum(certain[:, None] + np.arange(pending_gates.shape[1]), count - 1)
    return y, new_state, np.take_along_axis(gates, waiting[:, :, None], axis=1)
