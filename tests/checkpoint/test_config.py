"""Published configurations are read correctly. Malformed ones are refused by file, field and value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3Config

from dflash_trt.checkpoint.rope import RopeConfig
from dflash_trt.checkpoint.schema import LayerAttention
from dflash_trt.errors import CheckpointError
from dflash_trt.models.configs import read_drafter_config, read_target_config

MISSING = object()
TARGET: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu", "hidden_size": 2560,
    "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "vocab_size": 151936, "rms_norm_eps": 1e-06, "max_position_embeddings": 40960,
    "attention_bias": False, "rope_theta": 1000000, "rope_scaling": None, "tie_word_embeddings": True,
    "use_sliding_window": False, "sliding_window": None, "max_window_layers": 36, "bos_token_id": 151643,
    "eos_token_id": 151645,
}  # fmt: skip
DRAFTER: dict[str, Any] = TARGET | {
    "architectures": ["DFlashDraftModel"], "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "num_hidden_layers": 5, "layer_types": ["full_attention"] * 5, "max_window_layers": 5, "num_target_layers": 36,
    "block_size": 16, "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
}  # fmt: skip
SLIDING = {
    "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
    "use_sliding_window": True,
    "sliding_window": 2048,
}
YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}


def changed(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Apply changes. A dotted key reaches into a section, MISSING removes a field."""
    config = json.loads(json.dumps(config))
    for key, value in changes.items():
        section, name = config, key
        while "." in name:
            head, name = name.split(".", 1)
            section = section[head]
        if value is MISSING:
            del section[name]
        else:
            section[name] = value
    return config


def write(directory: Path, config: dict[str, Any], name: str = "config.json") -> Path:
    directory.mkdir(exist_ok=True)
    (directory / name).write_text(json.dumps(config))
    return directory


def test_reads_what_transformers_writes(tmp_path: Path) -> None:
    written = Qwen3Config(
        num_hidden_layers=6,
        num_key_value_heads=4,
        use_sliding_window=True,
        sliding_window=64,
        max_window_layers=4,
        eos_token_id=[7, 9],
        architectures=["Qwen3ForCausalLM"],
        rope_parameters={"rope_theta": 5e5, **YARN},
    )
    written.save_pretrained(tmp_path)
    config = read_target_config(tmp_path)
    types = [("full_attention", None), ("sliding_attention", 64)]
    assert [(kind, layer.window) for kind, layer in zip(written.layer_types, config.layers, strict=True)] == (
        [types[0]] * 4 + [types[1]] * 2
    )
    assert config.rope == RopeConfig("yarn", 5e5, {k: v for k, v in YARN.items() if k != "rope_type"})
    assert config.head_dim == written.head_dim
    assert config.eos_token_ids == (7, 9)


def test_head_dim_defaults_as_in_transformers(tmp_path: Path) -> None:
    assert read_target_config(write(tmp_path, changed(TARGET, {"head_dim": MISSING}))).head_dim == (
        Qwen3Config().head_dim
    )


def test_generation_config_decides_the_stop_ids(tmp_path: Path) -> None:
    write(tmp_path, TARGET)
    write(tmp_path, {"eos_token_id": [151645, 151643]}, "generation_config.json")
    assert read_target_config(tmp_path).eos_token_ids == (151645, 151643)
    write(tmp_path, {"temperature": 0.6}, "generation_config.json")
    assert read_target_config(tmp_path).eos_token_ids == (151645,)


