"""Ministral 3 on ONNX Runtime, compared with Transformers' own classes in float32."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_trt import LLM, SamplingParams
from dflash_trt.building.build import build
from dflash_trt.formats.precision import Precision
from tests.doubles.checkpoints import VOCAB, make_drafter, write_json
from tests.doubles.reference import Drafter, decode
from tests.doubles.text_checkpoints import MINISTRAL, MINISTRAL_IMAGES, load_text, make_ministral
from tests.models.test_parity import (  # noqa: F401  # the tests among them run on this module's `case`
    Case,
    assert_close,
    ints,
    test_sequences_of_a_batch_do_not_meet,
    test_target,
    test_target_verifies_a_block_and_rolls_back,
)

# name: (architecture, settings of the target). Queries grow with every position, every 16th, or from 16,384 on.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "ministral3": (MINISTRAL, {"original": 16, "num_key_value_heads": 1}),
    "ministral3 with images": (MINISTRAL_IMAGES, {"original": 1}),
    "ministral3 with images, tied, windows": (
        MINISTRAL_IMAGES,
        {"tie_word_embeddings": True, "sliding_window": 7, "head_dim": 24, "num_attention_heads": 2},
    ),
}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    directory = tmp_path_factory.mktemp("ministral")
    architecture, settings = CASES[request.param]
    return make_case(directory, architecture, **settings)


def make_case(directory: Path, architecture: str, max_seq_len: int = 96, **settings: Any) -> Case:
    target = make_ministral(directory / "target", architecture, **settings)
    drafter = make_drafter(directory / "drafter", target)
    bundle = build(str(target), str(drafter), directory / "bundle", max_seq_len=max_seq_len)
    return Case(bundle, load_text(target), Drafter(drafter), VOCAB)


def test_beyond_16384_positions(tmp_path: Path) -> None:
    """As published: the scale of queries is 1 up to there. YaRN's frequencies differ from plain RoPE's throughout."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1}
    case = make_case(tmp_path, MINISTRAL, max_seq_len=16500, dtype="float32", **sizes)
    tokens, engine = case.tokens(16394), case.engine("target.onnx")
    case.target.set_attn_implementation("sdpa")  # eager attention would hold all scores
    with torch.no_grad():
        before = case.target(torch.tensor([tokens[:16374]]), logits_to_keep=1).past_key_values

    def logits(growth: float) -> torch.Tensor:
        case.target.config.rope_parameters["llama_4_scaling_beta"] = growth
        with torch.no_grad():
            block = torch.tensor([tokens[16374:]])
            return case.target(block, past_key_values=deepcopy(before)).logits[0]

    expected = logits(0.1)
    assert (logits(0.0) - expected)[10:].abs().max() > 0.05
    for start, end in ((0, 8192), (8192, 16374), (16374, 16394)):
        rows = list(range(end - start))[-20:]
        found = engine.run({"tokens": ints(tokens[start:end]), "start": ints(start), "rows": ints(rows)})
    assert_close(found["logits"][0], expected)


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
    bundle = build(str(target), str(case_drafter), tmp_path / "bundle", precision=Precision(target="fp32"))
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
