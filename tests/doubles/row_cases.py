"""Every kernel of a pass on rows, alone and among others, whose bits must not depend on the others or their number.

TRITON_INTERPRET=1 python -m tests.doubles.row_cases 10000        so many rows, in turn over the cases
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from dflash_plugins import kernel_specs as uses
from dflash_plugins import launch, layers, packed
from dflash_plugins.kernel_table import HIDDEN_STATE_TAP
from torch import Tensor

from dflash_trt.decoding.params import SamplingParams
from dflash_trt.engines.torch.layers import in_bytes
from tests.doubles import triton_interpreter
from tests.doubles.packed_weights import random_weight

Random = np.random.Generator
# The results for some of the rows that a case has drawn, in any order, each with rows in front.
Rows = Callable[[Sequence[int]], Sequence[Tensor]]
TYPES = torch.bfloat16, torch.float16


class Drawn:
    """Random numbers of a case, and what its kernels are launched by."""

    def __init__(self, random: Random, rows: int) -> None:
        self.random, self.rows, self.dtype = random, rows, TYPES[random.integers(2)]
        self.launched, self.compared, self.unrounded = set[str](), 0, triton_interpreter.Unrounded()

    def run(self, use: uses.Use, *grid: Any, **arguments: Any) -> None:
        self.launched.add(use.function)
        self.unrounded(use, *grid, **arguments)

    def one_of(self, *choices: Any) -> Any:
        return choices[self.random.integers(len(choices))]

    def real(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.from_numpy(self.random.standard_normal(shape)).to(dtype or self.dtype)

    def whole(self, most: int, *shape: int) -> Tensor:
        return torch.from_numpy(self.random.integers(0, most, shape))


def sampling(d: Drawn) -> Rows:
    """With penalties of an answer of eight tokens."""
    d.rows = -(-d.rows // 4)
    count, vocab, known = 2, d.one_of(300, 300, 300, 5000), 8
    logits, tokens = d.real(d.rows, count, vocab, dtype=torch.float32), d.whole(vocab, d.rows, count)
    ways = (
        SamplingParams(),
        SamplingParams(temperature=0.9, top_k=20, top_p=0.9),
        SamplingParams(temperature=1.0),
    )
    params = launch.sampling_tensors([ways[i % 3] for i in range(d.rows)], range(d.rows), "cpu")
    recent = d.whole(vocab, d.rows, uses.recent_tokens(count))
    facts = torch.tensor([0, known, 0, 0]).expand(d.rows, 4)
    memory = {
        "facts": torch.cat((facts, recent), 1),
        "words": torch.zeros(d.rows, uses.ADJUST_WORDS, 16, dtype=torch.int64),
        "texts": d.whole(vocab, d.rows, 32),
        "counts": d.whole(2, d.rows, vocab).int(),
        "factors": d.real(d.rows, 4, dtype=torch.float32).abs() + 1,
        "bias": d.real(d.rows, vocab, dtype=torch.float32),
    }
    visible = torch.ones(count, count, dtype=torch.bool).tril()

    def results(rows: Sequence[int]) -> Sequence[Tensor]:
        chosen = {name: tensor[rows] for name, tensor in params.items()}
        adjusted, n = logits[rows], len(rows)
        start = torch.full((n,), known)
        positions = (start[:, None] + 1 + torch.arange(count)).contiguous()
        held = {name: tensor[rows].contiguous() for name, tensor in memory.items()}
        launch.adjust_rows(
            adjusted, tokens[rows], start, positions, visible, memory=held, most=count, run=d.run
        )
        return adjusted, *launch.sample_rows(adjusted, chosen, positions, run=d.run)

    return results


def between_passes(d: Drawn) -> Rows:
    nodes, vocab, features = 3, 300, 32
    tokens, chosen = d.whole(2, d.rows, nodes), d.whole(2, d.rows, nodes)
    logits, taken = d.real(d.rows, nodes, vocab, dtype=torch.float32), d.real(d.rows, nodes, features)
    places, drafts = d.whole(3, d.rows), d.whole(vocab, d.rows, nodes - 1, 2)
    order = torch.arange(nodes).expand(d.rows, nodes)
    tapped = [d.real(d.rows, 96) for _ in range(3)]

    def results(rows: Sequence[int]) -> Sequence[Tensor]:
        n = len(rows)
        accepted = launch.accept_block(tokens[rows], order[rows].contiguous(), chosen[rows], run=d.run)
        block, fed = torch.empty(n, nodes, dtype=torch.int64), torch.empty(n, nodes, dtype=torch.int64)
        launch.fill_tokens(
            tokens[rows], drafts[rows], drafted=nodes - 1, tokens=block, rows=fed, most=nodes, run=d.run
        )
        finite, counters = torch.zeros(n, nodes, dtype=torch.int32), torch.zeros(n * nodes, dtype=torch.int32)
        unread = taken.new_zeros(n, 4, features)
        memory = {"finite": finite, "unread": unread, "counters": counters}
        launch.end_round(logits[rows], taken[rows], places[rows], **memory, run=d.run)
        taps = tuple(tensor[rows] for tensor in tapped)
        s, a = HIDDEN_STATE_TAP.sizes([taps[0].shape]), HIDDEN_STATE_TAP.given({"n": 3})
        gathered = taken.new_empty(n, 3 * 96)
        use = uses.gather_taps(3, 96, launch.TYPE_NAMES[d.dtype])
        d.run(use, HIDDEN_STATE_TAP.grid(s, a, None), taps=taps, features=gathered)
        moved = unread[:, None].repeat(1, 2, 1, 1).contiguous()
        launch.Compaction([moved], nodes, run=d.run)(0, 0, [0, 2])
        return accepted.accepted, accepted.next_token, block, fed, finite, unread, gathered

    return results


def heads(d: Drawn) -> Rows:
    """Attention over a cache, and what is beside it, of sequences of a few rows, or of many. Caches may be regions of
    one for all, whose rows move down with a window, and the rows of a sequence a tree.
    """
    size, group, keys, capacity = d.one_of(64, 128, 256), d.one_of(1, 2, 4), d.one_of(1, 2), d.one_of(40, 300)
    count, long = 1 + int(d.random.integers(4)), d.random.integers(8) == 0
    batch = d.rows = -(-d.rows // 8)
    if long:
        size, group, keys, capacity, batch = 64, 1, 1, 1 << 15, min(batch, 2)
        d.rows = batch
    q_heads = group * keys
    x = d.real(batch, count, 64)
    weight, _ = random_weight(packed.Packing((q_heads + 2 * keys) * size, 64, "plain"), dtype=d.dtype)
    caches = d.real(2, batch, keys, capacity, size)
    caches = in_bytes(caches) if d.random.integers(3) == 0 else caches
    start = d.whole(capacity - count, batch)
    angles, norms = d.real(batch, count, size // 2), d.real(2, size)
    window, sinks, windowed = d.one_of(10, capacity), d.one_of(None, d.real(q_heads)), d.one_of(True, False)
    pooled, tree = d.one_of(True, False), d.one_of(True, False, False)
    visible = (d.whole(2, batch, count, count) | torch.eye(count, dtype=torch.int64)).tril().int()

    def results(rows: Sequence[int]) -> Sequence[Tensor]:
        turns = {"cos": angles[rows].cos().flatten(0, 1), "sin": angles[rows].sin().flatten(0, 1)}
        inputs, placed = x[rows].flatten(0, 1), []
        where = {"region": torch.arange(len(rows)) * capacity} if pooled else {}
        more = turns | where | {"q_norm": norms[0], "k_norm": norms[1], "start": start[rows]}
        product = packed.product(inputs, weight, None, d.run)
        for run in (d.run, packed.by_product(inputs, weight, None, None, d.run)):
            own = caches[:, rows]
            if pooled:  # [1, keys, rows of all sequences, numbers]
                own = own.transpose(1, 2).flatten(2, 3).unsqueeze(1).contiguous()
            chosen = {"k_cache": own[0], "v_cache": own[1]}
            q = layers.place_heads(product, count, size, q_heads, **more, **chosen, epsilon=1e-6, run=run)
            assert q is not None
            placed.append((q, *chosen.values()))
        assert all(map(torch.equal, *placed)), "a product places heads otherwise"
        last = start[rows][:, None] + torch.arange(count)
        first, options = (last - window).clamp(min=0), {"sinks": sinks, "windowed": windowed, "by_row": True}
        options |= where | ({"most": capacity} if pooled else {})
        if tree:
            options |= {"start": start[rows], "visible": visible[rows]}
        y = layers.attention(q, *chosen.values(), first, last, **options, run=d.run)
        # The same rows, each in a pass of its own.
        alone = [
            layers.attention(
                q[:, :, i : i + 1].contiguous(),
                *chosen.values(),
                first[:, i : i + 1].contiguous(),
                last[:, i : i + 1].contiguous(),
                **options,
                run=d.run,
            )
            for i in range(0 if tree else 1 if long else count)
        ]
        for i, row in enumerate(alone):
            assert torch.equal(row, y[:, i : i + 1]), "attention depends on the rows of a sequence"
        if pooled:
            own = own.view(2, keys, len(rows), capacity, -1).transpose(1, 2)
        return q, *own, y

    return results


def between_products(d: Drawn) -> Rows:
    hidden, experts, vocab = d.one_of(64, 96, 304), d.one_of(4, 32), d.one_of(300, 300, 300, 9000)
    x, y, weight = d.real(d.rows, hidden), d.real(d.rows, hidden), d.real(hidden)
    routed, bias = d.real(experts, hidden, dtype=torch.float32), d.real(experts, dtype=torch.float32)
    logits, gated = d.real(d.rows, vocab), d.real(d.rows, 2 * hidden)
    rounding = (d.one_of("fp8", "nvfp4"), d.one_of(True, False)), torch.full((1,), 0.01)
    gating, counter = d.one_of(None, rounding), torch.zeros(1, dtype=torch.int32)
    norm = weight, 1e-6, routed, bias

    def results(rows: Sequence[int]) -> Sequence[Tensor]:
        *sums, chosen = layers.norm_router(
            *(x[rows], y[rows], *norm), counter=counter, k=2, arranged=False, run=d.run
        )
        chosen = layers.chosen(chosen) if isinstance(chosen, dict) else layers.route(chosen, 2, d.run)
        return (
            *(*sums, *chosen[:2]),
            *layers.add_norm(x[rows], y[rows], weight, 1e-6, rounding, run=d.run),
            *layers.gate(gated[rows], gating, run=d.run),
            *layers.quantized_rows(x[rows], rounding, run=d.run),
            layers.router(x[rows], routed, bias, run=d.run),
            *layers.best_token(logits[rows], run=d.run),
        )

    return results


def mxfp4_experts(d: Drawn) -> Rows:
    experts, k, hidden, inner = d.one_of((4, 2, 96, 32), (32, 4, 64, 96))

    def matrix(out: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
        blocks = d.whole(256, experts, out, columns // 32, 16).to(torch.uint8)
        return blocks, (118 + d.whole(5, experts, out, columns // 32)).to(torch.uint8), d.real(experts, out)

    layer = layers.PackedExperts(*matrix(2 * inner, hidden), *matrix(hidden, inner), k, 1.702, 1.0, 7.0)
    x, router = d.real(d.rows, hidden) / 8, d.real(d.rows, experts, dtype=torch.float32)
    y, weight, counter = d.real(d.rows, hidden), d.real(hidden), torch.zeros(1, dtype=torch.int32)
    routing = weight, 1e-6, d.real(experts, hidden, dtype=torch.float32), None

    def results(rows: Sequence[int]) -> Sequence[Tensor]:
        tile = uses.TILES[min(len(rows) * k // experts // 8, 2)]  # as many rows of an expert choose it
        parts = layers.moe(x[rows], router[rows], layer, tile, d.run, apart=True)
        *sums, chosen = layers.norm_router(
            *(x[rows], y[rows], *routing), counter=counter, k=k, arranged=True, run=d.run
        )
        return (
            layers.moe(x[rows], router[rows], layer, tile, d.run),
            *layers.add_norm(x[rows], parts, weight, 1e-6, run=d.run),
            *sums,
            layers.moe(sums[1], chosen, layer, tile, d.run),
        )

    return results


def products(d: Drawn) -> Rows:
    """Of layers and of experts, as stored in any form; 1,030 inputs have two parts."""
    form = d.one_of(
        *(packed.Packing(n, 1030, "plain") for n in (1, 72, 150)),
        packed.Packing(72, 1056, "int4", "bf16", group=32),
        packed.Packing(72, 1056, "int4", "fp16", zeros=True),
        packed.Packing(72, 1056, "int8", "fp32", group=32),
        packed.Packing(72, 1056, "e4m3", "bf16"),
        packed.Packing(72, 1024, "e4m3", "fp32", group=128, group_rows=128),
        packed.Packing(72, 1056, "e2m1", "e4m3", group=16, second="times"),
        packed.Packing(72, 1056, "e2m1", "e8m0", group=32),
        packed.Packing(40, 100, "plain", experts=4),
        packed.Packing(40, 96, "int4", "bf16", group=32, experts=4),
        packed.Packing(40, 96, "e4m3", "fp32", group_rows=0, experts=4),
    )
    stored, _ = random_weight(form, dtype=d.dtype)
    weight = replace(stored, tile=d.one_of(*form.tiles))
    factor = d.one_of(None, d.real(d.rows, 1, dtype=torch.float32))
    x, bias = d.real(d.rows, form.inputs), d.one_of(None, d.real(form.outputs))
    logits = d.real(d.rows, max(form.experts, 1), dtype=torch.float32)

    def results(rows: Sequence[int]) -> Sequence[Tensor]:
        if not form.experts:
            chosen = None if factor is None else factor[rows]
            return (packed.product(x[rows], weight, bias, d.run, chosen),)
        _, _, order, groups = layers.route(logits[rows], 1, d.run)
        return (packed.experts_product(x[rows], weight, order, groups, d.run),)

    return results


def recurrence(d: Drawn) -> Rows:
    """Gated DeltaNet, with rows that are replayed or not, and new sequences among others."""
    batch = d.rows = -(-d.rows // 16)
    keys, values, size, waiting = 1, 2, d.one_of(16, 32), 2
    count = 1 + int(d.random.integers(4))

    def real(*shape: int) -> Tensor:
        return d.real(batch, *shape, dtype=torch.float32)

    rows, total = waiting + count, values * size
    q, k, v = real(rows, keys * size) / size, real(rows, keys * size) / size, real(rows, total)
    gates = torch.cat((-real(count, values).abs(), real(count, values).sigmoid()), 2)
    before = torch.cat((-real(waiting, values).abs(), real(waiting, values).sigmoid()), 2)
    tensors = q, k, v, gates, real(values, size, size), before, d.whole(waiting + 1, batch)
    tensors += d.whole(count + 1, batch), (torch.arange(batch) % 2).float()

    def results(rows: Sequence[int]) -> Sequence[Tensor]:
        return layers.gated_delta_net(*(tensor[rows].contiguous() for tensor in tensors), run=d.run)

    return results


CASES: Sequence[Callable[[Drawn], Rows]] = (
    *(products, sampling, between_passes, heads, between_products, mxfp4_experts, recurrence),
)


def check(case: Callable[[Drawn], Rows], seed: int, most: int = 64) -> Drawn:
    """Draw a case, and compare each row in a pass of all and in one of half of them, and one row alone."""
    random = np.random.default_rng(seed)
    d = Drawn(random, 1 + int(random.integers(most)))
    results, count = case(d), d.rows
    every, other = (random.permutation(count).tolist() for _ in range(2))
    parts = [other[:1], *filter(None, (other[: -(-count // 2)], other[-(-count // 2) :]))]

    def found(rows: Sequence[int]) -> list[Tensor]:
        d.unrounded.kept.clear()
        return [*results(rows), *(sums.reshape(len(rows), -1) for sums in d.unrounded.kept)]

    whole = found(every)
    for rows in parts:
        for i, part in enumerate(found(rows)):
            for place, row in enumerate(rows):
                same = _bits(part[place]) == _bits(whole[i][every.index(row)])
                assert same, f"{case.__name__}, seed {seed}, result {i}, row {row}"
    d.compared = sum(map(len, parts))
    return d


def _bits(row: Tensor) -> bytes:
    return row.contiguous().view(torch.uint8).numpy().tobytes() if row.ndim else row.numpy().tobytes()


def main() -> None:
    wanted, compared, seed = int(sys.argv[1]), dict.fromkeys((case.__name__ for case in CASES), 0), 0
    while sum(compared.values()) < wanted:
        case = CASES[seed % len(CASES)]
        compared[case.__name__] += check(case, seed).compared
        seed += 1
        if not seed % 10:
            print(
                f"{sum(compared.values())} rows of {seed} draws: equal bits beside others: {compared}",
                flush=True,
            )


if __name__ == "__main__":
    main()
