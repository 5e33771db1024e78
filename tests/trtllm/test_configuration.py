"""The configuration for TensorRT-LLM: valid for the release, right for the GPU, or refused with the reason."""

from __future__ import annotations

import shutil
from itertools import product
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from dflash_trt.checkpoint.catalogue import PAIRS, known_configs
from dflash_trt.errors import BuildError, CheckpointError
from dflash_trt.models.configs import read_drafter_config, read_target_config
from dflash_trt.models.inventory import Inventory, take_inventory
from dflash_trt.planning.gpus import gpus
from dflash_trt.planning.memory import GIB, arena_bytes
from dflash_trt.trtllm.configuration import Configuration, configure
from dflash_trt.trtllm.launch import launch_files
from dflash_trt.trtllm.memory import POOL
from dflash_trt.trtllm.options import TensorRTLLMOptions
from dflash_trt.trtllm.quantization import TargetQuantization, check_drafter, target_quantization
from dflash_trt.trtllm.releases import Release, find_release, known_releases
from tests.doubles.checkpoints import make_drafter, make_target, write_json

Pair = tuple[Inventory, TargetQuantization]
PARALLEL = ((1, 1), (2, 1), (2, 2), (4, 1), (8, 1), (8, 4), (8, 8), (16, 8))


@pytest.fixture(scope="module")
def pairs() -> dict[str, Pair]:
    found = {}
    for pair in PAIRS:
        found[pair.name] = read_pair(*known_configs(pair.name))
    return found


def read_pair(target_dir: Path, drafter_dir: Path) -> Pair:
    target = read_target_config(target_dir)
    return take_inventory(target, read_drafter_config(drafter_dir)), target_quantization(target)


def quantized_pair(root: Path, name: str, algorithm: str | None, cache: str | None = None) -> Pair:
    """A known pair's configurations, with the target as Model Optimizer exports it."""
    target, drafter = known_configs(name)
    directory = root / f"{name}-{algorithm}-{cache}"
    shutil.copytree(target, directory)
    section = {"quant_algo": algorithm, "kv_cache_quant_algo": cache, "exclude_modules": ["lm_head"]}
    write_json(directory / "hf_quant_config.json", {"producer": {}, "quantization": section})
    return read_pair(directory, drafter)


def configured(
    pair: Pair,
    gpu: str = "b200",
    *,
    block: int | None = None,
    length: int = 8192,
    **options: Any,
) -> Configuration:
    inventory, quantization = pair
    return configure(
        inventory,
        TensorRTLLMOptions(gpu=gpu, **options),
        block_size=block or inventory.drafter.block_size,
        max_seq_len=min(length, inventory.drafter.max_position_embeddings),
        quantization=quantization,
    )


def yaml_documents(configuration: Configuration) -> dict[str, Any]:
    files = launch_files(configuration)
    return {name: yaml.safe_load(text) for name, text in files.items() if name.endswith(".yaml")}


@pytest.mark.parametrize("version", known_releases())
@pytest.mark.parametrize("gpu", [name for name, gpu in gpus().items() if gpu.sm >= 90])
def test_every_yaml_is_valid_for_every_pair_and_parallelism(
    pairs: dict[str, Pair], gpu: str, version: str
) -> None:
    """Each combination gives files that the release's schema accepts, or a correct refusal."""
    release, device = find_release(version), gpus()[gpu]
    jsonschema.Draft202012Validator.check_schema(release.llm_args)
    jsonschema.Draft202012Validator.check_schema(release.disaggregated)
    valid = 0
    for (name, pair), (tp, ep) in product(pairs.items(), PARALLEL):
        target, drafter = pair[0].target, pair[0].drafter
        options = {"tensor_parallel": tp, "expert_parallel": ep, "version": version, "gpus_per_node": 8}
        found, refusal = attempt(pair, gpu, options)
        if found is None:
            heads = any(
                c.num_attention_heads % tp or (c.num_key_value_heads % tp and tp % c.num_key_value_heads)
                for c in (target, drafter)
            )
            spread = ep > 1 and (target.moe is None or device.sm >= 120)
            assert heads or spread or "does not fit" in refusal, f"{name} on {tp} x {gpu}: {refusal}"
            continue
        valid += 1
        for file, document in yaml_documents(found).items():
            if file == "triton/model.yaml":
                assert document.pop("triton_config")["decoupled"]
                assert document.pop("model") == "./target"
                assert document == found.llm_args
            schema = release.disaggregated if "router" in file else release.llm_args
            errors = [e.message for e in jsonschema.Draft202012Validator(schema).iter_errors(document)]
            assert errors == [], f"{name} on {tp} x {gpu}: {file}"
        check_rules(found, pair[0], tp, ep)
    assert valid >= 20


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
    assert backend == {90: "FA4", 100: "TRTLLM", 103: "TRTLLM"}.get(found.gpu.sm, "VANILLA")
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
            drafter,
            max_batch_size=args["max_batch_size"],
            max_seq_len=args["max_seq_len"],
            draft_len=speculative["max_draft_len"],
            tensor_parallel=tp,
        )
        assert arena <= free - 6 * GIB
        assert arena <= POOL.arena_safety * (1 - fraction) * free
    pool = fraction * (free - memory.activation_bytes - (memory.drafter_bytes if backend != "TRTLLM" else 0))
    assert memory.kv_bytes <= pool
    assert not args["kv_cache_config"]["enable_block_reuse"]
    for choice in found.choices:
        assert choice.reason, choice.name


