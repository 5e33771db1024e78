"""Checkpoints from NVIDIA's Model Optimizer are read as the numbers that it computes with."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from shutil import copytree
from typing import Any

import modelopt.torch.quantization as mtq
import numpy as np
import pytest
import torch
from modelopt.torch.export import export_hf_checkpoint
from modelopt.torch.quantization.qtensor import MXFP4QTensor, MXFP8QTensor, NVFP4QTensor
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from dflash_trt import LLM, SamplingParams
from dflash_trt.building.build import build
from dflash_trt.checkpoint.linears import stored_experts, stored_linear
from dflash_trt.checkpoint.tensors import Checkpoint
from dflash_trt.checkpoint.widening import widen
from dflash_trt.checkpoint.writer import copy_beside
from dflash_trt.engines.onnxruntime.engine import OnnxRuntimeEngine
from dflash_trt.errors import BuildError
from dflash_trt.quantization.convert import quantize
from dflash_trt.quantization.modelopt import calibration_set, quantize_with_modelopt
from tests.doubles.checkpoints import make_drafter, make_target
from tests.doubles.family_checkpoints import make_qwen3_moe

HIDDEN = 256
TOKENS = torch.arange(5, 45)[None]
EXPERTS, INNER = 8, 128
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
    """Export the model to `out`. Returns its rounded weights, and its logits if a CPU can round inputs."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    chosen: dict[str, Any] = deepcopy(getattr(mtq, config))
    if config == "INT4_AWQ_CFG":
        chosen["algorithm"] = {"method": "awq_lite", "alpha_step": 0.5}
    weights, logits = {}, None
    with torch.no_grad():
        mtq.quantize(model, chosen, lambda m: m(TOKENS))
        if "FP4" not in config:
            linear = {name: module for name, module in model.named_modules() if name in LAYERS}
            weights = {
                name: module.weight_quantizer(module.weight).numpy() for name, module in linear.items()
            }
            for name, experts in model.named_modules():
                for e in range(EXPERTS if name.endswith(".experts") else 0):
                    both = experts.gate_up_proj_weight_quantizers[e](experts.gate_up_proj[e]).chunk(2)
                    down = experts.down_proj_weight_quantizers[e](experts.down_proj[e])
                    for projection, w in zip(("gate", "up", "down"), (*both, down), strict=True):
                        weights[f"{name}.{e}.{projection}_proj"] = w.numpy()
            logits = model(TOKENS).logits[0].numpy()
        export_hf_checkpoint(model, export_dir=out)
    copy_beside(source, out)
    return weights, logits


def logits_of(target: Path, drafter: Path, out: Path) -> Floats:
    bundle = build(str(target), str(drafter), out)
    engine = OnnxRuntimeEngine(bundle.path / "target.onnx", slots=1, capacity=bundle.capacity)
    rows = np.arange(TOKENS.shape[1])[None]
    return np.array(engine.run({"tokens": TOKENS.numpy(), "start": np.array([0]), "rows": rows})["logits"][0])


def dequantized(tensors: dict[str, torch.Tensor], layer: str, shape: tuple[int, ...]) -> Floats:
    """A layer in E2M1 as Model Optimizer itself widens it."""
    packed, options = tensors[f"{layer}.weight"], {"scale": tensors[f"{layer}.weight_scale"]}
    if (second := tensors.get(f"{layer}.weight_scale_2")) is None:
        made = MXFP4QTensor(shape, torch.float32, packed)
        return made.dequantize(torch.float32, **options, block_sizes={-1: 32}).numpy()
    made = NVFP4QTensor(shape, torch.float32, packed)
    return made.dequantize(torch.float32, **options, double_scale=second, block_sizes={-1: 16}).numpy()


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
    # The rest is rounding to the other side in some places, and scales that the export makes fused layers share.
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
        # The export makes these layers share scales, and moves AWQ's factors into the preceding norm.
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
        theirs = dequantized(tensors, layer, (rows, HIDDEN))
        np.testing.assert_array_equal(widen(checkpoint, stored), theirs)
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


@pytest.mark.parametrize(("scheme", "algorithm"), [("fp8", "FP8"), ("int4", "W4A16_AWQ")])
def test_calibrating_with_model_optimizer(
    pair: tuple[Path, Path], tmp_path: Path, scheme: str, algorithm: str
) -> None:
    prompts = [ids[:32] for ids in calibration_set(pair[0], None)[:2]]
    out = quantize_with_modelopt(pair[0], tmp_path / "out", scheme, prompts, exclude=["model.layers.0.*"])
    checkpoint = Checkpoint(out)
    assert checkpoint.quantization.name == algorithm
    stored = [stored_linear(checkpoint, layer, HIDDEN, outputs(layer)) for layer in LAYERS]
    assert [s is not None for s in stored] == [".1." in layer for layer in LAYERS]
    down = stored[-1]
    assert down is not None
    w, found = Checkpoint(pair[0]).array(down.weight.name).astype(np.float32), widen(checkpoint, down)
    if scheme == "int4":
        assert down.pre_quant_scale is not None
        found = found * checkpoint.array(down.pre_quant_scale.name).astype(np.float32)
    else:
        assert down.input_scale is not None
    assert np.linalg.norm(found - w) < {"fp8": 0.03, "int4": 0.15}[scheme] * np.linalg.norm(w)


