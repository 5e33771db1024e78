"""Correctness and bandwidth of the plugins' kernels at the shapes of gpt-oss-120b and Qwen3-8B.

    python -m build_scripts.bench.kernels             # on a GPU: time, bytes per second, share of the floor
    python -m build_scripts.bench.kernels --check     # results only
    TRITON_INTERPRET=1 python -m build_scripts.bench.kernels --check    # without a GPU, on small shapes

Each line times one operator, many runs of its kernels in one CUDA graph, and the equivalent code in torch. The floor
is the time to move all necessary bytes at the speed of a large copy on the same GPU. Inputs and outputs are moved
once; only experts and slots in use count. Logits rotate over more copies than a cache holds, and experts are larger
than a cache. Taps and tokens are in the cache, as after the pass that wrote them. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import triton
from dflash_plugins import attention, launch, moe, reference
from dflash_plugins import kernel_specs as uses

from dflash_trt.decoding.params import SamplingParams
from dflash_trt.decoding.sampling.sampler import sample
from dflash_trt.formats.numbers import BYTE_TO_PAIR

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
if not GPU:  # inline assembly and products of bfloat16 in Triton's interpreter
    importlib.import_module("tests.doubles.triton_interpreter")


@dataclass(frozen=True)
class Shapes:
    """The inputs of each operator when a target verifies one block."""

    name: str
    vocab: int
    hidden: int
    taps: int
    rows: tuple[int, ...]  # rows verified at a time: one block, several
    heads: tuple[int, int, int]  # query heads, key heads, numbers of a head
    slots: int = 4096  # of each cache, all in use
    experts: int = 0
    inner: int = 0


MODELS: tuple[Shapes, ...] = (
    Shapes(
        *("gpt-oss-120b", 201_088, 2880, 5, (10, 16, 64), (64, 8, 64)),
        experts=128,
        inner=2880,
    ),
    Shapes("Qwen3-8B", vocab=151_936, hidden=4096, taps=5, rows=(16,), heads=(32, 8, 128)),
)
SMALL = {
    "vocab": 5003,
    "hidden": 160,
    "inner": 96,
    "experts": 8,
    "rows": (5,),
    "heads": (4, 2, 32),
    "slots": 300,
}


@dataclass(frozen=True)
class Case:
    """One operator on given tensors. `wrong` describes errors of the result; empty if there are none."""

    name: str
    rows: int
    bytes: int
    run: Callable[[], Any]
    torch: Callable[[], Any]
    wrong: Callable[[Any], str]


def tap_case(shapes: Shapes, rows: int) -> Case:
    taps = [torch.randn(rows, shapes.hidden, device=DEVICE).bfloat16() for _ in range(shapes.taps)]
    expected = torch.cat(taps, dim=1)
    return Case(
        "HiddenStateTap",
        rows,
        bytes=2 * expected.numel() * 2,
        run=lambda: launch.gather_taps(taps, torch.bfloat16),
        torch=lambda: torch.cat(taps, dim=1),
        wrong=lambda out: "" if torch.equal(out, expected) else "features differ from torch.cat",
    )


SAMPLED = {
    "greedy": SamplingParams(),
    "temperature 1": SamplingParams(temperature=1.0),
    "top-k 20, top-p 0.95": SamplingParams(temperature=0.6, top_k=20, top_p=0.95),
    "top-p 0.95": SamplingParams(temperature=1.0, top_p=0.95),
}


def sample_case(shapes: Shapes, rows: int, kind: str) -> Case:
    params = SAMPLED[kind]
    generator = torch.Generator(DEVICE).manual_seed(0)
    # As peaked as a language model's: a few tokens far above the rest.
    logits = 2.5 * torch.randn(1, rows, shapes.vocab, device=DEVICE, generator=generator)
    logits[..., torch.randint(shapes.vocab, (8,), device=DEVICE, generator=generator)] += 12
    copies = itertools.cycle([logits.clone() for _ in range((1 << 28) // logits.nbytes if GPU else 1)])
    positions = torch.arange(rows, device=DEVICE)[None]
    tensors = launch.sampling_tensors([params], [7], DEVICE)

    def wrong(out: tuple[torch.Tensor, torch.Tensor]) -> str:
        host = logits[0].cpu().numpy()
        expected = [sample(host[r], params, 7, r) for r in range(rows)]
        found = out[0][0].tolist()
        return "" if found == expected else f"tokens {found} instead of the host's {expected}"

    def plain() -> torch.Tensor:
        """torch's usual way: filter by sorting, softmax, multinomial; and a log-softmax."""
        x, logprobs = logits[0], torch.log_softmax(logits[0], dim=-1)
        if params.temperature == 0:
            return logprobs.gather(1, x.argmax(dim=-1, keepdim=True))
        x = x / params.temperature
        if params.top_k or params.top_p < 1:
            x, order = x.sort(dim=-1, descending=True)
            if params.top_k:
                x[:, params.top_k :] = -torch.inf
            p = x.softmax(dim=-1)
            x = x.masked_fill(p.cumsum(dim=-1) - p >= params.top_p, -torch.inf)
            return logprobs.gather(1, order.gather(1, torch.multinomial(x.softmax(dim=-1), 1)))
        return logprobs.gather(1, torch.multinomial(x.softmax(dim=-1), 1))

    return Case(
        f"SampleRows, {kind}",
        rows,
        bytes=logits.numel() * 4,
        run=lambda: launch.sample_rows(next(copies), tensors, positions),
        torch=plain,
        wrong=wrong,
    )


