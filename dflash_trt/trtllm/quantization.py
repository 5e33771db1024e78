"""The quantization of a pair's checkpoints, as far as TensorRT-LLM supports it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dflash_trt.checkpoint.quantization import read_quantization
from dflash_trt.checkpoint.schema import TargetConfig
from dflash_trt.errors import CheckpointError

# Model Optimizer's names in hf_quant_config.json.
ALGORITHMS = ("FP8", "NVFP4")


@dataclass(frozen=True, slots=True)
class TargetQuantization:
    """`scheme`: of the linear layers, "fp8" or "nvfp4", of the experts "mxfp4", or None. `kv_cache`: "fp8" or None."""

    scheme: str | None = None
    kv_cache: str | None = None


def target_quantization(config: TargetConfig) -> TargetQuantization:
    """The quantization of a target: Model Optimizer's unified FP8 or NVFP4, or gpt-oss's MXFP4.

    Raises CheckpointError for an unsupported format.
    """
    if config.moe is not None and config.moe.quantization is not None:
        return TargetQuantization("mxfp4")
    found = read_quantization(config.path.parent)
    if found.layers or (found.default is not None and found.default.name not in ALGORITHMS):
        name = "MIXED_PRECISION" if found.layers else found.default and found.default.name
        raise CheckpointError(
            f"{found.path}: quant_algo is {name}, supported for TensorRT-LLM are {', '.join(ALGORITHMS)}, the same for "
            "all linear layers"
        )
    if found.blocks is not None:
        raise CheckpointError(
            f"{found.path}: the checkpoint is {found.name}, which the memory plan for TensorRT-LLM does not know; give "
            "the checkpoint in BF16, or one of NVIDIA's in FP8 or NVFP4"
        )
    scheme = found.default.scheme if found.default is not None else None
    return TargetQuantization(scheme, "fp8" if found.kv_cache else None)


def check_drafter(directory: Path) -> None:
    """Check that the drafter is not quantized. TensorRT-LLM's DFlash uses its `fc`, key and value projections
    unchanged.

    Raises CheckpointError if it is quantized.
    """
    found = read_quantization(directory)
    if found.default is not None or found.layers:
        raise CheckpointError(
            f"{found.path}: the drafter is quantized, but TensorRT-LLM uses its fc, key and value projections as plain "
            "matrices; give the drafter in BF16"
        )
