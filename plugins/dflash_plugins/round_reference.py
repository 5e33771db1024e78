"""The work of the kernels between the passes of a round, by torch's operators.

It is the kernels' reference, and runs where Triton cannot. It needs no Triton.
"""

from __future__ import annotations

import torch


def fill_tokens(
    block: torch.Tensor,
    drafts: torch.Tensor | None,
    *,
    drafted: int,
    tokens: torch.Tensor,
    rows: torch.Tensor,
) -> None:
    """The target's input: the anchors of `block`, then the best drafts. From column `drafted` on, 1 to N, the column
    before it is repeated.

    block, tokens, rows: int64 [B, N]. `rows` becomes 0 .. N-1. drafts: int64 [B, N-1, W], best first. Without drafts,
    `tokens` becomes the block.
    """
    if drafts is None:
        tokens.copy_(block)
    else:
        torch.cat((block[:, :1], drafts[:, :, 0]), dim=1, out=tokens)
    tokens[:, drafted:] = tokens[:, drafted - 1 : drafted]
    rows.copy_(torch.arange(rows.shape[1], device=rows.device).expand(rows.shape))


def end_round(
    logits: torch.Tensor,
    features: torch.Tensor,
    places: torch.Tensor | None,
    *,
    finite: torch.Tensor,
    unread: torch.Tensor,
) -> None:
    """Whether each row of logits has a finite largest number, and the features of such rows for the drafter.

    logits: float32 [B, N, V]. A NaN is the largest number. finite: int32 [B, N].
    features: [B, N, F]. Those of node i become row places[b] + i of unread [slots, room, F], if there is such a row.
    places: int64 [B]. None copies no features.
    """
    sound = torch.isfinite(logits.amax(dim=-1))
    finite.copy_(sound)
    if places is None:
        return
    mine = unread[: features.shape[0]]
    node = torch.arange(mine.shape[1], device=mine.device) - places[:, None]
    inside = (node >= 0) & (node < features.shape[1])
    node = node.clamp(0, features.shape[1] - 1)
    taken = (inside & sound.gather(1, node))[:, :, None]
    rows = features.gather(1, node[:, :, None].expand(mine.shape))
    mine.copy_(torch.where(taken, rows, mine))
