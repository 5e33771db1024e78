"""The engine's own operators (dflash_trt/graph/torch.py), by our Triton kernels on a GPU, else by torch's operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from dflash_plugins import kernel_specs as uses
from dflash_plugins import layers as ours
from dflash_plugins import packed as products
from dflash_plugins.launch import Run, accept_block
from dflash_plugins.packed import PackedWeight
from torch import Tensor

from dflash_trt.engines.torch import kernels
from dflash_trt.formats.numbers import BYTE_TO_PAIR

Attributes = Mapping[str, Any]
# Passes of more rows of a sequence are of a prompt, and have tiles of their own. Verification has one tile at every
# length, because the order of a sum depends on it.
_VERIFIED_ROWS = 64
# On a CPU, a row sees a multiple of so many cache rows, so that a sum has the same parts in passes of any length.
_STEP = 256
# Routers have 32 to 512 experts. Other products in float32 are torch's.
_MOST_EXPERTS = 512


def rms_norm(a: Attributes, x: Tensor, weight: Tensor) -> Tensor:
    """Over the last axis."""
    assert a.get("axis", -1) in (-1, x.ndim - 1)
    return F.rms_norm(x, weight.shape, weight, a.get("epsilon", 1e-5))


def add_norm(a: Attributes, x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """x + y, and its RMS norm."""
    layer = kernels.of(x)
    if layer is not None and x.ndim == 2 and x.shape == y.shape and x.dtype == y.dtype == weight.dtype:
        given = x.contiguous(), y.contiguous(), weight, a.get("epsilon", 1e-5)
        if (made := layer.first("norms", lambda run, _: ours.add_norm(*given, run=run))) is not None:
            return made
    total = x + y
    return total, rms_norm(a, total, weight)


def gate(a: Attributes, x: Tensor, sizes: list[int]) -> Tensor:
    """Swish of the first part of each row times the second."""
    layer = kernels.of(x)
    if layer is not None and x.ndim == 2 and sizes[0] == sizes[1]:
        y = layer.first("gates", lambda run, _: ours.gate(x.contiguous(), run=run))
        if y is not None:
            return y
    first, second = torch.split(x, sizes, -1)
    return F.silu(first) * second


def router(a: Attributes, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A product in float32."""
    layer = kernels.of(x)
    if layer is not None and len(weight) <= _MOST_EXPERTS:
        y = layer.first("routers", lambda run, _: ours.router(x.contiguous(), weight, bias, run=run))
        if y is not None:
            return y
    return F.linear(x.to(weight.dtype), weight, bias)


