"""What TensorRT-LLM runs: families that this package does not read, formats and the GPUs for them, and drafters.

Its PyTorch runtime reads Model Optimizer's files, and from config.json FP8 in blocks, compressed-tensors with one group
of layers, and gpt-oss's MXFP4; it raises NotImplementedError for other methods (tensorrt_llm/llmapi/llm_utils.py,
tensorrt_llm/models/quant_config_utils.py, NVIDIA/TensorRT-LLM#14468).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from dflash_trt.checkpoint.fields import Fields
from dflash_trt.checkpoint.pair import check_pair
from dflash_trt.checkpoint.quantization import QUANT_CONFIG, read_quantization
from dflash_trt.checkpoint.rope import RopeConfig
from dflash_trt.checkpoint.schema import DrafterConfig, MoEConfig, TargetConfig
from dflash_trt.errors import BuildError, CheckpointError, show
from dflash_trt.files.reading import read_config
from dflash_trt.models.configs import read_drafter_config, read_target_config
from dflash_trt.models.reading import HEAD_DIM, WIDTH, decoder, expert_counts, target
from dflash_trt.planning.gpus import Gpu

DFLASH2 = "DFlash2DraftModel"


class Foreign(NamedTuple):
    """A family that only TensorRT-LLM runs: where it is listed, and what is known of DFlash with it."""

    source: str
    dflash: str
    latent: bool


_LISTED = "docs/source/models/supported-models.md of its sources at 00b6d5a2, looked up 26 November 2026"
_PAGE = (
    "https://nvidia.github.io/TensorRT-LLM/1.4.0rc1/models/supported-models.html, looked up 26 November 2026"
)
_UNSEEN = "not seen; the table of features there says No for DeepseekV3ForCausalLM, whose module runs it"
# Where a family has both a listed class and a published block drafter. `latent`: MLA, whose cache rows are latent.
TARGETS: Mapping[str, Foreign] = {
    "MiniMaxM2ForCausalLM": Foreign(  # MiniMax-M2 to M2.7
        _LISTED, "run by a user in July 2026 (NVIDIA/TensorRT-LLM#16005)", latent=False
    ),
    "DeepseekV3ForCausalLM": Foreign(_PAGE, _UNSEEN, latent=True),  # Kimi-K2
    "KimiK25ForConditionalGeneration": Foreign(_LISTED, _UNSEEN, latent=True),  # Kimi-K2.5, Kimi-K2.6
    "GlmMoeDsaForCausalLM": Foreign(_LISTED, _UNSEEN, latent=True),  # GLM-5, GLM-5.1
}


def read_target(directory: Path) -> TargetConfig:
    """A target's configuration; of one of TARGETS, what a build for TensorRT-LLM needs to know of it.

    Raises CheckpointError as `read_target_config`.
    """
    top = Fields.read(directory / "config.json")
    names = top.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else None
    if not isinstance(name, str) or name not in TARGETS:
        return read_target_config(directory)
    text = top.section("text_config") or top
    rope = RopeConfig("default", text.number("rope_theta", default=10_000.0), {})
    common = decoder(text, rope=rope, architecture=name)
    if TARGETS[name].latent:
        # A row of the cache is one latent and the rotated part of a key; plans count 2 * kv_heads * head_dim numbers.
        latent = (text.integer(key, maximum=HEAD_DIM) for key in ("kv_lora_rank", "qk_rope_head_dim"))
        common |= {"num_key_value_heads": 1, "head_dim": sum(latent) // 2}
    layers = common["num_hidden_layers"]
    return target(text, common, [None] * layers, _experts(text, layers))


def read_pair(target: Path, drafter: Path | None) -> tuple[TargetConfig, DrafterConfig | None]:
    """The configurations of a target and its drafter.

    Raises PairError where they do not fit, and CheckpointError for a format that it does not read, and a drafter that
    it computes otherwise; or for a target with which its drafts without a drafter are not known.
    """
    config = read_target(target)
    draft_config = None if drafter is None else read_drafter_config(drafter, config)
    target_quantization(config)
    if draft_config is not None:
        check_drafter(draft_config)
        check_pair(config, draft_config)
    elif config.delta_layers:
        raise CheckpointError(
            f"{config.path}: has layers with a state, with which TensorRT-LLM's drafts from a request's own text "
            "were not seen; give a drafter, or use another engine"
        )
    return config, draft_config


def _experts(text: Fields, layers: int) -> MoEConfig:
    """The mixture of experts of one of TARGETS, whose first layers may be dense."""
    count, chosen = expert_counts(text, ("num_local_experts", "n_routed_experts"), ("num_experts_per_tok",))
    size = "moe_intermediate_size" if text.get("moe_intermediate_size") is not None else "intermediate_size"
    dense = text.integer("first_k_dense_replace", minimum=0, maximum=layers, default=0)
    return MoEConfig(
        num_experts=count,
        experts_per_token=chosen,
        intermediate_size=text.integer(size, maximum=WIDTH),
        normalize_weights=True,
        sparse_layers=tuple(layer >= dense for layer in range(layers)),
    )


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
    top = read_config(config.path)
    text = top.get("text_config")
    section = top.get("quantization_config") or (
        text.get("quantization_config") if isinstance(text, dict) else None
    )
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
        raise fields.wrong("weight_block_size", f"TensorRT-LLM reads {_BLOCK}")
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
        form = fields.get("format") or "compressed-tensors"
        raise group.error(
            "weights",
            f"are {show(scheme[0])} bits of {scheme[1]} by {scheme[2]}, with inputs by {strategy or 'none'} ({form}): "
            f"TensorRT-LLM does not read them; {_READ}",
        )
    cache = fields.section("kv_cache_scheme")
    if cache is not None and (cache.get("num_bits"), cache.get("type")) != (8, "float"):
        raise fields.wrong("kv_cache_scheme", "TensorRT-LLM reads 8 bits of float")
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


def check_drafter(config: DrafterConfig) -> None:
    """Check that TensorRT-LLM's class for DFlash and DFlash2 computes what this drafter computes.

    Raises CheckpointError for another kind, for full attention that is causal in a block (JetSpec), and for a quantized
    drafter: the class takes `fc`, key and value projections as plain matrices.
    """
    if config.architecture not in ("DFlashDraftModel", DFLASH2):
        raise CheckpointError(
            f"{config.path}: the architecture is {config.architecture}, but TensorRT-LLM gets DFlashDraftModel and "
            f"{DFLASH2} only; build with another engine"
        )
    if any(layer.causal and layer.window is None for layer in config.layers):
        raise CheckpointError(
            f"{config.path}: rows of a block see earlier rows only (causal_head or is_causal), but TensorRT-LLM's "
            "DFlash lets them see each other; build with another engine"
        )
    quantization = read_quantization(config.path.parent)
    if quantization.name is not None:
        raise CheckpointError(
            f"{quantization.path}: the drafter is quantized, but TensorRT-LLM uses its fc, key and value projections "
            "as plain matrices; give the drafter in BF16"
        )