def test_the_issued_example(pairs: dict[str, Pair]) -> None:
    found = configured(pairs["gpt-oss-120b"], tensor_parallel=8, expert_parallel=8)
    assert found.release.version == "1.4.0rc1"
    assert found.llm_args["speculative_config"] == {
        "decoding_type": "DFlash",
        "max_draft_len": 9,
        "speculative_model": "./drafter",
        "mask_token_id": 200_000,
        "target_layer_ids": [1, 9, 17, 25, 33],
        "attention_backend": "TRTLLM",
    }
    assert found.llm_args["moe_config"] == {"backend": "TRTLLM"}


def test_moe_backends_by_gpu_and_release(pairs: dict[str, Pair], tmp_path: Path) -> None:
    def backend(name: str, gpu: str, **options: Any) -> str:
        found = configured(pairs[name], gpu, **options).llm_args
        return str(found["moe_config"]["backend"])

    assert backend("gpt-oss-20b", "b300") == "TRTLLM"
    assert backend("gpt-oss-20b", "h200", version="1.3.0rc27") == "TRITON"
    assert backend("gpt-oss-20b", "h200", version="1.4.0rc1") == "CUTLASS"
    assert backend("gpt-oss-20b", "rtx-pro-6000") == "CUTLASS"
    assert backend("qwen3-coder-30b-a3b", "b200") == "CUTLASS"
    assert backend("gpt-oss-20b", "b200", moe_backend="CUTLASS") == "CUTLASS"
    pairs["nvfp4"] = quantized_pair(tmp_path, "qwen3-coder-30b-a3b", "NVFP4")
    assert backend("nvfp4", "b200") == "TRTLLM"
    assert backend("nvfp4", "rtx-pro-6000") == "CUTLASS"
    del pairs["nvfp4"]


def test_a_schedule_reaches_the_yaml_with_integer_keys(pairs: dict[str, Pair]) -> None:
    found = configured(pairs["gpt-oss-20b"], max_batch_size=40, draft_len_schedule={32: 3, 5: 7, 40: 0})
    document = yaml_documents(found)["llm_args.yaml"]
    assert document["speculative_config"]["draft_len_schedule"] == {5: 7, 32: 3, 40: 0}
    assert 5 in document["cuda_graph_config"]["batch_sizes"]
    assert any("stores no context" in choice.reason for choice in found.choices)


@pytest.mark.parametrize(
    ("name", "gpu", "length", "batch"),
    [("qwen3-8b", "b200", 8192, 64), ("qwen3-8b", "h100", 40_960, 4), ("gpt-oss-20b", "rtx-5090", 8192, 8)],
)
def test_without_limits_the_batch_is_a_power_of_two_that_fits_and_every_draft_is_a_whole_block(
    pairs: dict[str, Pair], name: str, gpu: str, length: int, batch: int
) -> None:
    found = configured(pairs[name], gpu, length=length)
    why = {choice.name: choice.reason for choice in found.choices}
    assert found.llm_args["max_batch_size"] == batch
    assert f"at most {found.memory.largest_batch} sequences of" in why["max_batch_size"]
    assert batch == 64 or batch <= found.memory.largest_batch < 2 * batch
    assert "draft_len_schedule" not in found.llm_args["speculative_config"]
    assert "always the whole block" in why["draft_len_schedule"]


