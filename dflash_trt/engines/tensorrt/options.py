"""Options of a build for TensorRT and TensorRT-RTX: for which GPUs and shapes."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from dflash_trt.engines.base import EngineOptions, option


def parse_capability(text: str) -> int:
    """`120`, `12.0` or `sm120`, as 120. Raises ArgumentTypeError for anything else."""
    match = re.fullmatch(r"(?:sm_?)?(\d{1,2})\.?(\d)", text.strip().lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no compute capability such as 120 (or 12.0)")
    return int(match[1] + match[2])


@dataclass(frozen=True)
class TensorRTOptions(EngineOptions):
    """Options of a TensorRT build.

    capabilities: the GPUs to build for; 120 is 12.0. Empty: the GPUs of this machine.
    prefill_chunk: prompt tokens per pass. None is 512, or less with a small cache.
    plugins: "auto" uses our kernels for attention, taps, acceptance, MXFP4 experts and Gated DeltaNet if the engine,
        the GPU and the installed packages support them (`plugins/`). "none" uses standard operators. The result is the
        same but for rounding.
    timing_cache: a bundle whose timing caches the build reads, to choose the same tactics again.
    """

    title = "TensorRT"
    batch = "8"

    capabilities: tuple[int, ...] = field(
        default=(),
        metadata=option(
            "--compute-capability",
            nargs="+",
            type=parse_capability,
            metavar="CC",
            help="of the GPUs to build for, such as 89 120 (default: of this machine's GPUs)",
        ),
    )
    max_batch_size: int = 8
    prefill_chunk: int | None = field(
        default=None,
        metadata=option(
            "--prefill-chunk", least=1, metavar="N", help="most prompt tokens per pass (default: 512)"
        ),
    )
    timing_cache: Path | None = field(
        default=None,
        metadata=option(
            "--timing-cache",
            type=Path,
            metavar="BUNDLE",
            help="choose the kernels that this bundle's build chose, on the same GPU with the same version",
        ),
    )
    plugins: Literal["auto", "none"] = field(
        default="auto",
        metadata=option(
            "--plugins",
            choices=["auto", "none"],
            help="auto: our kernels for attention, taps, acceptance, MXFP4 experts and Gated DeltaNet, where supported "
            "(default)",
        ),
    )
