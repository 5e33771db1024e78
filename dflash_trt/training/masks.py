"""Attention masks of training batches, as a dense mask or as FlexAttention's block-sparse one.

A block is anchored at position a of its sequence. Its rows see the features of positions before a, and the rows of
the block itself. Windows and causal layers restrict them as in decoding. The feature of the anchor does not exist yet
when the block is drafted (arXiv 2602.06036, section 4.2).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dflash_trt.checkpoint.schema import LayerAttention

# A bool tensor [B, 1, Q, S + Q], or a BlockMask of torch.nn.attention.flex_attention.
Mask = Any


def visible(
    kind: LayerAttention, anchors: Tensor, lengths: Tensor, context: int, size: int
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """FlexAttention's mask_mod(batch, head, query, key): the rule itself, on tensors of indices.

    anchors [B, A]: position of each block's first row; -1 for a missing block.
    lengths [B, A]: rows of each block. Queries are the A * size block rows. Keys are `context` features, then the
    block rows. A missing block sees itself, so that no row of the softmax is empty.
    """

    def rule(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        block, row = query // size, query % size
        anchor, length = anchors[batch, block], lengths[batch, block]
        position = anchor + row
        of_context = key < context
        other = torch.where(of_context, 0, key - context)
        key_row = other % size
        key_position = torch.where(of_context, key, anchor + key_row)
        inside = torch.where(of_context, key < anchor, (other // size == block) & (key_row < length))
        # A row after a shortened block has no effect. Like a missing block, it sees itself.
        itself = ~of_context & (other == query)
        if kind.window is not None:
            inside = inside & (key_position > position - kind.window)
            if not kind.causal:
                inside = inside & (key_position < position + kind.window)
        if kind.causal:
            inside = inside & (key_position <= position)
        return (inside & (anchor >= 0)) | itself

    return rule


def dense_mask(kind: LayerAttention, anchors: Tensor, lengths: Tensor, context: int, size: int) -> Tensor:
    """bool [B, 1, A * size, context + A * size]."""
    device = anchors.device
    batch, blocks = anchors.shape
    rule = visible(kind, anchors, lengths, context, size)
    query = torch.arange(blocks * size, device=device)[None, :, None]
    key = torch.arange(context + blocks * size, device=device)[None, None]
    return rule(torch.arange(batch, device=device)[:, None, None], query, query, key)[:, None]


def flex_mask(kind: LayerAttention, anchors: Tensor, lengths: Tensor, context: int, size: int) -> Mask:
    """The dense mask as a BlockMask, which skips empty tiles."""
    from torch.nn.attention.flex_attention import create_block_mask

    batch, blocks = anchors.shape
    rows = blocks * size
    rule = visible(kind, anchors, lengths, context, size)
    return create_block_mask(rule, batch, None, rows, context + rows, device=str(anchors.device))


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """Attention of q [B, heads, Q, d] to k and v [B, kv heads, S + Q, d]."""
    if isinstance(mask, Tensor):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return _compiled()(q, k, v, block_mask=mask, enable_gqa=True)


_flex: Callable[..., Tensor] | None = None


def _compiled() -> Callable[..., Tensor]:
    """FlexAttention, compiled: otherwise it computes whole score matrices."""
    global _flex
    if _flex is None:
        from torch.nn.attention.flex_attention import flex_attention

        _flex = torch.compile(flex_attention)
    return _flex
