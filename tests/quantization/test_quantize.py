"""Quantize checkpoints and build with them: results, refusals, and FP8 in blocks widened."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from dflash_trt import LLM, SamplingParams
from dflash_trt.building.build import build
from dflash_trt.bundle.manifest import digest
from dflash_trt.bundle.workspace import silent
from dflash_trt.checkpoint.linears import stored_linear
from dflash_trt.checkpoint.tensors import Checkpoint
from dflash_trt.cli import main
from dflash_trt.errors import BuildError, CheckpointError, DFlashError
from dflash_trt.formats import SCHEMES
from dflash_trt.formats.precision import Precision, parse_precision
from dflash_trt.graph import onnxruntime as functions
from dflash_trt.quantization.convert import quantize
from dflash_trt.quantization.repack import in_bf16
from dflash_trt.reports.inspection import inspect
from dflash_trt.trtllm import TensorRTLLMOptions
from tests.doubles.checkpoints import make_drafter, make_target
from tests.doubles.formats import in_fp8_blocks, split, widen
from tests.doubles.quantized_checkpoints import write_safetensors
from tests.quantization.test_downloaded import moe

__all__ = ["moe"]

TINY = Path(functions.__file__).parent.parent / "shipped" / "tiny"
ERRORS = {"fp8": 0.03, "nvfp4": 0.1, "mxfp4": 0.12, "int8": 0.01, "int4": 0.13}


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The shipped target in every scheme, including its head."""
    folder = tmp_path_factory.mktemp("quantized")
    return {scheme: quantize(TINY / "target", folder / scheme, scheme, head=scheme) for scheme in SCHEMES}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_layer_is_near_its_original(quantized: dict[str, Path], scheme: str) -> None:
    original, found = Checkpoint(TINY / "target"), Checkpoint(quantized[scheme])
    count = 0
    for name, tensor in original.tensors.items():
        layer = name.removesuffix(".weight")
        stored = stored_linear(found, layer, *tensor.shape[::-1]) if len(tensor.shape) == 2 else None
        if "embed" in name or stored is None:
            np.testing.assert_array_equal(found.array(name), original.array(name))
            continue
        w = original.array(name).astype(np.float32)
        assert np.linalg.norm(widen(found, stored) - w) < ERRORS[scheme] * np.linalg.norm(w)
        count += 1
    assert count == 70
    head = stored_linear(found, "lm_head", 192, 2048)
    assert head is not None
    table = original.array("model.embed_tokens.weight").astype(np.float32)
    assert np.linalg.norm(widen(found, head) - table) < ERRORS[scheme] * np.linalg.norm(table)
    assert json.loads((quantized[scheme] / "config.json").read_text())["tie_word_embeddings"] is False
    assert inspect(quantized[scheme])["parameters"] == inspect(TINY / "target")["parameters"] + 192 * 2048


def test_fused_layers_share_their_scales(quantized: dict[str, Path]) -> None:
    found = Checkpoint(quantized["nvfp4"])
    scales = [found.array(f"model.layers.0.self_attn.{n}_proj.weight_scale_2").item() for n in "qkv"]
    assert len(set(scales)) == 1
    assert scales[0] != found.array("model.layers.0.self_attn.o_proj.weight_scale_2").item()


def test_config_json_says_the_same_as_hf_quant_config(quantized: dict[str, Path], tmp_path: Path) -> None:
    for scheme, path in quantized.items():
        copy = tmp_path / scheme
        shutil.copytree(path, copy)
        (copy / "hf_quant_config.json").unlink()
        first, second = Checkpoint(path).quantization, Checkpoint(copy).quantization
        assert (first.default, first.layers, first.rules) == (second.default, second.layers, second.rules)


