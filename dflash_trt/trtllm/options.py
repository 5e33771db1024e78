"""The settings of a build for TensorRT-LLM."""

from __future__ import annotations

from dataclasses import dataclass, field

from dflash_trt.engines.base import EngineOptions, option


@dataclass(frozen=True, kw_only=True)
class TensorRTLLMOptions(EngineOptions):
    """The user's settings. None: computed.

    `tensor_parallel` GPUs share every layer; the experts are spread over `expert_parallel` of them."""

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