@pytest.mark.parametrize("name", ["weight_scale", "weight_scale_inv"])
def test_fp8_in_blocks_is_read_to_the_same_numbers(
    pair: tuple[Path, Path], tmp_path: Path, name: str
) -> None:
    """Weights only. Published files of NVIDIA have weight_scale_inv with two axes where the exporter writes four."""
    weights, expected = exported(pair[0], tmp_path / "exported", "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG")
    if name == "weight_scale_inv":
        file = tmp_path / "exported" / "model.safetensors"
        tensors = {
            key.replace("weight_scale", name): value.squeeze(3).squeeze(1) if value.ndim == 4 else value
            for key, value in load_file(file).items()
        }
        save_file(tensors, file, metadata={"format": "pt"})
    checkpoint = Checkpoint(tmp_path / "exported")
    assert checkpoint.quantization.name == "FP8_PB_WO"
    for layer in LAYERS:
        stored = stored_linear(checkpoint, layer, HIDDEN, outputs(layer))
        assert stored is not None
        if layer.endswith(("o_proj", "down_proj")):  # the export makes the others share their largest numbers
            np.testing.assert_allclose(widen(checkpoint, stored), weights[layer], rtol=1e-6, atol=1e-9)
    ours = logits_of(tmp_path / "exported", pair[1], tmp_path / "bundle")
    assert expected is not None
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-2 * np.abs(expected).max())