@pytest.mark.parametrize(
    "changes",
    [
        {"block_size": MISSING, "dflash_config.block_size": 10},
        {"block_size": 10, "dflash_config.block_size": 10},
        {"block_size": 10},
    ],
)
def test_block_size_in_both_places(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert read_drafter_config(write(tmp_path, changed(DRAFTER, changes))).block_size == 10


@pytest.mark.parametrize(
    ("changes", "sliding", "full"),
    [
        ({}, True, False), ({"is_causal": False}, False, False), ({"is_causal": True}, True, True),
        ({"dflash_config.causal": False}, False, False), ({"dflash_config.causal": True}, True, True),
        ({"is_causal": False, "dflash_config.causal": True}, False, False),
    ],
)  # fmt: skip
def test_causality_per_layer(tmp_path: Path, changes: dict[str, Any], sliding: bool, full: bool) -> None:
    config = read_drafter_config(write(tmp_path, changed(DRAFTER, SLIDING | changes)))
    assert config.layers == (LayerAttention(sliding, 2048),) * 4 + (LayerAttention(full, None),)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 5e5, "rope_scaling": YARN},
        {"rope_theta": 5e5, "rope_scaling": {("type" if k == "rope_type" else k): v for k, v in YARN.items()}},
        {"rope_theta": MISSING, "rope_parameters": YARN | {"rope_theta": 5e5}},
        {"rope_theta": 5e5, "rope_parameters": YARN},
        {"rope_theta": 5e5, "rope_parameters": YARN, "rope_scaling": YARN},
        {
            "rope_theta": 5e5,
            "original_max_position_embeddings": 4096,
            "rope_scaling": {"rope_type": "yarn", "factor": 32},
        },
    ],
)  # fmt: skip
def test_rope_in_all_places(tmp_path: Path, changes: dict[str, Any]) -> None:
    rope = read_drafter_config(write(tmp_path, changed(DRAFTER, changes))).rope
    assert rope == RopeConfig("yarn", 5e5, {"factor": 32.0, "original_max_position_embeddings": 4096})


COMMON_REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["MistralForCausalLM"]}, "architectures is ['MistralForCausalLM'], supported"),
    ({"architectures": []}, "architectures is [], expected one name"),
    ({"architectures": [3]}, "architectures[0] is 3, expected a string"),
    ({"model_type": "gpt_oss"}, "model_type is 'gpt_oss', supported are: qwen3"),
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ({"hidden_size": MISSING}, "hidden_size is missing, expected an integer"),
    ({"hidden_size": 0}, "hidden_size is 0, expected an integer from 1 to"),
    ({"hidden_size": "2560"}, 'hidden_size is "2560", expected an integer'),
    ({"hidden_size": True}, "hidden_size is true, expected an integer"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, expected an integer from 1 to 10000"),
    ({"num_key_value_heads": 5}, "num_attention_heads is 32, not a multiple of num_key_value_heads, 5"),
    ({"head_dim": 127}, "head_dim is 127, but RoPE needs an even one"),
    ({"rms_norm_eps": "1e-6"}, 'rms_norm_eps is "1e-6", expected a number'),
    ({"rms_norm_eps": 10**400}, "rms_norm_eps is 1000"),
    ({"attention_bias": 1}, "attention_bias is 1, expected true or false"),
    ({"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config.quant_method is 'mxfp4'"),
    ({"layer_types": ["full_attention"]}, "layer_types has 1 entries, but num_hidden_layers is"),
    ({"use_sliding_window": True, "sliding_window": -1}, "sliding_window is -1, expected an integer"),
    ({"rope_parameters": {"rope_theta": 1e4}}, "rope_theta is 1000000, but rope_parameters.rope_theta is"),
    ({"rope_parameters": YARN, "rope_scaling": YARN | {"factor": 4}}, "but rope_scaling is"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "expected one RoPE for all layers"),
    ({"rope_scaling": {"rope_type": "longrope"}}, "rope_scaling.rope_type is 'longrope'"),
    ({"rope_scaling": {"rope_type": "yarn", "type": "linear"}}, 'rope_type is "yarn", but'),
    ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor is missing"),
    ({"rope_scaling": {"mrope_section": [16, 24, 24]}}, "rope_scaling.mrope_section is [16, 24, 24]"),
    ({"rope_scaling": YARN | {"beta_fast": 1, "beta_slow": 2}}, "beta_fast is 1, but beta_slow is 2"),
    ({"rope_scaling": YARN, "original_max_position_embeddings": 8192}, "max_position_embeddings is 4096, but"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    ({"rope_scaling": YARN | {"partial_rotary_factor": 0.5}}, "rope_scaling.partial_rotary_factor is 0.5"),
]  # fmt: skip
DRAFTER_REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["DFlash9DraftModel"]}, "is ['DFlash9DraftModel'], supported as a drafter: "),
    ({"dflash_config": MISSING}, "dflash_config is missing"),
    ({"dflash_config": [1]}, "dflash_config is [1], expected an object"),
    ({"dflash_config.mask_token_id": MISSING, "mask_token_id": 5}, "dflash_config.mask_token_id is missing"),
    ({"dflash_config.target_layer_ids": []}, "dflash_config.target_layer_ids is [], expected at least one"),
    ({"dflash_config.target_layer_ids": [1, 1]}, "dflash_config.target_layer_ids is [1, 1], expected"),
    ({"dflash_config.target_layer_ids": [1, -1]}, "dflash_config.target_layer_ids[1] is -1"),
    ({"block_size": MISSING}, "block_size is missing, here and in dflash_config"),
    ({"block_size": 1}, "block_size is 1, expected an integer from 2"),
    ({"dflash_config.block_size": 8}, "dflash_config.block_size is 8, but block_size is 16"),
    ({"layer_types": ["sliding_attention"] * 5}, "layer_types[0] is 'sliding_attention'"),
    (SLIDING | {"sliding_window": None}, "and sliding_window is null: such a layer needs a window"),
    (SLIDING | {"layer_types": ["chunked_attention"] * 5}, "layer_types[0] is 'chunked_attention'"),
    ({"draft_vocab_size": 32000}, "draft_vocab_size is 32000, but vocab_size is 151936"),
    ({"target_hidden_size": 4096}, "target_hidden_size is 4096, but hidden_size is 2560"),
    ({"sample_from_anchor": True}, "sample_from_anchor is true, which this version does not support"),
    ({"is_neox_style": False}, "is_neox_style is false, which this version does not support"),
    ({"final_logit_softcapping": 0}, "final_logit_softcapping is 0, expected a number greater than 0"),
    ({"final_logit_softcapping": 20.0, "dflash_config.final_logit_softcapping": 30.0}, "softcapping is 20.0, but"),
    ({"dflash_config.output_multiplier": 0.2}, "dflash_config.output_multiplier is 0.2, which"),
    ({"dflash_config.conv_kernel_size": 2}, "dflash_config.conv_kernel_size is 2, which"),
    ({"dflash_config.selector_rank": 256}, "dflash_config.selector_rank is 256, which"),
    ({"dflash_config.projector_type": "domino"}, 'dflash_config.projector_type is "domino", which'),
    ({"dflash_config.attention_sink_bias": True}, "dflash_config.attention_sink_bias is true, which"),
    ({"dflash_config.never_heard_of": 3}, "dflash_config.never_heard_of is 3, which"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), COMMON_REFUSALS)
