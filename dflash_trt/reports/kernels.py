"""Each kernel on this machine against the host or torch's operators, on small random inputs: for `selftest`.

Products with weights as they are stored are compared as a graph is loaded (packed.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from dflash_plugins import launch
from dflash_plugins import packed as products
from torch import Tensor

from dflash_trt.decoding.arrays import Arrays
from dflash_trt.decoding.output import StopChecker
from dflash_trt.decoding.params import SamplingParams
from dflash_trt.decoding.request import Request
from dflash_trt.decoding.sampling.history import History
from dflash_trt.decoding.sampling.sampler import sample
from dflash_trt.engines.device.adjusting import Adjusting
from dflash_trt.engines.device.arrays import DeviceArrays
from dflash_trt.engines.device.kernels import compiles_here, kernels_here
from dflash_trt.engines.torch import layers
from dflash_trt.engines.torch.packed import linear, product_heads
from dflash_trt.errors import DFlashError
from dflash_trt.reports.environment import versions_of

Device = torch.device | str
# An operator of layers.py, its attributes and its inputs.
Case = tuple[Callable[..., Any], Mapping[str, Any], Sequence[Any]]
_SAMPLED = (
    SamplingParams(),
    SamplingParams(temperature=0.9, top_k=20, top_p=0.95),
    SamplingParams(temperature=1.0, min_p=0.02),
)
# The error of a result, as a share of its largest number: two roundings to bfloat16.
_MOST = 2**-7

_SIZES = {"vocab": 151_936, "features": 5 * 4096}  # those of Qwen3-8B
_SMALL = {"vocab": 300, "features": 128}


def check_kernels(found: Callable[[str, str, str], None] = lambda *_: None) -> dict[str, Any]:
    """Compare each kernel with its reference on torch's GPU, or on the CPU in Triton's interpreter.

    Returns `gpu` (its name; None in the interpreter), `versions` and `problems` by dtype and operator, empty where its
    numbers are right. `found` is told a dtype, an operator and its problem as soon as it is known.

    Raises DFlashError where torch sees no GPU, and kernels are not interpreted.
    """
    on_gpu = torch.cuda.is_available()
    if not on_gpu and os.environ.get("TRITON_INTERPRET") != "1":
        raise DFlashError(
            f"torch {torch.__version__} sees no GPU here; see what nvidia-smi and `dflash-trt doctor` say"
        )
    device, sizes = ("cuda", _SIZES) if on_gpu else ("cpu", _SMALL)
    by_dtype = {}
    # The interpreter rounds BF16 in its own way.
    for dtype in (torch.bfloat16, torch.float16) if on_gpu else (torch.float16,):
        name, of_dtype = str(dtype).removeprefix("torch."), dict[str, str]()
        try:
            run = kernels_here({}) if on_gpu else launch.by_triton
            # The interpreter lacks the assembly of the kernels in plans.
            asked: dict[str, Any] = {**sizes, "dtype": dtype, "block_size": 8, "of_layers": on_gpu}
            for operator, problem in problems(device, run, **asked):
                of_dtype[operator] = problem
                found(name, operator, problem)
        except Exception as error:  # of the compiler or the driver, or without Triton
            of_dtype["all"] = f"{type(error).__name__}: {error}"
        by_dtype[name] = of_dtype
    return {
        "gpu": torch.cuda.get_device_name() if on_gpu else None,
        "versions": versions_of(("torch", "triton")),
        "problems": by_dtype,
    }


def problems_of(arrays: Arrays, vocab: int) -> dict[str, str]:
    """A problem for each operator that has one, on the GPU and in the sizes of an open pair. Operators that plans hold
    are compiled again, which needs Triton; without it they are left out.
    """
    waiting, on_device = arrays.unread_features_of(0, 0, 1), cast(DeviceArrays, arrays)
    assert on_device.run is not None
    with arrays.stream():
        found = problems(
            waiting.device,
            on_device.run,
            vocab=vocab,
            features=waiting.shape[2],
            dtype=waiting.dtype,
            block_size=arrays.most_nodes,
            of_layers=compiles_here(),
        )
        return {name: problem for name, problem in found if problem}


def problems(
    device: Device,
    run: launch.Run,
    *,
    vocab: int,
    features: int,
    dtype: torch.dtype,
    block_size: int,
    of_layers: bool,
) -> Iterator[tuple[str, str]]:
    """Run each operator. Gives each name with its problem, empty if its numbers are right, as it is found.

    features, dtype: numbers of a token for the drafter, and their type. block_size: the most nodes of a block.
    of_layers: also those operators that are compiled for this GPU, as they are launched.
    """
    yield "SampleRows", _sampled(device, run, vocab)
    yield "AdjustRows", _adjusted(device, run, vocab)
    yield "BlockAcceptance", _accepted(device, run)
    yield "Round", _between_passes(device, run, vocab, features, dtype, block_size)
    if of_layers:
        for name, case in _cases():
            yield name, _differs(case, device)
        yield "GatedDeltaNet", _recurrent(device)
        yield "ProductHeads", _placed(device, dtype)


def _sampled(device: Device, run: launch.Run, vocab: int) -> str:
    """SampleRows against the host's sampler."""
    rng = np.random.default_rng(0)
    logits = (2.5 * rng.standard_normal((len(_SAMPLED), 2, vocab))).astype(np.float32)
    positions = np.array([[5, 6]] * len(_SAMPLED))
    seeds = [7, 2**63 + 1, 3]
    tensors = launch.sampling_tensors(_SAMPLED, seeds, device)
    there, at = (torch.from_numpy(array).to(device) for array in (logits, positions))
    got = launch.sample_rows(there, tensors, at, run=run)[0].cpu().tolist()
    expected = [
        [sample(logits[i, r], params, seed, int(positions[i, r])) for r in range(2)]
        for i, (params, seed) in enumerate(zip(_SAMPLED, seeds, strict=True))
    ]
    return "" if got == expected else f"tokens {got}, but the host's are {expected}"


