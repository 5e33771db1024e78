"""The engine's own operators (dflash_trt/graph/torch.py), by our Triton kernels on a GPU, else by torch's operators."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
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
from dflash_trt.errors import BuildError, EngineError
from dflash_trt.formats.floats import NVFP4_BLOCK
from dflash_trt.formats.numbers import BYTE_TO_PAIR, CACHE_SCALE_BYTES, E2M1_MAX, E4M3_MAX, E4M3_MIN
from dflash_trt.graph.quantized import TINY

Attributes = Mapping[str, Any]
# Passes of more rows of a sequence are of a prompt, and have tiles of their own. Verification has one tile at every
# length, because the order of a sum depends on it.
_VERIFIED_ROWS = 64
# On a CPU, a row sees a multiple of so many cache rows, so that a sum has the same parts in passes of any length.
_STEP = 256
# Routers have 32 to 512 experts. Other products in float32 are torch's.
MOST_EXPERTS = 512


@dataclass(frozen=True, slots=True)
class Rows:
    """The cache [B,N,C,d] of a pass: regions of a tensor that has the rows of all sequences, or a tensor of that shape.

    rows: [1,N,T,d], or [B,N,C,d]; or bytes [..., d+4], numbers in E4M3 and the scale of each row. most: C. region, end:
    int64 [B], where each begins and ends in the first.
    """

    rows: Tensor
    most: int
    region: Tensor | None = None
    end: Tensor | None = None

    @classmethod
    def of(cls, cache: Tensor | Rows) -> Rows:
        """A cache as the operators have it."""
        return cache if isinstance(cache, Rows) else cls(cache, cache.shape[2])

    @property
    def shape(self) -> tuple[int, ...]:
        _, heads, _, size = self.rows.shape
        return len(self.rows if self.region is None else self.region), heads, self.most, size

    def first(self, count: int, dtype: torch.dtype) -> Tensor:
        """The first rows of each: [B,N,count,d]. After a region its last row is repeated."""
        if self.region is None or self.end is None:
            return from_bytes(self.rows[:, :, :count], dtype)
        places = self.region[:, None] + torch.arange(count, device=self.region.device)
        rows = self.rows[0][:, torch.minimum(places, self.end[:, None] - 1)].transpose(0, 1)
        return from_bytes(rows, dtype)

    def write(self, rows: Tensor, start: Tensor) -> None:
        """Rows [B,N,T,d] from row start[b] on."""
        rows = in_bytes(rows) if self.rows.dtype == torch.uint8 else rows
        places = start[:, None] + torch.arange(rows.shape[2], device=rows.device)
        if self.region is None:
            sequence = torch.arange(len(rows), device=rows.device)[:, None]
            self.rows[sequence, :, places] = rows.transpose(1, 2)
        else:
            self.rows[0][:, places + self.region[:, None]] = rows.transpose(0, 1)


Cache = Tensor | Rows


def in_bytes(rows: Tensor) -> Tensor:
    """Rows [...,d] in E4M3, each with its scale: bytes [...,d+4]. The scale is NaN if a number is not finite."""
    wide = rows.float()
    scale = wide.abs().amax(-1, keepdim=True).clamp_min(TINY) / E4M3_MAX
    codes = (wide / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    scale += (wide * 0).sum(-1, keepdim=True)
    return torch.cat((codes, scale.view(torch.uint8)), -1)


def from_bytes(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """The rows of a cache in another dtype, if they are bytes."""
    if rows.dtype != torch.uint8:
        return rows
    codes, scale = rows.split((rows.shape[-1] - CACHE_SCALE_BYTES, CACHE_SCALE_BYTES), -1)
    numbers: Tensor = codes.view(torch.float8_e4m3fn).float() * scale.view(torch.float32)
    return numbers.to(dtype)


def rms_norm(a: Attributes, x: Tensor, weight: Tensor) -> Tensor:
    """Over the last axis."""
    assert a.get("axis", -1) in (-1, x.ndim - 1)
    return F.rms_norm(x, weight.shape, weight, a.get("epsilon", 1e-5))


def add_norm(
    a: Attributes, x: Tensor, y: Tensor, weight: Tensor, scale: Tensor | None = None
) -> tuple[Tensor, ...]:
    """x + y, and its RMS norm. With a scale, `quantized_rows` of it, too. y may be the parts of experts."""
    apart, more = y.ndim > x.ndim, (weight, a.get("epsilon", 1e-5), _rounded(a, scale))
    fits = x.ndim == 2 and x.dtype == weight.dtype and (apart or (x.shape == y.shape and x.dtype == y.dtype))
    if fits and (both := kernels.tried("norms", ours.add_norm, x, y, *more)):
        return both
    if apart:
        y = sum(y.unbind(1), torch.zeros_like(y[:, 0])).to(x.dtype)
    total = x + y
    normed = _normed(a, total, weight)
    return (total, normed) if scale is None else (total, normed, *quantized_rows(a, normed, scale))


def _rounded(a: Attributes, scale: Tensor | None) -> ours.Rounded | None:
    return None if scale is None else ((a["scheme"], bool(a["by_row"])), scale)


def _normed(a: Attributes, x: Tensor, weight: Tensor) -> Tensor:
    """The norm in the weight's dtype, in that of x."""
    return rms_norm(a, x.to(weight.dtype), weight).to(x.dtype)


