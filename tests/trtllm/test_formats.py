"""Number formats of targets on TensorRT-LLM: named as it names them, planned as such, on GPUs that run them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.checkpoint.catalogue import known_configs
from dflash_trt.errors import BuildError, CheckpointError
from dflash_trt.models.configs import read_drafter_config, read_target_config
from dflash_trt.trtllm.targets import TargetQuantization, check_drafter, target_quantization
from tests.doubles.checkpoints import make_drafter, make_target, write_json
from tests.doubles.kind_checkpoints import make_dflash2, make_jetspec
from tests.trtllm.test_configuration import Pair, configured, read_pair


def quantized_pair(root: Path, name: str, algorithm: str | None, cache: str | None = None) -> Pair:
    """A known pair's configurations, with the target as Model Optimizer exports it."""
    target, drafter = known_configs(name)
    directory = root / f"{name}-{algorithm}-{cache}"
    shutil.copytree(target, directory)
    section = {"quant_algo": algorithm, "kv_cache_quant_algo": cache, "exclude_modules": ["lm_head"]}
    write_json(directory / "hf_quant_config.json", {"producer": {}, "quantization": section})
    return read_pair(directory, drafter)


def test_moe_backends_by_gpu(pairs: dict[str, Pair], tmp_path: Path) -> None:
    pairs = pairs | {"nvfp4": quantized_pair(tmp_path, "qwen3.6-35b-a3b", "NVFP4")}

    def backend(name: str, gpu: str) -> str:
        return str(configured(pairs[name], gpu).llm_args["moe_config"]["backend"])

    assert backend("gpt-oss-20b", "b300") == "TRTLLM"
    assert backend("gpt-oss-20b", "h200") == "CUTLASS"
    assert backend("gpt-oss-20b", "rtx-pro-6000") == "CUTLASS"
    assert backend("qwen3-coder-30b-a3b", "b200") == "CUTLASS"
    assert backend("nvfp4", "b200") == "TRTLLM"
    assert backend("nvfp4", "rtx-pro-6000") == "CUTLASS"


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
    ("name", "runs", "refused"),
    [
        ("nvfp4", ("b200", "rtx-5090", "dgx-spark"), ("h200", "l40s")),
        ("fp8", ("l40s", "h200", "b200", "rtx-5090"), ("a100",)),
        ("fp8-blocks", ("h200", "b200", "rtx-pro-6000"), ("l40s", "dgx-spark")),
        ("fp8-rows", ("l40s", "h200"), ("b200",)),
        ("int4-awq", ("a100", "h200"), ("rtx-5090",)),
    ],
)
def test_formats_by_gpu(pairs, name, runs, refused) -> None:
    inventory, _ = pairs["tiny"]
    quantization = TargetQuantization(frozenset({name}))
    for gpu in runs:
        choices = configured((inventory, quantization), gpu, length=512).choices
        assert next(choice.value for choice in choices if choice.name == "format") == name
    for gpu in refused:
        with pytest.raises(BuildError, match=f"{name}, .*SM"):
            configured((inventory, quantization), gpu, length=512)
    with pytest.raises(BuildError, match=f"{name}, .* MXFP4"):
        configured((pairs["gpt-oss-20b"][0], quantization), "b200")


def test_experts_in_blocks_are_divided_into_whole_blocks(pairs: dict[str, Pair]) -> None:
    blocks = pairs["qwen3.6-35b-a3b"][0], TargetQuantization(frozenset({"fp8-blocks"}))
    with pytest.raises(BuildError, match=r"64 rows .* 128; raise --ep"):
        configured(blocks, tensor_parallel=8)
    configured(blocks, tensor_parallel=8, expert_parallel=2)


def found_in(tmp_path: Path, section: dict[str, Any] | None = None, **own_file: Any) -> TargetQuantization:
    """The quantization of Qwen3-8B with this `quantization_config`, or with a file of Model Optimizer."""
    target = tmp_path / "target"
    shutil.copytree(known_configs("qwen3-8b")[0], target)
    config = read_target_config(target)
    if own_file:
        write_json(target / "hf_quant_config.json", {"producer": {}, "quantization": own_file})
    if section is not None:
        values = json.loads(config.path.read_text())
        write_json(config.path, values | {"quantization_config": section})
    return target_quantization(config)