def test_prefill_and_decode_apart(pairs: dict[str, Pair]) -> None:
    documents = yaml_documents(configured(pairs["qwen3-8b"], "h200", tensor_parallel=2))
    context, generation = (documents[f"disaggregated/{role}.yaml"] for role in ("context", "generation"))
    assert "speculative_config" not in context
    assert context["disable_overlap_scheduler"] is True
    assert generation["speculative_config"]["decoding_type"] == "DFlash"
    for role in (context, generation):
        assert role["cache_transceiver_config"]["max_tokens_in_buffer"] == role["max_seq_len"]


def test_quantized_targets_are_planned_as_such(pairs: dict[str, Pair], tmp_path: Path) -> None:
    plain = configured(pairs["qwen3-8b"], "b200")
    fp8 = configured(quantized_pair(tmp_path, "qwen3-8b", "FP8", "FP8"), "b200")
    nvfp4 = configured(quantized_pair(tmp_path, "qwen3-8b", "NVFP4"), "b200")
    assert fp8.llm_args["kv_cache_config"]["dtype"] == "fp8"
    assert 2 * fp8.memory.kv_bytes_per_token == plain.memory.kv_bytes_per_token
    assert nvfp4.memory.kv_bytes_per_token == plain.memory.kv_bytes_per_token
    dense, half, quarter = (c.memory.weights["target"]["mlp"] for c in (plain, fp8, nvfp4))
    assert half["fp8"] == pytest.approx(dense["bf16"] / 2, rel=1e-5)
    assert quarter["nvfp4"] == pytest.approx(dense["bf16"] * (0.5 + 1 / 16) / 2, rel=1e-5)
    assert fp8.memory.weights["target"]["head"] == plain.memory.weights["target"]["head"]


