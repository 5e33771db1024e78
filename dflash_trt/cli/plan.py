"""`dflash-trt plan`: the GPU memory of a pair, from its configurations."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from dflash_trt.cli.options import add_common, add_engine, at_least, engine_options_of, option, switch
from dflash_trt.cli.output import print_json, print_table
from dflash_trt.engines import registry
from dflash_trt.errors import UsageError

if TYPE_CHECKING:
    from dflash_trt.engines.base import Weights
    from dflash_trt.models.inventory import Inventory
    from dflash_trt.planning.estimate import MemoryEstimate
    from dflash_trt.planning.gpus import Gpu
    from dflash_trt.planning.weights import Settings

SUMMARY = "show the GPU memory of a pair, and the context and batch that fit"
DESCRIPTION = """\
Show, from configurations alone, the memory of a pair's weights and caches on one GPU, and the longest context and the
largest batch that fit. Exit code 1 if the requested limits do not fit.
"""
EXAMPLES = """\
examples:
  dflash-trt plan --target qwen3-8b
  dflash-trt plan --target gpt-oss-120b --gpu b200
  dflash-trt plan --target gpt-oss-120b --gpu h100 --engine tensorrt-llm --tp 8 --max-seq-len 131072
  dflash-trt plan --target qwen3-8b --gpu rtx-5090 --engine tensorrt-rtx --precision target=fp8
  dflash-trt plan --target qwen3-8b --gpu memory=24,sm=89 --engine tensorrt-rtx
  dflash-trt plan --gpus

GPU names are taken in any spelling: "RTX 4090" is rtx-4090. The figures of another GPU are its memory in GiB
and its compute capability.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option(parser, "--target", "NAME_OR_PATH", str, "a known pair, or a target's directory")
    option(parser, "--drafter", "NAME_OR_PATH", str,
           "as for `build`: a directory, GGUF file, name, or mtp (default: the target's known drafter)")  # fmt: skip
    switch(parser, "--no-drafter", "the target alone, as for `build`")
    option(parser, "--gpu", "NAME", str,
           "a GPU that --gpus lists, or the figures of another: memory=24,sm=89 (default: the first one here)"
    )  # fmt: skip
    add_engine(parser, "auto: what this GPU runs best, or several")
    parser.add_argument("--tp", type=at_least(1), default=1, metavar="N", dest="tensor_parallel",
                        help=f"GPUs, with {registry.SEVERAL}")  # fmt: skip
    option(parser, "--max-seq-len", "N", at_least(1), "default: as for `build`, at most 8192")
    option(parser, "--max-batch-size", "N", at_least(1), default=8)
    option(parser, "--block-size", "K", at_least(2), "default: as trained, or 16")
    option(parser, "--drafter-window", "N", at_least(1), "as for `build`")
    option(parser, "--precision", "ROLE=VALUE,...", str, "as for `build`")
    parser.add_argument("--cache", choices=["fp8"], help="as for `build`, with --engine torch")
    switch(parser, "--gpus", "list the GPUs with the source of each figure")
    add_common(parser, "--json")


def run(args: argparse.Namespace) -> int:
    """Print the memory, or the GPUs' figures. Returns 1 if the limits do not fit, or a build would be refused."""
    if args.gpus:
        return _gpus(args)
    if args.target is None:
        args.usage_error("--target is required (or --gpus, which lists the GPUs)")
    from dflash_trt.building.sources import built_in
    from dflash_trt.planning.gpus import find_gpu, gpu_here
    from dflash_trt.planning.memory import estimate_memory

    gpu = find_gpu(args.gpu) if args.gpu else gpu_here()
    if gpu is None:
        raise UsageError("--gpu is required where nvidia-smi shows none (--gpus lists those that are known)")
    if args.engine == registry.AUTO:
        choice = registry.best_on(gpu.sm, several=args.tensor_parallel > 1)
        args.engine = choice.engine
        print(f"{choice}; --engine chooses another", file=sys.stderr)
    if args.cache and args.engine != "torch":
        args.usage_error("--cache: only with --engine torch")
    inventory, settings = prepare(args, gpu)
    pair = built_in(args.target, args.drafter, no_drafter=args.no_drafter)
    if pair is not None and pair.doubt is not None:
        print(f"note: {pair.doubt}", file=sys.stderr)
    estimate = estimate_memory(inventory, settings)
    formats = {name for roles in estimate.weights.values() for sizes in roles.values() for name in sizes}
    refused = registry.find(args.engine).refuses_gpu(settings.gpu.sm, inventory, formats) or None
    if args.json:
        unverified = pair.unverified if pair is not None else ()
        print_json({**asdict(estimate), "fits": estimate.fits, "refused": refused, "unverified": unverified})
    else:
        _print(estimate)
        if refused is not None:
            print(f"{estimate.engine}: a build for {estimate.gpu} is refused: {refused}")
    return 0 if estimate.fits and refused is None else 1


