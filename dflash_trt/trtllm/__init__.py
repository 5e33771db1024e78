"""TensorRT-LLM as an engine: checkpoints as they are, on one GPU or several, with a scheduler of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_trt.engines.base import Availability, BuildSettings, Engine, EngineOptions, RunSettings, Weights
from dflash_trt.engines.packages import installation
from dflash_trt.errors import BuildError, UsageError
from dflash_trt.options import option

if TYPE_CHECKING:
    from dflash_trt.bundle.manifest import Bundle
    from dflash_trt.bundle.workspace import Progress, Workspace
    from dflash_trt.checkpoint.catalogue import PublishedDrafter, TargetForm
    from dflash_trt.checkpoint.pair import CheckpointPair
    from dflash_trt.checkpoint.schema import DrafterConfig, TargetConfig
    from dflash_trt.formats.precision import Precision
    from dflash_trt.models.inventory import Inventory
    from dflash_trt.trtllm.driver import Driver
    from dflash_trt.trtllm.job import ConfigurationJob


@dataclass(frozen=True, kw_only=True)
class TensorRTLLMOptions(EngineOptions):
    """The user's settings. None: computed.

    `tensor_parallel` GPUs share every layer; the experts are spread over `expert_parallel` of them."""

    title = "TensorRT-LLM"
    batch = "what fits, at most 64"

    gpu: str = option("b200, h200, rtx-pro-6000, ... (dflash-trt plan --gpus)", "NAME")
    tensor_parallel: int = option(
        "GPUs that share every layer (default: 1)", "N", flag="--tp", least=1, default=1
    )
    expert_parallel: int = option(
        "GPUs that share the experts (default: 1)", "N", flag="--ep", least=1, default=1
    )
    gpus_per_node: int | None = option("default: what such machines have", "N", least=1, default=None)
    max_batch_size: int | None = None


# Architectures with Gated DeltaNet that DFlash was run with: Qwen3.5-4B, Qwen3.5-35B-A3B and Qwen3.6-35B-A3B in
# TensorRT-LLM's own tests (NVIDIA/TensorRT-LLM#15132, #16914, #18553), Qwen3.8-27B with DFlash2 by a user (#18085).
HYBRIDS = ("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration")


def check(precision: Precision | None, weights: Weights, options: TensorRTLLMOptions | None) -> None:
    """A build needs the GPU that it is for, and keeps the checkpoint's number formats. Raises UsageError."""
    from dflash_trt.formats.precision import Precision

    if options is None:
        raise UsageError("--engine tensorrt-llm needs --gpu, the GPU that it is configured for")
    if precision not in (None, Precision()):
        raise UsageError(
            "--precision is not supported for --engine tensorrt-llm, which runs checkpoints unchanged; make a "
            "quantized checkpoint with: dflash-trt quantize"
        )


def read_pair(target: Path, drafter: Path | None) -> tuple[TargetConfig, DrafterConfig | None]:
    from dflash_trt.trtllm.targets import read_pair

    return read_pair(target, drafter)


def refuses_published(drafter: PublishedDrafter, form: TargetForm | None) -> str:
    if drafter.kind not in ("DFlash", "DFlash2") or drafter.speculators:
        return "bundles are made for DFlash and DFlash2 as z-lab stores them"
    if drafter.target == "Qwen/Qwen3-Coder-Next":
        return "DFlash with Qwen3-Next was not seen there"
    if form is not None and form.groups:
        return "several groups of layers (NVIDIA/TensorRT-LLM#17725, open)"
    return ""


def build(
    pair: CheckpointPair, settings: BuildSettings, place: Workspace, progress: Progress
) -> ConfigurationJob:
    """Its part in a build. Raises BuildError for a hybrid target with which its DFlash is not known."""
    from dflash_trt.trtllm.job import configuration_job

    config = pair.target.config
    if config.delta_layers and config.architecture not in HYBRIDS:
        raise BuildError(
            f"{config.path}: the architecture is {config.architecture}, but TensorRT-LLM's DFlash is known with "
            f"{' and '.join(HYBRIDS)} only, among targets with Gated DeltaNet; use --engine onnxruntime"
        )
    return configuration_job(pair, settings, place, progress)


def open(bundle: Bundle, settings: RunSettings) -> Driver:
    """It schedules by itself, within the limits of the bundle. `settings` play no part."""
    from dflash_trt.trtllm.driver import Driver

    return Driver(bundle)


def describe(bundle: Bundle) -> dict[str, Any]:
    """Where it runs, what it takes of each GPU, and the reason of every setting."""
    section = bundle.manifest["tensorrt_llm"]
    world = section["memory"]["tensor_parallel"]
    choices: dict[str, str] = {}
    for choice in section["choices"]:
        name, value = choice["name"], choice["value"]
        choices[name] = choice["reason"] if value == "" else f"{value}: {choice['reason']}"
    return {
        "runs_on": f"{world} x {section['gpu']}, {section['nodes']} node(s), TensorRT-LLM {section['version']}",
        "memory_per_gpu": section["arithmetic"],
        "room": section["room"],
        "choices": choices,
    }


def available(capabilities: Sequence[int]) -> Availability:
    here = not ENGINE.lacking()
    return Availability(build=True, run=here, note="" if here else f"to run: {installation(ENGINE)}")


def memory_settings(inventory: Inventory, options: TensorRTLLMOptions) -> dict[str, Any]:
    from dflash_trt.trtllm.configuration import memory_settings
    from dflash_trt.trtllm.targets import target_quantization

    return memory_settings(inventory, options, target_quantization(inventory.target))


ENGINE = Engine(
    name="tensorrt-llm",
    check=check,
    build=build,
    open=open,
    describe=describe,
    available=available,
    modules=("tensorrt_llm",),
    needed=("tensorrt_llm",),
    options=TensorRTLLMOptions,
    unchanged=True,
    own_loop=True,
    read_pair=read_pair,
    refuses_published=refuses_published,
    memory_settings=memory_settings,
)
