"""Launch the attention kernels on torch tensors."""

from __future__ import annotations

import torch

from dflash_plugins import kernel_specs as uses
from dflash_plugins.launch import TYPE_NAMES, Run, by_triton


def attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    first: torch.Tensor,
    last: torch.Tensor,
    *,
    start: torch.Tensor | None = None,
    visible: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    tile: uses.AttentionTile | None = None,
    by_row: bool = False,
    run: Run = by_triton,
) -> torch.Tensor:
    """q [B, H, S, D] over caches [B, N, C, D], all of one type -> y [B, H, S, D], or with `by_row` [B, S, H, D].
    All are contiguous.

    first, last: int64 [B, S], the range of cache rows that a row sees. start: int64 [B], and visible: int32 [B, S, S],
    the rows that a row sees among those of its pass, in cache rows start .. start+S-1. sinks: [H].
    """
    batch, heads, count, head_dim = q.shape
    kv_heads, capacity, dtype = k_cache.shape[1], k_cache.shape[2], TYPE_NAMES[q.dtype]
    group, tile = heads // kv_heads, tile or uses.attention_tiles(head_dim)[0]
    parts = uses.attention_parts(batch, kv_heads, group * count)
    rows = batch * heads * count

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=q.device)

    parted = {
        "partial": empty(parts * rows, head_dim),
        "largest": empty(parts * rows),
        "total": empty(parts * rows),
    }
    tree = {} if visible is None else {"start": start, "visible": visible}
    run(
        uses.attend(kv_heads, group, head_dim, dtype, tile, tree=bool(tree)),
        (-(-group * count // tile.rows), batch * kv_heads, parts),
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        first=first,
        last=last,
        **tree,
        count=count,
        capacity=capacity,
        splits=parts,
        **parted,
    )
    y = q.new_empty(batch, count, heads, head_dim) if by_row else torch.empty_like(q)
    sink = {} if sinks is None else {"sinks": sinks}
    use = uses.merge(heads, head_dim, dtype, sinks=bool(sink), by_row=by_row)
    run(use, (rows,), **parted, like=q, **sink, rows=rows, count=count, splits=parts, y=y)
    return y
