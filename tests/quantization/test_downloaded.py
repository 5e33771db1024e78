"""Checkpoints as other programs write them: the same numbers as these read, and tokens that no draft changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from compressed_tensors.compressors.pack_quantized import unpack_from_int32
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from dflash_trt import LLM, SamplingParams
from dflash_trt.building.build import build
from dflash_trt.bundle.manifest import digest
from dflash_trt.bundle.workspace import silent
from dflash_trt.checkpoint.linears import stored_linear
from dflash_trt.checkpoint.tensors import Checkpoint
from dflash_trt.engines.onnxruntime import products
from dflash_trt.engines.torch.program import Graph
from dflash_trt.errors import CheckpointError
from dflash_trt.formats.precision import Precision
from dflash_trt.graph.builder import FLOAT, GraphBuilder
from dflash_trt.graph.quantized import QuantizedLinear
from dflash_trt.graph.torch import Torch
from dflash_trt.quantization.repack import in_blocks, int4_by_row
from tests.doubles.checkpoints import make_drafter, make_target
from tests.doubles.family_checkpoints import make_qwen3_moe
from tests.doubles.formats import (
    COMPRESSED,
    FP8_BLOCKS,
    WORDS,
    compressed,
    group,
    numbers,
    read_numbers,
    stored_as,
    widen,
)
from tests.doubles.text_checkpoints import EXPERTS as EXPERT_FIELDS
from tests.doubles.text_checkpoints import GEMMA_IMAGES, make_gemma, split_experts

PROMPT = [3, 5, 7, 11, 13]
# Mixed as Qwen3.8-27B-NVFP4 is: two expressions match the same layers, and the one that sorts first decides.
MIXED = {
    "group_0": {
        "targets": [r"re:.*mlp\.(gate|up|down)_proj$", r"re:.*self_attn\.(q|k|v|o)_proj$"],
        "weights": numbers("float", 4, strategy="tensor_group", group_size=16),
    },
    "group_1": {
        "targets": [r"re:.*layers\.1\.mlp\.(gate|up|down)_proj$", "model.layers.0.self_attn.o_proj"],
        "weights": numbers("float", 8, strategy="channel"),
        "input_activations": numbers("float", 8, strategy="token", dynamic=True),
    },
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("downloaded")
    target = make_target(folder / "target", hidden=128, head_dim=32, intermediate=256, layers=2, favourites=6)
    return target, make_drafter(folder / "drafter", target, taps=(0, 1), layers=1)


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("experts")
    sizes = {
        "hidden_size": 128,
        "moe_intermediate_size": 128,
        "num_hidden_layers": 2,
        "head_dim": 32,
        "intermediate_size": 128,
    }
    target = make_qwen3_moe(folder / "target", favourites=6, decoder_sparse_step=2, **sizes)
    return target, make_drafter(folder / "drafter", target, taps=(0, 1), layers=1)


def written(name: str, source: Path, out: Path) -> dict[str, np.ndarray]:
    """A checkpoint, and the numbers of its layers as their writer reads them."""
    if name == "mixed":
        found = compressed(source, out, {"config_groups": MIXED})
        return {layer: weight.float().numpy() for layer, weight in found.items()}
    return stored_as(name, source, out)


@pytest.mark.parametrize("name", ["mixed", "W4A16_ASYM", "MXFP4A16", "GPTQ 2, ordered", "AWQ"])
def test_weights_are_those_of_their_writer(pair: tuple[Path, Path], tmp_path: Path, name: str) -> None:
    """Bit for bit, also after each pass; compressed-tensors rounds its products to BF16."""
    theirs, original = written(name, pair[0], tmp_path / "q"), Checkpoint(tmp_path / "q")
    for checkpoint in (
        original,
        in_blocks(original, tmp_path / "blocks", silent),
        in_blocks(original, tmp_path / "eight", silent, eight_bits=True),
        int4_by_row(original, tmp_path / "signed", silent),
    ):
        weights = {layer: checkpoint.tensors.get(f"{layer}.weight") for layer in theirs}
        found = read_numbers(checkpoint) | {
            layer: checkpoint.array(info.name).astype(np.float32)
            for layer, info in weights.items()
            if info is not None and info.dtype == "BF16"
        }
        assert found.keys() == theirs.keys()
        for layer, w in found.items():
            if (
                checkpoint.directory.name == "signed" and name != "mixed"
            ):  # q - 8 and the zero point's part are rounded apart
                np.testing.assert_allclose(w, theirs[layer], rtol=2**-8, atol=1e-6)
            elif name in WORDS:
                np.testing.assert_array_equal(w, theirs[layer])
            else:
                np.testing.assert_array_equal(torch.from_numpy(w).bfloat16().float(), theirs[layer])


@pytest.mark.parametrize("name", ["W4A16_ASYM", "mixed", "W8A8", "GPTQ 2, ordered"])
def test_drafts_change_no_token(pair: tuple[Path, Path], tmp_path: Path, name: str) -> None:
    written(name, pair[0], tmp_path / "q")
    bundle = build(str(tmp_path / "q"), str(pair[1]), tmp_path / "bundle")
    answers_agree(bundle.path)


def test_scales_of_outputs_stay_where_that_is_faster(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "channels_pay", lambda: True)
    written("W8A8", pair[0], tmp_path / "q")
    bundle = build(str(tmp_path / "q"), str(pair[1]), tmp_path / "bundle")
    assert bundle.manifest["exact_bytes"]
    file = bundle.manifest["files"]["weights/target/model.safetensors"]
    assert file["sha256"] == digest(tmp_path / "q" / "model.safetensors")


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """With a tied embedding, experts beside the MLP, and a vision tower."""
    folder = tmp_path_factory.mktemp("gemma")
    sizes = {
        "hidden_size": 128,
        "intermediate_size": 128,
        "head_dim": 32,
        "global_head_dim": 64,
        "num_hidden_layers": 2,
    }
    experts = EXPERT_FIELDS | {"moe_intermediate_size": 128}
    target = split_experts(make_gemma(folder / "target", GEMMA_IMAGES, favourites=6, **sizes, **experts))
    return target, make_drafter(folder / "drafter", target, taps=(0, 1), layers=1)


def test_gemma_of_compressed_tensors(gemma: tuple[Path, Path], tmp_path: Path) -> None:
    config = {"config_groups": COMPRESSED["NVFP4"], "ignore": ["re:.*router.*", "re:.*vision.*"]}
    theirs = compressed(gemma[0], tmp_path / "q", config)
    found = read_numbers(Checkpoint(tmp_path / "q"))
    assert sum(".experts." in layer for layer in theirs) == 2 * 3 * 5
    for layer, weight in theirs.items():
        np.testing.assert_allclose(found[layer], weight.float().numpy(), rtol=2**-8, atol=1e-6)
    answers_agree(build(str(tmp_path / "q"), str(gemma[1]), tmp_path / "bundle").path)


def test_gemma_in_int8(gemma: tuple[Path, Path], tmp_path: Path) -> None:
    """ONNX Runtime's head is a copy of the embedding."""
    answers_agree(build(*map(str, gemma), tmp_path / "bundle", precision=Precision(target="int8")).path)


