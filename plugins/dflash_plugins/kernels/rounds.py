"""Between the passes of a round: the drafter's tokens go to the target, and the target's features to the drafter.

Both kernels read and write memory of the plans, and need no number of the host but what a round has uploaded.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["nodes", "drafted", "width"])
def fill_tokens(
    block,  # [B, N] int64: the anchor, then mask tokens
    drafts,  # [B, N - 1, W] int64, best first; None if nothing was drafted
    nodes,  # N
    drafted,  # nodes of the draft, 1 to N; those after them are copies of the last one
    width,  # W
    tokens,  # [B, N] int64: the anchor, then the best drafts; without drafts the block
    rows,  # [B, N] int64: 0 .. N-1
    SLOTS: tl.constexpr,  # a power of two, at least N
):
    """Anchors and drafts as tokens, with copies of the last one, and the numbers of their rows."""
    sequence = tl.program_id(0)
    node = tl.arange(0, SLOTS)
    there, at = node < nodes, sequence * nodes + node
    source = tl.minimum(node, drafted - 1)
    if drafts is None:
        token = tl.load(block + sequence * nodes + source, mask=there)
    else:
        token = tl.load(block + at - node, mask=there & (source == 0))
        # Row b of the drafts is one shorter than row b of the tokens.
        place = sequence * (nodes - 1) + source - 1
        token = tl.where(source == 0, token, tl.load(drafts + place * width, mask=there & (source > 0)))
    tl.store(tokens + at, token, mask=there)
    tl.store(rows + at, node.to(tl.int64), mask=there)


@triton.jit(do_not_specialize=["nodes", "room"])
def end_round(
    logits,  # [B, N, VOCAB] fp32
    features,  # [B, N, FEATURES]
    places,  # [B] int64: the row of `unread` for node 0; None if no features are to be copied
    nodes,  # N
    room,  # rows of a slot in `unread`
    counters,  # [B * N] int32, zeros, and zeros again at the end
    finite,  # [B * N] int32: whether the largest logit of a row is finite; a NaN is the largest
    unread,  # [slots, room, FEATURES]: gets the rows with finite logits that have room
    VOCAB: tl.constexpr,
    FEATURES: tl.constexpr,
    TILES: tl.constexpr,  # programs of a row of logits, fewer than 1024
    TILE: tl.constexpr,  # logits of a program, and features of a step
):
    """Which rows of logits are finite; features of chains go to where they will wait."""
    row, tile = tl.program_id(0), tl.program_id(1)
    step = tl.arange(0, TILE)
    column = tile * TILE + step
    x = tl.load(logits + row.to(tl.int64) * VOCAB + column, mask=column < VOCAB, other=-float("inf"))
    bad = tl.max(((x != x) | (x == float("inf"))).to(tl.int32))
    good = tl.max((tl.abs(x) < float("inf")).to(tl.int32))
    # Ten bits each: the programs that are done, those that saw a NaN or infinity, those that saw a finite number. One
    # atomic addition carries all of them, so the last program knows the whole row.
    own = 1 + (bad << 10) + (good << 20)
    total = tl.atomic_add(counters + row, own) + own
    if (total & 1023) == TILES:
        sound = (((total >> 10) & 1023) == 0) & ((total >> 20) > 0)
        tl.store(counters + row, 0)
        tl.store(finite + row, sound.to(tl.int32))
        if places is not None:
            sequence = row // nodes
            place = tl.load(places + sequence) + row - sequence * nodes
            if sound & (place < room):
                source = features + row.to(tl.int64) * FEATURES
                target = unread + (sequence.to(tl.int64) * room + place) * FEATURES
                for first in range(0, FEATURES, TILE):
                    there = first + step < FEATURES
                    number = tl.load(source + first + step, mask=there)
                    tl.store(target + first + step, number, mask=there)