def acceptance_case(shapes: Shapes, rows: int) -> Case:
    rng = np.random.default_rng(rows)
    tokens, sampled = (torch.from_numpy(rng.integers(0, 2, (8, rows))).to(DEVICE) for _ in range(2))
    order = torch.arange(rows, device=DEVICE).repeat(8, 1)
    start = torch.zeros(8, dtype=torch.int64, device=DEVICE)
    expected = [
        len(reference.accept_block(t, s)) - 1 for t, s in zip(tokens.tolist(), sampled.tolist(), strict=True)
    ]

    def plain() -> torch.Tensor:
        right = (tokens[:, 1:] == sampled[:, :-1]).long().cumprod(dim=1).sum(dim=1, keepdim=True)
        block = torch.full_like(tokens, 0)
        block[:, :1] = sampled.gather(1, right)
        return block + start[:, None] + right

    return Case(
        "BlockAcceptance, 8 sequences",
        rows,
        bytes=8 * rows * 8 * 6,
        run=lambda: launch.accept_block(tokens, order, sampled, start, block_size=rows, mask_token=0),
        torch=plain,
        wrong=lambda out: "" if out.accepted.tolist() == expected else "other tokens are accepted",
    )


def attention_case(shapes: Shapes, rows: int, tile: uses.AttentionTile) -> Case:
    """One sequence."""
    heads, kv_heads, size = shapes.heads
    dtype = torch.bfloat16
    q = torch.randn(1, heads, rows, size, device=DEVICE).to(dtype)
    k, v = (torch.randn(1, kv_heads, shapes.slots, size, device=DEVICE).to(dtype) for _ in "kv")
    last = torch.arange(shapes.slots - rows, shapes.slots, device=DEVICE)[None]
    first = torch.zeros_like(last)
    mask = torch.arange(shapes.slots, device=DEVICE)[None] <= last[0][:, None]

    def plain() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

    def wrong(out: torch.Tensor) -> str:
        given = [t.double().cpu().numpy() for t in (q, k, v)]
        where = first.cpu().numpy(), last.cpu().numpy()
        expected = reference.attention(given[0], given[1], given[2], *where)
        error = float(np.abs(out.double().cpu().numpy() - expected).max() / np.abs(expected).max())
        return "" if error < 2**-6 else f"differs by {error:.1e} of the largest number"

    return Case(
        f"attention over {shapes.slots} slots, {tile.rows}x{tile.slots}",
        rows,
        bytes=2 * k.nbytes + 2 * q.nbytes,
        run=lambda: attention.attention(q, k, v, first, last, tile=tile),
        torch=plain,
        wrong=wrong,
    )


