"""Each kernel on this machine against its reference, on small random inputs: for `dflash-trt selftest`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from dflash_plugins import attention, launch, layers, moe, packed, reference, round_reference, rounds
from dflash_plugins import kernel_specs as uses
from dflash_trt.decoding.params import SamplingParams
from dflash_trt.decoding.sampling.sampler import sample
from dflash_trt.formats import numbers

_SAMPLED = (
    SamplingParams(),
    SamplingParams(temperature=0.9, top_k=20, top_p=0.95),
    SamplingParams(temperature=1.0, min_p=0.02),
)
# Experts, hidden and inner numbers, experts of a row, and rows.
_EXPERTS, _HIDDEN, _INNER, _CHOSEN, _ROWS = 4, 96, 32, 2, 5
# The error of a product's result, as a share of its largest number: one rounding to bfloat16.
_ROUNDING = 2**-8


Array = np.ndarray[Any, Any]


def problems(
    device: torch.device | str,
    run: launch.Run,
    *,
    vocab: int,
    taps: int,
    hidden: int,
    dtype: torch.dtype,
    block_size: int,
    in_plans: bool,
) -> dict[str, str]:
    """Run each operator. Returns a problem for each name, empty if its numbers are right.

    dtype: of features. block_size: the most nodes of a block. in_plans: also those operators whose kernels plans hold.
    """
    wrong = {
        "SampleRows": sampled(device, run, vocab),
        "BlockAcceptance": accepted(device, run),
        "Round": between_passes(device, run, vocab, taps * hidden, dtype, block_size),
    }
    if in_plans:
        wrong["HiddenStateTap"] = gathered(device, run, taps, hidden)
        wrong |= {"Attention": attended(device, run), "MoE": experts(device, run)}
        wrong["GatedDeltaNet"] = recurrent(device, run)
        wrong["layers"] = between_products(device, run)
        wrong["PackedLinear"] = packed_linear(device, run)
    return wrong


def gathered(device: torch.device | str, run: launch.Run, taps: int, hidden: int) -> str:
    """HiddenStateTap: the problem, or nothing."""
    rng = np.random.default_rng(0)
    rows = [torch.from_numpy(rng.standard_normal((6, hidden))).bfloat16() for _ in range(taps)]
    there = [row.to(device) for row in rows]
    got = launch.gather_taps(there, torch.bfloat16, torch.tensor([3, 1]).to(device), 3, run=run).cpu()
    expected = torch.cat(rows, dim=1)
    expected[[4, 5]] = 0
    return "" if torch.equal(got, expected) else "features are not the tapped rows side by side"


def sampled(device: torch.device | str, run: launch.Run, vocab: int) -> str:
    """SampleRows against the host's sampler."""
    rng = np.random.default_rng(0)
    logits = (2.5 * rng.standard_normal((len(_SAMPLED), 2, vocab))).astype(np.float32)
    positions = np.array([[5, 6]] * len(_SAMPLED))
    seeds = [7, 2**63 + 1, 3]
    tensors = launch.sampling_tensors(_SAMPLED, seeds, device)
    given = (torch.from_numpy(each).to(device) for each in (logits, positions))
    got = launch.sample_rows(next(given), tensors, next(given), run=run)[0].cpu().tolist()
    expected = [
        [sample(logits[i, r], params, seed, int(positions[i, r])) for r in range(2)]
        for i, (params, seed) in enumerate(zip(_SAMPLED, seeds, strict=True))
    ]
    return "" if got == expected else f"tokens {got}, but the host's are {expected}"


def accepted(device: torch.device | str, run: launch.Run) -> str:
    """BlockAcceptance on random chains."""
    tokens, chosen = np.random.default_rng(0).integers(0, 2, (2, 4, 7))
    order = np.tile(np.arange(7), (4, 1))
    given = [torch.from_numpy(np.ascontiguousarray(each)).to(device) for each in (tokens, order, chosen)]
    got = launch.accept_block(*given, run=run).accepted.cpu().tolist()
    pairs = zip(tokens.tolist(), chosen.tolist(), strict=True)
    expected = [len(reference.accept_block(*each)) - 1 for each in pairs]
    return "" if got == expected else f"{got} drafts accepted, expected {expected}"


