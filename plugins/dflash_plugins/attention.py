"""Launch the attention kernels on torch tensors."""

from __future__ import annotations

import torch

from dflash_plugins import kernel_specs as uses
from dflash_plugins.kernels import attention as kernels
from dflash_plugins.launch import TYPE_NAMES


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
    tile: uses.AttentionTile = uses.ATTENTION_TILES[0],
) -> torch.Tensor:
    """q [B, H, S, D] over caches [B, N, C, D], all of one type -> y [B, H, S, D], all contiguous.

    first, last: int64 [B, S], the range of slots that a row sees. start: int64 [B], and visible: int32 [B, S, S], the
    rows that a row sees among those of its pass, in slots start .. start+S-1. sinks: [H].
    """
    batch, heads, count, head_dim = q.shape
    kv_heads, capacity, dtype = k_cache.shape[1], k_cache.shape[2], TYPE_NAMES[q.dtype]
    group = heads // kv_heads
    parts = uses.attention_parts(batch, kv_heads, group * count)
    rows = batch * heads * count

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=q.device)

    partial, largest, total = empty(parts * rows, head_dim), empty(parts * rows), empty(parts * rows)
    tree = {} if visible is None else {"start": start, "visible": visible}
    kernels.attend[(-(-group * count // tile.rows), batch * kv_heads, parts)](
        *(q, k_cache, v_cache, first, last),
        **tree,
        count=count,
        capacity=capacity,
        splits=parts,
        partial=partial,
        largest=largest,
        total=total,
        **uses.attend(kv_heads, group, head_dim, dtype, tile, tree=bool(tree)).launch,
    )
    y = torch.empty_like(q)
    kernels.merge[(rows,)](
        *(partial, largest, total, q),
        **{} if sinks is None else {"sinks": sinks},
        rows=rows,
        count=count,
        splits=parts,
        y=y,
        **uses.merge(heads, head_dim, dtype, sinks=sinks is not None).launch,
    )
    return y
