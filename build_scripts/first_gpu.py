"""The measurements of `first_gpu.sh`: one part a call, one JSON document on the last line.

    python -m build_scripts.first_gpu kernels            each kernel against its reference
    python -m build_scripts.first_gpu tiles              attention and experts with every tile shape: errors and times
    python -m build_scripts.first_gpu ceilings           what the GPU can reach, and how products round
    python -m build_scripts.first_gpu passes [--pair qwen3-8b] [--layers 36] [--cublas | --overlap | --apart]
        [--target fp8] [--contexts] [--cache fp8]        passes of a random pair against the bytes they read, by kernel
    python -m build_scripts.first_gpu company [--pair qwen3-8b] [--layers 36]    many requests to a random pair at once

Each line is printed when it is known. Without a GPU, they run at the smallest sizes on the CPU, kernels in Triton's
interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Any, Literal

import torch
import torch.nn.functional as F
from dflash_plugins import compiled
from dflash_plugins import kernel_specs as uses
from dflash_plugins import layers as ours
from dflash_plugins import packed as products
from dflash_plugins.launch import by_triton

from build_scripts import harness
from build_scripts.bench.resident import planned
from build_scripts.random_pair import write_pair
from dflash_trt import LLM, SamplingParams
from dflash_trt.building.build import build
from dflash_trt.bundle.manifest import Bundle
from dflash_trt.decoding.length.policy import FixedLength
from dflash_trt.decoding.pair import Pair
from dflash_trt.decoding.params import RequestOptions
from dflash_trt.engines.device.kernels import kernels_here
from dflash_trt.engines.torch import TorchOptions, layers, packed
from dflash_trt.formats.precision import parse_precision
from dflash_trt.models.configs import read_pair
from dflash_trt.reports.kernels import check_kernels

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
# Triton's interpreter rounds bfloat16 in its own way.
TYPES = (torch.bfloat16, torch.float16) if GPU else (torch.float16,)
# Query heads, key heads, size of a head, and rows in the cache; experts, chosen ones, hidden and inner numbers.
ATTENTION = {"tiny": (4, 2, 64, 300), "qwen3-8b": (32, 8, 128, 4000), "gpt-oss": (64, 8, 64, 4000)}
EXPERTS = {"tiny": (4, 2, 96, 32), "gpt-oss": (32, 4, 2880, 2880)}
SIZES = list(ATTENTION) if GPU else ["tiny"]
WIDTHS = (1, 2, 4, 8, 16, 32, 64)
RIGHT = (0.85, 0.8, 0.7, 0.65, 0.6)  # drafts at the places 1, 2 .., the last one for all further ones
CONTEXTS = (1000, 8000, 32_000, 130_000) if GPU else (40, 200)


def main() -> int:
    """Run one part. Exit code 1 if a kernel's numbers are wrong."""
    parser = harness.parser(__doc__)
    parser.add_argument("part", choices=["kernels", "tiles", "ceilings", "passes", "company"])
    parser.add_argument("--pair", default="qwen3-8b")
    parser.add_argument("--layers", type=int, default=36 if GPU else 1)
    parser.add_argument("--cublas", action="store_true", help="torch's products in place of ours")
    parser.add_argument("--overlap", action="store_true", help="kernels start while the one before them ends")
    parser.add_argument("--apart", action="store_true", help="heads are placed by a kernel of their own")
    parser.add_argument(
        "--target", default="bf16" if GPU else "fp32", help="precision of the target's weights"
    )
    parser.add_argument("--contexts", action="store_true", help="passes after up to 131,000 tokens alone")
    parser.add_argument("--cache", choices=["fp8"], help="precision of the caches")
    args = parser.parse_args()
    if args.cublas:
        packed.plain = lambda weight: weight
    if args.apart:
        products.joins_heads = lambda rows, weight, size: False
    compiled.OVERLAP = args.overlap
    device = torch.cuda.get_device_name() if GPU else "CPU"
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "kernels": kernels,
        "tiles": tiles,
        "ceilings": ceilings,
        "passes": lambda: passes(
            args.pair, args.layers, args.target, contexts=CONTEXTS if args.contexts else (), cache=args.cache
        ),
        "company": lambda: company(args.pair, args.layers, args.target),
    }
    found = parts[args.part]()
    print(json.dumps({"device": device, "torch": torch.__version__, **found}))
    return int(bool(found.get("wrong")))


