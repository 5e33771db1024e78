"""SampleRows: rows of logits to token ids, with the noise and the rules of `decoding/sampling/sampler.py`.

`read_texts` and `adjust_rows` come first, where a request's logits are adjusted by its tokens so far. Two kernels
sample. `sample_tiles` reads the logits once: many programs per row, each with a tile of 4096 tokens in registers. It
draws the random bits of every token, but computes no noise. Large noise comes from small bits. So the largest logit and
the smallest bits in a group of 32 tokens bound the scores of the group. Nearly all groups cannot contain the winner.
`sample_select`, one program per row, evaluates the few that can, exactly as the host does.

A token's rank is (its distance from the best scaled logit, its id) as one int64. Lower is better.
The limits min-p, top-k and top-p only determine the last rank that may be sampled.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dflash_plugins.kernels import noise
from dflash_trt.decoding.sampling import probability_mass as weights

TILE = tl.constexpr(weights.TILE)
STEPS = tl.constexpr(8)  # a group: 4 neighbouring tokens in each of 8 stripes of the tile, in one thread
GROUP = tl.constexpr(32)
GROUPS = tl.constexpr(128)  # groups per tile
STRIPE = tl.constexpr(512)
BATCH = tl.constexpr(64)  # groups evaluated together
# Bounds are sums of rounded numbers too.
SLACK = tl.constexpr(1e-4)
NO_LIMIT = tl.constexpr(0x7FFFFFFFFFFFFFFF)


@triton.jit(do_not_specialize=["nodes", "room"])
def read_texts(
    logits,  # [B, N, VOCAB] float32: excluded tokens get -infinity
    tokens,  # [B, N] int64: the anchor, then drafts
    start,  # [B] int64: the position of the anchor
    position,  # [B, N] int64, of the token that the row predicts
    facts,  # [slots, 4 + RECENT] int64: where the answer begins, or -1; known tokens; words; 0; the last known tokens
    words,  # [slots, WORDS, 16] int64: 14 tokens before the excluded one, from the right, -1 for any; that; its first
    # position at which it is not excluded
    nodes,  # N
    room,
    texts,  # [slots, room] int64: answers. This round's tokens are written after the tokens before them
    counts,  # [slots, VOCAB] int32: 1 is added for each token up to the anchor
    VOCAB: tl.constexpr,
    RECENT: tl.constexpr,
    WORDS: tl.constexpr,
    SLOTS: tl.constexpr,  # a power of two, at least N
    STEP: tl.constexpr,
):
    """The tokens of each answer so far are counted, and those excluded which would complete a word. One program for
    each sequence.

    Like rows of a cache, tokens beyond the anchor belong to the text only if the next round begins after them.
    """
    sequence = tl.program_id(0)
    facts += sequence * (4 + RECENT)
    begin = tl.load(facts)
    if begin >= 0:
        text = texts + sequence.to(tl.int64) * room
        place = tl.arange(0, RECENT)
        known = tl.load(facts + 1) - RECENT + place
        tl.store(text + known, tl.load(facts + 4 + place), mask=known >= 0)
        anchor = tl.load(start + sequence) - begin
        node = tl.arange(0, SLOTS)
        there = node < nodes
        token = tl.load(tokens + sequence * nodes + node, mask=there, other=0)
        tl.store(text + anchor + node, token, mask=there)
        tl.debug_barrier()  # all of it is written
        for first in range(0, anchor + 1, STEP):
            index = first + tl.arange(0, STEP)
            counted = tl.load(text + index, mask=index <= anchor, other=0)
            tl.atomic_add(counts + sequence.to(tl.int64) * VOCAB + counted, 1, mask=index <= anchor)
        back = tl.arange(0, 16)[None, :]
        at = anchor + node[:, None] - 13 + back
        before = tl.load(text + at, mask=there[:, None] & (at >= 0) & (back < 14), other=-2)
        predicted = tl.load(position + sequence * nodes + node, mask=there, other=0)
        row = logits + (sequence * nodes + node).to(tl.int64) * VOCAB
        for word in range(tl.load(facts + 2).to(tl.int32)):
            at_word = words + (sequence * WORDS + word) * 16
            wanted = tl.load(at_word + back)
            right = (wanted == before) | (wanted == -1) | (back >= 14)
            complete = tl.min(right.to(tl.int32), axis=1) > 0
            excluded = there & complete & (predicted < tl.load(at_word + 15))
            tl.store(row + tl.load(at_word + 14), -float("inf"), mask=excluded)


@triton.jit(do_not_specialize=["nodes", "between", "across"])
def adjust_rows(
    logits,  # [B, N, VOCAB] float32
    tokens,  # [B, N] int64
    facts,  # as above
    visible,  # [B, N, N] uint8, or one for all sequences: whether a row's node comes after another one
    factors,  # [slots, 4] float32: the penalties of repetition, frequency and presence
    bias,  # [slots, VOCAB] float32; -infinity for tokens that are never allowed
    nodes,  # N
    between,  # numbers of `visible` from one sequence to the next, 0 if it is one for all
    across,  # and from one row to the next
    counts,  # [slots, VOCAB] int32: of tokens up to the anchor; those of the answer become 0 again
    VOCAB: tl.constexpr,
    RECENT: tl.constexpr,
    PROMPT: tl.constexpr,  # the bit of `counts` of tokens of the prompt
    STEP: tl.constexpr,
):
    """`History.adjust` after `read_texts`, in the same order. One program for a part of all rows of a sequence."""
    part, sequence = tl.program_id(0), tl.program_id(1)
    if tl.load(facts + sequence * (4 + RECENT)) >= 0:
        token = part * STEP + tl.arange(0, STEP)
        there, at = token < VOCAB, sequence.to(tl.int64) * VOCAB + token
        before = tl.load(counts + at, mask=there, other=0)
        added = tl.load(bias + at, mask=there, other=0.0)
        repetition = tl.load(factors + sequence * 4)
        frequency, presence = tl.load(factors + sequence * 4 + 1), tl.load(factors + sequence * 4 + 2)
        tokens += sequence * nodes
        visible += sequence * between
        for row in range(nodes):
            seen = before
            for node in range(1, row + 1):
                follows = tl.load(visible + row * across + node) != 0
                seen += ((token == tl.load(tokens + node)) & follows).to(tl.int32)
            at_logit = logits + (sequence * nodes + row).to(tl.int64) * VOCAB + token
            x = tl.load(at_logit, mask=there, other=0.0) + added
            count = seen & (PROMPT - 1)
            penalized = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
            penalized -= frequency * count.to(tl.float32)
            penalized -= presence * (count > 0).to(tl.float32)
            tl.store(at_logit, tl.where(seen != 0, penalized, x), mask=there)
        tl.store(counts + at, before & PROMPT, mask=there)


@triton.jit(do_not_specialize=["rows_per_sequence"])
def sample_tiles(
    logits,  # [rows, vocab] float32
    temperature,  # [sequences] float32, 0 selects the most probable token
    top_p,  # [sequences] float32
    seed,  # [sequences] int64, the bits of an unsigned number
    position,  # [rows] int64, of the token that the row predicts
    rows_per_sequence,
    group_max,  # [rows, tiles * 128] float32
    group_noise,  # [rows, tiles * 128] float32: noise of the smallest bits; 0 at temperature 0
    tile_max,  # [rows, tiles] float32
    tile_sum,  # [rows, tiles] float32: sum of exp(logit - tile_max); NaN without a finite maximum
    tile_weight,  # [rows, tiles] int64: see probability_mass.total_weight; 0 if top_p is 1
    VOCAB: tl.constexpr,
):
    """One program for each tile of a row: its largest logits with noise, and its sums."""
    tile, row = tl.program_id(0), tl.program_id(1)
    tiles, sequence = tl.num_programs(0), row // rows_per_sequence
    token = tile * TILE + tl.arange(0, STEPS)[:, None] * STRIPE + tl.arange(0, STRIPE)[None, :]
    x = tl.load(logits + row.to(tl.int64) * VOCAB + token, mask=token < VOCAB, other=-float("inf"))
    heat = tl.load(temperature + sequence)

    by_group = tl.max(tl.reshape(tl.max(x, axis=0), [GROUPS, 4]), axis=1)
    largest = tl.max(by_group, axis=0)
    base = tl.where(largest == -float("inf"), 0.0, largest)
    total = tl.sum(tl.exp(x - base))

    bound = tl.zeros([GROUPS], tl.float32)
    if heat > 0:
        key = tl.load(seed + sequence)
        quad = tile * (TILE // 4) + tl.arange(0, STEPS)[:, None] * GROUPS + tl.arange(0, GROUPS)[None, :]
        at = tl.load(position + row)
        w0, w1, w2, w3 = noise.philox_words(quad, at, key.to(tl.uint32), (key >> 32).to(tl.uint32))
        least = tl.minimum(tl.minimum(w0, w1), tl.minimum(w2, w3))
        bound = noise.gumbel(tl.min(least, axis=0))

    weight = tl.zeros([], tl.int64)
    if tl.load(top_p + sequence) < 1:
        # At temperature 0 nothing is weighed, and any divisor works.
        divisor = tl.where(heat > 0, heat, 1.0)
        relative = tl.div_rn(x, divisor) - tl.div_rn(base, divisor)
        weight = tl.sum(noise.weight(relative))

    groups = (row * tiles + tile) * GROUPS + tl.arange(0, GROUPS)
    tl.store(group_max + groups, by_group)
    tl.store(group_noise + groups, bound)
    tl.store(tile_max + row * tiles + tile, largest)
    tl.store(tile_sum + row * tiles + tile, total)
    tl.store(tile_weight + row * tiles + tile, weight)


@triton.jit
def _list_groups(wanted, shortlist):
    """Write the indices of the wanted groups and return their number."""
    tl.debug_barrier()  # the list may still be read
    index = tl.arange(0, wanted.shape[0])
    place = tl.cumsum(wanted.to(tl.int32), axis=0) - 1
    tl.store(shortlist + place, index, mask=wanted)
    tl.debug_barrier()
    return tl.sum(wanted.to(tl.int32), axis=0)


@triton.jit
def _tokens(shortlist, first, count, logits, vocab, heat, best):
    """The tokens of a batch of listed groups, their distance from the best one, and their ranks; -1 for none."""
    slot = first + tl.arange(0, BATCH)
    group = tl.load(shortlist + slot, mask=slot < count, other=0)
    member = tl.arange(0, GROUP)[None, :]
    token = (group // GROUPS * TILE + group % GROUPS * 4)[:, None] + member // 4 * STRIPE + member % 4
    valid = (slot < count)[:, None] & (token < vocab)
    x = tl.load(logits + token, mask=valid, other=-float("inf"))
    distance = _distance(x, heat, best)
    rank = _rank(distance, token)
    return token, distance, tl.where(valid, rank, NO_LIMIT)


@triton.jit
def _distance(x, heat, best):
    return tl.abs(best - tl.div_rn(x, heat))  # never negative; abs turns -0.0 into 0.0


@triton.jit
def _rank(distance, token):
    # The bits of non-negative floats have the order of the floats.
    return (distance.to(tl.int32, bitcast=True).to(tl.int64) << 32) | token.to(tl.int64)


@triton.jit
def _measure(shortlist, count, logits, vocab, heat, best, limit):
    """The number and the total weight of the listed tokens with rank `limit` or better."""
    number, weight = tl.zeros([], tl.int64), tl.zeros([], tl.int64)
    for first in range(0, count, BATCH):
        _, distance, rank = _tokens(shortlist, first, count, logits, vocab, heat, best)
        within = rank <= limit
        number += tl.sum(within.to(tl.int64))
        weight += tl.sum(tl.where(within, noise.weight(-distance), 0))
    return number, weight


@triton.jit
def _best_score(shortlist, count, logits, vocab, heat, best, limit, noisy, at, key, score, winner):
    """The highest score, and its lowest token, among the given one and the listed tokens within the limit."""
    for first in range(0, count, BATCH):
        token, distance, rank = _tokens(shortlist, first, count, logits, vocab, heat, best)
        drawn = -distance
        if noisy:
            drawn += noise.gumbel(noise.token_bits(token, at, key.to(tl.uint32), (key >> 32).to(tl.uint32)))
        drawn = tl.where(rank <= limit, drawn, -float("inf"))
        top = tl.max(drawn)
        lowest = tl.min(tl.where((drawn == top) & (rank <= limit), token, 0x7FFFFFFF))
        winner = tl.where(top > score, lowest, tl.where(top == score, tl.minimum(winner, lowest), winner))
        score = tl.maximum(score, top)
    return score, winner


@triton.jit
def _nearest(group_max, group, heat, best, SIZE: tl.constexpr):
    """The distance of each group's best token, as bits. It is computed where it is used, because registers are few."""
    return _distance(tl.load(group_max + group, mask=group < SIZE, other=-float("inf")), heat, best).to(
        tl.int32, bitcast=True
    )


