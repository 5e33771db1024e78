"""The formats of quantized targets that TensorRT-LLM reads, and the GPUs that run them.

Its PyTorch runtime reads Model Optimizer's files, and from config.json FP8 in blocks, compressed-tensors with one group
of layers, and gpt-oss's MXFP4; it raises NotImplementedError for other methods (tensorrt_llm/llmapi/llm_utils.py,
tensorrt_llm/models/quant_config_utils.py, NVIDIA/TensorRT-LLM#14468).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_trt.checkpoint.fields import Fields
from dflash_trt.checkpoint.quantization import QUANT_CONFIG, read_quantization
from dflash_trt.checkpoint.schema import TargetConfig
from dflash_trt.errors import BuildError, CheckpointError, show
from dflash_trt.files.reading import read_object
from dflash_trt.planning.gpus import Gpu

# Format -> compute capabilities: the hardware matrix of NVIDIA's page on quantization; for rows and blocks of FP8 also
# the pull requests NVIDIA/TensorRT-LLM#5615 and #9174. Where mxfp4 runs follows from the backend of the experts.
RUNS_ON: Mapping[str, tuple[int, ...]] = {
    "fp8": (89, 90, 100, 103, 120, 121),
    "fp8-rows": (89, 90, 120),
    "fp8-blocks": (90, 100, 103, 120),
    "nvfp4": (100, 103, 120, 121),
    "int4-awq": (80, 86, 89, 90, 100, 103),
}
# Names of Model Optimizer's algorithms -> formats. Those that may be mixed in one checkpoint come first.
_MIXED = {"FP8": "fp8", "NVFP4": "nvfp4"}
_ALGORITHMS = {
    **_MIXED,
    "FP8_PER_CHANNEL_PER_TOKEN": "fp8-rows",
    "FP8_PB_WO": "fp8-blocks",
    "FP8_BLOCK_SCALES": "fp8-blocks",
    "W4A16_AWQ": "int4-awq",
}
# compressed-tensors: bits, type, strategy of weights, strategy of inputs -> format; and the group sizes that are read.
_GROUPS: Mapping[tuple[Any, ...], str] = {
    (8, "float", "channel", "token"): "fp8-rows",
    (8, "float", "block", "group"): "fp8-blocks",
    (4, "float", "tensor_group", "tensor_group"): "nvfp4",
}
_SIZES: Mapping[str, tuple[int | None, ...]] = {"fp8-blocks": (128,), "nvfp4": (16,)}
_BLOCK = [128, 128]
_READ = "it reads Model Optimizer's FP8, NVFP4 and W4A16_AWQ, FP8 in blocks, and FP8 and NVFP4 of compressed-tensors"


@dataclass(frozen=True, slots=True)
class TargetQuantization:
    """formats: of the linear layers and experts, empty if nothing is quantized. kv_cache: "fp8" or None."""

    formats: frozenset[str] = frozenset()
    kv_cache: str | None = None

    @property
    def name(self) -> str:
        """The formats, as messages name them; "bfloat16" where nothing is quantized."""
        return "+".join(sorted(self.formats)) or "bfloat16"


def target_quantization(config: TargetConfig) -> TargetQuantization:
    """The quantization of a target, as TensorRT-LLM reads it from the same files.

    Raises CheckpointError for a format that it does not read, naming the file and the format.
    """
    if config.moe is not None and config.moe.quantization is not None:
        return TargetQuantization(frozenset({config.moe.quantization}))
    directory = config.path.parent
    section = read_object(config.path).get("quantization_config")
    if (directory / QUANT_CONFIG).is_file() or not isinstance(section, dict):
        return _model_optimizer(directory)
    fields = Fields(config.path, section, "quantization_config.")
    method = fields.get("quant_method") or ("compressed-tensors" if "config_groups" in section else None)
    if method in ("modelopt", "modelopt_mixed"):
        return _model_optimizer(directory)
    if method == "fp8" and fields.get("weight_block_size") == _BLOCK:
        return TargetQuantization(frozenset({"fp8-blocks"}))
    if method == "compressed-tensors":
        return _compressed_tensors(fields)
    if method == "fp8" and fields.get("weight_block_size") is not None:
        raise fields.error(
            "weight_block_size", f"is {show(fields.get('weight_block_size'))}, TensorRT-LLM reads {_BLOCK}"
        )
    raise fields.error("quant_method", f"is {show(method)}, which TensorRT-LLM does not read; {_READ}")


def _model_optimizer(directory: Path) -> TargetQuantization:
    stored = read_quantization(directory)
    names = {algorithm.name for algorithm in stored.algorithms}
    mixed = stored.default is None
    known = _MIXED if mixed else _ALGORITHMS
    if "FP8_PB_WO" in names and '"fp8_pb_wo"' not in stored.path.read_text():
        raise CheckpointError(
            f"{stored.path}: quant_algo is FP8_PB_WO, which TensorRT-LLM knows in small letters only; write fp8_pb_wo, "
            "as Model Optimizer does"
        )
    if unknown := sorted(names - set(known)):
        raise CheckpointError(
            f"{stored.path}: quant_algo is {'MIXED_PRECISION with ' * mixed}{', '.join(unknown)}, TensorRT-LLM bundles "
            f"are made for {', '.join(known)}"
        )
    return TargetQuantization(frozenset(known[name] for name in names), "fp8" if stored.kv_cache else None)


def _compressed_tensors(fields: Fields) -> TargetQuantization:
    groups = fields.section("config_groups")
    names = [] if groups is None else list(groups.values)
    if groups is None or len(names) != 1:
        raise fields.error(
            "config_groups",
            f"has {len(names)} groups ({', '.join(map(show, names)) or 'none'}): the releases known here read one "
            "(several: NVIDIA/TensorRT-LLM#17725, open when it was looked up); give the target as Model Optimizer "
            "exports it, where layers may differ",
        )
    group = groups.section(names[0])
    assert group is not None
    weights, inputs = group.section("weights"), group.section("input_activations")
    if weights is None:
        raise group.error("weights", "is missing, expected an object")
    strategy = None if inputs is None else inputs.get("strategy")
    scheme = (weights.get("num_bits"), weights.get("type") or "int", weights.get("strategy"), strategy)
    name = _GROUPS.get(scheme)
    sized = inputs if name == "fp8-blocks" else weights
    if name is None or sized is None or sized.get("group_size") not in _SIZES.get(name, (None, -1)):
        said = fields.get("format") or "compressed-tensors"
        raise group.error(
            "weights",
            f"are {show(scheme[0])} bits of {scheme[1]} by {scheme[2]}, with inputs by {strategy or 'none'} ({said}): "
            f"TensorRT-LLM does not read them; {_READ}",
        )
    cache = fields.section("kv_cache_scheme")
    if cache is not None and (cache.get("num_bits"), cache.get("type")) != (8, "float"):
        raise fields.error("kv_cache_scheme", f"is {show(cache.values)}, TensorRT-LLM reads 8 bits of float")
    return TargetQuantization(frozenset({name}), None if cache is None else "fp8")


def check_gpu(config: TargetConfig, quantization: TargetQuantization, gpu: Gpu) -> None:
    """Check that this GPU runs a target in this format. Raises BuildError naming both."""
    for name in sorted(quantization.formats - {"mxfp4"}):
        if config.architecture == "GptOssForCausalLM":
            raise BuildError(
                f"{config.path.parent}: gpt-oss in {name}, but TensorRT-LLM's matrix has gpt-oss in MXFP4 only; "
                "give OpenAI's checkpoint as it is"
            )
        if gpu.sm not in RUNS_ON[name]:
            others = ", ".join(sorted(other for other in RUNS_ON if gpu.sm in RUNS_ON[other])) or "none"
            raise BuildError(
                f"{config.path.parent}: the target is in {name}, which TensorRT-LLM runs on "
                f"SM{', SM'.join(map(str, RUNS_ON[name]))}, and {gpu.product} is SM{gpu.sm}; give a checkpoint in "
                f"BF16, or in a format for SM{gpu.sm}: {others}"
            )
