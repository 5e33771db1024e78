"""The settings of `llm_args.yaml`, each with its reason, by what they are about.

docs/tensorrt_llm.md has the rules and their sources.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dflash_trt.models.inventory import Inventory
from dflash_trt.planning.estimate import MemoryEstimate
from dflash_trt.planning.gpus import Gpu
from dflash_trt.planning.weights import Settings
from dflash_trt.trtllm.options import TensorRTLLMOptions
from dflash_trt.trtllm.targets import DFLASH2, TARGETS, TargetQuantization

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
