"""Launch the kernels between the products of a layer on torch tensors. All are contiguous."""

from __future__ import annotations

import torch

from dflash_plugins import kernel_specs as uses
from dflash_plugins.launch import TYPE_NAMES, Run, by_triton


def add_norm(
    x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, epsilon: float, *, run: Run = by_triton
) -> tuple[torch.Tensor, torch.Tensor]:
    """x + y and its RMS norm. x, y [rows, D], weight [D], of one type."""
    total, normed = torch.empty_like(x), torch.empty_like(x)
    use = uses.add_norm(x.shape[1], epsilon, TYPE_NAMES[x.dtype])
    run(use, (len(x),), x=x, y=y, weight=weight, total=total, normed=normed)
    return total, normed


def place_heads(
    x: torch.Tensor,
    count: int,
    size: int,
    heads: int,
    *,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    start: torch.Tensor | None = None,
    k_cache: torch.Tensor | None = None,
    v_cache: torch.Tensor | None = None,
    epsilon: float = 0.0,
    run: Run = by_triton,
) -> torch.Tensor | None:
    """The heads of x [B * count, columns]: queries, keys and values, each of `size` numbers.

    Returns the queries [B, heads, count, size]. Keys and values are written into caches [B, N, capacity, size] from row
    start[b] (int64 [B]) on. Queries and keys are normed and rotated if norms [size], and cos and sin
    [B * count, pairs] are given. Any of the three may be missing.
    """
    batch = len(x) // count
    keys, values = (0 if cache is None else cache.shape[1] for cache in (k_cache, v_cache))
    capacity = next((c.shape[2] for c in (k_cache, v_cache) if c is not None), 0)
    q = x.new_empty(batch, heads, count, size) if heads else None
    given = {"q_norm": q_norm, "k_norm": k_norm, "cos": cos, "sin": sin, "start": start}
    given |= {"q": q, "k_cache": k_cache, "v_cache": v_cache}
    there = {name: tensor for name, tensor in given.items() if tensor is not None}
    use = uses.place_heads(
        *(heads, keys, values, size, 0 if cos is None else cos.shape[-1], epsilon, TYPE_NAMES[x.dtype]),
        given=tuple(there),
    )
    run(use, (len(x), heads + keys + values), x=x, count=count, capacity=capacity, **there)
    return q


def gate(x: torch.Tensor, *, run: Run = by_triton) -> torch.Tensor:
    """silu of the first half of each row times the second half: x [rows, 2 * inner] -> [rows, inner]."""
    y = x.new_empty(len(x), x.shape[1] // 2)
    use = uses.gate(y.shape[1], TYPE_NAMES[x.dtype])
    run(use, (len(x), -(-y.shape[1] // uses.GATE_BLOCK)), x=x, y=y)
    return y


def router(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, run: Run = by_triton
) -> torch.Tensor:
    """x [rows, D] by weight [E, D], both widened to float32, with bias [E] -> float32 [rows, E]."""
    logits = torch.empty(len(x), len(weight), dtype=torch.float32, device=x.device)
    use = uses.router(len(weight), x.shape[1], TYPE_NAMES[x.dtype], biased=bias is not None)
    biased = {} if bias is None else {"bias": bias}
    grid = len(x), -(-len(weight) // uses.ROUTER_OUTPUTS)
    run(use, grid, x=x, weight=weight, **biased, logits=logits)
    return logits
