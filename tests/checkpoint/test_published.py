"""Checkpoints as published that once were refused or misread, wrong ones, and side files that change a drafter."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_trt.building.build import build
from dflash_trt.checkpoint.quantization import read_quantization
from dflash_trt.checkpoint.tensors import Checkpoint
from dflash_trt.errors import CheckpointError
from dflash_trt.models.configs import read_drafter_config, read_target_config
from tests.doubles.checkpoints import make_drafter, make_target, write_json
from tests.doubles.family_checkpoints import make_gpt_oss, make_qwen3_moe
from tests.doubles.formats import read_numbers, stored_as
from tests.doubles.hybrid_checkpoints import SPARSE, make_hybrid

# The fields of the published config.json that decide.
LAYER = {
    "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 2880,
    "intermediate_size": 17280, "num_hidden_layers": 1, "num_attention_heads": 64, "num_key_value_heads": 8,
    "head_dim": 64, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "vocab_size": 201088,
    "draft_vocab_size": 32000, "attention_bias": False,
}  # fmt: skip
SPECFORGE = LAYER | {
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 17, 33], "use_aux_hidden_state": True}
}
OPTIMIZER = LAYER | {
    "eagle_config": {
        "eagle_aux_hidden_state_layer_ids": [2, 18, 33],
        "use_aux_hidden_state": True,
        "norm_before_fc": True,
        "next_layer_regular": True,
    }
}

YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
NEBIUS = LAYER | {
    "architectures": ["LlamaForCausalLM"],
    "intermediate_size": 11520,
    "draft_vocab_size": 64000,
    "truncated_vocab_size": 64000,
    "rope_theta": 150000,
    "rope_scaling": YARN | {"original_max_position_embeddings": 4096},
}


@pytest.mark.parametrize(
    ("config", "layer", "taps", "norm"),
    [
        (SPECFORGE, "midlayer", (-1, 1, 17, 33), False),
        (OPTIMIZER, "layers.0", (-1, 1, 17, 32), True),
        (NEBIUS, "midlayer", (), False),
        (LAYER | {"architectures": ["Eagle3LlamaForCausalLM"]}, "midlayer", (), False),
    ],
    ids=[
        "lmsys/EAGLE3-gpt-oss-120b-bf16",
        "nvidia/gpt-oss-120b-Eagle3-v3",
        "nebius/EAGLE3-gpt-oss-20b",
        "vLLM",
    ],
)
def test_eagle3_heads_are_read_by_their_tensors(
    tmp_path: Path, config: dict[str, Any], layer: str, taps: tuple[int, ...], norm: bool
) -> None:
    write_json(tmp_path / "config.json", config)
    save_file({f"{layer}.hidden_norm.weight": torch.ones(1)}, tmp_path / "model.safetensors")
    found = read_drafter_config(tmp_path)
    assert (found.settings.layer, found.target_layer_ids, found.settings.norm_before_fc) == (
        layer,
        taps,
        norm,
    )


def test_gpt_oss_may_leave_more_in_floating_point(tmp_path: Path) -> None:
    path = make_gpt_oss(tmp_path / "target")
    config = json.loads((path / "config.json").read_text())
    kept = config["quantization_config"]["modules_to_not_convert"]
    for names in ([*kept, "model.norm", "lm_head.weight"], kept[1:]):
        config["quantization_config"]["modules_to_not_convert"] = names
        write_json(path / "config.json", config)
        if len(names) > len(kept):
            assert read_target_config(path).moe is not None
        else:
            with pytest.raises(CheckpointError, match="modules_to_not_convert lacks"):
                read_target_config(path)


def fp8_by_row(target: str) -> dict[str, Any]:
    """The group of layers in FP8 with a scale for each row."""
    numbers = {"num_bits": 8, "type": "float", "symmetric": True}
    inputs = numbers | {"strategy": "token", "dynamic": True}
    return {
        "group_0": {
            "targets": [target],
            "weights": numbers | {"strategy": "channel"},
            "input_activations": inputs,
        }
    }


INPUTS = {"num_bits": 4, "type": "float", "symmetric": True, "dynamic": False, "group_size": 16}
CONFIGS: dict[str, tuple[dict[str, Any], str, dict[str, Any] | None]] = {
    "NVFP4 with inputs in static groups": (
        {
            "quant_method": "compressed-tensors",
            "format": "nvfp4-pack-quantized",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": INPUTS | {"strategy": "tensor_group"},
                    "input_activations": INPUTS | {"strategy": "group"},
                }
            },
        },
        "model.layers.0.mlp.up_proj",
        {"name": "NVFP4", "activations": True, "static": True},
    ),
    "an excluded class of characters": (
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["model.layers.[01].*"]},
        "model.layers.1.mlp.up_proj",
        None,
    ),
    "a target with the file's own prefix": (
        {
            "quant_method": "compressed-tensors",
            "config_groups": fp8_by_row(r"re:language_model\.model\.layers\.\d+\.mlp.*"),
        },
        "model.language_model.layers.1.mlp.up_proj",
        {"name": "FP8"},
    ),
    "a name with the file's own prefix": (
        {
            "quant_method": "compressed-tensors",
            "ignore": ["language_model.model.layers.1.mlp.up_proj"],
            "config_groups": fp8_by_row("Linear"),
        },
        "model.language_model.layers.1.mlp.up_proj",
        None,
    ),
    "floats that a training rounded": ({"q4_0": True}, "model.layers.0.mlp.up_proj", None),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_sections_about_quantization(tmp_path: Path, name: str) -> None:
    section, layer, expected = CONFIGS[name]
    write_json(tmp_path / "config.json", {"quantization_config": section})
    found = read_quantization(tmp_path).algorithm(layer)
    assert (found is None) == (expected is None)
    assert all(getattr(found, key) == value for key, value in (expected or {}).items())


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pair")
    target = make_target(root / "target", hidden=128, head_dim=32, intermediate=256, layers=2)
    make_drafter(root / "drafter", target, taps=(0, 1), layers=1)
    return root


def changed(directory: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def test_idle_tensors_are_skipped_and_others_are_not(pair: Path, tmp_path: Path) -> None:
    """Zeros as biases of quantized layers, and frequencies. A bias that is not zero would change the numbers."""
    stored = tmp_path / "q"
    stored_as("GPTQ", pair / "target", stored)
    bias = "model.layers.0.mlp.up_proj.bias"
    idle = {bias: torch.zeros(256), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)}
    changed(stored, lambda tensors: tensors.update(idle))
    build(str(stored), str(pair / "drafter"), tmp_path / "bundle")
    changed(stored, lambda tensors: tensors.update({bias: torch.ones(256)}))
    with pytest.raises(CheckpointError, match=rf"{stored}: .*{bias}"):
        build(str(stored), str(pair / "drafter"), tmp_path / "other")


def test_layers_that_no_rule_names_are_what_their_tensors_say(pair: Path, tmp_path: Path) -> None:
    """The rules except every layer, and all are in words."""
    numbers = stored_as("GPTQ", pair / "target", tmp_path / "q")
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    config["quantization_config"]["dynamic"] = {"-:.*": {}}
    write_json(tmp_path / "q" / "config.json", config)
    found = read_numbers(Checkpoint(tmp_path / "q"))
    assert found.keys() == numbers.keys()
    build(str(tmp_path / "q"), str(pair / "drafter"), tmp_path / "bundle")


UP = "model.layers.1.mlp.up_proj.weight"
Tensors = dict[str, torch.Tensor]
# What becomes of the tensors and the configuration, and what the error says.
WRONG: dict[str, tuple[Callable[[Tensors], Any], dict[str, Any], str]] = {
    "dtype": (
        lambda t: t.update({UP: t[UP].to(torch.int8)}), {},
        rf"model\.safetensors: tensor '{UP}' is I8, supported are .*BF16",
    ),
    "lost": (lambda t: t.pop(UP), {}, rf"target: has no tensor '{UP}'; near names: model.layers.\d.mlp.up_proj.weight"),
    "other layers": (
        lambda t: None, {"intermediate_size": 160},
        r"model\.safetensors: tensor 'model.layers.\d.mlp.\w+.weight' has shape \[256, 128\], but by config.json "
        r"it has \[160, 128\]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_target_is_refused_by_file_and_tensor(pair: Path, tmp_path: Path, wrong: str) -> None:
    change, fields, message = WRONG[wrong]
    target = Path(shutil.copytree(pair / "target", tmp_path / "target"))
    changed(target, change)
    write_json(target / "config.json", json.loads((target / "config.json").read_text()) | fields)
    with pytest.raises(CheckpointError, match=message) as error:
        build(str(target), str(pair / "drafter"), tmp_path / "bundle")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "bundle").exists()


def packed(layer: str) -> Callable[[dict[str, torch.Tensor]], None]:
    """A layer in FP8, whether or not this can be."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        weight = tensors.pop(f"{layer}.weight").float()
        scale = weight.abs().amax(1, keepdim=True) / 448
        tensors[f"{layer}.weight"] = (weight / scale).to(torch.float8_e4m3fn)
        tensors[f"{layer}.weight_scale"] = scale

    return change


