"""BlockAcceptance: from drafted and sampled tokens to the committed tokens and the next block.

A block is a tree of nodes. Node 0 is the anchor. Every other node comes after its parent. A node is accepted if its
parent is accepted and its token equals the token sampled after its parent. Without parents the tree is a chain. One
warp walks down one tree.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["tokens_per_sequence", "nodes_per_sequence"])
def accept_block(
    tokens,  # [B, S] int64
    rows,  # [B, R] int64: index of each node in the S tokens
    sampled,  # [B, R] int64: the token after each node
    parents,  # [B, R] int64, or None for a chain
    start,  # [B] int64: the position of tokens[:, 0]; None if `block` is None
    tokens_per_sequence,
    nodes_per_sequence,
    accepted,  # [B] int64: number of correct drafts
    next_token,  # [B] int64: the token after them
    path,  # [B, R] int64: the accepted nodes from the anchor down, then -1; or None
    block,  # [B, BLOCK] int64: the next block, i.e. the next token and masks; or None
    positions,  # [B, BLOCK] int64: positions of that block
    MASK: tl.constexpr,  # the mask token's id
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,  # a power of two, at least R and at least BLOCK
):
    """One program for each sequence: follow the sampled tokens down its tree."""
    sequence = tl.program_id(0)
    node = tl.arange(0, SLOTS)
    there = node < nodes_per_sequence
    at = sequence * nodes_per_sequence + node
    row = tl.load(rows + at, mask=there, other=0)
    drafted = tl.load(tokens + sequence * tokens_per_sequence + row, mask=there, other=-1)
    following = tl.load(sampled + at, mask=there, other=-1)
    parent = node - 1
    if parents is not None:
        parent = tl.load(parents + at, mask=there, other=-1).to(tl.int32)

    current, depth = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    taken = tl.where(node == 0, 0, -1)
    token = tl.sum(tl.where(node == 0, following, 0))
    walking = True
    while walking:
        matches = there & (node > current) & (parent == current) & (drafted == token) & (token >= 0)
        child = tl.min(tl.where(matches, node, SLOTS))
        walking = child < SLOTS
        if walking:
            current, depth = child, depth + 1
            taken = tl.where(node == depth, child, taken)
            token = tl.sum(tl.where(node == child, following, 0))

    tl.store(accepted + sequence, depth.to(tl.int64))
    tl.store(next_token + sequence, token)
    if path is not None:
        tl.store(path + at, taken.to(tl.int64), mask=there)
    if block is not None:
        ahead = sequence * BLOCK + node
        anchor = tl.load(start + sequence) + depth + 1
        tl.store(block + ahead, tl.where(node == 0, token, MASK), mask=node < BLOCK)
        tl.store(positions + ahead, anchor + node, mask=node < BLOCK)
