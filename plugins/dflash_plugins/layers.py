"""Launch the kernels of a layer on contiguous torch tensors: attention, experts, Gated DeltaNet, and what lies between
products, and the best tokens of a head's logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dflash_plugins import kernel_specs as uses
from dflash_plugins.kernel_table import (
    ATTEND,
    GATED_DELTA_NET,
    MERGE_ATTENTION,
    MOE_COMBINE,
    MOE_DOWN,
    MOE_GATE_UP,
    MOE_GROUP,
    MOE_ROUTE,
)
from dflash_plugins.launch import TYPE_NAMES, Run, by_triton, call, empty_outputs


def attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    first: Tensor,
    last: Tensor,
    *,
    start: Tensor | None = None,
    visible: Tensor | None = None,
    sinks: Tensor | None = None,
    region: Tensor | None = None,
    most: int = 0,
    windowed: bool = False,
    tile: uses.AttentionTile | None = None,
    by_row: bool = False,
    run: Run = by_triton,
) -> Tensor:
    """q [B, H, S, D] over caches [B, N, C, D], all of one type -> y [B, H, S, D], or with `by_row` [B, S, H, D].

    region: int64 [B], where the rows of a sequence, at most `most`, begin in caches [1, N, rows, D] of all sequences.
    windowed: whether rows of the cache move down. Caches may be bytes [..., D + 4]: see kernels/attention.py.

    first, last: int64 [B, S], the range of cache rows that a row sees. start: int64 [B], and visible: int32 [B, S, S],
    the rows that a row sees among those of its pass, in cache rows start .. start+S-1. sinks: [H].
    """
    heads, group = q.shape[1], q.shape[1] // k_cache.shape[1]
    ranges = first, last, (None if visible is None else start), visible, region
    constants: dict[str, Any] = {"group": group, "most": most, "windowed": windowed}
    constants["fp8"], tile = k_cache.dtype == torch.uint8, tile or uses.attention_tiles(q.shape[3])[0]
    parts = call(run, ATTEND, q, k_cache, v_cache, *ranges, tile=tile, exact=True, **constants)
    constants |= {"heads": heads, "by_row": by_row}
    return call(run, MERGE_ATTENTION, *parts.values(), q, k_cache, sinks, **constants)["y"]


@dataclass(frozen=True)
class PackedExperts:
    """A layer's MXFP4 weights as inputs of `dflash::MoE` (graph/experts.py), and its constants."""

    gate_up: Tensor  # [E, 2I, D/32, 16] bytes
    gate_up_scales: Tensor  # [E, 2I, D/32] bytes
    gate_up_bias: Tensor | None  # [E, 2I]
    down: Tensor  # [E, D, I/32, 16] bytes
    down_scales: Tensor  # [E, D, I/32] bytes
    down_bias: Tensor | None  # [E, D]
    k: int
    alpha: float
    beta: float
    limit: float


# The chosen experts of rows, as the kernels give them: outputs of MOE_ROUTE and MOE_GROUP.
Routed = dict[str, Tensor]


def route(router_logits: Tensor, k: int, run: Run = by_triton) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Router logits float32 [rows, E] -> shares [rows, k], and int32: chosen [rows, k], pairs [rows * k], and groups
    [min(E, rows * k), 3], those of all experts in use; see kernels/moe.py.
    """
    return chosen(_routed(router_logits, None, k, run))


def chosen(routed: Routed) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `route` gives them."""
    return routed["shares"], routed["chosen"], routed["pairs"], routed["groups"][: routed["pairs"].numel()]


def _routed(router_logits: Tensor, x: Tensor | None, k: int, run: Run) -> Routed:
    """What both kernels give. One program does what the second would."""
    grouped = len(router_logits) <= uses.ROUTE_ROWS
    routed = call(run, MOE_ROUTE, router_logits, x, k=k, grouped=grouped)
    return routed if grouped else routed | call(run, MOE_GROUP, routed["chosen"], routed["counts"], k=k)


