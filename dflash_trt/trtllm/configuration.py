"""`llm_args.yaml` for a pair: every setting with its reason, or a refusal.

docs/tensorrt_llm.md has the rules and their sources. Nothing here imports tensorrt_llm.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from dflash_trt.errors import UsageError
from dflash_trt.models.inventory import Inventory
from dflash_trt.planning.gpus import Gpu, find_gpu
from dflash_trt.planning.memory import MemoryEstimate, Settings, estimate_memory, gib
from dflash_trt.trtllm.drafter import DFLASH2
from dflash_trt.trtllm.options import TensorRTLLMOptions
from dflash_trt.trtllm.quantization import TargetQuantization, check_gpu
from dflash_trt.trtllm.releases import Release, find_release

ENGINE = "tensorrt-llm"
DRAFTER_BACKENDS = ("VANILLA", "TRTLLM", "FA4")
# Paths inside the bundle; the launch scripts change to its directory first.
TARGET, DRAFTER = "target", "./drafter"
_LARGEST_DEFAULT_BATCH = 64


@dataclass(frozen=True)
class Choice:
    """One setting and its reason. name: the field of llm_args that it is written to, sections with dots.

    written: False for what is only shown.
    """

    name: str
    value: Any
    reason: str
    written: bool = True


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
    memory, batch = _batch(inventory, settings, options)
    schedule = _schedule(options, block_size - 1)
    reuse = _block_reuse(inventory, options, release)
    choices = (
        Choice("tensor_parallel_size", options.tensor_parallel, "as asked (--tp)"),
        Choice("pipeline_parallel_size", 1, "speculative decoding runs on one stage only"),
        Choice("gpus_per_node", gpus_per_node, f"of {nodes} node(s)"),
        batch,
        *_sizes(settings, batch.value, schedule),
        *_target(inventory, quantization),
        *_experts(inventory, options, gpu, release, quantization),
        *_cache(inventory, quantization, memory, settings, reuse),
        *_drafting(inventory, block_size - 1, schedule),
        _drafter_attention(inventory, options, gpu),
        Choice("drafter_context_bytes", memory.drafter_bytes, _drafter_context(settings), written=False),
        *_warnings(inventory, gpu, schedule),
    )
    args = _nested(choice for choice in choices if choice.written)
    release.check(args)
    return Configuration(release, gpu, args, choices, memory, nodes, gpus_per_node)


def memory_settings(
    inventory: Inventory, options: TensorRTLLMOptions, quantization: TargetQuantization
) -> dict[str, Any]:
    """Fields of a memory plan's `Settings`. Raises BuildError for what TensorRT-LLM cannot run."""
    release, gpu = find_release(options.version), find_gpu(options.gpu)
    if inventory.drafter.architecture == DFLASH2 and not release.dflash2:
        raise UsageError(
            f"--trtllm-version is {release.version}, of which it is not known whether it has DFlash2 "
            "(NVIDIA/TensorRT-LLM#18155); leave it out"
        )
    check_gpu(inventory.target, quantization, gpu)
    _check_parallel(inventory, options, gpu, quantization)
    return {
        "tensor_parallel": options.tensor_parallel,
        "cache": quantization.kv_cache,
        "drafter_attention": _drafter_attention(inventory, options, gpu).value,
        "draft_pool": release.draft_pool_beside_arena,
    }


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
    for config in (inventory.target, inventory.drafter):
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


def _drafter_attention(inventory: Inventory, options: TensorRTLLMOptions, gpu: Gpu) -> Choice:
    name = "speculative_config.attention_backend"
    flash = "needs the flash-attn package"
    dflash2 = inventory.drafter.architecture == DFLASH2
    if dflash2:
        best = "VANILLA"
        reason = f"DFlash2: TRTLLM refuses windows that look both ways (NVIDIA/TensorRT-LLM#19159); {flash}"
    elif gpu.sm in (100, 103):
        best, reason = "TRTLLM", f"SM{gpu.sm}: context in pages of the KV pool, with generated kernels"
    elif gpu.sm == 90:
        best, reason = "FA4", "SM90: FlashAttention 4 over a dense buffer"
    else:
        best, reason = "VANILLA", f"SM{gpu.sm}: TRTLLM is for SM100 and SM103, FA4 for SM90; {flash}"
    asked = options.drafter_attention
    if asked is None or asked == best:
        return Choice(name, best, reason)
    if asked not in DRAFTER_BACKENDS:
        raise UsageError(f"--drafter-attention is {asked!r}, expected one of: {', '.join(DRAFTER_BACKENDS)}")
    if asked != "VANILLA" and (gpu.sm != 90 if asked == "FA4" else dflash2 or gpu.sm not in (100, 103)):
        raise UsageError(
            f"--drafter-attention is {asked}, but {gpu.product} is SM{gpu.sm}: TRTLLM runs on SM100 and SM103 only, "
            "and not with DFlash2 (NVIDIA/TensorRT-LLM#19159), FA4 on SM90 only; leave it out"
        )
    needs = flash if asked == "VANILLA" else "with DFlash2's windows it was not seen"
    return Choice(name, asked, f"as asked (--drafter-attention); {needs}")


