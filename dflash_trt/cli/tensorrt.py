"""Options of `dflash-trt build --engine tensorrt-rtx` and `--engine tensorrt`: for which GPUs and shapes."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from dflash_trt.cli.options import at_least

if TYPE_CHECKING:
    from dflash_trt.engines.tensorrt.plans import Options

ENGINES = ("tensorrt-rtx", "tensorrt")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "TensorRT", "with --engine tensorrt-rtx or tensorrt, and --max-batch-size (default: 8)"
    )
    group.add_argument(
        "--compute-capability",
        nargs="+",
        metavar="CC",
        help="of the GPUs to build for, such as 89 120 (default: of those here)",
    )
    group.add_argument(
        "--prefill-chunk", type=at_least(1), metavar="N", help="most prompt tokens per pass (default: 512)"
    )
    group.add_argument(
        "--plugins",
        choices=["auto", "none"],
        help="auto: our kernels for taps, acceptance and MXFP4 experts, where engine and GPU take them (default)",
    )


def from_arguments(args: argparse.Namespace) -> Options | None:
    """What was asked for; None where the engine is another one."""
    if args.engine not in ENGINES:
        if any(v is not None for v in (args.compute_capability, args.prefill_chunk, args.plugins)):
            args.usage_error(
                "--compute-capability, --prefill-chunk and --plugins need --engine tensorrt-rtx or tensorrt"
            )
        return None

    from dflash_trt.engines.tensorrt.plans import Options, parse_capability

    given: dict[str, Any] = {"capabilities": tuple(map(parse_capability, args.compute_capability or ()))}
    for name in ("max_batch_size", "prefill_chunk", "plugins"):
        if getattr(args, name) is not None:
            given[name] = getattr(args, name)
    return Options(**given)
