"""BlockAcceptance: from drafted and sampled tokens to the number of accepted drafts and the token after them.

A block is a chain of nodes. Node 0 is the anchor. Every other node is accepted if the one before it is accepted and its
token equals the token sampled there. One warp walks down one chain.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["tokens_per_sequence", "nodes_per_sequence"])
def accept_block(
    tokens,  # [B, S] int64
    rows,  # [B, R] int64: index of each node in the S tokens
    sampled,  # [B, R] int64: the token after each node, negative if there is none
    tokens_per_sequence,
    nodes_per_sequence,
    accepted,  # [B] int64: number of correct drafts
    next_token,  # [B] int64: the token after them
    SLOTS: tl.constexpr,  # a power of two, at least R
):
    """One program for each sequence: follow the sampled tokens down its chain."""
    sequence = tl.program_id(0)
    node = tl.arange(0, SLOTS)
    there = node < nodes_per_sequence
    at = sequence * nodes_per_sequence + node
    row = tl.load(rows + at, mask=there, other=0)
    drafted = tl.load(tokens + sequence * tokens_per_sequence + row, mask=there, other=-1)
    following = tl.load(sampled + at, mask=there, other=-1)

    depth = tl.full([], 0, tl.int32)
    token = tl.sum(tl.where(node == 0, following, 0))
    walking = True
    while walking:
        matches = there & (node == depth + 1) & (drafted == token) & (token >= 0)
        child = tl.min(tl.where(matches, node, SLOTS))
        walking = child < SLOTS
        if walking:
            depth = child
            token = tl.sum(tl.where(node == child, following, 0))

    tl.store(accepted + sequence, depth.to(tl.int64))
    tl.store(next_token + sequence, token)