def prepare(args: argparse.Namespace, gpu: Gpu) -> tuple[Inventory, Settings]:
    """The pair's tensors and the setting to plan for."""
    from dflash_trt.building.defaults import (
        choose_block_size,
        choose_max_seq_len,
        choose_precision,
        narrow_drafter,
    )
    from dflash_trt.building.sources import Role, find_sources
    from dflash_trt.checkpoint.gguf import is_installed
    from dflash_trt.checkpoint.rules import Quantization
    from dflash_trt.checkpoint.tensors import Checkpoint, Outline, tensor_names
    from dflash_trt.formats.precision import parse_precision
    from dflash_trt.models.inventory import take_inventory
    from dflash_trt.planning.weights import Settings
    from dflash_trt.quantization.layers import HEAD

    engine, options = registry.find(args.engine), engine_options_of(args)
    precision = parse_precision(args.precision)
    engine.check(precision, "copy", options)
    # The number formats of a target in a Python package are those of its file.
    kept = engine.multiplies_integers and precision.target is None and is_installed(args.target)
    weights: Weights = "copy" if kept else "none"
    integers: list[Role] = ["target"] if kept else []
    sources = find_sources(args.target, args.drafter, weights, no_drafter=args.no_drafter, stored=integers)
    folders = [source.directory for source in sources if source]
    target, drafter = engine.read_pair(folders[0], folders[1] if sources[1] else None)
    drafter = narrow_drafter(args.drafter_window, drafter, engine)
    read: list[Checkpoint | Outline] | None = None
    if tensor_names(folders[0]):  # else the configuration says what the target has
        read = [Checkpoint(folders[0]), *map(Outline, folders[1:])]
    inventory = take_inventory(target, drafter, read)
    stored = [Quantization(folder) for folder in folders]
    quantized = stored[0].algorithm(HEAD) or stored[-1].algorithms
    spare = gpu if inventory.draft_rows else None  # without rows, the drafter has a head of its own
    settings = Settings(
        engine=args.engine,
        gpu=gpu,
        max_seq_len=choose_max_seq_len(args.max_seq_len, target, drafter),
        max_batch_size=args.max_batch_size,
        block_size=choose_block_size(args.block_size, target, drafter),
        tensor_parallel=args.tensor_parallel,
        precision=choose_precision(precision, engine, target, drafter, quantized=bool(quantized), gpu=spare),
    )
    return inventory, replace(settings, **engine.memory_settings(inventory, options))


def _print(estimate: MemoryEstimate) -> None:
    from dflash_trt.planning.estimate import gib

    several = f"{estimate.tensor_parallel} x " if estimate.tensor_parallel > 1 else ""
    print(f"{several}{estimate.gpu}, {estimate.engine}: GiB on {'each' if several else 'the'} GPU")
    batch, length, left = estimate.max_batch_size, estimate.max_seq_len, estimate.left_bytes
    kept = "left" if left >= 0 else "too many"
    cache = _rows(estimate.kv_bytes_per_token, estimate.kv_window_bytes, estimate.state_bytes_per_sequence)
    context = _rows(estimate.drafter_bytes_per_token, estimate.drafter_window_bytes)
    parts = [
        (f"{side} {role}", count, precision)
        for side, roles in estimate.weights.items()
        for role, sizes in roles.items()
        for precision, count in sizes.items()
    ] + [
        ("runtime", estimate.runtime_bytes, "an allowance"),
        ("activations", estimate.activation_bytes, "an allowance"),
        (
            "states and KV cache" if estimate.state_bytes_per_sequence else "KV cache",
            estimate.kv_bytes,
            f"{batch} x {length} tokens, {cache}",
        ),
        *([("drafter context", estimate.drafter_bytes, context)] if "drafter" in estimate.weights else []),
        ("total", estimate.total_bytes, f"of {gib(estimate.memory_bytes)}, {gib(abs(left))} {kept}"),
    ]
    if estimate.kv_fraction is not None:
        note = f"free_gpu_memory_fraction {estimate.kv_fraction}"
        parts.append(("KV pool", estimate.kv_pool_bytes or 0, note))
    rows = [(name, gib(count), note) for name, count, note in parts]
    print_table(rows, right=[1])
    print(f"longest context at batch 1: {estimate.longest_context} tokens")
    print(f"largest batch at {length} tokens: {estimate.largest_batch}")
    if estimate.engine == "torch":
        print(f"tokens of {batch} requests together (--cache-tokens): {estimate.cache_tokens}")
    if not estimate.fits:
        print(estimate.refuse())


def _rows(per_token: int, windows: int, states: int = 0) -> str:
    """What a sequence's rows and states take."""
    of_all = [f"{per_token} bytes a token"] if per_token or not (windows or states) else []
    fixed = {"windows": windows, "states": states}
    return " and ".join([*of_all, *(f"{size} a sequence for {kind}" for kind, size in fixed.items() if size)])


def _gpus(args: argparse.Namespace) -> int:
    from dflash_trt.planning.gpus import gpus

    if args.json:
        print_json({name: asdict(gpu) for name, gpu in gpus().items()})
        return 0
    for name, gpu in gpus().items():
        print(f"{name}: {gpu.product}, SM{gpu.sm}")
        values = {
            "memory_mib": f"{gpu.memory_bytes / 2**30:.1f} GiB",
            "gpus_per_node": f"{gpu.gpus_per_node} per node",
        }
        print_table(("", values[key], source) for key, source in gpu.sources.items())
    return 0
