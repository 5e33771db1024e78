"""The configuration for TensorRT-LLM: valid for the release, right for the GPU, or refused with the reason."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from dflash_trt.engines.packages import TRTLLM_VERSION
from dflash_trt.errors import BuildError
from dflash_trt.models.configs import read_drafter_config, read_target_config
from dflash_trt.models.inventory import Inventory, take_inventory
from dflash_trt.planning.estimate import GIB
from dflash_trt.planning.gpus import gpus
from dflash_trt.planning.memory import arena_bytes
from dflash_trt.planning.weights import TRAITS
from dflash_trt.trtllm import TensorRTLLMOptions
from dflash_trt.trtllm.configuration import CONTAINER, Configuration, configure
from dflash_trt.trtllm.job import launch_files
from dflash_trt.trtllm.targets import DFLASH2, TargetQuantization, target_quantization
from tests.doubles.tensorrt_llm_double import SCHEMA

Pair = tuple[Inventory, TargetQuantization]


PARALLEL = ((1, 1), (2, 1), (2, 2), (4, 1), (8, 1), (8, 4), (8, 8), (16, 8))


# One of every architecture and kind: the others differ from these in sizes.
PAIRS = (
    *("tiny", "llama-3.1-8b", "qwen3-8b", "qwen3-coder-30b-a3b", "gpt-oss-20b", "gpt-oss-120b"),
    *("qwen3.6-27b", "qwen3.6-35b-a3b", "qwen3.8-27b"),
)


def read_pair(target_dir: Path, drafter_dir: Path) -> Pair:
    target = read_target_config(target_dir)
    return take_inventory(target, read_drafter_config(drafter_dir)), target_quantization(target)


def configured(
    pair: Pair, gpu: str = "b200", *, block: int | None = None, length: int = 8192, **options: Any
) -> Configuration:
    inventory, quantization = pair
    return configure(
        inventory,
        TensorRTLLMOptions(gpu=gpu, **options),
        block_size=block or inventory.drafter.block_size,
        max_seq_len=min(length, inventory.drafter.max_position_embeddings),
        quantization=quantization,
    )


@pytest.mark.parametrize("gpu", {gpu.sm: name for name, gpu in gpus().items() if gpu.sm >= 90}.values())
def test_every_configuration_is_valid_for_every_pair_and_parallelism(pairs, gpu) -> None:
    """Each combination gives a configuration that the release's schema accepts, or a correct refusal."""
    device = gpus()[gpu]
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    valid = 0
    for (name, pair), (tp, ep) in product(pairs.items(), PARALLEL):
        target, drafter = pair[0].target, pair[0].drafter
        found, refusal = attempt(
            pair, gpu, {"tensor_parallel": tp, "expert_parallel": ep, "gpus_per_node": 8}
        )
        if found is None:
            heads = any(
                c.num_attention_heads % tp or (c.num_key_value_heads % tp and tp % c.num_key_value_heads)
                for c in (target, drafter)
            )
            spread = ep > 1 and (target.moe is None or device.sm >= 120)
            assert heads or spread or "does not fit" in refusal, f"{name} on {tp} x {gpu}: {refusal}"
            continue
        valid += 1
        document = yaml.safe_load(launch_files(found)["llm_args.yaml"])
        errors = [e.message for e in jsonschema.Draft202012Validator(SCHEMA).iter_errors(document)]
        assert (document, errors) == (found.llm_args, []), f"{name} on {tp} x {gpu}"
        check_rules(found, pair[0], tp, ep)
    assert valid >= 15


def attempt(pair: Pair, gpu: str, options: dict[str, Any]) -> tuple[Configuration | None, str]:
    try:
        return configured(pair, gpu, **options), ""
    except BuildError as error:
        return None, str(error)


