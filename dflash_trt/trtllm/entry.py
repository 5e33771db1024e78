"""TensorRT-LLM as an engine: checkpoints as they are, on one GPU or several, with a scheduler of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_trt.engines.base import (
    GIB,
    TRITON_TRTLLM_IMAGE,
    TRITON_TRTLLM_VERSION,
    Availability,
    BuildSettings,
    Container,
    EngineEntry,
    MemoryTraits,
    RunSettings,
    Weights,
)
from dflash_trt.errors import BuildError, CheckpointError, UsageError
from dflash_trt.trtllm.options import IMAGE, POOL, VERSION, TensorRTLLMOptions

if TYPE_CHECKING:
    from dflash_trt.bundle.manifest import Bundle
    from dflash_trt.bundle.workspace import Progress, Workspace
    from dflash_trt.checkpoint.catalogue import PublishedDrafter, TargetForm
    from dflash_trt.checkpoint.pair import CheckpointPair
    from dflash_trt.checkpoint.schema import DrafterConfig, TargetConfig
    from dflash_trt.formats.precision import Precision
    from dflash_trt.models.inventory import Inventory
    from dflash_trt.trtllm.build import ConfigurationJob
    from dflash_trt.trtllm.driver import Driver

# Architectures with Gated DeltaNet that DFlash was run with: Qwen3.5-4B, Qwen3.5-35B-A3B and Qwen3.6-35B-A3B in
# TensorRT-LLM's own tests (NVIDIA/TensorRT-LLM#15132, #16914, #18553), Qwen3.8-27B with DFlash2 by a user (#18085).
HYBRIDS = ("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration")


class TensorRTLLMEntry(EngineEntry):
    """Runs checkpoints unchanged, on one GPU or several, with TensorRT-LLM's own scheduler."""

    options = TensorRTLLMOptions
    weights_folder = ""
    draft_vocabulary = False
    tokenizer_folder = "target"
    modules = needed = ("tensorrt_llm",)
    own_loop = True
    memory = MemoryTraits(
        runtime_bytes=4 * GIB, shares_tables=True, pool=POOL
    )  # _DFLASH_BUDGET_RUNTIME_OVERHEAD_BYTES

    def check(
        self, precision: Precision | None, weights: Weights, options: TensorRTLLMOptions | None
    ) -> None:
        """A build needs the GPU that it is for, and keeps the checkpoint's number formats. Raises UsageError."""
        from dflash_trt.formats.precision import Precision

        if options is None:
            raise UsageError(f"--engine {self.name} needs --gpu, the GPU that it is configured for")
        if precision not in (None, Precision()):
            raise UsageError(
                f"--precision is not supported for --engine {self.name}, which runs checkpoints unchanged; make a "
                "quantized checkpoint with: dflash-trt quantize"
            )

    def read_target(self, directory: Path) -> TargetConfig:
        from dflash_trt.trtllm.targets import read_target

        return read_target(directory)

    def check_pair(self, target: TargetConfig, drafter: DrafterConfig | None) -> None:
        """Raise CheckpointError for a format that it does not read, and a drafter that it computes otherwise; or for a
        target with which its drafts without a drafter are not known.
        """
        from dflash_trt.trtllm.targets import check_drafter, target_quantization

        target_quantization(target)
        if drafter is not None:
            check_drafter(drafter)
        elif target.delta_layers:
            raise CheckpointError(
                f"{target.path}: has layers with a state, with which TensorRT-LLM's drafts from a request's own text "
                "were not seen; give a drafter, or use another engine"
            )

    def refuses_published(self, drafter: PublishedDrafter, form: TargetForm | None) -> str:
        if drafter.kind not in ("DFlash", "DFlash2") or drafter.speculators:
            return "bundles are made for DFlash and DFlash2 as z-lab stores them"
        if drafter.target == "Qwen/Qwen3-Coder-Next":
            return "DFlash with Qwen3-Next was not seen there"
        if form is not None and form.groups:
            return "several groups of layers (NVIDIA/TensorRT-LLM#17725, open)"
        return ""

    def job(
        self, pair: CheckpointPair, settings: BuildSettings, place: Workspace, progress: Progress
    ) -> ConfigurationJob:
        """Its part in a build. Raises BuildError for a hybrid target with which its DFlash is not known."""
        from dflash_trt.trtllm.build import configuration_job

        config = pair.target.config
        if config.delta_layers and config.architecture not in HYBRIDS:
            raise BuildError(
                f"{config.path}: the architecture is {config.architecture}, but TensorRT-LLM's DFlash is known with "
                f"{' and '.join(HYBRIDS)} only, among targets with Gated DeltaNet; use --engine onnxruntime"
            )
        return configuration_job(pair, settings, place, progress)

    def open(self, bundle: Bundle, settings: RunSettings) -> Driver:
        """It schedules by itself, within the limits of the bundle. `settings` play no part."""
        from dflash_trt.trtllm.driver import Driver

        return Driver(bundle)

    def describe(self, bundle: Bundle) -> dict[str, Any]:
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

    def availability(self, missing: Sequence[str], capabilities: Sequence[int]) -> Availability:
        here = not self.lacking()
        note = "" if here else f"to run: {self.installation()}"
        return Availability(build=not missing, run=not missing and here, note=note)

    def memory_settings(self, inventory: Inventory, options: TensorRTLLMOptions) -> dict[str, Any]:
        from dflash_trt.trtllm.configuration import memory_settings
        from dflash_trt.trtllm.targets import target_quantization

        return memory_settings(inventory, options, target_quantization(inventory.target))

    def installation(self, manifest: Mapping[str, Any] | None = None) -> str:
        version = VERSION if manifest is None else manifest["tensorrt_llm"]["version"]
        return f"pip install tensorrt_llm=={version}, or run it in {IMAGE}:{version}"

    def container(self, manifest: Mapping[str, Any]) -> Container:
        """NVIDIA's image of Triton with TensorRT-LLM, and the package to put into it."""
        version = manifest["tensorrt_llm"]["version"]
        note = (
            f"# This image has TensorRT-LLM {TRITON_TRTLLM_VERSION}, which lacks DFlash; the bundle is for {version}, "
            "which the command installs. Without Triton: launch/serve.sh of the bundle"
        )
        return Container(TRITON_TRTLLM_IMAGE, packages=(f"tensorrt_llm=={version}",), note=note)
