"""Quantize checkpoints and build with them: results, refusals, and remains of interruptions."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from dflash_trt import LLM, SamplingParams
from dflash_trt.building.build import build
from dflash_trt.checkpoint.linears import stored_linear
from dflash_trt.checkpoint.tensors import Checkpoint
from dflash_trt.cli import main
from dflash_trt.errors import BuildError, CheckpointError, DFlashError
from dflash_trt.formats import SCHEMES
from dflash_trt.formats.precision import parse_precision
from dflash_trt.graph import onnxruntime as functions
from dflash_trt.quantization.convert import quantize
from dflash_trt.reports.inspection import inspect
from tests.doubles.formats import widen
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
    with pytest.raises(
        CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight' has numbers that are not finite"
    ):
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
