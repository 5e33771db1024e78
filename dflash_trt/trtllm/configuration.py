"""`llm_args.yaml` for a pair: every setting with its reason, or a refusal.

docs/tensorrt_llm.md has the rules and their sources. Nothing here imports tensorrt_llm.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from dflash_trt.engines.packages import TRTLLM_IMAGE, TRTLLM_VERSION
from dflash_trt.errors import UsageError
from dflash_trt.models.inventory import Inventory
from dflash_trt.planning.estimate import MemoryEstimate, gib
from dflash_trt.planning.gpus import Gpu, find_gpu
from dflash_trt.planning.memory import estimate_memory
from dflash_trt.planning.weights import Settings
from dflash_trt.trtllm import TensorRTLLMOptions
from dflash_trt.trtllm.targets import DFLASH2, TARGETS, TargetQuantization, check_gpu

# Paths inside the bundle; the launch scripts change to its directory first.
TARGET, DRAFTER = "target", "./drafter"


@dataclass(frozen=True)
class Choice:
    """One setting and its reason. name: the field of llm_args that it is written to, sections with dots.

    written: False for what is only shown.
    """

    name: str
    value: Any
    reason: str
    written: bool = True


def drafter_attention(inventory: Inventory, gpu: Gpu) -> Choice | None:
    """The backend of the drafter's attention that is best for the GPU; None without a drafter."""
    if inventory.drafter is None:
        return None
    best, reason = "VANILLA", f"SM{gpu.sm}: TRTLLM is for SM100 and SM103, FA4 for SM90"
    if inventory.drafter.architecture == DFLASH2:
        reason = "DFlash2: TRTLLM refuses windows that look both ways (NVIDIA/TensorRT-LLM#19159)"
    elif gpu.sm in (100, 103):
        best, reason = "TRTLLM", f"SM{gpu.sm}: context in pages of the KV pool, with generated kernels"
    elif gpu.sm == 90:
        best, reason = "FA4", "SM90: FlashAttention 4 over a dense buffer"
    if best == "VANILLA":
        reason += "; needs the flash-attn package"
    return Choice("speculative_config.attention_backend", best, reason)


def expert_choices(
    inventory: Inventory,
    options: TensorRTLLMOptions,
    gpu: Gpu,
    quantization: TargetQuantization,
) -> Iterator[Choice]:
    """The settings of the target's experts, if it has any."""
    if inventory.target.moe is None:
        return
    yield Choice("moe_expert_parallel_size", options.expert_parallel, "as asked (--ep)")
    formats, blackwell = quantization.formats, gpu.sm in (100, 103)
    best, reason = "CUTLASS", "experts that are not MXFP4"
    if "mxfp4" in formats and blackwell:
        best, reason = "TRTLLM", "MXFP4 experts on SM100 and SM103 (gpt-oss deployment guide)"
    elif "mxfp4" in formats and gpu.sm == 90:
        reason = "MXFP4 experts on SM90, where TRITON is deprecated"
    elif "mxfp4" in formats:
        reason = f"MXFP4 experts on SM{gpu.sm}: reported to run by users, not in NVIDIA's guide"
    elif "nvfp4" in formats and blackwell:
        best, reason = "TRTLLM", "NVFP4 experts on SM100 and SM103"
    yield Choice("moe_config.backend", best, reason)


def engine_choices(
    inventory: Inventory,
    quantization: TargetQuantization,
    memory: MemoryEstimate,
    settings: Settings,
) -> Iterator[Choice]:
    """The settings of lengths, target and KV cache."""
    length, batch, target = settings.max_seq_len, settings.max_batch_size, inventory.target
    windows = any(layer.window is not None for layer in target.attention_layers)
    lone = inventory.drafter is None
    room = "leaves room for the drafter's buffer, whether buffer or pool is allocated first"
    grows = "" if lone else ": the drafter's context buffer grows with it"
    if lone or not settings.arena:
        room = "TensorRT-LLM's default" + ("" if lone else ": the drafter's context is inside the pool")
    rows: list[tuple[bool, str, Any, str]] = [
        (True, "max_seq_len", length, "prompt and output; always set" + grows),
        (True, "max_num_tokens", max(length, batch * settings.block_size), "a whole prompt, or the blocks of all"),
        (True, "stream_interval", 1, "every token is passed on when it is there"),
        (True, "trust_remote_code", False, "code of a checkpoint is never run"),
        (True, "attn_backend", "TRTLLM", "with heads of 256 FlashInfer would be chosen, which verifies no blocks "
         "(NVIDIA/TensorRT-LLM#19466)"),
        (target.architecture.endswith("ForConditionalGeneration"), "disable_mm_encoder", True,
         "text only: the vision tower is not loaded"),
        (True, "kv_cache_config.dtype", quantization.kv_cache or "auto", "as the checkpoint says; auto: the model's"),
        (True, "kv_cache_config.free_gpu_memory_fraction", memory.kv_fraction, room),
        (windows, "kv_cache_config.use_kv_cache_manager_v2", True,
         "reads the target's windows from its config.json: their layers keep no more rows than these see "
         "(NVIDIA/TensorRT-LLM#16942), and reuse is sound, which in version 1 it is not"),
        (bool(target.delta_layers), "kv_cache_config.mamba_ssm_cache_dtype", "float32",
         "states as the target was trained with; rounding them, as NVIDIA's files for throughput do, changes tokens"),
        (lone, "kv_cache_config.enable_block_reuse", True, "TensorRT-LLM's default: no drafter needs the prompt"),
        (not lone, "kv_cache_config.enable_block_reuse", False,
         "reused prompt tokens give the drafter no hidden states (NVIDIA/TensorRT-LLM#16005)"),
        (True, "enable_chunked_prefill", False, "a whole prompt fits in one pass"
         if lone else "hardly tested with DFlash, and a whole prompt fits in one pass"),
    ]  # fmt: skip
    yield from (Choice(name, value, reason) for applies, name, value, reason in rows if applies)
    if quantization.formats:
        yield Choice("format", quantization.name, "of the target, passed on as stored", written=False)


