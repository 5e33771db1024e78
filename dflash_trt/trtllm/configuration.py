"""`llm_args.yaml` for a pair: every choice is computed with its reason, or refused.

docs/tensorrt_llm.md has the rules and their sources. Nothing here imports tensorrt_llm.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from dflash_trt.errors import BuildError, UsageError
from dflash_trt.models.inventory import Inventory
from dflash_trt.planning.gpus import Gpu, find_gpu
from dflash_trt.planning.memory import MemoryEstimate, Settings, arena_bytes, estimate_memory, gib
from dflash_trt.trtllm.memory import POOL
from dflash_trt.trtllm.options import TensorRTLLMOptions
from dflash_trt.trtllm.quantization import TargetQuantization
from dflash_trt.trtllm.releases import Release, find_release

ENGINE = "tensorrt-llm"
DRAFTER_BACKENDS = ("VANILLA", "TRTLLM", "FA4")
# Paths inside the bundle; the launch scripts change to its directory first.
TARGET, DRAFTER = "target", "./drafter"
_LARGEST_DEFAULT_BATCH = 64


@dataclass(frozen=True)
class Choice:
    """One setting and its reason."""

    name: str
    value: Any
    reason: str


@dataclass(frozen=True)
class Configuration:
    """`llm_args` as TensorRT-LLM reads it, the choices behind it, and its memory."""

    release: Release
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
    release, gpu = find_release(options.version), find_gpu(options.gpu)
    settings = Settings(
        engine=ENGINE,
        gpu=gpu,
        max_seq_len=max_seq_len,
        max_batch_size=1,
        block_size=block_size,
        **memory_settings(inventory, options, quantization),
    )
    gpus_per_node, nodes = _nodes(options, gpu)
    attention = _drafter_attention(options, gpu)
    moe = _moe_backend(inventory, options, gpu, release, quantization)
    draft_len = block_size - 1
    memory, batch = _batch(inventory, settings, options)
    tokens = max(max_seq_len, batch.value * block_size)
    drafts = _schedule(options, draft_len)
    schedule = drafts.value
    sizes = _graph_sizes(batch.value, schedule)
    drafter_bytes = arena_bytes(
        inventory.drafter,
        max_batch_size=batch.value,
        max_seq_len=max_seq_len,
        draft_len=draft_len,
        tensor_parallel=options.tensor_parallel,
        page=1 if settings.arena else POOL.page,
    )
    choices = [
        Choice("tensor_parallel_size", options.tensor_parallel, "as asked (--tp)"),
        Choice("nodes", nodes, f"{gpus_per_node} GPUs a node"),
        Choice("max_draft_len", draft_len, f"block of {block_size}, including the anchor as its first token"),
        attention,
        Choice(
            "max_seq_len",
            max_seq_len,
            "prompt and output together; always set, because the drafter's context buffer grows with it",
        ),
        batch,
        Choice(
            "max_num_tokens",
            tokens,
            "a whole prompt in one pass (chunked prefill is hardly tested with DFlash), and "
            f"{block_size} tokens of every sequence",
        ),
        Choice("drafter_context_bytes", drafter_bytes, _arena_reason(settings)),
        Choice("free_gpu_memory_fraction", memory.kv_fraction, _fraction_reason(settings)),
        Choice(
            "enable_block_reuse",
            False,
            "reused prompt tokens give the drafter no hidden states (NVIDIA/TensorRT-LLM#16005)",
        ),
        Choice(
            "cuda_graph_batch_sizes",
            sizes,
            "batches are padded to the next size; one graph per size is captured",
        ),
    ]
    args: dict[str, Any] = {
        "tensor_parallel_size": options.tensor_parallel,
        "pipeline_parallel_size": 1,
        "gpus_per_node": gpus_per_node,
        "max_batch_size": batch.value,
        "max_num_tokens": tokens,
        "max_seq_len": max_seq_len,
        "enable_chunked_prefill": False,
        "trust_remote_code": False,
        "stream_interval": 1,
        "kv_cache_config": {
            "enable_block_reuse": False,
            "free_gpu_memory_fraction": memory.kv_fraction,
            "dtype": quantization.kv_cache or "auto",
        },
        "cuda_graph_config": {"enable_padding": True, "batch_sizes": sizes},
        "speculative_config": {
            "decoding_type": "DFlash",
            "max_draft_len": draft_len,
            "speculative_model": DRAFTER,
            "mask_token_id": inventory.drafter.mask_token_id,
            "target_layer_ids": sorted(inventory.drafter.target_layer_ids),
            "attention_backend": attention.value,
        },
    }
    if moe is not None:
        choices.append(moe)
        choices.append(Choice("moe_expert_parallel_size", options.expert_parallel, "as asked (--ep)"))
        args["moe_expert_parallel_size"] = options.expert_parallel
        args["moe_config"] = {"backend": moe.value}
    choices.append(drafts)
    if schedule:
        args["speculative_config"]["draft_len_schedule"] = schedule
    choices += _warnings(inventory, gpu, schedule)
    release.check(args)
    return Configuration(release, gpu, args, tuple(choices), memory, nodes, gpus_per_node)


def memory_settings(
    inventory: Inventory, options: TensorRTLLMOptions, quantization: TargetQuantization
) -> dict[str, Any]:
    """Fields of a memory plan's `Settings`. Raises BuildError for what TensorRT-LLM cannot run."""
    release, gpu = find_release(options.version), find_gpu(options.gpu)
    check_quantization(inventory, gpu, quantization)
    _check_parallel(inventory, options, gpu)
    return {
        "tensor_parallel": options.tensor_parallel,
        "cache": quantization.kv_cache,
        "drafter_attention": _drafter_attention(options, gpu).value,
        "draft_pool": release.draft_pool_beside_arena,
    }