def _experts(
    inventory: Inventory,
    options: TensorRTLLMOptions,
    gpu: Gpu,
    release: Release,
    quantization: TargetQuantization,
) -> Iterator[Choice]:
    if inventory.target.moe is None:
        if options.moe_backend is not None:
            raise UsageError(f"--moe-backend: {inventory.target.path} has no experts; leave it out")
        return
    yield Choice("moe_expert_parallel_size", options.expert_parallel, "as asked (--ep)")
    formats, blackwell = quantization.formats, gpu.sm in (100, 103)
    best, reason = "CUTLASS", "experts that are not MXFP4"
    if "mxfp4" in formats and blackwell:
        best, reason = "TRTLLM", "MXFP4 experts on SM100 and SM103 (gpt-oss deployment guide)"
    elif "mxfp4" in formats and gpu.sm == 90:
        best = release.hopper_mxfp4_moe_backend
        reason = "MXFP4 experts on SM90; TRITON until 1.3, deprecated since"
    elif "mxfp4" in formats:
        reason = f"MXFP4 experts on SM{gpu.sm}: reported to run by users, not in NVIDIA's guide"
    elif "nvfp4" in formats and blackwell:
        best, reason = "TRTLLM", "NVFP4 experts on SM100 and SM103"
    asked = options.moe_backend
    if asked is not None and asked != best:
        best, reason = asked, "as asked (--moe-backend)"
        if asked == "TRTLLM" and not (blackwell and formats):
            raise UsageError(
                f"--moe-backend is TRTLLM, which runs quantized experts on SM100 and SM103, but {gpu.product} is "
                f"SM{gpu.sm}, and the target is in {quantization.name}; leave it out"
            )
    yield Choice("moe_config.backend", best, reason)


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


def _schedule(options: TensorRTLLMOptions, draft_len: int) -> dict[int, int]:
    """The drafts by active requests, as asked; empty: always the whole block."""
    schedule = dict(sorted((options.draft_len_schedule or {}).items()))
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
    return schedule


def _block_reuse(inventory: Inventory, options: TensorRTLLMOptions, release: Release) -> int:
    """The tokens at the end of a prompt that are computed where its beginning is reused; 0 if nothing is reused."""
    tail = options.block_reuse
    if tail is None:
        return 0
    if tail < 1:
        raise UsageError(f"--block-reuse is {tail}, expected 1 or more")
    if "context_recompute_tail" not in release.fields("DFlashDecodingConfig"):
        raise UsageError(
            f"--block-reuse is {tail}, but TensorRT-LLM {release.version} has no context_recompute_tail: reused tokens "
            "would give the drafter nothing (NVIDIA/TensorRT-LLM#16005); leave it out"
        )
    if inventory.target.delta_layers:
        raise UsageError(
            f"--block-reuse is {tail}, but {inventory.target.path} has layers with a state, which is kept at few "
            "positions only; leave it out"
        )
    return tail


def _sizes(settings: Settings, batch: int, schedule: dict[int, int]) -> Iterator[Choice]:
    length, block = settings.max_seq_len, settings.block_size
    yield Choice(
        "max_seq_len",
        length,
        "prompt and output together; always set, because the drafter's context buffer grows with it",
    )
    yield Choice(
        "max_num_tokens",
        max(length, batch * block),
        f"a whole prompt in one pass, and {block} tokens of every sequence",
    )
    yield Choice("stream_interval", 1, "every token is passed on when it is there")
    sizes = {1, 2, 4, *range(8, batch + 1, 8), batch, *schedule}
    yield Choice("cuda_graph_config.enable_padding", True, "batches are padded to the next size")
    yield Choice(
        "cuda_graph_config.batch_sizes",
        sorted(size for size in sizes if size <= batch),
        "one graph per size is captured",
    )


def _target(inventory: Inventory, quantization: TargetQuantization) -> Iterator[Choice]:
    yield Choice("trust_remote_code", False, "code of a checkpoint is never run")
    yield Choice(
        "attn_backend",
        "TRTLLM",
        "of the target; with heads of 256 FlashInfer would be chosen, which verifies no blocks "
        "(NVIDIA/TensorRT-LLM#19466)",
    )
    if inventory.target.architecture.endswith("ForConditionalGeneration"):
        yield Choice("disable_mm_encoder", True, "text only: the vision tower is not loaded")
    if quantization.formats:
        yield Choice("format", quantization.name, "of the target, passed on as stored", written=False)