@triton.jit
def _promising(group_max, group_noise, group, heat, best, furthest, SIZE: tl.constexpr):
    """The highest possible score of each group, -infinity for those beyond the distance `furthest`."""
    bound = tl.load(group_noise + group, mask=group < SIZE, other=-float("inf"))
    distance = _distance(tl.load(group_max + group, mask=group < SIZE, other=-float("inf")), heat, best)
    allowed = (group < SIZE) & (distance.to(tl.int32, bitcast=True) <= furthest)
    return tl.where(allowed, bound - distance, -float("inf"))


@triton.jit
def _kth_rank(group_max, group, shortlist, k, logits, vocab, heat, best, SIZE: tl.constexpr):
    """The rank of the k-th token, by bisection."""
    distances = _nearest(group_max, group, heat, best, SIZE)
    # k groups have a token at least as near as the k-th nearest group. So the k best tokens are that near too.
    low, high = tl.full([], -1, tl.int32), tl.full([], 0x7F800000, tl.int32)
    while high - low > 1:
        middle = low + (high - low) // 2
        if tl.sum((distances <= middle).to(tl.int32), axis=0) >= k:
            high = middle
        else:
            low = middle
    count = _list_groups((group < SIZE) & (distances <= high), shortlist)
    below, reached = tl.full([], -1, tl.int64), (high.to(tl.int64) << 32) | 0x7FFFFFFF
    while reached - below > 1:
        middle = below + (reached - below) // 2
        number, _ = _measure(shortlist, count, logits, vocab, heat, best, middle)
        if number >= k:
            reached = middle
            if number == k:
                below = reached - 1
        else:
            below = middle
    return reached