@pytest.mark.parametrize("role", ["target", "drafter"])
def test_refuses(tmp_path: Path, role: str, changes: dict[str, Any], message: str) -> None:
    directory = write(tmp_path / role, changed(TARGET if role == "target" else DRAFTER, changes))
    with pytest.raises(CheckpointError) as error:
        (read_target_config if role == "target" else read_drafter_config)(directory)
    assert str(error.value).startswith(str(directory / "config.json"))
    assert message in str(error.value)


@pytest.mark.parametrize(("changes", "message"), DRAFTER_REFUSALS)
def test_refuses_a_drafter(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError) as error:
        read_drafter_config(write(tmp_path, changed(DRAFTER, changes)))
    assert message in str(error.value)


def test_neutral_values_of_other_kinds_are_accepted(tmp_path: Path) -> None:
    neutral = {
        "sample_from_anchor": False, "draft_vocab_size": 151936, "dflash_config.output_multiplier": 1.0,
        "dflash_config.projector_type": "dflash", "dflash_config.causal": None, "quantization_config": None,
    }  # fmt: skip
    read_drafter_config(write(tmp_path, changed(DRAFTER, neutral)))


@pytest.mark.parametrize(
    ("generation", "message"),
    [
        ({"eos_token_id": "151645"}, 'eos_token_id is "151645", expected an integer'),
        ({"eos_token_id": [151645, 151936]}, "eos_token_id[1] is 151936, expected an integer"),
    ],
)
def test_refuses_stop_ids(tmp_path: Path, generation: dict[str, Any], message: str) -> None:
    write(write(tmp_path, TARGET), generation, "generation_config.json")
    with pytest.raises(CheckpointError) as error:
        read_target_config(tmp_path)
    assert message in str(error.value)
    assert "generation_config.json" in str(error.value)
