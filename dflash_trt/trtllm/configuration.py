"""`llm_args.yaml` for a pair: every setting with its reason, or a refusal.

docs/tensorrt_llm.md has the rules and their sources. Nothing here imports tensorrt_llm.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from dflash_trt.engines.packages import TRTLLM_IMAGE, TRTLLM_VERSION
from dflash_trt.errors import UsageError
from dflash_trt.models.inventory import Inventory
from dflash_trt.planning.estimate import MemoryEstimate, gib
from dflash_trt.planning.gpus import Gpu, find_gpu
from dflash_trt.planning.memory import estimate_memory
from dflash_trt.planning.weights import Settings
from dflash_trt.trtllm.choices import (
    Choice,
    drafter_attention,
    drafting_choices,
    engine_choices,
    expert_choices,
    warnings,
)
from dflash_trt.trtllm.options import TensorRTLLMOptions
from dflash_trt.trtllm.targets import TargetQuantization, check_gpu

ENGINE = "tensorrt-llm"
CONTAINER = f"{TRTLLM_IMAGE}:{TRTLLM_VERSION}"
_LARGEST_DEFAULT_BATCH = 64


@dataclass(frozen=True)
class Configuration:
    """`llm_args` as TensorRT-LLM reads it, the choices behind it, and its memory."""

    gpu: Gpu
    llm_args: dict[str, Any]
    choices: tuple[Choice, ...]
    memory: MemoryEstimate
    nodes: int
    gpus_per_node: int


def configure(
    inventory: Inventory,
    options: TensorRTLLMOptions,
    *,
    block_size: int,
    max_seq_len: int,
    quantization: TargetQuantization,
) -> Configuration:
    """The complete configuration for a pair.

    Raises BuildError with the reason for a pair that TensorRT-LLM cannot load or run, and with the arithmetic for a
    pair that does not fit.
    """
    gpu = find_gpu(options.gpu)
    settings = Settings(
        engine=ENGINE,
        gpu=gpu,
        max_seq_len=max_seq_len,
        max_batch_size=1,
        block_size=block_size,
        **memory_settings(inventory, options, quantization),
    )
    gpus_per_node, nodes = _nodes(options, gpu)
    memory, batch = _batch(inventory, settings, options)
    settings = replace(settings, max_batch_size=batch.value)
    choices = (
        Choice("tensor_parallel_size", options.tensor_parallel, "as asked (--tp)"),
        Choice("pipeline_parallel_size", 1, "speculative decoding runs on one stage only"),
        Choice("gpus_per_node", gpus_per_node, f"of {nodes} node(s)"),
        batch,
        *engine_choices(inventory, quantization, memory, settings),
        *expert_choices(inventory, options, gpu, quantization),
        *drafting_choices(inventory, settings),
        *_of_drafter(drafter_attention(inventory, gpu), settings, memory),
        *warnings(inventory, gpu),
    )
    args = _nested(choice for choice in choices if choice.written)
    return Configuration(gpu, args, choices, memory, nodes, gpus_per_node)


def memory_settings(
    inventory: Inventory, options: TensorRTLLMOptions, quantization: TargetQuantization
) -> dict[str, Any]:
    """Fields of a memory plan's `Settings`. Raises BuildError for what TensorRT-LLM cannot run."""
    gpu = find_gpu(options.gpu)
    check_gpu(inventory.target, quantization, gpu)
    _check_parallel(inventory, options, gpu, quantization)
    attention = drafter_attention(inventory, gpu)
    return {
        "tensor_parallel": options.tensor_parallel,
        "cache": quantization.kv_cache,
        **({"drafter_attention": attention.value} if attention else {}),
    }


def _of_drafter(attention: Choice | None, settings: Settings, memory: MemoryEstimate) -> list[Choice]:
    """The drafter's attention and context, if there is a drafter."""
    if attention is None:
        return []
    how = "per GPU, in pages of the KV pool"
    if settings.arena:
        how = "per GPU: 2 * (batch + 1) * layers * (context + block) * kv heads * head size * 2 bytes"
    return [attention, Choice("drafter_context_bytes", memory.drafter_bytes, how, written=False)]