def gate(a: Attributes, x: Tensor, sizes: list[int], scale: Tensor | None = None) -> tuple[Tensor, ...]:
    """Swish of the first part of each row times the second. With a scale, `quantized_rows` of it, too."""
    fits = x.ndim == 2 and sizes[0] == sizes[1]
    if fits and (rows := kernels.tried("gates", ours.gate, x, _rounded(a, scale))):
        return rows
    first, second = torch.split(x, sizes, -1)
    gated = F.silu(first) * second
    return (gated,) if scale is None else (gated, *quantized_rows(a, gated, scale))


def router(a: Attributes, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A product in float32."""
    fits = len(weight) <= MOST_EXPERTS
    if fits and (y := kernels.tried("routers", ours.router, x, weight, bias)) is not None:
        return y
    return F.linear(x.to(weight.dtype), weight, bias)


def norm_router(
    a: Attributes,
    x: Tensor,
    y: Tensor,
    norm: Tensor,
    counter: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | ours.Routed]:
    """`add_norm`, and `router` of the norm: its logits, or what a kernel chose by them."""
    fits = len(weight) <= MOST_EXPERTS and x.shape == y.shape and x.dtype == y.dtype == norm.dtype
    given, more = (x, y, norm, a["epsilon"], weight, bias), {"k": a["k"], "arranged": a["arranged"]}
    if fits and (found := kernels.tried("routers", ours.norm_router, *given, counter=counter, **more)):
        return found
    total, normed = add_norm(a, x, y, norm)
    return total, normed, router(a, normed, weight, bias)


def rotary(a: Attributes, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split pairs of x [B,n,S,d]; cos and sin [B,S,r/2] of the first r numbers."""
    size = 2 * cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]
    first, second = x[..., : size // 2], x[..., size // 2 : size]
    turned = [first * cos - second * sin, first * sin + second * cos]
    return torch.cat([*turned, x[..., size:]] if size < x.shape[-1] else turned, -1)


def place_heads(
    a: Attributes,
    x: Tensor,
    shape: list[int],
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    v_norm: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    start: Tensor | None = None,
    k_cache: Cache | None = None,
    v_cache: Cache | None = None,
    *,
    joined: Callable[[Run], Run] | None = None,
) -> list[Cache] | None:
    """`PlaceHeads` (dflash_trt/graph/torch.py). joined: turns a launch into one that computes x as well, whose numbers
    are then not read; the result is None where no kernel can do both.
    """
    heads, size, layer = dict(zip(a["kinds"], a["heads"], strict=True)), a["size"], kernels.of(x)
    norms, caches = {"q": q_norm, "k": k_norm, "v": v_norm}, {"k": k_cache, "v": v_cache}
    targets = {f"{kind}_cache": Rows.of(cache) for kind, cache in caches.items() if cache is not None}
    tensors: dict[str, Tensor | None] = {"q_norm": q_norm, "k_norm": k_norm, "cos": cos, "sin": sin}
    tensors |= {name: cache.rows for name, cache in targets.items()}
    kinds = x.dtype, torch.uint8
    fits = v_norm is None and all(t is None or t.dtype in kinds for t in tensors.values())
    if layer is not None and fits and (cos is None or list(cos.shape[:2]) == shape):
        arguments: dict[str, Any] = {name: t if t is None else t.contiguous() for name, t in tensors.items()}
        region = next((cache.region for cache in targets.values()), None)
        arguments |= {"epsilon": a["epsilon"], "start": start, "region": region}

        def launched(run: Run, _: None) -> list[Cache]:
            q = ours.place_heads(x.contiguous(), shape[1], size, heads.get("q", 0), **arguments, run=run)
            return [q if kind == "q" else caches[kind] for kind in heads]  # type: ignore[misc]

        if joined is not None:
            with suppress(BuildError, EngineError):
                return launched(joined(layer.run), None)
        elif (placed := layer.first("heads", launched)) is not None:
            return placed
    if joined is not None:
        return None
    results = list[Cache]()
    parts = torch.split(x, [count * size for count in heads.values()], -1)
    for (kind, count), rows in zip(heads.items(), parts, strict=True):
        rows, norm, cache = rows.reshape(*shape, count, size), norms[kind], caches.get(kind)
        rows = (rows if norm is None else _normed(a, rows, norm)).transpose(1, 2)
        if kind != "v" and cos is not None and sin is not None:
            rows = rotary(a, rows, cos, sin)
        results.append(rows if cache is None or start is None else write_rows(a, cache, rows, start))
    return results


def write_rows(a: Attributes, cache: Cache, rows: Tensor, start: Tensor) -> Cache:
    """The cache [B,N,C,d], in place, with rows [B,N,T,d] from cache row start[b] on."""
    Rows.of(cache).write(rows, start)
    return cache


def attend(
    a: Attributes,
    q: Tensor,
    k: Cache,
    v: Cache,
    first: Tensor,
    last: Tensor,
    start: Tensor | None = None,
    visible: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """q [B,H,S,d] over caches [B,N,C,d] -> [B,S,H,d]."""
    k, v = Rows.of(k), Rows.of(v)
    layer = kernels.of(q)
    if layer is not None and q.dtype != torch.float32:  # which tensor cores would round
        factor, tiles = a["scale"] * q.shape[3] ** 0.5, uses.attention_tiles(q.shape[3])
        # The kernel's own scale is d ** -0.5.
        scaled = q if abs(factor - 1) <= 1e-6 else (q.float() * factor).to(q.dtype)
        tensors = [x.contiguous() for x in (scaled, k.rows, v.rows, first, last)]

        def launched(run: Run, tile: uses.AttentionTile) -> Tensor:
            options: dict[str, Any] = {"start": start, "visible": visible, "sinks": sinks, "tile": tile}
            options |= {"region": k.region, "most": k.most, "windowed": bool(a.get("windowed"))}
            return ours.attention(*tensors, **options, by_row=True, run=run)

        many = q.shape[2] > _VERIFIED_ROWS
        order = tiles[3:] + tiles[2::-1] if many else tiles[1:3] + tiles[:1] + tiles[3:]
        if (y := layer.first("attention", launched, order)) is not None:
            return y
    return _attended(a["scale"], q, k, v, first, last, start, visible, sinks).transpose(1, 2)


def _attended(
    scale: float,
    q: Tensor,
    k_rows: Rows,
    v_rows: Rows,
    first: Tensor,
    last: Tensor,
    start: Tensor | None,
    visible: Tensor | None,
    sinks: Tensor | None,
) -> Tensor:
    # Without kernels, a GPU attends to all cache rows: it cannot know which are in use.
    count = k_rows.most if q.is_cuda else _rows_in_use(last, start, visible, k_rows.most)
    k, v = k_rows.first(count, q.dtype), v_rows.first(count, q.dtype)
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
        in_pass = row - start[:, None]
        inside = (in_pass >= 0) & (in_pass < visible.shape[2])
        index = in_pass.clamp(0, visible.shape[2] - 1)[:, None].expand(seen.shape)
        seen = torch.where(inside[:, None], visible.gather(2, index) != 0, seen)
    return seen[:, None]


def quantized_rows(a: Attributes, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """`QuantizedRows` (dflash_trt/graph/torch.py)."""
    fits = x.ndim == 2
    if fits and (both := kernels.tried("rounded rows", ours.quantized_rows, x, _rounded(a, scale))):
        return both
    scale = scale.float()
    wide, factor = x.float(), scale.reshape(1, 1).expand(len(x), 1)
    if a["by_row"]:
        largest = wide.abs().amax(-1, keepdim=True).clamp_min(TINY)
        wide, factor = wide / largest, largest * scale
    numbers = _e4m3(wide / scale) if a["scheme"] == "fp8" else _in_blocks(wide, scale)
    return (numbers * uses.SHRUNK[a["scheme"]]).to(x.dtype), factor / uses.SHRUNK[a["scheme"]]


def _e4m3(x: Tensor) -> Tensor:
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()


def _in_blocks(x: Tensor, second: Tensor) -> Tensor:
    """E2M1 numbers times the E4M3 scale of their block."""
    blocks = x.unflatten(-1, (-1, NVFP4_BLOCK))
    scale = _e4m3((blocks.abs().amax(-1, keepdim=True) / (second * E2M1_MAX)).clamp_min(E4M3_MIN))
    blocks = (blocks / (scale * second)).clamp(-E2M1_MAX, E2M1_MAX)
    # Numbers lie 0.5 apart below 2, 1 apart below 4, 2 apart up to 6; ties to even, as the codes do.
    magnitude = blocks.abs()
    step = 1.0 + (magnitude >= 4).float() - 0.5 * (magnitude < 2).float()
    numbers: Tensor = (blocks / step).round() * step * scale
    return numbers.flatten(-2)


def route(a: Attributes, logits: Tensor | ours.Routed) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """`Route` (dflash_trt/graph/torch.py). Order and groups are there with kernels alone."""
    if isinstance(logits, dict):
        return ours.chosen(logits)
    if routes := kernels.tried("routes", ours.route, logits, a["k"]):
        return routes
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
        rows, stack = x.contiguous(), products.plain(weight)
        y = layer.first(
            "experts",
            lambda run, tile: products.experts_product(rows, replace(stack, tile=tile), order, groups, run),
            stack.form.tiles,
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
    router: Tensor | ours.Routed,
    gate_up: Tensor,
    gate_up_scales: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_scales: Tensor,
    down_bias: Tensor | None,
) -> Tensor:
    """`dflash::MoE` (dflash_trt/graph/experts.py) with packed weights. `apart`: whether a kernel may leave its last sum
    to `add_norm`.
    """
    layer = kernels.of(x)
    if layer is not None and x.dtype != torch.float32:
        weights = gate_up, gate_up_scales, gate_up_bias, down, down_scales, down_bias
        packed = ours.PackedExperts(*weights, *(a[name] for name in ("k", "alpha", "beta", "limit")))
        tensors = x.contiguous(), router if isinstance(router, dict) else router.contiguous(), packed
        # Most experts have their rows in one step.
        tokens = next((n for n in (16, 32) if n * len(gate_up) >= 2 * len(x) * a["k"]), 64)
        tiles = sorted(uses.TILES, key=lambda tile: tile.tokens != tokens)
        apart = bool(a.get("apart"))
        y = layer.first("experts", lambda run, tile: ours.moe(*tensors, tile, run, apart=apart), tiles)
        if y is not None:
            return y
    shares, best, _, _ = route(a, router)
    total = torch.zeros(x.shape, dtype=shares.dtype, device=x.device)
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
    inputs = q, k, v, gates, state, pending_gates, replayed, certain, begun
    if results := kernels.tried("Gated DeltaNet", ours.gated_delta_net, *inputs):
        return results
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
    if both := kernels.tried("best tokens", ours.best_token, logits):
        return both
    logits = logits.float()
    return logits.argmax(-1, keepdim=True), logits.log_softmax(-1).amax(-1, keepdim=True)


def block_acceptance(a: Attributes, tokens: Tensor, rows: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """`dflash::BlockAcceptance` (dflash_trt/graph/dialect.py)."""
    layer = kernels.of(logits)
    chosen = logits.argmax(-1) if layer is None else best_token({}, logits.flatten(0, 1))[0].view(rows.shape)
    if layer is not None and rows.shape[1] <= uses.ACCEPT_NODES:
        tensors = tokens.contiguous(), rows.contiguous(), chosen
        found = layer.first("acceptance", lambda run, _: accept_block(*tensors, run=run))
        if found is not None:
            return found.accepted, found.next_token
    accepted = (tokens.gather(1, rows[:, 1:]) == chosen[:, :-1]).cumprod(1).sum(1)
    return accepted, chosen.gather(1, accepted[:, None])[:, 0]