def attended(device: torch.device | str, run: launch.Run) -> str:
    """A pass of two sequences: a tree of rows with sinks and a window, over slots of which the last ones are unused."""
    rng = np.random.default_rng(0)
    batch, heads, kv_heads, count, size, capacity = 2, 4, 2, 5, 64, 600
    start = np.array([capacity - count, 40])
    visible = np.tril(rng.integers(0, 2, (batch, count, count)) | np.eye(count, dtype=np.int64))
    last = start[:, None] + np.arange(count)
    sizes = {"q": (heads, count, size), "k_cache": (kv_heads, capacity, size)}
    sizes["v_cache"] = sizes["k_cache"]
    drawn = {n: torch.from_numpy(rng.standard_normal((batch, *s))).bfloat16() for n, s in sizes.items()}
    drawn["sinks"] = torch.from_numpy(rng.standard_normal(heads)).bfloat16()
    for name in ("k_cache", "v_cache"):
        drawn[name][1, :, start[1] + count :] = float("nan")
    where = {"first": last - 299, "last": last, "start": start, "visible": visible.astype(np.int32)}
    there: dict[str, Any] = {
        n: t.to(device) for n, t in (drawn | {n: torch.from_numpy(a) for n, a in where.items()}).items()
    }
    expected = reference.attention(**{n: t.double().numpy() for n, t in drawn.items()}, **where)
    largest = np.abs(expected).max()
    for tile in uses.attention_tiles(size)[:2]:
        got = attention.attention(**there, tile=tile, run=run).cpu().double().numpy()
        error = float(np.abs(got - expected).max() / largest)
        if not error <= 4 * _ROUNDING:
            return f"differs by {error:.3f} of the largest number"
    return ""


