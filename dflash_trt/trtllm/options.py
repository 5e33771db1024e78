"""The settings of a build for TensorRT-LLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from dflash_trt.engines.base import EngineOptions
from dflash_trt.options import Option


@dataclass(frozen=True, kw_only=True)
class TensorRTLLMOptions(EngineOptions):
    """The user's settings. None: computed.

    `tensor_parallel` GPUs share every layer; the experts are spread over `expert_parallel` of them."""

    title = "TensorRT-LLM"
    batch = "what fits, at most 64"

    gpu: Annotated[str, Option(help="b200, h200, rtx-pro-6000, ... (dflash-trt plan --gpus)", metavar="NAME")]
    tensor_parallel: Annotated[
        int, Option(flag="--tp", least=1, metavar="N", help="GPUs that share every layer (default: 1)")
    ] = 1
    expert_parallel: Annotated[
        int, Option(flag="--ep", least=1, metavar="N", help="GPUs that share the experts (default: 1)")
    ] = 1
    gpus_per_node: Annotated[
        int | None, Option(least=1, metavar="N", help="default: what such machines have")
    ] = None
    max_batch_size: int | None = None