def test_layers_and_head_of_different_schemes(tmp_path: Path) -> None:
    out = quantize(TINY / "target", tmp_path / "out", "nvfp4", exclude=["model.layers.0.*"], head="fp8")
    found = Checkpoint(out).quantization
    assert found.name == "FP8_PER_CHANNEL_PER_TOKEN, NVFP4"
    assert found.algorithm("model.layers.0.mlp.up_proj") is None
    schemes = [found.algorithm(name) for name in ("lm_head", "model.layers.1.mlp.up_proj")]
    assert [a and a.scheme for a in schemes] == ["fp8", "nvfp4"]


def test_excluding_experts(moe: tuple[Path, Path], tmp_path: Path) -> None:
    kept = quantize(moe[0], tmp_path / "kept", "nvfp4", exclude=["*.experts.*"])
    downs = quantize(moe[0], tmp_path / "downs", "nvfp4", exclude=["*.experts.*.down_proj"])
    layer = "model.layers.1.mlp.experts.3"
    for path, expected in ((kept, [None, None]), (downs, ["NVFP4", None])):
        found = Checkpoint(path).quantization
        named = [found.algorithm(f"{layer}.{name}_proj") for name in ("up", "down")]
        assert [a and a.name for a in named] == expected
        assert found.algorithm("model.layers.1.self_attn.q_proj") is not None
        assert len(found.layers) + len(found.rules) < 8
        build(str(path), str(moe[1]), tmp_path / f"{path.name}-bundle")
    w = Checkpoint(moe[0]).array(f"{layer}.up_proj.weight").astype(np.float32)
    stored = stored_linear(Checkpoint(downs), f"{layer}.up_proj", *w.shape[::-1])
    assert stored is not None
    assert np.linalg.norm(widen(Checkpoint(downs), stored) - w) < ERRORS["nvfp4"] * np.linalg.norm(w)
    with pytest.raises(BuildError, match=r"matches some of model\.layers\.1\.mlp\.experts\.\*\.down_proj"):
        quantize(moe[0], tmp_path / "out", "nvfp4", exclude=[f"{layer}.*"])


@pytest.mark.parametrize(
    "precision", ["target=nvfp4,drafter=fp8,head=int4", "target=int4,drafter=mxfp4,head=fp8"]
)
def test_bundles_are_quantized_on_the_way(tmp_path: Path, precision: str) -> None:
    asked = parse_precision(precision)
    bundle = build("tiny", None, tmp_path / "bundle", precision=asked)
    found = inspect(bundle.path)["quantization"]
    named = {"int4": "W4A16_AWQ"}  # others are widened
    roles = {role: named.get(asked.scheme(role) or "") for role in ("target", "drafter", "head")}
    assert found == {**roles, "cache": None}
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]
    key = bundle.manifest["key"]
    assert build("tiny", None, tmp_path / "bundle", precision=asked).manifest["key"] == key
    with LLM(bundle.path) as llm:
        prompt = llm.chat_prompt([{"role": "user", "content": "What is 17 + 25?"}])
        params = SamplingParams(max_tokens=24)
        drafted = llm.generate(prompt, params, block_length=8)
        plain = llm.generate(prompt, params, speculate=False)
    assert drafted.token_ids == plain.token_ids
    assert drafted.statistics.mean_acceptance_length > 2


