"""The settings of a build for TensorRT-LLM."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_trt.engines.base import EngineOptions
from dflash_trt.options import option


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
