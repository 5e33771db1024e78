"""How a target's checkpoint is quantized, as far as TensorRT-LLM cares: ModelOpt's unified form, or gpt-oss's MXFP4."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dflash_trt.checkpoint.config import TARGET_ARCHITECTURES, TargetConfig, read_target_config
from dflash_trt.checkpoint.families import open_config
from dflash_trt.checkpoint.fields import Fields, read_object
from dflash_trt.errors import CheckpointError

_CONFIG = "hf_quant_config.json"
# ModelOpt's name -> ours.
SCHEMES: Mapping[str, str] = {"FP8": "fp8", "NVFP4": "nvfp4"}


@dataclass(frozen=True, slots=True)
class Quantization:
    """`scheme`: of the linear layers, "fp8", "nvfp4", "mxfp4" (experts) or None; `kv_cache`: "fp8" or None."""

    scheme: str | None = None
    kv_cache: str | None = None


def read_target(directory: Path) -> tuple[TargetConfig, Quantization]:
    """A target's configuration, quantized by ModelOpt or not: hf_quant_config.json, or config.json's section.

    Raises CheckpointError as read_target_config does, and for a quantization that is not one of SCHEMES.
    """
    path = directory / "config.json"
    values = read_object(path)
    modelopt = _modelopt(directory, Fields(path, values))
    if modelopt is None:
        config = read_target_config(directory)
        mxfp4 = config.moe is not None and config.moe.quantization is not None
        return config, Quantization("mxfp4" if mxfp4 else None)
    # The rest of the file is that of the model before it was quantized.
    fields = Fields(path, {key: value for key, value in values.items() if key != "quantization_config"})
    config = TARGET_ARCHITECTURES[open_config(fields, "target", TARGET_ARCHITECTURES)][1](fields)
    return config, modelopt


def _modelopt(directory: Path, config: Fields) -> Quantization | None:
    section = config.section("quantization_config")
    if (directory / _CONFIG).is_file():
        file = Fields(directory / _CONFIG, read_object(directory / _CONFIG))
        section = file.section("quantization")
        if section is None:
            raise file.error("quantization", "is missing, expected an object with quant_algo")
    elif section is None or section.get("quant_method") != "modelopt":
        return None
    algorithm, cache = section.get("quant_algo"), section.get("kv_cache_quant_algo")
    if algorithm not in SCHEMES and not (algorithm is None and cache is not None):
        raise section.error("quant_algo", f"is {algorithm!r}, supported are {', '.join(SCHEMES)}")
    if cache not in (None, "FP8"):
        raise section.error("kv_cache_quant_algo", f"is {cache!r}, supported is 'FP8'")
    scheme = SCHEMES.get(algorithm) if isinstance(algorithm, str) else None
    return Quantization(scheme, None if cache is None else "fp8")


def check_drafter(directory: Path) -> None:
    """TensorRT-LLM's DFlash reads `fc` and the key and value projections as they lie: they must not be quantized.

    Raises CheckpointError where a drafter says that it is.
    """
    values = read_object(directory / "config.json")
    if values.get("quantization_config") is not None or (directory / _CONFIG).is_file():
        raise CheckpointError(
            f"{directory}: the drafter is quantized, but TensorRT-LLM uses its fc, key and value projections as plain "
            "matrices; give the drafter in BF16"
        )
