"""Configurations of quantized checkpoints, and edits that change their meaning: each is honoured or refused."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.utils.match import match_targets
from torch.nn import Linear

from dflash_trt.checkpoint.quantization import read_quantization
from dflash_trt.checkpoint.rules import Quantization
from dflash_trt.errors import CheckpointError

GATE, LATE = "model.layers.1.mlp.gate_proj", "model.layers.57.mlp.gate_proj"
QUERY, HEAD = "model.layers.3.self_attn.q_proj", "lm_head"


def args(type_: str, bits: int, **fields: Any) -> dict[str, Any]:
    return {"type": type_, "num_bits": bits, **fields}


NVFP4 = args("float", 4, strategy="tensor_group", group_size=16)
ROW = {
    "weights": args("float", 8, strategy="channel"),
    "input_activations": args("float", 8, strategy="token", dynamic=True),
}
# As Qwen3.8-27B-NVFP4: the last layers' MLPs match both expressions.
MIXED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "mixed-precision",
    "ignore": [HEAD, r"re:.*visual.*"],
    "config_groups": {
        "nv": {
            "targets": [r"re:.*mlp\.(gate|up|down)_proj$"],
            "weights": NVFP4,
            "input_activations": NVFP4 | {"dynamic": "local"},
            "format": "nvfp4-pack-quantized",
        },
        "fp8": {"targets": [r"re:.*layers\.(56|57)\.mlp.*$", "Linear"], "format": "float-quantized", **ROW},
    },
}
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"g": {"targets": ["Linear"], "weights": args("int", 4, group_size=128)}},
}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": [HEAD]}
GROUPS = "config_groups"
WEIGHTS, INPUTS = f"{GROUPS}.g.weights", f"{GROUPS}.g.input_activations"
TOKEN = args("int", 8, strategy="token", dynamic=True)


def edited(config: dict[str, Any], edits: dict[str, Any]) -> dict[str, Any]:
    found = copy.deepcopy(config)
    for path, value in edits.items():
        place = found
        *parents, last = path.split(".") if "/" not in path else path.split("/")
        for part in parents:
            place = place[part]
        if value is None:
            place.pop(last, None)
        else:
            place[last] = value
    return found


def read(directory: Path, config: dict[str, Any], key: str = "quantization_config") -> Quantization:
    (directory / "config.json").write_text(json.dumps({key: config}))
    return read_quantization(directory)


HONOURED: list[tuple[dict[str, Any], dict[str, Any], str, str | None]] = [
    (MIXED, {}, GATE, "NVFP4"),
    (MIXED, {}, LATE, "FP8"),
    (MIXED, {}, QUERY, "FP8"),
    (MIXED, {}, HEAD, None),
    (MIXED, {"ignore": [r"re:.*visual.*"]}, HEAD, "FP8"),
    (MIXED, {"ignore": [r"re:model\.layers\.1\."]}, GATE, None),
    (MIXED, {"ignore": [r"re:layers\.1\."]}, GATE, "NVFP4"),  # from the beginning only
    (MIXED, {"ignore": ["model.layers.1.mlp"]}, GATE, "NVFP4"),  # not recursive
    (MIXED, {"ignore": ["Linear"]}, GATE, None),
    # An expression that sorts behind the other one loses its layers to it.
    (MIXED, {f"{GROUPS}.fp8.targets": [r"re:.*model\.layers\.57\.mlp.*$"]}, LATE, "NVFP4"),
    (MIXED, {f"{GROUPS}.fp8.targets": [LATE]}, LATE, "FP8"),
    (MIXED, {f"{GROUPS}.fp8.targets": ["Linear"]}, LATE, "NVFP4"),
    (MIXED, {f"{GROUPS}.fp8.targets": [LATE], "ignore": [r"re:.*\.57\."]}, LATE, None),
    (MIXED, {f"{GROUPS}.nv.weights": ROW["weights"], f"{GROUPS}.nv.format": "float-quantized",
             f"{GROUPS}.nv.input_activations": None}, GATE, "FP8"),
    (MIXED, {f"{GROUPS}.nv.targets": ["Linear"], f"{GROUPS}.fp8.targets": [r"re:.*mlp.*"]}, GATE, "FP8"),
    (MIXED, {f"{GROUPS}.nv.weights": None, f"{GROUPS}.nv.input_activations": None}, GATE, None),
    (INT4, {"quant_method": None}, GATE, "W4A16"),
    (INT4, {f"{WEIGHTS}.symmetric": False}, GATE, "W4A16_ASYM"),
    (INT4, {f"{WEIGHTS}.num_bits": 8}, GATE, "W8A16"),
    (INT4, {INPUTS: TOKEN}, GATE, "W4A8"),
    (INT4, {"kv_cache_scheme": args("float", 8)}, GATE, "W4A16"),
    (GPTQ, {}, HEAD, None),
    (GPTQ, {"lm_head": True}, HEAD, "GPTQ"),
    (GPTQ, {"dynamic": {r"-:.*\.1\..*": {}}}, GATE, None),
    (GPTQ, {"dynamic": {r"+:.*\.57\..*": {"bits": 8}}}, GATE, "GPTQ"),
    (AWQ, {"modules_to_not_convert": ["mlp"]}, GATE, None),
    (AWQ, {"modules_to_not_convert": ["gate"]}, GATE, "AWQ"),
    (FP8, {}, GATE, "FP8 in blocks"),
    (FP8, {"modules_to_not_convert": ["model.layers.1.mlp.gate"]}, GATE, "FP8 in blocks"),
    (FP8, {"modules_to_not_convert": [GATE]}, GATE, None),
]  # fmt: skip
FIELDS: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    (INT4, {f"{WEIGHTS}.actorder": "group"}, {"ordered": True}),
    (INT4, {f"{WEIGHTS}.actorder": "static"}, {"ordered": False}),
    (INT4, {f"{WEIGHTS}.group_size": -1}, {"group_size": 0}),
    (INT4, {f"{WEIGHTS}.symmetric": False}, {"zero_points": True}),
    (MIXED, {f"{GROUPS}.nv.input_activations": None}, {"activations": False, "reciprocal": True}),
    (MIXED, {}, {"activations": True, "static": True, "layout": "packed"}),
    (GPTQ, {"desc_act": True}, {"ordered": True, "layout": "gptq"}),
    (GPTQ, {"checkpoint_format": "gptq_v2"}, {"layout": "gptq_v2"}),
    (GPTQ, {"dynamic": {r"+:.*mlp.*": {"bits": 8, "group_size": 32}}}, {"scheme": "int8", "group_size": 32}),
    (FP8, {"weight_block_size": None, "activation_scheme": "static"}, {"static": True, "group_size": 0}),
    (FP8, {"weight_block_size": [64, 128]}, {"group_rows": 64, "group_size": 128}),
]
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    *((INT4, {f"{WEIGHTS}.num_bits": bits}, f"weights.num_bits is {bits}: weights") for bits in (2, 3, 5, 6)),
    (INT4, {f"{WEIGHTS}.group_size": 48}, "group_size is 48, expected a multiple of 32"),
    (INT4, {f"{WEIGHTS}.dynamic": True}, "weights.dynamic is true, expected false"),
    (INT4, {"format": "marlin-24"}, "format is 'marlin-24', supported are"),
    (INT4, {"format": "float-quantized"}, "format is 'float-quantized', but the weights of .* are int4"),
    (INT4, {"format": "mxfp6-pack-quantized"}, "format is 'mxfp6-pack-quantized', supported are"),
    (INT4, {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse weights are not supported"),
    (INT4, {"transform_config": {"config_groups": {}}}, "transform_config is .* not supported"),
    (INT4, {INPUTS: args("float", 8, strategy="token", dynamic=True)}, "not supported for int4 weights"),
    (INT4, {INPUTS: TOKEN | {"dynamic": False, "strategy": "tensor"}}, "'tensor', static are not supported"),
    (INT4, {f"{GROUPS}.g.output_activations": TOKEN}, "output_activations are to be rounded"),
    (INT4, {f"{GROUPS}.g.targets": ["Embedding"]}, "quantized embeddings are not supported"),
    (INT4, {f"{GROUPS}.g.targets": ["re:(a+)+$"]}, "could take very long to match"),
    (INT4, {f"{GROUPS}.g.targets": ["re:("]}, "is no regular expression"),
    (INT4, {GROUPS: {"W4A16": ["Linear"]}}, "W4A16 is .*, expected an object"),
    (INT4, {f"{GROUPS}.h": {"targets": ["Linear"], "weights": args("int", 8, group_size=64)}},
     "h has the target 'Linear', but so has 'g'"),
    (INT4, {f"{WEIGHTS}.num_bits": 8, f"{WEIGHTS}.symmetric": False, "format": "int-quantized"}, "symmetric is false"),
    (MIXED, {f"{GROUPS}.nv.weights.group_size": 32}, "with the strategy 'tensor_group' of 32 are not supported"),
    (MIXED, {f"{GROUPS}.nv.weights.symmetric": False}, "symmetric is false, but NVFP4 has no zero points"),
    (MIXED, {f"{GROUPS}.nv.input_activations.num_bits": 8}, "not supported for nvfp4 weights"),
    *((GPTQ, {"bits": bits}, f"bits is {bits}, supported are 4 and 8") for bits in (2, 3, 5, 6, 7)),
    (GPTQ, {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin', supported are"),
    (GPTQ, {"group_size": 16}, "group_size is 16, expected -1 or a multiple of 32"),
    (GPTQ, {"dynamic": {"+:.*": {"bits": 3}}}, "bits is 3, supported are 4 and 8"),
    (AWQ, {"version": "gemv"}, "version is 'gemv', supported is 'gemm'"),
    (AWQ, {"bits": 8}, "bits is 8, supported is 4"),
    (AWQ, {"zero_point": False}, "zero_point is false"),
    (GPTQ, {"quant_method": "auto-round"}, "AutoRound's own format, unlike its exports as auto_gptq"),
    (FP8, {"weight_block_size": [128]}, "weight_block_size is .128., expected rows and columns"),
    (FP8, {"fmt": "e5m2"}, "fmt is 'e5m2', expected 'e4m3'"),
    (FP8, {"expert_dtype": "fp4"}, "expert_dtype is 'fp4'"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "edits", "layer", "name"), HONOURED)
def test_edits_that_are_honoured(
    tmp_path: Path, config: dict[str, Any], edits: dict[str, Any], layer: str, name: str | None
) -> None:
    found = read(tmp_path, edited(config, edits)).algorithm(layer)
    assert (found and found.name) == name


@pytest.mark.parametrize(("config", "edits", "expected"), FIELDS)
def test_edits_of_a_layer(
    tmp_path: Path, config: dict[str, Any], edits: dict[str, Any], expected: dict[str, Any]
) -> None:
    found = read(tmp_path, edited(config, edits)).algorithm(GATE)
    assert {field: getattr(found, field) for field in expected} == expected


@pytest.mark.parametrize(("config", "edits", "message"), REFUSED)
def test_edits_that_are_refused(
    tmp_path: Path, config: dict[str, Any], edits: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError) as error:
        read(tmp_path, edited(config, edits))
    said = str(error.value).replace('"', "'")
    assert said.startswith(f"{tmp_path / 'config.json'}: ")
    assert re.search(message, said), said


def test_groups_are_those_of_the_package(tmp_path: Path) -> None:
    """Which group decides, for layers that several match."""
    found = read(tmp_path, MIXED)
    theirs = QuantizationConfig(**MIXED)
    targets = {target: name for name, scheme in theirs.config_groups.items() for target in scheme.targets}
    for layer in (
        GATE,
        LATE,
        QUERY,
        "model.layers.56.mlp.experts.3.up_proj",
        "model.layers.5.linear_attn.out_proj",
    ):
        group = targets[match_targets(layer, Linear(1, 1), targets)[0]]
        algorithm = found.algorithm(layer)
        assert algorithm is not None
        assert (group, algorithm.scheme) in (("nv", "nvfp4"), ("fp8", "fp8"))


@pytest.mark.parametrize("nested", [True, False])
def test_model_optimizers_file(tmp_path: Path, nested: bool) -> None:
    """Its next major version writes the fields of config.json, without a section around them."""
    layers = {
        GATE: {"quant_algo": "MXFP8", "group_size": 32},
        QUERY: {"quant_algo": "fp8_pb_wo", "group_size": 128},
        LATE: {"quant_algo": "FP8_BLOCK_SCALES"},
    }
    fields = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": fields} if nested else fields))
    found = [read_quantization(tmp_path).algorithm(layer) for layer in (GATE, QUERY, LATE, HEAD)]
    blocks = [each and (each.group_rows, each.group_size) for each in found]
    assert blocks == [(1, 32), (128, 128), (128, 128), None]
    (tmp_path / "hf_quant_config.json").unlink()
    same = read(tmp_path, {"quant_method": "modelopt_mixed", **fields}).algorithm(GATE)
    assert same == found[0]


def test_an_early_section(tmp_path: Path) -> None:
    config = {key: value for key, value in INT4.items() if key != "quant_method"}
    for section in (config, {"quantization_config": config, "sparsity_config": {"format": "dense"}}):
        found = read(tmp_path, section, "compression_config").algorithm(GATE)
        assert found is not None
        assert found.name == "W4A16"
