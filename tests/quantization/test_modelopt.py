"""Checkpoints from NVIDIA's Model Optimizer are read as the numbers that it computes with."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from shutil import copytree
from typing import Any, NamedTuple

import modelopt.torch.quantization as mtq
import numpy as np
import pytest
import torch
from modelopt.torch.export import export_hf_checkpoint
from modelopt.torch.quantization.qtensor import MXFP4QTensor, NVFP4QTensor
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from dflash_trt.building.build import build
from dflash_trt.checkpoint.linears import stored_experts, stored_linear
from dflash_trt.checkpoint.tensors import Checkpoint
from dflash_trt.checkpoint.writer import copy_beside
from dflash_trt.engines.device.sizes import DECODE
from dflash_trt.engines.device.stream import HostStream
from dflash_trt.engines.torch.program import Graph
from dflash_trt.engines.torch.runner import TorchRunner
from dflash_trt.errors import BuildError
from dflash_trt.formats.precision import Precision
from dflash_trt.quantization.convert import quantize
from dflash_trt.quantization.modelopt import calibration_set, quantize_with_modelopt
from tests.doubles.checkpoints import make_drafter, make_target
from tests.doubles.family_checkpoints import make_qwen3_moe
from tests.doubles.formats import widen

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
    bundle = build(str(target), str(drafter), out, engine="torch", precision=Precision(target="fp32"))
    graph, count = Graph(bundle.path / "target.onnx", torch.device("cpu")), TOKENS.shape[1]
    engine = TorchRunner(graph, slots=1, prefill_chunk=1, block_size=count, stream=HostStream())
    feeds = {"tokens": TOKENS.numpy(), "start": np.array([0]), "rows": np.arange(count)[None]}
    return engine.run(DECODE, feeds)["logits"][0].numpy()


def dequantized(tensors: dict[str, torch.Tensor], layer: str, shape: tuple[int, ...]) -> Floats:
    """A layer in E2M1 as Model Optimizer itself widens it."""
    packed, options = tensors[f"{layer}.weight"], {"scale": tensors[f"{layer}.weight_scale"]}
    if (second := tensors.get(f"{layer}.weight_scale_2")) is None:
        made = MXFP4QTensor(shape, torch.float32, packed)
        return made.dequantize(torch.float32, **options, block_sizes={-1: 32}).numpy()
    made = NVFP4QTensor(shape, torch.float32, packed)
    return made.dequantize(torch.float32, **options, double_scale=second, block_sizes={-1: 16}).numpy()


# Model Optimizer's configurations: the algorithm of the file, and how far logits may be from its simulation's, in parts
# of their length: by rounding to the other side in some places, and scales that the export makes fused layers
# share. None where it simulates nothing on a CPU, or moves factors into norms.
CONFIGS: dict[str, tuple[str, float | None]] = {
    "FP8_DEFAULT_CFG": ("FP8", 0.02),
    "FP8_PER_CHANNEL_PER_TOKEN_CFG": ("FP8_PER_CHANNEL_PER_TOKEN", 0.02),
    "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG": ("FP8_PB_WO", 0.02),
    "INT4_AWQ_CFG": ("W4A16_AWQ", None),
    "NVFP4_DEFAULT_CFG": ("NVFP4", None),
    "W4A16_NVFP4_CFG": ("W4A16_NVFP4", None),
    "MXFP4_MLP_WEIGHT_ONLY_CFG": ("MXFP4", None),
}


class Export(NamedTuple):
    """A file of a configuration, the weights that Model Optimizer rounds to, and its logits."""

    config: str
    path: Path
    weights: dict[str, Floats]
    logits: Floats | None

    def widened(self, layer: str) -> Floats | None:
        """A layer as we read it."""
        checkpoint = Checkpoint(self.path)
        stored = stored_linear(checkpoint, layer, HIDDEN, outputs(layer))
        if stored is None:
            return None
        assert (stored.input_scale is not None) == (self.config in ("FP8_DEFAULT_CFG", "NVFP4_DEFAULT_CFG"))
        awq = self.config == "INT4_AWQ_CFG" and layer.endswith(("o_proj", "down_proj"))
        assert (stored.pre_quant_scale is not None) == awq
        return widen(checkpoint, stored)


@pytest.fixture(scope="module", params=CONFIGS)
def export(
    request: pytest.FixtureRequest, pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Export:
    out = tmp_path_factory.mktemp("exported") / "target"
    return Export(request.param, out, *exported(pair[0], out, request.param))


def test_weights_are_read_to_the_same_numbers(export: Export, pair: tuple[Path, Path]) -> None:
    original, checkpoint = Checkpoint(pair[0]), Checkpoint(export.path)
    assert checkpoint.quantization.name == CONFIGS[export.config][0]
    tensors = load_file(export.path / "model.safetensors")
    for layer in LAYERS:
        found = export.widened(layer)
        assert (found is None) == (export.config.startswith("MXFP4_MLP") and "self_attn" in layer)
        if found is None:
            continue
        if "FP4" in export.config:
            np.testing.assert_array_equal(found, dequantized(tensors, layer, (outputs(layer), HIDDEN)))
        elif layer.endswith(("o_proj", "down_proj")):
            np.testing.assert_allclose(found, export.weights[layer], rtol=1e-6, atol=1e-9)
        else:  # the export makes these layers share scales, and moves AWQ's factors into the preceding norm
            norm = "input_layernorm" if "self_attn" in layer else "post_attention_layernorm"
            norm = f"{layer.rpartition('.')[0].rpartition('.')[0]}.{norm}.weight"
            whole, w = (
                found * (checkpoint.array(norm) / original.array(norm)),
                original.array(f"{layer}.weight"),
            )
            assert np.linalg.norm(whole - w) < (0.15 if "INT4" in export.config else 0.03) * np.linalg.norm(w)


def test_logits_are_those_of_model_optimizer(export: Export, pair: tuple[Path, Path], tmp_path: Path) -> None:
    ours, nearest = logits_of(export.path, pair[1], tmp_path / "bundle"), CONFIGS[export.config][1]
    assert np.isfinite(ours).all()
    if nearest is not None:
        assert export.logits is not None
        plain, expected = logits_of(pair[0], pair[1], tmp_path / "plain"), export.logits
        assert np.linalg.norm(ours - expected) < nearest * np.linalg.norm(expected)
        assert np.linalg.norm(ours - expected) < np.linalg.norm(plain - expected) / 2


@pytest.mark.parametrize("export", ["FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG"], indirect=True)
def test_blocks_may_have_scales_with_two_axes(export: Export, tmp_path: Path) -> None:
    """Published files of NVIDIA have weight_scale_inv with two axes where the exporter writes four."""
    copytree(export.path, tmp_path / "published")
    tensors = {
        key.replace("weight_scale", "weight_scale_inv"): x.squeeze(3).squeeze(1) if x.ndim == 4 else x
        for key, x in load_file(export.path / "model.safetensors").items()
    }
    save_file(tensors, tmp_path / "published" / "model.safetensors", metadata={"format": "pt"})
    for layer in LAYERS:
        found = export._replace(path=tmp_path / "published").widened(layer)
        np.testing.assert_array_equal(found, export.widened(layer))


WITHOUT_DATA = {"FP8_PER_CHANNEL_PER_TOKEN_CFG": "fp8", "W4A16_NVFP4_CFG": "nvfp4"}


@pytest.mark.parametrize("export", WITHOUT_DATA, indirect=True)
def test_quantizing_without_data_gives_the_same_bytes(
    export: Export, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    theirs, ours = (
        Checkpoint(each)
        for each in (export.path, quantize(pair[0], tmp_path / "ours", WITHOUT_DATA[export.config]))
    )
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


EXPERT_CONFIGS = [name for name in CONFIGS if "BLOCKWISE" not in name and "INT4" not in name]


@pytest.mark.parametrize("config", EXPERT_CONFIGS)
def test_experts_are_read_to_the_same_numbers(moe: tuple[Path, Path], tmp_path: Path, config: str) -> None:
    weights, expected = exported(moe[0], tmp_path / "exported", config)
    tensors = load_file(tmp_path / "exported" / "model.safetensors")
    for layer, w in experts_of(Checkpoint(tmp_path / "exported")).items():
        if "FP4" in config:
            np.testing.assert_array_equal(w, dequantized(tensors, layer, w.shape))
        else:  # its export divides where its simulation multiplies, so a tie may fall to the other side
            assert (~np.isclose(w, weights[layer], rtol=1e-6, atol=1e-9)).mean() < 1e-3
    ours = logits_of(tmp_path / "exported", moe[1], tmp_path / "bundle")
    assert np.isfinite(ours).all()
    if expected is not None:
        plain = logits_of(moe[0], moe[1], tmp_path / "plain")
        assert np.linalg.norm(ours - expected) < 0.03 * np.linalg.norm(expected)
        assert np.linalg.norm(ours - expected) < np.linalg.norm(plain - expected) / 2


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
    bundle = build(str(kept), str(moe[1]), tmp_path / "bundle", engine="torch")
    assert bundle.manifest["quantization"]["target"] == "FP8"
    for scheme, exclude, message in (
        ("int4", [], "cannot export experts from AWQ"),
        ("fp8", ["*.experts.*.up_proj"], "quantizes gate and up as one"),
    ):
        with pytest.raises(BuildError, match=message):
            quantize_with_modelopt(moe[0], tmp_path / "out", scheme, prompts, exclude=exclude)
    assert not (tmp_path / "out").exists()