def drafting_choices(inventory: Inventory, settings: Settings) -> Iterator[Choice]:
    """The settings of speculative decoding, and the batch sizes that CUDA graphs are captured for."""
    batch, block, drafter = settings.max_batch_size, settings.block_size, inventory.drafter
    sizes = {1, 2, 4, *range(8, batch + 1, 8), batch}
    yield Choice("cuda_graph_config.enable_padding", True, "batches are padded to the next size")
    graphs = sorted(size for size in sizes if size <= batch)
    yield Choice("cuda_graph_config.batch_sizes", graphs, "one graph per size is captured")
    lone = drafter is None
    taps = sorted(drafter.target_layer_ids) if drafter is not None else ()
    rows: list[tuple[bool, str, Any, str]] = [
        (lone, "decoding_type", "SA", "no drafter: what followed the longest suffix that occurred before"),
        (lone, "max_matching_ngram_size", -1, "the longest suffix"),
        (lone, "enable_global_pool", False, "of the request's own text: nothing of one request is visible to another"),
        (not lone, "decoding_type", "DFlash", "DFlash2 too: the drafter's config.json tells them apart"),
        (not lone, "speculative_model", DRAFTER, "in the bundle"),
        (not lone, "mask_token_id", drafter and drafter.mask_token_id,
         "where TensorRT-LLM finds none, it takes vocab_size"),
        (not lone, "target_layer_ids", taps, "ascending, as TensorRT-LLM joins the taps"),
        (True, "max_draft_len", block - 1, f"block of {block}, without the anchor, always"),
    ]  # fmt: skip
    yield from (
        Choice(f"speculative_config.{name}", value, reason)
        for applies, name, value, reason in rows
        if applies
    )


def warnings(inventory: Inventory, gpu: Gpu) -> Iterator[Choice]:
    """Known problems, each with its report."""
    architecture = inventory.target.architecture
    gpt_oss, foreign = architecture == "GptOssForCausalLM", TARGETS.get(architecture)
    lone = inventory.drafter is None
    known: list[tuple[bool, str]] = [
        (lone, "drafts from a request's own text (SADecodingConfig) were configured from its page, and not run"),
        (foreign is not None and not lone, "checked were taps, vocabulary, mask token, block, tokenizer and the "
         "drafter's tensors; not the target's tensors, its number format on this GPU, and how its weights are spread "
         "over GPUs"),
        (gpt_oss, "gpt-oss with speculative decoding was reported to lose tool calls and to loop, with EAGLE3 "
         "(NVIDIA/TensorRT-LLM#16377, #8615)"),
        (gpt_oss and gpu.sm >= 120, f"gpt-oss-20b was reported not to start on SM{gpu.sm} (NVIDIA/TensorRT-LLM#13156)"),
        (inventory.target.embedding_scale != 1 and not lone, "whether TensorRT-LLM scales a drafter's embedded tokens "
         "as Gemma 4 does, and caps its logits, was not seen; only the number of accepted drafts depends on it"),
        (bool(inventory.target.delta_layers), "the memory plan counts one state for each request, with its pending "
         "rows; how many TensorRT-LLM keeps for the drafts of a round was not seen"),
    ]  # fmt: skip
    texts = [text for applies, text in known if applies]
    if foreign is not None:
        texts.insert(
            0, f"only TensorRT-LLM runs {architecture} ({foreign.source}); DFlash with it: {foreign.dflash}"
        )
    for number, text in enumerate(texts, 1):
        yield Choice(f"warning {number}", "", text, written=False)


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
