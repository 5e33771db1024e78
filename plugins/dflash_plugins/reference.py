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