def check_rules(found: Configuration, inventory: Inventory, tp: int, ep: int) -> None:
    """The checks of TensorRT-LLM's start, by its reference and sources."""
    args, drafter = found.llm_args, inventory.drafter
    speculative = args["speculative_config"]
    assert 0 < speculative["max_draft_len"] <= drafter.block_size - 1
    assert speculative["target_layer_ids"] == sorted(set(speculative["target_layer_ids"]))
    assert args["max_num_tokens"] >= args["max_batch_size"] * (speculative["max_draft_len"] + 1)
    assert args["max_num_tokens"] >= args["max_seq_len"]
    backend = speculative["attention_backend"]
    by_gpu = {} if drafter.architecture == DFLASH2 else {90: "FA4", 100: "TRTLLM", 103: "TRTLLM"}
    assert backend == by_gpu.get(found.gpu.sm, "VANILLA")
    assert args["attn_backend"] == "TRTLLM"
    assert speculative["mask_token_id"] == drafter.mask_token_id
    assert (speculative["decoding_type"], speculative["speculative_model"]) == ("DFlash", "./drafter")
    hybrid = bool(inventory.target.delta_layers)
    assert args.get("disable_mm_encoder", False) == hybrid
    cache = args["kv_cache_config"]
    assert cache.get("mamba_ssm_cache_dtype") == ("float32" if hybrid else None)
    windows = any(layer.window is not None for layer in inventory.target.attention_layers)
    assert cache.get("use_kv_cache_manager_v2", False) == windows
    assert "max_attention_window" not in cache  # version 2 of the manager reads it from config.json
    assert args["pipeline_parallel_size"] == 1
    assert args["tensor_parallel_size"] == tp == found.nodes * found.gpus_per_node
    assert ("moe_config" in args) == (inventory.target.moe is not None)
    assert args.get("moe_expert_parallel_size", 1) == ep
    graphs = args["cuda_graph_config"]["batch_sizes"]
    assert graphs == sorted(set(graphs))
    assert graphs[-1] == args["max_batch_size"]
    # Its own check of the drafter's buffer (1.4), in both orders of allocation.
    memory, fraction = found.memory, args["kv_cache_config"]["free_gpu_memory_fraction"]
    free = memory.memory_bytes - memory.weight_bytes - 4 * GIB
    if backend != "TRTLLM":
        arena = arena_bytes(
            drafter, max_batch_size=args["max_batch_size"], max_seq_len=args["max_seq_len"],
            draft_len=speculative["max_draft_len"], tensor_parallel=tp,
        )  # fmt: skip
        assert arena <= free - 6 * GIB
        pool = TRAITS["tensorrt-llm"].pool
        assert pool is not None
        assert arena <= pool.arena_safety * (1 - fraction) * free
    pool = fraction * (free - memory.activation_bytes - (memory.drafter_bytes if backend != "TRTLLM" else 0))
    assert memory.kv_bytes <= pool
    assert not args["kv_cache_config"]["enable_block_reuse"]
    assert not args["enable_chunked_prefill"]
    for choice in found.choices:
        assert choice.reason, choice.name
    written = [choice.name for choice in found.choices if choice.written]
    assert sorted(written) == sorted(set(written)) == sorted(fields_of(args))


def fields_of(args: dict[str, Any], prefix: str = "") -> list[str]:
    """The names of all settings, sections with dots."""
    names = []
    for key, value in args.items():
        names += fields_of(value, f"{prefix}{key}.") if isinstance(value, dict) else [f"{prefix}{key}"]
    return names


@pytest.mark.parametrize(
    ("name", "gpu", "length", "batch"),
    [("qwen3-8b", "b200", 8192, 64), ("qwen3-8b", "h100", 40_960, 4), ("gpt-oss-20b", "rtx-5090", 8192, 8)],
)
def test_without_limits_the_batch_is_a_power_of_two_that_fits_and_every_draft_is_a_whole_block(
    pairs, name, gpu, length, batch
) -> None:
    found = configured(pairs[name], gpu, length=length)
    why = {choice.name: choice.reason for choice in found.choices}
    assert found.llm_args["max_batch_size"] == batch
    assert f"at most {found.memory.largest_batch} sequences of" in why["max_batch_size"]
    assert batch == 64 or batch <= found.memory.largest_batch < 2 * batch
    assert found.llm_args["speculative_config"]["max_draft_len"] == pairs[name][0].drafter.block_size - 1


@pytest.mark.parametrize(
    ("name", "gpu", "options", "message"),
    [
        ("gpt-oss-120b", "rtx-5090", {}, r"does not fit on rtx-5090, per GPU: weights 62.23 \+ .* of 31.84 GiB"),
        ("gpt-oss-120b", "h100", {"length": 131_072}, r"lower --max-seq-len: at most \d+ tokens fit"),
        ("qwen3-8b", "h100", {"max_batch_size": 4096}, r"lower --max-batch-size to \d+"),
        ("qwen3-8b", "b200", {"tensor_parallel": 2, "expert_parallel": 2}, "has no experts"),
        ("gpt-oss-20b", "b200", {"tensor_parallel": 2, "expert_parallel": 4}, "must divide --tp"),
        ("gpt-oss-20b", "rtx-pro-6000", {"tensor_parallel": 2, "expert_parallel": 2}, "no expert-parallel path"),
        ("gpt-oss-20b", "b200", {"tensor_parallel": 3}, "64 attention heads and 8 key-value heads"),
        ("gpt-oss-20b", "b200", {"tensor_parallel": 0}, "expected 1 or more"),
        ("gpt-oss-20b", "b200", {"tensor_parallel": 16, "gpus_per_node": 3}, "a multiple of 3"),
        ("gpt-oss-20b", "b200", {"max_batch_size": 0}, "expected 1 or more"),
        ("gpt-oss-20b", "v100", {}, "--gpu is 'v100' .*known GPUs"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(pairs, name, gpu, options, message) -> None:
    with pytest.raises(BuildError, match=message):
        configured(pairs[name], gpu, **options)


def test_the_release_names_its_sources_and_the_guide_every_field_of_its_drafting() -> None:
    assert CONTAINER.endswith(f":{TRTLLM_VERSION}")
    assert SCHEMA["sources"].keys() == {*SCHEMA["$defs"], "TorchLlmArgs", "dflash2"}
    for name in ("DFlashDecodingConfig", "TorchLlmArgs"):
        assert f"/{TRTLLM_VERSION}/" in SCHEMA["sources"][name]
    guide = (Path(__file__).parents[2] / "docs" / "tensorrt_llm.md").read_text()
    fields = SCHEMA["$defs"]["DFlashDecodingConfig"]["properties"]
    assert [name for name in fields if f"`{name}`" not in guide] == []