def compressed(bits: int, kind: str, weights: str, inputs: str | None, **changes: Any) -> dict[str, Any]:
    """A section of compressed-tensors with one group."""
    size = {"tensor_group": 16, "group": 128}
    group: dict[str, Any] = {
        "targets": ["Linear"],
        "weights": {"num_bits": bits, "type": kind, "strategy": weights, "group_size": size.get(weights)},
        "input_activations": inputs
        and {"num_bits": bits, "strategy": inputs, "group_size": size.get(inputs)},
    }
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    } | changes


BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}


MIXED = {"a": {"quant_algo": "FP8"}, "b": {"quant_algo": "NVFP4", "group_size": 16}}


@pytest.mark.parametrize(
    ("section", "own", "name", "cache"),
    [
        (BLOCKS, {}, "fp8-blocks", None),
        (compressed(8, "float", "channel", "token"), {}, "fp8-rows", None),
        (compressed(8, "float", "block", "group"), {}, "fp8-blocks", None),
        (compressed(4, "float", "tensor_group", "tensor_group"), {}, "nvfp4", None),
        (compressed(4, "float", "tensor_group", "tensor_group", kv_cache_scheme=CACHE), {}, "nvfp4", "fp8"),
        (None, {"quant_algo": "FP8"}, "fp8", None),
        (None, {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}, "nvfp4", "fp8"),
        (None, {"quant_algo": None, "kv_cache_quant_algo": "FP8"}, "bfloat16", "fp8"),
        (None, {"quant_algo": "W4A16_AWQ", "group_size": 128}, "int4-awq", None),
        (None, {"quant_algo": "fp8_pb_wo"}, "fp8-blocks", None),
        (None, {"quant_algo": "MIXED_PRECISION", "quantized_layers": MIXED}, "fp8+nvfp4", None),
    ],
)
def test_formats_of_targets_are_named(section, own, name, cache, tmp_path) -> None:
    found = found_in(tmp_path, section, **own)
    assert (found.name, found.kv_cache) == (name, cache)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"quant_method": "awq", "bits": 4}, "quant_method is .awq., which TensorRT-LLM does not read; it reads"),
        ({"quant_method": "gptq", "bits": 4}, "quant_method is .gptq., which"),
        ({"quant_method": "auto-round"}, "quant_method is .auto-round."), ({"quant_method": 3}, "quant_method is 3"),
        (BLOCKS | {"weight_block_size": [64, 64]}, r"weight_block_size is \[64, 64\]"),
        (compressed(4, "int", "group", None), "are 4 bits of int by group, with inputs by none"),
        (compressed(8, "int", "channel", "token"), "are 8 bits of int by channel"),
        (compressed(8, "float", "tensor", "tensor"), "are 8 bits of float by tensor"),
        (compressed(4, "float", "tensor_group", None), "by tensor_group, with inputs by none"),
        (compressed(8, "float", "channel", "token", kv_cache_scheme={"num_bits": 4}), "kv_cache_scheme is"),
        (
            compressed(8, "float", "channel", "token", config_groups={"fp8": {}, "nvfp4": {}}),
            "config_groups has 2 groups .*#17725",
        ),
    ],
)  # fmt: skip
def test_formats_that_are_not_read_are_refused_by_name(section, message, tmp_path) -> None:
    with pytest.raises(CheckpointError, match=message):
        found_in(tmp_path, section)


def test_blocks_of_model_optimizer_are_named_in_small_letters(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="write fp8_pb_wo"):
        found_in(tmp_path, quant_algo="FP8_PB_WO")


def test_drafters_that_tensorrt_llm_computes_otherwise_are_refused(tmp_path: Path) -> None:
    target = make_target(tmp_path / "target")
    check_drafter(read_drafter_config(make_dflash2(tmp_path / "dflash2", target)))
    with pytest.raises(CheckpointError, match="rows of a block see earlier rows only"):
        check_drafter(read_drafter_config(make_jetspec(tmp_path / "jetspec", target)))
    drafter = make_drafter(tmp_path / "drafter", target)
    write_json(drafter / "hf_quant_config.json", {"quantization": {"quant_algo": "FP8"}})
    with pytest.raises(CheckpointError, match="the drafter is quantized"):
        check_drafter(read_drafter_config(drafter))