def _sharded(directory: Path) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    names = [f"layers.{i}.mlp.up_proj.weight" for i in (0, 1)]
    random = np.random.default_rng(0)
    for i, name in enumerate(names, start=1):
        w = random.standard_normal((8, 64)).astype(ml_dtypes.bfloat16)
        write_safetensors(directory / f"model-{i}.safetensors", {name: w})
    weight_map = {name: f"model-{i}.safetensors" for i, name in enumerate(names, start=1)}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_refused(tmp_path: Path, value: float) -> None:
    source = _sharded(tmp_path / "source")
    w = np.ones((8, 64), np.float32)
    w[7, 63] = value
    write_safetensors(source / "model-2.safetensors", {"layers.1.mlp.up_proj.weight": w})
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight' has .* not finite"):
        quantize(source, tmp_path / "out", "nvfp4")
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_quantized_is_refused(tmp_path: Path, quantized: dict[str, Path]) -> None:
    out = tmp_path / "out"
    target, drafter = TINY / "target", TINY / "drafter"
    cases: list[tuple[str, Any]] = [
        ("the checkpoint is already NVFP4", lambda: quantize(quantized["nvfp4"], out, "fp8")),
        ("matches no linear layer", lambda: quantize(target, out, "fp8", exclude=["model.layer.*"])),
        ("a drafter uses its target's", lambda: quantize(drafter, out, "fp8", head="fp8")),
        ("no linear layer to quantize", lambda: quantize(target, out, "fp8", exclude=["*"])),
        ("int8: is there already", lambda: quantize(target, quantized["int8"], "int8")),
        ("--scheme is 'int3', expected one of", lambda: quantize(target, out, "int3")),
        (
            "is already nvfp4",
            lambda: build(
                str(quantized["nvfp4"]), str(drafter), out, precision=parse_precision("target=fp8")
            ),
        ),
        (
            "already has a quantized LM head",
            lambda: build(str(quantized["fp8"]), str(drafter), out, precision=parse_precision("head=fp8")),
        ),
    ]
    for message, call in cases:
        with pytest.raises(DFlashError, match=message) as error:
            call()
        assert "\n" not in str(error.value)
        assert not out.exists()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "drafter"
    assert main(["quantize", "tiny", "--role", "drafter", "--scheme", "nvfp4", "--out", str(out)]) == 0
    assert "drafter, NVFP4" in capsys.readouterr().out
    for source, scheme, said in (
        (str(TINY / "drafter"), "fp8", "--calibration is for targets"),
        ("tiny", "int8", "quantizes weights only"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(
                [
                    "quantize",
                    source,
                    "--scheme",
                    scheme,
                    "--out",
                    str(tmp_path / "x"),
                    "--calibration",
                    "shipped",
                ]
            )
        assert ended.value.code == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"quant_algo": "W8A8_SQ_PER_CHANNEL"}, 'quant_algo is "W8A8_SQ_PER_CHANNEL", supported are: FP8, '),
        ({"quant_algo": "NVFP4", "group_size": 32}, "group_size is 32, but NVFP4 is read with 16"),
        ({"quant_algo": "W4A16_AWQ", "group_size": 96}, "group_size is 96, but W4A16_AWQ is read with"),
        ({"quant_algo": "FP8", "kv_cache_quant_algo": "NVFP4"}, 'kv_cache_quant_algo is "NVFP4"'),
        ({"quant_algo": "MIXED_PRECISION"}, "quantized_layers is missing"),
        ({"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "INT8"}}}, "INT8"),
        ({"quant_algo": 4}, "quant_algo is 4, expected a string"),
    ],
)
def test_configurations_that_are_not_read_are_refused(
    tmp_path: Path, said: dict[str, Any], message: str
) -> None:
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": said}))
    write_safetensors(tmp_path / "model.safetensors", {"a": np.zeros(1, np.float32)})
    with pytest.raises(CheckpointError) as error:
        Checkpoint(tmp_path)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    root = tmp_path_factory.mktemp("blocks")
    make_drafter(root / "drafter", make_target(root / "plain"), layers=1)
    in_fp8_blocks(root / "plain", root / "target", size=16)
    return root, load_file(root / "plain" / "model.safetensors")


