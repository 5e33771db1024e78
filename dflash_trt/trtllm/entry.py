"""TensorRT-LLM as an engine: checkpoints as they are, on one GPU or several, with a scheduler of its own."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
    EngineOptions,
    MemoryTraits,
    PagedPool,
    RunSettings,
    Weights,
    option,
)
from dflash_trt.errors import BuildError, CheckpointError, UsageError

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

IMAGE = "nvcr.io/nvidia/tensorrt-llm/release"
VERSION = "1.4.0rc1"
# TensorRT-LLM 1.4: _DFLASH_BUDGET_ACTIVATION_RESERVE_BYTES and _SAFETY_FACTOR; the fraction is its default.
POOL = PagedPool(page=32, fraction=0.9, activation_bytes=6 * GIB, arena_safety=0.70)
DRAFTER_BACKENDS = ("VANILLA", "TRTLLM", "FA4")
# Architectures with Gated DeltaNet that DFlash was run with: Qwen3.5-4B, Qwen3.5-35B-A3B and Qwen3.6-35B-A3B in
# TensorRT-LLM's own tests (NVIDIA/TensorRT-LLM#15132, #16914, #18553), Qwen3.8-27B with DFlash2 by a user (#18085).
HYBRIDS = ("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration")


def _schedule(text: str) -> dict[int, int]:
    if text == "none":
        return {}
    pairs = [part.split(":") for part in text.split(",")]
    schedule = {int(batch): int(length) for batch, length in pairs}
    if len(schedule) != len(pairs):
        raise argparse.ArgumentTypeError(f"{text} names a batch twice")
    return schedule


@dataclass(frozen=True, kw_only=True)
class TensorRTLLMOptions(EngineOptions):
    """The user's settings. None: computed.

    `tensor_parallel` GPUs share every layer; the experts are spread over `expert_parallel` of them.
    `draft_len_schedule` maps a number of active requests to the tokens drafted up to that number. Empty: always the
    whole block.
    """

    title = "TensorRT-LLM"
    batch = "what fits, at most 64"

    gpu: str = field(
        metadata=option(
            "--gpu", metavar="NAME", help="b200, h200, rtx-pro-6000, ... (dflash-trt plan --gpus)"
        )
    )
    tensor_parallel: int = field(
        default=1,
        metadata=option("--tp", least=1, metavar="N", help="GPUs that share every layer (default: 1)"),
    )
    expert_parallel: int = field(
        default=1,
        metadata=option("--ep", least=1, metavar="N", help="GPUs that share the experts (default: 1)"),
    )
    gpus_per_node: int | None = field(
        default=None,
        metadata=option("--gpus-per-node", least=1, metavar="N", help="default: what such machines have"),
    )
    max_batch_size: int | None = None
    drafter_attention: str | None = field(
        default=None,
        metadata=option("--drafter-attention", choices=DRAFTER_BACKENDS, help="default: by GPU"),
    )
    block_reuse: int | None = field(
        default=None,
        metadata=option(
            "--block-reuse",
            least=1,
            metavar="TOKENS",
            help="reuse the KV cache of equal beginnings of prompts, but compute at least the last TOKENS, as the "
            "drafter's context (default: compute the whole prompt)",
        ),
    )
    draft_len_schedule: dict[int, int] | None = field(
        default=None,
        metadata=option(
            "--draft-len-schedule",
            type=_schedule,
            metavar="BATCH:LEN,...",
            help="draft LEN tokens while at most BATCH requests are active, or none: the whole block always (default: "
            "none)",
        ),
    )


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
            if isinstance(value, dict):  # as its option takes it
                value = ",".join(f"{key}:{each}" for key, each in value.items()) or "none"
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