def moe_case(shapes: Shapes, rows: int, tile: uses.Tile) -> Case:
    generator = torch.Generator(DEVICE).manual_seed(rows)

    def matrix(out: int, columns: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        shape = (shapes.experts, out, columns // 32)
        blocks = torch.randint(256, (*shape, 16), dtype=torch.uint8, device=DEVICE, generator=generator)
        scales = torch.randint(117, 121, shape, dtype=torch.uint8, device=DEVICE, generator=generator)
        return blocks, scales, torch.randn(shape[:2], device=DEVICE, generator=generator).bfloat16()

    layer = moe.Experts(
        *matrix(2 * shapes.inner, shapes.hidden),
        *matrix(shapes.hidden, shapes.inner),
        k=4,
        alpha=1.702,
        beta=1.0,
        limit=7.0,
    )
    x = torch.randn(rows, shapes.hidden, device=DEVICE, generator=generator).bfloat16()
    logits = torch.randn(rows, shapes.experts, device=DEVICE, generator=generator)
    pairs = torch.tensor(BYTE_TO_PAIR, device=DEVICE).bfloat16()

    def widened(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        scale = torch.exp2(scales.float() - 127).bfloat16()
        return (pairs[blocks.int()].flatten(-2) * scale[..., None]).flatten(-2)

    def plain() -> torch.Tensor:
        """The experts in use, one after the other: widen, multiply, add."""
        best, which = logits.topk(layer.k, dim=-1)
        shares = best.softmax(dim=-1)
        y = torch.zeros(rows, shapes.hidden, device=DEVICE)
        for expert in sorted(set(which.flatten().tolist())):
            row, slot = (which == expert).nonzero(as_tuple=True)
            h = x[row].float() @ widened(layer.gate_up[expert], layer.gate_up_scales[expert]).float().T
            h += layer.gate_up_bias[expert]  # type: ignore[index]
            gate, up = h[:, 0::2].clamp(max=layer.limit), h[:, 1::2].clamp(-layer.limit, layer.limit)
            h = ((up + layer.beta) * gate * torch.sigmoid(layer.alpha * gate)).bfloat16().float()
            h = h @ widened(layer.down[expert], layer.down_scales[expert]).float().T + layer.down_bias[expert]  # type: ignore[index]
            y.index_add_(0, row, h * shares[row, slot, None])
        return y.bfloat16()

    def wrong(out: torch.Tensor) -> str:
        expected = plain().float()
        error = ((out.float() - expected).norm() / expected.norm()).item()
        return "" if error < 4e-3 else f"differs by {error:.1e} of the norm"

    in_use = len(set(logits.topk(layer.k, dim=-1).indices.flatten().tolist()))
    per_expert = sum(
        t[0].nbytes for t in (layer.gate_up, layer.gate_up_scales, layer.down, layer.down_scales)
    )
    cut = f"{tile.block_n}x{tile.block_k}x{tile.tokens}"
    return Case(
        f"MoE, {in_use} experts in use, {cut}",
        rows,
        bytes=in_use * per_expert + 2 * x.nbytes,
        run=lambda: moe.moe(x, logits, layer, tile),
        torch=plain,
        wrong=wrong,
    )


def cases(models: tuple[Shapes, ...]) -> Iterator[tuple[str, Case]]:
    for shapes in models:
        for rows in shapes.rows:
            yield shapes.name, tap_case(shapes, rows)
            for kind in SAMPLED:
                yield shapes.name, sample_case(shapes, rows, kind)
            yield shapes.name, acceptance_case(shapes, rows)
            for attended in uses.ATTENTION_TILES:
                yield shapes.name, attention_case(shapes, rows, attended)
            if shapes.experts:
                for tile in uses.TILES:
                    yield shapes.name, moe_case(shapes, rows, tile)


def copy_bandwidth() -> float:
    """Bytes per second that a copy of 1 GiB reads and writes."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds(lambda: target.copy_(source), as_graph=False)


def seconds(run: Callable[[], Any], *, as_graph: bool = True) -> float:
    """Median of many runs: launched from a graph, or one by one with the cache cleared before each."""
    bench = triton.testing.do_bench_cudagraph if as_graph else triton.testing.do_bench
    return float(bench(run, return_mode="median")) / 1000


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="only check the results")
    args = parser.parse_args()
    if not GPU and not (args.check and triton.knobs.runtime.interpret):
        parser.error("no GPU here: only --check works, on small shapes, with TRITON_INTERPRET=1")
    models = MODELS
    if not GPU:
        small: list[dict[str, Any]] = [{k: v for k, v in SMALL.items() if getattr(m, k)} for m in MODELS]
        models = tuple(replace(m, **fields) for m, fields in zip(MODELS, small, strict=True))
    bandwidth = 0.0 if args.check else copy_bandwidth()
    results, failed = [], 0
    for model, case in cases(models):
        found: dict[str, Any] = {
            "model": model,
            "operator": case.name,
            "rows": case.rows,
            "bytes": case.bytes,
        }
        found["wrong"] = case.wrong(case.run())
        failed += bool(found["wrong"])
        line = f"{model:13} {case.name:36} {case.rows:3} rows  {found['wrong'] or 'right'}"
        if not args.check:
            time, plain = seconds(case.run), seconds(case.torch, as_graph=False)
            floor = case.bytes / bandwidth
            found |= {"seconds": time, "torch_seconds": plain, "floor_seconds": floor}
            line += f"  {1e6 * time:8.1f} us, {case.bytes / time / 1e9:6.0f} GB/s, {floor / time:4.0%} of the copy's"
            line += f"; torch {1e6 * plain:8.1f} us"
        print(line, flush=True)
        results.append(found)
    where = torch.cuda.get_device_name() if GPU else "Triton's interpreter"
    summary = {
        "device": where,
        "copy_bytes_per_second": bandwidth,
        "torch": torch.__version__,
        "results": results,
    }
    print(json.dumps(summary | {"triton": triton.__version__, "failed": failed}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