def answers_agree(bundle: Path) -> None:
    with LLM(bundle) as llm:
        params = SamplingParams(max_tokens=24, ignore_eos=True)
        drafted, plain = (llm.generate(PROMPT, params, speculate=s).token_ids for s in (True, False))
    assert len(drafted) == 24
    assert drafted == plain


@pytest.mark.parametrize("name", ["FP8_DYNAMIC", "mixed"])
def test_tokens_are_those_of_transformers(pair: tuple[Path, Path], tmp_path: Path, name: str) -> None:
    """Transformers runs the same checkpoint with compressed-tensors. Both round the inputs of these formats alike."""
    written(name, pair[0], tmp_path / "q")
    theirs = in_transformers(tmp_path / "q")
    with torch.no_grad():
        ids = theirs.generate(torch.tensor([PROMPT]), max_new_tokens=16, do_sample=False, eos_token_id=None)
    sources = str(tmp_path / "q"), str(pair[1])
    bundle = build(*sources, tmp_path / "bundle", engine="torch", precision=Precision(target="fp32"))
    with LLM(bundle.path) as llm:
        found = llm.generate(PROMPT, SamplingParams(max_tokens=16, ignore_eos=True)).token_ids
    assert list(found) == ids[0, len(PROMPT) :].tolist()


def in_transformers(checkpoint: Path) -> Any:
    """The model with compressed-tensors, in float32."""
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    model(torch.tensor([PROMPT]))  # widens the weights, to their scales' dtype
    return torch.nn.Module.float(model)


@pytest.mark.parametrize("name", ["FP8", "FP8_DYNAMIC", "NVFP4"])
def test_inputs_are_rounded_as_compressed_tensors_rounds_them(
    pair: tuple[Path, Path], tmp_path: Path, name: str
) -> None:
    """One layer: in a whole model, a number that falls to the other side changes all after it. The package rounds
    widened weights to BF16.
    """
    written(name, pair[0], tmp_path / "q")
    stored = stored_linear(Checkpoint(tmp_path / "q"), UP, 128, 256)
    assert stored is not None
    g, x = GraphBuilder("layer"), torch.randn(9, 128, generator=torch.Generator().manual_seed(0))
    layer = QuantizedLinear(name="up", stored=stored, folder=".")
    y = Torch(FLOAT).quantized_linear(g, g.input("x", FLOAT, ["rows", 128]), layer)
    g.output(y, "y", FLOAT, ["rows", 256])
    ir.save(g.model(), tmp_path / "q" / "layer.onnx")
    graph = Graph(tmp_path / "q" / "layer.onnx", torch.device("cpu"))
    found = graph.first_pass({"x": x})[1]["y"].numpy()
    with torch.no_grad():
        expected = in_transformers(tmp_path / "q").get_submodule(UP)(x[None])[0].numpy()
    plain = x.numpy() @ widen(Checkpoint(tmp_path / "q"), stored).T
    assert np.linalg.norm(found - expected) < 2**-8 * np.linalg.norm(expected)
    assert np.linalg.norm(found - plain) > 1e-2 * np.linalg.norm(expected)


