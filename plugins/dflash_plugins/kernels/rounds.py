"""Between the passes of a round: the drafter's tokens go to the target and the target's features to the drafter, drafts
are compared with what was sampled, and accepted nodes of a tree move to their rows.

The kernels read and write memory of the plans, and need no number of the host but what a round has uploaded.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gather_taps(
    taps,  # n tensors [rows, D]
    features,  # [rows, n * D]
    D: tl.constexpr,
    SLOTS: tl.constexpr,  # D, rounded up to a power of two
):
    """The hidden states of n layers side by side. One program for each row of each tap."""
    row, tap = tl.program_id(0), tl.program_id(1)
    column = tl.arange(0, SLOTS)
    x = tl.zeros([SLOTS], features.dtype.element_ty)
    for i in tl.static_range(len(taps)):
        if tap == i:
            x = tl.load(taps[i] + row.to(tl.int64) * D + column, mask=column < D, other=0).to(x.dtype)
    out = features + (row.to(tl.int64) * len(taps) + tap) * D
    tl.store(out + column, x, mask=column < D)


@triton.jit(do_not_specialize=["nodes", "drafted", "width"])
def fill_tokens(
    block,  # [B, N] int64: the anchor, then mask tokens
    drafts,  # [B, N - 1, W] int64, best first
    nodes,  # N
    drafted,  # nodes of the draft, 1 to N; those after them are copies of the last one
    width,  # W
    tokens,  # [B, N] int64: the anchor, then the best drafts
    rows,  # [B, N] int64: 0 .. N-1
    SLOTS: tl.constexpr,  # a power of two, at least N
):
    """Anchors and drafts as tokens, with copies of the last one, and the numbers of their rows."""
    sequence = tl.program_id(0)
    node = tl.arange(0, SLOTS)
    there, at = node < nodes, sequence * nodes + node
    source = tl.minimum(node, drafted - 1)
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
    tally = 1 + (bad << 10) + (good << 20)
    total = tl.atomic_add(counters + row, tally) + tally
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
    """From drafted and sampled tokens to the number of accepted drafts and the token after them.

    Node 0 is the anchor. Every other node is accepted if the one before it is accepted and its token equals the token
    sampled there. One program of one warp for each sequence follows the sampled tokens down its chain.
    """
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


@triton.jit(do_not_specialize=["slot", "start", "count", "capacity"])
def compact_rows(
    caches,  # [caches] int64: the addresses of [slots, heads, capacity, words]
    heads,  # [caches] int32
    words,  # [caches] int32: 4-byte words of a row
    nodes,  # `count` numbers and others after them: rows after `start`, rising
    slot,
    start,
    count,
    capacity,
    NODES: tl.constexpr,  # a power of two, at least `count`
    WORDS: tl.constexpr,  # words of a row that are moved at a time
):
    """Accepted nodes of a tree move to their positions, in all caches at once: row start + nodes[i] becomes start + i.

    A pass writes node i of a slot to row start + i. The accepted nodes, from the anchor down, belong to the rows
    start, start + 1, .... One program for each head of each cache reads all rows before it writes any.
    """
    cache, head = tl.program_id(0), tl.program_id(1)
    in_cache = tl.load(heads + cache)
    if head < in_cache:
        width = tl.load(words + cache)
        row = (slot.to(tl.int64) * in_cache + head) * capacity + start
        base = tl.load(caches + cache).to(tl.pointer_type(tl.int32)) + row * width
        place, column = tl.arange(0, NODES), tl.arange(0, WORDS)
        there = place < count
        node = tl.zeros([NODES], tl.int64)
        for i in tl.static_range(len(nodes)):
            node = tl.where(place == i, nodes[i], node)
        for first in range(0, width, WORDS):
            at = first + column
            whole = there[:, None] & (at < width)[None, :]
            moved = tl.load(base + node[:, None] * width + at[None, :], mask=whole, other=0)
            tl.debug_barrier()  # all threads have read
            tl.store(base + place.to(tl.int64)[:, None] * width + at[None, :], moved, mask=whole)