@pytest.mark.parametrize(
    ("name", "gpu", "options", "message"),
    [
        ("gpt-oss-120b", "rtx-5090", {}, r"does not fit on rtx-5090, per GPU: weights 62.23 \+ .* of 29.00 GiB"),
        ("gpt-oss-120b", "h100", {"length": 131_072}, r"lower --max-seq-len: at most \d+ tokens fit"),
        ("qwen3-8b", "h100", {"max_batch_size": 4096}, r"lower --max-batch-size to \d+"),
        ("qwen3-8b", "b200", {"drafter_attention": "FA4"}, "B200 .* is SM100: .* FA4 on SM90 only"),
        ("qwen3-8b", "h200", {"drafter_attention": "TRTLLM"}, "TRTLLM runs on SM100 and SM103 only"),
        ("qwen3-8b", "h200", {"drafter_attention": "fast"}, "expected one of: VANILLA, TRTLLM, FA4"),
        ("gpt-oss-20b", "h200", {"moe_backend": "TRTLLM"}, "runs on SM100 and SM103, but H200"),
        ("qwen3-coder-30b-a3b", "b200", {"moe_backend": "TRTLLM"}, "supports quantized experts, not BF16"),
        ("gpt-oss-20b", "b200", {"moe_backend": "FAST"}, r"moe_config.backend: 'FAST' is not one of"),
        ("qwen3-8b", "b200", {"moe_backend": "CUTLASS"}, "has no experts"),
        ("qwen3-8b", "b200", {"tensor_parallel": 2, "expert_parallel": 2}, "has no experts"),
        ("gpt-oss-20b", "b200", {"tensor_parallel": 2, "expert_parallel": 4}, "must divide --tp"),
        ("gpt-oss-20b", "rtx-pro-6000", {"tensor_parallel": 2, "expert_parallel": 2}, "no expert-parallel path"),
        ("gpt-oss-20b", "b200", {"tensor_parallel": 3}, "64 attention heads and 8 key-value heads"),
        ("gpt-oss-20b", "b200", {"tensor_parallel": 0}, "expected 1 or more"),
        ("gpt-oss-20b", "b200", {"tensor_parallel": 16, "gpus_per_node": 3}, "a multiple of 3"),
        ("gpt-oss-20b", "b200", {"max_batch_size": 0}, "expected 1 or more"),
        ("gpt-oss-20b", "b200", {"draft_len_schedule": {4: 3}}, r"begins with 4:3, .*: 4:7"),
        ("gpt-oss-20b", "b200", {"draft_len_schedule": {4: 8}}, r"has 4:8, expected a batch of 1 or more and 0\.\.7"),
        ("gpt-oss-20b", "v100", {}, "--gpu is 'v100' .*known GPUs"),
        ("gpt-oss-20b", "b200", {"version": "1.2.1"}, "1.2.1 and older have no DFlashDecodingConfig"),
        ("gpt-oss-20b", "b200", {"version": "1.5.0"}, "whose configuration fields are not known here"),
        ("gpt-oss-20b", "b200", {"version": "newest"}, "expected one such as 1.4.0rc1"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(
    pairs: dict[str, Pair], name: str, gpu: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(BuildError, match=message):
        configured(pairs[name], gpu, **options)


def test_quantized_targets_that_tensorrt_llm_cannot_load(pairs: dict[str, Pair], tmp_path: Path) -> None:
    nvfp4 = quantized_pair(tmp_path, "qwen3-8b", "NVFP4")
    with pytest.raises(BuildError, match="NVFP4, which TensorRT-LLM runs on SM100 and newer, and H200"):
        configured(nvfp4, "h200")
    for gpu in ("b200", "rtx-5090", "dgx-spark"):
        configured(nvfp4, gpu)
    gpt_oss, _ = pairs["gpt-oss-20b"]
    for scheme in ("fp8", "nvfp4"):
        with pytest.raises(BuildError, match="gpt-oss in MXFP4 only"):
            configured((gpt_oss, TargetQuantization(scheme)), "b200")


def test_fields_differ_between_releases() -> None:
    old, new = find_release("1.3.0rc27"), find_release("1.4.0rc1")
    added = {"moe_backend", "spec_dec_variant", "context_recompute_tail", "skip_ctx_buffer_budget_check"}
    assert new.fields("DFlashDecodingConfig") - old.fields("DFlashDecodingConfig") == added
    assert old.fields("DFlashDecodingConfig") < new.fields("DFlashDecodingConfig")
    section = {"decoding_type": "DFlash", "max_draft_len": 7, "speculative_model": "x"}
    newer = {"speculative_config": section | {"context_recompute_tail": 64}}
    new.check(newer)
    with pytest.raises(
        BuildError, match=r"TensorRT-LLM 1\.3\.0rc27: speculative_config: .*context_recompute_tail"
    ):
        old.check(newer)


@pytest.mark.parametrize(
    "document",
    [
        {"speculative": {}},
        {"speculative_config": {"decoding_type": "DFlash", "max_draft_len": 7}},
        {"kv_cache_config": {"free_gpu_memory_fraction": 1.5}},
        {"max_batch_size": "many"},
        {"moe_config": {"backend": "FAST"}},
        {"cuda_graph_config": {"batch_sizes": [0]}},
    ],
)
def test_the_schema_refuses_what_the_package_would(document: dict[str, Any]) -> None:
    for version in known_releases():
        with pytest.raises(BuildError):
            find_release(version).check(document)


def test_every_release_names_its_sources() -> None:
    for version in known_releases():
        release: Release = find_release(version)
        assert release.version == version
        assert release.container.endswith(f":{version}")
        assert release.sources.keys() == {*release.llm_args["$defs"], "TorchLlmArgs"}
        for name in ("DFlashDecodingConfig", "TorchLlmArgs"):
            assert f"/{version}/" in release.sources[name]


def test_model_optimizers_checkpoints_are_recognised(tmp_path: Path) -> None:
    assert quantized_pair(tmp_path, "qwen3-8b", "FP8")[1] == TargetQuantization("fp8")
    assert quantized_pair(tmp_path, "qwen3-8b", "NVFP4", "FP8")[1] == TargetQuantization("nvfp4", "fp8")
    assert quantized_pair(tmp_path, "qwen3-8b", None, "FP8")[1] == TargetQuantization(None, "fp8")
    assert read_pair(*known_configs("qwen3-8b"))[1] == TargetQuantization()
    assert read_pair(*known_configs("gpt-oss-20b"))[1] == TargetQuantization("mxfp4")


def test_other_quantizations_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"quant_algo is W4A16_AWQ, supported for TensorRT-LLM are FP8, NVFP4"
    ):
        quantized_pair(tmp_path, "qwen3-8b", "W4A16_AWQ")
    drafter = make_drafter(tmp_path / "drafter", make_target(tmp_path / "target"))
    check_drafter(drafter)
    write_json(drafter / "hf_quant_config.json", {"quantization": {"quant_algo": "FP8"}})
    with pytest.raises(CheckpointError, match="the drafter is quantized"):
        check_drafter(drafter)