def moe(
    x: Tensor,
    router_logits: Tensor | Routed,
    e: PackedExperts,
    tile: uses.Tile = uses.TILES[0],
    run: Run = by_triton,
    *,
    apart: bool = False,
) -> Tensor:
    """x [rows, D] bfloat16 or float16, router logits float32 [rows, E], or what `norm_router` gives -> [rows, D]. With
    `apart`, the parts of these sums, for `add_norm`: float32 [rows, parts, D].
    """
    routed = router_logits if isinstance(router_logits, dict) else _routed(router_logits, x, e.k, run)
    routes = routed["pairs"], routed["groups"]
    weights = e.gate_up, e.gate_up_scales, e.gate_up_bias
    constants: dict[str, Any] = {"k": e.k, "alpha": e.alpha, "beta": e.beta, "limit": e.limit}
    (activated,) = call(
        run, MOE_GATE_UP, routed["arranged"], *routes, *weights, tile=tile, **constants
    ).values()
    weights = e.down, e.down_scales, e.down_bias
    (outputs,) = call(run, MOE_DOWN, activated, routed["shares"], *routes, *weights, tile=tile).values()
    if apart:
        return outputs.view(len(x), -1, outputs.shape[1])
    return call(run, MOE_COMBINE, outputs, x, k=e.k)["y"]


def gated_delta_net(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Tensor,
    state: Tensor,
    pending_gates: Tensor,
    replayed: Tensor,
    certain: Tensor,
    begun: Tensor,
    *,
    run: Run = by_triton,
) -> tuple[Tensor, Tensor, Tensor]:
    """`dflash::GatedDeltaNet` (graph/delta_net.py), with as many pending rows as `pending_gates` has.

    Returns y, the new state, and the gates that are pending then.
    """
    inputs = q, k, v, gates, state, pending_gates, replayed, certain, begun
    y, state, pending_gates = call(run, GATED_DELTA_NET, *inputs).values()
    return y, state, pending_gates


# How rows are rounded: see kernel_specs. The scale is float32 [1].
Rounded = tuple[uses.Rounding, Tensor]


def _codes(x: Tensor, columns: int, rounded: Rounded | None) -> tuple[uses.Rounding | None, dict[str, Any]]:
    """How rows [rows, columns] are rounded, and the arguments for it."""
    if rounded is None:
        return None, {}
    rounding, scale = rounded
    codes = x.new_empty(len(x), columns)
    factor = torch.empty(len(x), 1, dtype=torch.float32, device=x.device)
    return rounding, {"scale": scale, "codes": codes, "factor": factor}


def quantized_rows(x: Tensor, rounded: Rounded, *, run: Run = by_triton) -> tuple[Tensor, Tensor]:
    """x [rows, D] as the format rounds it: numbers [rows, D] of x's type, and float32 [rows, 1] to multiply them by."""
    rounding, more = _codes(x, x.shape[1], rounded)
    assert rounding is not None
    run(uses.quantized_rows(x.shape[1], TYPE_NAMES[x.dtype], rounding), (len(x),), x=x, **more)
    return more["codes"], more["factor"]


def add_norm(
    x: Tensor,
    y: Tensor,
    weight: Tensor,
    epsilon: float,
    rounded: Rounded | None = None,
    *,
    run: Run = by_triton,
) -> tuple[Tensor, ...]:
    """x + y and its RMS norm. x, y [rows, D], weight [D], of one type; or y is a sum in parts, float32 [rows, parts,
    D]. With `rounded`, `quantized_rows` of it, too.
    """
    total, normed = torch.empty_like(x), torch.empty_like(x)
    rounding, more = _codes(x, x.shape[1], rounded)
    parts = y.shape[1] if y.ndim == 3 else 0
    use = uses.add_norm(x.shape[1], epsilon, TYPE_NAMES[x.dtype], rounding, parts)
    run(use, (len(x),), x=x, y=y, weight=weight, total=total, normed=normed, **more)
    return total, normed, *(more[name] for name in more if name != "scale")


def place_heads(
    x: Tensor,
    count: int,
    size: int,
    heads: int,
    *,
    epsilon: float,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    start: Tensor | None = None,
    region: Tensor | None = None,
    k_cache: Tensor | None = None,
    v_cache: Tensor | None = None,
    run: Run = by_triton,
) -> Tensor | None:
    """The heads of x [B * count, columns]: queries, keys and values, each of `size` numbers.

    Returns the queries [B, heads, count, size]. Keys and values are written into caches [B, N, capacity, size] from row
    start[b] (int64 [B]) on, or with `region` as in `attention`; into bytes [..., size + 4] as E4M3. Queries and keys
    are normed and rotated if norms [size], and cos and sin [B * count, pairs] are given. Any of the three may be
    missing.
    """
    batch = len(x) // count
    keys, values = (0 if cache is None else cache.shape[1] for cache in (k_cache, v_cache))
    capacity = next((c.shape[2] for c in (k_cache, v_cache) if c is not None), 0)
    q = x.new_empty(batch, heads, count, size) if heads else None
    tensors = {"q_norm": q_norm, "k_norm": k_norm, "cos": cos, "sin": sin, "start": start, "region": region}
    tensors |= {"q": q, "k_cache": k_cache, "v_cache": v_cache}
    use = uses.place_heads(
        *(heads, keys, values, size, 0 if cos is None else cos.shape[-1], epsilon, TYPE_NAMES[x.dtype]),
        present=tuple(name for name, tensor in tensors.items() if tensor is not None),
        fp8=any(cache is not None and cache.dtype == torch.uint8 for cache in (k_cache, v_cache)),
    )
    run(use, (len(x), heads + keys + values), x=x, count=count, capacity=capacity, **tensors)
    return q