def _adjusted(device: Device, run: launch.Run, vocab: int) -> str:
    """Rows of a chain whose second draft would complete a word, against the host's."""
    params = SamplingParams(
        repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.5, logit_bias={2: 1.5}
    )
    history, tokens = History(params, [3, 4], [[7, 8, 9], [6]]), np.array([[5, 7, 8]])
    asked = Request([3, 4], params, 0, cast(StopChecker, None), history, 0.0, output=[8, 7, 5])
    logits = np.random.default_rng(0).standard_normal((1, 3, vocab)).astype(np.float32)
    device_rows = Adjusting(1, 16, vocab, 3, torch.device(device))
    device_rows.start([asked], [True])
    numbers = logits, tokens, np.array([4]), np.array([[5, 6, 7]])
    rows, chain, start, at = (torch.from_numpy(array.copy()).to(device) for array in numbers)
    device_rows.apply(rows, chain, start, at, None, run)
    for token in asked.output[:-1]:
        history.add(token)
    for row, token in enumerate(tokens[0].tolist()):
        history.add(token)
        expected = history.adjust(logits[0, row])
        if differ := np.flatnonzero(rows[0, row].cpu().numpy() != expected).tolist():
            return f"row {row} differs from the host's at tokens {differ[:5]}"
    return ""


def _accepted(device: Device, run: launch.Run) -> str:
    """BlockAcceptance on random chains."""
    tokens, chosen = np.random.default_rng(0).integers(0, 2, (2, 4, 7))
    order = np.tile(np.arange(7), (4, 1))
    inputs = [torch.from_numpy(np.ascontiguousarray(array)).to(device) for array in (tokens, order, chosen)]
    got = launch.accept_block(*inputs, run=run).accepted.cpu().tolist()
    expected = np.cumprod(tokens[:, 1:] == chosen[:, :-1], axis=1).sum(axis=1).tolist()
    return "" if got == expected else f"{got} drafts accepted, expected {expected}"


