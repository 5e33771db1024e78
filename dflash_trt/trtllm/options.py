"""Options of a build for TensorRT-LLM: where the bundle is to run."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field

from dflash_trt.engines.base import EngineOptions, option


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
            "--gpu", metavar="NAME", help="b200, h200, rtx-pro-6000, ... (dflash-trt plan --help)"
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
    version: str | None = field(
        default=None,
        metadata=option("--trtllm-version", plan=True, metavar="VERSION", help="default: the newest known"),
    )
    max_batch_size: int | None = None
    drafter_attention: str | None = field(
        default=None,
        metadata=option(
            "--drafter-attention", metavar="BACKEND", help="VANILLA, TRTLLM or FA4 (default: by GPU)"
        ),
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
    moe_backend: str | None = field(
        default=None,
        metadata=option("--moe-backend", metavar="BACKEND", help="of the target's experts (default: by GPU)"),
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
