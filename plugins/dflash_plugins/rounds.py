"""Launch the kernels between the passes of a round on torch tensors. Nothing is allocated."""

from __future__ import annotations

import torch

from dflash_plugins import kernel_specs as uses
from dflash_plugins.launch import TYPE_NAMES, Run, by_triton


def fill_tokens(
    block: torch.Tensor,
    drafts: torch.Tensor | None,
    *,
    drafted: int,
    tokens: torch.Tensor,
    rows: torch.Tensor,
    most: int,
    run: Run = by_triton,
) -> None:
    """`round_reference.fill_tokens` as one kernel, for up to `most` nodes. All tensors are contiguous."""
    batch, nodes = block.shape
    run(
        uses.fill_tokens(most, drafted=drafts is not None),
        (batch,),
        block=block,
        **{} if drafts is None else {"drafts": drafts},
        nodes=nodes,
        drafted=drafted,
        width=1 if drafts is None else drafts.shape[2],
        tokens=tokens,
        rows=rows,
    )


def end_round(
    logits: torch.Tensor,
    features: torch.Tensor,
    places: torch.Tensor | None,
    *,
    finite: torch.Tensor,
    unread: torch.Tensor,
    counters: torch.Tensor,
    run: Run = by_triton,
) -> None:
    """`round_reference.end_round` as one kernel. All tensors are contiguous.

    counters: int32 [B * N or more], zeros. The kernel leaves zeros there.
    """
    batch, nodes, vocab = logits.shape
    size, dtype = features.shape[2], TYPE_NAMES[features.dtype]
    use = uses.end_round(vocab, size, dtype, committing=places is not None)
    run(
        use,
        (batch * nodes, use.constants["TILES"]),
        logits=logits,
        features=features,
        **{} if places is None else {"places": places},
        nodes=nodes,
        room=unread.shape[1],
        counters=counters,
        finite=finite,
        unread=unread,
    )