def _between_passes(
    device: Device, run: launch.Run, vocab: int, features: int, dtype: torch.dtype, block_size: int
) -> str:
    """Chains of two sequences with rows that are not finite, features that find no room, and ones that find it."""
    rng, nodes = np.random.default_rng(0), min(3, block_size)
    logits = rng.standard_normal((2, nodes, vocab)).astype(np.float32)
    logits[0, nodes // 2, -1], logits[1, -1, :], logits[1, 0, 0] = np.nan, -np.inf, -np.inf
    drawn = {"features": (2, nodes, features), "unread": (3, 4, features)}
    memory = {n: torch.from_numpy(rng.standard_normal(s)).to(dtype) for n, s in drawn.items()}
    memory |= {"logits": torch.from_numpy(logits), "places": torch.tensor([0, 3])}
    memory["finite"] = torch.zeros((2, nodes), dtype=torch.int32)
    memory["counters"] = torch.zeros(2 * nodes, dtype=torch.int32)
    whole = {"block": (2, nodes), "drafts": (2, nodes - 1, 2), "tokens": (2, nodes), "rows": (2, nodes)}
    blocks = {n: torch.from_numpy(rng.integers(0, vocab, s)) for n, s in whole.items()}
    there, filled = ({n: t.clone().to(device) for n, t in tensors.items()} for tensors in (memory, blocks))
    drafted = max(1, nodes - 1)  # the last column is a copy
    for tokens, round_, by in ((filled, there, run), (blocks, memory, None)):
        launch.fill_tokens(**tokens, drafted=drafted, most=block_size, run=by)
        launch.end_round(**round_, run=by)
    for got, expected in ((filled, blocks), (there, memory)):
        for name in ("tokens", "rows", "finite", "unread", "counters"):
            if name in got and not torch.equal(got[name].cpu(), expected[name]):
                return f"`{name}` differs from that of torch's operators"
    return ""


def _cases() -> Iterator[tuple[str, Case]]:
    """In bfloat16: two sequences in a tree of rows with sinks and a window; experts; rows with four query heads and two
    key heads; what else lies between products; and logits.
    """
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    count, size, capacity = 5, 64, 600
    start = torch.tensor([capacity - count, 40])
    last = start[:, None] + torch.arange(count)
    visible = (integers(0, 2, 2, count, count) | torch.eye(count, dtype=torch.int64)).tril().int()
    caches = drawn(2, 2, capacity, size), drawn(2, 2, capacity, size)
    seen = last - 299, last, start, visible, drawn(4)
    yield "Attention", (layers.attend, {"scale": size**-0.5}, [drawn(2, 4, count, size), *caches, *seen])
    packed = [layers.in_bytes(cache) for cache in caches]
    yield "Attention, FP8", (layers.attend, {"scale": size**-0.5}, [drawn(2, 4, count, size), *packed, *seen])

    def matrix(out: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
        blocks = integers(0, 256, 4, out, columns // 32, 16).to(torch.uint8)
        return blocks, integers(118, 125, 4, out, columns // 32).to(torch.uint8), drawn(4, out)

    constants = {"k": 2, "alpha": 1.702, "beta": 1.0, "limit": 7.0}
    x, router = drawn(5, 96) / 8, drawn(5, 4, dtype=torch.float32)
    yield "MoE", (layers.mxfp4_experts, constants, [x, router, *matrix(64, 96), *matrix(96, 32)])

    expert = integers(0, 4, 12)
    counts = torch.bincount(expert, minlength=4)
    groups = torch.stack((torch.arange(4), counts.cumsum(0) - counts, counts), 1).int()
    inputs = [drawn(12, 96), drawn(4, 72, 96), expert, expert.argsort(stable=True).int(), groups]
    yield "GroupedProduct", (layers.grouped_product, {}, inputs)

    x, angles = drawn(6, 8 * size), drawn(2, 3, size // 2)
    turns = drawn(size), drawn(size), None, angles.cos(), angles.sin()
    caches = drawn(2, 2, 9, size), drawn(2, 2, 9, size)
    attributes = {"kinds": "qkv", "heads": [4, 2, 2], "size": size, "epsilon": 1e-6}
    yield (
        "PlaceHeads",
        (layers.place_heads, attributes, [x, [2, 3], *turns, torch.tensor([4, 0]), *caches]),
    )
    # Codes are the same if nothing before them is rounded.
    packed = [layers.in_bytes(torch.zeros_like(cache)) for cache in caches]
    placed: list[Any] = [x, [2, 3], *[None] * 5, torch.tensor([4, 0]), *packed]
    yield "PlaceHeads, FP8", (layers.place_heads, attributes, placed)
    for name, y in (("AddNorm", x), ("AddNorm, experts", drawn(6, 8, 8 * size, dtype=torch.float32))):
        yield name, (layers.add_norm, {"epsilon": 1e-6}, [x, y, drawn(8 * size)])
    yield "Gate", (layers.gate, {}, [x, [4 * size, 4 * size]])
    for scheme, scale in (("fp8", 1 / 448), ("nvfp4", 1 / 2688)):
        fields = {"scheme": scheme, "by_row": 1}
        yield f"QuantizedRows {scheme}", (layers.quantized_rows, fields, [x, torch.tensor([scale])])
    yield "Router", (layers.router, {}, [x, drawn(5, 8 * size, dtype=torch.float32)])
    inputs = [x, drawn(6, 8 * size), drawn(8 * size), torch.zeros(1, dtype=torch.int32)]
    attributes = {"epsilon": 1e-6, "k": 2, "arranged": True}
    yield "NormRouter", (_routed, attributes, [*inputs, drawn(5, 8 * size, dtype=torch.float32) / 32])
    logits = drawn(3, 9001)
    logits[1, [100, 8000]] = 9  # the first of two is the best
    yield "BestToken", (layers.best_token, {}, [logits])


def _routed(a: Mapping[str, Any], *inputs: Tensor) -> list[Tensor]:
    *sums, logits = layers.norm_router(a, *inputs)
    return [*sums, *layers.route(a, logits)[:2]]


def _differs(case: Case, device: Device) -> str:
    """How an operator's results on this device differ from those in float64 on the host."""
    operator, attributes, inputs = case

    def results(prepared: Callable[[Tensor], Tensor]) -> list[Tensor]:
        found = operator(attributes, *(prepared(x) if isinstance(x, Tensor) else x for x in inputs))
        return list(found) if isinstance(found, tuple | list) else [found]

    exact = results(lambda x: x.double() if x.is_floating_point() else x)
    for got, want in zip(results(lambda x: x.clone().to(device)), exact, strict=True):
        error = float((got.cpu().double() - want).abs().max() / want.abs().max())
        if not error <= _MOST * want.is_floating_point():
            return f"differs by {error:.3f} of the largest number"
    return ""


def _recurrent(device: Device) -> str:
    """GatedDeltaNet: nine rows in one pass, and the same rows with four of them replayed, which changes no bit."""
    generator, rows, again, heads, size = torch.Generator().manual_seed(0), 9, 4, 2, 32

    def drawn(*shape: int) -> Tensor:
        return torch.randn((2, *shape), generator=generator)

    inputs = {
        "q": drawn(rows, size) / size**0.5,
        "k": drawn(rows, size) / size**0.5,
        "v": drawn(rows, heads * size),
    }
    gates = torch.cat((-drawn(rows, heads).abs(), drawn(rows, heads).sigmoid()), 2)
    state, results = drawn(heads, size, size), []
    for replayed in (0, again):
        q, k, v = (torch.cat((x.new_zeros(2, again - replayed, x.shape[2]), x), 1) for x in inputs.values())
        counts = torch.full((2,), replayed), torch.full((2,), rows - replayed)
        tensors = [q, k, v, gates[:, replayed:], state, gates[:, :again], *counts, torch.ones(2)]
        if problem := _differs((layers.gated_delta_net, {}, tensors), device):
            return problem
        results.append(layers.gated_delta_net({}, *(x.to(device) for x in tensors)))
    (y, after, _), (y_again, after_again, _) = results
    same = torch.equal(y[:, again:], y_again) and torch.equal(after, after_again)
    return "" if same else "rows that are replayed get other bits"


def _placed(device: Device, dtype: torch.dtype) -> str:
    """ProductHeads: 40 rows of two sequences, of which the heads of several programs are placed by one."""
    generator, size, inputs, count = torch.Generator().manual_seed(0), 128, 1100, 20

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    x, weight, bias, norms = (
        drawn(2 * count, inputs),
        drawn(8 * size, inputs) / 32,
        drawn(8 * size),
        drawn(2, size),
    )
    angles, start, packed = (
        drawn(2, count, size // 2),
        torch.tensor([4, 0], device=device),
        products.plain(weight),
    )
    attributes = {"kinds": "qkv", "heads": [4, 2, 2], "size": size, "epsilon": 1e-6}
    results = []
    for joined in (True, False):
        heads = [2, count], *norms, None, angles.cos(), angles.sin(), start, *drawn(2, 2, 2, 30, size).mul(0)
        given = attributes, x, packed, bias, None
        if joined:
            results.append(product_heads(*given, *heads))
        else:
            results.append(layers.place_heads(attributes, linear(*given[:4]), *heads))
    same = all(torch.equal(*both) for both in zip(*results, strict=True))
    return "" if same else "heads get other bits than from two kernels"