def between_passes(
    device: torch.device | str,
    run: launch.Run,
    vocab: int,
    features: int,
    dtype: torch.dtype,
    block_size: int,
) -> str:
    """Chains of two sequences with rows that are not finite, features that find no room, and ones that find it."""
    rng, nodes = np.random.default_rng(0), min(3, block_size)
    logits = rng.standard_normal((2, nodes, vocab)).astype(np.float32)
    logits[0, nodes // 2, -1], logits[1, -1, :], logits[1, 0, 0] = np.nan, -np.inf, -np.inf
    drawn = {"features": (2, nodes, features), "unread": (3, 4, features)}
    given = {n: torch.from_numpy(rng.standard_normal(s)).to(dtype) for n, s in drawn.items()}
    given |= {"logits": torch.from_numpy(logits), "places": torch.tensor([0, 3])}
    whole = {"block": (2, nodes), "drafts": (2, nodes - 1, 2)}
    blocks = {n: torch.from_numpy(rng.integers(0, vocab, s)) for n, s in whole.items()}
    for written in ("tokens", "rows"):
        blocks[written] = torch.zeros((2, nodes), dtype=torch.int64)
    given["finite"] = torch.zeros((2, nodes), dtype=torch.int32)
    counters = torch.zeros(2 * nodes, dtype=torch.int32).to(device)
    there, filled = ({n: t.clone().to(device) for n, t in each.items()} for each in (given, blocks))
    drafted = max(1, nodes - 1)  # the last column is a copy
    rounds.fill_tokens(**filled, drafted=drafted, most=block_size, run=run)
    rounds.end_round(**there, counters=counters, run=run)
    round_reference.fill_tokens(**blocks, drafted=drafted)
    round_reference.end_round(**given)
    pairs = {"tokens": (filled, blocks), "rows": (filled, blocks), "finite": (there, given)}
    for name, (got, expected) in (pairs | {"unread": (there, given)}).items():
        if not torch.equal(got[name].cpu(), expected[name]):
            return f"`{name}` differs from that of torch's operators"
    return "" if not counters.cpu().any() else "the counters are not zero again"


def between_products(device: torch.device | str, run: launch.Run) -> str:
    """The kernels between a layer's products: rows of two sequences with four query heads and two key heads."""
    rng, batch, count, size, kv_heads, heads, capacity = np.random.default_rng(0), 2, 3, 64, 2, 4, 9

    def numbers(*shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.standard_normal(shape)).bfloat16()

    def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * weight.double()

    rows = numbers(batch * count, (heads + 2 * kv_heads) * size)
    norms, angles, start = numbers(2, size), numbers(batch * count, size // 2).double(), [4, 0]
    caches, weight, router = (
        numbers(2, batch, kv_heads, capacity, size),
        numbers(rows.shape[1]),
        numbers(5, rows.shape[1]),
    )
    turns = [angles.cos().bfloat16(), angles.sin().bfloat16()]
    by_head = rows.double().reshape(batch, count, -1, size).transpose(1, 2)
    q, k, v = torch.split(by_head, [heads, kv_heads, kv_heads], 1)
    cos, sin = (each.double().reshape(batch, 1, count, -1) for each in turns)
    expected = dict[str, torch.Tensor]()
    for name, x, norm in (("q", q, norms[0]), ("k", k, norms[1])):
        first, second = normed(x, norm).chunk(2, -1)
        expected[name] = torch.cat([first * cos - second * sin, first * sin + second * cos], -1)
    written = caches.double()
    for b, row in enumerate(start):
        written[:, b, :, row : row + count] = torch.stack([expected["k"][b], v[b]])
    total = (rows.double() + rows.double()).bfloat16().double()
    inner = rows.shape[1] // 2
    expected |= {
        "caches": written,
        "total": total,
        "normed": normed(total, weight),
        "logits": rows.double() @ router.double().T,
    }
    expected["gated"] = torch.nn.functional.silu(rows[:, :inner].double()) * rows[:, inner:].double()
    x, q_norm, k_norm, c, s, there, w = (t.to(device) for t in (rows, *norms, *turns, caches, weight))
    k_cache, v_cache = (part.contiguous() for part in there)
    got = dict[str, torch.Tensor | None]()
    got["q"] = layers.place_heads(
        *(x, count, size, heads),
        q_norm=q_norm,
        k_norm=k_norm,
        cos=c,
        sin=s,
        start=torch.tensor(start).to(device),
        k_cache=k_cache,
        v_cache=v_cache,
        epsilon=1e-6,
        run=run,
    )
    got["caches"] = torch.stack([k_cache, v_cache])
    got["total"], got["normed"] = layers.add_norm(x, x, w, 1e-6, run=run)
    got["gated"] = layers.gate(x, run=run)
    got["logits"] = layers.router(x, router.float().to(device), None, run=run)
    for name, made in got.items():
        want = expected[name]
        error = (
            float((made.cpu().double() - want).abs().max() / want.abs().max()) if made is not None else 1.0
        )
        if not error <= 2 * _ROUNDING:
            return f"`{name}` differs by {error:.3f} of the largest number"
    return ""


def recurrent(device: torch.device | str, run: launch.Run) -> str:
    """GatedDeltaNet: nine rows in one pass, and the same rows with four of them replayed, which changes no bit."""
    rng, rows, again, heads, size = np.random.default_rng(0), 9, 4, 2, 32

    def numbers(*shape: int) -> Array:
        return rng.standard_normal((2, *shape)).astype(np.float32)

    q, k = (numbers(rows, size) / np.float32(size**0.5) for _ in "qk")
    v, state = numbers(rows, heads * size), numbers(heads, size, size)
    decay, beta = -np.abs(numbers(rows, heads)), rng.random((2, rows, heads), np.float32)
    gates = np.concatenate([decay, beta], axis=2)
    results = []
    for replayed in (0, again):
        before = np.zeros((2, again - replayed, 1), np.float32)
        given = {
            n: np.concatenate([before.repeat(x.shape[2], 2), x], 1)
            for n, x in zip("qkv", (q, k, v), strict=True)
        }
        given |= {"gates": gates[:, replayed:], "state": state, "pending_gates": gates[:, :again]}
        given |= {n: np.full(2, count) for n, count in (("replayed", replayed), ("certain", rows - replayed))}
        given["begun"] = np.ones(2, np.float32)
        there = {n: torch.from_numpy(np.ascontiguousarray(x)).to(device) for n, x in given.items()}
        made = launch.gated_delta_net(**there, run=run)
        results.append([each.cpu().numpy() for each in made[:2]])
        for got, want in zip(results[-1], reference.gated_delta_net(**given)[:2], strict=True):
            error = float(np.abs(got - want).max() / np.abs(want).max())
            if not error <= 1e-5:
                return f"differs by {error:.6f} of the largest number"
    (y, after), (y_again, after_again) = results
    same = np.array_equal(y[:, again:], y_again) and np.array_equal(after, after_again)
    return "" if same else "rows that are replayed get other bits"


def experts(device: torch.device | str, run: launch.Run) -> str:
    """MoE against its reference."""
    rng = np.random.default_rng(0)

    def matrix(out: int, columns: int) -> tuple[Array, Array, Array]:
        shape = _EXPERTS, out, columns // 32
        blocks = rng.integers(0, 256, (*shape, 16), dtype=np.uint8)
        scales = rng.integers(118, 125, shape, dtype=np.uint8)
        return blocks, scales, (rng.integers(-8, 8, (_EXPERTS, out)) / 8).astype(np.float32)

    both = matrix(2 * _INNER, _HIDDEN), matrix(_HIDDEN, _INNER)
    there = [torch.from_numpy(part).to(device) for each in both for part in each]
    layer = moe.PackedExperts(
        *(there[0], there[1], there[2].bfloat16(), there[3], there[4], there[5].bfloat16()),
        k=_CHOSEN,
        alpha=1.702,
        beta=1.0,
        limit=7.0,
    )
    x = torch.from_numpy(rng.standard_normal((_ROWS, _HIDDEN)) / 8).bfloat16()
    router = rng.standard_normal((_ROWS, _EXPERTS)).astype(np.float32)
    got = moe.moe(x.to(device), torch.from_numpy(router).to(device), layer, run=run).cpu().double().numpy()
    expected = reference.moe(x.double().numpy(), router, *both, k=_CHOSEN, alpha=1.702, beta=1.0, limit=7.0)
    error = float(np.abs(got - expected).max() / np.abs(expected).max())
    return "" if error <= 2 * _ROUNDING else f"differs by {error:.3f} of the largest number"


# One for each kind of codes and of scales: outputs, inputs, and the rest of `Packing`.
_FORMS = (
    packed.Packing(48, 640, "int4", "bf16", group=128),
    packed.Packing(48, 640, "int4", "fp32", group=32, zeros=True),
    packed.Packing(48, 640, "e2m1", "e4m3", group=16, second="over"),
    packed.Packing(48, 640, "e2m1", "e8m0", group=32),
    packed.Packing(48, 640, "e4m3", "fp32"),
    packed.Packing(48, 640, "e4m3", "bf16", group=128, group_rows=128),
    packed.Packing(48, 640, "int8", "fp16"),
)


def packed_linear(device: torch.device | str, run: launch.Run) -> str:
    """Products with weights as they are stored: the weights, rows of passes of two lengths, and their sums."""
    for form in _FORMS:
        there, wide = random_weight(form, device)
        for dtype in (torch.bfloat16, torch.float16):
            tile = packed.TILES[form.in_word][0]
            if not torch.equal(packed.widen(there, dtype, tile, run).cpu(), wide.to(dtype)):
                return f"a weight of {form.codes} in groups of {form.group} has other numbers in {dtype}"
            x = torch.randn(33, form.inputs, generator=torch.Generator().manual_seed(0)).to(dtype)
            exact = x.double() @ wide.to(dtype).double().T
            one, several = (packed.product(x[:n].to(device), there, None, tile, run).cpu() for n in (1, 33))
            error = float((several.double() - exact).abs().max() / exact.abs().max())
            if not error <= _ROUNDING:
                return f"{form.codes} in groups of {form.group} differs by {error:.3f} of the largest number"
            if not torch.equal(one, several[:1]):
                return f"{form.codes} in groups of {form.group}: a row depends on the number of rows"
    return ""


def random_weight(
    form: packed.Packing, device: torch.device | str = "cpu"
) -> tuple[packed.PackedWeight, torch.Tensor]:
    """A weight, and its numbers in float32 by NumPy on the host, as dflash_trt/formats have them."""
    rng = np.random.default_rng(0)
    groups, rows = -(-form.inputs // (form.group or form.inputs)), -(-form.outputs // form.group_rows)
    codes = rng.integers(0, 256, (form.outputs, 2 * form.inputs // form.in_word), dtype=np.uint8)
    codes[(codes & 127) == 127] = 0  # NaN in E4M3
    scales: Array = rng.random((rows, groups), np.float32) * np.float32(0.01)
    if form.scales == "e8m0":
        stored = torch.from_numpy(rng.integers(115, 122, (rows, groups), dtype=np.uint8))
        scales = numbers.E8M0[stored.numpy()]
    elif form.scales == "e4m3":
        stored = torch.from_numpy(numbers.encode_e4m3(scales * 10_000).view(np.uint8))
        scales = stored.numpy().view(numbers.E4M3).astype(np.float32)
    else:
        stored = torch.from_numpy(scales).to(launch.TYPES[form.scales])
        scales = stored.float().numpy()
    second = np.float32({"over": 437.5, "times": 1 / 437.5}[form.second]) if form.second else None
    factors = scales if second is None else scales / second if form.second == "over" else scales * second
    terms = rng.standard_normal((form.outputs, groups)).astype(np.float32) / 100 if form.zeros else None
    nibbles = np.stack((codes & 15, codes >> 4), -1).reshape(form.outputs, -1)
    if form.codes in ("int4", "e2m1"):
        values = numbers.E2M1[nibbles] if form.codes == "e2m1" else ((nibbles ^ 8).astype(np.float32) - 8)
    else:
        values = codes.view(np.int8 if form.codes == "int8" else numbers.E4M3).astype(np.float32)
    factors, each = factors.repeat(form.group_rows, 0)[: form.outputs], form.inputs // groups
    wide = values * factors.repeat(each, 1) + (0 if terms is None else terms.repeat(each, 1))
    parts: dict[str, Any] = {"codes": torch.from_numpy(codes), "scales": stored}
    parts |= {
        "second": second if second is None else torch.tensor([second]),
        "counters": torch.zeros(1024).int(),
    }
    parts["zeros"] = None if terms is None else torch.from_numpy(terms)
    parts = {name: part if part is None else part.to(device) for name, part in parts.items()}
    return packed.PackedWeight(form, **parts), torch.from_numpy(wide)
