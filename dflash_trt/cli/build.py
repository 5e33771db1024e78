"""`dflash-trt build`: two checkpoints into a bundle."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from dflash_trt.building.progress import progress_display
from dflash_trt.cli.options import (
    add_common,
    add_engine,
    add_engine_options,
    add_target,
    at_least,
    engine_options_of,
    fields_of,
    option,
    refuse_other_engines,
    switch,
)
from dflash_trt.cli.output import byte_count, print_json
from dflash_trt.engines import registry

SUMMARY = "build a bundle from a target and a drafter checkpoint"
DESCRIPTION = """\
Build a bundle from a target and its drafter: check that they fit, export both as graphs, and add their weights.
NAME is a pair or model listed by `dflash-trt pairs`. PATH is a directory with config.json and safetensors files.
"""
EXAMPLES = """\
examples:
  dflash-trt build --target tiny
  dflash-trt build --target Qwen/Qwen3-8B --max-seq-len 8192
  dflash-trt build --target gpt-oss-120b --weights none --out bundles/graphs
  dflash-trt build --target tiny --engine tensorrt-rtx --compute-capability 89 120 --out bundles/tiny-rtx
  dflash-trt build --target smollm2-135m --precision target=int8 --out bundles/smollm2-135m-int8
  dflash-trt build --target tiny --precision target=fp8,drafter=nvfp4,head=fp8 --out bundles/tiny-fp8
  dflash-trt build --target gpt-oss-120b --engine tensorrt-llm --gpu b200 --tp 8 --ep 8
  dflash-trt build --target checkpoints/target --drafter checkpoints/drafter --out bundles/mine
  dflash-trt build --target Qwen/Qwen3.5-4B --drafter mtp --out bundles/mtp
"""
_WEIGHTS = """\
The default, copy, gives the bundle files of its own. They share blocks with the checkpoint's if the file system can.
With link they are hard links to the checkpoint's files, which must then stay unchanged. With none the full-size graphs
come from the configurations alone, for inspection only."""
_PRECISION = """\
Compute dtype, or quantization of the weights, of target, drafter and the drafter's own LM head, such as
target=nvfp4,drafter=bf16,head=fp8. Default: as stored. TensorRT then computes in bf16, ONNX Runtime has a drafter
beside a large head in INT8, and torch on a GPU with memory to spare the drafter's head in FP8."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    option(parser, "--drafter", "NAME_OR_PATH", str,
           "the model that proposes blocks of tokens; mtp: the one in the target's checkpoint (default: the target's "
           "known drafter)")  # fmt: skip
    switch(parser, "--no-drafter",
           "the target alone: drafts come from each request's own text (default where none is known)")  # fmt: skip
    option(parser, "--out", "DIR", Path, "directory of the bundle (default: bundles/NAME)")
    add_engine(parser, "what runs the graphs; auto: what this machine runs best")
    option(parser, "--max-seq-len", "N", int,
           "longest prompt and output together (default: both models' limit, at most 8192)")  # fmt: skip
    option(parser, "--block-size", "K", int,
           "tokens of a block, including the anchor (default: as trained; without a drafter 16)")  # fmt: skip
    option(parser, "--tree-width", "W", int,
           "candidates that the drafter gives for each place; draft trees need more than 1 (default: 8 for a large "
           "target in floats on ONNX Runtime, else 1)")  # fmt: skip
    switch(parser, "--exact", "open the bundle in exact mode, where drafts change no token, by default")
    option(parser, "--drafter-window", "N", at_least(1),
           "most tokens that the drafter's layers see, for less memory at long context (default: as trained)"
    )  # fmt: skip
    option(parser, "--max-batch-size", "N", at_least(1),
           "limit of requests at a time, for engines that fix it in the build")  # fmt: skip
    parser.add_argument("--weights", choices=["copy", "link", "none"], default="copy", help=_WEIGHTS)
    option(parser, "--precision", "ROLE=TYPE,...", str, _PRECISION)
    option(parser, "--draft-vocabulary", "FILE", str,
           "tokens that may be drafted, as `train drafter --draft-vocabulary` writes them; all for every token of the "
           "target (default: the drafter's draft_vocabulary.json, else all)")  # fmt: skip
    add_engine_options(parser)
    switch(parser, "--force",
           "replace a bundle of other inputs or options, or a damaged one; nothing else is replaced")  # fmt: skip
    add_common(parser, "--json")


def run(args: argparse.Namespace) -> int:
    from dflash_trt.building.build import build
    from dflash_trt.building.defaults import choose_engine
    from dflash_trt.building.sources import built_in
    from dflash_trt.checkpoint.catalogue import known_pair
    from dflash_trt.formats.precision import parse_precision
    from dflash_trt.reports.inspection import inspect

    out = args.out or Path("bundles") / Path(args.target).resolve().name
    began, before = time.perf_counter(), _stamp(out)
    pair = known_pair(args.target)
    if pair is not None and pair.warning and not args.no_drafter:
        print(f"note: {pair.warning}", file=sys.stderr)
    planned = None
    if args.weights == "none":
        planned = built_in(args.target, args.drafter, no_drafter=args.no_drafter)
    if planned is not None and planned.doubt is not None:
        print(f"note: {planned.doubt}", file=sys.stderr)
    precision = parse_precision(args.precision)
    if args.engine == registry.AUTO:
        args.engine = choose_engine(
            args.target, args.weights, precision, args.max_seq_len, no_drafter=args.no_drafter
        )
    refuse_other_engines(args)
    with progress_display() as progress:
        asked = {"out": out, "precision": precision, "options": engine_options_of(args)}
        bundle = build(**fields_of(args, build) | asked, progress=progress)
    seconds, kept = time.perf_counter() - began, _stamp(out) == before
    description = inspect(bundle.path)
    if args.json:
        print_json({**description, "build_seconds": round(seconds, 2), "kept": kept})
    else:
        size = byte_count(sum(description["files"].values()))
        shape = f"block {description['block_size']}, up to {description['max_seq_len']} tokens"
        state = "kept, as it has these inputs and options already" if kept else f"built in {seconds:.1f} s"
        weights = {"copy": "its own", "link": "linked with the checkpoints'", "none": "none"}[
            description["weights"]
        ]
        print(f"{out}: {shape}, {size}, weights {weights}, {state}")
        if "max_batch_size" in description.get("choices", {}):
            print(f"max_batch_size {description['choices']['max_batch_size']}")
    return 0


def _stamp(out: Path) -> tuple[int, ...] | None:
    """Tells whether the bundle there is another one after the build."""
    from dflash_trt.bundle.manifest import MANIFEST
    from dflash_trt.files.disk import stamp

    return stamp((out / MANIFEST).stat()) if (out / MANIFEST).is_file() else None
