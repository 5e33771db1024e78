"""`dflash-trt deploy`: a Triton model repository for a bundle."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from dflash_trt.cli.options import (
    DRAFTING,
    add_bundle,
    add_common,
    at_least,
    bundle_of,
    drafting_of,
    option,
    seconds,
    switch,
)
from dflash_trt.engines import registry
from dflash_trt.errors import BundleError
from dflash_trt.serving.wire import MAX_STEP

SUMMARY = "write a Triton model repository that serves a bundle"
DESCRIPTION = """\
Write a model repository for Triton Inference Server. The model `dflash` serves the bundle with continuous batching.
`ensemble` is the same model under the name that clients of TensorRT-LLM's models call. `dflash-trt serve` does this
itself.
"""
EXAMPLES = """\
examples:
  dflash-trt deploy bundles/tiny --out triton
  dflash-trt deploy bundles/tiny --out triton-16 --copy --max-batch-size 16 --max-queue 64
  dflash-trt deploy bundles/tiny-fp8 --out triton --name tiny-fp8

It prints the command that serves the repository on loopback. APIs that load code are closed to clients.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_bundle(parser)
    option(parser, "--out", "REPO", Path, "the repository to write", required=True)
    option(parser, "--name", "NAME", str,
           "write one model of this name into REPO, which may have other models")  # fmt: skip
    switch(parser, "--copy", "copy the bundle into it (default: link it)")
    add_engine_arguments(parser)


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the engine options that `deploy` and `serve` share. `engine_settings` reads them."""
    engine = parser.add_argument_group("engine")
    option(engine, "--max-batch-size", "N", at_least(1),
           "requests decoded at a time (default: 8, halved until they fit into the GPU's memory)")  # fmt: skip
    option(engine, "--max-queue", "N", at_least(0),
           "requests that may wait beyond these; further ones are refused at once", 256)  # fmt: skip
    option(engine, "--prefix-cache-bytes", "N", at_least(0),
           "memory for the rows of ended requests, which later ones with the same beginning reuse; 0: none are kept",
           256 << 20)  # fmt: skip
    option(engine, "--cache-tokens", "N", at_least(1),
           "on torch, the tokens of all requests together that caches have memory for (default: the most that "
           "--max-batch-size of them can have, on a GPU what fits of one request more)")  # fmt: skip
    option(engine, "--prompt-delay", "MS", at_least(0),
           "the longest time by which waiting prompts delay a round, or that of one chunk", 200)  # fmt: skip
    add_common(engine, *DRAFTING)
    option(engine, "--stream-interval", "MS", at_least(0),
           "least time between responses of a stream; tokens in between are sent as one response; 0: a response per "
           "round", 50)  # fmt: skip
    option(engine, "--max-step", "SECONDS", seconds,
           "the longest time for a round or a chunk of a prompt, after which the engine is taken to hang, ended and "
           "started again; 0: any", MAX_STEP)  # fmt: skip
    add_common(engine, "--threads")


def engine_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The settings of an engine process that these options give."""
    names = (
        "max_batch_size",
        "max_queue",
        "prefix_cache_bytes",
        "cache_tokens",
        "threads",
        "exact",
        "max_step",
    )
    settings = {name: getattr(args, name) for name in names}
    times = {name: getattr(args, name) / 1e3 for name in ("prompt_delay", "stream_interval")}
    return {**settings, **drafting_of(args), **times}


def run(args: argparse.Namespace) -> int:
    from dflash_trt.serving.deploy import bare_command, deploy

    bundle = bundle_of(args)
    try:
        registry.require_packages(bundle)
    except BundleError as error:  # another machine may serve it
        print(f"note: {error}", file=sys.stderr)
    deploy(bundle, args.out, name=args.name, copy=args.copy, **engine_settings(args))
    models = "models dflash and ensemble" if args.name is None else f"model {args.name}"
    print(f"{args.out}: {models}, serving {args.bundle}; serve it with:")
    print(bare_command(args.out))
    return 0
