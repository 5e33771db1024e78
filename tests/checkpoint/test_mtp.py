"""The drafter in a target's own checkpoint: what is read of it, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_trt.building.build import build
from dflash_trt.building.sources import find_sources
from dflash_trt.checkpoint.mtp import own_drafter
from dflash_trt.checkpoint.quantization import read_quantization
from dflash_trt.cli import main
from dflash_trt.errors import CheckpointError
from dflash_trt.quantization.convert import quantize
from tests.doubles.checkpoints import make_target, write_json
from tests.doubles.hybrid_checkpoints import make_hybrid

Tensors = dict[str, torch.Tensor]
LAYERS = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASH_TRT_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return make_hybrid(tmp_path / "target", prediction=True, **LAYERS)


def change(directory: Path, of_tensors: Callable[[Tensors], Tensors], **fields: Any) -> None:
    file, config = directory / "model.safetensors", directory / "config.json"
    save_file(of_tensors(load_file(file)), file, metadata={"format": "pt"})
    write_json(config, json.loads(config.read_text()) | fields)


def of_drafter(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name.startswith("mtp.")}


def same(found: Tensors, expected: Tensors) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[n], expected[n]) for n in found)


@pytest.mark.parametrize("prefix", ["", "model.", "language_model."])
def test_the_drafter_has_the_tensors_of_its_name(prefix: str, target: Path) -> None:
    expected = of_drafter(load_file(target / "model.safetensors"))
    change(target, lambda tensors: {prefix * n.startswith("mtp.") + n: t for n, t in tensors.items()})
    found = own_drafter(target)
    assert same(load_file(found / "model.safetensors"), expected)
    assert own_drafter(target) == found
    assert [path.name for path in own_drafter(target, weights=False).iterdir() if "safe" in path.name] == []
    build(str(target), "mtp", target.parent / "bundle", max_seq_len=64)


def test_a_changed_checkpoint_has_another_drafter(target: Path) -> None:
    before = own_drafter(target)
    change(target, lambda tensors: tensors | {"mtp.norm.weight": torch.ones(64)})
    assert own_drafter(target) != before


def test_the_dtype_in_the_file_says_whether_the_drafter_is_quantized(target: Path, tmp_path: Path) -> None:
    """Model Optimizer leaves its layers in floating point without saying so."""
    plain = load_file(target / "model.safetensors")
    quantized = quantize(target, tmp_path / "quantized", "fp8")
    drafter = own_drafter(quantized)
    assert read_quantization(drafter).name == read_quantization(quantized).name
    assert "mtp.fc.weight_scale" in load_file(drafter / "model.safetensors")
    build(str(quantized), "mtp", tmp_path / "fp8", max_seq_len=64)
    change(
        quantized,
        lambda tensors: {n: t for n, t in tensors.items() if not n.startswith("mtp.")} | of_drafter(plain),
    )
    drafter = own_drafter(quantized)
    assert read_quantization(drafter).name is None
    assert same(load_file(drafter / "model.safetensors"), of_drafter(plain))
    build(str(quantized), "mtp", tmp_path / "float", max_seq_len=64)


@pytest.mark.parametrize(
    ("of_tensors", "fields", "message"),
    [
        (
            lambda tensors: {n: t for n, t in tensors.items() if not n.startswith("mtp.")},
            {},
            r"target: has no tensor mtp\.fc\.weight, .* give another drafter",
        ),
        (
            lambda tensors: {n: t for n, t in tensors.items() if n != "mtp.norm.weight"},
            {},
            "has no tensor 'mtp.norm.weight'",
        ),
        (
            lambda tensors: tensors | {"mtp.layers.1.input_layernorm.weight": torch.ones(64)},
            {},
            r"not part of the architecture .* mtp\.layers\.1\.input_layernorm\.weight",
        ),
        (
            lambda tensors: tensors | {"mtp.fc.weight": torch.ones(64, 64)},
            {},
            r"'mtp\.fc\.weight' has shape \[64, 64\], but by config.json it has \[64, 128\]",
        ),
        (
            dict,
            {"mtp_num_hidden_layers": 2},
            r"target/config.json: mtp_num_hidden_layers is 2, but 1 is supported alone",
        ),
        (dict, {"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings is true, but false is"),
    ],
)
def test_what_is_not_supported_is_named(
    of_tensors: Callable[[Tensors], Tensors], fields: dict[str, Any], message: str, target: Path
) -> None:
    change(target, of_tensors, **fields)
    with pytest.raises(CheckpointError, match=message):
        build(str(target), "mtp", target.parent / "bundle")


def test_a_family_without_such_layers_is_named(tmp_path: Path) -> None:
    target = make_target(tmp_path / "target")
    with pytest.raises(CheckpointError, match=r"model_type is .qwen3., but --drafter mtp is for"):
        build(str(target), "mtp", tmp_path / "bundle")


def test_commands_say_what_a_checkpoint_has(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pairs", str(target)]) == 0
    assert "in its checkpoint  --drafter mtp" in capsys.readouterr().out
    find_sources(str(target), None, "copy")
    assert "--drafter mtp takes that in its checkpoint" in capsys.readouterr().err
    assert main(["pairs", "qwen3.8-27b"]) == 0
    assert "--drafter mtp" in capsys.readouterr().out
