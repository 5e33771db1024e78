"""Options of `dflash-trt build --engine tensorrt-llm`: where the bundle is to run."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from dflash_trt.cli.options import at_least

if TYPE_CHECKING:
    from dflash_trt.trtllm.configuration import Deployment

# Destination -> its default; everything but --gpu may be left out.
_DEFAULTS: dict[str, Any] = {
    "tp": 1,
    "ep": 1,
    "gpus_per_node": None,
    "trtllm_version": None,
    "max_batch_size": None,
    "drafter_attention": None,
    "moe_backend": None,
    "draft_len_schedule": {},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "TensorRT-LLM", "with --engine tensorrt-llm, and --max-batch-size (default: what fits, at most 64)"
    )
    group.add_argument("--gpu", metavar="NAME", help="b200, h200, rtx-pro-6000, ... (dflash-trt plan --help)")
    group.add_argument("--tp", type=at_least(1), metavar="N", help="GPUs that share every layer (default: 1)")
    group.add_argument("--ep", type=at_least(1), metavar="N", help="GPUs that share the experts (default: 1)")
    group.add_argument(
        "--gpus-per-node", type=at_least(1), metavar="N", help="default: what such machines have"
    )
    group.add_argument("--trtllm-version", metavar="VERSION", help="default: the newest known")
    group.add_argument(
        "--drafter-attention", metavar="BACKEND", help="VANILLA, TRTLLM or FA4 (default: by GPU)"
    )
    group.add_argument("--moe-backend", metavar="BACKEND", help="of the target's experts (default: by GPU)")
    group.add_argument(
        "--draft-len-schedule",
        type=_schedule,
        metavar="BATCH:LEN,...",
        help="draft LEN tokens while at most BATCH requests are active",
    )


def from_arguments(args: argparse.Namespace) -> Deployment | None:
    """The deployment that was asked for; None where the engine is another one."""
    given = {name: getattr(args, name) for name in _DEFAULTS if getattr(args, name) is not None}
    if args.engine != "tensorrt-llm":
        if args.gpu is not None or given.keys() - {"max_batch_size"}:
            args.usage_error("--gpu, --tp and the like need --engine tensorrt-llm")
        return None
    if args.gpu is None:
        args.usage_error("--engine tensorrt-llm needs --gpu")

    from dflash_trt.trtllm.configuration import Deployment

    values = _DEFAULTS | given
    return Deployment(
        gpu=args.gpu,
        tensor_parallel=values["tp"],
        expert_parallel=values["ep"],
        gpus_per_node=values["gpus_per_node"],
        version=values["trtllm_version"],
        max_batch_size=values["max_batch_size"],
        drafter_attention=values["drafter_attention"],
        moe_backend=values["moe_backend"],
        draft_len_schedule=values["draft_len_schedule"],
    )


def _schedule(text: str) -> dict[int, int]:
    pairs = [part.split(":") for part in text.split(",")]
    found = {int(batch): int(length) for batch, length in pairs}
    if len(found) != len(pairs):
        raise argparse.ArgumentTypeError(f"{text} names a batch twice")
    return found