def test_mxfp8_is_read_to_the_same_numbers(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Its simulation runs on CUDA only, so the file is made of its tensor class and the fields that it exports."""
    copytree(pair[0], tmp_path / "exported")
    said = {"quant_algo": "MXFP8", "group_size": 32, "exclude_modules": ["lm_head", "model.embed_tokens"]}
    (tmp_path / "exported" / "hf_quant_config.json").write_text(json.dumps({"quantization": said}))
    tensors, expected = load_file(pair[0] / "model.safetensors"), {}
    for layer in LAYERS:
        w = tensors[f"{layer}.weight"]
        scale = MXFP8QTensor.get_weights_scaling_factor(w)
        codes = MXFP8QTensor.quantize_with_scale(w, scale)
        tensors |= {f"{layer}.weight": codes, f"{layer}.weight_scale": scale}
        theirs = MXFP8QTensor(w.shape, torch.float32, codes).dequantize(torch.float32, scale=scale)
        expected[layer] = theirs.numpy()
    save_file(tensors, tmp_path / "exported" / "model.safetensors", metadata={"format": "pt"})
    checkpoint = Checkpoint(tmp_path / "exported")
    for layer in LAYERS:
        stored = stored_linear(checkpoint, layer, HIDDEN, outputs(layer))
        assert stored is not None
        np.testing.assert_array_equal(widen(checkpoint, stored), expected[layer])
    assert np.isfinite(logits_of(tmp_path / "exported", pair[1], tmp_path / "bundle")).all()


def test_mxfp4_is_read_to_the_same_numbers(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Model Optimizer's configuration for weights only, which leaves attention unchanged."""
    exported(pair[0], tmp_path / "exported", "MXFP4_MLP_WEIGHT_ONLY_CFG")
    checkpoint = Checkpoint(tmp_path / "exported")
    assert checkpoint.quantization.name == "MXFP4"
    tensors = load_file(tmp_path / "exported" / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(pair[0], dtype=torch.float32).eval()
    for layer in LAYERS:
        stored = stored_linear(checkpoint, layer, HIDDEN, outputs(layer))
        assert (stored is None) == ("self_attn" in layer)
        if stored is None:
            continue
        theirs = dequantized(tensors, layer, (HIDDEN, HIDDEN))
        np.testing.assert_array_equal(widen(checkpoint, stored), theirs)
        model.get_submodule(layer).weight.data.copy_(torch.from_numpy(theirs))
    with torch.no_grad():
        expected = model(TOKENS).logits[0].numpy()
    ours = logits_of(tmp_path / "exported", pair[1], tmp_path / "bundle")
    # The CPU's products of integers round their inputs to eight bits.
    np.testing.assert_allclose(ours, expected, rtol=0, atol=3e-2 * np.abs(expected).max())


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A Qwen3-MoE pair."""
    folder = tmp_path_factory.mktemp("moe")
    target = make_qwen3_moe(
        folder / "target",
        favourites=6,
        hidden_size=HIDDEN,
        moe_intermediate_size=INNER,
        num_hidden_layers=2,
        torch_dtype="float32",
    )
    return target, make_drafter(folder / "drafter", target, taps=(0, 1))


def experts_of(checkpoint: Checkpoint) -> dict[str, Floats]:
    """The widened weights of all experts."""
    found = {}
    for i in range(2):
        for name, rows, columns in (("gate", INNER, HIDDEN), ("up", INNER, HIDDEN), ("down", HIDDEN, INNER)):
            layers = [f"model.layers.{i}.mlp.experts.{e}.{name}_proj" for e in range(EXPERTS)]
            stored = stored_experts(checkpoint, layers, columns, rows)
            assert stored is not None
            found |= {layer: widen(checkpoint, each) for layer, each in zip(layers, stored, strict=True)}
    return found


@pytest.mark.parametrize("config", ["FP8_DEFAULT_CFG", "FP8_PER_CHANNEL_PER_TOKEN_CFG"])
def test_logits_of_experts_are_those_of_model_optimizer(
    moe: tuple[Path, Path], tmp_path: Path, config: str
) -> None:
    weights, expected = exported(moe[0], tmp_path / "exported", config)
    assert expected is not None
    for layer, w in experts_of(Checkpoint(tmp_path / "exported")).items():
        # Model Optimizer's export divides where its simulation multiplies, so a tie may fall to the other side.
        assert (~np.isclose(w, weights[layer], rtol=1e-6, atol=1e-9)).mean() < 1e-3
    ours = logits_of(tmp_path / "exported", moe[1], tmp_path / "bundle")
    plain = logits_of(moe[0], moe[1], tmp_path / "plain")
    assert np.linalg.norm(ours - expected) < 0.03 * np.linalg.norm(expected)
    assert np.linalg.norm(ours - expected) < np.linalg.norm(plain - expected) / 2


@pytest.mark.parametrize("config", ["NVFP4_DEFAULT_CFG", "W4A16_NVFP4_CFG", "MXFP4_MLP_WEIGHT_ONLY_CFG"])
def test_four_bit_experts_are_read_to_the_same_numbers(
    moe: tuple[Path, Path], tmp_path: Path, config: str
) -> None:
    exported(moe[0], tmp_path / "exported", config)
    tensors = load_file(tmp_path / "exported" / "model.safetensors")
    for layer, w in experts_of(Checkpoint(tmp_path / "exported")).items():
        np.testing.assert_array_equal(w, dequantized(tensors, layer, w.shape))
    bundle = build(str(tmp_path / "exported"), str(moe[1]), tmp_path / "bundle")
    with LLM(bundle.path) as llm:
        params = SamplingParams(max_tokens=24, ignore_eos=True)
        drafted, plain = (llm.generate([5, 6, 7, 8], params, speculate=s) for s in (True, False))
    assert drafted.token_ids == plain.token_ids


def test_calibrating_experts_with_model_optimizer(moe: tuple[Path, Path], tmp_path: Path) -> None:
    """One token reaches two of the experts, but all get its scale. Down projections can stay unquantized."""
    prompts = [[5]]
    theirs = Checkpoint(quantize_with_modelopt(moe[0], tmp_path / "theirs", "fp8", prompts))
    assert len(experts_of(theirs)) == 2 * 3 * EXPERTS
    for name in ("gate", "up", "down"):
        scales = [f"model.layers.0.mlp.experts.{e}.{name}_proj.input_scale" for e in range(EXPERTS)]
        assert len({theirs.array(scale).item() for scale in scales}) == 1
    kept = quantize_with_modelopt(
        moe[0], tmp_path / "kept", "fp8", prompts, exclude=["*.experts.*.down_proj"]
    )
    layer, found = "model.layers.1.mlp.experts.0", Checkpoint(kept)
    assert stored_linear(found, f"{layer}.up_proj", HIDDEN, INNER) is not None
    assert stored_linear(found, f"{layer}.down_proj", INNER, HIDDEN) is None
    bundle = build(str(kept), str(moe[1]), tmp_path / "bundle")
    assert bundle.manifest["quantization"]["target"] == "FP8"
    for scheme, exclude, message in (
        ("int4", [], "cannot export experts from AWQ"),
        ("fp8", ["*.experts.*.up_proj"], "quantizes gate and up as one"),
    ):
        with pytest.raises(BuildError, match=message):
            quantize_with_modelopt(moe[0], tmp_path / "out", scheme, prompts, exclude=exclude)
    assert not (tmp_path / "out").exists()