@pytest.mark.parametrize("shards", [1, 2])
def test_widened_weights_are_those_of_transformers(
    pair: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, shards: int
) -> None:
    root, original = pair
    stored = load_file(root / "target" / "model.safetensors")
    shutil.copytree(root / "target", tmp_path / "target")
    if shards > 1:
        split(tmp_path / "target", shards)
    out = tmp_path / "bf16"
    assert len(in_bf16(Checkpoint(tmp_path / "target"), out, silent).files) == shards
    made = {name: tensor for file in out.glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert made.keys() == original.keys()
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    read: Any = Fp8Dequantize(None)
    for name, tensor in made.items():
        if name.endswith("proj.weight"):
            scales = stored[f"{name}_scale_inv"]
            assert torch.equal(tensor, read._dequantize_one(stored[name], scales, torch.bfloat16)), name
            assert torch.allclose(tensor.float(), original[name].float(), rtol=0.07, atol=1e-3), name
        else:
            assert torch.equal(tensor, original[name]), name


def test_blocks_of_model_optimizer_are_widened_without_scales_of_the_cache(tmp_path: Path) -> None:
    said = {"quantization": {"quant_algo": "fp8_pb_wo", "kv_cache_quant_algo": "FP8"}}
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(said))
    codes, scale = torch.ones(256, 128).to(torch.float8_e4m3fn), torch.tensor([0.5, 2.0]).reshape(2, 1, 1, 1)
    tensors = {"a.weight": codes, "a.weight_scale": scale, "a.k_scale": torch.ones(1)}
    save_file(tensors, tmp_path / "model.safetensors")
    out = in_bf16(Checkpoint(tmp_path), tmp_path / "bf16", silent).directory
    found = load_file(out / "model.safetensors")
    assert found.keys() == {"a.weight"}
    assert found["a.weight"][:, 0].tolist() == [0.5] * 128 + [2.0] * 128


def test_the_last_blocks_may_be_smaller(tmp_path: Path) -> None:
    tmp_path.joinpath("config.json").write_text(
        json.dumps({"quantization_config": {"quant_method": "fp8", "weight_block_size": [4, 3]}})
    )
    codes = torch.arange(1, 71).reshape(10, 7).to(torch.float8_e4m3fn)
    scales = torch.arange(1, 10).reshape(3, 3).to(torch.bfloat16)
    save_file({"a.weight": codes, "a.weight_scale_inv": scales}, tmp_path / "model.safetensors")
    out = in_bf16(Checkpoint(tmp_path), tmp_path / "bf16", silent).directory
    found = load_file(out / "model.safetensors")["a.weight"].float()
    for row, column in np.ndindex(10, 7):
        assert found[row, column] == codes[row, column].float() * (1 + 3 * (row // 4) + column // 3)


def test_a_build_for_the_cpu_widens_the_blocks(pair: tuple[Path, Any], tmp_path: Path) -> None:
    """All other engines have the checkpoint's bytes."""
    root, _ = pair
    sources = str(root / "target"), str(root / "drafter")
    bundle, kept = build(*sources, tmp_path / "a"), build(*sources, tmp_path / "b", engine="torch")
    name = "weights/target/model.safetensors"
    assert kept.manifest["files"][name]["sha256"] == digest(root / "target" / "model.safetensors")
    widened = in_bf16(Checkpoint(root / "target"), tmp_path / "bf16", silent).directory
    assert bundle.manifest["files"][name]["sha256"] == digest(widened / "model.safetensors")
    with LLM(bundle.path) as llm:
        params = SamplingParams(max_tokens=24, ignore_eos=True)
        answers = [llm.generate([3, 5, 7, 11], params, speculate=s).token_ids for s in (True, False)]
    assert answers[0] == answers[1]
    assert build(*sources, tmp_path / "c", weights="none").manifest["target"]["parameters"] > 0
    with pytest.raises(CheckpointError, match="already FP8 in blocks"):
        quantize(root / "target", tmp_path / "q", "int4")
    again = build(*sources, tmp_path / "e", precision=Precision(target="int8"))
    assert "U8" in again.manifest["target"]["weight_bytes"]["mlp"]
    with pytest.raises(CheckpointError, match=r"weight_block_size is \[16, 16\].*\[128, 128\]"):
        build(*sources, tmp_path / "d", engine="tensorrt-llm", options=TensorRTLLMOptions(gpu="h200"))
