"""What the parity of test_families.py leaves open: FP8 as Mistral stores it, and fields."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_trt import LLM, SamplingParams
from dflash_trt.building.build import build
from dflash_trt.errors import CheckpointError
from dflash_trt.formats.precision import Precision
from dflash_trt.models.configs import read_drafter_config, read_target_config
from tests.doubles.checkpoints import VOCAB, make_drafter, write_json
from tests.doubles.reference import decode
from tests.doubles.text_checkpoints import (
    MINISTRAL_IMAGES,
    edit_config,
    load_text,
    make_assistant,
    make_ministral,
    make_muse,
)

SLIDING, FULL = "sliding_attention", "full_attention"
TOKENS = list(range(40))


def test_fp8_with_one_scale_per_tensor(tmp_path: Path) -> None:
    """As Mistral publishes it: scales of weights and inputs. Tokens are those of the same numbers in Transformers."""
    target = make_ministral(tmp_path / "target", MINISTRAL_IMAGES, favourites=6)
    case_drafter = make_drafter(tmp_path / "drafter", target)
    model = load_text(target)
    layers = as_fp8(target)
    for name, layer in model.model.language_model.named_modules():
        if name in layers:
            layer.weight.data, scale = layers[name]
            layer.register_forward_pre_hook(lambda _, x, s=scale: (rounded(x[0], s),))
    prompt = [3, 5, 7, 11, 13]
    expected = decode(model, prompt, 24).tokens
    sources = str(target), str(case_drafter)
    bundle = build(*sources, tmp_path / "bundle", engine="torch", precision=Precision(target="fp32"))
    with LLM(bundle.path) as llm:
        params = SamplingParams(max_tokens=24, ignore_eos=True)
        for speculate in (True, False):
            assert list(llm.generate(prompt, params, speculate=speculate).token_ids) == expected


def as_fp8(directory: Path) -> dict[str, tuple[torch.Tensor, float]]:
    """Store the text model's linear layers in FP8. Returns their weights in float32 and the scales of their inputs."""
    file, config = directory / "model.safetensors", json.loads((directory / "config.json").read_text())
    tensors, layers = load_file(file), {}
    for name in [n for n in tensors if n.startswith("language_model.model.layers") and "norm" not in n]:
        layer = name.removesuffix(".weight")
        weight = tensors[name].float()
        scale = (weight.abs().max() / 448).bfloat16()
        tensors[name] = (weight / scale.float()).to(torch.float8_e4m3fn)
        tensors |= {f"{layer}.weight_scale_inv": scale, f"{layer}.activation_scale": torch.tensor(0.0625)}
        short = layer.removeprefix("language_model.model.")
        layers[short] = tensors[name].float() * scale.float(), 0.0625
    save_file(tensors, file, metadata={"format": "pt"})
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "static",
        "weight_block_size": None,
        "modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head"],
    }
    write_json(directory / "config.json", config)
    return layers


def rounded(x: torch.Tensor, scale: float) -> torch.Tensor:
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


def test_defaults_are_those_of_transformers(tmp_path: Path) -> None:
    """A field that the file leaves out has the value of Transformers' configuration."""
    target = make_muse(tmp_path / "target", sliding_window=2048, output_multiplier=0.19611613513818404)
    expected = read_target_config(target)
    edit_config(
        target,
        dict.fromkeys(
            ("layer_types", "layer_rope_theta", "qk_scale_factor", "output_multiplier", "post_norm_eps")
        ),
    )
    edit_config(target, {"sliding_window": None, "rope_parameters": None})
    assert read_target_config(target) == expected
    drafter = make_assistant(tmp_path / "drafter", sliding_window=2048)
    whole = read_drafter_config(drafter, expected)
    assert (whole.vocab_size, whole.target_layer_ids) == (VOCAB, (0, 2, 3))
    fields = json.loads((drafter / "config.json").read_text())
    for name in ("layer_types", "sliding_window", "rope_parameters"):
        del fields[name]
    write_json(drafter / "config.json", fields)
    assert read_drafter_config(drafter, expected) == whole


@pytest.mark.parametrize(
    ("role", "field", "value"),
    [
        *(("target", *each) for each in (
            ("layer_rope_theta", [10000.0] * 6), ("layer_rope_theta", [5000.0] * 5), ("layer_rope_theta", "no"),
            ("hidden_activation", "gelu"), ("qk_scale_factor", 0), ("output_multiplier", "1"),
            ("final_logit_softcapping", -20), ("post_norm_eps", 0), ("sliding_window", 0),
            ("layer_types", [SLIDING] * 6), ("layer_types", [SLIDING] * 4 + ["chunked_attention"]),
            ("num_key_value_heads", 3), ("head_dim", 15), ("model_type", "muse_spark_text"),
        )),
        *(("drafter", *each) for each in (
            ("block_size", 1), ("mask_token_id", -1), ("target_layer_ids", []), ("target_layer_ids", [1, 1]),
            ("layer_types", [SLIDING] * 2), ("hidden_act", "gelu"),
        )),
    ],
)  # fmt: skip
def test_a_field_of_muse_glimmer_that_cannot_be_honoured_is_named(
    tmp_path: Path, role: str, field: str, value: Any
) -> None:
    directory = (make_muse if role == "target" else make_assistant)(tmp_path / role)
    edit_config(directory, {field: value})
    with pytest.raises(CheckpointError, match=field):
        (read_target_config if role == "target" else read_drafter_config)(directory)