def check_quantization(inventory: Inventory, gpu: Gpu, quantization: TargetQuantization) -> None:
    """Check that TensorRT-LLM loads a target in this form on this GPU (its hardware and quantization matrix)."""
    scheme, model = quantization.scheme, inventory.target
    if model.architecture == "GptOssForCausalLM" and scheme in ("fp8", "nvfp4"):
        raise BuildError(
            f"{model.path.parent}: gpt-oss in {scheme.upper()}, but TensorRT-LLM's matrix has gpt-oss in MXFP4 only; "
            "give OpenAI's checkpoint as it is"
        )
    if scheme == "nvfp4" and gpu.sm < 100:
        raise BuildError(
            f"{model.path.parent}: the target is in NVFP4, which TensorRT-LLM runs on SM100 and newer, and "
            f"{gpu.product} is SM{gpu.sm}; give a checkpoint in FP8 or BF16"
        )


def _nodes(options: TensorRTLLMOptions, gpu: Gpu) -> tuple[int, int]:
    per_node = options.gpus_per_node or gpu.gpus_per_node
    world = options.tensor_parallel
    if world > per_node and world % per_node:
        raise UsageError(
            f"--tp is {world}, but a node has {per_node} GPUs: whole nodes are needed, so a multiple of {per_node} "
            "(--gpus-per-node says otherwise)"
        )
    return min(per_node, world), max(1, world // per_node)


def _check_parallel(inventory: Inventory, options: TensorRTLLMOptions, gpu: Gpu) -> None:
    tp, ep, moe = options.tensor_parallel, options.expert_parallel, inventory.target.moe
    if tp < 1 or ep < 1:
        raise UsageError(f"--tp is {tp} and --ep is {ep}, expected 1 or more")
    for config in (inventory.target, inventory.drafter):
        heads, kv = config.num_attention_heads, config.num_key_value_heads
        if heads % tp or (kv % tp and tp % kv):
            raise UsageError(
                f"--tp is {tp}, but {config.path} has {heads} attention heads and {kv} key-value heads: "
                "they cannot be divided so"
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


def _drafter_attention(options: TensorRTLLMOptions, gpu: Gpu) -> Choice:
    if gpu.sm in (100, 103):
        best, reason = "TRTLLM", f"SM{gpu.sm}: context in pages of the KV pool, with generated kernels"
    elif gpu.sm == 90:
        best, reason = "FA4", "SM90: FlashAttention 4 over a dense buffer"
    else:
        best = "VANILLA"
        reason = f"SM{gpu.sm}: TRTLLM is for SM100 and SM103, FA4 for SM90; needs the flash-attn package"
    asked = options.drafter_attention
    if asked is None or asked == best:
        return Choice("attention_backend", best, reason)
    if asked not in DRAFTER_BACKENDS:
        raise UsageError(f"--drafter-attention is {asked!r}, expected one of: {', '.join(DRAFTER_BACKENDS)}")
    if asked != "VANILLA":
        raise UsageError(
            f"--drafter-attention is {asked}, but {gpu.product} is SM{gpu.sm}: TRTLLM runs on SM100 and SM103 only, "
            "FA4 on SM90 only; leave it out"
        )
    return Choice("attention_backend", asked, "as asked (--drafter-attention); needs the flash-attn package")


def _moe_backend(
    inventory: Inventory,
    options: TensorRTLLMOptions,
    gpu: Gpu,
    release: Release,
    quantization: TargetQuantization,
) -> Choice | None:
    if inventory.target.moe is None:
        if options.moe_backend is not None:
            raise UsageError(f"--moe-backend: {inventory.target.path} has no experts; leave it out")
        return None
    blackwell = gpu.sm in (100, 103)
    if quantization.scheme == "mxfp4":
        if blackwell:
            best, reason = "TRTLLM", "MXFP4 experts on SM100 and SM103 (gpt-oss deployment guide)"
        elif gpu.sm == 90:
            best, reason = (
                release.hopper_mxfp4_moe_backend,
                "MXFP4 experts on SM90; TRITON until 1.3, deprecated since",
            )
        else:
            best, reason = (
                "CUTLASS",
                f"MXFP4 experts on SM{gpu.sm}: reported to run by users, not in NVIDIA's guide",
            )
    elif quantization.scheme == "nvfp4" and blackwell:
        best, reason = "TRTLLM", "NVFP4 experts on SM100 and SM103"
    else:
        best, reason = "CUTLASS", "experts that are not MXFP4"
    asked = options.moe_backend
    if asked is None or asked == best:
        return Choice("moe_backend", best, reason)
    if asked == "TRTLLM" and not blackwell:
        raise UsageError(
            f"--moe-backend is TRTLLM, which runs on SM100 and SM103, but {gpu.product} is SM{gpu.sm}; "
            f"use {best}, or leave it out"
        )
    if asked == "TRTLLM" and quantization.scheme is None:
        raise UsageError(f"--moe-backend is TRTLLM, which supports quantized experts, not BF16; use {best}")
    return Choice("moe_backend", asked, "as asked (--moe-backend)")


def _batch(
    inventory: Inventory, settings: Settings, options: TensorRTLLMOptions
) -> tuple[MemoryEstimate, Choice]:
    """The batch and its memory plan. A requested batch may exceed the KV pool at full length."""
    single = estimate_memory(inventory, settings)
    if single.largest_batch < 1:
        raise single.refuse()
    asked = options.max_batch_size
    if asked is None:
        batch = min(_LARGEST_DEFAULT_BATCH, 1 << (single.largest_batch.bit_length() - 1))
        reason = (
            f"at most {single.largest_batch} sequences of {settings.max_seq_len} tokens fit; by default a power of "
            f"two, at most {_LARGEST_DEFAULT_BATCH}"
        )
        return estimate_memory(inventory, replace(settings, max_batch_size=batch)), Choice(
            "max_batch_size", batch, reason
        )
    if asked < 1:
        raise UsageError(f"--max-batch-size is {asked}, expected 1 or more")
    found = estimate_memory(inventory, replace(settings, max_batch_size=asked))
    if not found.fits:
        raise found.refuse()
    return found, Choice("max_batch_size", asked, "as asked (--max-batch-size)")


def _schedule(options: TensorRTLLMOptions, draft_len: int) -> Choice:
    """The drafts by active requests, as asked; by default always the whole block."""
    name = "draft_len_schedule"
    if options.draft_len_schedule is None:
        return Choice(name, {}, "always the whole block (--draft-len-schedule says otherwise)")
    schedule = dict(sorted(options.draft_len_schedule.items()))
    for batch, length in schedule.items():
        if batch < 1 or not 0 <= length <= draft_len:
            raise UsageError(
                f"--draft-len-schedule has {batch}:{length}, expected a batch of 1 or more and 0..{draft_len} tokens"
            )
    if schedule and next(iter(schedule.values())) != draft_len:
        first = next(iter(schedule))
        raise UsageError(
            f"--draft-len-schedule begins with {first}:{schedule[first]}, but TensorRT-LLM wants the smallest batch "
            f"to draft max_draft_len tokens: {first}:{draft_len}"
        )
    return Choice(name, schedule, "as asked (--draft-len-schedule)")


def _graph_sizes(batch: int, schedule: dict[int, int]) -> list[int]:
    sizes = {1, 2, 4, *range(8, batch + 1, 8), batch, *schedule}
    return sorted(size for size in sizes if size <= batch)


def _arena_reason(settings: Settings) -> str:
    if settings.arena:
        return (
            "2 * (batch + 1) * layers * (context + block) * kv heads per GPU * head size * 2 bytes, per GPU"
        )
    return "per GPU, if the drafter gets no pages of the KV pool; normally it gets pages, and this is 0"


def _fraction_reason(settings: Settings) -> str:
    if settings.arena:
        return "leaves room for the drafter's buffer, whether buffer or pool is allocated first"
    return "TensorRT-LLM's default: the drafter's context is inside the pool"


def _warnings(inventory: Inventory, gpu: Gpu, schedule: dict[int, int]) -> list[Choice]:
    """Known problems, each with its report."""
    found = []
    gpt_oss = inventory.target.architecture == "GptOssForCausalLM"
    if gpt_oss:
        found.append(
            "gpt-oss with speculative decoding was reported to lose tool calls and to loop, with EAGLE3 "
            "(NVIDIA/TensorRT-LLM#16377, #8615)"
        )
    if gpt_oss and gpu.sm >= 120:
        found.append(f"gpt-oss-20b was reported not to start on SM{gpu.sm} (NVIDIA/TensorRT-LLM#13156)")
    if inventory.target.delta_layers:
        found.append(
            "the memory plan counts one state for each request, with its pending rows; how many TensorRT-LLM keeps for "
            "the drafts of a round was not seen"
        )
    if 0 in schedule.values():
        found.append(
            "without drafting the drafter stores no context, so later drafts of those requests are worse"
        )
    return [Choice("warning", "", text) for text in found]


def describe(configuration: Configuration) -> dict[str, Any]:
    """The configuration's part of a bundle's manifest."""
    c = configuration
    return {
        "version": c.release.version,
        "gpu": c.gpu.name,
        "nodes": c.nodes,
        "gpus_per_node": c.gpus_per_node,
        "choices": [{"name": x.name, "value": x.value, "reason": x.reason} for x in c.choices],
        "memory": c.memory.to_dict(),
        "arithmetic": c.memory.arithmetic(),
        "room": f"{gib(c.memory.left_bytes)} GiB left; longest context {c.memory.longest_context} at batch 1, "
        f"largest batch {c.memory.largest_batch} at {c.memory.max_seq_len} tokens",
    }