def rotary(a: Attributes, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split pairs of x [B,n,S,d]; cos and sin [B,S,r/2] of the first r numbers."""
    size = a.get("rotary_embedding_dim", 0) or x.shape[-1]
    cos, sin = cos[:, None], sin[:, None]
    first, second = x[..., : size // 2], x[..., size // 2 : size]
    turned = [first * cos - second * sin, first * sin + second * cos]
    return torch.cat([*turned, x[..., size:]] if size < x.shape[-1] else turned, -1)


def place_heads(
    a: Attributes,
    x: Tensor,
    q_shape: list[int] | None,
    k_shape: list[int] | None,
    v_shape: list[int] | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    start: Tensor | None = None,
    k_cache: Tensor | None = None,
    v_cache: Tensor | None = None,
) -> Sequence[Tensor]:
    """x [rows, columns] is queries, keys and values, or some of them: `kinds`. Their shapes are [B,S,n,d].

    Queries become [B,n,S,d]; keys and values are written into their caches from row start[b] on. Queries and keys are
    normed and rotated before, if there are norms and angles.
    """
    shapes = [shape for shape in (q_shape, k_shape, v_shape) if shape is not None]
    batch, count, _, size = shapes[0]
    made: dict[str, Tensor | None] = {"k": k_cache, "v": v_cache}
    epsilon: float = a.get("epsilon", 1e-5)
    layer, rotated = kernels.of(x), 0 if cos is None else a.get("rotary_embedding_dim", 0) or size
    given = {
        "q_norm": q_norm,
        "k_norm": k_norm,
        "cos": cos,
        "sin": sin,
        "k_cache": k_cache,
        "v_cache": v_cache,
    }
    fits = len({shape[3] for shape in shapes}) == 1
    fits &= cos is None or cos.shape == (batch, count, rotated // 2)
    fits &= all(each is None or each.dtype == x.dtype for each in given.values())
    if layer is not None and fits:
        there: dict[str, Any] = {n: t if t is None else t.contiguous() for n, t in given.items()}
        sizes = count, size, 0 if q_shape is None else q_shape[2]

        def launched(run: Run, _: None) -> tuple[Tensor | None]:
            made = ours.place_heads(x.contiguous(), *sizes, epsilon=epsilon, start=start, **there, run=run)
            return (made,)

        if (queries := layer.first("heads", launched)) is not None:
            (made["q"],) = queries
            return [made[kind] for kind in a["kinds"]]  # type: ignore[misc]
    parts = iter(torch.split(x, [shape[2] * shape[3] for shape in shapes], -1))
    if q_shape is not None:
        made["q"] = _rotated(a, next(parts).reshape(q_shape), q_norm, cos, sin)
    if k_shape is not None and k_cache is not None and start is not None:
        write_rows(a, k_cache, _rotated(a, next(parts).reshape(k_shape), k_norm, cos, sin), start)
    if v_shape is not None and v_cache is not None and start is not None:
        write_rows(a, v_cache, next(parts).reshape(v_shape).transpose(1, 2), start)
    return [made[kind] for kind in a["kinds"]]  # type: ignore[misc]


def _rotated(a: Attributes, x: Tensor, norm: Tensor | None, cos: Tensor | None, sin: Tensor | None) -> Tensor:
    if norm is not None:
        x = rms_norm(a, x, norm)
    x = x.transpose(1, 2)
    return x if cos is None or sin is None else rotary(a, x, cos, sin)


def write_rows(a: Attributes, cache: Tensor, rows: Tensor, start: Tensor) -> Tensor:
    """The cache [B,N,C,d], in place, with rows [B,N,T,d] from cache row start[b] on."""
    sequence = torch.arange(len(cache), device=cache.device)[:, None]
    places = start[:, None] + torch.arange(rows.shape[2], device=cache.device)
    cache[sequence, :, places] = rows.transpose(1, 2)
    return cache


def attend(
    a: Attributes,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first: Tensor,
    last: Tensor,
    start: Tensor | None = None,
    visible: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """q [B,H,S,d] over caches [B,N,C,d] -> [B,H,S,d], or with `by_row` [B,S,H,d]."""
    layer, by_row = kernels.of(q), bool(a.get("by_row"))
    if layer is not None and q.dtype != torch.float32:  # which tensor cores would round
        factor, tiles = a["scale"] * q.shape[3] ** 0.5, uses.attention_tiles(q.shape[3])
        # The kernel's own scale is d ** -0.5.
        scaled = q if abs(factor - 1) <= 1e-6 else (q.float() * factor).to(q.dtype)
        given = [x.contiguous() for x in (scaled, k, v, first, last)]

        def launched(run: Run, tile: uses.AttentionTile) -> Tensor:
            options: dict[str, Any] = {"start": start, "visible": visible, "sinks": sinks, "tile": tile}
            return ours.attention(*given, **options, by_row=by_row, run=run)

        many = q.shape[2] > _VERIFIED_ROWS
        order = tiles[3:] + tiles[2::-1] if many else tiles[1:2] + tiles[:1] + tiles[2:]
        if (y := layer.first("attention", launched, order)) is not None:
            return y
    y = _attended(a["scale"], q, k, v, first, last, start, visible, sinks)
    return y.transpose(1, 2) if by_row else y


def _attended(
    scale: float,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first: Tensor,
    last: Tensor,
    start: Tensor | None,
    visible: Tensor | None,
    sinks: Tensor | None,
) -> Tensor:
    if not q.is_cuda:  # without kernels, a GPU attends to all cache rows: it cannot know which are in use
        k, v = (x[:, :, : _rows_in_use(last, start, visible, x.shape[2])] for x in (k, v))
    mask = _seen(first, last, start, visible, k.shape[2])
    if sinks is None:
        return F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=True)
    batch, heads, count, size = q.shape
    grouped = q.reshape(batch, k.shape[1], -1, size)
    scores = (grouped @ k.transpose(2, 3)).float().reshape(batch, heads, count, -1)
    scores = scores.mul_(scale).masked_fill_(~mask, float("-inf"))
    sink = sinks.float()[None, :, None, None].expand(batch, heads, count, 1)
    scores = torch.cat((scores, sink), -1)  # no more than two copies of them at a time
    shares = scores.softmax(-1)[..., :-1].to(q.dtype)
    del scores
    return (shares.reshape(batch, k.shape[1], -1, shares.shape[-1]) @ v).reshape(q.shape)


def _rows_in_use(last: Tensor, start: Tensor | None, visible: Tensor | None, capacity: int) -> int:
    most = int(last.max()) + 1
    if start is not None and visible is not None:
        most = max(most, int(start.max()) + visible.shape[2])
    return min(capacity, -(-most // _STEP) * _STEP)


def _seen(first: Tensor, last: Tensor, start: Tensor | None, visible: Tensor | None, count: int) -> Tensor:
    """bool [B,1,S,count]"""
    row = torch.arange(count, device=first.device)
    seen = (row >= first[..., None]) & (row <= last[..., None])
    if start is not None and visible is not None:
        own = row - start[:, None]
        inside = (own >= 0) & (own < visible.shape[2])
        index = own.clamp(0, visible.shape[2] - 1)[:, None].expand(seen.shape)
        seen = torch.where(inside[:, None], visible.gather(2, index) != 0, seen)
    return seen[:, None]


def route(a: Attributes, logits: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """`Route` (dflash_trt/graph/torch.py). Order and groups are there with kernels alone."""
    if (layer := kernels.of(logits)) is not None:
        made = layer.first("routes", lambda run, _: ours.route(logits.contiguous(), a["k"], run))
        if made is not None:
            return made
    values, best = (part[:, : a["k"]] for part in torch.sort(logits, descending=True, stable=True))
    return values.softmax(-1), best, None, None


def grouped_product(
    a: Attributes,
    x: Tensor,
    weight: Tensor | PackedWeight,
    expert: Tensor,
    order: Tensor | None = None,
    groups: Tensor | None = None,
) -> Tensor:
    """`GroupedProduct` (dflash_trt/graph/torch.py)."""
    if isinstance(weight, PackedWeight):
        layer = kernels.of(x)
        assert layer is not None  # as the weight was loaded
        assert order is not None
        assert groups is not None
        return products.experts_product(x.contiguous(), weight, order, groups, layer.run)
    # float32 is for comparing.
    if order is not None and groups is not None and x.dtype != torch.float32 and (layer := kernels.of(x)):
        given = x.contiguous(), weight, order, groups
        y = layer.first(
            "experts", lambda run, tile: products.plain_product(*given, tile, run), products.PLAIN_TILES
        )
        if y is not None:
            return y
    y = x.new_empty(len(x), weight.shape[1])
    for number in expert.unique().tolist():
        chosen = expert == number
        y[chosen] = F.linear(x[chosen], weight[number])
    return y


def mxfp4_experts(
    a: Attributes,
    x: Tensor,
    router: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_scales: Tensor,
    down_bias: Tensor | None,
) -> Tensor:
    """`dflash::MoE` (dflash_trt/graph/experts.py) with packed weights."""
    layer = kernels.of(x)
    if layer is not None and x.dtype != torch.float32:
        weights = gate_up, gate_up_scales, gate_up_bias, down, down_scales, down_bias
        packed = ours.PackedExperts(*weights, *(a[name] for name in ("k", "alpha", "beta", "limit")))
        given = x.contiguous(), router.contiguous(), packed
        tokens = products.in_step(len(x) * a["k"], len(gate_up))
        tiles = sorted(uses.TILES, key=lambda tile: tile.tokens != tokens)
        if (y := layer.first("experts", lambda run, tile: ours.moe(*given, tile, run), tiles)) is not None:
            return y
    shares, best, _, _ = route(a, router)
    total = torch.zeros(x.shape, dtype=router.dtype, device=x.device)
    for number in best.unique().tolist():
        row, place = (best == number).nonzero(as_tuple=True)
        h = _packed_linear(x[row], gate_up, gate_up_scales, gate_up_bias, number).float()
        gate, up = h[:, 0::2].clamp(max=a["limit"]), h[:, 1::2].clamp(-a["limit"], a["limit"])
        h = ((up + a["beta"]) * gate * torch.sigmoid(a["alpha"] * gate)).to(x.dtype)
        y = _packed_linear(h, down, down_scales, down_bias, number).float()
        total.index_add_(0, row, y * shares[row, place, None])
    return total.to(x.dtype)


def _packed_linear(x: Tensor, blocks: Tensor, scales: Tensor, bias: Tensor | None, expert: int) -> Tensor:
    table = torch.from_numpy(BYTE_TO_PAIR).to(x.device)
    numbers = table[blocks[expert].long()].flatten(-2)  # [O,G,32]
    exponents = scales[expert].int() - 127
    powers = torch.ldexp(torch.ones(exponents.shape, device=x.device), exponents)
    weight = (numbers * powers[..., None]).flatten(1).to(x.dtype)
    return F.linear(x, weight, None if bias is None else bias[expert])


def gated_delta_net(
    a: Attributes,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Tensor,
    state: Tensor,
    pending_gates: Tensor,
    replayed: Tensor,
    certain: Tensor,
    begun: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """`dflash::GatedDeltaNet` (dflash_trt/graph/delta_net.py), row by row."""
    if (layer := kernels.of(q)) is not None:
        inputs = q, k, v, gates, state, pending_gates, replayed, certain, begun
        given = [each.contiguous() for each in inputs]
        made = layer.first("Gated DeltaNet", lambda run, _: ours.gated_delta_net(*given, run=run))
        if made is not None:
            return made
    (batch, count, _), (_, heads, key_dim, value_dim) = gates.shape, state.shape
    waiting = q.shape[1] - count
    # A pending row that is not replayed changes nothing: its decay is 1, and its beta 0.
    row = torch.arange(waiting, device=q.device)
    counted = (row < replayed[:, None])[..., None]
    all_gates = torch.cat((pending_gates[:, :waiting] * counted, gates), 1)
    decay, beta = all_gates[..., :heads].exp(), all_gates[..., heads:]
    q, k = (x.unflatten(2, (-1, key_dim)) for x in (q, k))
    q, k = (x.repeat_interleave(heads // x.shape[2], 2) for x in (q, k))
    v = v.unflatten(2, (heads, value_dim))
    s = state * begun[:, None, None, None]
    kept, y = s, v.new_empty(batch, count, heads, value_dim)
    for i in range(waiting + count):
        s = s * decay[:, i, :, None, None]
        change = beta[:, i, :, None] * (v[:, i] - (k[:, i, :, None] @ s)[:, :, 0])
        s = s + k[:, i, :, :, None] * change[:, :, None]
        if i >= waiting:
            y[:, i - waiting] = (q[:, i, :, None] @ s)[:, :, 0]
        kept = torch.where((i < waiting + certain)[:, None, None, None], s, kept)
    following = certain[:, None] + torch.arange(pending_gates.shape[1], device=q.device)
    index = following.clamp(max=count - 1)[..., None].expand(-1, -1, gates.shape[2])
    return y.flatten(2), kept, gates.gather(1, index)


def best_token(a: Attributes, logits: Tensor) -> tuple[Tensor, Tensor]:
    """The first largest of each row of logits [rows,V], and its log-probability in float32: [rows,1]."""
    if (layer := kernels.of(logits)) is not None:
        made = layer.first("best tokens", lambda run, _: ours.best_token(logits.contiguous(), run=run))
        if made is not None:
            return made
    logits = logits.float()
    return logits.argmax(-1, keepdim=True), logits.log_softmax(-1).amax(-1, keepdim=True)


def block_acceptance(a: Attributes, tokens: Tensor, rows: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """`dflash::BlockAcceptance` (dflash_trt/graph/dialect.py)."""
    layer = kernels.of(logits)
    chosen = logits.argmax(-1) if layer is None else best_token({}, logits.flatten(0, 1))[0].view(rows.shape)
    if layer is not None and rows.shape[1] <= uses.ACCEPT_NODES:
        given = tokens.contiguous(), rows.contiguous(), chosen
        made = layer.first("acceptance", lambda run, _: accept_block(*given, run=run))
        if made is not None:
            return made.accepted, made.next_token
    accepted = (tokens.gather(1, rows[:, 1:]) == chosen[:, :-1]).cumprod(1).sum(1)
    return accepted, chosen.gather(1, accepted[:, None])[:, 0]
