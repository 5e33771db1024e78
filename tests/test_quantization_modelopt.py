"""Checkpoints that NVIDIA's Model Optimizer writes are read to the numbers that it computes with."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import modelopt.torch.quantization as mtq
import numpy as np
import pytest
import torch
from modelopt.torch.export import export_hf_checkpoint
from modelopt.torch.quantization.qtensor import NVFP4QTensor
from safetensors.torch import load_file
from transformers import Qwen3ForCausalLM

from dflash_trt.build import build
from dflash_trt.checkpoint.linears import stored_linear, widen
from dflash_trt.checkpoint.tensors import Checkpoint
from dflash_trt.engines.onnxruntime import OnnxRuntimeEngine
from dflash_trt.errors import CheckpointError
from dflash_trt.quantization.calibrate import calibration_set
from dflash_trt.quantization.convert import copy_files, quantize
from dflash_trt.quantization.modelopt import quantize_with_modelopt
from tests.checkpoints import make_drafter, make_target

HIDDEN = 256
TOKENS = torch.arange(5, 45)[None]
Floats = np.ndarray[Any, Any]
LAYERS = [
    f"model.layers.{i}.{name}"
    for i in range(2)
    for name in (*(f"self_attn.{n}_proj" for n in "qkvo"), *(f"mlp.{n}_proj" for n in ("gate", "up", "down")))
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    target = make_target(
        folder / "target", hidden=HIDDEN, layers=2, heads=4, head_dim=64, intermediate=HIDDEN, dtype="float32"
    )
    return target, make_drafter(folder / "drafter", target, taps=(0, 1))


def outputs(layer: str) -> int:
    return HIDDEN // 2 if layer.endswith(("k_proj", "v_proj")) else HIDDEN


def exported(source: Path, out: Path, config: str) -> tuple[dict[str, Floats], Floats | None]:
    """Export the model to `out`; returns its rounded weights, and its logits where a CPU can round inputs."""
    model = Qwen3ForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    chosen: dict[str, Any] = deepcopy(getattr(mtq, config))
    if config == "INT4_AWQ_CFG":
        chosen["algorithm"] = {"method": "awq_lite", "alpha_step": 0.5}
    weights, logits = {}, None
    with torch.no_grad():
        mtq.quantize(model, chosen, lambda m: m(TOKENS))
        if "NVFP4" not in config:
            linear = {name: module for name, module in model.named_modules() if name in LAYERS}
            weights = {
                name: module.weight_quantizer(module.weight).numpy() for name, module in linear.items()
            }
            logits = model(TOKENS).logits[0].numpy()
        export_hf_checkpoint(model, export_dir=out)
    copy_files(source, out)
    return weights, logits


def logits_of(target: Path, drafter: Path, out: Path) -> Floats:
    bundle = build(str(target), str(drafter), out)
    engine = OnnxRuntimeEngine(bundle.path / "target.onnx", slots=1, capacity=bundle.capacity)
    rows = np.arange(TOKENS.shape[1])[None]
    return np.array(engine.run({"tokens": TOKENS.numpy(), "start": np.array([0]), "rows": rows})["logits"][0])


@pytest.mark.parametrize(
    ("config", "algorithm"),
    [
        ("FP8_DEFAULT_CFG", "FP8"),
        ("FP8_PER_CHANNEL_PER_TOKEN_CFG", "FP8_PER_CHANNEL_PER_TOKEN"),
    ],
)
def test_logits_are_those_of_model_optimizer(
    pair: tuple[Path, Path], tmp_path: Path, config: str, algorithm: str
) -> None:
    target, drafter = pair
    _, expected = exported(target, tmp_path / "exported", config)
    assert expected is not None
    checkpoint = Checkpoint(tmp_path / "exported")
    assert checkpoint.quantization.name == algorithm
    assert all(checkpoint.quantization.algorithm(layer) is not None for layer in LAYERS)
    ours = logits_of(tmp_path / "exported", drafter, tmp_path / "bundle")
    plain = logits_of(target, drafter, tmp_path / "plain")
    # What is left is rounding that falls the other way somewhere, and scales that the export makes fused layers share.
    assert np.linalg.norm(ours - expected) < 0.02 * np.linalg.norm(expected)
    assert np.linalg.norm(ours - expected) < np.linalg.norm(plain - expected) / 2


@pytest.mark.parametrize("config", ["FP8_DEFAULT_CFG", "FP8_PER_CHANNEL_PER_TOKEN_CFG", "INT4_AWQ_CFG"])
def test_weights_are_read_to_the_same_numbers(pair: tuple[Path, Path], tmp_path: Path, config: str) -> None:
    weights, _ = exported(pair[0], tmp_path / "exported", config)
    original, checkpoint = Checkpoint(pair[0]), Checkpoint(tmp_path / "exported")
    for layer in LAYERS:
        stored = stored_linear(checkpoint, layer, HIDDEN, outputs(layer))
        assert stored is not None
        found = widen(checkpoint, stored)
        if layer.endswith(("o_proj", "down_proj")):
            assert (stored.pre_quant_scale is not None) == (config == "INT4_AWQ_CFG")
            np.testing.assert_allclose(found, weights[layer], rtol=1e-6, atol=1e-9)
            continue
        # The export makes these share scales, and moves AWQ's factors into the norm before them.
        norm = "input_layernorm" if "self_attn" in layer else "post_attention_layernorm"
        norm = f"{layer.rpartition('.')[0].rpartition('.')[0]}.{norm}.weight"
        whole = found * (checkpoint.array(norm) / original.array(norm))
        w = original.array(f"{layer}.weight")
        assert np.linalg.norm(whole - w) < (0.15 if "INT4" in config else 0.03) * np.linalg.norm(w)


@pytest.mark.parametrize(
    ("config", "algorithm"), [("NVFP4_DEFAULT_CFG", "NVFP4"), ("W4A16_NVFP4_CFG", "W4A16_NVFP4")]
)
def test_nvfp4_is_read_to_the_same_numbers(
    pair: tuple[Path, Path], tmp_path: Path, config: str, algorithm: str
) -> None:
    exported(pair[0], tmp_path / "exported", config)
    checkpoint = Checkpoint(tmp_path / "exported")
    assert checkpoint.quantization.name == algorithm
    tensors = load_file(tmp_path / "exported" / "model.safetensors")
    for layer in LAYERS:
        rows = outputs(layer)
        stored = stored_linear(checkpoint, layer, HIDDEN, rows)
        assert stored is not None
        assert (stored.input_scale is not None) == (algorithm == "NVFP4")
        theirs = NVFP4QTensor((rows, HIDDEN), torch.float32, tensors[f"{layer}.weight"]).dequantize(
            torch.float32,
            scale=tensors[f"{layer}.weight_scale"],
            double_scale=tensors[f"{layer}.weight_scale_2"],
            block_sizes={-1: 16},
        )
        np.testing.assert_array_equal(widen(checkpoint, stored), theirs.numpy())
    assert np.isfinite(logits_of(tmp_path / "exported", pair[1], tmp_path / "bundle")).all()


@pytest.mark.parametrize(
    ("config", "scheme"), [("FP8_PER_CHANNEL_PER_TOKEN_CFG", "fp8"), ("W4A16_NVFP4_CFG", "nvfp4")]
)
def test_quantizing_without_data_gives_the_same_bytes(
    pair: tuple[Path, Path], tmp_path: Path, config: str, scheme: str
) -> None:
    exported(pair[0], tmp_path / "exported", config)
    theirs, ours = Checkpoint(tmp_path / "exported"), Checkpoint(quantize(pair[0], tmp_path / "ours", scheme))
    for layer in LAYERS:
        for name in (n for n in theirs.tensors if n.startswith(f"{layer}.")):
            assert ours.array(name).tobytes() == theirs.array(name).tobytes()


def test_calibrating_with_model_optimizer(pair: tuple[Path, Path], tmp_path: Path) -> None:
    prompts = [ids[:32] for ids in calibration_set(pair[0], None)[:2]]
    out = quantize_with_modelopt(pair[0], tmp_path / "out", "fp8", prompts, exclude=["model.layers.0.*"])
    checkpoint = Checkpoint(out)
    assert checkpoint.quantization.name == "FP8"
    stored = [stored_linear(checkpoint, layer, HIDDEN, outputs(layer)) for layer in LAYERS]
    assert [s is not None for s in stored] == [".1." in layer for layer in LAYERS]
    down = stored[-1]
    assert down is not None
    assert down.input_scale is not None
    w = Checkpoint(pair[0]).array(down.weight.name).astype(np.float32)
    assert np.linalg.norm(widen(checkpoint, down) - w) < 0.03 * np.linalg.norm(w)


def test_a_scale_that_is_missing_is_named(pair: tuple[Path, Path], tmp_path: Path) -> None:
    quantize(pair[0], tmp_path / "out", "nvfp4")
    said = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())
    said["quantization"]["quant_algo"] = "FP8"
    del said["quantization"]["group_size"]
    (tmp_path / "out" / "hf_quant_config.json").write_text(json.dumps(said))
    with pytest.raises(CheckpointError, match=r"q_proj\.weight' is U8 .* but in FP8 it is F8_E4M3"):
        build(str(tmp_path / "out"), str(pair[1]), tmp_path / "bundle")
