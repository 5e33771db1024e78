"""The release of TensorRT-LLM that bundles are made for, and the settings of a user."""

from __future__ import annotations

from dataclasses import dataclass, field

from dflash_trt.engines.base import GIB, EngineOptions, PagedPool, option

IMAGE = "nvcr.io/nvidia/tensorrt-llm/release"
VERSION = "1.4.0rc1"
# TensorRT-LLM 1.4: _DFLASH_BUDGET_ACTIVATION_RESERVE_BYTES and _SAFETY_FACTOR; the fraction is its default.
POOL = PagedPool(page=32, fraction=0.9, activation_bytes=6 * GIB, arena_safety=0.70)


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