def test_activation_order_of_compressed_tensors(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Files of early releases give each column's group; the package no longer reads them."""
    written("W4A16", pair[0], tmp_path / "q")
    file, config = tmp_path / "q" / "model.safetensors", tmp_path / "q" / "config.json"
    tensors, expected = load_file(file), {}
    for name in [name for name in tensors if name.endswith(".weight_packed")]:
        layer = name.removesuffix(".weight_packed")
        shape = tensors[f"{layer}.weight_shape"]
        columns, scale = int(shape[1]), tensors[f"{layer}.weight_scale"].float()
        index = torch.arange(columns) // 128
        index = index[torch.randperm(columns, generator=torch.Generator().manual_seed(columns))]
        tensors[f"{layer}.weight_g_idx"] = index.to(torch.int32)
        codes = unpack_from_int32(tensors[name], 4, shape).float()
        expected[layer] = (codes * scale[:, index]).numpy()
    save_file(tensors, file, metadata={"format": "pt"})
    said = json.loads(config.read_text())
    weights = numbers(strategy="group", group_size=128, actorder="group")
    said["quantization_config"]["config_groups"] = group(weights=weights)
    config.write_text(json.dumps(said))
    original = Checkpoint(tmp_path / "q")
    for checkpoint in (original, in_blocks(original, tmp_path / "blocks", silent)):
        for layer, w in read_numbers(checkpoint).items():
            np.testing.assert_array_equal(w, expected[layer])
    answers_agree(build(str(tmp_path / "q"), str(pair[1]), tmp_path / "bundle").path)


UP = "model.layers.0.mlp.up_proj"
BROKEN: list[tuple[str, str, Any, str]] = [
    ("NVFP4", "weight_global_scale", None, r"has no tensor .*weight_global_scale"),
    ("NVFP4", "input_global_scale", None, r"has no tensor .*input_global_scale"),
    ("FP8", "input_scale", None, r"has no tensor .*input_scale"),
    ("FP8_BLOCK", "weight_scale", lambda t: t[:1], r"weight_scale' is BF16 \[1, 1\], but in FP8 it is"),
    ("W4A16_ASYM", "weight_zero_point", None, r"has no tensor .*weight_zero_point"),
    ("W4A16", "weight_shape", lambda t: t + 1, r"says \[257, 129\], but by config.json"),
    ("GPTQ", "qzeros", None, r"has no tensor .*qzeros"),
    ("GPTQ", "qzeros", lambda t: t * 0 - 1, "has a zero point of 15, which readers"),
    ("GPTQ", "g_idx", lambda t: t.flip(0), "has columns in another order, but desc_act is false"),
    ("GPTQ 2, ordered", "g_idx", lambda t: t * 0, "does not give 64 columns to each of 2 groups"),
    ("AWQ", "scales", lambda t: t.T.contiguous(), r"scales' is F16 \[256, 2\], but in AWQ it is F16"),
    (FP8_BLOCKS, "weight_scale_inv", None, "has no tensor .*weight_scale_inv"),
    (FP8_BLOCKS, "weight_scale_inv", lambda t: t[:1].clone(), r"in FP8 in blocks it is F32, .* \["),
    (
        "Model Optimizer NVFP4",
        "weight_scale_2",
        None,
        "has no tensor .*weight_scale_2', but by hf_quant_config.json",
    ),
    (
        "Model Optimizer NVFP4",
        "weight_scale",
        lambda t: t[:, :2].clone(),
        r"F8_E4M3 \[256, 2\], but in NVFP4 it",
    ),
    (
        "Model Optimizer NVFP4",
        "weight_scale_2",
        lambda t: t.repeat(2),
        r"F32 \[2\], but in NVFP4 it is F32 \[\]",
    ),
    ("Model Optimizer NVFP4, static", "input_scale", lambda t: t.half(), r"is F16 \[\], but in NVFP4 it is"),
    (
        "Model Optimizer FP8",
        "weight",
        lambda t: t.view(torch.uint8),
        r"weight' is U8 .*, but in FP8 it is F8_E4M3",
    ),
    ("Model Optimizer FP8", "input_scale", None, "input_scale', but by"),
]


@pytest.mark.parametrize(("name", "suffix", "change", "message"), BROKEN)
def test_tensors_that_do_not_fit_are_named(
    pair: tuple[Path, Path], tmp_path: Path, name: str, suffix: str, change: Any, message: str
) -> None:
    stored_as(name, pair[0], tmp_path / "q", r"mlp\.\w+_proj$")
    file = tmp_path / "q" / "model.safetensors"
    tensors = load_file(file)
    before = tensors.pop(f"{UP}.{suffix}")
    if change is not None:
        tensors[f"{UP}.{suffix}"] = change(before)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=message) as error:
        read_numbers(Checkpoint(tmp_path / "q"))
    assert str(error.value).startswith(str(tmp_path))
    assert "\n" not in str(error.value)