@pytest.mark.parametrize(
    ("make", "layer"),
    [
        (make_qwen3_moe, "model.layers.1.mlp.gate"),
        (lambda path: make_hybrid(path, SPARSE), "model.layers.1.mlp.shared_expert_gate"),
        (make_target, "model.embed_tokens"),
    ],
)
def test_a_layer_that_must_be_in_floating_point_is_named(
    tmp_path: Path, make: Callable[[Path], Path], layer: str
) -> None:
    target = make(tmp_path / "target")
    changed(target, packed(layer))
    config = json.loads((target / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "config_groups": fp8_by_row(f"re:{layer}$"),
    }
    write_json(target / "config.json", config)
    make_drafter(tmp_path / "drafter", target, taps=(0, 1), layers=1)
    with pytest.raises(CheckpointError, match=f"{target}.*'{layer}' is quantized"):
        build(str(target), str(tmp_path / "drafter"), tmp_path / "bundle")


def test_errors_name_the_checkpoint_that_was_given(pair: Path, tmp_path: Path) -> None:
    """Its layers are written anew before a fault is found."""
    stored_as("AWQ", pair / "target", tmp_path / "q")
    changed(tmp_path / "q", lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(CheckpointError, match=rf"^{tmp_path / 'q'}: has no tensor 'model.norm.weight'"):
        build(str(tmp_path / "q"), str(pair / "drafter"), tmp_path / "bundle")


@pytest.mark.parametrize("name", ["mask_embedding.pt", "embeddings.pt"])
def test_side_files_of_a_drafter_are_refused(pair: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(pair / "drafter", tmp_path / "drafter")
    np.save(tmp_path / "drafter" / "optimizer.npy", 0)
    build(str(pair / "target"), str(tmp_path / "drafter"), tmp_path / "bundle")
    (tmp_path / "drafter" / name).write_bytes(b"")
    with pytest.raises(CheckpointError, match=rf"^{tmp_path / 'drafter'}: {name} changes"):
        build(str(pair / "target"), str(tmp_path / "drafter"), tmp_path / "other")