def gate(x: Tensor, rounded: Rounded | None = None, *, run: Run = by_triton) -> tuple[Tensor, ...]:
    """silu of the first half of each row times the second half: x [rows, 2 * inner] -> [rows, inner]. With `rounded`,
    `quantized_rows` of it, too.
    """
    y = x.new_empty(len(x), x.shape[1] // 2)
    rounding, more = _codes(x, y.shape[1], rounded)
    use = uses.gate(y.shape[1], TYPE_NAMES[x.dtype], rounding)
    run(use, (len(x), -(-y.shape[1] // use.constants["BLOCK"])), x=x, y=y, **more)
    return y, *(more[name] for name in more if name != "scale")


def router(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    more: Mapping[str, Tensor] | None = None,
    *,
    run: Run = by_triton,
    **what: Any,
) -> Tensor:
    """x [rows, D] by weight [E, D], both widened to float32, with bias [E] -> float32 [rows, E]. more, what: of
    `norm_router`.
    """
    logits = torch.empty(len(x), len(weight), dtype=torch.float32, device=x.device)
    use = uses.router(len(weight), x.shape[1], TYPE_NAMES[x.dtype], biased=bias is not None, **what)
    grid = len(x), -(-len(weight) // uses.ROUTER_OUTPUTS)
    run(use, grid, x=x, weight=weight, bias=bias, logits=logits, rows=len(x), **(more or {}))
    return logits


def norm_router(
    x: Tensor,
    y: Tensor,
    norm: Tensor,
    epsilon: float,
    weight: Tensor,
    bias: Tensor | None,
    *,
    counter: Tensor,
    k: int,
    arranged: bool,
    run: Run = by_triton,
) -> tuple[Tensor, Tensor, Tensor | Routed]:
    """`add_norm` of x, y and the weight `norm`, and `router` of that: logits, or with up to ROUTE_ROWS rows the chosen
    experts. counter: int32 [1], zero. arranged: whether experts are in MXFP4.
    """
    more = {"y": y, "norm": norm, "total": torch.empty_like(x), "normed": torch.empty_like(x)}
    what: dict[str, Any] = {"run": run, "epsilon": epsilon}
    sums, found = (more["total"], more["normed"]), None
    if len(x) <= uses.ROUTE_ROWS:
        s = MOE_ROUTE.sizes([(len(x), len(weight)), x.shape if arranged else None])
        a = MOE_ROUTE.given({"k": k, "grouped": True})
        found = empty_outputs(MOE_ROUTE, s, a, TYPE_NAMES[x.dtype], x.device, {})
        more, what = more | found | {"counter": counter}, what | {"k": k, "arranged": arranged}
    logits = router(x, weight, bias, more, **what)
    return *sums, found or logits


def best_token(logits: Tensor, *, run: Run = by_triton) -> tuple[Tensor, Tensor]:
    """The first token with the largest logit of each row of logits [rows, V], int64 [rows, 1], and its log-probability,
    float32 [rows, 1]. That is not finite if a logit is NaN or infinity, or all are -infinity.
    """
    rows, vocab = logits.shape
    stripes, types = uses.vocabulary_tiles(vocab), (torch.float32, torch.int64, torch.float32)
    empty = [logits.new_empty(rows, stripes, dtype=dtype) for dtype in types]
    best = dict(zip(("largest", "token", "logprob"), empty, strict=True))
    run(uses.best_token(vocab, TYPE_NAMES[logits.dtype]), (rows, stripes), logits=logits, **best)
    if stripes > 1:
        stripe_best = dict(zip(("logits", "tokens", "logprobs"), empty, strict=True))
        best = {name: tensor.new_empty(rows, 1) for name, tensor in best.items()}
        run(uses.best_token(stripes), (rows, 1), **stripe_best, **best)
    return best["token"], best["logprob"]