def _nested(choices: Iterable[Choice]) -> dict[str, Any]:
    """Sections for the parts of names."""
    args: dict[str, Any] = {}
    for choice in choices:
        *sections, field = choice.name.split(".")
        place = args
        for section in sections:
            place = place.setdefault(section, {})
        place[field] = choice.value
    return args


def _nodes(options: TensorRTLLMOptions, gpu: Gpu) -> tuple[int, int]:
    per_node = options.gpus_per_node or gpu.gpus_per_node
    world = options.tensor_parallel
    if world > per_node and world % per_node:
        raise UsageError(
            f"--tp is {world}, but a node has {per_node} GPUs: whole nodes are needed, so a multiple of {per_node} "
            "(--gpus-per-node says otherwise)"
        )
    return min(per_node, world), max(1, world // per_node)


def _check_parallel(
    inventory: Inventory, options: TensorRTLLMOptions, gpu: Gpu, quantization: TargetQuantization
) -> None:
    tp, ep, moe = options.tensor_parallel, options.expert_parallel, inventory.target.moe
    if tp < 1 or ep < 1:
        raise UsageError(f"--tp is {tp} and --ep is {ep}, expected 1 or more")
    for config in inventory.configs:
        heads, kv = config.num_attention_heads, config.num_key_value_heads
        if heads % tp or (kv % tp and tp % kv):
            raise UsageError(
                f"--tp is {tp}, but {config.path} has {heads} attention heads and {kv} key-value heads: "
                "they cannot be divided so"
            )
    # Guide for Qwen3.8-Flash-Next: a part of an expert must be whole blocks of FP8.
    part = 0 if moe is None or tp % ep else moe.intermediate_size * ep // tp
    if "fp8-blocks" in quantization.formats and part % 128:
        raise UsageError(
            f"--tp is {tp} and --ep {ep}, so that a GPU has {part} rows of each expert, but FP8 in blocks needs a "
            "multiple of 128; raise --ep"
        )
    if ep == 1:
        return
    if moe is None:
        raise UsageError(f"--ep is {ep}, but {inventory.target.path} has no experts; leave it out")
    if tp % ep or moe.num_experts % ep:
        raise UsageError(
            f"--ep is {ep}, but it must divide --tp ({tp}) and the number of experts ({moe.num_experts})"
        )
    if gpu.sm >= 120:
        raise UsageError(
            f"--ep is {ep}, but TensorRT-LLM has no expert-parallel path on SM{gpu.sm} ({gpu.product}; "
            "NVIDIA/TensorRT-LLM discussion 16360); leave it out"
        )


def _batch(
    inventory: Inventory, settings: Settings, options: TensorRTLLMOptions
) -> tuple[MemoryEstimate, Choice]:
    """The batch and its memory plan. A requested batch may exceed the KV pool at full length."""
    single = estimate_memory(inventory, settings)
    if single.largest_batch < 1:
        raise single.refuse()
    batch, reason = options.max_batch_size, "as asked (--max-batch-size)"
    if batch is None:
        batch = min(_LARGEST_DEFAULT_BATCH, 1 << (single.largest_batch.bit_length() - 1))
        reason = (
            f"at most {single.largest_batch} sequences of {settings.max_seq_len} tokens fit; by default a power of "
            f"two, at most {_LARGEST_DEFAULT_BATCH}"
        )
    if batch < 1:
        raise UsageError(f"--max-batch-size is {batch}, expected 1 or more")
    memory = estimate_memory(inventory, replace(settings, max_batch_size=batch))
    if not memory.fits:
        raise memory.refuse()
    return memory, Choice("max_batch_size", batch, reason)


def describe(configuration: Configuration) -> dict[str, Any]:
    """The configuration's part of a bundle's manifest."""
    c = configuration
    return {
        "version": TRTLLM_VERSION,
        "gpu": c.gpu.name,
        "nodes": c.nodes,
        "gpus_per_node": c.gpus_per_node,
        "choices": [{"name": x.name, "value": x.value, "reason": x.reason} for x in c.choices],
        "memory": asdict(c.memory),
        "arithmetic": c.memory.arithmetic(),
        "room": f"{gib(c.memory.left_bytes)} GiB left; longest context {c.memory.longest_context} at batch 1, "
        f"largest batch {c.memory.largest_batch} at {c.memory.max_seq_len} tokens",
    }