def replayed(run: Callable[[], object], calls: int = 10) -> float:
    """The median time of a call within a CUDA graph of several, without what the host takes to launch it."""
    if not GPU:
        return seconds(run, 1)
    run()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        run()
        stream.synchronize()
        graph.capture_begin(capture_error_mode="thread_local")
        for _ in range(calls):
            run()
        graph.capture_end()
    return seconds(graph.replay, 20) / calls


def seconds(run: Callable[[], object], times: int) -> float:
    """The median time of a call, between events on a GPU."""
    for _ in range(3 if GPU else 1):
        run()
    taken = list[float]()
    for _ in range(times):
        if GPU:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            end.synchronize()
            taken.append(begin.elapsed_time(end) / 1e3)
        else:
            start = perf_counter()
            run()
            taken.append(perf_counter() - start)
    return sorted(taken)[len(taken) // 2]


def kernels() -> dict[str, Any]:
    """A problem for each dtype and operator, empty where its numbers are right."""
    found = check_kernels(partial(print, flush=True))
    return found | {
        "wrong": any(problem for of_kernel in found["problems"].values() for problem in of_kernel.values())
    }


def tiles() -> dict[str, Any]:
    """Errors as shares of the largest number; microseconds of each tile."""
    run, rows = kernels_here({}) if GPU else by_triton, list[dict[str, Any]]()
    for dtype, size, count in product(TYPES, SIZES, (1, 8, 512) if GPU else (3,)):
        rows.append(_printed(_attention(run, size, dtype, count)))
        if size in EXPERTS and GPU:  # the interpreter lacks their inline assembly
            rows.append(_printed(_experts(run, size, dtype, count)))
    return {"kernels": rows, "wrong": [row for row in rows if row["error"] > 0.02]}


def _printed(row: dict[str, Any]) -> dict[str, Any]:
    print(row, flush=True)
    return row


def _attention(run: Any, size: str, dtype: torch.dtype, count: int) -> dict[str, Any]:
    heads, kv_heads, head, used = ATTENTION[size]
    torch.manual_seed(0)
    q = torch.randn(1, heads, count, head).to(dtype)
    k, v = (torch.randn(1, kv_heads, used + count, head).to(dtype) for _ in "kv")
    last = used + torch.arange(count)[None]
    sinks = torch.randn(heads).to(dtype)
    exact = layers.attend(
        *({"scale": head**-0.5}, q.float(), k.float(), v.float(), last * 0, last),
        sinks=sinks.float(),
    )
    there = [x.to(DEVICE) for x in (q, k, v, last * 0, last)]
    call = partial(ours.attention, *there, sinks=sinks.to(DEVICE), run=run)
    row = {"kernel": "attention", "of": size, "dtype": str(dtype), "rows": count, "cache_rows": used}
    return row | _tried(lambda tile: call(tile=tile), uses.attention_tiles(head), exact)


def _tried(call: Callable[[Any], torch.Tensor], tiles: Sequence[Any], exact: torch.Tensor) -> dict[str, Any]:
    """The largest error of a kernel, as a share of the largest number, and microseconds with each tile."""
    error, times = 0.0, dict[str, Any]()
    for tile in tiles:
        name = str(tuple(vars(tile).values()))
        try:
            error = max(error, float((call(tile).cpu().float() - exact).abs().max() / exact.abs().max()))
            times[name] = round(1e6 * replayed(partial(call, tile)), 1)
        except Exception as problem:  # of the compiler or the driver: the others go on
            times[name] = str(problem)[:200]
    return {"error": error, "microseconds": times}


def _experts(run: Any, size: str, dtype: torch.dtype, count: int) -> dict[str, Any]:
    experts, k, hidden, inner = EXPERTS[size]
    torch.manual_seed(0)

    def matrix(out: int, columns: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        blocks = torch.randint(0, 256, (experts, out, columns // 32, 16), dtype=torch.uint8)
        scales = torch.randint(118, 123, (experts, out, columns // 32), dtype=torch.uint8)
        return blocks, scales, torch.randn(experts, out).to(dtype)

    weights = [*matrix(2 * inner, hidden), *matrix(hidden, inner)]
    x, router = (torch.randn(count, hidden) / 8).to(dtype), torch.randn(count, experts)
    constants: dict[str, Any] = {"k": k, "alpha": 1.702, "beta": 1.0, "limit": 7.0}
    wide = [w.float() if w.is_floating_point() else w for w in weights]
    exact = layers.mxfp4_experts(constants, x.float(), router, *wide)
    packed: list[Any] = [w.to(DEVICE) for w in weights]
    layer = ours.PackedExperts(*packed, **constants)
    there = x.to(DEVICE), router.to(DEVICE)
    row = {"kernel": "experts", "of": size, "dtype": str(dtype), "rows": count}
    return row | _tried(lambda tile: ours.moe(*there, layer, tile, run), uses.TILES, exact)


def ceilings() -> dict[str, Any]:
    """Bytes per second of a copy and of products, widths whose rows have the same bits, and the cost of a launch."""
    count = (1 << 30) if GPU else (1 << 20)
    source = torch.zeros(count, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    copy = 2 * count / seconds(lambda: target.copy_(source), 10)
    products = {}
    for out, columns in ((4096, 4096), (24_576, 4096), (151_936, 4096)) if GPU else ((256, 256),):
        weight = torch.randn(out, columns, device=DEVICE).to(TYPES[0])
        x = torch.randn(WIDTHS[-1], columns, device=DEVICE).to(TYPES[0])
        classes: list[list[int]] = []
        first: list[torch.Tensor] = []
        speeds = {}
        for rows in WIDTHS:
            y = F.linear(x[:rows], weight)[0].clone()
            same = [i for i, other in enumerate(first) if torch.equal(other, y)]
            if same:
                classes[same[0]].append(rows)
            else:
                first.append(y)
                classes.append([rows])
            speeds[rows] = round(weight.nbytes / seconds(partial(F.linear, x[:rows], weight), 20) / 1e9)
        products[f"{out}x{columns}"] = _printed({"classes": classes, "GB/s by rows": speeds})
    found = {"copy GB/s": round(copy / 1e9), "products": products}
    return found | ({"launches": _launches()} if GPU else {})


def _launches() -> dict[str, float]:
    """Microseconds of a small kernel, launched 200 times and replayed as one graph."""
    x = torch.zeros(256, device=DEVICE)

    def work() -> None:
        for _ in range(200):
            x.add_(1)

    times = {"launched": seconds(work, 20), "replayed": replayed(work, calls=1)}
    return {name: round(1e6 * taken / 200, 2) for name, taken in times.items()}


def passes(
    pair: str, count: int, precision: str, *, contexts: Sequence[int], cache: Literal["fp8"] | None
) -> dict[str, Any]:
    """Milliseconds of passes of a pair of this shape with random weights, what the bytes that they read would take, and
    the memory of the GPU.

    `weight_bytes`: in BF16. `host`: of a pass's call, which the GPU's work hides if it takes longer; of a round, what
    no pass hides. `contexts`: tokens before a pass, of which those that the models take are timed, and nothing else.
    """
    with tempfile.TemporaryDirectory() as folder:
        sizes = write_pair(Path(folder), pair, count, None)
        both, most = f"target={precision},drafter={'bf16' if GPU else 'fp32'}", 2048 if GPU else 128
        sides = str(Path(folder) / "target"), str(Path(folder) / "drafter")
        limit = min(config.max_position_embeddings for config in read_pair(*map(Path, sides)) if config)
        contexts = [context for context in contexts if context + 2 * 64 <= limit]
        most = max([most, *(context + 2 * 64 for context in contexts)])
        bundle = _built(Path(folder), both, most, cache)
        begin = perf_counter()
        with LLM(bundle.path, max_batch_size=1, prefix_cache_bytes=0) as llm:
            opened, inner = perf_counter() - begin, llm.runtime.pair
            _printed({"opened_seconds": round(opened, 1), "weight_bytes": sizes})
            if contexts:
                rows = [row for context in contexts for row in _after(bundle, inner, context)]
                return {"pair": pair, "target": precision, "cache": cache, "layers": count, "passes": rows}
            rows = [
                _pass(f"verify {n}", inner, inner.dummy_verify, n)
                for n in (1, 4, 8, 16)
                if n <= llm.block_size
            ]
            rows.append(_pass(f"draft {llm.block_size}", inner, inner.drafter.dummy_pass, llm.block_size))
            prompt = [1] * min(512, llm.max_seq_len // 2)

            def prefill() -> None:
                inner.prefill(prompt, 0, 0, draft=True)
                inner.drafter.catch_up(0)
                inner.arrays.wait()

            whole = seconds(prefill, 5)
            _printed({"prompt of": len(prompt), "ms": round(1e3 * whole, 2)})
            rows += [_rounds(llm, length) for length in (1, llm.block_size)]
            megabytes = {"planned": planned("torch", *sides, both, most, 1)}
            if GPU:
                free, total = torch.cuda.mem_get_info()
                megabytes["used"] = round((total - free) / 1e6, 1)
            _printed({"megabytes": megabytes})
            found = _profile(inner)
    return {"pair": pair, "target": precision, "layers": count, "weight_bytes": sizes, "profile": found,
            "opened_seconds": round(opened, 1), "passes": rows, "megabytes": megabytes,
            "prefill": {"tokens": len(prompt), "ms": round(1e3 * whole, 2)}}  # fmt: skip


def _built(folder: Path, precision: str, most: int, cache: Literal["fp8"] | None = None) -> Bundle:
    """The pair that `write_pair` wrote there, for up to so many tokens."""
    return build(
        *(str(folder / "target"), str(folder / "drafter"), folder / "bundle"),
        engine="torch",
        weights="link",
        max_seq_len=most,
        precision=parse_precision(precision),
        options=TorchOptions(cache),
    )


def company(pair: str, count: int, precision: str) -> dict[str, Any]:
    """Tokens per second of many requests of mixed lengths at once, plain and with drafts, of which place by place the
    share `RIGHT` is accepted after those before, whatever a pair of random weights says.
    """
    requests, rows = (1, 8, 32, 128) if GPU else (1, 3), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        write_pair(Path(folder), pair, count, None)
        precisions = f"target={precision},drafter={'bf16' if GPU else 'fp32'}"
        bundle = _built(Path(folder), precisions, 512 if GPU else 64)
        with LLM(bundle.path, max_batch_size=requests[-1], prefix_cache_bytes=0) as llm:
            rounds = _accepting(llm)
            for size, length in product(requests, (1, llm.block_size)):
                rows.append(
                    _printed({"requests": size, "length": length, **_together(llm, size, length, rounds)})
                )
    return {"pair": pair, "target": precision, "layers": count, "right": RIGHT, "company": rows}


def _accepting(llm: LLM) -> Counter[str]:
    """Let every round accept drawn numbers of drafts. Counts the rounds, and those that started before the result of
    the one before was known.
    """
    pair: Any = llm.runtime.pair
    arrays, counts = pair.arrays, Counter[str]()
    generator = torch.Generator().manual_seed(0)
    places = torch.tensor([RIGHT[min(place, len(RIGHT) - 1)] for place in range(llm.block_size - 1)])
    drawn = torch.rand((512, llm.runtime.max_batch_size, len(places)), generator=generator) < places
    accepted = drawn.long().cumprod(-1).sum(-1).to(DEVICE)
    verified, end, follow = arrays.verified, arrays._round.end, pair.follow
    nodes = 1

    def counted(active: Any, draft: Any, outputs: Any) -> Any:
        nonlocal nodes
        nodes = draft.nodes
        counts["rounds"] += 1
        return verified(active, draft, outputs)

    def ended(logits: Any, *given: Any, **named: Any) -> None:
        end(logits, *given, **named)
        part = arrays._round.part("accepted", len(logits))
        torch.clamp(accepted[counts["rounds"] % len(accepted), : len(logits)], max=nodes - 1, out=part)

    def followed(*given: Any) -> Any:
        counts["ahead"] += 1
        return follow(*given)

    arrays.verified, arrays._round.end, pair.follow = counted, ended, followed
    return counts


def _together(llm: LLM, size: int, length: int, counts: Counter[str]) -> dict[str, Any]:
    """So many requests, after their prompts were read."""
    scheduler: Any = llm.runtime.scheduler
    random, tokens = Random(0), 0
    most = llm.max_seq_len // 4
    for _ in range(size):
        prompt = [random.randrange(1000) for _ in range(random.randint(most // 8, most))]
        params = SamplingParams(max_tokens=random.randint(most // 2, 2 * most), ignore_eos=True)
        scheduler.submit(llm.runtime.request(prompt, params, RequestOptions(draft_source="drafter")))
    lengths = FixedLength(length)
    while scheduler.waiting or scheduler.filling:
        scheduler.step(lengths)
    counts.clear()
    begin, busy = perf_counter(), 0
    while not scheduler.idle:
        busy += len(scheduler.active)
        tokens += sum(len(emission.token_ids) for emission in scheduler.step(lengths))
    taken = perf_counter() - begin
    return {
        "tokens/s": round(tokens / taken, 1),
        "ms a round": round(1e3 * taken / counts["rounds"], 3),
        "tokens a request and round": round(tokens / busy, 2),
        "ahead %": round(100 * counts["ahead"] / counts["rounds"]),
    }


def _after(bundle: Bundle, pair: Pair, context: int) -> Iterator[dict[str, Any]]:
    """Passes after so many tokens, and the megabytes of cache rows that they read."""
    block = bundle.manifest["block_size"]
    runs = (("target", 1), ("target", block), ("drafter", block))
    for role, width in runs:
        run = pair.dummy_verify if role == "target" else pair.drafter.dummy_pass
        kinds = bundle.cache_kinds(role)
        size = sum(kind.row_bytes * min(context, kind.window or context) for kind in kinds)
        print(f"{role}: {size / 1e6:.1f} MB of cache rows")
        yield _pass(f"{role} {width} after {context}", pair, partial(run, context=context), width) | {
            "cache MB": round(size / 1e6, 1)
        }


def _pass(name: str, pair: Any, run: Callable[..., Any], width: int) -> dict[str, Any]:
    taken, host = [], []
    wait, pair.arrays.wait = pair.arrays.wait, lambda: None  # so that the call's own time is seen
    try:
        for _ in range(24 if GPU else 3):
            wait()
            begin, start = pair.arrays.now(), perf_counter()
            run(1, width)
            host.append(perf_counter() - start)
            end = pair.arrays.now()
            wait()
            taken.append(pair.arrays.seconds(begin, end))
    finally:
        pair.arrays.wait = wait
    middle = [round(1e3 * sorted(times)[len(times) // 2], 3) for times in (taken, host)]
    return _printed({"pass": name, "ms": middle[0], "host ms": middle[1]})


def _profile(pair: Pair) -> list[dict[str, Any]]:
    """The kernels of a pass of one row, on a CPU torch's operators: how often each runs, its microseconds, and those in
    which nothing runs before it.
    """
    passes, kind = 5, DEVICE.upper()
    with torch.profiler.profile(activities=[getattr(torch.profiler.ProfilerActivity, kind)]) as profile:
        for _ in range(passes):
            pair.dummy_verify(1, 1)
        pair.arrays.wait()
    rows, end = dict[str, list[float]](), None
    for event in sorted(profile.events(), key=lambda event: event.time_range.start):
        if event.device_type.name == kind:
            row, at = rows.setdefault(event.name[:60], [0, 0, 0]), event.time_range
            row[0], row[1] = row[0] + 1 / passes, row[1] + (at.end - at.start) / passes
            row[2] += max(0, at.start - (at.start if end is None else end)) / passes
            end = max(at.end, end or 0)
    most = sorted(rows, key=lambda name: -rows[name][1])
    return [
        _printed(
            {
                "kernel": name,
                **{n: round(x, 1) for n, x in zip(("runs", "us", "gaps us"), rows[name], strict=True)},
            }
        )
        for name in most[:24]
    ]


def _rounds(llm: LLM, length: int) -> dict[str, Any]:
    """A request's rounds after its first token. Without drafts at length 1."""
    asked = [1] * 8, SamplingParams(max_tokens=64 if GPU else 4, ignore_eos=True)
    llm.generate(*asked, block_length=length)
    told = llm.generate(*asked, block_length=length).statistics
    count, host = sum(told.block_length_histogram), told.generation_time - told.draft_time - told.verify_time
    taken, host_time = (round(1e3 * taken_by / count, 3) for taken_by in (told.generation_time, host))
    return _printed({"round of": length, "ms": taken, "host ms": host_time})


if __name__ == "__main__":
    sys.exit(main())