def _cache(
    inventory: Inventory,
    quantization: TargetQuantization,
    memory: MemoryEstimate,
    settings: Settings,
    reuse: int,
) -> Iterator[Choice]:
    dtype = quantization.kv_cache or "auto"
    yield Choice("kv_cache_config.dtype", dtype, "as the checkpoint says; auto: the model's dtype")
    room = "leaves room for the drafter's buffer, whether buffer or pool is allocated first"
    if not settings.arena:
        room = "TensorRT-LLM's default: the drafter's context is inside the pool"
    yield Choice("kv_cache_config.free_gpu_memory_fraction", memory.kv_fraction, room)
    if any(layer.window is not None for layer in inventory.target.attention_layers):
        yield Choice(
            "kv_cache_config.use_kv_cache_manager_v2",
            True,
            "the target has windows, which version 2 reads from its config.json: their layers keep no more rows than "
            "these see (NVIDIA/TensorRT-LLM#16942), and reuse is sound, which in version 1 it is not",
        )
    yield from _reused(inventory, reuse)
    if inventory.target.delta_layers:
        yield Choice(
            "kv_cache_config.mamba_ssm_cache_dtype",
            "float32",
            "states as the target was trained with; rounding them, as NVIDIA's files for throughput do, changes tokens",
        )


def _reused(inventory: Inventory, tail: int) -> Iterator[Choice]:
    reuse, chunked = "kv_cache_config.enable_block_reuse", "enable_chunked_prefill"
    if not tail:
        yield Choice(
            reuse, False, "reused prompt tokens give the drafter no hidden states (NVIDIA/TensorRT-LLM#16005)"
        )
        yield Choice(chunked, False, "hardly tested with DFlash, and a whole prompt fits in one pass")
        return
    yield Choice(reuse, True, "as asked (--block-reuse)")
    yield Choice(chunked, True, "reuse needs it: the end of a prompt is computed as a chunk")
    yield Choice(
        "speculative_config.context_recompute_tail",
        tail,
        "tokens of a reused prompt that the drafter sees; fewer drafts are accepted until a sliding drafter has its "
        "window again, or where a layer attends to the whole context",
    )


def _drafting(inventory: Inventory, draft_len: int, schedule: dict[int, int]) -> Iterator[Choice]:
    def choice(name: str, value: Any, reason: str, *, written: bool = True) -> Choice:
        return Choice(f"speculative_config.{name}", value, reason, written)

    drafter = inventory.drafter
    yield choice("decoding_type", "DFlash", "DFlash2 too: the drafter's config.json tells them apart")
    yield choice("speculative_model", DRAFTER, "in the bundle")
    yield choice("max_draft_len", draft_len, f"block of {draft_len + 1}, without the anchor")
    yield choice(
        "mask_token_id",
        drafter.mask_token_id,
        "always written: where TensorRT-LLM finds none, it takes vocab_size",
    )
    yield choice(
        "target_layer_ids",
        sorted(drafter.target_layer_ids),
        "always written, ascending, as TensorRT-LLM joins the taps",
    )
    asked = "as asked (--draft-len-schedule)" if schedule else "none: always the whole block"
    yield choice("draft_len_schedule", schedule, asked, written=bool(schedule))


def _drafter_context(settings: Settings) -> str:
    if settings.arena:
        return "per GPU: 2 * (batch + 1) * layers * (context + block) * kv heads * head size * 2 bytes"
    return "per GPU, in pages of the KV pool"


def _warnings(inventory: Inventory, gpu: Gpu, schedule: dict[int, int]) -> Iterator[Choice]:
    """Known problems, each with its report."""
    gpt_oss = inventory.target.architecture == "GptOssForCausalLM"
    known = (
        (
            gpt_oss,
            "gpt-oss with speculative decoding was reported to lose tool calls and to loop, with EAGLE3 "
            "(NVIDIA/TensorRT-LLM#16377, #8615)",
        ),
        (
            gpt_oss and gpu.sm >= 120,
            f"gpt-oss-20b was reported not to start on SM{gpu.sm} (NVIDIA/TensorRT-LLM#13156)",
        ),
        (
            inventory.target.embedding_scale != 1,
            "whether TensorRT-LLM scales a drafter's embedded tokens as Gemma 4 does, and caps its logits, was not "
            "seen; only the number of accepted drafts depends on it",
        ),
        (
            bool(inventory.target.delta_layers),
            "the memory plan counts one state for each request, with its pending rows; how many TensorRT-LLM keeps for "
            "the drafts of a round was not seen",
        ),
        (
            0 in schedule.values(),
            "without drafting the drafter stores no context, so later drafts of those requests are worse",
        ),
    )
    for number, text in enumerate((text for applies, text in known if applies), 1):
        yield Choice(f"warning {number}", "", text, written=False)


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