@triton.jit(do_not_specialize=["rows_per_sequence"])
def sample_select(
    logits,  # [rows, vocab] float32
    temperature,  # [sequences] float32
    reach,  # [sequences] float32: -log(min_p), infinity if min_p is 0
    top_k,  # [sequences] int32, 0 for all
    top_p,  # [sequences] float32
    seed,  # [sequences] int64
    position,  # [rows] int64
    group_max,
    group_noise,
    tile_max,
    tile_sum,
    tile_weight,
    rows_per_sequence,
    shortlist,  # [rows, tiles * 128] int32, scratch memory of the kernel
    sampled,  # [rows] int64: the token; -1 if the row has no finite largest logit
    logprob,  # [rows] float32: log of the token's probability under the softmax of the logits
    VOCAB: tl.constexpr,
    TILES: tl.constexpr,
    TILE_SLOTS: tl.constexpr,  # TILES and TILES * 128, rounded up to powers of two
    GROUP_SLOTS: tl.constexpr,
):
    """One program for each row: the token and its log-probability, from the tiles."""
    row = tl.program_id(0)
    sequence = row // rows_per_sequence
    logits += row.to(tl.int64) * VOCAB
    shortlist += row * TILES * GROUPS
    tile = tl.arange(0, TILE_SLOTS)
    in_row = tile < TILES
    largest = tl.load(tile_max + row * TILES + tile, mask=in_row, other=-float("inf"))
    sums = tl.load(tile_sum + row * TILES + tile, mask=in_row, other=0.0)
    maximum = tl.max(largest, axis=0)
    total = tl.sum(tl.where(largest == -float("inf"), sums, sums * tl.exp(largest - maximum)), axis=0)

    asked = tl.load(temperature + sequence)
    noisy = asked > 0
    heat = tl.where(noisy, asked, 1.0)
    best = tl.div_rn(maximum, heat)
    winner = tl.full([], -1, tl.int32)
    # A NaN or an infinite logit makes the sum NaN. A row of -inf has the sum 0.
    if (total > 0) & (tl.abs(best) < float("inf")):
        SIZE: tl.constexpr = TILES * GROUPS
        group = tl.arange(0, GROUP_SLOTS)
        group_max += row * SIZE
        group_noise += row * SIZE
        key, at = tl.load(seed + sequence), tl.load(position + row)

        limit = _rank(tl.load(reach + sequence), tl.full([], 0x7FFFFFFF, tl.int32))
        mass = tl.load(top_p + sequence)
        target = tl.full([], 0, tl.float64)
        if noisy:
            k = tl.load(top_k + sequence)
            if (k > 0) & (k < VOCAB):
                kth = _kth_rank(group_max, group, shortlist, k, logits, VOCAB, heat, best, SIZE)
                limit = tl.minimum(limit, kth)
            if mass < 1:
                if (limit >> 32) < 0x7F800000:
                    near = _nearest(group_max, group, heat, best, SIZE)
                    count = _list_groups((group < SIZE) & (near <= (limit >> 32).to(tl.int32)), shortlist)
                    _, weight = _measure(shortlist, count, logits, VOCAB, heat, best, limit)
                    kept = weight.to(tl.float64)
                else:
                    part = tl.load(tile_weight + row * TILES + tile, mask=in_row, other=0).to(tl.float64)
                    share = noise.exponential(tl.div_rn(largest, heat) - best).to(tl.float64)
                    kept = tl.sum(tl.floor(part * share), axis=0)
                target = mass.to(tl.float64) * kept
        else:
            limit = tl.full([], NO_LIMIT - 1, tl.int64)

        searching = True
        while searching:
            furthest = (limit >> 32).to(tl.int32)
            # A first score to beat, from the group with the highest bound.
            promising = _promising(group_max, group_noise, group, heat, best, furthest, SIZE)
            first = tl.argmax(promising, axis=0)
            count = _list_groups(group == first, shortlist)
            score, winner = tl.full([], -float("inf"), tl.float32), tl.full([], 0x7FFFFFFF, tl.int32)
            score, winner = _best_score(
                shortlist, count, logits, VOCAB, heat, best, limit, noisy, at, key, score, winner
            )
            promising = _promising(group_max, group_noise, group, heat, best, furthest, SIZE)
            near = _nearest(group_max, group, heat, best, SIZE)
            allowed = (group < SIZE) & (near <= furthest)
            count = _list_groups(allowed & (promising + SLACK >= score), shortlist)
            score, winner = _best_score(
                shortlist, count, logits, VOCAB, heat, best, limit, noisy, at, key, score, winner
            )
            searching = False
            if noisy & (mass < 1):
                far = _distance(tl.load(logits + winner), heat, best)
                rank = _rank(far, winner)
                near = _nearest(group_max, group, heat, best, SIZE)
                count = _list_groups((group < SIZE) & (near <= far.to(tl.int32, bitcast=True)), shortlist)
                _, before = _measure(shortlist, count, logits, VOCAB, heat, best, rank - 1)
                if (before.to(tl.float64) >= target) | (noise.weight(-far) == 0):
                    # Neither this token nor a later one is kept: search before it. The best token is always kept.
                    limit = rank - 1
                    searching = True
        tl.store(logprob + row, tl.load(logits + winner) - maximum - tl.log(total))
    else:
        tl.store(logprob + row, float("nan"))
    tl.store(sampled + row, winner.to(tl.int64))
